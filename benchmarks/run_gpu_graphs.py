"""Training with `--cuda-graph-impl full_iteration`: losses and time of an iteration beside those without a graph.

    python benchmarks/run_gpu_graphs.py --out DIR [--cp-size N] [--iters N]

A small GPT on packed documents, a new mask in each microbatch, in bf16. Both runs take deterministic attention. Exits
non-zero where losses differ by more than 1e-3, or no iteration was replayed.
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
          "difference", "iteration_ms", "eager_iterations"]  # fmt: skip
WARM_UP = 6
GRAPH = ["--cuda-graph-impl", "full_iteration", "--te-rng-tracker"]
MICROBATCHES = 2


def train(data: Path, work: Path, name: str, cp_size: int, layers: int, tokens: int, iters: int) -> RunResult:
    """A run, with a graph where it is named so."""
    sizes = ["--num-layers", str(layers), "--hidden-size", "1024", "--ffn-hidden-size", "2816"]
    heads = ["--num-attention-heads", "8", "--num-query-groups", "2"]
    args = tiny_gpt_args(
        data, *sizes, *heads, "--bf16", "--log-interval", "1", "--attention-backend", "magi",
        "--no-check-for-nan-in-loss-and-grad", "--context-parallel-size", str(cp_size),
        *(GRAPH if name == "graph" else []), "--logging-level", "30", "--num-workers", "1",
        seq_length=tokens * cp_size, train_iters=iters, global_batch_size=MICROBATCHES,
    )  # fmt: skip
    env = {"MAGI_ATTENTION_DETERMINISTIC_MODE": "1"}
    return launch(args, cp_size, env=env, workdir=work / f"{name}_{cp_size}_{tokens}", timeout_s=100)


def main() -> None:
    """Runs both ways and compares them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--cp-size", type=int, default=1)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=4096, help="a GPU")
    parser.add_argument("--iters", type=int, default=30)
    parser.add_argument(
        "--ways", nargs="+", default=["eager", "graph"], help="the first is what others are compared with"
    )
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    work = Path("gpu_graphs_work").resolve()
    data = build_corpus(work / "data", vocab_size=257).prefix
    rows, runs = [], {}
    for name in options.ways:
        shape = options.cp_size, options.layers, options.tokens
        run = runs[name] = train(data, work, name, *shape, options.iters)
        (options.out / f"{name}_{options.cp_size}.log").write_text("\n".join(run.outputs)[-200_000:])
        times = [float(t) for t in re.findall(r"elapsed time per iteration \(ms\): ([\d.]+)", run.stdout)][WARM_UP:]
        difference = max(abs(run.losses[i] / runs[options.ways[0]].losses[i] - 1) for i in run.losses)
        eager = run.outputs[0].count("runs without its CUDA graph") if name == "graph" else options.iters
        first, last = min(run.losses), max(run.losses)
        rows.append([
            name, options.cp_size, options.layers, options.tokens, MICROBATCHES, options.iters,
            f"{run.losses[first]:.6f}", f"{run.losses[last]:.6f}", f"{difference:.2e}",
            f"{statistics.median(times):.1f}", eager,
        ])  # fmt: skip
        print("  ".join(f"{h}={v}" for h, v in zip(HEADER, rows[-1], strict=True)), flush=True)
        write_csv(options.out / f"graphs_training_{options.cp_size}.csv", HEADER, rows)
    if float(rows[-1][8]) > 1e-3 or (rows[-1][0] == "graph" and rows[-1][-1] >= options.iters - 4):
        sys.exit("graphs change the losses, or were not replayed")


if __name__ == "__main__":
    main()
