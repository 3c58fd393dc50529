"""The distributed benchmark's parts, without a GPU."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from benchmarks._lib.baselines import Cluster
from benchmarks._lib.baselines.alone import Alone
from benchmarks._lib.baselines.base import Unsupported
from benchmarks._lib.batches import DISTRIBUTED
from benchmarks._lib.charts.distributed import draw, read_rows, times_fastest, write_rows
from benchmarks._lib.provenance import write_csv
from benchmarks._lib.trace import is_communication, overlap, union
from benchmarks.distributed import bench_methods
from megatron_magi.config import CommConfig, MagiConfig, OverlapConfig
from megatron_magi.mask.dense import dense_mask
from megatron_magi.plan import make_plan

TOKENS = 1100


def run_ways(rank: int, num_ranks: int) -> dict[tuple[str, str], int]:
    del rank
    cluster, found = Cluster(), {}
    for mask, make in DISTRIBUTED.items():
        case = make(TOKENS * num_ranks)
        assert case.name == mask
        for name in bench_methods.ALL_WAYS:
            try:
                found[mask, name] = bench_methods.make_way(name, case, cluster, "torch").num_rows
            except Unsupported:
                continue
    return found


def test_every_way_holds_all_tokens_of_each_mask(ranks):
    found = ranks(2, run_ways)
    assert {mask for mask, _ in found[0]} == set(DISTRIBUTED)
    assert {("window", "magi"), ("window", "ulysses"), ("full", "ring")} <= set(found[0])
    assert {sum(of_rank[key] for of_rank in found) for key in found[0]} == {2 * TOKENS}


def measured(rank: int, num_ranks: int) -> list[list]:
    del rank
    case = DISTRIBUTED["short_documents"](96 * num_ranks)
    ways = ("magi", "ring", "double_ring", "magi_one_launch", "alone", "subgroups")
    return bench_methods.measure(case, Cluster(), torch.device("cpu"), ways, "torch")


def test_in_two_levels_fewer_rows_cross_of_a_mask_that_several_ranks_of_a_node_see():
    mask = DISTRIBUTED["full"](64 * 4).mask
    crossing = []
    for per_node in (None, 2):
        plan = make_plan(mask, MagiConfig(comm=CommConfig(ranks_per_node=per_node)), 4)
        crossing.append(sum(bench_methods.rows_that_cross(plan.for_rank(r), r, 2) for r in range(4)))
    assert crossing == [4 * 64 * 2, 4 * 64]  # each row to both ranks of the other node, or once


def test_a_row_for_each_way_tells_its_times_or_why_there_are_none(ranks):
    found = ranks(2, measured)
    assert found[0] == found[1]
    rows = [dict(zip(bench_methods.HEADER, row, strict=True)) for row in found[0]]
    assert [(r["mask"], r["tokens_a_gpu"], r["way"]) for r in rows] == [
        ("short_documents", 96, way) for way in ("magi", "ring", "double_ring", "magi_one_launch", "alone", "subgroups")
    ]
    *rows, subgroups = rows
    assert float(subgroups["forward_ms"]) > 0 and "times the mean of the tokens" in subgroups["note"]
    some = [*rows[:2], *rows[3:]]
    assert all(float(r["forward_ms"]) > 0 and float(r["backward_ms"]) > 0 and not r["note"] for r in some)
    assert rows[2]["forward_ms"] == "" and "2 ranks" in rows[2]["note"]


def test_zigzag_is_left_out_where_it_is_the_default():
    cluster = SimpleNamespace(rank=0, num_ranks=2)
    case = DISTRIBUTED["causal"](1 << 14)
    with pytest.raises(Unsupported, match="likewise"):
        bench_methods.make_way("magi_zigzag", case, cluster, "torch")
    bench_methods.make_way("magi_zigzag", DISTRIBUTED["documents_8"](1 << 14), cluster, "torch")


def test_groups_of_heads_travel_where_they_are_named():
    cluster = SimpleNamespace(rank=0, num_ranks=2)
    way = bench_methods.make_way("magi_contiguous_groups", DISTRIBUTED["causal"](1 << 14), cluster, "torch")
    assert way.num_rows == 1 << 13 and "of the queries travel" in way.note
    with pytest.raises(Unsupported, match="no query travels"):
        bench_methods.make_way("magi_contiguous_groups", DISTRIBUTED["short_documents"](1 << 14), cluster, "torch")


@pytest.mark.parametrize("degree", [1, 3])
def test_alone_is_the_attention_of_a_rank_over_keys_that_are_there(degree):
    mask = DISTRIBUTED["documents_8"](1024).mask
    plan = make_plan(mask, MagiConfig(overlap=OverlapConfig(degree=degree)), 2)
    own, dense = plan.dispatch.global_index(0), dense_mask(mask)
    needed = np.setdiff1d(np.flatnonzero(dense[own].any(axis=0)), own)
    alone, keys = Alone(plan.for_rank(0), "torch"), torch.from_numpy(np.concatenate([own, needed]))
    assert alone.num_keys == len(keys)
    q, k, v, dout = (torch.randn(1024, heads, 8, dtype=torch.float64) for heads in (4, 2, 2, 4))
    leaves = [x.requires_grad_() for x in (q[own], k[keys], v[keys])]
    grads = torch.autograd.grad(alone.attend(*leaves), leaves, dout[own])
    seen = torch.from_numpy(dense[own][:, keys.numpy()])
    wide = [leaves[0], *(x.repeat_interleave(2, dim=1) for x in leaves[1:])]
    logits = torch.einsum("qhd,khd->hqk", *wide[:2]) * 8**-0.5
    expected = torch.einsum("hqk,khd->qhd", logits.masked_fill(~seen, -torch.inf).softmax(-1), wide[2])
    torch.testing.assert_close(alone.attend(*leaves), expected)
    torch.testing.assert_close(grads, torch.autograd.grad(expected, leaves, dout[own]))


def test_spans_that_meet_are_joined():
    assert union([(5, 6), (0, 2), (1, 3), (3, 4), (2, 2)]).tolist() == [[0, 4], [5, 6]]
    assert union([]).shape == (0, 2)


def test_overlap_is_what_both_cover():
    assert overlap(union([(0, 10), (20, 30)]), union([(5, 22), (29, 40)])) == 5 + 2 + 1
    assert overlap(union([]), union([(0, 1)])) == 0


@pytest.mark.parametrize(
    ("name", "moves"), [("ncclDevKernel_SendRecv", True), ("magi_put_rows", True), ("ffa_forward", False)]
)
def test_communication_is_told_by_names(name, moves):
    assert is_communication(name) is moves


def test_a_chart_compares_with_the_fastest_other_method():
    rates = {"alone": 9.0, "magi": 6.0, "magi_zigzag": 7.0, "two_levels": 8.0, "ring": 4.0, "torch_ring": 5.0}
    assert times_fastest(rates) == pytest.approx(1.2)
    assert times_fastest({"magi": 6.0, "alone": 9.0}) is None


def test_chart_shows_what_was_measured_and_leaves_out_what_was_not(tmp_path):
    measured = ["1.0", "600", "2.5", "500", "0.1", "0.9", ""]
    rows = [["full", 8192, 8, "magi", *measured], ["full", 8192, 4, "ring", *measured],
            ["window", 8192, 4, "magi", *measured], ["window", 8192, 4, "ring", *[""] * 6, "no such mask"]]  # fmt: skip
    write_csv(tmp_path / "a.csv", bench_methods.HEADER, rows)
    _, found = read_rows([tmp_path / "a.csv"])
    draw(tmp_path / "a.png", "", found, {(8, 8192): bench_methods.PUBLISHED})
    assert len(found) == 4 and (tmp_path / "a.png").stat().st_size > 10_000


def test_files_are_put_together_and_what_is_in_several_is_of_the_last(tmp_path):
    first = [["full", tokens, 4, way, "1.0", *[""] * 6] for tokens in (32768, 8192) for way in ("magi", "ring")]
    write_csv(tmp_path / "a.csv", bench_methods.HEADER, first)
    write_csv(tmp_path / "b.csv", bench_methods.HEADER, [["full", 8192, 4, "magi", "2.0", *[""] * 6]])
    write_rows(tmp_path / "c.csv", *read_rows([tmp_path / "a.csv", tmp_path / "b.csv"]))
    notes, found = read_rows([tmp_path / "c.csv"])
    assert [(r["tokens_a_gpu"], r["way"], r["forward_ms"]) for r in found] == [
        ("8192", "magi", "2.0"), ("8192", "ring", "1.0"), ("32768", "magi", "1.0"), ("32768", "ring", "1.0")
    ]  # fmt: skip
    assert ";" not in notes["device"]
