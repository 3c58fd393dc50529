"""Training with Transformer Engine layers on two GPUs: parity with TE's own attention, sinks, checkpoints.

    python -m benchmarks.training.loss_parity_te --out DIR [--jobs NAME ...] [--layers local]

Each way of parallelism with `--attention-backend magi` is compared with stock Megatron, TE's own attention, on one GPU
from the same weights. In bf16 training amplifies every rounding, so what is allowed comes from what bf16 costs stock
itself: twice the largest difference of losses between the stock run and others that compute the same in another order
(attention by TE's unfused implementation; context, tensor and pipeline parallelism of Megatron's own), for each model
by itself. Twice, as two runs that are both that far from a third may be twice as far from each other. Gradients of
learnt sinks are compared element by element in the same way. Checkpoints go from TE's attention to magi and back, over
context-parallel sizes, with and without a learnt sink.

TE's a2a is left out of the sinks' band: at CP 2 it gives twice the gradient of one GPU (each rank has the whole
gradient, and Megatron sums over ranks).

`--reference-gpus 2` runs what needs one GPU on two, data-parallel, which saves a launch; 0 leaves it to another call
(weights are drawn equal). `--judge DIR ...` makes one table of what several calls have measured. `--layers local`
checks the script itself with Megatron's own layers, on a machine without GPUs too.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch

from benchmarks._lib.provenance import print_row, write_csv
from benchmarks._lib.trainer import Training, TrainingSession
from megatron_magi.testing.descendants import become_subreaper, kill_descendants

SEQ_LENGTH, ITERATIONS = (2048 if torch.cuda.is_available() else 256), 10
LEGS = (3, 6, ITERATIONS)
"""Iterations after which a checkpoint changes hands."""

SINK_SIZE = 3.0
EOD = 256
MAGI = ("--attention-backend", "magi")
CP2 = ("--context-parallel-size", "2")
TP2 = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
PP2 = ("--pipeline-model-parallel-size", "2")
EP2 = ("--expert-model-parallel-size", "2")
DISTRIBUTED = ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather")
EXPERTS = ("--num-experts", "4", "--moe-router-topk", "2", "--moe-aux-loss-coeff", "1e-2",
           "--moe-token-dispatcher-type", "alltoall")  # fmt: skip
GROUPED = "--moe-grouped-gemm"
SINK = ("--softmax-type", "learnable")
FP8 = ("--fp8-format", "hybrid", "--fp8-recipe", "tensorwise")
DELAYED = ("--fp8-format", "hybrid", "--fp8-recipe", "delayed")
BLOCKWISE = ("--fp8-format", "e4m3", "--fp8-recipe", "blockwise")
PACKED = ("--dataloader-inter-document-masking",)
MLA = ("--multi-latent-attention", "--qk-head-dim", "128", "--qk-pos-emb-head-dim", "64", "--v-head-dim", "128",
       "--kv-lora-rank", "128", "--q-lora-rank", "256", "--rope-type", "rope", "--no-rope-fusion")  # fmt: skip
MODELS = {"dense": (), "packed": PACKED, "experts": EXPERTS, "sink": SINK, "fp8": FP8,
          "fp8_delayed": DELAYED, "fp8_blockwise": BLOCKWISE, "mla": MLA}  # fmt: skip
GRAPHED_MLP = ("--cuda-graph-impl", "transformer_engine", "--cuda-graph-modules", "mlp", "--te-rng-tracker")
OFFLOADED = ("--fine-grained-activation-offloading", "--offload-modules", "core_attn",
             "--min-offloaded-tensor-size", "1024")  # fmt: skip
AS_DRAWN = ("fp8_delayed",)
"""Models that start from weights as they are drawn: TE refuses to load what delayed scaling saves."""


@dataclass(frozen=True)
class Job:
    """One training.

    Attributes:
        name: of the run.
        model: key of `MODELS`; runs of one model are compared.
        args: further arguments.
        num_gpus: 1 or 2.
        is_stock: TE's own attention, part of the band.
        te_only: skipped with Megatron's own layers.
        legs: of a checkpoint's way, the arguments of each leg; instead of ``args``.
    """

    name: str
    model: str
    args: tuple[str, ...] = ()
    num_gpus: int = 2
    is_stock: bool = False
    te_only: bool = False
    legs: tuple[tuple[str, ...], ...] = ()


NEED_TE = ("fp8", "fp8_delayed", "fp8_blockwise", "mla", "packed")
UNFUSED = ("--attention-backend", "unfused")
REFERENCE = "stock"
JOBS = [
    *(Job(REFERENCE, model, num_gpus=1, is_stock=True, te_only=model in NEED_TE) for model in MODELS),
    *(Job("stock_unfused", model, UNFUSED, 1, True, True) for model in MODELS),
    Job("stock_cp2_p2p", "dense", CP2, is_stock=True, te_only=True),
    Job("stock_tp2_sp", "dense", TP2, is_stock=True),
    Job("stock_pp2", "dense", PP2, is_stock=True),
    Job("stock_ep2", "experts", EP2, is_stock=True),
    Job("stock_ep2_cp2_p2p", "experts", (*EP2, *CP2), is_stock=True, te_only=True),
    Job("stock_cp2_a2a", "sink", (*CP2, "--cp-comm-type", "a2a"), is_stock=True, te_only=True),
    Job("stock_tp2_sp", "sink", TP2, is_stock=True),
    Job("stock_tp2_sp", "fp8", TP2, is_stock=True, te_only=True),
    *(Job("magi_cp1", model, MAGI, 1, te_only=model in NEED_TE) for model in MODELS),
    Job("magi_cp1_graphed_mlp", "dense", (*MAGI, *GRAPHED_MLP), 1, te_only=True),
    Job("magi_cp1_offloaded", "dense", (*MAGI, *OFFLOADED), 1, te_only=True),
    Job("magi_cp2", "dense", (*MAGI, *CP2)),
    Job("magi_tp2_sp", "dense", (*MAGI, *TP2)),
    Job("magi_tp2_sp_overlapped", "dense", (*MAGI, *TP2, "--tp-comm-overlap"), te_only=True),
    Job("magi_pp2", "dense", (*MAGI, *PP2)),
    Job("magi_dp2_distributed_optimizer", "dense", (*MAGI, *DISTRIBUTED)),
    Job("magi_cp2_op_fuser", "dense", (*MAGI, *CP2, "--use-transformer-engine-op-fuser"), te_only=True),
    Job("magi_cp2", "packed", (*MAGI, *CP2), te_only=True),
    Job("magi_ep2", "experts", (*MAGI, *EP2)),
    Job("magi_ep2_cp2", "experts", (*MAGI, *EP2, *CP2)),
    Job("magi_cp2", "sink", (*MAGI, *CP2)),
    Job("magi_tp2_sp", "sink", (*MAGI, *TP2)),
    Job("magi_cp2", "fp8", (*MAGI, *CP2), te_only=True),
    Job("magi_cp2", "fp8_delayed", (*MAGI, *CP2), te_only=True),
    Job("magi_cp2", "fp8_blockwise", (*MAGI, *CP2), te_only=True),
    Job("magi_cp2", "mla", (*MAGI, *CP2), te_only=True),
    Job("checkpoint_te_cp1_magi_cp2_te_cp2", "dense", legs=((), (*MAGI, *CP2), CP2), te_only=True),
    Job("checkpoint_te_cp2_magi_cp1_te_cp1", "dense", legs=(CP2, MAGI, ()), te_only=True),
    Job(
        "checkpoint_te_cp1_magi_cp2_te_cp2", "sink", te_only=True,
        legs=((), (*MAGI, *CP2), (*CP2, "--cp-comm-type", "a2a")),
    ),
    Job(
        "checkpoint_te_magi_te_distributed_optimizer", "fp8", num_gpus=1, te_only=True,
        legs=(DISTRIBUTED, (*MAGI, *DISTRIBUTED), DISTRIBUTED),
    ),
    Job("checkpoint_cp1_magi_cp2_cp1", "sink", legs=((), (*MAGI, *CP2), ())),
    # The last of a launch, as torch stays deterministic.
    Job("magi_cp1_deterministic", "dense", (*MAGI, "--deterministic-mode"), 1),
]  # fmt: skip


@dataclass
class Result:
    """What a job gave; ``error`` is set where it failed."""

    losses: dict[int, float] = field(default_factory=dict)
    sinks: dict[str, list[float]] = field(default_factory=dict)
    error: str = ""


def model_args(data: Path, layers: str, model: str) -> list[str]:
    """Megatron's command line without what differs between jobs."""
    sizes = {
        "--num-layers": 4, "--hidden-size": 512, "--ffn-hidden-size": 1408, "--num-attention-heads": 4,
        "--num-query-groups": 2, "--kv-channels": 128, "--seq-length": SEQ_LENGTH,
        "--max-position-embeddings": SEQ_LENGTH, "--micro-batch-size": 1, "--global-batch-size": 4,
        "--lr": 1e-4, "--lr-decay-iters": 100, "--seed": 1234, "--eval-iters": 0, "--eval-interval": 1000,
        "--num-workers": 0, "--logging-level": 40, "--distributed-timeout-minutes": 3, "--log-interval": 1,
        "--attention-dropout": 0, "--hidden-dropout": 0, "--normalization": "RMSNorm",
        "--position-embedding-type": "rope", "--vocab-size": 288, "--make-vocab-size-divisible-by": 1,
        "--null-tokenizer-eod-id": EOD, "--tokenizer-type": "NullTokenizer", "--data-path": data, "--split": "1,0,0",
        "--train-iters": ITERATIONS,
    }  # fmt: skip
    if layers == "local":
        sizes |= {"--hidden-size": 64, "--ffn-hidden-size": 128, "--kv-channels": 16}
    flags = ["--swiglu", "--disable-bias-linear", "--untie-embeddings-and-output-weights", "--eod-mask-loss", "--bf16"]
    flags += [] if model == "mla" else ["--group-query-attention"]
    if layers == "te":
        flags += ["--transformer-impl", "transformer_engine", *([GROUPED] if model == "experts" else [])]
    else:
        flags += ["--transformer-impl", "local", "--no-persist-layer-norm", "--no-masked-softmax-fusion"]
        flags += ["--no-rope-fusion"]
    try:
        import fused_weight_gradient_mlp_cuda  # noqa: F401
    except ImportError:
        # Megatron's output layer wants Apex for it, with TE too.
        flags.append("--no-gradient-accumulation-fusion")
    if not torch.cuda.is_available():
        flags += ["--distributed-backend", "gloo", "--use-cpu-initialization"]
    return [*(str(item) for pair in sizes.items() for item in pair), *flags]


def run_jobs(jobs: Sequence[Job], folder: Path, layers: str, as_drawn: Sequence[str]) -> dict[str, Result]:
    """In a rank: trains one job after another. A job that fails on all ranks alike does not end the others."""
    session, results = TrainingSession(), {}
    for job in jobs:
        results[f"{job.model}/{job.name}"] = result = Result()
        sinks = _Sinks()
        hooks = [sinks.hook] if job.model == "sink" else []
        base = model_args(folder / "data" / "text", layers, job.model)
        weights = folder / f"weights_{job.model}"
        try:
            start = [] if job.model in as_drawn else ["--load", str(weights), "--finetune"]
            if start and not weights.exists():
                # Weights that are drawn depend on the parallelism.
                args = [*base, *MODELS[job.model], "--train-iters", "1", "--lr", "0", "--no-save-optim"]
                session.run([*args, "--save", str(weights), "--save-interval", "1"])
            for training in _legs(job, session, base, start, folder, hooks):
                result.losses |= training.losses
            result.sinks = sinks.gradients
        except Exception:  # noqa: BLE001  (the other jobs are to run)
            result.error = traceback.format_exc()
        _share(result)
        write_results(results)
    return results


def _share(result: Result) -> None:
    """Losses are on the last stage of a pipeline. Where one rank alone has failed this waits for the driver's end."""
    if not torch.distributed.is_initialized():
        return
    found: list = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(found, (result.losses, result.error))
    result.losses = next((losses for losses, _ in reversed(found) if losses), {})
    result.error = next((error for _, error in found if error), "")


def write_results(results: dict[str, Result]) -> None:
    """For the driver; after each job, so that what hangs costs itself alone."""
    if os.environ["RANK"] == "0":
        text = json.dumps({key: vars(result) for key, result in results.items()})
        Path(os.environ["RESULTS"]).write_text(text)


def _legs(
    job: Job, session: TrainingSession, base: list[str], start: list[str], folder: Path, hooks: list[Callable]
) -> list[Training]:
    if not job.legs:
        return [session.run([*base, *MODELS[job.model], *job.args, *start], pre_wrap_hooks=hooks)]
    path = folder / f"{job.model}_{job.name}"
    trainings = []
    for number, args in enumerate(job.legs):
        load = start if number == 0 else ["--load", str(path)]
        save = ["--save", str(path), "--save-interval", str(LEGS[number]), "--exit-interval", str(LEGS[number])]
        save = save if number + 1 < len(job.legs) else []
        line = [*base, *MODELS[job.model], *args, *load, *save]
        trainings.append(session.run(line, pre_wrap_hooks=hooks if number == 0 else []))
    return trainings


class _Sinks:
    """Sinks of +3 and -3, alternating, and their gradients of the first iteration, by name of the parameter."""

    def __init__(self) -> None:
        self.gradients: dict[str, list[float]] = {}

    def hook(self, chunks: list[torch.nn.Module]) -> list[torch.nn.Module]:
        """Before the model is wrapped: notes where sinks are. Values are set once weights are loaded."""
        from megatron.core import parallel_state
        from megatron.training import training

        offsets = {n: p for chunk in chunks for n, p in chunk.named_parameters() if n.endswith("softmax_offset")}
        stock_step, stock_log = training.train_step, training.training_log

        def set_all() -> None:
            for name, offset in offsets.items():
                head = torch.arange(len(offset)) + parallel_state.get_tensor_model_parallel_rank() * len(offset)
                sign = 1 - 2 * ((head + int(name.split("layers.")[1].split(".")[0])) % 2)
                offset.data.copy_(SINK_SIZE * sign)

        def train_step(*args, **kwargs):
            training.train_step = stock_step
            set_all()
            optimizer = args[3]
            if hasattr(optimizer, "reload_model_params"):
                optimizer.reload_model_params()
            return stock_step(*args, **kwargs)

        def training_log(*args, **kwargs):
            training.training_log = stock_log
            self.gradients = {name: _whole(offset.main_grad) for name, offset in offsets.items()}
            return stock_log(*args, **kwargs)

        training.train_step, training.training_log = train_step, training_log
        return chunks


def _whole(gradient: torch.Tensor) -> list[float]:
    """Over tensor-parallel ranks."""
    from megatron.core import parallel_state

    group = parallel_state.get_tensor_model_parallel_group()
    parts = [torch.empty_like(gradient) for _ in range(group.size())]
    torch.distributed.all_gather(parts, gradient.contiguous(), group=group)
    return torch.cat(parts).tolist()


def worker(options: argparse.Namespace) -> None:
    """What torchrun starts."""
    by_key = {f"{job.model}/{job.name}": job for job in JOBS}
    jobs = [by_key[key] for key in options.worker]
    run_jobs(jobs, options.work, options.layers, tuple(MODELS) if options.as_drawn else AS_DRAWN)
    sys.stdout.flush()
    os._exit(0)


def write_documents(folder: Path) -> None:
    """Bytes with structure to learn; documents of uneven lengths, multiples of 4 as TE's ring wants them."""
    from megatron_magi.mcore.dataset_writer import write_indexed_dataset

    (folder / "data").mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(7)
    documents, total = [], 0
    while total < SEQ_LENGTH * 4 * (ITERATIONS + 4):
        length = 4 * int(1 + min(500, rng.lognormal(4.0, 1.2)))
        start, step = rng.integers(0, 256), rng.integers(1, 7)
        documents.append((start + step * np.arange(length - 1) + rng.integers(0, 3, size=length - 1)) % 256)
        total += length
    write_indexed_dataset(folder / "data" / "text", documents, eod=EOD)


def launch(
    keys: Sequence[str], num_gpus: int, devices: str, name: str, options: argparse.Namespace
) -> subprocess.Popen:
    """Starts torchrun over this file's worker."""
    # TE overlaps through user buffers; multicast is left alone. Megatron asks for the last one where it offloads.
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": devices, "CUDA_DEVICE_MAX_CONNECTIONS": "1", "UB_SKIPMC": "1"}
    env["NVTE_CPU_OFFLOAD_V1"] = "1"
    env |= {
        "RESULTS": str(options.out / f"results_{num_gpus}_{name}.json"),
        "OMP_NUM_THREADS": env.get("OMP_NUM_THREADS", "4"),
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(num_gpus)]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "-m", __spec__.name]
    command += ["--out", str(options.out), "--work", str(options.work), "--layers", options.layers, "--worker", *keys]
    command += ["--as-drawn"] if options.as_drawn else []
    with (options.out / f"log_{num_gpus}_{name}.txt").open("w") as log:
        return subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT)


def _devices() -> list[str]:
    """Two that this process may see, or the one."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")[:2]


def run_all(jobs: Sequence[Job], options: argparse.Namespace) -> dict[str, Result]:
    """One GPU's jobs on two GPUs side by side, then those of two GPUs; jobs after one that failed are started again."""
    results: dict[str, Result] = {}
    devices = _devices()
    single = [job for job in jobs if job.num_gpus == 1]
    # By model, as the first run of a model makes its weights.
    models = list(dict.fromkeys(job.model for job in single))
    halves = [[j for j in single if j.model in models[half :: len(devices)]] for half in range(len(devices))]
    started = [
        (launch([f"{j.model}/{j.name}" for j in half], 1, devices[gpu], f"half{gpu}", options), f"1_half{gpu}")
        for gpu, half in enumerate(halves)
        if half
    ]
    for process, name in started:
        _wait(process, options.timeout)
        results |= _collect(name, options.out)
    remaining, attempt = [job for job in jobs if job.num_gpus == 2], 0
    while remaining:
        process = launch([f"{j.model}/{j.name}" for j in remaining], 2, ",".join(devices), f"pair{attempt}", options)
        _wait(process, options.timeout)
        found = _collect(f"2_pair{attempt}", options.out)
        results |= found
        done = len(found)
        if done == 0:
            results[f"{remaining[0].model}/{remaining[0].name}"] = Result(error="no result: see the log")
            done = 1
        remaining, attempt = remaining[done:], attempt + 1
    return results


def _wait(process: subprocess.Popen, timeout_s: float) -> None:
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        process.terminate()
        process.wait()


def _collect(name: str, out: Path) -> dict[str, Result]:
    path = out / f"results_{name}.json"
    if not path.exists():
        return {}
    return read_results(path)


def read_results(path: Path) -> dict[str, Result]:
    """What a launch has written."""
    found = json.loads(path.read_text())
    for result in found.values():
        result["losses"] = {int(i): loss for i, loss in result["losses"].items()}
    return {key: Result(**result) for key, result in found.items()}


HEADER = ["model", "run", "gpus", "first_loss", "last_loss", "difference", "band", "sink_difference", "sink_band",
          "result"]  # fmt: skip


def difference(a: dict[int, float], b: dict[int, float]) -> float:
    """Largest relative difference of losses; infinite where iterations are missing."""
    return max(abs(a[i] / b[i] - 1) for i in b) if a.keys() == b.keys() and b else float("inf")


def sink_difference(a: dict[str, list[float]], b: dict[str, list[float]]) -> float:
    """Largest difference of an element, relative to the largest element of its layer."""
    if a.keys() != b.keys() or not b:
        return float("inf")
    return max(
        max(abs(x - y) for x, y in zip(a[name], b[name], strict=True)) / max(abs(y) for y in b[name]) for name in b
    )


def judge(jobs: Sequence[Job], results: dict[str, Result]) -> list[list]:
    """Rows of the table."""
    rows = []
    for model in MODELS:
        mine = [job for job in jobs if job.model == model]
        reference = results.get(f"{model}/{REFERENCE}", Result())
        stock = [results.get(f"{model}/{j.name}", Result()) for j in mine if j.is_stock and j.name != REFERENCE]
        stock = [r for r in stock if r.losses and not r.error]
        band = 2 * max((difference(r.losses, reference.losses) for r in stock), default=0.0)
        sinks = [results.get(f"{model}/{j.name}", Result()).sinks for j in mine if j.is_stock and "a2a" not in j.name]
        of_sinks = [2 * sink_difference(found, reference.sinks) for found in sinks if found]
        for job in mine:
            result = results.get(f"{model}/{job.name}", Result(error="did not run"))
            got = difference(result.losses, reference.losses)
            of_run = ["", ""]
            is_right = not result.error and (job.is_stock or got <= band)
            if model == "sink" and result.sinks and reference.sinks:
                of_job = sink_difference(result.sinks, reference.sinks)
                of_run = [f"{of_job:.2e}", f"{max(of_sinks, default=0.0):.2e}"]
                is_right &= job.is_stock or of_job <= max(of_sinks, default=0.0)
            losses = [f"{result.losses[i]:.6f}" for i in sorted(result.losses)] or [""]
            verdict = "stock" if job.is_stock and is_right else "inside" if is_right else "FAILED"
            rows.append(
                [model, job.name, job.num_gpus, losses[0], losses[-1], f"{got:.2e}", f"{band:.2e}", *of_run, verdict]
            )
    return rows


def _wanted(options: argparse.Namespace) -> list[Job]:
    wanted = options.jobs or list(MODELS)
    models = {name.partition("/")[0] for name in wanted}
    jobs = [
        j for j in JOBS
        if j.model in wanted or f"{j.model}/{j.name}" in wanted or (j.name == REFERENCE and j.model in models)
    ]  # fmt: skip
    jobs = [j for j in jobs if options.layers == "te" or not j.te_only]
    if options.reference_gpus == 0:
        return [j for j in jobs if j.num_gpus > 1]
    return [replace(j, num_gpus=2) for j in jobs] if options.reference_gpus == 2 else jobs


def main() -> None:
    """Runs the jobs; exits non-zero if one fails or leaves its band."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--work", type=Path, help="folder of data, weights and checkpoints; that of the results")
    parser.add_argument("--judge", type=Path, nargs="+", metavar="DIR", help="only judge the results in these folders")
    parser.add_argument("--jobs", nargs="+", help="model or model/run; all if not given")
    parser.add_argument("--layers", choices=["te", "local"], default="te")
    parser.add_argument("--reference-gpus", type=int, choices=[0, 1, 2], default=1)
    parser.add_argument(
        "--as-drawn", action="store_true", help="no run begins by loading weights: for those without TP, PP and EP"
    )
    parser.add_argument("--timeout", type=float, default=240.0, help="seconds a launch may take")
    parser.add_argument("--worker", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.out = options.out.resolve()
    options.work = (options.work or options.out).resolve()
    if options.worker:
        worker(options)
    options.out.mkdir(parents=True, exist_ok=True)
    if options.judge:
        paths = sorted(path for folder in options.judge for path in folder.glob("results_*.json"))
        results = {key: found for path in paths for key, found in read_results(path).items()}
        jobs = [job for job in JOBS if f"{job.model}/{job.name}" in results]
    else:
        jobs = _wanted(options)
        if not (options.work / "data" / "text.idx").exists():
            write_documents(options.work)
        become_subreaper()
        try:
            results = run_all(jobs, options)
        finally:
            kill_descendants()  # Megatron's checkpoint writers outlive their ranks
    rows = judge(jobs, results)
    write_csv(options.out / "training_te.csv", HEADER, rows)
    for row in rows:
        print_row(HEADER, row)
    failures = [f"{row[0]}/{row[1]}: {row[-1]}" for row in rows if row[-1] == "FAILED"]
    for key, result in results.items():
        if result.error:
            print(f"--- {key}\n{result.error}", file=sys.stderr)
    sys.exit("\n".join(failures) if failures and options.reference_gpus else 0)


if __name__ == "__main__":
    main()
