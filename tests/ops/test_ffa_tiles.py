"""Tile plans against the dense mask: every visible pair in exactly one pass and one block."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_magi.mask import bands as bd
from megatron_magi.mask.dense import dense_bands
from megatron_magi.ops.hopper.plan import _best_splits
from megatron_magi.ops.hopper.tiles import EVERYTHING, SUB_ROWS, TilePlan, block_turns, plan_tiles, transpose


def check_plan(plan: TilePlan, visible: np.ndarray) -> None:
    num_rows, num_columns = visible.shape
    bm, bn = plan.block_m, plan.block_n
    padded = np.zeros((-(-num_rows // bm) * bm, -(-num_columns // bn) * bn), dtype=bool)
    padded[:num_rows, :num_columns] = visible
    covered = np.zeros(padded.shape, dtype=np.int64)
    assert sorted(plan.tiles[:, 0].tolist()) == list(range(0, len(padded), bm))
    used = []
    for row0, first, past, blocks in plan.tiles.tolist():
        used += range(first, past)
        assert blocks == sum(int(plan.passes[i, 1] - plan.passes[i, 0]) for i in range(first, past))
        for i in range(first, past):
            cover_pass(plan, i, row0, num_rows, padded, covered)
    assert sorted(used) == list(range(len(plan.passes)))
    np.testing.assert_array_equal(covered[:num_rows], padded[:num_rows].astype(np.int64))
    check_turns(plan)
    costs = plan.tiles[:, 3]
    assert np.all(costs[:-1] + 1 + plan.tiles[:-1, 2] - plan.tiles[:-1, 1] >= costs[1:])


def check_turns(plan: TilePlan) -> None:
    turns, visits = block_turns(plan), {}
    assert len(turns) == plan.num_blocks
    for _, first, past, _ in plan.tiles.tolist():
        for begin, end, offset in plan.passes[first:past, [0, 1, 6]].tolist():
            for block in range(begin, end):
                assert turns[offset + block - begin] == visits.setdefault(block, 0)
                visits[block] += 1


def cover_pass(plan: TilePlan, i: int, row0: int, num_rows: int, padded: np.ndarray, covered: np.ndarray) -> None:
    begin, end = plan.passes[i, :2].tolist()
    assert 0 <= begin < end
    bm, bn = plan.block_m, plan.block_n
    for r in range(bm):
        half = r // SUB_ROWS
        lo, hi = plan.bounds[i, r].tolist()
        full_begin, full_end = plan.passes[i, 2 + 2 * half : 4 + 2 * half].tolist()
        assert begin <= full_begin <= full_end <= end
        assert lo <= full_begin * bn or full_begin == full_end
        assert hi >= full_end * bn or full_begin == full_end
        if row0 + r >= num_rows:
            assert (lo, hi) == (0, EVERYTHING)
        elif lo < hi:
            assert begin * bn <= lo and hi <= end * bn
            covered[row0 + r, lo:hi] += 1


@st.composite
def disjoint_bands(draw, num_rows: int, num_columns: int):
    """Random bands without overlap: random cuts of rows, in each random column intervals and diagonals."""
    table = []
    cuts = sorted([*draw(st.lists(st.integers(0, num_rows), max_size=8)), 0, num_rows])
    for q0, q1 in itertools.pairwise(cuts):
        edges = sorted(draw(st.lists(st.integers(0, num_columns), max_size=6)))
        for k0, k1 in itertools.pairwise(edges):
            kind = draw(st.integers(0, 4))
            d = draw(st.integers(-num_rows, num_columns))
            width = draw(st.integers(1, 60))
            lo = {0: -bd.NO_DIAGONAL, 1: -bd.NO_DIAGONAL, 2: d, 3: d, 4: None}[kind]
            hi = {0: bd.NO_DIAGONAL, 1: d, 2: bd.NO_DIAGONAL, 3: d + width, 4: None}[kind]
            if lo is not None and q0 < q1 and k0 < k1:
                table.append([q0, q1, k0, k1, lo, hi])
    return np.array(table, dtype=np.int64).reshape(-1, 6)


@settings(max_examples=150, deadline=None)
@given(data=st.data(), num_rows=st.integers(1, 300), num_columns=st.integers(1, 300))
def test_every_visible_pair_is_in_exactly_one_pass(data, num_rows, num_columns):
    bands = data.draw(disjoint_bands(num_rows, num_columns))
    block_m, block_n = data.draw(st.sampled_from([(128, 128), (128, 176), (64, 64), (128, 80), (128, 64)]))
    visible = dense_bands(bands, num_rows, num_columns)
    check_plan(plan_tiles(bands, num_rows, num_columns, block_m, block_n), visible)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), num_rows=st.integers(1, 300), num_columns=st.integers(1, 300))
def test_transposed_bands_are_the_transposed_mask(data, num_rows, num_columns):
    bands = data.draw(disjoint_bands(num_rows, num_columns))
    visible = dense_bands(bands, num_rows, num_columns)
    turned = transpose(bands)
    np.testing.assert_array_equal(dense_bands(turned, num_columns, num_rows), visible.T)
    check_plan(plan_tiles(turned, num_columns, num_rows, 128, 64), visible.T)


def documents(lengths, causal: bool) -> np.ndarray:
    ends = np.cumsum(lengths)
    starts = ends - lengths
    table = np.stack([starts, ends, starts, ends, np.full_like(ends, -bd.NO_DIAGONAL), np.full_like(ends, 1)], axis=1)
    if not causal:
        table[:, bd.D_HI] = bd.NO_DIAGONAL
    return table.astype(np.int64)


def test_short_documents_of_one_tile_share_a_pass():
    plan = plan_tiles(documents([13] * 30, causal=True), 390, 390, 128, 128)
    assert len(plan.passes) == 4
    assert plan.num_blocks <= 4 + 6


def test_touching_rectangles_are_one_interval():
    table = np.array([[0, 128, i * 10, i * 10 + 10, -bd.NO_DIAGONAL, bd.NO_DIAGONAL] for i in range(50)])
    plan = plan_tiles(table, 128, 500, 128, 128)
    assert plan.passes[:, :2].tolist() == [[0, 4]]
    assert plan.bounds[0, :, :].tolist() == [[0, 500]] * 128


def test_causal_plan_masks_only_the_diagonal():
    plan = plan_tiles(documents([1024], causal=True), 1024, 1024, 128, 128)
    assert plan.tiles[0].tolist()[0] == 896
    blocks = plan.passes[:, 1] - plan.passes[:, 0]
    full = plan.passes[:, 3] - plan.passes[:, 2]
    assert (blocks - full).tolist() == [1] * 8


@pytest.mark.parametrize("num_columns", [0, 5])
def test_empty_mask_still_has_all_tiles(num_columns):
    plan = plan_tiles(bd.empty_bands(), 200, num_columns, 128, 128)
    assert plan.tiles.tolist() == [[0, 0, 0, 0], [128, 0, 0, 0]]
    assert len(plan.passes) == 0


def test_groups_are_split_only_where_processors_would_idle():
    assert _best_splits((32,) * 64, 8, 8, 132) == 1
    assert _best_splits((16,) * 16, 1, 8, 132) == 8
    assert _best_splits((16,) * 16, 1, 1, 132) == 1
    assert _best_splits((), 8, 8, 132) == 1
