"""The order of work of the backward kernel."""

from __future__ import annotations

import heapq
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_magi.backends.sm90 import schedule, tuning
from megatron_magi.backends.sm90.schedule import (
    Schedule,
    differ_in_length,
    long_tile,
    make_schedule,
)
from megatron_magi.backends.sm90.tuning import (
    LONG_BLOCKS,
    LONG_BLOCKS_MOVING,
    LONG_BLOCKS_UNEVEN,
    MOST_PIECES,
    PIECE_BLOCKS,
    SECTION_TILES,
)
from megatron_magi.backends.tiles import cpp_tiles
from megatron_magi.backends.tiles.tiles import UNIT, TilePlan, drift, plan_tiles
from megatron_magi.mask import builders
from megatron_magi.mask.bands import transpose

SMS = 132


def backward_plan(mask) -> TilePlan:
    return plan_tiles(transpose(mask.bands), mask.total_seqlen_k, 128, 64, align=UNIT, hide_tail=True)


def schedule_of(plan: TilePlan, *args, **options) -> Schedule:
    return make_schedule(plan.tiles[:, 0], plan.costs, *args, **options)


def unpack(items: np.ndarray) -> list[tuple[int, int, int]]:
    """(tile, first query head, number of query heads) of each item."""
    return [(tile, heads & 0xFFFF, heads >> 16) for tile, heads, _, _ in items.tolist()]


def blocks_of(items: np.ndarray, plan: TilePlan) -> list[tuple[int, int]]:
    """(first block, number of blocks) of each item, of those of its tile."""
    return [(first, count or int(plan.costs[tile])) for tile, _, first, count in items.tolist()]


def length_of_work(items: np.ndarray, plan: TilePlan) -> tuple[int, float]:
    """When the last SM is done, and the mean, in blocks, if each takes the next item whenever it is free."""
    busy = [0] * SMS  # a heap
    for (_, _, heads), (_, blocks) in zip(unpack(items), blocks_of(items, plan), strict=True):
        heapq.heapreplace(busy, busy[0] + blocks * heads)
    return max(busy), sum(busy) / SMS


@settings(max_examples=60)
@given(
    lengths=st.lists(st.integers(1, 6000), min_size=1, max_size=6),
    causal=st.booleans(),
    heads_kv=st.sampled_from([1, 2, 8]),
    group=st.sampled_from([1, 2, 8]),
    num_sms=st.sampled_from([1, 7, SMS]),
    max_split=st.sampled_from([0, 3, 1000]),
    long=st.sampled_from([LONG_BLOCKS, LONG_BLOCKS_UNEVEN, LONG_BLOCKS_MOVING]),
)
def test_every_block_meets_every_query_head_once(lengths, causal, heads_kv, group, num_sms, max_split, long):
    plan = backward_plan(builders.varlen(doc_lengths=lengths, causal=causal))
    schedule = schedule_of(plan, heads_kv, group, num_sms, max_split=max_split, long_tile=long)
    assert_complete(schedule, plan.costs, heads_kv, group)
    assert schedule.num_split <= max_split


@settings(max_examples=100)
@given(
    ends=st.tuples(st.integers(16, 40), st.integers(16, 40)),
    middle=st.integers(16, 40),
    num_tiles=st.integers(2, 40),
    heads_kv=st.sampled_from([1, 2, 4]),
)
def test_tiles_of_several_sizes_are_not_cut_as_if_they_were_one(ends, middle, num_tiles, heads_kv):
    # Tiles are sorted by what they cost, passes included; so their blocks may rise and fall.
    costs = np.array([ends[0], *[middle] * (num_tiles - 2), ends[1]])
    starts = 128 * np.arange(num_tiles)
    schedule = make_schedule(starts, costs, heads_kv, 8, SMS, max_split=10**6, long_tile=LONG_BLOCKS)
    assert_complete(schedule, costs, heads_kv, 8)


def test_long_tiles_alone_need_not_look_like_documents_though_all_tiles_do():
    starts, costs = np.array([0, 620, 560]), np.array([16, 12, 4])  # the last, which is short, is between the others
    schedule = make_schedule(starts, costs, 1, 8, SMS, max_split=10**6, long_tile=LONG_BLOCKS_UNEVEN)
    assert_complete(schedule, costs, 1, 8)


def assert_complete(schedule: Schedule, costs: np.ndarray, heads_kv: int, group: int) -> None:
    """Every block of every tile meets every query head once; only items of one query head are in pieces."""
    assert schedule.items.dtype == np.int32, "kernels read them as they are"
    met = [np.zeros((heads_kv * group, cost), dtype=int) for cost in costs]
    seen = set()
    for tile, heads, block, blocks in schedule.items.tolist():
        first, count = heads & 0xFFFF, heads >> 16
        assert count in (1, group) and first % count == 0
        assert (count < group) == (tile < schedule.num_split)
        assert blocks == 0 or count < group, "pieces add to sums"
        assert block + blocks <= costs[tile]
        met[tile][first : first + count, block : block + (blocks or costs[tile])] += 1
        seen |= {(tile, head) for head in range(first, first + count)}
    assert all((m == 1).all() for m in met)
    assert len(seen) == len(costs) * heads_kv * group, "tiles that see nothing are written too"


def test_long_tiles_follow_each_other_head_by_head_and_short_ones_take_all_heads():
    plan = backward_plan(builders.causal(32768))
    schedule = schedule_of(plan, 8, 8, SMS, max_split=10**6, long_tile=LONG_BLOCKS)
    assert schedule.num_split == int((plan.costs >= LONG_BLOCKS).sum())
    long = [item for item in unpack(schedule.items) if item[2] == 1]
    heads = [head for _, head, _ in long]
    first = heads[: 32 * schedule.num_split]
    assert first == sorted(first) and len(set(first)) == 32
    rows = [int(plan.tiles[tile, 0]) for tile, head, _ in long if head == 0]
    assert rows == sorted(rows)
    assert unpack(schedule.items)[-len(long) :] == long, "some of these are sorted so that SMs end together"


@pytest.mark.parametrize(
    "mask",
    [builders.causal(8192), builders.causal(32768), builders.varlen(doc_lengths=[9000, 3000, 6000], causal=True)],
)
def test_tiles_of_unlike_length_are_worked_on_section_by_section(mask):
    plan = backward_plan(mask)
    schedule = schedule_of(plan, 8, 8, SMS, max_split=10**6, long_tile=long_tile(*drift(plan)))
    assert_complete(schedule, plan.costs, 8, 8)
    work = [(tile, head) for tile, head, heads in unpack(schedule.items) if heads == 1]
    assert schedule.num_split > SECTION_TILES and not schedule.items[:, 2:].any()
    places: list[list[int]] = [[] for _ in range(schedule.num_split)]
    for place, (tile, head) in enumerate(work):
        assert head == len(places[tile])
        places[tile].append(place)
    for of_tile in places:
        assert len(of_tile) == 64 and of_tile[-1] - of_tile[0] < 64 * SECTION_TILES
    assert places[0][0] < SECTION_TILES, "the section with the longest tile is the first"
    longest, mean = length_of_work(schedule.items, plan)
    assert longest <= 1.03 * mean


def test_with_heads_of_64_causal_documents_are_sections_and_one_alone_is_not():
    for mask, same in ((builders.causal(16384), False), (builders.varlen(doc_lengths=[4096] * 4, causal=True), True)):
        plan = backward_plan(mask)
        wide, narrow = (
            schedule_of(plan, 8, 8, SMS, max_split=10**6, long_tile=long_tile(*drift(plan)), narrow=narrow)
            for narrow in (False, True)
        )
        assert np.array_equal(wide.items, narrow.items) == same
        first = [head for _, head, heads in unpack(narrow.items) if heads == 1][: narrow.num_split]
        assert (set(first) == {0}) != same  # all tiles of a head follow each other


def test_tiles_that_are_not_long_are_split_where_sms_would_idle():
    plan = backward_plan(builders.full(1024))
    schedule = schedule_of(plan, 1, 8, SMS, max_split=10**6, long_tile=LONG_BLOCKS_MOVING)
    assert_complete(schedule, plan.costs, 1, 8)
    assert plan.costs.max() < LONG_BLOCKS_MOVING and length_of_work(schedule.items, plan)[0] == plan.costs.max()


def test_long_tiles_for_which_there_is_no_room_follow_each_other_key_head_by_key_head():
    plan = backward_plan(builders.full(65536))
    schedule = schedule_of(plan, 8, 8, SMS, max_split=100, long_tile=LONG_BLOCKS)
    whole = [(tile, head) for tile, head, count, *_ in unpack(schedule.items) if count == 8]
    assert schedule.num_split == 100 and {tile for tile, _ in whole} == set(range(100, len(plan.costs)))
    assert [head for _, head in whole] == sorted(head for _, head in whole)


@pytest.mark.parametrize(("max_split", "apart"), [(10**6, 1), (0, 8)])
def test_where_dq_is_added_neighbouring_tiles_of_a_window_follow_each_other(max_split, apart):
    plan = backward_plan(builders.sliding_window(65536, 1023, 0))
    schedule = schedule_of(plan, 8, 8, SMS, max_split=max_split, long_tile=long_tile(*drift(plan)))
    whole = unpack(schedule.items)
    assert schedule.num_split == 0 and {count for *_, count in whole} == {8}
    near = whole[: -4 * SMS]  # the last go by decreasing cost
    places = {(int(plan.tiles[tile, 0]), head): i for i, (tile, head, _) in enumerate(near)}
    distances = [places[row + 128, head] - i for (row, head), i in places.items() if (row + 128, head) in places]
    assert len(distances) > 0.9 * len(near) and set(distances) == {apart}


@pytest.mark.parametrize(("mask", "count"), [(builders.causal(65536), 4), (builders.full(65536), 4)])
def test_the_longest_tiles_are_worked_on_in_pieces_of_all_tiles_the_first_before_the_second(mask, count):
    plan = backward_plan(mask)
    schedule = schedule_of(plan, 8, 8, SMS, max_split=10**6, long_tile=long_tile(*drift(plan)))
    assert_complete(schedule, plan.costs, 8, 8)
    of_first = [first for (_, head, heads), (first, _) in zip(
        unpack(schedule.items), blocks_of(schedule.items, plan), strict=True) if head == 0 and heads == 1]  # fmt: skip
    assert of_first == sorted(of_first) and set(of_first) == {PIECE_BLOCKS * i for i in range(count)}
    longest, mean = length_of_work(schedule.items, plan)
    assert longest <= 1.03 * mean


def test_tiles_of_which_there_are_few_pieces_are_not_cut_and_there_are_never_too_many():
    for mask in (builders.causal(16384), builders.full(32768), builders.sliding_window(65536, 1023, 0)):
        plan = backward_plan(mask)
        schedule = schedule_of(plan, 8, 8, SMS, max_split=10**6, long_tile=long_tile(*drift(plan)))
        assert (schedule.items[: -3 * SMS, 3] == 0).all()
    costs = np.full(1 << 13, 1 << 14)  # a million queries and keys
    schedule = make_schedule(128 * np.arange(len(costs)), costs, 8, 8, SMS, max_split=10**6, long_tile=LONG_BLOCKS)
    assert len(schedule.items) < 2 * MOST_PIECES


def prefix_tree(length: int):
    """A prompt of an eighth of the tokens, four branches of a 16th each, four answers to each."""
    prompt, branch, answer = length // 8, length // 16, length * 5 // 128
    nodes = [prompt, *[branch, *[answer] * 4] * 4]
    return builders.prefix_tree(nodes, [[0, 5 * i + 1, 5 * i + 2 + j] for i in range(4) for j in range(4)])[0]


def heads_in_use(items: np.ndarray, plan: TilePlan) -> float:
    """Query heads that SMs work on at a time, on average, of items of one head; an item costs 6 blocks more."""
    busy, head_of, in_use, before = [(0, sm) for sm in range(SMS)], dict[int, int](), 0.0, 0
    for (_, head, heads), (_, blocks) in zip(unpack(items), blocks_of(items, plan), strict=True):
        time, sm = busy[0]
        in_use, before = in_use + len(set(head_of.values())) * (time - before), time
        head_of.pop(sm, None)
        if heads == 1:
            head_of[sm] = head
        heapq.heapreplace(busy, (time + blocks * heads + 6, sm))
    return in_use / before


@pytest.mark.parametrize("length", [8192, 16384])
def test_tiles_much_longer_than_others_are_cut_so_that_few_heads_are_in_use(length):
    plan = backward_plan(prefix_tree(length))
    options = {"max_split": 10**6, "long_tile": long_tile(*drift(plan))}
    head_bytes = 1024 * length  # q, dout and the sums of dq, 128 columns
    cut = schedule_of(plan, 8, 8, SMS, **options)
    assert_complete(cut, plan.costs, 8, 8)
    assert heads_in_use(cut.items, plan) * head_bytes < 1.75 * tuning.L2_BYTES
    narrow = schedule_of(plan, 8, 8, SMS, **options, narrow=True)  # half the bytes
    with mock.patch.object(tuning, "L2_BYTES", 1 << 40):
        whole = schedule_of(plan, 8, 8, SMS, **options)
    assert heads_in_use(whole.items, plan) * head_bytes > 3.5 * tuning.L2_BYTES
    assert np.array_equal(narrow.items, whole.items) and not whole.items[:, 3].any()


@pytest.mark.parametrize(
    ("long", "blocks", "pieces"),
    [
        (LONG_BLOCKS, 512, [512]),
        (LONG_BLOCKS, 513, [256, 257]),
        (LONG_BLOCKS, 576, [256, 320]),
        (LONG_BLOCKS, 577, [256, 256, 65]),
        (LONG_BLOCKS_UNEVEN, 320, [320]),
        (LONG_BLOCKS_UNEVEN, 321, [256, 65]),
    ],
)
def test_pieces_are_of_one_length_but_the_last_of_a_tile_is_up_to_a_quarter_longer(long, blocks, pieces):
    costs = np.full(30, blocks)
    schedule = make_schedule(128 * np.arange(30), costs, 1, 2, 7, max_split=10**6, long_tile=long)
    assert_complete(schedule, costs, 1, 2)
    assert [
        count or blocks for tile, heads, _, count in schedule.items.tolist() if (tile, heads) == (0, 1 << 16)
    ] == pieces


PACKED = builders.varlen(doc_lengths=[1024] * 17, causal=False)


@pytest.mark.parametrize(
    ("mask", "heads_kv", "group", "limit"),
    [
        *((mask, 8, 8, 1.05) for mask in (builders.full(8192), builders.causal(8192), builders.causal(2048))),
        (PACKED, 1, 8, 1.1),  # 1,088 items of 16 blocks: nine rounds
        (PACKED, 1, 64, 1.05),
        (PACKED, 2, 16, 1.05),
    ],
)
def test_no_processor_is_left_alone_at_the_end(mask, heads_kv, group, limit):
    plan = backward_plan(mask)
    schedule = schedule_of(plan, heads_kv, group, SMS, max_split=10**6, long_tile=long_tile(*drift(plan)))
    longest, mean = length_of_work(schedule.items, plan)
    assert longest <= limit * mean


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("group", "packed"), [(8, 1), (1, 8), (2, 4)])
@pytest.mark.parametrize("length", [4096, 8192, 16384])
def test_tiles_that_stay_whole_end_together(length, group, packed, causal):
    lengths = np.random.default_rng(0).integers(64, 640, length // 400)
    mask = builders.varlen(doc_lengths=[*lengths.tolist(), length - int(lengths.sum())], causal=causal)
    plan = plan_tiles(transpose(mask.bands), length, 128, 64 // packed, align=UNIT // packed, hide_tail=True)
    schedule = schedule_of(plan, 8, group, SMS, max_split=0, long_tile=packed * long_tile(*drift(plan)))
    longest, mean = length_of_work(schedule.items, plan)
    falling = length_of_work(schedule.items[np.argsort(schedule.items[:, 0], kind="stable")], plan)[0]
    assert longest <= max(1.07 * mean, falling)


@pytest.mark.parametrize("length", [32768, 65536])
def test_many_tiles_that_stay_whole_end_with_the_shortest(length):
    ends = np.cumsum(np.random.default_rng(0).integers(64, 640, length // 64))
    mask = builders.varlen(doc_lengths=np.diff(ends[ends < length], prepend=0, append=length).tolist(), causal=True)
    plan = plan_tiles(transpose(mask.bands), length, 128, 8, align=2, hide_tail=True)
    schedule = schedule_of(plan, 8, 1, SMS, max_split=0, long_tile=8 * long_tile(*drift(plan)))
    longest, mean = length_of_work(schedule.items, plan)
    assert longest <= 1.03 * mean
    begins = plan.tiles[schedule.items[: -4 * SMS, 0], 0]
    assert (np.diff(begins) < 0).mean() < 0.01, "all but the last few for each SM are near what they share queries with"


@pytest.mark.parametrize(("length", "limit"), [(4096, 1.04), (8192, 1.005), (16384, 1.003), (32768, 1.003)])
def test_the_last_items_of_equal_ones_are_cut(length, limit):
    plan = backward_plan(builders.full(length))
    schedule = schedule_of(plan, 8, 8, SMS, max_split=10**6, long_tile=LONG_BLOCKS)
    longest, mean = length_of_work(schedule.items, plan)
    assert longest <= limit * mean
    assert (schedule.items[: -3 * SMS, 3] == 0).all() and min(n for _, n in blocks_of(schedule.items, plan)) >= 8


@pytest.mark.parametrize(
    ("mask", "differ", "blocks"),
    [
        (builders.full(8192), False, LONG_BLOCKS),
        (builders.varlen(doc_lengths=[1000] * 8, causal=False), False, LONG_BLOCKS),
        (builders.causal(8192), True, LONG_BLOCKS_UNEVEN),
        (builders.varlen(doc_lengths=[1000] * 8, causal=True), True, LONG_BLOCKS_UNEVEN),
        (builders.sliding_window(32768, 1024, causal=True), False, LONG_BLOCKS_MOVING),
    ],
)
def test_what_is_a_long_tile_depends_on_what_neighbours_share(mask, differ, blocks):
    moved = drift(backward_plan(mask))
    assert (differ_in_length(*moved), long_tile(*moved)) == (differ, blocks)


def test_small_problems_are_split_so_that_processors_have_work():
    plan = backward_plan(builders.full(2048))
    assert schedule_of(plan, 1, 8, SMS, max_split=10**6, long_tile=LONG_BLOCKS).num_split == len(plan.tiles)
    assert schedule_of(plan, 1, 8, SMS, max_split=0, long_tile=LONG_BLOCKS).num_split == 0


@settings(max_examples=50)
@given(costs=st.lists(st.integers(0, 50), max_size=300), num_sms=st.integers(0, 140))
def test_the_makespan_is_the_same_where_nothing_is_built(costs, num_sms):
    found = schedule._makespan(costs, num_sms)
    if cpp_tiles.available():
        assert cpp_tiles.makespan(np.array(costs, dtype=np.int64), num_sms) == found
    assert found >= max(costs, default=0) and found * max(1, num_sms) >= sum(costs)
