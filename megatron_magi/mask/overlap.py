"""Do two bands of a mask cover the same (query, key) pair?"""

from __future__ import annotations

import numpy as np

from megatron_magi.mask import bands as bd

_PAIRS_AT_ONCE = 1 << 22
"""Candidate pairs tested in one vectorised step: bounds memory at about 0.5 GB."""


def find_overlap(bands: np.ndarray) -> tuple[int, int, int, int] | None:
    """First pair of bands with a common visible (q, k), or None.

    Candidates are pairs whose query ranges meet, from a sort by start; each is then decided
    exactly. In ``intersection`` the visible condition of a row is six linear inequalities in
    q with slopes -1, 0 or 1, so the rows that satisfy them are an interval in closed form.

    Args:
        bands: int64 ``[n, 6]``.

    Returns:
        ``(i, j, q, k)``, indices into ``bands`` with i < j and one pair that both cover.
    """
    live = np.flatnonzero((bands[:, bd.Q0] < bands[:, bd.Q1]) & (bands[:, bd.K0] < bands[:, bd.K1]))
    order = live[np.lexsort((bands[live, bd.K0], bands[live, bd.Q0]))]
    t = bands[order]
    if _sorted_rectangles_are_disjoint(t):
        return None
    # Bands that start inside band i's rows come right after it in the order.
    stop = np.searchsorted(t[:, bd.Q0], t[:, bd.Q1], side="left")
    first = np.arange(1, len(t) + 1)
    counts = np.maximum(stop - first, 0)
    start = 0
    while start < len(t):
        ahead = np.cumsum(counts[start:])
        end = start + max(1, int(np.searchsorted(ahead, _PAIRS_AT_ONCE, side="right")))
        left, right = bd.expand(first[start:end], counts[start:end])
        hit = _first_common(t[left + start], t[right])
        if hit is not None:
            at, q, k = hit
            i, j = sorted((int(order[left[at] + start]), int(order[right[at]])))
            return i, j, q, k
        start = end
    return None


def _sorted_rectangles_are_disjoint(t: np.ndarray) -> bool:
    """Quick way out for the common case: query ranges that do not meet at all."""
    return bool(np.all(t[1:, bd.Q0] >= np.maximum.accumulate(t[:, bd.Q1])[:-1])) if len(t) > 1 else True


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
