"""Ranges and lists of ranges against the sets (and bags) of integers that they stand for."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_magi import api
from megatron_magi.api import AttnRange, AttnRanges, RangeError

bounds = st.tuples(st.integers(0, 24), st.integers(0, 24)).map(sorted)
attn_range = bounds.map(lambda pair: AttnRange(*pair))
attn_ranges = st.lists(bounds, max_size=6).map(AttnRanges.from_ranges)
bound = st.none() | st.integers(-2, 26)


def tokens(r):
    return set(range(r.start, r.end))


def bag(ranges):
    """How often each token is there."""
    return Counter(token for r in ranges for token in tokens(r))


def runs(numbers):
    """Maximal runs of consecutive integers, as pairs."""
    starts = sorted(n for n in numbers if n - 1 not in numbers)
    ends = sorted(n + 1 for n in numbers if n + 1 not in numbers)
    return list(zip(starts, ends, strict=True))


def sequence(ranges):
    """The tokens in the order of the ranges."""
    return [token for r in ranges for token in range(r.start, r.end)]


@given(attn_range, attn_range)
def test_two_ranges_are_compared_and_combined_as_sets(a, b):
    ours, theirs = tokens(a), tokens(b)
    assert tokens(a.intersect(b)) == ours & theirs
    assert a.intersect_size(b) == len(ours & theirs)
    assert set().union(*map(tokens, a.union(b))) == ours | theirs
    assert a.union_size(b) == len(ours | theirs)
    assert len(a.union(b)) == (1 if ours & theirs else 2)
    difference = a.diff_by(b)
    assert sequence(difference) == sorted(theirs - ours) and not any(r.is_empty() for r in difference)
    assert a.is_overlap_with(b) == bool(ours & theirs)
    if ours:
        assert a.is_subrange_of(b) == (ours <= theirs)
    assert a.is_empty() == (not ours)


@given(attn_range, bound, bound, st.integers(-30, 30))
def test_a_range_is_cut_moved_and_copied(a, start, end, offset):
    kept = {n for n in tokens(a) if (start is None or n >= start) and (end is None or n < end)}
    assert tokens(a.truncate(start, end)) == kept
    assert tokens(a.offset(offset)) == {n + offset for n in tokens(a)}
    assert a.clone() == a and hash(a.clone()) == hash(a)
    assert AttnRange.from_range(a.to_naive_range(), check=True) == a
    lo, hi = a.start if start is None else start, a.end if end is None else end
    assert (a.is_valid_close(start, end), a.is_valid_open(start, end)) == (lo <= hi, lo < hi)


def test_a_range_that_ends_before_it_starts_is_a_range_error():
    for call in (lambda: AttnRange(3, 2), lambda: AttnRange(0, 4).check_valid(start=5)):
        with pytest.raises(RangeError, match=r"range: expected start <= end, got \[\d, \d\)"):
            call()
    assert issubclass(RangeError, ValueError)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: api.magi_attn_flex_key([[-1, 8]], [[0, 8]], "full", 8, 8), r"q_ranges\[0\]"),
        (lambda: api.magi_attn_flex_key([[0, 8]], [[-1, 8]], "full", 8, 8), r"k_ranges\[0\]"),
        (
            lambda: api.magi_attn_flex_key(AttnRanges([AttnRange(0, 8).offset(-1)]), [[0, 8]], "full", 8, 8),
            r"q_ranges\[0\]",
        ),
        (lambda: api.infer_attn_mask_from_sliding_window([-1, 8], [0, 8], (2, 0)), "q_range: tokens are counted"),
        (lambda: api.infer_attn_mask_from_sliding_window([0, 8], [-1, 8], (2, 0)), "k_range: tokens are counted"),
    ],
)
def test_negative_ranges_make_no_mask(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@given(attn_ranges)
def test_merged_ranges_are_the_runs_of_the_tokens(ranges):
    merged = ranges.merge()
    assert merged.to_naive_ranges() == runs(set(bag(ranges)))
    assert merged.is_merged() and merged.is_sorted() and merged.is_non_overlap()
    assert ranges.is_merged() == (ranges.to_naive_ranges() == merged.to_naive_ranges())
    assert ranges.is_non_overlap() == all(n == 1 for n in bag(ranges).values())
    assert isinstance(merged, AttnRanges) and merged is not ranges


@given(attn_ranges, st.integers(1, 7))
def test_aligned_merging_takes_whole_blocks(ranges, block):
    touched = {token // block for token in bag(ranges)}
    expected = runs({block * b + i for b in touched for i in range(block)})
    assert ranges.merge_with_split_alignment(block).to_naive_ranges() == expected


@given(attn_ranges, attn_ranges)
def test_two_lists_are_combined_as_sets(a, b):
    ours, theirs = set(bag(a)), set(bag(b))
    assert a.find_hole_ranges(b).to_naive_ranges() == runs(ours - theirs)
    assert a.find_overlap_ranges(b).to_naive_ranges() == runs(ours & theirs)
    merged = a.merge(), b.merge()
    assert merged[0].find_hole_ranges(merged[1], True, True) == a.find_hole_ranges(b)
    both = bag(a) + bag(b)
    assert a.intersect_size_with(b) == sum(both[token] - 1 for token in ours & theirs)
    assert a.intersect_size() == sum(n - 1 for n in bag(a).values())
    assert (a.union_size(), a.union_size_with(b)) == (bag(a).total(), both.total())


@given(attn_ranges, bound, bound)
def test_a_list_is_cut_sorted_and_measured(ranges, start, end):
    cut = ranges.truncate(start, end)
    kept = [n for n in sequence(ranges) if (start is None or n >= start) and (end is None or n < end)]
    assert sequence(cut) == kept and cut == cut.clear_empty()
    in_order = ranges.sort()
    assert in_order.is_sorted() and sorted(in_order.to_naive_ranges()) == sorted(ranges.to_naive_ranges())
    assert [r.start for r in in_order] == sorted(r.start for r in ranges)
    assert list(ranges.clear_empty()) == [r for r in ranges if len(r)]
    assert ranges.points == sorted({n for r in ranges for n in r})
    assert ranges.total_seqlen == len(sequence(ranges)) and ranges.size == len(ranges)
    assert ranges.max_seqlen == max(map(len, ranges), default=0)
    assert ranges.is_valid() and ranges.check_valid() is None
    assert (ranges.start, ranges.end) == (
        min((r.start for r in ranges), default=0),
        max((r.end for r in ranges), default=0),
    )


def test_sorting_keeps_the_order_of_ranges_that_start_together_and_the_list():
    ranges = AttnRanges.from_ranges([[4, 9], [1, 7], [4, 5], [1, 2]])
    assert ranges.sort().to_naive_ranges() == [(1, 7), (1, 2), (4, 9), (4, 5)]
    assert ranges.to_naive_ranges() == [(4, 9), (1, 7), (4, 5), (1, 2)]


@given(attn_ranges, st.integers(1, 9))
def test_chunks_are_pieces_of_equal_length(ranges, chunk_size):
    if not ranges.is_non_overlap():
        with pytest.raises(ValueError, match=r"ranges: .* must not overlap"):
            ranges.chunk(chunk_size)
    chunks = ranges.chunk(chunk_size, check=False)
    order = sequence(ranges)
    assert [sequence(chunk) for chunk in chunks] == [
        order[i : i + chunk_size] for i in range(0, len(order), chunk_size)
    ]
    assert all(isinstance(chunk, AttnRanges) and not any(r.is_empty() for r in chunk) for chunk in chunks)


@given(attn_ranges, attn_ranges)
def test_local_ranges_are_places_in_a_buffer_of_the_tokens(ranges, others):
    buffer = sorted(set(bag(ranges)))
    inside = AttnRanges(r for r in others if tokens(r) and tokens(r) <= set(buffer))
    local = ranges.make_ranges_local(inside)
    assert [buffer[r.start : r.end] for r in local] == [sorted(tokens(r)) for r in inside]
    merged = ranges.merge()
    offsets = [buffer.index(r.start) for r in merged]
    for r, place in zip(inside, local, strict=True):
        found, around = ranges.make_range_local(r)
        assert found == place and r.is_subrange_of(around) and around in merged
        assert merged.make_range_local(r, is_self_merged=True, prefix_offset=offsets) == (found, around)
    for r in others:
        if tokens(r) - set(buffer):
            with pytest.raises(ValueError, match=r"other_attn_range: .* lies in no range"):
                ranges.make_range_local(r)


@given(st.lists(st.integers(0, 5), max_size=6))
def test_cumulative_lengths_and_ranges_are_the_same(lengths):
    cu_seqlens = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    total = cu_seqlens[-1]
    ranges = AttnRanges.from_cu_seqlens(cu_seqlens, total)
    assert [len(r) for r in ranges] == lengths and ranges.is_cu_seqlens(total)
    assert ranges.to_cu_seqlens(total) == cu_seqlens
    assert api.is_valid_cu_seqlens(cu_seqlens, total) and not api.is_valid_cu_seqlens(cu_seqlens, total + 1)
    assert not ranges.is_cu_seqlens(total + 1)


def test_ranges_with_gaps_or_out_of_order_are_no_documents():
    for pairs in ([[0, 3], [4, 9]], [[3, 9], [0, 3]], [[1, 9]]):
        ranges = AttnRanges.from_ranges(pairs)
        assert not ranges.is_cu_seqlens(9)
        with pytest.raises(ValueError, match="ranges: expected documents"):
            ranges.to_cu_seqlens(9)
    for cu_seqlens in ([0, 5, 3], [1, 3], []):
        assert not api.is_valid_cu_seqlens(cu_seqlens, 3)
        with pytest.raises(ValueError, match="cu_seqlens"):
            api.check_valid_cu_seqlens(cu_seqlens, 3)


def test_a_list_grows_and_shrinks_and_slices_are_lists_of_ranges():
    ranges = AttnRanges()
    assert ranges.is_empty() and ranges.to_tensor().shape == (0, 2)
    ranges.append(AttnRange(4, 6), check=True)
    ranges.insert(0, AttnRange(0, 2), check=True)
    ranges.extend(AttnRanges.from_ranges([[8, 9], [6, 7]]), check=True)
    assert ranges.to_naive_ranges() == [(0, 2), (4, 6), (8, 9), (6, 7)]
    assert ranges.pop() == AttnRange(6, 7) and ranges.pop(0) == AttnRange(0, 2)
    copy = ranges.clone()
    copy[0] = AttnRange(0, 1)
    assert ranges.to_naive_ranges() == [(4, 6), (8, 9)] and copy != ranges
    assert ranges.clone() == ranges and isinstance(ranges[:1], AttnRanges) and ranges[1:].start == 8
    with pytest.raises(IndexError):
        AttnRanges().pop()
