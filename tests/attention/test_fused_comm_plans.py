"""What one launch over all stages is planned from: keys of all stages behind each other, tiles that need not wait."""

from __future__ import annotations

import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_magi.attention import fused_comm
from megatron_magi.attention.collective_args import joined_cast, joined_transfer
from megatron_magi.backends.registry import backend_that
from megatron_magi.backends.sm90 import kernels, mask_numbers
from megatron_magi.backends.sm90 import plan as hopper_plan
from megatron_magi.backends.sm90.choices import Problem, RowTiles, backward_choice
from megatron_magi.backends.sm90.plan import HostPlan
from megatron_magi.backends.sm90.program import backward_pays
from megatron_magi.backends.sm90.schedule import Schedule, local_first
from megatron_magi.backends.sm90.support import WAITING
from megatron_magi.backends.tiles.tiles import GAP
from megatron_magi.comm import peer_kernels, transport
from megatron_magi.comm.peer_tables import MostRows
from megatron_magi.config import CommConfig, MagiConfig, OverlapConfig
from megatron_magi.cuda import arriving
from megatron_magi.cuda.build import source_root
from megatron_magi.mask import builders
from megatron_magi.mask.dense import dense_bands, dense_mask
from megatron_magi.plan import make_plan
from tests.attention import cases as cs

PROGRAMS = backend_that("programs", "ffa").programs


def plan_of(mask, num_ranks, degree):
    return make_plan(mask, MagiConfig(overlap=OverlapConfig(degree=degree, one_launch=True)), num_ranks)


def buffer_tokens(plan, rank, transfer):
    """Global token of each row of a buffer."""
    index = plan.dispatch.global_indices()
    owners = np.repeat(np.arange(plan.cp_size), transfer.recv_splits)
    tokens = np.array([index[r][row] for r, row in zip(owners, transfer.owner_rows, strict=True)], dtype=np.int64)
    return tokens if transfer.recv_order is None else tokens[transfer.recv_order]


plans = given(seed=st.integers(0, 1000), num_ranks=st.integers(2, 4), degree=st.integers(1, 4))


@settings(max_examples=40)
@plans
def test_one_transfer_brings_the_rows_of_all_stages_one_behind_the_other(seed, num_ranks, degree):
    plan = plan_of(cs.random_mask(120, 4, seed), num_ranks, degree)
    assert (plan.for_rank(0).joined is None) == (plan.degree < 2)
    if plan.degree < 2:
        return
    index = plan.dispatch.global_indices()
    buffers = []
    for rank in range(num_ranks):
        rank_plan = plan.for_rank(rank)
        buffers.append(buffer_tokens(plan, rank, rank_plan.joined))
        stages = [buffer_tokens(plan, rank, t) for t in rank_plan.transfers]
        np.testing.assert_array_equal(buffers[-1], np.concatenate(stages))
    for rank in range(num_ranks):
        t = plan.for_rank(rank).joined
        edges = np.cumsum([0, *t.send_splits])
        for d, there in enumerate(t.first_there):
            order = plan.for_rank(d).joined.recv_order
            arrived = buffers[d] if order is None else buffers[d][np.argsort(order)]
            sent = t.send_index[edges[d] : edges[d + 1]]
            np.testing.assert_array_equal(arrived[there : there + len(sent)], index[rank][sent])
        assert t.most_recv == max(map(len, buffers)) and t.most_rows > t.send_index.max(initial=-1)


@settings(max_examples=40)
@plans
def test_the_mask_over_all_keys_is_the_mask(seed, num_ranks, degree):
    mask = cs.random_mask(120, 4, seed)
    plan = plan_of(mask, num_ranks, degree)
    dense = np.pad(dense_mask(mask), (0, plan.dispatch.padded_seqlen - 120))
    for rank in range(num_ranks if plan.degree else 0):
        rank_plan = plan.for_rank(rank)
        tokens = buffer_tokens(plan, rank, joined_transfer(rank_plan))
        rows, first = plan.dispatch.global_index(rank), mask_numbers.first_arriving(rank_plan.num_rows)
        found = dense_bands(fused_comm.joined_bands(rank_plan, PROGRAMS), rank_plan.num_rows, first + len(tokens))
        own, later = found[:, : rank_plan.num_rows], found[:, first:]
        assert not found[:, rank_plan.num_rows : first].any()
        np.testing.assert_array_equal(own, dense[np.ix_(rows, rows)])
        np.testing.assert_array_equal(later, dense[np.ix_(rows, tokens)])


def tables(host: HostPlan, block_m: int):
    begin, passes, bounds = (offset // 4 for offset in host.offsets)
    tiles = host.table[begin:passes].reshape(-1, 4)
    return tiles, host.table[passes:bounds].reshape(-1, 8), host.table[bounds:-4].reshape(-1, block_m, 2)


def covered(host: HostPlan, block_m: int, block_n: int, shape: tuple[int, int]) -> np.ndarray:
    """How often tiles compute each visible pair, int ``shape``."""
    count = np.zeros(shape, dtype=int)
    tiles, passes, bounds = tables(host, block_m)
    for row0, first, past, rows in tiles.tolist():
        for i in range(first, past):
            column, blocks = passes[i, :2].tolist()
            low = min(column, column + (blocks - 1) * host.step)
            for r in range(rows):
                begin, end = bounds[i, r].tolist()
                assert begin >= end or (low <= begin and end <= low + blocks * block_n)
                count[row0 + r, begin : min(end, shape[1])] += begin < end
    return count


MASKS = {
    "causal": builders.causal(3000),
    "documents": builders.varlen(doc_lengths=[700, 40, 1300, 961], causal=True),
    "window": builders.sliding_window(2500, 300, 0),
    "random": cs.random_mask(2000, 5, 3),
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("degree", [1, 3])
def test_tiles_cover_the_mask_and_no_tile_or_block_has_keys_of_both_kinds(mask, degree):
    plan = plan_of(mask, 2, degree)
    for rank in range(2):
        rank_plan = plan.for_rank(rank)
        bands = fused_comm.joined_bands(rank_plan, PROGRAMS)
        num_later = joined_transfer(rank_plan).num_recv
        num_rows, first = rank_plan.num_rows, mask_numbers.first_arriving(rank_plan.num_rows)
        num_keys = first + num_later
        problem = Problem(num_rows, num_rows + num_later, 8, 2, (128, 128), (128, 128))
        dense = dense_bands(bands, num_rows, num_keys).astype(int)
        for shape in kernels.FORWARD_TILES[128, 128]:
            host = hopper_plan.make_host_plan(
                bands, mask_numbers.row_tiling(problem, RowTiles(shape, 1), num_later, 132)
            )
            np.testing.assert_array_equal(covered(host, *shape, dense.shape), dense)
            _, passes, _ = tables(host, shape[0])
            own = passes[:, 0] < first
            assert (passes[own, 0] < num_rows).all()
            assert (passes[own, 0] + passes[own, 1] * shape[1] <= first).all()
        choice = backward_choice(hopper_plan.mask_facts(bands), problem, False)
        host = hopper_plan.make_host_plan(bands, mask_numbers.key_tiling(problem, choice, num_later, 132))
        count = covered(host, *choice.shape, dense.T.shape)
        np.testing.assert_array_equal(count, dense.T)
        tiles, _, _ = tables(host, choice.shape[0])
        rows = np.concatenate([np.arange(t[0], t[0] + t[3]) for t in tiles])
        # Each key is in one tile, and the numbers between are in none.
        assert sorted(rows) == [*range(num_rows), *range(first, num_keys)]
        schedule = host.schedule(2, 4, 132, 8)
        assert len(np.unique(schedule.items, axis=0)) == len(schedule.items)


def test_tiles_that_need_not_wait_come_first_as_many_as_fill_the_time():
    rank_plan = plan_of(builders.varlen(doc_lengths=[600, 3000, 480, 16]), 2, 1).for_rank(1)
    bands, num_arriving = fused_comm.joined_bands(rank_plan, PROGRAMS), joined_transfer(rank_plan).num_recv
    first = mask_numbers.first_arriving(2048)
    plain = hopper_plan.make_host_plan(bands, hopper_plan.Tiling(False, 2048, (128, 128)))

    def waits(host):
        tiles, passes, _ = tables(host, 128)
        return [bool((passes[a:b, 0] >= first).any()) for _, a, b, _ in tiles.tolist()]

    def order(late, lead):
        arriving = first, num_arriving, late, lead
        return hopper_plan.make_host_plan(bands, hopper_plan.Tiling(False, 2048, (128, 128), 1, arriving))

    assert waits(plain)[0] and not all(waits(plain))
    assert waits(order(100, 10**6)) == sorted(waits(plain)), "all that need not"
    host = order(100, 1)
    assert waits(host)[:2] == [False, True] and sorted(host.costs) == sorted(plain.costs), "one is enough"
    np.testing.assert_array_equal(order(1, 10**6).starts, plain.starts, "own keys of each tile take longer")


def test_items_of_own_keys_come_first_as_many_as_fill_the_time():
    items = np.array([[tile, 65536 + head, 0, 0] for head in range(3) for tile in range(4)], dtype=np.int32)
    is_own, costs = np.array([False, True, False, True]), np.array([9, 7, 5, 3])
    found = local_first(Schedule(items, 4), costs, 4, is_own, 17)
    # 7 and 3 blocks and what an item costs in addition: three items.
    assert found.items[:, 0].tolist()[:4] == [1, 3, 1, 0] and found.num_split == 4
    assert sorted(map(tuple, found.items)) == sorted(map(tuple, items))


def test_who_waits_keeps_nobody_from_arriving():
    """Kernels that wait start when those that bring rows have all their blocks on SMs, which are few."""
    text = (source_root() / "group_collective/get_rows.cu").read_text()
    body = text[text.index("magi_get_rows(const") :]
    start = body.index("let_next_kernel_start();")
    assert start < body.index("publish(p,") and start < body.index("pull(p,"), "before it waits for anybody"
    assert body.index("mine->get_call = call;") < start, "whoever waits reads which call"
    assert peer_kernels.SHAPES["get_rows"].num_blocks <= 64
    for name in ("forward", "backward"):
        text = (source_root() / f"attention/sm90/{name}.cu").read_text()
        assert "if (!STREAM_KV) await_earlier_kernels();" in text, "else it would wait for all rows"


@pytest.mark.parametrize("name", ["forward", "backward", "backward_queries"])
def test_who_waits_waits_for_all_keys_that_are_loaded(name):
    """Hidden keys behind a tile too: what memory held before they arrive may be NaN, and 0 * NaN is NaN in dq."""
    text = (source_root() / f"attention/sm90/{name}.cu").read_text()
    (waited,) = re.findall(r"waiter\.await\(p\.arrival_barrier, NUM_ARRIVING\(p\), \S+ - \S+ \+ (\w+)\);", text)
    loaded = re.findall(
        r"load_panels<.*?>\(&OF_KEY\(p, [\w.]+, [kv]\),[^;]*?, (\w+) \* kPanelRowBytes,", text, re.DOTALL
    )
    assert len(loaded) == 2 and set(loaded) == {waited}


def test_what_is_told_of_arrivals_is_what_the_kernels_read():
    text = (source_root() / "common/arrivals.cuh").read_text()
    assert f"kMostParts = {arriving.MOST_PARTS};" in text and arriving.FLAG_BYTES == 8 * arriving.MOST_PARTS
    variant = kernels.forward(torch.bfloat16, (64, 64), (128, 128), False, stream_kv=True)
    params, found = variant.params(), arriving.Arriving((), (), (), 1, 2, 3, 4, 5)
    found.set_barrier(params.arrival_barrier, 7)
    members = [name for name, _ in type(params.arrival_barrier)._fields_ if name != "pad"]
    given = {name: getattr(params.arrival_barrier, name) for name in members}
    assert given.pop("num_rows") == given.pop("part_rows") == 0, "numbers of the mask"
    assert {f"arrival_barrier.{name}" for name in ("num_rows", "part_rows")} == set(WAITING)
    assert given == {"call": 1, "arrived": 2, "broken": 3, "notice": 4, "timeout_ns": 10, "first": 7}
    for num_rows in (1, 255, 4096, 1 << 20):
        assert -(-num_rows // arriving.part_rows(num_rows)) <= arriving.MOST_PARTS
    assert max(n for tiles in kernels.FORWARD_TILES.values() for _, n in tiles) < GAP


@pytest.mark.parametrize(
    ("num_ranks", "impl", "expected"),
    [(2, "auto", True), (8, "native", True), (9, "auto", False), (2, "all_to_all", False), (1, "auto", False)],
)
def test_one_launch_is_for_ranks_that_reach_each_others_memory(num_ranks, impl, expected):
    assert transport.may_use_peer_memory(num_ranks, impl) is expected


def test_a_forward_that_fetches_much_from_several_ranks_goes_by_stages():
    k = torch.empty(1, 8, 128, dtype=torch.bfloat16)
    for num_ranks, total, expected in ((2, 1 << 17, True), (4, 8 << 10, True), (4, 1 << 17, False)):
        plan = plan_of(builders.causal(total), num_ranks, 1)
        casts = [joined_cast(plan.for_rank(rank), torch.device("cpu")) for rank in range(num_ranks)]
        assert {fused_comm.Fetched(cast, lambda: None, "auto").forward_pays(k, k) for cast in casts} == {expected}
    limit = 1 << 14  # rows of 4 KB, of which 64 MB hold so many
    for received, usual, expected in (
        (limit, None, True), (limit + 1, None, False), (4 * limit, limit, True), (4 * limit, limit + 1, False)
    ):  # fmt: skip
        cast = SimpleNamespace(num_ranks=3, most=MostRows(1 << 20, received, 1 << 20), usual=usual)
        assert fused_comm.Fetched(cast, lambda: None, "auto").forward_pays(k, k) is expected


def test_stages_that_are_kept_or_not_overlapped_stay_stages():
    mask, kept = builders.causal(256), {"degree": 1, "hide_tail_reduce": True}
    for options, expected in (
        ({}, True), ({"degree": 3}, True), (kept, False), ({"degree": 0}, False), ({"one_launch": False}, False)
    ):  # fmt: skip
        overlap = OverlapConfig(**{"one_launch": True, **options})
        plan = make_plan(mask, MagiConfig(overlap=overlap), 2).for_rank(0)
        assert fused_comm.pays(plan, (128, 128), PROGRAMS, "auto") is expected
    assert not fused_comm.pays(
        make_plan(mask, MagiConfig(overlap=OverlapConfig(one_launch=True)), 1).for_rank(0), (128, 128), PROGRAMS, "auto"
    )
    assert backward_pays((128, 128)) and not backward_pays((192, 128))


def test_two_levels_and_heads_narrower_than_those_of_a_kernel_stay_stages():
    for options, dims, expected in (
        ({}, (128, 128), True),
        ({}, (96, 96), False),
        ({"ranks_per_node": 2}, (128, 128), False),
    ):
        config = MagiConfig(overlap=OverlapConfig(degree=1, one_launch=True), comm=CommConfig(**options))
        assert (
            fused_comm.pays(make_plan(builders.causal(1024), config, 4).for_rank(0), dims, PROGRAMS, "auto") is expected
        )
    alone, one_of_two = (make_plan(builders.causal(1024), MagiConfig(), n).for_rank(0) for n in (1, 2))
    assert fused_comm.is_alone(alone, (128, 128), PROGRAMS) and not fused_comm.is_alone(alone, (96, 96), PROGRAMS)
    assert not fused_comm.is_alone(one_of_two, (128, 128), PROGRAMS)
