"""Which keys each row sees, as a few intervals a row, and the slices that say the same."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from megatron_magi.mask import AttnMask

_LAST = 1 << 60  # sorts empty intervals behind all others; may be moved


class Intervals(NamedTuple):
    """Row r sees the keys ``[lo[i, r], hi[i, r])`` for each i; the intervals of a row are disjoint, or empty.

    Attributes:
        lo, hi: int64 ``[n, num_rows]``.
    """

    lo: np.ndarray
    hi: np.ndarray

    @classmethod
    def of(cls, lo: np.ndarray | int, hi: np.ndarray | int, num_rows: int) -> Intervals:
        """One interval a row, or the same bounds for all rows."""
        shape = (1, num_rows)
        return cls(*(np.broadcast_to(np.asarray(bound, dtype=np.int64), shape).copy() for bound in (lo, hi)))

    @classmethod
    def of_runs(cls, seen: np.ndarray, num_rows: int) -> Intervals:
        """The intervals if all rows see the keys where ``seen``, bool ``[num_keys]``, is True."""
        single = cls.of_dense(seen[None])
        return cls(*(np.repeat(bound, num_rows, axis=1) for bound in single))

    @classmethod
    def of_dense(cls, seen: np.ndarray) -> Intervals:
        """From bool ``[num_rows, num_keys]``."""
        edges = np.diff(np.pad(seen.astype(np.int8), ((0, 0), (1, 1))), axis=1)
        row, lo = np.nonzero(edges == 1)
        hi = np.nonzero(edges == -1)[1]
        place = np.arange(len(row)) - np.searchsorted(row, row)
        out = cls(*np.zeros((2, int(place.max(initial=0)) + 1, len(seen)), dtype=np.int64))
        out.lo[place, row], out.hi[place, row] = lo, hi
        return out

    def __and__(self, other: Intervals) -> Intervals:
        lo = np.maximum(self.lo[:, None], other.lo[None]).reshape(-1, self.lo.shape[1])
        hi = np.minimum(self.hi[:, None], other.hi[None]).reshape(-1, self.lo.shape[1])
        used = (lo < hi).any(axis=1)
        used[0] |= not used.any()
        return Intervals(lo[used], hi[used])

    def __or__(self, other: Intervals) -> Intervals:
        lo, hi = np.concatenate([self.lo, other.lo]), np.concatenate([self.hi, other.hi])
        empty = lo >= hi
        lo[empty] = hi[empty] = _LAST
        order = np.argsort(lo, axis=0, kind="stable")
        lo, hi = np.take_along_axis(lo, order, 0), np.take_along_axis(hi, order, 0)
        for i in range(1, len(lo)):  # what touches or overlaps the interval before it takes it over
            joins = lo[i] <= hi[i - 1]
            lo[i] = np.where(joins, lo[i - 1], lo[i])
            hi[i] = np.where(joins, np.maximum(hi[i - 1], hi[i]), hi[i])
            hi[i - 1] = np.where(joins, lo[i - 1], hi[i - 1])
        used = (lo < hi).any(axis=1)
        used[0] |= not used.any()
        return Intervals(lo[used], hi[used])

    def shifted(self, by: np.ndarray | int) -> Intervals:
        """All bounds moved by ``by``, a number or one for each row."""
        return Intervals(self.lo + by, self.hi + by)

    def within(self, bounds: np.ndarray) -> Intervals:
        """Rows and keys of the same document alone; ``bounds`` int64 ``[num_documents + 1]``, rows and keys alike."""
        row = np.arange(self.lo.shape[1])
        document = np.searchsorted(bounds, row, side="right")
        known = np.concatenate([[0], bounds, [self.lo.shape[1]]])
        return self & Intervals.of(known[document], known[document + 1], len(row))

    def mask(self, num_keys: int) -> AttnMask:
        """The mask over ``num_rows`` x ``num_keys``."""
        tables = [_slices(np.maximum(lo, 0), np.minimum(hi, num_keys)) for lo, hi in zip(self.lo, self.hi, strict=True)]
        return AttnMask(np.concatenate(tables), self.lo.shape[1], num_keys)


def side_by_side(parts: list[Intervals], num_keys: int) -> Intervals:
    """Sequences one after another: part i has keys ``[i * num_keys, (i + 1) * num_keys)``."""
    height = max(len(part.lo) for part in parts)
    padded = [
        [np.pad(bound, ((0, height - len(bound)), (0, 0))) for bound in part.shifted(i * num_keys)]
        for i, part in enumerate(parts)
    ]
    return Intervals(*(np.concatenate(bounds, axis=1) for bounds in zip(*padded, strict=True)))


def _slices(lo: np.ndarray, hi: np.ndarray) -> np.ndarray:
    """Slices of consecutive rows whose bounds stay, or move along by one a row: int64 ``[n, 5]``."""
    rows = np.flatnonzero(lo < hi)
    if not len(rows):
        return np.zeros((0, 5), dtype=np.int64)
    lo, hi = lo[rows], hi[rows]
    step_lo, step_hi = np.diff(lo), np.diff(hi)
    joins = (np.diff(rows) == 1) & (step_lo >= 0) & (step_lo <= 1) & (step_hi >= 0) & (step_hi <= 1)
    # The mask type of a slice says how its bounds move: bit 0 the upper, bit 1 the lower.
    kind = np.where(joins, 2 * step_lo + step_hi, -1)
    ends = np.append(np.flatnonzero(np.diff(kind)) + 1, len(kind)) if len(kind) else np.zeros(0, np.int64)
    out, first = [], 0
    for start, end in zip(np.append(0, ends[:-1]).tolist(), ends.tolist(), strict=True) if len(ends) else ():
        # Steps [start, end) are of one kind; the row in which they begin may be in the slice before.
        if kind[start] < 0:
            out += [(row, row + 1, 0) for row in range(first, end)]
            first = end
        elif first <= end:
            out.append((first, end + 1, int(kind[start]) if first < end else 0))
            first = end + 1
    out += [(row, row + 1, 0) for row in range(first, len(rows))]
    q0, q1, kinds = np.array(out, dtype=np.int64).T
    return np.column_stack([rows[q0], rows[q1 - 1] + 1, lo[q0], hi[q1 - 1], kinds])
