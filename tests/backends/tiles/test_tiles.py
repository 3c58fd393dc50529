"""Tile plans against the dense mask: every visible pair in exactly one pass and one block."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megatron_magi.backends.sm90.plan import Tiling, make_host_plan
from megatron_magi.backends.sm90.schedule import best_splits
from megatron_magi.backends.tiles import costs as tile_costs
from megatron_magi.backends.tiles import cpp_tiles, tiles
from megatron_magi.backends.tiles.tile_starts import _segment_columns
from megatron_magi.backends.tiles.tiles import (
    EVERYTHING,
    UNIT,
    TilePlan,
    descending,
    pack_columns,
    plan_tiles,
)
from megatron_magi.config import DispatchConfig, MagiConfig
from megatron_magi.mask import bands as bd
from megatron_magi.mask import builders
from megatron_magi.mask.bands import transpose
from megatron_magi.mask.dense import dense_bands
from megatron_magi.plan import make_plan


def check_plan(plan: TilePlan, visible: np.ndarray, align: int = 1, parts: int = 2) -> None:
    num_rows, num_columns = visible.shape
    covered = np.zeros((num_rows, num_columns), dtype=np.int64)
    used, next_row = [], 0
    for row0, _, _, rows in plan.tiles[np.argsort(plan.tiles[:, 0])].tolist():
        assert row0 == next_row and 0 < rows <= plan.block_m
        next_row = row0 + rows
    assert next_row == num_rows
    for (row0, first, past, rows), cost in zip(plan.tiles.tolist(), plan.costs.tolist(), strict=True):
        used += range(first, past)
        assert cost == plan.passes[first:past, 1].sum()
        for i in range(first, past):
            assert plan.passes[i, 0] % align == 0
            cover_pass(plan, i, row0, rows, covered, parts)
    assert sorted(used) == list(range(len(plan.passes)))
    np.testing.assert_array_equal(covered, visible.astype(np.int64))
    assert np.all(plan.costs[:-1] + 1 + plan.tiles[:-1, 2] - plan.tiles[:-1, 1] >= plan.costs[1:])


def cover_pass(plan: TilePlan, i: int, row0: int, rows: int, covered: np.ndarray, parts: int) -> None:
    column, count = plan.passes[i, :2].tolist()
    assert count > 0
    blocks = [(column + j * plan.step, column + j * plan.step + plan.block_n) for j in range(count)]
    begin, end = min(blocks)[0], max(blocks)[1]
    assert begin >= 0
    if parts == 1:
        assert plan.passes[i, 2:4].tolist() == plan.passes[i, 4:6].tolist()
    for r in range(plan.block_m):
        part = parts * r // plan.block_m
        lo, hi = plan.bounds[i, r].tolist()
        full_begin, full_end = plan.passes[i, 2 + 2 * part : 4 + 2 * part].tolist()
        assert 0 <= full_begin <= full_end <= count
        for first, past in blocks[full_begin:full_end]:
            assert lo <= first and past <= hi
        if r >= rows:
            assert (lo, hi) in ((0, EVERYTHING), (0, 0))
        elif lo < hi:
            assert begin <= lo and hi <= end
            covered[row0 + r, lo:hi] += 1


@st.composite
def disjoint_bands(draw, num_rows: int, num_columns: int):
    """Random bands without overlap: random cuts of rows, in each random column intervals and diagonals.

    Columns are multiples of a step, so that bands of different rows often touch; so do bands along a diagonal.
    Diagonals often pass by a corner, where they may cut off nothing or everything.
    """
    table = []
    step = draw(st.sampled_from([1, 20]))
    cuts = sorted([*draw(st.lists(st.integers(0, num_rows), max_size=8)), 0, num_rows])
    for q0, q1 in itertools.pairwise(cuts):
        edges = [x * step for x in sorted(draw(st.lists(st.integers(0, num_columns // step), max_size=6)))]
        for k0, k1 in itertools.pairwise(edges):
            kind = draw(st.integers(0, 5))
            corner = draw(st.sampled_from([k0, k1])) - draw(st.sampled_from([q0, q1]))
            d = draw(st.integers(-num_rows, num_columns) | st.integers(corner - 1, corner + 1))
            width = draw(st.integers(0, 60))
            lo = {0: -bd.NO_DIAGONAL, 1: -bd.NO_DIAGONAL, 2: d, 3: d, 4: None, 5: d}[kind]
            hi = {0: bd.NO_DIAGONAL, 1: d, 2: bd.NO_DIAGONAL, 3: d + width, 4: None, 5: bd.NO_DIAGONAL}[kind]
            if lo is not None and q0 < q1 and k0 < k1:
                table.append([q0, q1, k0, k1, lo, hi])
                if kind == 5:
                    table.append([q0, q1, k0, k1, -bd.NO_DIAGONAL, d])
    return np.array(table, dtype=np.int64).reshape(-1, 6)


# Rows and columns of a block: of the forward and of dq, of one head and of packed ones; of dk and dv.
SHAPES = [(128, 128), (64, 128), (32, 128), (16, 128), (128, 96), (16, 96), (128, 64), (64, 64)]
SHAPES += [(192, 64), (96, 64), (48, 64), (24, 64)]
EDGES = [0, 1, 63, 64, 65, 128, 129, 130]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_slice_that_begins_and_ends_beside_the_edges_of_tiles_is_covered(shape):
    size = EDGES[-1]
    rows = list(itertools.combinations(EDGES, 2))
    for number, ((q0, q1), (k0, k1)) in enumerate(itertools.product(rows, rows)):
        kind = number % 4
        d_hi = bd.NO_DIAGONAL if kind in (0, 2) else k1 - q1 + 1  # causal: the last row sees the last key
        d_lo = -bd.NO_DIAGONAL if kind in (0, 1) else k0 - q0
        bands = np.array([[q0, q1, k0, k1, d_lo, d_hi]], dtype=np.int64)
        plan = plan_tiles(bands, size, *shape, hide_tail=number % 3 == 0)
        check_plan(plan, dense_bands(bands, size, size), 1)


@settings(max_examples=150)
@given(data=st.data(), num_rows=st.integers(1, 300), num_columns=st.integers(1, 300))
def test_every_visible_pair_is_in_exactly_one_pass(data, num_rows, num_columns):
    bands = data.draw(disjoint_bands(num_rows, num_columns))
    block_m, block_n = data.draw(st.sampled_from(SHAPES))
    visible = dense_bands(bands, num_rows, num_columns)
    align = data.draw(st.sampled_from([1, UNIT]))
    parts = data.draw(st.sampled_from([3] if block_m % 3 == 0 else [1, 2]))
    options = {"hide_tail": data.draw(st.booleans()), "parts": parts}
    plan = plan_tiles(bands, num_rows, block_m, block_n, align=align, **options)
    check_plan(plan, visible, align, parts)
    check_plan(descending(plan), visible, align, parts)


built = pytest.mark.skipif(not cpp_tiles.available(), reason="the planner in C++ is not built")


def assert_planned_alike(bands: np.ndarray, *sizes: int, **options) -> None:
    ours, theirs = plan_tiles(bands, *sizes, **options), cpp_tiles.plan_tiles(bands, *sizes, **options)
    for field in dataclasses.fields(TilePlan):
        a, b = getattr(ours, field.name), getattr(theirs, field.name)
        if isinstance(a, np.ndarray):
            assert a.dtype == b.dtype, field.name
            np.testing.assert_array_equal(a, b, field.name)
        else:
            assert a == b


@built
@settings(max_examples=400)
@given(data=st.data(), num_rows=st.integers(1, 700), num_columns=st.integers(1, 700))
def test_tiles_of_any_mask_are_those_of_the_planner_in_python(data, num_rows, num_columns):
    bands = data.draw(disjoint_bands(num_rows, num_columns))
    scale = data.draw(st.sampled_from([1, 1, 1 << 20]))  # long rows, whose costs are large numbers
    bands[:, bd.K0 :] = np.clip(scale * bands[:, bd.K0 :], -bd.NO_DIAGONAL, bd.NO_DIAGONAL)
    block_m, block_n = data.draw(st.sampled_from(SHAPES))
    assert_planned_alike(
        bands, num_rows, block_m, block_n,
        align=data.draw(st.sampled_from([1, 2, UNIT])), hide_tail=data.draw(st.booleans()),
        parts=data.draw(st.sampled_from([3] if block_m % 3 == 0 else [1, 2])),
        packed=data.draw(st.sampled_from([1, 8])),
    )  # fmt: skip


@built
@settings(max_examples=60)
@given(
    lengths=st.lists(st.integers(1, 3000), min_size=1, max_size=40),
    kind=st.sampled_from(["causal", "full", "window"]),
    num_ranks=st.integers(1, 6),
    algorithm=st.sampled_from(["affinity", "min_heap"]),
    shape=st.sampled_from(SHAPES),
    backward=st.booleans(),
)
def test_tiles_of_stages_are_those_of_the_planner_in_python(lengths, kind, num_ranks, algorithm, shape, backward):
    if kind == "window":
        mask = builders.sliding_window(left=100, right=0, doc_lengths=lengths)
    else:
        mask = builders.varlen(doc_lengths=lengths, causal=kind == "causal")
    assume(sum(lengths) >= num_ranks)
    plan = make_plan(mask, MagiConfig(dispatch=DispatchConfig(algorithm=algorithm)), num_ranks).for_rank(0)
    for stage, bands in enumerate(plan.bands):
        rows = (plan.transfers[stage - 1].num_recv if stage else plan.num_rows) if backward else plan.num_rows
        if rows:
            bands = transpose(bands) if backward else bands
            assert_planned_alike(bands, rows, *shape, align=UNIT if backward else 1, hide_tail=backward, parts=1)


@built
@settings(max_examples=100)
@given(data=st.data(), num_rows=st.integers(1, 900), num_columns=st.integers(1, 900))
def test_tiles_of_any_mask_are_ordered_as_in_python(data, num_rows, num_columns):
    bands = data.draw(disjoint_bands(num_rows, num_columns))
    plan = plan_tiles(bands, num_rows, 64, data.draw(st.sampled_from([8, 64, 128])))
    assert cpp_tiles.drift(plan) == tiles.drift(plan)
    first = data.draw(st.integers(0, num_columns))
    arriving = first, num_columns - first, data.draw(st.integers(0, 20)), data.draw(st.integers(0, 60))
    ours, theirs = cpp_tiles.local_first(plan, *arriving), tiles.local_first(plan, *arriving)
    np.testing.assert_array_equal(ours.tiles, theirs.tiles)
    np.testing.assert_array_equal(ours.costs, theirs.costs)
    tight = bd.tighten(bands)
    assert cpp_tiles.runs_and_area(tight) == (len(np.unique(tight[:, bd.Q0])), bd.areas(tight).sum())


@built
def test_masks_with_many_ranges_are_planned_alike():
    for mask in (
        builders.varlen(doc_lengths=[7] * 900),
        builders.causal(5000),
        builders.prefix_tree([40, 300, 70], [[0, 1], [0, 2]])[0],
    ):
        for bands in (mask.bands, transpose(mask.bands), mask.bands[:0]):
            assert_planned_alike(bands, mask.total_seqlen_q, 128, 64, align=UNIT)


@built
@pytest.mark.parametrize("gap", [63, 64, 65])
def test_columns_of_different_rows_share_a_pass_up_to_the_same_gap(gap):
    bands = rectangles([0, 50, 0, 100], [50, 100, 100 + gap, 300])
    assert len(plan_tiles(bands, 100, 128, 128).passes) == (1 if gap <= 64 else 2)
    assert_planned_alike(bands, 100, 128, 128)


@built
def test_no_numpy_is_needed_where_no_row_has_two_intervals_close_together(monkeypatch):
    # 128 rows see ten ranges that touch, by diagonals that only reach their corners; the next 64 and 64 two ranges that
    # are far from each other, those of the first 64 close to those of the others.
    table = [[0, 128, k, k + 10, k - 127, k + 10] for k in range(0, 100, 10)]
    table += [
        [q, q + 64, k + q // 8, k + q // 8 + 20, -bd.NO_DIAGONAL, bd.NO_DIAGONAL] for k in (0, 1000) for q in (128, 192)
    ]
    bands = np.random.default_rng(0).permutation(np.array(table, dtype=np.int64))
    assert_planned_alike(bands, 256, 128, 128)
    monkeypatch.delattr(cpp_tiles, "assign_passes")
    plan = cpp_tiles.plan_tiles(bands, 256, 128, 128)
    assert [len(range(*tile[1:3])) for tile in plan.tiles[np.argsort(plan.tiles[:, 0])]] == [1, 2]


@pytest.mark.parametrize(
    "planner", [plan_tiles, pytest.param(cpp_tiles.plan_tiles, marks=built)], ids=["python", "cpp"]
)
@pytest.mark.parametrize("more", [-1, 0])
def test_a_tile_is_closed_where_that_costs_no_more_than_it_saves(planner, more):
    # 64 rows see 1000 columns, the next 200 some of them and others, which all rows behind see. Closed after the first
    # rows the tiles are half a tile more, of so many columns and what a tile costs; that saves the columns not shared.
    shared = 100
    columns = tile_costs.TILE_COST_COLUMNS + 2 * shared + more
    bands = rectangles([0, 64, 0, 1000], [64, 264, 1000 - shared, 1000 - shared + columns], [264, 400, 1000, 5000])
    starts = sorted(planner(bands, 400, 128, 128).tiles[:, 0].tolist())
    assert (64 in starts) == (more == 0)


def test_which_planner_plans_tiles(monkeypatch):
    bands, tiling = builders.causal(300).bands, Tiling(True, 300, (128, 64))
    plans = [make_host_plan(bands, tiling, planner) for planner in ("auto", "python")]
    np.testing.assert_array_equal(plans[0].table, plans[1].table)
    monkeypatch.setattr(cpp_tiles, "_library", lambda: None)
    np.testing.assert_array_equal(make_host_plan(bands, tiling).table, plans[1].table)
    with pytest.raises(ValueError, match=r"^planner:"):
        make_host_plan(bands, tiling, "native")


@settings(max_examples=60)
@given(data=st.data(), num_rows=st.integers(1, 200), num_columns=st.integers(1, 200))
def test_columns_of_packed_heads_are_those_of_one_head_in_turns(data, num_rows, num_columns):
    bands = data.draw(disjoint_bands(num_rows, num_columns))
    packed, rows = data.draw(st.sampled_from([(1, 128), (2, 64), (4, 128), (8, 64)]))
    visible = np.repeat(dense_bands(bands, num_rows, num_columns), packed, axis=1)
    align = UNIT // packed
    plan = plan_tiles(bands, num_rows, rows, 64 // packed, align=align, hide_tail=True, parts=rows // 64, packed=packed)
    for turned in (plan, descending(plan)):
        wide = pack_columns(turned, packed)
        assert (wide.block_n, abs(wide.step)) == (64, 64)
        check_plan(wide, visible, UNIT, rows // 64)


@settings(max_examples=60)
@given(data=st.data(), num_rows=st.integers(1, 300), num_columns=st.integers(1, 300))
def test_transposed_bands_are_the_transposed_mask(data, num_rows, num_columns):
    bands = data.draw(disjoint_bands(num_rows, num_columns))
    visible = dense_bands(bands, num_rows, num_columns)
    turned = transpose(bands)
    np.testing.assert_array_equal(dense_bands(turned, num_columns, num_rows), visible.T)
    check_plan(descending(plan_tiles(turned, num_columns, 128, 64, align=UNIT, hide_tail=True)), visible.T, UNIT)


@settings(max_examples=60)
@given(data=st.data(), num_rows=st.integers(1, 100), num_columns=st.integers(1, 100))
def test_columns_of_rows_between_breaks_are_counted(data, num_rows, num_columns):
    bands = data.draw(disjoint_bands(num_rows, num_columns))
    bands[:, bd.D_LO], bands[:, bd.D_HI] = -bd.NO_DIAGONAL, bd.NO_DIAGONAL
    bands = np.unique(bands, axis=0)
    visible = dense_bands(bands, num_rows, num_columns).astype(np.int64)
    breaks = np.unique(np.concatenate([bands[:, bd.Q0], bands[:, bd.Q1], [0, num_rows]]))
    length, shared = _segment_columns(bands, breaks)
    assert length.tolist() == visible[breaks[:-1]].sum(axis=1).tolist()
    assert shared.tolist() == [0] + [(visible[i - 1] * visible[i]).sum() for i in breaks[1:-1].tolist()]


def documents(lengths, causal: bool) -> np.ndarray:
    ends = np.cumsum(lengths)
    starts = ends - lengths
    table = np.stack([starts, ends, starts, ends, np.full_like(ends, -bd.NO_DIAGONAL), np.full_like(ends, 1)], axis=1)
    if not causal:
        table[:, bd.D_HI] = bd.NO_DIAGONAL
    return table.astype(np.int64)


def test_short_documents_of_one_tile_share_a_pass():
    plan = plan_tiles(documents([13] * 30, causal=True), 390, 128, 128)
    assert plan.tiles[:, 3].tolist() == [117, 117, 117, 39]  # whole documents
    assert plan.passes[:, 1].tolist() == [1] * 4


def test_touching_rectangles_are_one_interval():
    table = np.array([[0, 128, i * 10, i * 10 + 10, -bd.NO_DIAGONAL, bd.NO_DIAGONAL] for i in range(50)])
    plan = plan_tiles(table, 128, 128, 128)
    assert plan.passes[:, :2].tolist() == [[0, 4]]
    assert plan.bounds[0, :, :].tolist() == [[0, 500]] * 128


def rectangles(*table) -> np.ndarray:
    return np.array([[*edges, -bd.NO_DIAGONAL, bd.NO_DIAGONAL] for edges in table], dtype=np.int64)


def test_what_neighbouring_groups_of_rows_see_in_common_is_one_interval():
    # Groups of 100 queries see 600 keys each, 24 further than the group before: a key is seen by 25 groups in a row.
    table = rectangles(*([100 * i, 100 * i + 100, 24 * i, 24 * i + 600] for i in range(60)))
    plan = plan_tiles(transpose(table), 2016, 128, 64, align=UNIT, hide_tail=True)
    assert len(plan.tiles) == len(plan.passes) == 16
    check_plan(plan, dense_bands(table, 6000, 2016).T, UNIT)


def test_distant_ranges_take_a_pass_each():
    near = [[100 * i, 100 * i + 100, 24 * i, 24 * i + 600] for i in range(60)]
    table = rectangles(*near, *([q0 + 6000, q1 + 6000, k0, k1] for q0, q1, k0, k1 in near if q0 >= 3000))
    plan = plan_tiles(transpose(table), 2016, 128, 64, align=UNIT, hide_tail=True)
    assert len(plan.passes) <= 2 * len(plan.tiles)
    check_plan(plan, dense_bands(table, 12000, 2016).T, UNIT)


def test_triangles_that_touch_are_one_interval():
    table = documents([1000, 1000], causal=True)
    upper = table.copy()
    upper[:, bd.D_LO], upper[:, bd.D_HI] = 1, bd.NO_DIAGONAL
    plan = plan_tiles(np.concatenate([table, upper]), 2000, 128, 128)
    whole = plan_tiles(documents([1000, 1000], causal=False), 2000, 128, 128)
    np.testing.assert_array_equal(plan.passes, whole.passes)
    np.testing.assert_array_equal(plan.bounds, whole.bounds)


def test_a_hole_in_some_rows_costs_no_column_twice():
    plan = plan_tiles(rectangles([0, 64, 0, 500], [0, 64, 600, 1280], [64, 128, 0, 1280]), 128, 128, 128)
    assert plan.passes[:, :2].tolist() == [[0, 4], [512, 6]]


def test_stripes_closer_than_a_tile_is_tall_are_dealt_to_layers():
    table = np.array([[0, 512, 0, 1024, 40 * i, 40 * i + 20] for i in range(6)], dtype=np.int64)
    plan = plan_tiles(table, 512, 128, 128)
    assert len(plan.passes) == 6 * len(plan.tiles)
    check_plan(plan, dense_bands(table, 512, 1024))


def test_causal_plan_masks_only_the_diagonal():
    plan = plan_tiles(documents([1024], causal=True), 1024, 128, 128)
    assert plan.tiles[0].tolist()[0] == 896
    blocks = plan.passes[:, 1]
    full = plan.passes[:, 3] - plan.passes[:, 2]
    assert (blocks - full).tolist() == [1] * 8


def test_tiles_begin_with_documents_and_blocks_with_what_they_see():
    plan = plan_tiles(documents([1000, 1000], causal=False), 2000, 128, 128)
    assert sorted(plan.tiles[:, 0].tolist()) == [*range(0, 1000, 128), *range(1000, 2000, 128)]
    assert plan.num_blocks == 2 * 8 * 8


@pytest.mark.parametrize("is_backward", [False, True])
def test_tiles_of_keys_end_with_a_document_though_that_makes_one_more(is_backward):
    # 50, 10 and 176 keys that 328, 80 and 984 queries see.
    bands = np.array([[0, 50, 0, 328], [50, 60, 600, 680], [60, 236, 1000, 1984]])
    bands = np.column_stack([bands, np.full(3, -bd.NO_DIAGONAL), np.full(3, bd.NO_DIAGONAL)])
    plan = plan_tiles(bands, 236, 128, 8, hide_tail=is_backward)
    assert sorted(plan.tiles[:, 0].tolist()) == ([0, 60, 188] if is_backward else [0, 128])
    assert plan.num_blocks == 41 + 10 + 2 * 123
    if is_backward:  # no block of the longest document needs a mask for the sake of another
        (first,) = plan.tiles[plan.tiles[:, 0] == 60, 1]
        assert plan.passes[first, 2:6].tolist() == [0, 123, 0, 123]


def test_tiles_of_keys_are_not_cut_where_rows_on_both_sides_see_the_same():
    bands = np.array([[0, 60, 0, 1000], [60, 236, 0, 1100]])
    bands = np.column_stack([bands, np.full(2, -bd.NO_DIAGONAL), np.full(2, bd.NO_DIAGONAL)])
    assert sorted(plan_tiles(bands, 236, 128, 8, hide_tail=True).tiles[:, 0].tolist()) == [0, 128]


def test_small_blocks_of_a_long_video_are_not_cut_apart():
    # Rows of one block of 80 see all earlier ones: cutting at 80 rows would cost 128 / 80 of the work.
    table = np.array([[i, i + 80, 0, i + 80, -bd.NO_DIAGONAL, bd.NO_DIAGONAL] for i in range(0, 8000, 80)])
    assert len(plan_tiles(table, 8000, 128, 128).tiles) == 63


def test_empty_mask_still_has_all_tiles():
    plan = plan_tiles(np.zeros((0, bd.NUM_COLUMNS), dtype=np.int64), 200, 128, 128)
    assert plan.tiles.tolist() == [[0, 0, 0, 128], [128, 0, 0, 72]]
    assert len(plan.passes) == 0


def test_groups_are_split_only_where_processors_would_idle():
    assert best_splits((32,) * 64, 8, 8, 132) == 1
    assert best_splits((16,) * 16, 1, 8, 132) == 8
    assert best_splits((16,) * 16, 1, 1, 132) == 1
    assert best_splits((), 8, 8, 132) == 1
    assert best_splits((100,), 1, 6, 4) == 3, "single heads would take two rounds"


def test_more_columns_than_a_gpu_holds_are_refused() -> None:
    """Bounds of a row are 32 bits, and those that cut nothing lie behind `EVERYTHING`."""
    fits, beyond = (rectangles([0, 128, past - 500, past]) for past in (EVERYTHING, EVERYTHING + 1))
    assert plan_tiles(fits, 128, 128, 128).bounds[0, 0].tolist() == [EVERYTHING - 500, EVERYTHING]
    with pytest.raises(AssertionError):
        plan_tiles(beyond, 128, 128, 128)
