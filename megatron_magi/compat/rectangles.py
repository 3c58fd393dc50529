"""Rectangles: slices that stay closed under cutting, with the names of MagiAttention.

A rectangle is one band of `megatron_magi.mask.bands`: a query q of ``q_range`` sees a key k of ``k_range`` if
``d_range.start <= k - q <= d_range.end``. Both ends of ``d_range`` belong to it, other than in all other ranges.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import index
from typing import Self

import numpy as np

from megatron_magi.api.mask_types import AnyMaskType, AttnMaskType, GeneralAttnMaskType, as_ranges
from megatron_magi.api.mask_types import mask_types as type_numbers
from megatron_magi.compat.ranges import AttnRanges, SliceableList
from megatron_magi.mask import AttnRange, MaskType
from megatron_magi.mask import bands as bd

_CUT_TOP_LEFT = (MaskType.INV_CAUSAL, MaskType.BI_CAUSAL)
_CUT_BOTTOM_RIGHT = (MaskType.CAUSAL, MaskType.BI_CAUSAL)


@dataclass(frozen=True, init=False, repr=False)
class AttnRectangle:
    """A rectangle of queries times keys, cut by up to two diagonals; a value that cannot be changed.

    It is always tight: each query sees a key, each key is seen by a query, and ``d_range`` ends in the corners.

    Args:
        q_range, k_range: the queries and the keys.
        d_range: the least and the largest ``k - q`` of a visible pair; None for all.
        mask_type: cuts off what a slice of this type hides, in addition.

    Raises:
        ValueError: nothing is visible.
    """

    q_range: AttnRange
    k_range: AttnRange
    d_range: AttnRange

    def __init__(
        self,
        q_range: AttnRange,
        k_range: AttnRange,
        d_range: AttnRange | None = None,
        mask_type: AnyMaskType = AttnMaskType.FULL,
    ) -> None:
        q_range, k_range = AttnRange.from_range(q_range, name="q_range"), AttnRange.from_range(k_range, name="k_range")
        if d_range is not None:
            d_range = AttnRange.from_range(d_range, name="d_range")
        kind = MaskType(type_numbers(mask_type, 1)[0])
        d_lo, d_hi = (-bd.NO_DIAGONAL, bd.NO_DIAGONAL) if d_range is None else (d_range.start, d_range.end + 1)
        if kind in _CUT_TOP_LEFT:
            d_lo = max(d_lo, k_range.start - q_range.start)
        if kind in _CUT_BOTTOM_RIGHT:
            d_hi = min(d_hi, k_range.end - q_range.end + 1)
        tight = bd.tighten(_band(q_range, k_range, d_lo, d_hi)).tolist()
        if not tight:
            raise ValueError(f"rectangle: nothing is visible in {q_range} x {k_range} x {d_range} as {kind.name}")
        q0, q1, k0, k1, d_lo, d_hi = tight[0]
        object.__setattr__(self, "q_range", AttnRange(q0, q1))
        object.__setattr__(self, "k_range", AttnRange(k0, k1))
        object.__setattr__(self, "d_range", AttnRange(max(d_lo, k0 - (q1 - 1)), min(d_hi, k1 - q0) - 1))

    def is_valid(
        self, q_range: AttnRange | None = None, k_range: AttnRange | None = None, d_range: AttnRange | None = None
    ) -> bool:
        """Whether each range is in order and has something in it; the rectangle's own stand for None."""
        # Not `or`: an empty range is false.
        q_range = self.q_range if q_range is None else q_range
        k_range = self.k_range if k_range is None else k_range
        d_range = self.d_range if d_range is None else d_range
        return q_range.is_valid_open() and k_range.is_valid_open() and d_range.is_valid_close()

    def check_valid(
        self, q_range: AttnRange | None = None, k_range: AttnRange | None = None, d_range: AttnRange | None = None
    ) -> None:
        """Checks what `is_valid` says.

        Raises:
            ValueError: it is False.
        """
        if not self.is_valid(q_range, k_range, d_range):
            raise ValueError(f"rectangle: a range is empty: q_range {q_range}, k_range {k_range}, d_range {d_range}")

    def get_valid_or_none(self) -> AttnRectangle | None:
        """The rectangle: there are none that are not valid."""
        return self

    def shrink_q_range(self) -> bool:
        """Does nothing and returns True: rectangles are tight. So do `shrink_k_range` and `shrink_d_range`."""
        return True

    shrink_k_range = shrink_d_range = shrink_q_range

    def clone(self) -> AttnRectangle:
        """An equal rectangle."""
        return AttnRectangle(self.q_range, self.k_range, self.d_range)

    def cut_q(self, cut_pos: int) -> tuple[AttnRectangle | None, AttnRectangle | None]:
        """The parts of the queries before ``cut_pos`` and from it on; None where there are none."""
        return (
            self.get_rect_within_q_segment(self.q_range.start, cut_pos),
            self.get_rect_within_q_segment(cut_pos, self.q_range.end),
        )

    def cut_k(self, cut_pos: int) -> tuple[AttnRectangle | None, AttnRectangle | None]:
        """The parts of the keys before ``cut_pos`` and from it on; None where there are none."""
        return (
            self.get_rect_within_k_segment(self.k_range.start, cut_pos),
            self.get_rect_within_k_segment(cut_pos, self.k_range.end),
        )

    def get_rect_within_q_segment(self, q_start: int, q_end: int) -> AttnRectangle | None:
        """The part of the queries ``[q_start, q_end)``; None where there is none."""
        q_range = self.q_range.truncate(index(q_start), index(q_end))
        return None if q_range.is_empty() else AttnRectangle(q_range, self.k_range, self.d_range)

    def get_rect_within_k_segment(self, k_start: int, k_end: int) -> AttnRectangle | None:
        """The part of the keys ``[k_start, k_end)``; None where there is none."""
        k_range = self.k_range.truncate(index(k_start), index(k_end))
        return None if k_range.is_empty() else AttnRectangle(self.q_range, k_range, self.d_range)

    def intersection_q_id_on_left_boundary(self) -> int:
        """The last query that sees the first key: the lower diagonal leaves the left side there."""
        return self.k_range.start - self.d_range.start

    def intersection_q_id_on_right_boundary(self) -> int:
        """The first query that sees the last key: the upper diagonal reaches the right side there."""
        return self.k_range.end - 1 - self.d_range.end

    def is_full(self) -> bool:
        """Whether it is a slice of type full: no diagonal cuts anything off."""
        return MaskType.FULL in self._types()

    def is_causal(self) -> bool:
        """Whether it is a causal slice."""
        return MaskType.CAUSAL in self._types()

    def is_inv_causal(self) -> bool:
        """Whether it is an inverse causal slice."""
        return MaskType.INV_CAUSAL in self._types()

    def is_bi_causal(self) -> bool:
        """Whether it is a slice cut by both diagonals."""
        return MaskType.BI_CAUSAL in self._types()

    def to_qk_range_mask_type(self) -> list[tuple[AttnRange, AttnRange, int]]:
        """The rectangle as one to three slices ``(q_range, k_range, number of the mask type)``, by rising queries."""
        (q0, q1), left, right = self.q_range, *self._turns()
        cuts = {q0, q1}
        # The query at a turn fits both sides of it. Where the turns meet, one cut serves both.
        if q0 < left < q1 - 1:
            cuts.add(left + 1 if right == left + 1 else left)
        if q0 < right < q1 - 1:
            cuts.add(right if right in (left, left + 1) else right + 1)
        bounds = sorted(cuts)
        parts = (self.get_rect_within_q_segment(a, b) for a, b in pairwise(bounds))
        return [(part.q_range, part.k_range, int(part._types()[0])) for part in parts]

    def area(self) -> int:
        """Number of visible pairs."""
        return int(bd.areas(_band(self.q_range, self.k_range, self.d_range.start, self.d_range.end + 1))[0])

    def count_areas(self, lq: int, rq: int, lk: int, rk: int, ld: int, rd: int) -> int:
        """Pairs with ``lq <= q < rq``, ``lk <= k < rk`` and ``ld <= k - q <= rd``, whatever this rectangle is."""
        if lq >= rq or lk >= rk or ld > rd:
            return 0
        return int(bd.areas(_band(AttnRange(lq, rq), AttnRange(lk, rk), ld, rd + 1))[0])

    def _turns(self) -> tuple[int, int]:
        return self.intersection_q_id_on_left_boundary(), self.intersection_q_id_on_right_boundary()

    def _types(self) -> list[MaskType]:
        """The types of slices that it is, simplest first; none if it takes several slices."""
        left, right = self._turns()
        lower = (left == self.q_range.end - 1, left == self.q_range.start)
        upper = (right == self.q_range.start, right == self.q_range.end - 1)
        return [kind for kind in MaskType if lower[kind in _CUT_TOP_LEFT] and upper[kind in _CUT_BOTTOM_RIGHT]]

    def __len__(self) -> int:
        return 1

    def __repr__(self) -> str:
        return f"{self.q_range} x {self.k_range} x [{self.d_range.start}, {self.d_range.end}]"


class AttnRectangles(SliceableList[AttnRectangle]):
    """A list of `AttnRectangle`. ``check`` arguments have no effect: rectangles are checked when they are made."""

    @classmethod
    def from_ranges(
        cls, q_ranges: Iterable, k_ranges: Iterable, mask_types: GeneralAttnMaskType, check: bool = False
    ) -> Self:
        """One rectangle for each slice; slices in which nothing is visible are left out.

        Args:
            q_ranges, k_ranges, mask_types: as ``q_ranges``, ``k_ranges`` and ``attn_mask_type`` of
                `megatron_magi.api.magi_attn_flex_key`.
            check: no effect.

        Raises:
            ValueError: an argument is wrong.
        """
        queries, keys = as_ranges(q_ranges, "q_ranges"), as_ranges(k_ranges, "k_ranges")
        if len(queries) != len(keys):
            raise ValueError(f"k_ranges: {len(keys)} ranges for {len(queries)} of queries")
        rectangles = cls()
        for q_range, k_range, kind in zip(queries, keys, type_numbers(mask_types, len(queries)), strict=True):
            # Of a slice cut on both sides, with fewer keys than queries, nothing is left.
            hidden = kind == MaskType.BI_CAUSAL and len(q_range) > len(k_range)
            if len(q_range) and len(k_range) and not hidden:
                rectangles.append(AttnRectangle(q_range, k_range, None, kind))
        return rectangles

    @property
    def size(self) -> int:
        """Number of rectangles."""
        return len(self)

    def is_empty(self) -> bool:
        """No rectangle at all."""
        return not self

    def is_valid(self) -> bool:
        """Always True: no rectangle is empty."""
        return True

    def check_valid(self) -> None:
        """Does nothing: no rectangle is empty."""

    def append(self, attn_rect: AttnRectangle, check: bool = False) -> None:
        """Puts a rectangle at the end."""
        super().append(attn_rect)

    def extend(self, attn_rects: Iterable[AttnRectangle], check: bool = False) -> None:
        """Puts rectangles at the end."""
        super().extend(attn_rects)

    def get_qo_ranges_union(self) -> AttnRanges:
        """All queries, merged."""
        return AttnRanges(rect.q_range for rect in self).merge()

    def get_kv_ranges_union(self) -> AttnRanges:
        """All keys, merged."""
        return AttnRanges(rect.k_range for rect in self).merge()

    def total_seqlen_qo(self) -> int:
        """Number of queries, each counted once."""
        return self.get_qo_ranges_union().total_seqlen

    def total_seqlen_kv(self) -> int:
        """Number of keys, each counted once."""
        return self.get_kv_ranges_union().total_seqlen

    def cut_q(self, cut_pos: int) -> tuple[AttnRectangles, AttnRectangles]:
        """The parts of the queries before ``cut_pos`` and from it on."""
        return _halves([rect.cut_q(cut_pos) for rect in self])

    def cut_k(self, cut_pos: int) -> tuple[AttnRectangles, AttnRectangles]:
        """The parts of the keys before ``cut_pos`` and from it on."""
        return _halves([rect.cut_k(cut_pos) for rect in self])

    def get_rects_within_q_segment(self, q_start: int, q_end: int) -> AttnRectangles:
        """The part of the queries ``[q_start, q_end)``."""
        return _those_there(rect.get_rect_within_q_segment(q_start, q_end) for rect in self)

    def get_rects_within_k_segment(self, k_start: int, k_end: int) -> AttnRectangles:
        """The part of the keys ``[k_start, k_end)``."""
        return _those_there(rect.get_rect_within_k_segment(k_start, k_end) for rect in self)

    def area(self) -> int:
        """Number of visible pairs; those in two rectangles count twice."""
        return sum(rect.area() for rect in self)


def _band(q_range: AttnRange, k_range: AttnRange, d_lo: int, d_hi: int) -> np.ndarray:
    return np.array([(*q_range, *k_range, d_lo, d_hi)], dtype=np.int64)


def _those_there(rects: Iterable[AttnRectangle | None]) -> AttnRectangles:
    return AttnRectangles(rect for rect in rects if rect is not None)


def _halves(
    pairs: Sequence[tuple[AttnRectangle | None, AttnRectangle | None]],
) -> tuple[AttnRectangles, AttnRectangles]:
    return _those_there(before for before, _ in pairs), _those_there(after for _, after in pairs)
