"""Balance and communication of every way to spread a batch over ranks; needs no GPU.

    python -m benchmarks.planning.bench_dispatch [--csv FILE]

Columns: largest area over the mean (1.00 is perfect), rows of k and v that the mean and the busiest
rank fetch, as a share of the whole sequence, and the CPU time to plan all ranks (one thread). The default, auto,
predicts for 32 query and 8 key heads of 128.
"""

from __future__ import annotations

import sys
import time

import numpy as np

from benchmarks._lib.batches import SEEDS, PackedCase
from benchmarks._lib.dispatches import contiguous, zigzag
from benchmarks._lib.provenance import table_parser, write_csv
from megatron_magi.config import CostModel, DispatchConfig, MagiConfig, OverlapConfig
from megatron_magi.mask import AttnMask
from megatron_magi.plan import Dispatch, Plan, make_plan

CASES = (
    PackedCase(131_072, 64, 8),
    PackedCase(131_072, 1, 8),
    PackedCase(65_536, 20, 4),
    PackedCase(1 << 20, 500, 64),
    PackedCase(1 << 20, 64, 64),
)
OVERLAP = OverlapConfig(cost=CostModel(num_heads_q=32, num_heads_kv=8, head_dim=128))


def plans(mask: AttnMask, cp_size: int):
    """Yields ``(name, plan, seconds)``."""
    for name, fixed in (("contiguous", contiguous), ("zigzag", zigzag)):
        yield name, *_timed(mask, cp_size, MagiConfig(overlap=OVERLAP), fixed(mask.total_seqlen_q, cp_size))
    for name in ("sorted_sequential", "min_heap", "affinity", "auto"):
        config = MagiConfig(dispatch=DispatchConfig(algorithm=name), overlap=OVERLAP)
        yield name, *_timed(mask, cp_size, config, None)


def _timed(mask: AttnMask, cp_size: int, config: MagiConfig, dispatch: Dispatch | None) -> tuple[Plan, float]:
    start = time.process_time()
    plan = make_plan(mask, config, cp_size, dispatch)
    for rank in range(cp_size):
        plan.for_rank(rank)
    return plan, time.process_time() - start


def main() -> None:
    """Prints the table; the worst balance and the mean of the rest over the seeds."""
    parser = table_parser(__doc__)
    path = parser.parse_args().csv
    header = ["tokens", "documents", "ranks", "dispatch", "worst_balance", "mean_fetch", "max_fetch", "plan_s"]
    print("".join(f"{h:>18}" for h in header))
    rows = []
    for case in CASES:
        found: dict[str, list[tuple[float, float, float, float]]] = {}
        for seed in SEEDS:
            for name, plan, seconds in plans(case.mask(seed), case.cp_size):
                stats = plan.stats()
                fetched = np.array(stats.received_rows) / case.total_seqlen
                found.setdefault(name, []).append((stats.balance, fetched.mean(), fetched.max(), seconds))
        for name, values in found.items():
            v = np.array(values)
            figures = [v[:, 0].max(), v[:, 1].mean(), v[:, 2].mean(), v[:, 3].mean()]
            rows.append([case.total_seqlen, case.num_documents, case.cp_size, name, *(f"{x:.4f}" for x in figures)])
            print("".join(f"{c!s:>18}" for c in rows[-1]), flush=True)
    write_csv(path, header, rows)
    # It must keep the promise of the documentation.
    bad = [r for r in rows if r[3] == "affinity" and r[1] > 1 and float(r[4]) > (1.02 if r[2] <= 8 else 1.05)]
    sys.exit(f"balance of affinity is off: {bad}" if bad else 0)


if __name__ == "__main__":
    main()
