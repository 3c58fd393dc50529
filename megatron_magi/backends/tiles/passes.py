"""Groups intervals of columns into passes: columns of a pass are close together, with at most one interval a row."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_magi.mask import bands as bd


class Dealt(NamedTuple):
    """Pieces and the passes they are in.

    Attributes:
        pieces: int64 ``[n, 6]``, bands; a group is the pieces of one tile, a part of it those of one pass.
        group: int64 ``[n]``.
        part: int64 ``[n]``, ascending with the columns if parts do not overlap.
    """

    pieces: bd.IntArray
    group: bd.IntArray
    part: bd.IntArray

    def where(self, keep: NDArray) -> Dealt:
        """Some of the pieces, by index or by mask."""
        return Dealt(self.pieces[keep], self.group[keep], self.part[keep])

    def also(self, other: Dealt) -> Dealt:
        """These pieces and others."""
        return Dealt(*(np.concatenate(pair) for pair in zip(self, other, strict=True)))


def assign_passes(
    pieces: bd.IntArray, tile: bd.IntArray, block_n: int, align: int, pass_cost: float
) -> tuple[bd.IntArray, bd.IntArray, bd.IntArray]:
    """Assigns the pieces of tiles to passes; adjacent pieces of a row are joined.

    Args:
        pieces: int64 ``[n, 6]``, tight bands, none across a tile boundary; no two overlap.
        tile: int64 ``[n]``, the tile of each piece.
        block_n: columns of a block.
        align: first columns of passes are multiples of it.
        pass_cost: fixed cost of a pass, in blocks.

    Returns:
        ``(pieces, pass_of_piece, pass_tile)``: int64 ``[m, 6]``, sorted by (pass, first row); int64 ``[m]``; int64
        ``[num_passes]``. Passes ascend with the tile, and within it by columns if they do not overlap.
    """
    # Two runs of blocks less than half a block apart mostly cost as much as one.
    group = _components(_reach(pieces, block_n), tile)
    order = np.lexsort((pieces[:, bd.Q0], group))
    dealt = Dealt(pieces, group, np.zeros_like(group)).where(order)
    tile_of_group = tile[order][_firsts(dealt.group)]
    clashing = _clashing_groups(dealt)
    if clashing.any():
        hard = clashing[dealt.group]
        dealt = dealt.where(~hard).also(_deal(dealt.where(hard), block_n, align, pass_cost))
        dealt = dealt.where(np.lexsort((dealt.pieces[:, bd.Q0], dealt.part, dealt.group)))
    first = _firsts(dealt.group, dealt.part)
    pass_of_piece = np.repeat(np.arange(len(first)), np.diff(first, append=len(dealt.group)))
    return dealt.pieces, pass_of_piece, tile_of_group[dealt.group[first]]


def _firsts(*keys: bd.IntArray) -> bd.IntArray:
    """Index of the first of each run of equal keys, int64 ``[num_runs]``."""
    is_first = np.ones(len(keys[0]), dtype=bool)
    is_first[1:] = False
    for key in keys:
        is_first[1:] |= key[1:] != key[:-1]
    return np.flatnonzero(is_first)


def _reach(pieces: bd.IntArray, block_n: int) -> bd.IntArray:
    """Columns of each piece, extended by a gap that is cheap to compute needlessly."""
    return np.stack([pieces[:, bd.K0], pieces[:, bd.K1] + block_n // 2], axis=1)


def _components(ranges: bd.IntArray, group: bd.IntArray) -> bd.IntArray:
    """Connected component of each range among the touching ranges of its group; ascending."""
    if not len(ranges):
        return np.zeros(0, dtype=np.int64)
    merged, merged_group = bd.merge_ranges(ranges, group)
    width = int(merged[:, 1].max()) + 1
    return np.searchsorted(merged_group * width + merged[:, 0], group * width + ranges[:, 0], side="right") - 1


def _clashing_groups(dealt: Dealt) -> NDArray[np.bool_]:
    """For each group, whether two of its pieces share a row; pieces are sorted by (group, first row)."""
    pieces, group = dealt.pieces, dealt.group
    clash = np.zeros(int(group[-1]) + 1 if len(group) else 0, dtype=bool)
    clash[group[1:][(group[1:] == group[:-1]) & (pieces[1:, bd.Q0] < pieces[:-1, bd.Q1])]] = True
    return clash


def _deal(dealt: Dealt, block_n: int, align: int, pass_cost: float) -> Dealt:
    """Divides groups that have several intervals in a row, even after joining, into parts."""
    dealt, gaps = _join_rows(dealt)
    if not len(gaps):
        return dealt
    cuts, cuttable = _cuts(gaps, dealt, block_n, align)
    by_cuts = _cut_columns(dealt, cuts)
    torn = np.zeros(len(cuttable), dtype=bool)
    torn[gaps[:, 0]] = True
    by_layers = _layer(dealt.where(torn[dealt.group]), block_n)
    costs = [_costs(way, len(torn), block_n, align, pass_cost) for way in (by_cuts, by_layers)]
    worth = costs[0] <= costs[1]
    cut = ~torn | (cuttable & worth)
    return by_cuts.where(cut[by_cuts.group]).also(by_layers.where(~cut[by_layers.group]))


def _join_rows(dealt: Dealt) -> tuple[Dealt, bd.IntArray]:
    """Joins, row by row, the pieces of each group that touch.

    Returns:
        ``(dealt, gaps)``. Pieces extend over as many rows as have the same boundaries. Gaps are int64
        ``[num_gaps, 3]``: a group, and the columns that lie between two intervals in all of its rows with this gap:
        ``[gap[1], gap[2])``; ``gap[1] > gap[2]`` if the gaps of these rows have no column in common.
    """
    index, first, last, segment = _row_segments(dealt)
    group = dealt.group[index]
    left = np.stack([bd.row_bounds(dealt.pieces[index], rows) for rows in (first, last)], axis=1)  # [2, 2, n]
    order = np.lexsort((left[0, 0], segment))
    index, first, last, segment, group = (x[order] for x in (index, first, last, segment, group))
    (begin, begin_last), (end, end_last) = left[:, :, order]
    # Within a segment boundaries are straight lines, so pieces adjacent in its first and last row are adjacent in all.
    same = segment[1:] == segment[:-1]
    joins = same & (end[:-1] == begin[1:]) & (end_last[:-1] == begin_last[1:])
    parted = np.flatnonzero(same & ~joins)
    gaps = np.stack([group[parted], end_last[parted], begin[parted + 1]], axis=1)
    head = np.flatnonzero(np.append(True, ~joins))
    tail = np.append(head[1:], len(index)) - 1
    joined = _stack_rows(dealt.pieces, index[head], index[tail], first[head], last[head] + 1)
    return Dealt(joined[0], dealt.group[joined[1]], np.zeros_like(joined[1])), gaps


def _row_segments(dealt: Dealt) -> tuple[bd.IntArray, bd.IntArray, bd.IntArray, bd.IntArray]:
    """Cuts the pieces of each group at each other's first and last rows, and where diagonals start or end.

    Returns:
        ``(index, first, last, segment)``, int64 ``[m]`` each: a piece, its first and its last row in a segment, and
        that segment's number, which ascends with (group, row).
    """
    p = dealt.pieces
    lift = dealt.group * (int(p[:, bd.Q1].max()) + 1)
    lines = np.stack([p[:, bd.Q0], p[:, bd.Q1], p[:, bd.K0] - p[:, bd.D_LO], p[:, bd.K1] - p[:, bd.D_HI]])
    inside = (lines >= p[:, bd.Q0]) & (lines <= p[:, bd.Q1])
    borders = np.unique((lines + lift)[inside])
    index, segment = bd.cut_intervals(p[:, bd.Q0] + lift, p[:, bd.Q1] + lift, borders[:-1], borders[1:])
    return index, borders[segment] - lift[index], borders[segment + 1] - lift[index] - 1, segment


def _stack_rows(
    pieces: bd.IntArray, left: bd.IntArray, right: bd.IntArray, first: bd.IntArray, past: bd.IntArray
) -> tuple[bd.IntArray, bd.IntArray]:
    """Bands from the left boundary of one piece to the right one of another, over all rows where both are unchanged.

    Args:
        pieces: int64 ``[n, 6]``.
        left, right: int64 ``[m]``, indices of pieces.
        first, past: int64 ``[m]``, rows.

    Returns:
        ``(bands, left)``, tight.
    """
    order = np.lexsort((first, right, left))
    left, right, first, past = left[order], right[order], first[order], past[order]
    goes_on = (left[1:] == left[:-1]) & (right[1:] == right[:-1]) & (first[1:] == past[:-1])
    head = np.flatnonzero(np.append(True, ~goes_on))
    tail = np.append(head[1:], len(order)) - 1
    out = pieces[left[head]]
    out[:, [bd.K1, bd.D_HI]] = pieces[right[head]][:, [bd.K1, bd.D_HI]]
    out[:, bd.Q0], out[:, bd.Q1] = first[head], past[tail]
    return bd.tighten(out), left[head]


def _cuts(gaps: bd.IntArray, dealt: Dealt, block_n: int, align: int) -> tuple[bd.IntArray, NDArray[np.bool_]]:
    """Fewest columns to cut groups at so that no row has two intervals between two cuts.

    Returns:
        ``(cuts, cuttable)``: int64 ``[num_cuts, 2]``, group and column, ascending; of each group, whether its gaps
        can be cut at single columns.
    """
    num_groups = int(dealt.group.max()) + 1
    cuttable = np.ones(num_groups, dtype=bool)
    cuttable[gaps[gaps[:, 1] > gaps[:, 2], 0]] = False
    gaps = gaps[cuttable[gaps[:, 0]]]
    gaps = gaps[np.lexsort((gaps[:, 2], gaps[:, 0]))]
    begin = np.full(num_groups, np.iinfo(np.int64).max)
    np.minimum.at(begin, dealt.group, dealt.pieces[:, bd.K0] // align * align)
    cuts: list[tuple[int, int]] = []
    current, low, high, start = -1, 0, -1, 0  # the open cut is in all gaps met since `high` was set
    for group, gap_begin, gap_end in [*gaps.tolist(), (num_groups, 0, 0)]:
        if group == current and gap_begin <= high:
            low = max(low, gap_begin)
            continue
        if current >= 0:
            column = high - (high - start) % block_n  # whole blocks in front of it, if it can be
            cuts.append((current, column if column >= low else high))
        if group < num_groups:
            start = cuts[-1][1] // align * align if group == current else int(begin[group])
        current, low, high = group, gap_begin, gap_end
    return np.array(cuts, dtype=np.int64).reshape(-1, 2), cuttable


def _cut_columns(dealt: Dealt, cuts: bd.IntArray) -> Dealt:
    """Cuts the pieces of each group at columns; what lies between two cuts is a part."""
    pieces, group = dealt.pieces, dealt.group
    width = int(pieces[:, bd.K1].max()) + 1
    at = cuts[:, 0] * width + cuts[:, 1]
    first = np.searchsorted(at, group * width + pieces[:, bd.K0], side="right")
    last = np.searchsorted(at, group * width + pieces[:, bd.K1], side="left")
    index, part = bd.expand(first, last - first + 1)
    out = pieces[index]
    left, right = part > first[index], part < last[index]
    out[left, bd.K0] = cuts[part[left] - 1, 1]
    out[right, bd.K1] = cuts[part[right], 1]
    out, kept = bd.tighten_with_index(out)
    return Dealt(out, group[index[kept]], part[kept])


def _layer(dealt: Dealt, block_n: int) -> Dealt:
    """Divides the pieces of each group into layers without shared rows, and layers into parts of close columns."""
    dealt = dealt.where(np.lexsort((dealt.pieces[:, bd.K0], dealt.pieces[:, bd.Q0], dealt.group)))
    layer = _layers(dealt.pieces, dealt.group)
    return dealt._replace(part=_components(_reach(dealt.pieces, block_n), layer))


def _layers(pieces: bd.IntArray, group: bd.IntArray) -> bd.IntArray:
    """Divides each group into the fewest layers without shared rows (first fit).

    Returns:
        For each piece a layer number; numbers ascend with the group.
    """
    layers = np.empty(len(group), dtype=np.int64)
    starts, ends = pieces[:, bd.Q0].tolist(), pieces[:, bd.Q1].tolist()
    groups = group.tolist()
    base, open_ends, current = 0, [], -1
    for i, (g, start, end) in enumerate(zip(groups, starts, ends, strict=True)):
        if g != current:
            base, open_ends, current = base + len(open_ends), [], g
        for j, busy_until in enumerate(open_ends):
            if busy_until <= start:
                open_ends[j] = end
                layers[i] = base + j
                break
        else:
            layers[i] = base + len(open_ends)
            open_ends.append(end)
    return layers


def _costs(dealt: Dealt, num_groups: int, block_n: int, align: int, pass_cost: float) -> NDArray[np.float64]:
    """Cost of the passes of each group, in blocks, float64 ``[num_groups]``."""
    dealt = dealt.where(np.lexsort((dealt.part, dealt.group)))
    at = _firsts(dealt.group, dealt.part)
    first = np.minimum.reduceat(dealt.pieces[:, bd.K0], at) // align * align
    blocks = -((first - np.maximum.reduceat(dealt.pieces[:, bd.K1], at)) // block_n)
    return np.bincount(dealt.group[at], blocks + pass_cost, minlength=num_groups)
