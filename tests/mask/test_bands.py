import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from megatron_magi.mask import bands as bd
from megatron_magi.mask.dense import dense_bands
from tests.mask.dense_definitions import count_cover

SIZE = 10


@st.composite
def band_tables(draw, max_bands=4):
    """Any bands, sensible or not: empty rectangles, crossed or missing diagonals."""
    edge = st.integers(0, SIZE)
    low = st.one_of(st.just(-bd.NO_DIAGONAL), st.integers(-SIZE - 2, SIZE + 2))
    high = st.one_of(st.just(bd.NO_DIAGONAL), st.integers(-SIZE - 2, SIZE + 2))
    rows = draw(st.lists(st.tuples(edge, edge, edge, edge, low, high), max_size=max_bands))
    return np.array(rows, dtype=np.int64).reshape(-1, bd.NUM_COLUMNS)


def dense(bands):
    return dense_bands(bands, SIZE, SIZE)


def each(bands):
    return [bands[i : i + 1] for i in range(len(bands))]


@given(band_tables())
def test_areas_count_the_visible_pairs(bands):
    assert bd.areas(bands).tolist() == [int(dense(band).sum()) for band in each(bands)]


@given(band_tables(), st.integers(0, 5))
def test_keys_grow_by_one_number_or_one_for_each_band(bands, by):
    for amounts in (np.full(len(bands), by), by + np.arange(len(bands))):
        moved = bd.shift_keys(bands, amounts)
        for i, band in enumerate(each(bands)):
            np.testing.assert_array_equal(moved[i : i + 1], bd.shift_keys(band, int(amounts[i])))
            wide = dense_bands(moved[i : i + 1], SIZE, SIZE + 20)
            seen = np.zeros_like(wide)
            seen[:, amounts[i] : amounts[i] + SIZE] = dense(band)
            np.testing.assert_array_equal(wide, seen)


@given(band_tables(), st.lists(st.integers(0, SIZE + 2)))
def test_intervals_of_rows_are_what_they_see(bands, rows):
    lo, hi = bd.row_intervals(bands, np.array(rows, dtype=np.int64))
    found = [np.zeros(SIZE, dtype=bool) for _ in rows]
    for seen, first, past in zip(found, lo.T, hi.T, strict=True):
        for a, b in zip(first, past, strict=True):
            seen[a:b] = True
    whole = np.pad(dense(bands) > 0, ((0, 3), (0, 0)))
    assert [x.tolist() for x in found] == [whole[row].tolist() for row in rows]


@given(band_tables())
def test_tighten_keeps_the_area_in_the_smallest_rectangles(bands):
    tight = bd.tighten(bands)
    visible = [dense(band) for band in each(bands)]
    assert len(tight) == sum(v.any() for v in visible)
    for band, area in zip(each(tight), (v for v in visible if v.any()), strict=True):
        np.testing.assert_array_equal(dense(band), area)
        rows, columns = np.flatnonzero(area.any(axis=1)), np.flatnonzero(area.any(axis=0))
        assert band[0, : bd.D_LO].tolist() == [rows[0], rows[-1] + 1, columns[0], columns[-1] + 1]


@given(band_tables())
def test_tighten_keeps_only_diagonals_that_cut(bands):
    for band in bd.tighten(bands):
        for column, missing in ((bd.D_LO, -bd.NO_DIAGONAL), (bd.D_HI, bd.NO_DIAGONAL)):
            if band[column] != missing:
                without = band.copy()
                without[column] = missing
                assert bd.areas(without[None]) > bd.areas(band[None])


@given(band_tables(), st.sets(st.integers(0, SIZE), max_size=5))
def test_cuts_cover_every_pair_once_and_stay_in_their_segment(bands, inner):
    bounds = np.array(sorted({0, SIZE} | inner))
    pieces, segment = bd.cut_rows(bands, bounds)
    np.testing.assert_array_equal(count_cover(pieces, SIZE, SIZE), count_cover(bands, SIZE, SIZE))
    assert (pieces[:, bd.Q0] >= bounds[segment]).all()
    assert (pieces[:, bd.Q1] <= bounds[segment + 1]).all()


@given(*[st.lists(st.tuples(st.integers(0, SIZE), st.integers(0, SIZE)).map(sorted), max_size=5)] * 2)
def test_rows_within_counts_each_row_for_each_segment_that_it_lies_in(intervals, segments):
    (lo, hi), (starts, ends) = (np.array(some, dtype=np.int64).reshape(-1, 2).T for some in (intervals, segments))
    expected = [sum(len({*range(*i)} & {*range(*s)}) for s in segments) for i in intervals]
    assert bd.rows_within(lo, hi, starts, ends).tolist() == expected


@given(band_tables(), st.integers(0, 4), st.integers(0, SIZE - 4))
def test_cuts_drop_what_lies_outside_the_bounds(bands, first, width):
    bounds = np.array([first, first + max(width, 1)])
    pieces, _ = bd.cut_rows(bands, bounds)
    expected = dense(bands)
    expected[: bounds[0]] = expected[bounds[1] :] = False
    np.testing.assert_array_equal(dense(pieces), expected)


@given(st.lists(st.tuples(st.integers(-5, 15), st.integers(-5, 15), st.integers(0, 2)), max_size=8))
def test_merge_ranges_is_the_union_of_each_group(rows):
    table = np.array(rows, dtype=np.int64).reshape(-1, 3)
    merged, group = bd.merge_ranges(table[:, :2], table[:, 2])
    assert sorted(zip(group.tolist(), merged[:, 0].tolist(), strict=True)) == list(
        zip(group.tolist(), merged[:, 0].tolist(), strict=True)
    )
    for g in range(3):
        covered = {t for start, end, of in rows if of == g for t in range(start, end)}
        mine = merged[group == g].tolist()
        assert sorted(t for start, end in mine for t in range(start, end)) == sorted(covered)
        assert all(a[1] < b[0] for a, b in itertools.pairwise(mine)), "ranges touch"


@given(band_tables(), st.integers(0, SIZE - 1))
def test_row_bounds_are_the_first_and_last_visible_key(bands, row):
    lo, hi = bd.row_bounds(bands, np.full(len(bands), row))
    for band, first, stop in zip(each(bands), lo, hi, strict=True):
        if band[0, bd.Q0] <= row < band[0, bd.Q1]:
            assert np.flatnonzero(dense(band)[row]).tolist() == list(range(first, stop))


def test_areas_do_not_overflow_at_ten_million_tokens():
    n = 10_000_000
    causal = np.array([[0, n, 0, n, -bd.NO_DIAGONAL, 1]])
    assert bd.areas(causal)[0] == n * (n + 1) // 2
