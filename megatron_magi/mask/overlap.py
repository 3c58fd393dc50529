"""Do two bands of a mask cover the same (query, key) pair?"""

from __future__ import annotations

import numpy as np

from megatron_magi.mask import bands as bd

_PAIRS_AT_ONCE = 1 << 22
"""Candidate pairs tested in one vectorised step: bounds memory at about 0.5 GB."""


def find_overlap(bands: np.ndarray) -> tuple[int, int, int, int] | None:
    """First pair of bands with a common visible (q, k), or None.

    Candidates are pairs whose query ranges meet, or whose key ranges meet, whichever are fewer;
    each is then decided exactly: the intersection of two bands is a band, and its rows that see
    a key are an interval in closed form.

    Args:
        bands: int64 ``[n, 6]``.

    Returns:
        ``(i, j, q, k)``, indices into ``bands`` with i < j and one pair that both cover.
    """
    if (bands[1:, bd.Q0] >= bands[:-1, bd.Q1]).all():
        return None  # queries ascend, as those of packed documents do
    live = np.flatnonzero((bands[:, bd.Q0] < bands[:, bd.Q1]) & (bands[:, bd.K0] < bands[:, bd.K1]))
    by_query, by_key = _Sweep(bands, live), _Sweep(bd.transpose(bands), live)
    if by_query.num_pairs <= by_key.num_pairs:
        return by_query.run()
    found = by_key.run()
    return None if found is None else (found[0], found[1], found[3], found[2])


class _Sweep:
    """Pairs of bands whose query ranges meet, from a sort by start."""

    def __init__(self, bands: np.ndarray, live: np.ndarray) -> None:
        self._order = live[np.lexsort((bands[live, bd.K0], bands[live, bd.Q0]))]
        self._table = bands[self._order]
        # Bands that start inside band i's rows come right after it in the order.
        stop = np.searchsorted(self._table[:, bd.Q0], self._table[:, bd.Q1], side="left")
        self._first = np.arange(1, len(self._table) + 1)
        self._counts = np.maximum(stop - self._first, 0)

    @property
    def num_pairs(self) -> int:
        """Pairs to decide."""
        return int(self._counts.sum())

    def run(self) -> tuple[int, int, int, int] | None:
        """First pair with a common visible (q, k), see `find_overlap`."""
        t, start = self._table, 0
        while self.num_pairs and start < len(t):
            ahead = np.cumsum(self._counts[start:])
            end = start + max(1, int(np.searchsorted(ahead, _PAIRS_AT_ONCE, side="right")))
            left, right = bd.expand(self._first[start:end], self._counts[start:end])
            hit = _first_common(t[left + start], t[right])
            if hit is not None:
                at, q, k = hit
                i, j = sorted((int(self._order[left[at] + start]), int(self._order[right[at]])))
                return i, j, q, k
            start = end
        return None


def _first_common(a: np.ndarray, b: np.ndarray) -> tuple[int, int, int] | None:
    both = np.empty_like(a)
    for lo in (bd.Q0, bd.K0, bd.D_LO):
        both[:, lo] = np.maximum(a[:, lo], b[:, lo])
    for hi in (bd.Q1, bd.K1, bd.D_HI):
        both[:, hi] = np.minimum(a[:, hi], b[:, hi])
    # An intersection of two bands is a band: it is empty exactly when no row sees a key.
    first = np.maximum(both[:, bd.Q0], both[:, bd.K0] - both[:, bd.D_HI] + 1)
    last = np.minimum(both[:, bd.Q1], both[:, bd.K1] - both[:, bd.D_LO]) - 1
    common = (first <= last) & (both[:, bd.D_LO] < both[:, bd.D_HI]) & (both[:, bd.K0] < both[:, bd.K1])
    hits = np.flatnonzero(common)
    if not len(hits):
        return None
    at = int(hits[0])
    q = int(first[at])
    lo, _ = bd.row_bounds(both[at : at + 1], np.array([q]))
    return at, q, int(lo[0])
