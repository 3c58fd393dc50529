"""The benchmark of sparse attention over ranks, on gloo."""

from __future__ import annotations

import pytest

from benchmarks.distributed import bench_sparse


def measured(rank: int, num_ranks: int) -> list[list]:
    del rank, num_ranks
    setting = bench_sparse.Setting.of(on_cpu=True)
    return [
        row
        for pattern in bench_sparse.PATTERNS
        for row in bench_sparse.measure(bench_sparse.Case(pattern, 2048, 25), setting, 1)
    ]


def test_each_way_computes_the_same_and_tells_what_it_moves(ranks):
    found = ranks(2, measured)
    assert found[0] == found[1]
    rows = [dict(zip(bench_sparse.HEADER, row, strict=True)) for row in found[0]]
    assert [(r["pattern"], r["way"]) for r in rows] == [
        (pattern, way) for pattern in bench_sparse.PATTERNS for way in ("all", "selected", "bounded")
    ]
    assert all(
        float(r["forward_ms"]) > 0 and float(r["backward_ms"]) > 0 and float(r["predicted_us"]) > 0 for r in rows
    )
    of_pattern = {name: [r for r in rows if r["pattern"] == name] for name in bench_sparse.PATTERNS}
    for name, (everything, selected, bounded) in of_pattern.items():
        assert float(everything["row_mb"]) == pytest.approx(1024 * 2 * 16 * 4 / 1e6, abs=1e-3)
        share = float(selected["share"])
        assert float(selected["row_mb"]) == pytest.approx(share * float(everything["row_mb"]), abs=1e-3)
        assert float(bounded["row_mb"]) == pytest.approx(min(1, 1.5 * share) * float(everything["row_mb"]), abs=1e-3)
        assert (share < 0.6) == (name != "random"), (name, share)
