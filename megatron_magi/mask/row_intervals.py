"""What each query sees, as ends of intervals of keys."""

from __future__ import annotations

import numpy as np

from megatron_magi.mask import bands as bd


def most_intervals(bands: bd.IntArray) -> int:
    """Most bands over one row: at least the number of intervals of keys that any row sees."""
    starts, stops = np.sort(bands[:, bd.Q0]), np.sort(bands[:, bd.Q1])
    open_now = np.arange(1, len(starts) + 1) - np.searchsorted(stops, starts, side="right")
    return int(open_now.max(initial=0))


def row_intervals(bands: bd.IntArray, num_rows: int) -> np.ndarray:
    """Ends of the intervals of keys that each row sees.

    Args:
        bands: int64 ``[m, 6]``, no two of which overlap.
        num_rows: rows of the mask.

    Returns:
        int32 ``[2 n + 1, num_rows]``, ascending in each row: row r sees ``[0, ends[0, r])``, ``[ends[1, r],
        ends[2, r])`` and so on. Intervals of a row do not touch. Those that a row has less than others are empty: they
        repeat its last end.
    """
    row, lo, hi = _rows_of(bands)
    count = np.bincount(row, minlength=num_rows) if len(row) else np.zeros(num_rows, dtype=np.int64)
    if count.max(initial=0) <= 1:
        return _one_each(row, lo, hi, num_rows)
    order = np.argsort(row * (int(hi.max()) + 1) + lo, kind="stable")
    row, lo, hi = row[order], lo[order], hi[order]
    # Bands do not overlap, so only intervals that touch are joined.
    is_first = np.ones(len(row), dtype=bool)
    is_first[1:] = (row[1:] != row[:-1]) | (lo[1:] != hi[:-1])
    is_last = np.append(is_first[1:], True)
    row, lo, hi = row[is_first], lo[is_first], hi[is_last]
    new_row = np.ones(len(row), dtype=bool)
    new_row[1:] = row[1:] != row[:-1]
    first = np.flatnonzero(new_row)
    place = np.arange(len(row)) - np.repeat(first, np.diff(np.append(first, len(row))))
    from_zero = np.zeros(num_rows, dtype=bool)
    from_zero[row[first]] = lo[first] == 0
    place += 1
    place -= from_zero[row]
    ends = np.zeros((2 * int(place.max(initial=0)) + 1, num_rows), dtype=np.int32)
    ends[2 * place, row] = hi
    later = place > 0
    ends[2 * place[later] - 1, row[later]] = lo[later]
    return np.maximum.accumulate(ends, axis=0)


def _rows_of(bands: bd.IntArray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Row, first and past-the-last key of every row of every band that is not empty."""
    bands = bd.tighten(bands)
    band, row = bd.expand(bands[:, bd.Q0], bands[:, bd.Q1] - bands[:, bd.Q0])
    if not bd.has_diagonals(bands):
        return row, bands[band, bd.K0], bands[band, bd.K1]
    lo = np.maximum(bands[band, bd.K0], row + bands[band, bd.D_LO])
    hi = np.minimum(bands[band, bd.K1], row + bands[band, bd.D_HI])
    return row, lo, hi


def _one_each(row: np.ndarray, lo: np.ndarray, hi: np.ndarray, num_rows: int) -> np.ndarray:
    """`row_intervals` where no row is in two bands."""
    if not lo.any():
        ends = np.zeros((1, num_rows), dtype=np.int32)
        ends[0, row] = hi
        return ends
    ends = np.zeros((3, num_rows), dtype=np.int32)
    at_zero = lo == 0
    ends[0, row[at_zero]] = hi[at_zero]
    ends[1, row] = np.where(at_zero, hi, lo)
    ends[2, row] = hi
    return ends
