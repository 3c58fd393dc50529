"""Training with CUDA graphs: losses and time of an iteration beside those without a graph.

    python benchmarks/run_gpu_graphs.py --out DIR [--cp-size N] [--iters N] [--ways eager graph one]

A small GPT on packed documents, a new mask in each microbatch, in bf16 and with deterministic attention; evaluations
between. In few microbatches tables of the mask find no room, so the graph is captured again (`graph_masks`). The first
way is what others are compared with:

- ``graph``: ``--cuda-graph-impl full_iteration``; ``eager``: without; ``staged``: eager mode with the plans of the
  graph, one remote stage and no single launch; ``one``: eager mode on one rank;
- ``te``: layers of Transformer Engine, every second one with experts; ``te_modules``: its graphs of modules without
  attention; ``te_local``: Megatron's.

Exits non-zero where losses differ by more than 1e-3, or on another number of ranks, which rounds otherwise, by more
than 1e-2, or where nothing was captured, or not again.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
from pathlib import Path

from provenance import write_csv

from megatron_magi.demo.corpus import build_corpus
from megatron_magi.testing.megatron_launch import RunResult, launch, tiny_gpt_args

HEADER = ["way", "ranks", "layers", "tokens_a_gpu", "microbatches", "iterations", "first_loss", "last_loss",
          "eval_losses", "difference", "iteration_ms", "captured", "captured_again", "eager_iterations"]  # fmt: skip
WARM_UP = 6
TE = ["--transformer-impl", "transformer_engine", "--num-experts", "4", "--moe-router-topk", "2", "--moe-layer-freq",
      "([0,1]*8)", "--moe-token-dispatcher-type", "alltoall", "--moe-aux-loss-coeff", "1e-2"]  # fmt: skip
ROUTER = ["moe_router", "moe_preprocess"]
WAYS = {
    "eager": [], "staged": [], "one": [], "te": TE,
    "graph": ["--cuda-graph-impl", "full_iteration", "--te-rng-tracker"],
    "te_modules": [*TE, "--te-rng-tracker", "--cuda-graph-impl", "transformer_engine", "--cuda-graph-modules", "mlp",
                   *ROUTER],
    "te_local": [*TE, "--te-rng-tracker", "--cuda-graph-impl", "local", "--cuda-graph-modules", *ROUTER],
}  # fmt: skip
MICROBATCHES = 2
MASK = f"{Path(__file__).resolve().parent / 'graph_masks.py'}:documents_rarely_stripes"


def train(
    data: Path, work: Path, name: str, cp_size: int, layers: int, tokens: int, iters: int, timeout_s: float
) -> RunResult:
    """A run of a way."""
    sizes = ["--num-layers", str(layers), "--hidden-size", "1024", "--ffn-hidden-size", "2816"]
    heads = ["--num-attention-heads", "8", "--num-query-groups", "2"]
    ranks = 1 if name == "one" else cp_size
    args = tiny_gpt_args(
        data, *sizes, *heads, "--bf16", "--log-interval", "1", "--attention-backend", "magi", "--magi-mask", MASK,
        "--no-check-for-nan-in-loss-and-grad", "--context-parallel-size", str(ranks),
        *WAYS[name], "--split", "90,10,0",
        "--eval-interval", "8", "--eval-iters", "3", "--logging-level", "20", "--num-workers", "1",
        seq_length=tokens * cp_size, train_iters=iters, global_batch_size=MICROBATCHES,
    )  # fmt: skip
    env, before = {"MAGI_ATTENTION_DETERMINISTIC_MODE": "1"}, "graph_masks:plan_as_captured" if name == "staged" else ""
    return launch(args, ranks, env=env, before=before, workdir=work / f"{name}_{cp_size}_{tokens}", timeout_s=timeout_s)


def all_losses(run: RunResult) -> list[float]:
    """Of iterations, and of evaluations as Megatron prints them."""
    found = re.findall(r"validation loss at iteration \d+[^|]*\| lm loss value: (\S+)", run.stdout)
    return [*(run.losses[i] for i in sorted(run.losses)), *map(float, found)]


def main() -> None:
    """Runs all ways and compares them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--cp-size", type=int, default=1)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=4096, help="a GPU")
    parser.add_argument("--iters", type=int, default=24)
    parser.add_argument(
        "--ways", nargs="+", choices=WAYS, default=["eager", "graph"], help="the first is what others are compared with"
    )
    parser.add_argument("--timeout", type=float, default=100, help="seconds of a run")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    work = Path("gpu_graphs_work").resolve()
    data = build_corpus(work / "data", vocab_size=257).prefix
    rows, losses, faults = [], [], []
    for name in options.ways:
        shape = options.cp_size, options.layers, options.tokens
        ranks = 1 if name == "one" else options.cp_size
        run = train(data, work, name, *shape, options.iters, options.timeout)
        (options.out / f"{name}_{options.cp_size}.log").write_text("\n".join(run.outputs)[-300_000:])
        times = [float(t) for t in re.findall(r"elapsed time per iteration \(ms\): ([\d.]+)", run.stdout)][WARM_UP:]
        losses.append(all_losses(run))
        difference = max(abs(a / b - 1) for a, b in zip(losses[-1], losses[0], strict=True))
        first, last = min(run.losses), max(run.losses)
        texts = "captured a training", "of a training iteration is captured again", "runs without its CUDA graph"
        captured, again, eager = (run.outputs[0].count(text) for text in texts)
        rows.append([
            name, ranks, options.layers, options.tokens * options.cp_size // ranks, MICROBATCHES, options.iters,
            f"{run.losses[first]:.6f}", f"{run.losses[last]:.6f}",
            " ".join(f"{x:.6f}" for x in losses[-1][len(run.losses) :]), f"{difference:.2e}",
            f"{statistics.median(times):.1f}", captured, again, eager if name == "graph" else options.iters,
        ])  # fmt: skip
        if difference > (1e-2 if name == "one" else 1e-3):
            faults.append(f"{name}: other losses than {options.ways[0]}")
        if name in ("te_modules", "te_local") and not re.search(
            "CUDA Graphs? capture|Creating .* CUDA graphs", run.stdout
        ):
            faults.append(f"{name}: nothing captured")
        if name == "graph" and (captured != again + 1 or not again or eager):
            faults.append("graph: not captured as it should be")
        print("  ".join(f"{h}={v}" for h, v in zip(HEADER, rows[-1], strict=True)), flush=True)
        write_csv(options.out / f"graphs_training_{options.cp_size}.csv", HEADER, rows)
    if faults:
        sys.exit("; ".join(faults))


if __name__ == "__main__":
    main()
