"""Training with CUDA graphs: losses and time of an iteration, with and without a graph.

    python -m benchmarks.training.cuda_graphs --out DIR [--cp-size N] [--iters N] [--ways eager graph one]

A small GPT on packed documents, a new mask in each microbatch, in bf16 and with deterministic attention; evaluations
between. In few microbatches tables of the mask find no room, so the graph is captured again (`graph_masks`). The first
way is what others are compared with:

- ``graph``: ``--cuda-graph-impl full_iteration``; ``uncaptured``: the same with so many iterations that warm up that
  none is captured; ``eager``: without; ``one``: eager mode on one rank;
- ``hybrid``, ``hybrid_graph``: ``eager`` and ``graph`` as hybrid models of the same layers;
- ``te``: layers of Transformer Engine, every second one with experts; ``te_modules``: its graphs of modules without
  attention; ``te_local``: Megatron's.

Exits non-zero where losses differ by more than 1e-3; on another number of ranks, and on several ranks between graphs
and eager mode, whose stages are others, which rounds otherwise, by more than 1e-2; between ``graph`` and ``uncaptured``
at all; or where nothing was captured, or not again.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from benchmarks._lib import graph_masks
from benchmarks._lib.provenance import print_row, write_csv
from megatron_magi.demo.corpus import build_corpus
from megatron_magi.testing.megatron_launch import LOSS_LOG, PRETRAIN_GPT, PRETRAIN_HYBRID, tiny_gpt_args
from megatron_magi.testing.megatron_rank import Request, output_path, watch
from megatron_magi.testing.ports import held_port

HEADER = ["way", "ranks", "layers", "tokens_a_gpu", "microbatches", "iterations", "first_loss", "last_loss",
          "eval_losses", "difference", "iteration_ms", "captured", "captured_again", "eager_iterations"]  # fmt: skip
TE = ["--transformer-impl", "transformer_engine", "--num-experts", "4", "--moe-router-topk", "2", "--moe-layer-freq",
      "([0,1]*8)", "--moe-token-dispatcher-type", "alltoall", "--moe-aux-loss-coeff", "1e-2"]  # fmt: skip
ROUTER = ["moe_router", "moe_preprocess"]
GRAPH = ["--cuda-graph-impl", "full_iteration", "--te-rng-tracker"]
WAYS = {
    "eager": [], "one": [], "te": TE, "hybrid": [], "hybrid_graph": GRAPH,
    "graph": GRAPH, "uncaptured": [*GRAPH, "--cuda-graph-warmup-steps", "1000000"],
    "te_modules": [*TE, "--te-rng-tracker", "--cuda-graph-impl", "transformer_engine", "--cuda-graph-modules", "mlp",
                   *ROUTER],
    "te_local": [*TE, "--te-rng-tracker", "--cuda-graph-impl", "local", "--cuda-graph-modules", *ROUTER],
}  # fmt: skip
HYBRID = ("hybrid", "hybrid_graph")
GRAPHED = ("graph", "hybrid_graph")
MICROBATCHES = 2
MASK = f"{graph_masks.__file__}:documents_rarely_stripes"
COUNTED = "captured a training", "of a training iteration is captured again", "runs without its CUDA graph"
REPLAYED = 8
"""Iterations at the end that are replayed."""


@dataclass(frozen=True)
class Run:
    """Ranks that wait for their turn to train."""

    request: Request
    ranks: list[subprocess.Popen]

    def train(self) -> tuple[list[str], dict[int, float]]:
        """What each rank has written, and the loss of each iteration, once all have ended."""
        folder = Path(self.request.workdir)
        (folder / graph_masks.TURN).touch()
        polls, pids = zip(*((rank.poll, rank.pid) for rank in self.ranks), strict=True)
        outcome = watch(polls, pids, self.request.timeout_s, self.request.grace_s, lambda: False)
        outputs = [output_path(folder, i).read_text(errors="replace") for i in range(len(self.ranks))]
        if any(outcome.statuses):
            raise SystemExit(f"{folder.name}: {outcome}\n" + "\n".join(text[-4000:] for text in outputs))
        records = map(json.loads, (folder / LOSS_LOG).read_text().splitlines())
        return outputs, {r["iteration"]: r["lm loss"] for r in records if "lm loss" in r}


def start(data: Path, work: Path, name: str, options: argparse.Namespace, port: int) -> Run:
    """The ranks of a way, which import side by side with those of others and will meet at ``port``."""
    ranks = 1 if name == "one" else options.cp_size
    folder = work / f"{name}_{options.cp_size}"
    folder.mkdir(parents=True)
    pattern = ["--hybrid-layer-pattern", "*-" * options.layers] if name in HYBRID else []
    args = tiny_gpt_args(
        data, "--num-layers", str(options.layers), "--hidden-size", "1024", "--ffn-hidden-size", "2816",
        "--num-attention-heads", "8", "--num-query-groups", "2", "--bf16", "--log-interval", "1",
        "--attention-backend", "magi", "--magi-mask", MASK, "--magi-loss-log", str(folder / LOSS_LOG),
        "--no-check-for-nan-in-loss-and-grad", "--context-parallel-size", str(ranks), *WAYS[name], *pattern,
        "--split", "90,10,0", "--eval-interval", "8", "--eval-iters", "3", "--logging-level", "20",
        "--num-workers", "4",
        seq_length=options.tokens * options.cp_size, train_iters=options.iters, global_batch_size=MICROBATCHES,
    )  # fmt: skip
    env = {"MAGI_ATTENTION_DETERMINISTIC_MODE": "1"}
    request = Request(
        PRETRAIN_HYBRID if pattern else PRETRAIN_GPT, args, ranks, port, str(folder), options.timeout, env,
        f"{graph_masks.__name__}:take_turn",
        list(sys.path),
    )  # fmt: skip
    made = []
    for rank in range(ranks):
        command = [sys.executable, "-m", "megatron_magi.testing.megatron_rank", str(rank)]
        made.append(subprocess.Popen(command, stdin=subprocess.PIPE, text=True))
        made[-1].stdin.write(request.to_line())
        made[-1].stdin.close()
    return Run(request, made)


def most_difference(first: str, name: str, cp_size: int) -> float:
    """By how much losses of two ways may differ."""
    graphs = {*GRAPHED, "uncaptured"}
    if {first, name} <= {"graph", "uncaptured"}:
        return 0.0
    rounds_otherwise = cp_size > 1 and ("one" in (first, name) or (first in graphs) != (name in graphs))
    return 1e-2 if rounds_otherwise and first != name else 1e-3


def main() -> None:
    """Runs all ways and compares them."""
    options = parsed()
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as ports:
        work = Path(folder).resolve()
        data = build_corpus(work / "data", vocab_size=257).prefix
        runs = {name: start(data, work, name, options, ports.enter_context(held_port())) for name in options.ways}
        rows, losses, faults = [], [], []
        for name, run in runs.items():
            outputs, of_iterations = run.train()
            text = outputs[-1]  # of the last rank, which prints
            (options.out / f"{name}_{options.cp_size}.log").write_text("\n".join(outputs)[-300_000:])
            times = [float(t) for t in re.findall(r"elapsed time per iteration \(ms\): ([\d.]+)", text)]
            evals = re.findall(r"validation loss at iteration \d+[^|]*\| lm loss value: (\S+)", text)
            losses.append([*(of_iterations[i] for i in sorted(of_iterations)), *map(float, evals)])
            difference = max(abs(a / b - 1) for a, b in zip(losses[-1], losses[0], strict=True))
            captured, again, eager = (outputs[0].count(text) for text in COUNTED)
            eager = eager if name in GRAPHED else options.iters
            rows.append([
                name, len(outputs), options.layers, options.tokens * options.cp_size // len(outputs), MICROBATCHES,
                options.iters, f"{losses[-1][0]:.6f}", f"{losses[-1][options.iters - 1]:.6f}",
                " ".join(f"{float(x):.6f}" for x in evals), f"{difference:.2e}",
                f"{statistics.median(times[-REPLAYED:]):.1f}", captured, again, eager,
            ])  # fmt: skip
            if difference > most_difference(options.ways[0], name, options.cp_size):
                faults.append(f"{name}: other losses than {options.ways[0]}")
            if name in GRAPHED and (captured != 2 or again != 1 or eager):
                faults.append(f"{name}: not captured as it should be")
            if name in ("te_modules", "te_local") and not re.search(r"CUDA Graphs? capture|Creating \d+ CUDA", text):
                faults.append(f"{name}: nothing captured")
            print_row(HEADER, rows[-1])
            write_csv(options.out / f"graphs_training_{options.cp_size}.csv", HEADER, rows)
    if faults:
        sys.exit("; ".join(faults))


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--cp-size", type=int, default=1)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=4096, help="a GPU")
    parser.add_argument("--iters", type=int, default=24, help="18 or more for `graph`")
    parser.add_argument("--timeout", type=float, default=100, help="seconds of a run")
    parser.add_argument(
        "--ways", nargs="+", choices=WAYS, default=["eager", "graph"], help="the first is what others are compared with"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
