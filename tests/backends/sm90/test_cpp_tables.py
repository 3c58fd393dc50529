"""Tables and work items that the C++ library makes are those of Python, bit by bit."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_magi.backends.sm90 import cpp_tables
from megatron_magi.backends.sm90.plan import HostPlan, Tiling, make_host_plan
from megatron_magi.backends.sm90.schedule import Schedule, make_schedule
from megatron_magi.backends.sm90.tuning import LONG_BLOCKS, LONG_BLOCKS_MOVING, LONG_BLOCKS_UNEVEN
from megatron_magi.backends.tiles import cpp_tiles
from megatron_magi.backends.tiles.tiles import GAP
from megatron_magi.mask import bands as bd
from megatron_magi.mask import builders
from megatron_magi.plan import make_plan
from tests.backends.tiles.test_tiles import disjoint_bands

pytestmark = pytest.mark.skipif(not cpp_tiles.available(), reason="the C++ library is not built")
ROW_SHAPES = [((128, 128), 1), ((128, 128), 4), ((64, 128), 8), ((192, 64), 1), ((128, 96), 2)]
KEY_SHAPES = [((128, 64), 1), ((128, 64), 4), ((64, 64), 1), ((128, 64), 8)]


def assert_equal(ours: HostPlan, theirs: HostPlan) -> None:
    for name in ("starts", "costs", "table"):
        a, b = getattr(ours, name), getattr(theirs, name)
        assert a.dtype == b.dtype and a.flags.c_contiguous
        np.testing.assert_array_equal(a, b)
    for name in ("offsets", "step", "heads_inner", "long_tile", "packed", "arriving"):
        assert getattr(ours, name) == getattr(theirs, name), name


def items_of(plan: HostPlan, *args: int) -> tuple[Schedule, Schedule]:
    """Its schedule by the library, and by Python."""
    ours, by_python = replace(plan, planner="native"), replace(plan, planner="python")
    with mock.patch.object(cpp_tiles, "library", side_effect=AssertionError("asked for Python")):
        theirs = by_python.schedule(*args)
    return ours.schedule(*args), theirs


def assert_same_items(ours: Schedule, theirs: Schedule) -> None:
    assert ours.items.dtype == theirs.items.dtype and ours.num_split == theirs.num_split
    np.testing.assert_array_equal(ours.items, theirs.items)


@settings(max_examples=250)
@given(data=st.data(), num_rows=st.integers(1, 700), num_keys=st.integers(1, 700), is_backward=st.booleans())
def test_tables_of_any_mask_are_those_of_python(data, num_rows, num_keys, is_backward):
    bands, arriving = data.draw(disjoint_bands(num_rows, num_keys)), None
    num_arriving = data.draw(st.sampled_from([0, 0, 1, num_keys - 1]))
    if 0 < num_arriving < num_keys:
        first = num_keys - num_arriving
        bands = bands[(bands[:, bd.K1] <= first) | (bands[:, bd.K0] >= first)]
        arrives = bands[:, bd.K0] >= first
        bands = np.concatenate([bands[~arrives], bd.shift_keys(bands[arrives], GAP)])
        arriving = first + GAP, num_arriving, data.draw(st.integers(0, 20)), data.draw(st.integers(0, 60))
        num_keys += GAP
    shape, packed = data.draw(st.sampled_from(KEY_SHAPES if is_backward else ROW_SHAPES))
    tiling = Tiling(is_backward, num_keys if is_backward else num_rows, shape, packed, arriving)
    ours, theirs = (make_host_plan(bands, tiling, planner) for planner in ("native", "python"))
    assert_equal(ours, theirs)
    if is_backward:
        assert_same_items(*items_of(ours, 2, 8 // packed, 132, data.draw(st.sampled_from([0, 3, 1000])), False))


@settings(max_examples=60)
@given(
    lengths=st.lists(st.integers(1, 3000), min_size=1, max_size=40),
    causal=st.booleans(),
    num_ranks=st.integers(1, 4),
    of_keys=st.sampled_from(KEY_SHAPES),
    of_rows=st.sampled_from(ROW_SHAPES),
)
def test_tables_of_stages_are_made_in_one_call_and_are_those_of_python(lengths, causal, num_ranks, of_keys, of_rows):
    mask = builders.varlen(doc_lengths=lengths, causal=causal)
    plan = make_plan(mask, cp_size=num_ranks).for_rank(0)
    for stage, bands in enumerate(plan.bands):
        num_keys = plan.transfers[stage - 1].num_recv if stage else plan.num_rows
        for tiling in (Tiling(True, num_keys, *of_keys), Tiling(False, plan.num_rows, *of_rows)):
            if tiling.num_rows:
                assert_equal(make_host_plan(bands, tiling), make_host_plan(bands, tiling, "python"))


def test_where_rows_have_two_intervals_in_a_pass_numpy_finds_passes():
    bands = np.array([[0, 64, 0, 10, -(1 << 40), 1 << 40], [0, 64, 20, 40, -(1 << 40), 1 << 40]], dtype=np.int64)
    for tiling in (Tiling(False, 64, (128, 128)), Tiling(True, 64, (128, 64))):
        made = cpp_tables.host_plan(bands, tiling)
        assert (made is None) == (not tiling.is_backward)
        assert_equal(make_host_plan(bands, tiling), make_host_plan(bands, tiling, "python"))


@st.composite
def tiles_of_a_pass(draw):
    """Starts and costs of tiles: of documents, of one size, a few much longer than others, in falling or any order."""
    count = draw(st.integers(1, 80))
    rng = np.random.default_rng(draw(st.integers(0, 1 << 20)))
    starts = np.cumsum(rng.integers(1, 129, count))
    kind = draw(st.sampled_from(["documents", "equal", "falling", "few long", "any"]))
    if kind == "documents":
        ends = np.repeat(np.cumsum(rng.integers(1, 12, count) * 128), 6)[:count]
        starts = np.arange(count) * 128
        costs = np.maximum(-(-(ends - starts) // 64), 0)
        order = np.argsort(-costs, kind="stable")
        return starts[order], costs[order]
    if kind == "few long":
        num_long = draw(st.integers(1, min(count, 12)))
        costs = np.sort(np.append(rng.integers(300, 900, num_long), rng.integers(1, 20, count - num_long)))[::-1]
        return rng.permutation(starts), costs
    most = draw(st.sampled_from([2, 40, 900]))
    costs = np.full(count, most) if kind == "equal" else rng.integers(0, most, count)
    return rng.permutation(starts), np.sort(costs)[::-1] if kind == "falling" else costs


@settings(max_examples=250)
@given(
    tiles=tiles_of_a_pass(),
    heads_kv=st.sampled_from([1, 2, 8]),
    group=st.sampled_from([1, 2, 8]),
    num_sms=st.sampled_from([1, 7, 132]),
    max_split=st.sampled_from([0, 3, 1000]),
    long_tile=st.sampled_from([LONG_BLOCKS, LONG_BLOCKS_UNEVEN, LONG_BLOCKS_MOVING, 64]),
    narrow=st.booleans(),
    own=st.none() | st.tuples(st.integers(0, 9000), st.integers(0, 3000)),
)
def test_work_items_are_those_of_python(tiles, heads_kv, group, num_sms, max_split, long_tile, narrow, own):
    args = (*tiles, heads_kv, group, num_sms)
    options = {"max_split": min(max_split, len(tiles[0])), "long_tile": long_tile, "narrow": narrow, "own": own}
    ours = make_schedule(*args, **options)
    with mock.patch.object(cpp_tiles, "_library", return_value=None):
        assert_same_items(ours, make_schedule(*args, **options))
