"""CPU time to plan a new batch, in Python and in C++; needs no GPU.

    python -m benchmarks.planning.bench_planner [--csv FILE] [--repeats 20] [--seconds 60]

Packed causal documents, lengths log-uniform over a factor of 64; each repetition is a batch of its own, of which no
plan was made before. ``plan_ms`` is `make_plan` and the part of one rank, ``dispatch_ms`` the part of it that spreads
the chunks over ranks: the shortest of the repetitions, as many as fit into ``--seconds`` and at least two. It is the
time of one thread, which is what passes on a machine that does nothing else.
"""

from __future__ import annotations

import time
from unittest import mock

from benchmarks._lib.batches import PackedCase
from benchmarks._lib.provenance import table_parser, write_csv
from megatron_magi.config import DispatchConfig, MagiConfig
from megatron_magi.plan import cpp_solver, make_plan
from megatron_magi.plan import plan as plan_module

CASES = (
    PackedCase(131_072, 64, 8),
    PackedCase(1 << 20, 1, 64),
    PackedCase(1 << 20, 500, 64),
    PackedCase(1 << 24, 5000, 1024),
)


def timed(case: PackedCase, planner: str, seed: int) -> tuple[float, float]:
    """Milliseconds of one plan, and of its dispatch."""
    mask = case.mask(seed)
    config = MagiConfig(dispatch=DispatchConfig(planner=planner))
    spent = 0.0
    make_dispatch = plan_module.make_dispatch

    def watched(*args):
        nonlocal spent
        start = time.process_time()
        dispatch = make_dispatch(*args)
        spent = time.process_time() - start
        return dispatch

    with mock.patch.object(plan_module, "make_dispatch", watched):
        start = time.process_time()
        make_plan(mask, config, case.cp_size).for_rank(case.cp_size // 2)
        total = time.process_time() - start
    return total * 1e3, spent * 1e3


def main() -> None:
    """Prints the table."""
    parser = table_parser(__doc__)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=60.0)
    args = parser.parse_args()
    header = ["tokens", "documents", "ranks", "planner", "repeats", "plan_ms", "dispatch_ms"]
    print("".join(f"{h:>13}" for h in header))
    rows = []
    for case in CASES:
        for planner in ("python", "native") if cpp_solver.available() else ("python",):
            end = time.process_time() + args.seconds
            found = []
            while len(found) < args.repeats and (len(found) < 2 or time.process_time() < end):
                found.append(timed(case, planner, len(found)))
            best = min(found)
            figures = (len(found), f"{best[0]:.1f}", f"{best[1]:.1f}")
            rows.append([case.total_seqlen, case.num_documents, case.cp_size, planner, *figures])
            print("".join(f"{c!s:>13}" for c in rows[-1]), flush=True)
    write_csv(args.csv, header, rows)


if __name__ == "__main__":
    main()
