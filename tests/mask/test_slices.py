import pickle
import time

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_magi.mask import AttnMask, AttnRange, AttnRanges, AttnSlice, MaskType, builders
from megatron_magi.mask.dense import dense_mask
from megatron_magi.mask.overlap import find_overlap
from tests.mask.dense_definitions import count_cover

SIZE = 9


def slice_tables(max_slices):
    pair = st.tuples(st.integers(0, SIZE), st.integers(0, SIZE)).map(sorted)
    row = st.tuples(pair, pair, st.sampled_from(list(MaskType))).map(lambda r: (*r[0], *r[1], int(r[2])))
    return st.lists(row, min_size=1, max_size=max_slices)


@given(slice_tables(1))
def test_the_four_mask_types_are_what_they_say(rows):
    q0, q1, k0, k1, mask_type = rows[0]
    expected = np.zeros((SIZE, SIZE), dtype=bool)
    for q in range(q0, q1):
        for k in range(k0, k1):
            below_bottom_right = k1 - 1 - k >= q1 - 1 - q
            above_top_left = k - k0 >= q - q0
            expected[q, k] = {
                MaskType.FULL: True,
                MaskType.CAUSAL: below_bottom_right,
                MaskType.INV_CAUSAL: above_top_left,
                MaskType.BI_CAUSAL: below_bottom_right and above_top_left,
            }[MaskType(mask_type)]
    mask = AttnMask(rows, SIZE)
    np.testing.assert_array_equal(dense_mask(mask), expected)
    assert mask.area == expected.sum()


@given(slice_tables(5))
def test_slices_that_share_a_pair_are_refused_and_named(rows):
    bands = [AttnMask([row], SIZE).bands_untightened for row in rows]
    cover = count_cover(np.concatenate(bands), SIZE, SIZE)
    if cover.max() <= 1:
        assert AttnMask(rows, SIZE).area == cover.sum()
        return
    with pytest.raises(ValueError, match="overlap") as error:
        AttnMask(rows, SIZE)
    i, j, q, k = find_overlap(np.concatenate(bands))
    assert i < j
    for named in (i, j):
        assert dense_mask(AttnMask([rows[named]], SIZE))[q, k]
        assert f"slice {named} {AttnMask([rows[named]], SIZE).slices[0]!r}" in str(error.value)
    assert f"query {q}, key {k}" in str(error.value)


def test_rectangles_may_overlap_where_their_visible_areas_do_not():
    both = [(0, 6, 0, 6, MaskType.CAUSAL), (0, 5, 1, 6, MaskType.INV_CAUSAL)]
    assert AttnMask(both, 6).area == 36


@pytest.mark.parametrize(
    "row, message",
    [
        ((0, 5, 0, 4, 0), r"q_range of slice 0: \[0, 5\) is not a range in \[0, 4\)"),
        ((0, 4, 0, 5, 0), r"k_range of slice 0: \[0, 5\) is not a range in \[0, 4\)"),
        ((3, 2, 0, 4, 0), r"q_range of slice 0: \[3, 2\)"),
        ((0, 4, -1, 4, 0), r"k_range of slice 0: \[-1, 4\)"),
        ((0, 4, 0, 4, 4), "mask_type of slice 0: expected 0, 1, 2 or 3, got 4"),
    ],
)
def test_slices_out_of_bounds_are_refused(row, message):
    with pytest.raises(ValueError, match=message):
        AttnMask([row], 4)


def test_other_bad_arguments_are_named():
    with pytest.raises(ValueError, match="total_seqlen_q: must not be negative"):
        AttnMask([], -1)
    with pytest.raises(ValueError, match="total_seqlen_k: must not be negative"):
        AttnMask([], 1, -1)
    with pytest.raises(ValueError, match=r"slices: expected shape \[n, 5\]"):
        AttnMask([(0, 1, 0, 1)], 4)
    with pytest.raises(ValueError, match="lengths disagree: 1, 2, 1"):
        AttnMask.from_ranges([(0, 1)], [(0, 1), (1, 2)], [0], 4)
    with pytest.raises(ValueError, match=r"expected start <= end, got \[3, 2\)"):
        AttnRange(3, 2)


def test_slices_ranges_and_tables_build_equal_masks():
    table = AttnMask([(0, 4, 0, 4, 1), (4, 8, 0, 8, 0)], 8)
    objects = AttnMask([AttnSlice(AttnRange(a, b), AttnRange(c, d), MaskType(t)) for a, b, c, d, t in table.table], 8)
    ranges = AttnMask.from_ranges([(0, 4), (4, 8)], AttnRanges.from_ranges([[0, 4], [0, 8]]), [1, 0], 8)
    assert table == objects == ranges
    assert table.slices == objects.slices
    assert len({table, objects, ranges}) == 1


@pytest.mark.parametrize(
    "mask", [builders.sliding_window(50, 5, 3, global_tokens=2), builders.causal(4, 9), AttnMask([], 7)], ids=repr
)
def test_ranges_of_a_mask_make_it_again(mask):
    assert AttnMask.from_ranges(*mask.to_ranges()) == mask


def test_masks_differ_when_slices_types_or_lengths_do():
    masks = [
        builders.causal(8),
        builders.full(8),
        builders.causal(8, 9),
        AttnMask([(0, 8, 0, 8, 1)], 9),
        AttnMask([(0, 8, 0, 8, 1)], 9, 8),
        builders.varlen([0, 4, 8]),
    ]
    assert len(set(masks)) == len({m.digest for m in masks}) == len(masks)


def test_a_mask_cannot_be_changed_and_survives_pickling():
    mask = builders.causal(8)
    with pytest.raises(ValueError):
        mask.table[0, 0] = 1
    with pytest.raises(ValueError):
        mask.bands[0, 0] = 1
    again = pickle.loads(pickle.dumps(mask))
    assert again == mask and again.area == mask.area


def test_the_table_given_can_be_reused_by_its_owner():
    rows = np.array([[0, 8, 0, 8, 1]])
    mask = AttnMask(rows, 8)
    rows[:] = 0
    assert mask == builders.causal(8)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: AttnMask([(0, 2.5, 0, 4, 0)], 4), "slices: expected integers, got float64"),
        (lambda: AttnMask(np.array([(0, 2.5, 0, 4, 0)]), 4), "slices: expected integers, got float64"),
        (lambda: AttnMask([(0, 4, 0, 4, 0), (0, 4)], 4), "slices: expected"),
        (lambda: AttnMask([(0, 4, 0, 4, 0)], 4.5), "total_seqlen_q: expected an integer, got 4.5"),
        (lambda: AttnMask([(0, 4, 0, 4, 0)], 4, 4.5), "total_seqlen_k: expected an integer, got 4.5"),
        (lambda: AttnMask.from_ranges([(0, 2.5)], [(0, 4)], 0, 4), r"q_ranges\[0\]: expected integers"),
        (lambda: AttnMask.from_ranges([(0, 2)], torch.tensor([[0, 2.5]]), 0, 4), "k_ranges: expected integers"),
        (lambda: AttnMask.from_ranges([(0, 2)], [(0, 2)], [1.5], 4), "mask_types: expected integers"),
        (lambda: AttnMask.from_ranges([(0, 2)], [(0, 2)], None, 4), "mask_types: expected a mask type or a list"),
        (lambda: AttnRange(0, 2.5), "range: end: expected an integer, got 2.5"),
        (lambda: AttnRange.from_range([0, 2, 4]), r"attn_range: expected \(start, end\), got \[0, 2, 4\]"),
        (lambda: AttnRange.from_range(4), "attn_range: expected 1 dimension"),
        (lambda: AttnRanges.from_ranges(None), r"ranges: expected pairs \(start, end\), got None"),
        (lambda: AttnRanges.from_ranges([[0, 4], [4]]), r"ranges\[1\]: expected \(start, end\), got \[4\]"),
        (lambda: AttnRanges.from_ranges(np.zeros((2, 3), int)), r"ranges: expected shape \[n, 2\], got \[2, 3\]"),
    ],
)
def test_what_is_no_integer_or_no_pair_is_refused_by_name(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_tensors_are_read_like_arrays():
    table = [(0, 4, 0, 4, 1), (4, 8, 0, 4, 0)]
    assert AttnMask(torch.tensor(table), 8) == AttnMask(np.array(table), 8) == AttnMask(table, 8)
    ranges, types = torch.tensor([[0, 4], [4, 8]]), torch.tensor([1, 1])
    assert AttnMask.from_ranges(ranges, ranges, types, 8) == AttnMask.from_ranges(ranges.tolist(), ranges, [1, 1], 8)


def test_many_slices_over_the_same_queries_are_checked_quickly() -> None:
    """Block-sparse rows: every slice shares its queries with all others, and no key."""
    starts = np.arange(20_000)
    table = np.stack([0 * starts, 0 * starts + 1000, starts, starts + 1, 0 * starts], axis=1)
    begin = time.process_time()
    AttnMask(table, 1000, 20_000)
    assert time.process_time() - begin < 2.0
    table[-1, 2] -= 1
    with pytest.raises(ValueError, match=r"slice 19998 .* and slice 19999 .* overlap"):
        AttnMask(table, 1000, 20_000)
