"""Rows of keys that cross between nodes: to each rank, once to a node, and with neighbours gathered; needs no GPU.

    python -m benchmarks.planning.bench_node_traffic [--csv FILE]

Means over batches of packed causal documents (those of `bench_dispatch.py`), as multiples of the sequence's rows.
``plan_ms``: of the plan of all ranks and the transfers of one, the median.
"""

from __future__ import annotations

import time

import numpy as np

from benchmarks._lib.batches import SEEDS, PackedCase
from benchmarks._lib.provenance import print_row, table_parser, write_csv
from megatron_magi.config import CommConfig, MagiConfig
from megatron_magi.plan import Plan, make_plan

HEADER = ["tokens", "documents", "ranks", "ranks_per_node", "way", "crossing", "plan_ms"]
CASES = (
    (PackedCase(131_072, 64, 8), 4),
    (PackedCase(131_072, 64, 16), 8),
    (PackedCase(131_072, 1, 16), 8),
    (PackedCase(1 << 20, 500, 64), 8),
    (PackedCase(1 << 20, 1, 64), 8),
)


def crossing(plan: Plan, per_node: int, once: bool) -> int:
    """Rows that cross between nodes of ``per_node`` ranks, each ``once`` to a node or to each rank that needs it."""
    rows = 0
    for rank in range(plan.cp_size):
        node = rank // per_node * per_node
        for transfer in plan.for_rank(rank).transfers:
            edges = np.cumsum([0, *transfer.send_splits])
            for first in range(0, plan.cp_size, per_node):
                sent = transfer.send_index[edges[first] : edges[first + per_node]]
                rows += 0 if first == node else len(np.unique(sent)) if once else len(sent)
    return rows


def planned(case: PackedCase, seed: int, per_node: int | None) -> tuple[Plan, float]:
    """A plan, and milliseconds that it took."""
    mask, config = case.mask(seed), MagiConfig(comm=CommConfig(ranks_per_node=per_node))
    begin = time.perf_counter()
    plan = make_plan(mask, config, case.cp_size)
    plan.for_rank(case.cp_size // 2)
    return plan, (time.perf_counter() - begin) * 1e3


def main() -> None:
    """Prints the table."""
    parser = table_parser(__doc__)
    path = parser.parse_args().csv
    rows = []
    for case, per_node in CASES:
        found: dict[str, list[tuple[float, float]]] = {}
        for seed in SEEDS:
            flat, flat_ms = planned(case, seed, None)
            gathered, gathered_ms = planned(case, seed, per_node)
            for way, plan, once, took in (
                ("to each rank", flat, False, flat_ms),
                ("once", flat, True, flat_ms),
                ("once, gathered", gathered, True, gathered_ms),
            ):
                found.setdefault(way, []).append((crossing(plan, per_node, once) / case.total_seqlen, took))
        for way, values in found.items():
            share, took = np.array(values).T
            figures = [f"{share.mean():.3f}", f"{np.median(took):.1f}"]
            rows.append([case.total_seqlen, case.num_documents, case.cp_size, per_node, way, *figures])
            print_row(HEADER, rows[-1])
    write_csv(path, HEADER, rows)


if __name__ == "__main__":
    main()
