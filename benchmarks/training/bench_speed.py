"""Training speed of models with Transformer Engine layers: magi and TE's context parallelism.

    torchrun --nproc-per-node 2 -m benchmarks.training.bench_speed --out DIR [--lengths 8192 32768] [--masks causal ...]

{magi, TE p2p, TE a2a, TE all-gather, on four GPUs or more TE a2a+p2p} x {one causal document, packed documents, window
with sink} x tokens a GPU, through Megatron's own trainer, all in one launch on the same GPUs, which hold one sequence
together (CP only). Figures are of steps, not of attention: milliseconds (median and quartiles of the timed steps, which
follow four that warm up), tokens/s/GPU, model TFLOP/s/GPU (6 operations a parameter and token, 12 a visible pair, head
and dimension; what is recomputed is not counted), largest memory of a rank, loss of the last step, and how many times
faster magi is than the best of TE's ways.

A setting decides over TE's figures: `--no-create-attention-mask-in-dataloader`. By default Megatron's data loader makes
a mask of seqlen^2 for each sequence and sends it through two processes and to the GPU, where TE does not look at it: at
64k tokens 4 GiB, which the loader finishes only every few seconds once the batches are used up that it had prepared
during the first, slow step.

Documents have log-normal lengths (median 1,000, sigma 1.5) in multiples of 2 * CP, as TE's ring needs them, so that TE
pads nothing. Where TE cannot do a mask its nearest equivalent runs, and the column `ran` names it:

- window with sink: p2p and a2a+p2p have neither windows nor sinks (full attention runs), all-gather has no sinks.

`magi_graph` captures forward and backward of a step in a CUDA graph, and runs where it is named. It needs
`--further "--te-rng-tracker --no-check-for-nan-in-loss-and-grad"`, which holds for the others too. TE's ways are not
captured: Megatron copies each batch to tensors of the first one's shapes, in which other documents' bounds do not fit.

`no_attention` is magi with an attention that does nothing: how fast a step would be if attention cost no time. It
trains nothing, and runs where it is named.

`--model` trains another than the Llama 1B; `llama_8b_2_layers` and `qwen3_30b_a3b_2_layers` are slices of large models
that fit two GPUs with 64k tokens each (estimated: 50 and 75 GiB).

`--profile` adds one step under torch's profiler to runs, after those that are timed: where its time goes, and how
long the device has nothing to do; rank 0 keeps its trace.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks._lib.charts.training import draw
from benchmarks._lib.llama import HEAD_DIM, MODELS, VOCABULARY, WINDOW, Model, model_args, world_size
from benchmarks._lib.no_attention import no_attention
from benchmarks._lib.provenance import write_csv
from benchmarks._lib.ranks import join_ranks
from benchmarks._lib.trainer import Training, TrainingSession

MASKS = ("causal", "documents", "window_sink")
GRAPH = ("--cuda-graph-impl", "full_iteration")
PROVIDERS = {"magi": (), "magi_graph": GRAPH, "no_attention": (), "te_p2p": ("p2p",), "te_a2a": ("a2a",),
             "te_all_gather": ("all_gather",), "te_a2a_p2p": ("a2a+p2p",)}  # fmt: skip
WINDOW_ARGS = ("--window-size", f"{WINDOW - 1},0", "--window-attn-skip-freq", "2")
SINK_ARGS = ("--softmax-type", "learnable")
NEAREST = {
    ("window_sink", "te_p2p"): ("causal", "full attention, no sink"),
    ("window_sink", "te_all_gather"): ("window", "window without sink"),
    ("window_sink", "te_a2a_p2p"): ("causal", "full attention, no sink"),
}
"""What runs where TE cannot do the mask: its mask and its name."""


WARM_UP = 4
"""Steps before those that are timed, unless `--warm-up` says otherwise."""

HEADER = ["mask", "tokens_per_gpu", "provider", "ran", "step_ms", "best_step_ms", "quarter_ms", "three_quarters_ms",
          "timed_steps", "tokens_per_s_per_gpu", "tflops_per_gpu", "peak_gib", "reserved_gib", "device_gib",
          "last_loss", "times_te_best"]  # fmt: skip


@dataclass
class Run:
    """One training and its figures.

    Attributes:
        mask: that is asked for.
        tokens_per_gpu: of a sequence.
        provider: key of `PROVIDERS`.
        model: that is trained.
        training: what was seen, on rank 0; None if it failed.
        kernels: of the profiled step, by group, milliseconds of the device.
        error: why it failed.
        warm_up: steps before those that are timed.
    """

    mask: str
    tokens_per_gpu: int
    provider: str
    model: Model = MODELS["llama_1b"]
    training: Training | None = None
    kernels: dict[str, float] = field(default_factory=dict)
    error: str = ""
    warm_up: int = WARM_UP

    @property
    def ran(self) -> tuple[str, str]:
        """The mask that ran, and a note where it is not the one asked for."""
        return NEAREST.get((self.mask, self.provider), (self.mask, self.mask))

    @property
    def is_te(self) -> bool:
        """Whether Transformer Engine attends."""
        return self.provider.startswith("te_")

    @property
    def key(self) -> tuple[int, str, str]:
        """Tokens a GPU, provider and the mask that ran: what ran once is not run again."""
        return self.tokens_per_gpu, self.provider, self.ran[0]


def run_args(run: Run) -> list[str]:
    """What the mask and the provider add."""
    masks = {
        "causal": [],
        "documents": ["--dataloader-inter-document-masking"],
        "window": [*WINDOW_ARGS],
        "window_sink": [*WINDOW_ARGS, *SINK_ARGS],
    }
    if not run.is_te:
        return [*masks[run.mask], "--attention-backend", "magi", *PROVIDERS[run.provider]]
    args = [*masks[run.ran[0]], "--cp-comm-type", *PROVIDERS[run.provider]]
    if run.provider == "te_a2a_p2p":
        args += ["--hierarchical-context-parallel-sizes", "2", str(world_size() // 2)]
    return args


def visible_pairs(run: Run, training: Training, steps: slice) -> float:
    """Visible (query, key) pairs of a sequence, summed over layers; the mean of ``steps``."""
    total = run.tokens_per_gpu * world_size()
    full = total * (total + 1) / 2
    if run.ran[0] == "documents":
        squares = [s for s in training.seqlen_squares[steps] if s]
        return run.model.layers * (statistics.mean(squares) + total) / 2 if squares else float("nan")
    if run.ran[0] == "causal":
        return run.model.layers * full
    outside = max(0, total - WINDOW)
    windowed = full - outside * (outside + 1) / 2
    return run.model.layers / 2 * (full + windowed)


def operations(run: Run, training: Training, steps: slice) -> float:
    """Floating-point operations of a step's model, forward and backward, all GPUs together."""
    total = run.tokens_per_gpu * world_size()
    attention = 12.0 * run.model.heads * HEAD_DIM * visible_pairs(run, training, steps)
    return 6.0 * run.model.parameters * total + attention


def figures(runs: Sequence[Run]) -> list[list[Any]]:
    """Rows of the table."""
    rows = []
    places = (list(MASKS).index, list(PROVIDERS).index)
    for run in sorted(runs, key=lambda r: (places[0](r.mask), r.tokens_per_gpu, places[1](r.provider))):
        name = [run.mask, run.tokens_per_gpu, run.provider, run.ran[1]]
        timed = _timed_steps(run)
        if not timed:
            rows.append([*name, run.error.strip().splitlines()[-1][:120] if run.error else "failed", *[""] * 11])
            continue
        training, median = run.training, statistics.median(timed)
        rate = operations(run, training, slice(run.warm_up, len(training.step_ms))) / world_size() / median / 1e9
        last = training.losses[max(training.losses)] if training.losses else float("nan")
        rows.append([*name, f"{median:.1f}", f"{min(timed):.1f}", *_quartiles(timed),
                     str(len(timed)), f"{1e3 * run.tokens_per_gpu / median:.0f}",
                     f"{rate:.0f}", f"{training.peak_gib:.2f}", f"{training.reserved_gib:.2f}",
                     f"{training.device_gib:.2f}", f"{last:.5f}", _times_best(run, runs)])  # fmt: skip
    return rows


def _timed_steps(run: Run) -> list[float]:
    return run.training.step_ms[run.warm_up :] if run.training else []


def _quartiles(timed: Sequence[float]) -> tuple[str, str]:
    low, high = np.quantile(timed, (0.25, 0.75))
    return f"{low:.1f}", f"{high:.1f}"


def step_times(runs: Sequence[Run]) -> tuple[list[str], list[list[Any]]]:
    """Header and rows of a table of all steps, those that warm up too, in milliseconds."""
    most = max((len(run.training.step_ms) for run in runs if run.training), default=0)
    header = ["mask", "tokens_per_gpu", "provider", *(f"step_{number}_ms" for number in range(1, most + 1))]
    rows = []
    for run in (run for run in runs if run.training):
        times = [f"{ms:.1f}" for ms in run.training.step_ms]
        rows.append([run.mask, run.tokens_per_gpu, run.provider, *times, *[""] * (most - len(times))])
    return header, rows


def _times_best(run: Run, runs: Sequence[Run]) -> str:
    """For magi: the best of TE's medians, of its ways that ran the same mask, over its own."""
    same = [r for r in runs if (r.mask, r.tokens_per_gpu) == (run.mask, run.tokens_per_gpu) and r.is_te]
    same = [r for r in same if r.ran == run.ran]
    peers = [statistics.median(_timed_steps(r)) for r in same if _timed_steps(r)]
    if run.is_te or not peers:
        return ""
    return f"{min(peers) / statistics.median(_timed_steps(run)):.3f}"


GROUPS_OF_KERNELS = (
    ("attention", ("attention", "fmha", "flash", "sdpa", "cudnn_generated", "magi_ffa", "ffa", "row_delta")),
    ("communication", ("nccl", "magi_")),
    ("matrix products", ("gemm", "cutlass", "nvjet", "sm90_xmma", "cublas")),
    ("optimizer", ("multi_tensor", "adam")),
    ("copies", ("memcpy", "memset")),
)


def group_of(kernel: str) -> str:
    """Which part of a step a kernel belongs to, by its name."""
    lower = kernel.lower()
    return next((g for g, marks in GROUPS_OF_KERNELS if any(m in lower for m in marks)), "other")


def idle(spans: Iterable[tuple[float, float]]) -> float:
    """Time between the first begin and the last end that no span covers."""
    total, end = 0.0, None
    for begin, until in sorted(spans):
        total += 0.0 if end is None else max(0.0, begin - end)
        end = until if end is None else max(end, until)
    return total


class Profile:
    """One step under torch's profiler, and its device time by kernel.

    Args:
        step: which.
        trace: where to write what happened when, in the format of Chrome's traces; None for nowhere.
    """

    def __init__(self, step: int, trace: Path | None = None) -> None:
        self._step, self._trace = step, trace
        self.kernels: dict[str, float] = {}
        self.idle_ms = 0.0

    @contextmanager
    def around(self, step: int) -> Iterator[None]:
        """As `TrainingSession.run` takes it."""
        if step != self._step:
            yield
            return
        from torch.autograd import DeviceType
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            yield
            torch.cuda.synchronize()
        on_device = [e for e in profiler.events() if e.device_type == DeviceType.CUDA and not e.is_user_annotation]
        for event in on_device:
            self.kernels[event.name] = self.kernels.get(event.name, 0.0) + event.time_range.elapsed_us() / 1e3
        self.idle_ms = idle((event.time_range.start, event.time_range.end) for event in on_device) / 1e3
        if self._trace is not None:
            profiler.export_chrome_trace(str(self._trace))

    def by_group(self) -> dict[str, float]:
        """Milliseconds of each group of kernels, which run at the same time in part, and of none of them (``idle``)."""
        found = {"idle": self.idle_ms} if self.kernels else {}
        for kernel, milliseconds in self.kernels.items():
            found[group_of(kernel)] = found.get(group_of(kernel), 0.0) + milliseconds
        return found


def use_padded_documents() -> None:
    """Has the stock step treat documents as Megatron treats packed conversations (SFT) under context parallelism.

    Each document is cut for the ring by itself; its padded length is its length, as lengths are multiples already.
    """
    from megatron_magi.mcore import stock_step

    cut, pack = stock_step.get_batch_on_this_cp_rank, stock_step._packed_params

    def get_batch_on_this_cp_rank(batch: dict, **kwargs: Any) -> dict:
        return cut(batch, **{**kwargs, "use_per_sequence_balancing": False})

    def packed_params(batch: dict) -> Any:
        params = pack(batch)
        if params is not None:
            params.cu_seqlens_q_padded, params.cu_seqlens_kv_padded = params.cu_seqlens_q, params.cu_seqlens_kv
        return params

    stock_step.get_batch_on_this_cp_rank, stock_step._packed_params = get_batch_on_this_cp_rank, packed_params


def write_documents(folder: Path, num_tokens: int) -> None:
    """Random tokens in documents of heavy-tailed lengths, always the same."""
    from megatron_magi.mcore.dataset_writer import write_indexed_dataset

    folder.mkdir(parents=True, exist_ok=True)
    rng, step = np.random.default_rng(11), 2 * world_size()
    lengths = []
    while sum(lengths) < num_tokens:
        lengths.append(step * max(1, round(rng.lognormal(np.log(1000.0), 1.5) / step)))
    # Tokens as frequent as words are, so that there is a little to learn.
    documents = (np.minimum(rng.zipf(1.3, size=n - 1), VOCABULARY - 2) for n in lengths)
    write_indexed_dataset(folder / "text", documents, eod=VOCABULARY - 1)


def _run(text: str) -> tuple[str, str, int, int | None]:
    mask, provider, tokens, *steps = text.split(":")
    if mask not in MASKS or provider not in PROVIDERS or len(steps) > 1:
        raise argparse.ArgumentTypeError(f"{text}: expected one of {MASKS} and of {tuple(PROVIDERS)}")
    return mask, provider, int(tokens), int(steps[0]) if steps else None


def _main_rank() -> bool:
    return os.environ.get("RANK", "0") == "0"


def bench(options: argparse.Namespace) -> list[Run]:
    """All runs, one after another; in every rank."""
    session, runs = TrainingSession(keeps_groups=True), []
    providers = [p for p in options.providers if p != "te_a2a_p2p" or world_size() % 4 == 0]
    wanted = options.runs or [(m, p, n, None) for n in options.lengths for m in options.masks for p in providers]
    for mask, provider, tokens, own_steps in wanted:
        run = Run(mask, tokens, provider, MODELS[options.model], warm_up=options.warm_up)
        runs.append(run)
        same = [r for r in runs if r.training and (r.tokens_per_gpu, r.provider, r.mask) == run.key]
        if same:
            run.training, run.kernels = same[0].training, same[0].kernels
            if _main_rank():
                _report(run, runs, None, options)
            continue
        steps = run.warm_up + (own_steps or options.steps)
        data, seq_length = options.out / "data" / "text", run.tokens_per_gpu * world_size()
        profiles = options.profile == [] or not {provider, f"{mask}:{provider}"}.isdisjoint(options.profile or ())
        args = model_args(seq_length, data, steps + profiles, run.model)
        trace = options.out / f"trace_{run.mask}_{run.tokens_per_gpu}_{run.provider}.json.gz" if _main_rank() else None
        profile = Profile(steps + 1, trace) if profiles else None
        try:
            with no_attention() if provider == "no_attention" else nullcontext():
                run.training = session.run(
                    [*args, *run_args(run), *options.further],
                    around_step=profile.around if profile else lambda step: nullcontext(),
                )
            del run.training.step_ms[steps:]
            run.training.losses.pop(steps + 1, None)
            run.kernels = profile.by_group() if profile else {}
        except Exception:  # noqa: BLE001  (the other runs are to be measured; all ranks fail alike)
            run.error = traceback.format_exc()
            print(run.error, file=sys.stderr, flush=True)
        _gather(run)
        if _main_rank():
            _report(run, runs, profile, options)
    return runs


def _gather(run: Run) -> None:
    """The largest memory of all ranks, the losses of the rank that has them, and whether all ranks finished."""
    found: list[Any] = [None] * world_size()
    torch.distributed.all_gather_object(found, (run.training, run.error))
    trainings = [training for training, _ in found]
    run.error = next((error for _, error in found if error), "")
    if run.error:
        run.training = None
        return
    run.training.losses = next((t.losses for t in reversed(trainings) if t.losses), {})
    run.training.peak_gib = max(t.peak_gib for t in trainings)
    run.training.reserved_gib = max(t.reserved_gib for t in trainings)
    run.training.device_gib = max(t.device_gib for t in trainings)
    run.training.alloc_retries = max(t.alloc_retries for t in trainings)


def _report(run: Run, runs: Sequence[Run], profile: Profile | None, options: argparse.Namespace) -> None:
    """Shows a run and renews the tables, so that what was measured outlives a run that hangs."""
    (row,) = figures([run])
    print("RUN  " + "  ".join(f"{h}={v}" for h, v in zip(HEADER, row, strict=True) if v != ""), flush=True)
    if run.training is not None:
        steps = " ".join(f"{ms:.0f}" for ms in run.training.step_ms)
        print(f"     setup {run.training.setup_s:.1f} s, retries {run.training.alloc_retries}, steps {steps}")
        print("     profile " + "  ".join(f"{g} {ms:.0f}" for g, ms in sorted(run.kernels.items())), flush=True)
    write_csv(options.out / "training.csv", HEADER, figures(runs))
    write_csv(options.out / "training_steps.csv", *step_times(runs))
    names = sorted({group for r in runs for group in r.kernels})
    rows = [[r.mask, r.tokens_per_gpu, r.provider, *(f"{r.kernels.get(n, 0.0):.1f}" for n in names)] for r in runs]
    write_csv(options.out / "training_profile.csv", ["mask", "tokens_per_gpu", "provider", *names], rows)
    if profile is not None:
        with (options.out / "training_kernels.txt").open("a") as file:
            file.write(f"{run.mask} {run.tokens_per_gpu} {run.provider}\n")
            for kernel, ms in sorted(profile.kernels.items(), key=lambda item: -item[1])[:40]:
                file.write(f"  {ms:9.2f} ms  {group_of(kernel)}  {kernel[:140]}\n")


def main() -> None:
    """Measures; or draws a table that was measured before."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder of the results")
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 32768], help="tokens of a sequence a GPU")
    parser.add_argument("--masks", nargs="+", choices=MASKS, default=list(MASKS))
    usual = [p for p in PROVIDERS if p not in ("magi_graph", "no_attention")]
    parser.add_argument("--providers", nargs="+", choices=list(PROVIDERS), default=usual)
    parser.add_argument(
        "--runs",
        type=_run,
        nargs="+",
        metavar="MASK:PROVIDER:TOKENS[:STEPS]",
        help="these, in this order, instead of --lengths x --masks x --providers",
    )
    parser.add_argument("--model", choices=list(MODELS), default="llama_1b")
    parser.add_argument("--steps", type=int, default=20, help="that are timed")
    parser.add_argument("--warm-up", type=int, default=WARM_UP, help="steps before these")
    parser.add_argument(
        "--further", type=str.split, default=[], help="arguments of Megatron for all runs, in one string"
    )
    parser.add_argument(
        "--profile", nargs="*", metavar="PROVIDER or MASK:PROVIDER", help="these, or all if none is named"
    )
    parser.add_argument(
        "--after", type=Path, help="begin when this file exists, all imports done: for a launch in a row"
    )
    parser.add_argument(
        "--draw", type=Path, nargs=2, metavar=("CSV", "PNG"), help="only draw a table that was measured before"
    )
    options = parser.parse_args()
    if options.draw:
        draw(*options.draw)
        return
    options.out = options.out.resolve()
    from megatron_magi import cpu_device

    cpu_device.install()
    join_ranks(on_cpu=not torch.cuda.is_available())
    if _main_rank():
        runs = options.runs or [("", "", max(options.lengths), None)]
        tokens = max(tokens * (options.warm_up + (steps or options.steps) + 2) for _, _, tokens, steps in runs)
        write_documents(options.out / "data", 4 * tokens * world_size())
    use_padded_documents()
    while options.after and not options.after.exists():
        time.sleep(0.2)
    torch.distributed.barrier()
    runs = bench(options)
    failed = [r for r in runs if r.error]
    sys.stdout.flush()
    os._exit(len(failed) > 0)


if __name__ == "__main__":
    main()
