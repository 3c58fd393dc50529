"""The distributed benchmark's parts, without a GPU."""

from __future__ import annotations

import bench_distributed
import pytest
import torch
from baselines import Cluster
from baselines.base import Unsupported
from distributed_charts import draw, read_rows
from provenance import write_csv
from trace_overlap import is_communication, overlap, union

TOKENS = 1100


def run_ways(rank: int, num_ranks: int) -> dict[tuple[str, str], int]:
    del rank
    cluster, found = Cluster(), {}
    for mask, make in bench_distributed.CASES.items():
        case = make(TOKENS * num_ranks)
        assert case.name == mask
        for name in bench_distributed.WAYS:
            try:
                found[mask, name] = bench_distributed.make_way(name, case, cluster, "torch").num_rows
            except Unsupported:
                continue
    return found


def test_every_way_holds_all_tokens_of_each_mask(ranks):
    found = ranks(2, run_ways)
    assert {mask for mask, _ in found[0]} == set(bench_distributed.CASES)
    assert {("window", "magi"), ("window", "ulysses"), ("full", "ring")} <= set(found[0])
    assert {sum(of_rank[key] for of_rank in found) for key in found[0]} == {2 * TOKENS}


def measured(rank: int, num_ranks: int) -> list[list]:
    del rank
    case = bench_distributed.CASES["short_documents"](96 * num_ranks)
    ways = ("magi", "ring", "double_ring")
    return bench_distributed.measure(case, Cluster(), torch.device("cpu"), ways, "torch")


def test_a_row_for_each_way_tells_its_times_or_why_there_are_none(ranks):
    found = ranks(2, measured)
    assert found[0] == found[1]
    rows = [dict(zip(bench_distributed.HEADER, row, strict=True)) for row in found[0]]
    assert [(r["mask"], r["tokens_a_gpu"], r["way"]) for r in rows] == [
        ("short_documents", 96, way) for way in ("magi", "ring", "double_ring")
    ]
    assert all(float(r["forward_ms"]) > 0 and float(r["backward_ms"]) > 0 and not r["note"] for r in rows[:2])
    assert rows[2]["forward_ms"] == "" and "2 ranks" in rows[2]["note"]


def test_spans_that_meet_are_joined():
    assert union([(5, 6), (0, 2), (1, 3), (3, 4), (2, 2)]).tolist() == [[0, 4], [5, 6]]
    assert union([]).shape == (0, 2)


def test_overlap_is_what_both_cover():
    assert overlap(union([(0, 10), (20, 30)]), union([(5, 22), (29, 40)])) == 5 + 2 + 1
    assert overlap(union([]), union([(0, 1)])) == 0


@pytest.mark.parametrize(
    ("name", "moves"), [("ncclDevKernel_SendRecv", True), ("magi_exchange", True), ("ffa_forward", False)]
)
def test_communication_is_told_by_names(name, moves):
    assert is_communication(name) is moves


def test_chart_shows_what_was_measured_and_leaves_out_what_was_not(tmp_path):
    measured = ["1.0", "600", "2.5", "500", "0.1", "0.9", ""]
    rows = [["full", 8192, 4, "magi", *measured], ["full", 8192, 4, "ring", *measured],
            ["window", 8192, 4, "magi", *measured], ["window", 8192, 4, "ring", *[""] * 6, "no such mask"]]  # fmt: skip
    write_csv(tmp_path / "a.csv", bench_distributed.HEADER, rows)
    source, found = read_rows([tmp_path / "a.csv"])
    draw(tmp_path / "a.png", source, found, {"8192": bench_distributed.PUBLISHED})
    assert len(found) == 4 and (tmp_path / "a.png").stat().st_size > 10_000
