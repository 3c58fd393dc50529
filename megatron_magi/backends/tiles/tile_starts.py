"""First rows of tiles: at document boundaries if that saves work, else where the previous tile is full."""

from __future__ import annotations

import numpy as np

from megatron_magi.backends.tiles import costs as tile_costs
from megatron_magi.mask import bands as bd


def tile_starts(bands: bd.IntArray, num_rows: int, block_m: int, masked_cost: float = 0.0) -> bd.IntArray:
    """First rows of the tiles, ascending from 0; a tile ends where the next begins and has at most ``block_m`` rows.

    A tile with rows of two documents computes the columns of both for all its rows. So a tile is
    closed at a row where the mask changes, unless the rows after it fit completely, or see so many of the same columns
    that another tile would cost more. ``masked_cost``: relative cost of a column that only part of a tile sees;
    counted if the rows after the boundary see no column that those before it see.
    """
    breaks = np.unique(np.concatenate([bands[:, bd.Q0], bands[:, bd.Q1], [0, num_rows]]))
    if len(breaks) <= 2:
        return np.arange(0, num_rows, block_m, dtype=np.int64)
    length, shared = _segment_columns(bands, breaks)
    # Whether the last rows of a segment can share their tile with the next segment at little cost.
    goes_on = np.append(2 * shared[1:] > length[:-1], False)
    starts, first = [0], 0  # ``first``: first row of the open tile
    for begin, end, columns, common, open_ended in zip(
        *(x.tolist() for x in (breaks[:-1], breaks[1:], length, shared, goes_on)), strict=True
    ):
        room, rows = block_m - (begin - first), end - begin
        if begin != first and rows > room:
            left = rows - room
            whole = -(-rows // block_m) + -left // block_m
            more = room / block_m if open_ended else whole  # tiles, if the open one is closed here
            masked = 0.0 if common or open_ended else masked_cost * columns
            if more * (columns + tile_costs.TILE_COST_COLUMNS) <= columns - common + masked:
                first = begin
                starts.append(begin)
        full = (end - first - 1) // block_m
        starts += range(first + block_m, first + full * block_m + 1, block_m)
        first += full * block_m
    return np.array(starts, dtype=np.int64)


def _segment_columns(bands: bd.IntArray, breaks: bd.IntArray) -> tuple[bd.IntArray, bd.IntArray]:
    """Number of columns that the rows between two breaks see, and how many of them the preceding rows see too."""
    num_segments = len(breaks) - 1
    if not bd.has_diagonals(bands):
        return _rectangle_columns(bands, breaks)
    pieces, segment = bd.cut_rows(bands, breaks)
    pieces, index = bd.tighten_with_index(pieces)
    ranges, segment = bd.merge_ranges(pieces[:, [bd.K0, bd.K1]], segment[index])
    length = _total(ranges, segment, num_segments)
    # Group i is segment i together with the previous one.
    both, group = bd.merge_ranges(np.concatenate([ranges, ranges]), np.concatenate([segment, segment + 1]))
    shared = length.copy()
    shared[1:] += length[:-1]
    return length, shared - _total(both, group, num_segments + 1)[:-1]


def _rectangle_columns(bands: bd.IntArray, breaks: bd.IntArray) -> tuple[bd.IntArray, bd.IntArray]:
    """`_segment_columns` of disjoint rectangles: at a break only rectangles that end or begin change."""
    num_breaks, ranges = len(breaks), bands[:, [bd.K0, bd.K1]]
    begin, end = np.searchsorted(breaks, bands[:, bd.Q0]), np.searchsorted(breaks, bands[:, bd.Q1])
    begun, ended = _total(ranges, begin, num_breaks), _total(ranges, end, num_breaks)
    changed, group = bd.merge_ranges(np.concatenate([ranges, ranges]), np.concatenate([begin, end]))
    length = np.cumsum(begun - ended)
    shared = length + ended - _total(changed, group, num_breaks)
    return length[:-1], shared[:-1]


def _total(ranges: bd.IntArray, group: bd.IntArray, num_groups: int) -> bd.IntArray:
    return np.bincount(group, ranges[:, 1] - ranges[:, 0], minlength=num_groups).astype(np.int64)
