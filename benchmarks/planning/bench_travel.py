"""CPU time to choose who computes the queries of given layouts, in Python and in C++; needs no GPU.

    python -m benchmarks.planning.bench_travel [--csv FILE] [--repeats 10] [--seconds 20]

Packed causal documents as of `bench_planner`, 32:8 heads; each repetition is a batch of its own. ``choose_ms`` is the
shortest time of `choose_hosts`, as many repetitions as fit into ``--seconds`` and at least two; ``home_ms`` and
``step_ms`` are the predicted steps of computing at home and of the choice, ``balance_home`` and ``balance`` their
largest areas over the mean, of the first batch.
"""

from __future__ import annotations

import time

from benchmarks._lib.batches import PackedCase
from benchmarks._lib.provenance import print_row, table_parser, write_csv
from megatron_magi.config import CostModel, DispatchConfig, MagiConfig, OverlapConfig
from megatron_magi.plan import cpp_solver, given_dispatch, make_plan
from megatron_magi.plan.travel import Choice, choose_hosts

CASES = (
    PackedCase(65_536, 64, 8),
    PackedCase(262_144, 64, 8),
    PackedCase(1 << 20, 1, 64),
    PackedCase(1 << 20, 500, 64),
    PackedCase(1 << 23, 2000, 512),
)
LAYOUTS = ("contiguous", "zigzag")
HEADER = ["tokens", "documents", "ranks", "layout", "planner", "repeats", "choose_ms", "balance_home", "balance",
          "home_ms", "step_ms"]  # fmt: skip


def config_of(planner: str) -> MagiConfig:
    """The default, for attention of 32:8 heads."""
    cost = CostModel(num_heads_q=32, num_heads_kv=8)
    return MagiConfig(dispatch=DispatchConfig(planner=planner), overlap=OverlapConfig(cost=cost))


def timed(case: PackedCase, layout: str, planner: str, seed: int) -> tuple[float, Choice]:
    """Milliseconds of one choice, and the choice."""
    mask, dispatch = case.mask(seed), given_dispatch(layout, case.total_seqlen, case.cp_size)
    start = time.process_time()
    found = choose_hosts(mask, dispatch, config_of(planner))
    return 1e3 * (time.process_time() - start), found


def row(case: PackedCase, layout: str, planner: str, repeats: int, seconds: float) -> list:
    """A line of the table."""
    end, times, choice = time.process_time() + seconds, [], None
    while len(times) < repeats and (len(times) < 2 or time.process_time() < end):
        took, found = timed(case, layout, planner, len(times))
        times.append(took)
        choice = choice or found
    mask, dispatch = case.mask(0), given_dispatch(layout, case.total_seqlen, case.cp_size)
    plans = [make_plan(mask, config_of(planner), case.cp_size, dispatch, compute) for compute in ("home", "auto")]
    balances = [f"{plan.stats().balance:.3f}" for plan in plans]
    steps = ["", ""]
    if choice.home is not None and choice.predicted is not None:
        steps = [f"{found.step_us / 1e3:.3f}" for found in (choice.home, choice.predicted)]
    head = [case.total_seqlen, case.num_documents, case.cp_size, layout, planner]
    return [*head, len(times), f"{min(times):.1f}", *balances, *steps]


def main() -> None:
    """Prints the table."""
    parser = table_parser(__doc__)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=20.0)
    args = parser.parse_args()
    rows = []
    for case in CASES:
        for layout in LAYOUTS:
            for planner in ("python", "native") if cpp_solver.available() else ("python",):
                rows.append(row(case, layout, planner, args.repeats, args.seconds))
                print_row(HEADER, rows[-1])
    write_csv(args.csv, HEADER, rows)


if __name__ == "__main__":
    main()
