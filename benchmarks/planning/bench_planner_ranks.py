"""CPU time and memory to plan a batch on many ranks: one plan in a process of its own; needs no GPU.

    python -m benchmarks.planning.bench_planner_ranks [--csv FILE] [--tokens N ...]

``plan_ms`` is `make_plan`, ``rank_ms`` the part of one rank, each the shortest of three processes. ``peak_mib`` is the
largest memory of the process (31 MiB before it plans), ``kept_mib`` what the plan keeps with the part of that rank.
"""

from __future__ import annotations

import argparse
import itertools
import json
import pickle
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from megatron_magi.mask import AttnMask, builders
from megatron_magi.plan import make_plan

KINDS = ("causal", "64_documents", "1000_documents", "window_1024", "block_causal_4096")
TOKENS, RANKS = (1 << 17, 1 << 20, 1 << 23), (64, 512, 1024, 4096)
RUNS = 3


def mask_of(kind: str, tokens: int) -> AttnMask:
    """A mask by its name in `KINDS`; documents are causal, lengths log-uniform over a factor of 64."""
    if kind == "window_1024":
        return builders.sliding_window(tokens, 1023, 0)
    if kind == "block_causal_4096":
        return builders.block_causal(tokens, 4096)
    if kind == "causal":
        return builders.causal(tokens)
    weight = np.exp(np.random.default_rng(0).uniform(0, np.log(64), int(kind.partition("_")[0])))
    lengths = np.maximum(1, (weight / weight.sum() * tokens).astype(np.int64))
    lengths[-1] += tokens - lengths.sum()
    return builders.varlen(doc_lengths=lengths, causal=True)


def one(kind: str, tokens: int, ranks: int) -> tuple[float, float, float, float]:
    """``(plan_ms, rank_ms, peak_mib, kept_mib)`` of this process."""
    mask = mask_of(kind, tokens)
    start = time.process_time()
    plan = make_plan(mask, cp_size=ranks)
    made = time.process_time()
    plan.for_rank(ranks // 2)
    end = time.process_time()
    peak = int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) / 1024
    return (made - start) * 1e3, (end - made) * 1e3, peak, len(pickle.dumps(plan)) / (1 << 20)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", help="also write the rows to this file")
    parser.add_argument("--one", nargs=3, metavar=("KIND", "TOKENS", "RANKS"), help="only this plan, in this process")
    parser.add_argument("--tokens", nargs="+", type=int, default=TOKENS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(one(args.one[0], int(args.one[1]), int(args.one[2]))))
        return
    header = ["mask", "tokens", "ranks", "plan_ms", "rank_ms", "peak_mib", "kept_mib"]
    print("".join(f"{h:>18}" for h in header))
    rows = []
    for tokens, kind, ranks in itertools.product(args.tokens, KINDS, RANKS):
        command = [sys.executable, "-m", __spec__.name, "--one", kind, str(tokens), str(ranks)]
        found = [json.loads(subprocess.run(command, check=True, capture_output=True).stdout) for _ in range(RUNS)]
        plan_ms, rank_ms, peak, kept = (min(figures) for figures in zip(*found, strict=True))
        rows.append([kind, tokens, ranks, f"{plan_ms:.1f}", f"{rank_ms:.1f}", f"{peak:.0f}", f"{kept:.1f}"])
        print("".join(f"{c!s:>18}" for c in rows[-1]), flush=True)
    if args.csv:
        from benchmarks._lib.provenance import write_csv  # which imports torch: the plans' processes have none

        write_csv(args.csv, header, rows)


if __name__ == "__main__":
    main()
