"""CPU time to prepare a batch in addition to its plan, with tiles planned in Python and in C++; needs no GPU.

    python -m benchmarks.planning.bench_prepare_batch [--csv FILE] [--repeats 20]

Packed causal documents, 32:8 heads of 128, for the Hopper kernels; each repetition is a batch of its own.
``prepare_ms`` is `prepare_batch` on one rank, the shortest of the repetitions, time of one thread.
"""

from __future__ import annotations

import time

import torch

from benchmarks._lib.batches import PackedCase
from benchmarks._lib.provenance import table_parser, write_csv
from megatron_magi.attention import AttnShape, prepare_batch
from megatron_magi.backends.tiles import cpp_tiles
from megatron_magi.config import DispatchConfig, MagiConfig
from megatron_magi.plan import make_plan

CASES = (
    PackedCase(16_384, 64, 2),
    PackedCase(65_536, 64, 2),
    PackedCase(65_536, 8, 8),
    PackedCase(1 << 20, 500, 64),
    PackedCase(1 << 20, 1, 64),
)
SHAPE = AttnShape(32, 8, 128, 128, torch.bfloat16, num_sms=132)


def timed(case: PackedCase, planner: str, seed: int) -> float:
    """Milliseconds of one batch."""
    config = MagiConfig(dispatch=DispatchConfig(planner=planner))
    plan = make_plan(case.mask(seed), config, case.cp_size).for_rank(case.cp_size // 2)
    start = time.thread_time()
    prepare_batch({"all": plan}, SHAPE, config)
    return 1e3 * (time.thread_time() - start)


def main() -> None:
    """Prints the table."""
    parser = table_parser(__doc__)
    parser.add_argument("--repeats", type=int, default=20)
    args = parser.parse_args()
    header = ["tokens", "documents", "ranks", "tiles", "repeats", "prepare_ms"]
    print("".join(f"{h:>13}" for h in header))
    rows = []
    for case in CASES:
        for planner in ("python", "native") if cpp_tiles.available() else ("python",):
            best = min(timed(case, planner, seed) for seed in range(args.repeats))
            rows.append([case.total_seqlen, case.num_documents, case.cp_size, planner, args.repeats, f"{best:.2f}"])
            print("".join(f"{c!s:>13}" for c in rows[-1]), flush=True)
    write_csv(args.csv, header, rows)


if __name__ == "__main__":
    main()
