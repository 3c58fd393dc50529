"""Hybrid models beside GPTs of the same layers and weights: losses, and time of a step.

    torchrun --nproc-per-node 2 -m benchmarks.training.hybrid_models --out DIR [--times KIND ...] [--losses KIND ...]

A kind is a pattern of one block, the layers and the dtype, as in `*-:local:bf16` or `*E:te:fp8`.

`--times`: steps of a model of 16 blocks (hidden 1024, 8 heads of 128 in 2 groups, packed documents) with all ranks
context-parallel, GPT and hybrid model by turns in one launch. Both draw the same weights. Milliseconds of a step, the
device's work included, in medians and quartiles over all turns; medians of each turn; the largest relative difference
of the losses from those of the GPT.

`--losses`: a model of 4 blocks on packed documents. A GPT's checkpoint, which Megatron translates while it loads, is
trained on as a hybrid model: by stock Megatron's attention without context parallelism, each rank with samples of its
own, and by magi with the same samples, without context parallelism and with all ranks context-parallel. With magi over
all ranks it is trained on as a GPT too. Losses are compared with those of a stock GPT in fp32, with local layers or
with Transformer Engine's experts: in fp32 the budget is 1e-5, else twice the difference of stock's hybrid model in that
kind. With Transformer Engine's layers they are compared with stock's of the same kind too, where the band is twice the
difference of its unfused attention from its usual one, as in `loss_parity_te`.

Where Transformer Engine is installed, hybrid models have its layers: kinds with local ones need a machine without it.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import statistics
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import torch

from benchmarks._lib.llama import world_size
from benchmarks._lib.provenance import print_row, write_csv
from benchmarks._lib.ranks import join_ranks
from benchmarks._lib.trainer import Training, TrainingSession
from megatron_magi.demo.corpus import build_corpus
from megatron_magi.testing.megatron_launch import tiny_gpt_args

FP32_BUDGET = 1e-5
PATTERNS = {
    "*-": (),
    "*E": ("--num-experts", "4", "--moe-router-topk", "2", "--moe-aux-loss-coeff", "1e-2"),
}
LAYERS = {
    "local": ("--transformer-impl", "local"),
    "te": ("--transformer-impl", "transformer_engine"),
}
DTYPES = {"fp32": (), "bf16": ("--bf16",), "fp8": ("--bf16", "--fp8-format", "hybrid", "--fp8-recipe", "tensorwise")}
SIZES = {
    "times": ("--num-layers", "16", "--hidden-size", "1024", "--ffn-hidden-size", "2816", "--num-attention-heads", "8"),
    "losses": ("--num-layers", "4", "--hidden-size", "512", "--ffn-hidden-size", "1408", "--num-attention-heads", "4"),
}
BLOCKS = {part: int(args[1]) for part, args in SIZES.items()}
WARM_UP = 5
MAGI = ("--attention-backend", "magi")
BOUNDS = "--dataloader-inter-document-masking"
LOSSES_ITERATIONS, LOSSES_TOKENS = 10, 2048
TIMES_HEADER = ["kind", "model", "ranks", "tokens_a_rank", "steps", "median_ms", "quartiles_ms", "medians_of_turns_ms",
                "first_loss", "last_loss", "difference_of_losses"]  # fmt: skip
LOSSES_HEADER = ["kind", "model", "attention", "ranks", "context_parallel", "iterations", "first_loss", "last_loss",
                 "difference_to_fp32", "budget", "difference_to_stock", "band"]  # fmt: skip
ATTENTION = {"stock": (), "unfused": ("--attention-backend", "unfused"), "magi": MAGI}


@dataclass(frozen=True)
class Kind:
    """What is trained.

    Attributes:
        pattern: letters of a block, a key of `PATTERNS`.
        layers: whose: a key of `LAYERS`.
        dtype: a key of `DTYPES`.
    """

    pattern: str
    layers: str
    dtype: str

    def __str__(self) -> str:
        return f"{self.pattern}:{self.layers}:{self.dtype}"

    def args(self, part: str, hybrid: bool) -> list[str]:
        """Megatron's arguments of the model."""
        pattern = ("--hybrid-layer-pattern", self.pattern * BLOCKS[part]) if hybrid else ()
        # Megatron's hybrid models have no other experts with Transformer Engine.
        grouped = ("--moe-grouped-gemm",) if "E" in self.pattern and self.layers == "te" else ()
        return [*SIZES[part], *PATTERNS[self.pattern], *grouped, *LAYERS[self.layers], *DTYPES[self.dtype], *pattern]


@dataclass(frozen=True)
class Run:
    """A training of `--losses`.

    Attributes:
        kind: what is trained.
        attention: whose, a key of `ATTENTION`.
        cp_size: context-parallel ranks.
        hybrid: as a hybrid model, else as a GPT.
    """

    kind: Kind
    attention: str = "stock"
    cp_size: int = 1
    hybrid: bool = True

    def __str__(self) -> str:
        return f"{self.kind} {self.model} {self.attention} CP {self.cp_size}"

    @property
    def model(self) -> str:
        """As tables name it."""
        return "hybrid" if self.hybrid else "gpt"


def runs_of(kind: Kind, num_ranks: int) -> list[Run]:
    """What a kind is judged by, and what is judged."""
    unfused = [Run(kind, "unfused")] if kind.layers == "te" else []
    magi = [Run(kind, "magi"), Run(kind, "magi", num_ranks), Run(kind, "magi", num_ranks, False)]
    return list(dict.fromkeys([reference_of(kind), Run(kind), *unfused, *magi]))


def reference_of(kind: Kind) -> Run:
    """What losses are compared with: local layers, which do not load checkpoints of Transformer Engine's experts."""
    if "E" in kind.pattern and kind.layers == "te":
        return Run(Kind(kind.pattern, "te", "fp32"), "unfused", hybrid=False)
    return Run(Kind(kind.pattern, "local", "fp32"), hybrid=False)


@dataclass
class Times:
    """Steps of a model of a kind, over all turns."""

    kind: Kind
    hybrid: bool
    turns: list[Training] = field(default_factory=list)


def parse_kind(text: str) -> Kind:
    """A `Kind` as the command line names it."""
    pattern, layers, dtype = ([*text.split(":"), "", ""])[:3]
    if text.count(":") != 2 or pattern not in PATTERNS or layers not in LAYERS or dtype not in DTYPES:
        raise argparse.ArgumentTypeError(
            f"expected PATTERN:LAYERS:DTYPE of {list(PATTERNS)}, {list(LAYERS)}, {list(DTYPES)}, got {text!r}"
        )
    return Kind(pattern, layers, dtype)


class Bench:
    """Trains one model after another in the ranks of one launch.

    Args:
        data: prefix of the data set.
        options: the command line.
    """

    def __init__(self, data: Path, options: argparse.Namespace) -> None:
        self.data, self.options = data, options
        self.session = TrainingSession(keeps_groups=True)
        self.failures: list[str] = []

    def train(self, name: str, args: Sequence[str], hybrid: bool, **sizes: int) -> Training | None:
        """Trains on all ranks; None, and a failure more, where it fails, on all ranks alike."""
        argv = tiny_gpt_args(self.data, "--num-query-groups", "2", "--log-interval", "1", *args, **sizes)
        if BOUNDS in argv:
            argv.remove("--reset-attention-mask")
        training, error = None, ""
        try:
            training = self.session.run(argv, model="hybrid" if hybrid else "gpt")
        except Exception:  # noqa: BLE001  (the others are to run)
            error = traceback.format_exc()
            print(error, file=sys.stderr, flush=True)
        found: list = [None] * world_size()
        torch.distributed.all_gather_object(found, (training and training.losses, error))
        error = next((error for _, error in found if error), "")
        if error:
            self.failures.append(f"{name}: {error.splitlines()[-1]}")
            return None
        assert training is not None
        if os.environ["RANK"] == "0":
            steps = " ".join(f"{ms:.1f}" for ms in training.step_ms)
            print(f"{name}: set up in {training.setup_s:.1f} s, milliseconds of steps {steps}", flush=True)
        training.losses = next((losses for losses, _ in reversed(found) if losses), {})
        return training

    def times(self) -> None:
        """GPT and hybrid model by turns."""
        done: list[Times] = []
        options = self.options
        for kind in options.times:
            pair = [Times(kind, hybrid) for hybrid in (False, True)]
            done += pair
            for _ in range(options.turns):
                for one in pair:
                    args = [*kind.args("times", one.hybrid), "--num-workers", "2", "--lr", "1e-4", *MAGI]
                    training = self.train(
                        f"times {kind} {'hybrid' if one.hybrid else 'gpt'}", args, one.hybrid,
                        seq_length=options.tokens * world_size(), train_iters=WARM_UP + options.steps,
                        global_batch_size=1, context_parallel_size=world_size(),
                    )  # fmt: skip
                    one.turns += [training] if training else []
            rows = [row for t in done if (row := self.times_row(t, done))]
            self.report("times", TIMES_HEADER, rows, num_new=len(pair))

    def times_row(self, times: Times, done: Sequence[Times]) -> list | None:
        """Figures of a model; None where no turn was finished."""
        if not times.turns:
            return None
        steps = [training.step_ms[WARM_UP:] for training in times.turns]
        together = list(itertools.chain(*steps))
        quartiles = statistics.quantiles(together, n=4)
        losses = times.turns[0].losses
        gpt = next(t for t in done if t.kind == times.kind and not t.hybrid)
        compared = f"{difference(losses, gpt.turns[0].losses):.1e}" if gpt.turns else ""
        return [
            str(times.kind), "hybrid" if times.hybrid else "gpt", world_size(), self.options.tokens,
            len(together), f"{quartiles[1]:.2f}", f"{quartiles[0]:.2f} to {quartiles[2]:.2f}",
            " ".join(f"{statistics.median(turn):.2f}" for turn in steps), *ends(losses), compared,
        ]  # fmt: skip

    def losses(self) -> None:
        """Stock and magi, from a GPT's weights."""
        found: dict[Run, dict[int, float]] = {}
        for kind in self.options.losses:
            for run in runs_of(kind, world_size()):
                if run not in found:
                    found[run] = self.losses_of(run)
                    rows, self.exceeded = judge(found)
                    self.report("losses", LOSSES_HEADER, rows, num_new=1)

    def losses_of(self, run: Run) -> dict[int, float]:
        """Losses of a model that goes on from a GPT's checkpoint; none where training failed."""
        kind = run.kind
        weights = ["--load", str(self.weights(kind)), "--finetune", "--exit-on-missing-checkpoint", *documents(kind)]
        args = [*kind.args("losses", run.hybrid), *weights, "--lr", "1e-4", *ATTENTION[run.attention]]
        training = self.train(
            f"losses {run}", args, run.hybrid, seq_length=LOSSES_TOKENS, train_iters=LOSSES_ITERATIONS,
            global_batch_size=2 * world_size(), context_parallel_size=run.cp_size,
        )  # fmt: skip
        return training.losses if training else {}

    def weights(self, kind: Kind) -> Path:
        """A GPT's checkpoint. Local layers read one of Transformer Engine's, which has states that theirs have not."""
        folder = self.options.work / f"weights_{'experts' if 'E' in kind.pattern else 'dense'}"
        if not folder.exists():
            asked = {one.layers for one in self.options.losses if one.pattern == kind.pattern}
            args = Kind(kind.pattern, "te" if "te" in asked else "local", "fp32").args("losses", False)
            save = ["--save", str(folder), "--save-interval", "1", "--no-save-optim", *MAGI]
            self.train(
                f"weights {kind.pattern}", [*args, *save], False, seq_length=LOSSES_TOKENS, train_iters=1,
                global_batch_size=world_size(),
            )  # fmt: skip
        return folder

    def report(self, part: str, header: Sequence[str], rows: Sequence[Sequence], num_new: int) -> None:
        """Renews a table, so that what was measured outlives a run that hangs, and prints its new rows, the last."""
        if os.environ["RANK"] == "0":
            write_csv(self.options.out / f"hybrid_{part}_{world_size()}gpu.csv", header, rows)
            for row in rows[-num_new:]:
                print_row(header, row)

    exceeded: Sequence[str] = ()


def documents(kind: Kind) -> list[str]:
    """Transformer Engine's attention takes documents from the data loader, local attention by a mask."""
    return [BOUNDS] if kind.layers == "te" else []


def difference(a: dict[int, float], b: dict[int, float]) -> float:
    """Largest relative difference of losses; infinite where iterations are missing."""
    return max(abs(a[i] / b[i] - 1) for i in b) if b and a.keys() == b.keys() else float("inf")


def ends(losses: dict[int, float]) -> list[str]:
    """First and last loss."""
    return [f"{losses[i]:.6f}" for i in (min(losses), max(losses))] if losses else ["", ""]


def judge(found: dict[Run, dict[int, float]]) -> tuple[list[list], list[str]]:
    """Rows of the table, and what left its budget or its band."""
    rows, exceeded = [], []
    for run, losses in found.items():
        kind = run.kind
        stock = found.get(Run(kind), {})
        reference = found[reference_of(kind)]
        budget = FP32_BUDGET if kind.dtype == "fp32" else 2 * difference(stock, reference)
        compared = [(difference(losses, reference), budget)]
        if unfused := found.get(Run(kind, "unfused")):
            compared.append((difference(losses, stock), 2 * difference(unfused, stock)))
        figures = [f"{figure:.2e}" for pair in compared for figure in pair]
        rows.append([
            str(kind), run.model, run.attention, world_size(), run.cp_size, len(losses), *ends(losses), *figures,
            *[""] * (4 - len(figures)),
        ])  # fmt: skip
        if losses:
            exceeded += [
                f"{run}: differs by {d:.2e}, allowed is {limit:.2e}" for d, limit in compared if not d <= limit
            ]
    return rows, exceeded


def main() -> None:
    """Runs what is asked for; exits non-zero if a run fails or leaves its budget."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--work", type=Path, help="folder of the data set and of checkpoints; in --out if not given")
    parser.add_argument("--times", type=parse_kind, nargs="*", metavar="KIND", default=[])
    parser.add_argument("--losses", type=parse_kind, nargs="*", metavar="KIND", default=[])
    parser.add_argument("--tokens", type=int, default=8192, help="of a sequence a rank, for --times")
    parser.add_argument("--steps", type=int, default=20, help="timed ones of a turn")
    parser.add_argument("--turns", type=int, default=2)
    options = parser.parse_args()
    if find_spec("transformer_engine") and any(kind.layers == "local" for kind in options.times + options.losses):
        parser.error("local: where Transformer Engine is installed, Megatron's hybrid models have its layers")
    from megatron_magi import cpu_device

    cpu_device.install()
    join_ranks(on_cpu=not torch.cuda.is_available())
    options.out, options.work = options.out.resolve(), (options.work or options.out / "work").resolve()
    if os.environ["RANK"] == "0":
        options.out.mkdir(parents=True, exist_ok=True)
        build_corpus(options.work / "data", max_document_bytes=1 << 16, vocab_size=257)
    torch.distributed.barrier()
    bench = Bench(build_corpus(options.work / "data", max_document_bytes=1 << 16, vocab_size=257).prefix, options)
    bench.times()
    bench.losses()
    failures = [*bench.failures, *bench.exceeded]
    if os.environ["RANK"] == "0":
        print("\n".join(failures), flush=True)
    sys.stdout.flush()
    for worker in multiprocessing.active_children():  # of data loaders, which would outlive this process
        worker.kill()
    os._exit(bool(failures))


if __name__ == "__main__":
    main()
