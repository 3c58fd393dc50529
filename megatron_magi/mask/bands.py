"""Bands: the form in which every mask reaches plans and kernels.

A band is a rectangle of queries times keys, cut by up to two diagonals:

    row q, key k visible  <=>  q0 <= q < q1,  k0 <= k < k1,  d_lo <= k - q < d_hi

so row q of a band sees exactly the keys ``max(k0, q + d_lo) <= k < min(k1, q + d_hi)``.
The four mask types of a slice are bands, and, unlike slices, bands are closed under
cutting by rows, cutting by columns, and shifting either coordinate. That is what sharding a
mask over ranks does, so one representation serves the whole way from the user to the kernel.

A table of n bands is an int64 array ``[n, 6]`` with the columns
``Q0, Q1, K0, K1, D_LO, D_HI``. A missing diagonal is ``-NO_DIAGONAL`` / ``+NO_DIAGONAL``.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Q0, Q1, K0, K1, D_LO, D_HI = range(6)
NUM_COLUMNS = 6

NO_DIAGONAL = 1 << 40
"""Larger than any difference of two token indices, small enough to add up in int64."""

IntArray = NDArray[np.int64]


def row_bounds(bands: IntArray, rows: IntArray) -> tuple[IntArray, IntArray]:
    """First and past-the-last visible key of one row of each band.

    Args:
        bands: int64 ``[n, 6]``.
        rows: int64 ``[n]``, one query row for each band (not checked against its range).

    Returns:
        ``(lo, hi)``, int64 ``[n]`` each; the row is empty where ``lo >= hi``.
    """
    lo = np.maximum(bands[:, K0], rows + bands[:, D_LO])
    hi = np.minimum(bands[:, K1], rows + bands[:, D_HI])
    return lo, hi


def row_intervals(bands: IntArray, rows: IntArray) -> tuple[IntArray, IntArray]:
    """The keys of some rows, as intervals.

    Args:
        bands: int64 ``[n, 6]``.
        rows: int64 ``[num_rows]``, not negative, in any order.

    Returns:
        ``(lo, hi)``, int64 ``[m, num_rows]``: row i sees the keys ``lo[j, i] <= k < hi[j, i]`` for each j; m is the
        largest number of intervals of a row, at least 1, and those that a row lacks are empty.
    """
    band, query = expand(bands[:, Q0], np.maximum(bands[:, Q1] - bands[:, Q0], 0))
    first, past = row_bounds(bands[band], query)
    order = np.argsort(query, kind="stable")
    order = order[first[order] < past[order]]
    query, first, past = query[order], first[order], past[order]
    begin = np.searchsorted(query, rows)
    count = np.searchsorted(query, rows, side="right") - begin
    lo, hi = np.zeros((2, max(1, int(count.max(initial=0))), len(rows)), dtype=np.int64)
    for j in range(len(lo)):
        has = count > j
        lo[j, has], hi[j, has] = first[begin[has] + j], past[begin[has] + j]
    return lo, hi


def shift_keys(bands: IntArray, by: int | IntArray) -> IntArray:
    """The bands after all key indices have grown by ``by``, one number for all bands or int64 ``[n]``."""
    out, by = bands.copy(), np.broadcast_to(by, len(bands))
    out[:, [K0, K1]] += by[:, None]
    for column, none in ((D_LO, -NO_DIAGONAL), (D_HI, NO_DIAGONAL)):
        cut = bands[:, column] != none
        out[cut, column] += by[cut]
    return out


def transpose(bands: IntArray) -> IntArray:
    """The bands of the transposed mask: keys become queries."""
    out = bands[:, [K0, K1, Q0, Q1, D_HI, D_LO]]
    out[:, D_LO:] = 1 - out[:, D_LO:]
    return out


def has_diagonals(bands: IntArray) -> bool:
    """Whether a band of the table may be cut by a diagonal."""
    return bool(np.any((bands[:, D_LO] != -NO_DIAGONAL) | (bands[:, D_HI] != NO_DIAGONAL)))


def tighten(bands: IntArray) -> IntArray:
    """Shrinks each band to the smallest rectangle of the same visible area, and drops empty bands.

    After it, every row of a band sees at least one key and every key of a band is seen by
    at least one row, so ``[K0, K1)`` is exactly the set of keys that the band needs.
    """
    return tighten_with_index(bands)[0]


def tighten_with_index(bands: IntArray) -> tuple[IntArray, IntArray]:
    """`tighten`, and the row of ``bands`` that each remaining band came from, int64 ``[m]``."""
    if not has_diagonals(bands):
        index = np.flatnonzero((bands[:, Q0] < bands[:, Q1]) & (bands[:, K0] < bands[:, K1]))
        return bands[index], index
    index = np.flatnonzero(bands[:, D_LO] < bands[:, D_HI])
    out = bands[index]
    # Rows that see a key: k1 > q + d_lo and k0 < q + d_hi.
    out[:, Q0] = np.maximum(out[:, Q0], out[:, K0] - out[:, D_HI] + 1)
    out[:, Q1] = np.minimum(out[:, Q1], out[:, K1] - out[:, D_LO])
    # Keys that the remaining rows see.
    out[:, K0] = np.maximum(out[:, K0], out[:, Q0] + out[:, D_LO])
    out[:, K1] = np.minimum(out[:, K1], out[:, Q1] - 1 + out[:, D_HI])
    keep = (out[:, Q0] < out[:, Q1]) & (out[:, K0] < out[:, K1])
    out, index = out[keep], index[keep]
    # A diagonal that cuts nothing off is dropped, so that equal areas look equal.
    cuts_lo = out[:, Q1] - 1 + out[:, D_LO] > out[:, K0]
    cuts_hi = out[:, Q0] + out[:, D_HI] < out[:, K1]
    out[:, D_LO] = np.where(cuts_lo, out[:, D_LO], -NO_DIAGONAL)
    out[:, D_HI] = np.where(cuts_hi, out[:, D_HI], NO_DIAGONAL)
    return out, index


def _ramp_sum(first: IntArray, start: IntArray, stop: IntArray) -> IntArray:
    """Sum of ``first + i`` for ``start <= i < stop``, 0 where there is no such i."""
    count = np.maximum(stop - start, 0)
    return count * first + count * (start + stop - 1) // 2


def areas(bands: IntArray) -> IntArray:
    """Number of visible (q, k) pairs of each band, int64 ``[n]``, in closed form.

    The width of row ``q0 + i`` is ``min(k1, q + d_hi) - max(k0, q + d_lo)``. Its two parts
    are sums of at most two linear pieces each once the rows are cut to the visible ones.
    """
    total = np.zeros(len(bands), dtype=np.int64)
    valid = bands[:, D_LO] < bands[:, D_HI]
    t = bands[valid]
    if not len(t):
        return total
    q0 = np.maximum(t[:, Q0], t[:, K0] - t[:, D_HI] + 1)
    q1 = np.minimum(t[:, Q1], t[:, K1] - t[:, D_LO])
    q1 = np.maximum(q0, q1)
    rows = q1 - q0
    # hi: q + d_hi for the first rows, then k1.
    n_hi = np.clip(t[:, K1] - t[:, D_HI] - q0, 0, rows)
    sum_hi = _ramp_sum(q0 + t[:, D_HI], np.zeros_like(rows), n_hi) + (rows - n_hi) * t[:, K1]
    # lo: k0 for the first rows, then q + d_lo.
    n_lo = np.clip(t[:, K0] - t[:, D_LO] - q0, 0, rows)
    sum_lo = n_lo * t[:, K0] + _ramp_sum(q0 + t[:, D_LO], n_lo, rows)
    empty = (t[:, K0] >= t[:, K1]) | (rows == 0)
    total[valid] = np.where(empty, 0, sum_hi - sum_lo)
    return total


def cut_rows(bands: IntArray, bounds: IntArray) -> tuple[IntArray, IntArray]:
    """Cuts bands at row boundaries.

    Args:
        bands: int64 ``[n, 6]``.
        bounds: int64 ``[m + 1]``, strictly increasing; segment i is ``[bounds[i], bounds[i+1])``.

    Returns:
        ``(pieces, segment)``: the pieces inside the segments, in the order of the bands, and
        the segment of each piece, int64 ``[num_pieces]``.
    """
    index, segment = cut_intervals(bands[:, Q0], bands[:, Q1], bounds[:-1], bounds[1:])
    pieces = bands[index]
    pieces[:, Q0] = np.maximum(pieces[:, Q0], bounds[segment])
    pieces[:, Q1] = np.minimum(pieces[:, Q1], bounds[segment + 1])
    return pieces, segment


def cut_intervals(lo: IntArray, hi: IntArray, starts: IntArray, ends: IntArray) -> tuple[IntArray, IntArray]:
    """Pairs of an interval ``[lo[i], hi[i])`` and a segment ``[starts[j], ends[j])`` that meet.

    The segments are sorted and disjoint, and may leave gaps.

    Returns:
        ``(i, j)``, int64, sorted by i and then j.
    """
    first = np.searchsorted(ends, lo, side="right")
    stop = np.searchsorted(starts, hi, side="left")
    counts = np.where(lo < hi, np.maximum(stop - first, 0), 0)
    return expand(first, counts)


def rows_within(lo: IntArray, hi: IntArray, starts: IntArray, ends: IntArray) -> IntArray:
    """Rows that each interval ``[lo[i], hi[i])`` shares with the segments ``[starts[j], ends[j])``, int64 ``[n]``.

    Segments come in any order and may overlap: a row counts once for each that it lies in.
    """
    at = np.concatenate([lo, hi])
    # Rows of segments up to ``at``: those behind their starts, less those behind their ends.
    before = np.zeros(len(at), dtype=np.int64)
    for edges, sign in ((np.sort(starts), 1), (np.sort(ends), -1)):
        count = np.searchsorted(edges, at)
        before += sign * (count * at - np.concatenate([[0], np.cumsum(edges)])[count])
    return before[len(lo) :] - before[: len(lo)]


def expand(first: IntArray, counts: IntArray) -> tuple[IntArray, IntArray]:
    """For each i, the pairs ``(i, first[i] + j)`` for ``0 <= j < counts[i]``, concatenated."""
    index = np.repeat(np.arange(len(counts), dtype=np.int64), counts)
    offsets = np.cumsum(counts) - counts
    return index, np.arange(len(index), dtype=np.int64) + np.repeat(first - offsets, counts)


def merge_ranges(ranges: IntArray, group: IntArray | None = None) -> tuple[IntArray, IntArray]:
    """Union of half-open ranges, group by group.

    Args:
        ranges: int64 ``[n, 2]``, in any order, overlapping or not; empty ranges are ignored.
        group: int64 ``[n]``, which set each range belongs to; one set when None.

    Returns:
        ``(merged, group)``: disjoint, non-touching ranges sorted by (group, start).
    """
    if group is None:
        group = np.zeros(len(ranges), dtype=np.int64)
    keep = ranges[:, 0] < ranges[:, 1]
    ranges, group = ranges[keep], group[keep]
    if not len(ranges):
        return ranges.reshape(0, 2), group
    # Lift each group above all ends of the one before it: then one running maximum serves all.
    low, high = ranges.min(), ranges.max()
    lift = group * (high - low + 2)
    start = ranges[:, 0] + lift
    order = np.argsort(start, kind="stable")
    ranges, group, lift, start = ranges[order], group[order], lift[order], start[order]
    end = ranges[:, 1] + lift
    reach = np.maximum.accumulate(end)
    is_first = np.ones(len(ranges), dtype=bool)
    is_first[1:] = start[1:] > reach[:-1]
    at = np.flatnonzero(is_first)
    stop = np.append(at[1:], len(ranges)) - 1
    merged = np.stack([ranges[at, 0], reach[stop] - lift[at]], axis=1)
    return merged, group[at]
