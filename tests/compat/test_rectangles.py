"""Rectangles against the sets of (query, key) pairs that they stand for."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from megatron_magi.api import AttnMaskType, AttnRange, AttnRanges, AttnRectangle, AttnRectangles
from megatron_magi.mask import MaskType

bounds = st.tuples(st.integers(0, 12), st.integers(1, 10)).map(lambda pair: AttnRange(pair[0], sum(pair)))
diagonals = st.none() | st.tuples(st.integers(-16, 16), st.integers(0, 20)).map(lambda p: AttnRange(p[0], sum(p)))
kinds = st.sampled_from(list(AttnMaskType))
cut = st.integers(-1, 24)


def slice_pairs(q0, q1, k0, k1, kind):
    """Row i of m sees, of n keys, those from i on (inverse causal, both) and up to i + n - m (causal, both)."""
    from_top_left, to_bottom_right = kind in (2, 3), kind in (1, 3)
    return {
        (q0 + i, k0 + j)
        for i in range(q1 - q0)
        for j in range(k1 - k0)
        if not (from_top_left and j < i) and not (to_bottom_right and j > i + (k1 - k0) - (q1 - q0))
    }


def visible(q_range, k_range, d_range, kind):
    """By the definition: a slice, of which the pairs with another ``k - q`` are hidden."""
    pairs = slice_pairs(*q_range, *k_range, kind.to_int_type())
    return {(q, k) for q, k in pairs if d_range is None or d_range.start <= k - q <= d_range.end}


def pairs_of(rect):
    return visible(rect.q_range, rect.k_range, rect.d_range, AttnMaskType.FULL) if rect is not None else set()


@st.composite
def rectangles(draw):
    """A rectangle, and its pairs."""
    arguments = draw(bounds), draw(bounds), draw(diagonals), draw(kinds)
    pairs = visible(*arguments)
    assume(pairs)
    return AttnRectangle(*arguments), pairs


@given(rectangles())
def test_a_rectangle_holds_the_pairs_of_its_arguments_and_is_tight(case):
    rect, pairs = case
    assert pairs_of(rect) == pairs
    queries, keys, differences = ({f(*p) for p in pairs} for f in (lambda q, k: q, lambda q, k: k, lambda q, k: k - q))
    assert (rect.q_range.start, rect.q_range.end) == (min(queries), max(queries) + 1)
    assert (rect.k_range.start, rect.k_range.end) == (min(keys), max(keys) + 1)
    assert (rect.d_range.start, rect.d_range.end) == (min(differences), max(differences))
    assert rect.area() == len(pairs)
    assert rect.clone() == rect and hash(rect.clone()) == hash(rect) and rect.is_valid() and len(rect) == 1
    assert (
        rect.get_valid_or_none() == rect and rect.shrink_q_range() and rect.shrink_k_range() and rect.shrink_d_range()
    )


@given(bounds, bounds, diagonals, kinds)
def test_a_rectangle_without_pairs_is_refused(q_range, k_range, d_range, kind):
    assume(not visible(q_range, k_range, d_range, kind))
    with pytest.raises(ValueError, match="rectangle: nothing is visible"):
        AttnRectangle(q_range, k_range, d_range, kind)


def test_ranges_of_a_rectangle_may_be_pairs_and_what_is_none_is_named():
    rect = AttnRectangle((2, 6), [0, 5], (-4, 0), "causal")
    assert rect == AttnRectangle(AttnRange(2, 6), AttnRange(0, 5), AttnRange(-4, 0), "causal")
    for name in ("q_range", "k_range", "d_range"):
        with pytest.raises(ValueError, match=f"^{name}: expected"):
            AttnRectangle(**{"q_range": (2, 6), "k_range": (0, 5), name: 3})


@given(rectangles(), cut, cut)
def test_cutting_shares_the_pairs(case, a, b):
    rect, pairs = case
    for axis, cut_at, within in (
        (0, rect.cut_q, rect.get_rect_within_q_segment),
        (1, rect.cut_k, rect.get_rect_within_k_segment),
    ):
        before, after = cut_at(a)
        assert pairs_of(before) == {p for p in pairs if p[axis] < a}
        assert pairs_of(after) == {p for p in pairs if p[axis] >= a}
        assert pairs_of(within(a, b)) == {p for p in pairs if a <= p[axis] < b}


@given(rectangles())
def test_the_slices_of_a_rectangle_hold_its_pairs_once(case):
    rect, pairs = case
    slices = rect.to_qk_range_mask_type()
    parts = [slice_pairs(*q_range, *k_range, kind) for q_range, k_range, kind in slices]
    assert set().union(*parts) == pairs and sum(map(len, parts)) == len(pairs)
    assert len(slices) <= 3 and [q.start for q, _, _ in slices] == sorted(q.start for q, _, _ in slices)
    of_type = (rect.is_full(), rect.is_causal(), rect.is_inv_causal(), rect.is_bi_causal())
    for kind, is_of_type in zip(MaskType, of_type, strict=True):
        assert is_of_type == (slice_pairs(*rect.q_range, *rect.k_range, kind) == pairs)
    assert any(of_type) == (len(slices) == 1)
    last = max(q for q, k in pairs if k == rect.k_range.start)
    first = min(q for q, k in pairs if k == rect.k_range.end - 1)
    assert (rect.intersection_q_id_on_left_boundary(), rect.intersection_q_id_on_right_boundary()) == (last, first)


@given(rectangles(), bounds, bounds, st.integers(-16, 16), st.integers(-16, 16))
def test_areas_of_any_bounds_are_counted(case, q, k, ld, rd):
    expected = sum(ld <= b - a <= rd for a in range(*q) for b in range(*k))
    assert case[0].count_areas(*q, *k, ld, rd) == expected
    assert case[0].count_areas(q.end, q.start, *k, ld, rd) == 0


def test_ranges_that_hold_nothing_are_told():
    rect = AttnRectangle(AttnRange(0, 4), AttnRange(0, 8))
    for name in ("q_range", "k_range"):
        assert not rect.is_valid(**{name: AttnRange(3, 3)})
        with pytest.raises(ValueError, match="rectangle: a range is empty"):
            rect.check_valid(**{name: AttnRange(3, 3)})
    assert rect.is_valid(d_range=AttnRange(3, 3))  # both its ends count
    with pytest.raises(ValueError, match="attn_mask_type"):
        AttnRectangle(AttnRange(0, 4), AttnRange(0, 8), None, "diagonal")


@given(st.lists(st.tuples(bounds, bounds, kinds), max_size=4), cut, cut)
def test_a_list_of_rectangles_is_all_of_its_slices(slices, a, b):
    q_ranges, k_ranges, mask_types = ([s[i] for s in slices] for i in range(3))
    rects = AttnRectangles.from_ranges(q_ranges, k_ranges, mask_types, check=True)
    parts = [visible(q, k, None, kind) for q, k, kind in slices]
    parts = [part for part in parts if part]
    assert list(map(pairs_of, rects)) == parts
    assert rects.area() == sum(map(len, parts)) and rects.size == len(parts) and rects.is_empty() == (not parts)
    everything = set().union(*parts)
    queries, keys = {q for q, _ in everything}, {k for _, k in everything}
    assert rects.total_seqlen_qo() == len(queries) and rects.total_seqlen_kv() == len(keys)
    for union, tokens in ((rects.get_qo_ranges_union(), queries), (rects.get_kv_ranges_union(), keys)):
        assert isinstance(union, AttnRanges) and union.is_merged()
        assert {n for r in union for n in range(r.start, r.end)} == tokens
    for axis, cut_at, within in (
        (0, rects.cut_q, rects.get_rects_within_q_segment),
        (1, rects.cut_k, rects.get_rects_within_k_segment),
    ):
        found = [set().union(*map(pairs_of, some)) for some in (*cut_at(a), within(a, b))]
        sides = (lambda n: n < a, lambda n: n >= a, lambda n: a <= n < b)
        assert found == [{p for p in everything if side(p[axis])} for side in sides]
    assert isinstance(rects[:1], AttnRectangles) and rects.is_valid() and rects.check_valid() is None
    grown = AttnRectangles()
    grown.extend(rects, check=True)
    for rect in rects:
        grown.append(rect, check=True)
    assert grown.area() == 2 * rects.area()
