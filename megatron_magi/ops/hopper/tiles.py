"""Tile plans: what the Hopper kernels need to know of a mask.

A kernel computes tiles of ``block_m`` rows. The mask of a tile is a list of *passes*; a pass is a
range of blocks of ``block_n`` columns and, for each row of the tile, one interval of columns that it sees.
Rows whose columns lie in the same blocks share a pass, so many short documents in one tile cost one
block, not one each. A row with several intervals takes part in several passes.

The forward plan has queries as rows and keys as columns; the backward plan is the same function
of the transposed mask.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_magi.mask import bands as bd

Int32Array = NDArray[np.int32]

SUB_ROWS = 64
"""Rows of one warpgroup: fully visible blocks are known for each of them apart."""

EVERYTHING = 1 << 30
"""Past-the-last column of rows behind the end of the tensor, whose results nobody reads."""

PASS_COST = 0.35
"""Cost of a tile or pass beside its blocks, in blocks of 128 columns."""


@dataclass(frozen=True, eq=False)
class TilePlan:
    """Tiles of one mask, sorted by falling cost.

    Attributes:
        tiles: int32 ``[num_tiles, 4]``: first row, first pass, past-the-last pass, blocks to compute.
            Every tile of the tensor is there, also those that see nothing.
        passes: int32 ``[num_passes, 8]``: first and past-the-last block; for each half of the tile the
            first and past-the-last block that all its rows see completely; the number of blocks of
            all passes before it; and 0.
        bounds: int32 ``[num_passes, block_m, 2]``: first and past-the-last column of each row.
        block_m, block_n: rows and columns of a block.
    """

    tiles: Int32Array
    passes: Int32Array
    bounds: Int32Array
    block_m: int
    block_n: int

    @property
    def num_blocks(self) -> int:
        """Blocks that are computed, over all tiles."""
        return int((self.passes[:, 1] - self.passes[:, 0]).sum())


def transpose(bands: bd.IntArray) -> bd.IntArray:
    """The bands of the transposed mask: keys become rows."""
    out = bands[:, [bd.K0, bd.K1, bd.Q0, bd.Q1, bd.D_LO, bd.D_HI]].copy()
    out[:, bd.D_LO] = 1 - bands[:, bd.D_HI]
    out[:, bd.D_HI] = 1 - bands[:, bd.D_LO]
    return out


def plan_tiles(bands: bd.IntArray, num_rows: int, num_columns: int, block_m: int, block_n: int) -> TilePlan:
    """Plans the tiles of a mask.

    Args:
        bands: int64 ``[n, 6]``, inside ``num_rows`` x ``num_columns``; no two overlap.
        num_rows, num_columns: shape of the mask.
        block_m: rows of a tile, a multiple of `SUB_ROWS`.
        block_n: columns of a block.
    """
    num_tiles = -(-num_rows // block_m)
    pieces, tile = _pieces(bands, num_rows, block_m)
    pieces, tile, pass_of_piece, pass_tile = _assign_passes(pieces, tile, block_m, block_n)
    num_passes = len(pass_tile)
    bounds = _fill_bounds(pieces, pass_of_piece, pass_tile, num_rows, block_m)
    passes = _describe_passes(pieces, pass_of_piece, bounds, num_passes, block_m, block_n)
    tiles = np.zeros((num_tiles, 4), dtype=np.int32)
    tiles[:, 0] = np.arange(num_tiles) * block_m
    tiles[:, 1] = np.searchsorted(pass_tile, np.arange(num_tiles), side="left")
    tiles[:, 2] = np.searchsorted(pass_tile, np.arange(num_tiles), side="right")
    blocks = np.bincount(pass_tile, passes[:, 1] - passes[:, 0], minlength=num_tiles)
    tiles[:, 3] = blocks
    cost = blocks + PASS_COST * (128 / block_n) * (1 + tiles[:, 2] - tiles[:, 1])
    order = np.argsort(-cost, kind="stable")
    return TilePlan(tiles[order], passes, bounds, block_m, block_n)


def block_turns(plan: TilePlan) -> Int32Array:
    """For each visit of a block, how many visits of the same block come before it in the order of the tiles.

    Returns:
        int32 ``[num_blocks]``, the blocks of all passes one pass after another (see ``passes[:, 6]``).
    """
    place = np.empty(len(plan.passes), dtype=np.int64)  # of a pass, in the order in which tiles are worked on
    counts = (plan.tiles[:, 2] - plan.tiles[:, 1]).astype(np.int64)
    _, passes = bd.expand(plan.tiles[:, 1].astype(np.int64), counts)
    place[passes] = np.arange(len(passes))
    widths = (plan.passes[:, 1] - plan.passes[:, 0]).astype(np.int64)
    index, block = bd.expand(plan.passes[:, 0].astype(np.int64), widths)
    order = np.lexsort((place[index], block))
    sorted_block = block[order]
    turns = np.empty(len(order), dtype=np.int32)
    turns[order] = np.arange(len(order)) - np.searchsorted(sorted_block, sorted_block, side="left")
    return turns


def _pieces(bands: bd.IntArray, num_rows: int, block_m: int) -> tuple[bd.IntArray, bd.IntArray]:
    """Bands cut at tile borders, each as small as it can be, sorted by (tile, first column)."""
    bounds = np.arange(-(-num_rows // block_m) + 1, dtype=np.int64) * block_m
    pieces, _ = bd.cut_rows(_join_columns(bd.tighten(bands)), bounds)
    pieces = bd.tighten(pieces)
    tile = pieces[:, bd.Q0] // block_m
    order = np.lexsort((pieces[:, bd.Q0], pieces[:, bd.K0], tile))
    return pieces[order], tile[order]


def _join_columns(bands: bd.IntArray) -> bd.IntArray:
    """Joins rectangles of the same rows whose columns touch: fewer intervals a row."""
    if len(bands) < 2:
        return bands
    order = np.lexsort((bands[:, bd.K0], bands[:, bd.Q1], bands[:, bd.Q0]))
    b = bands[order]
    same = (b[1:, bd.Q0] == b[:-1, bd.Q0]) & (b[1:, bd.Q1] == b[:-1, bd.Q1]) & (b[1:, bd.K0] == b[:-1, bd.K1])
    # The border between two pieces is straight: the left one has no right diagonal and so on.
    joins = same & (b[:-1, bd.D_HI] == bd.NO_DIAGONAL) & (b[1:, bd.D_LO] == -bd.NO_DIAGONAL)
    if not joins.any():
        return bands
    first = np.flatnonzero(np.append(True, ~joins))
    last = np.append(first[1:], len(b)) - 1
    out = b[first]
    out[:, bd.K1] = b[last, bd.K1]
    out[:, bd.D_HI] = b[last, bd.D_HI]
    return out


def _assign_passes(pieces, tile, block_m: int, block_n: int):
    """Puts pieces into passes: a pass has touching blocks and at most one piece a row.

    Returns:
        ``(pieces, tile, pass_of_piece, pass_tile)``, the pieces sorted by pass.
    """
    ranges = np.stack([pieces[:, bd.K0] // block_n, -(-pieces[:, bd.K1] // block_n)], axis=1)
    group = _components(ranges, tile)
    order = np.lexsort((pieces[:, bd.Q0], group))
    pieces, tile, ranges, group = pieces[order], tile[order], ranges[order], group[order]
    if _has_row_conflict(pieces, group):
        layer = _layers(pieces, group)
        # Pieces of one layer may have come apart again.
        order = np.lexsort((ranges[:, 0], layer))
        pieces, tile, ranges = pieces[order], tile[order], ranges[order]
        group = _components(ranges, layer[order])
    # Ascending passes within a tile: groups are numbered by (tile, first block) already.
    order = np.argsort(group, kind="stable")
    pieces, tile, group = pieces[order], tile[order], group[order]
    is_first = np.append(True, group[1:] != group[:-1]) if len(group) else np.zeros(0, dtype=bool)
    return pieces, tile, np.cumsum(is_first) - 1, tile[is_first]


def _components(ranges: bd.IntArray, group: bd.IntArray) -> bd.IntArray:
    """Connected component of each range among the touching ranges of its group; ascending."""
    if not len(ranges):
        return np.zeros(0, dtype=np.int64)
    merged, merged_group = bd.merge_ranges(ranges, group)
    width = int(merged[:, 1].max()) + 1
    return np.searchsorted(merged_group * width + merged[:, 0], group * width + ranges[:, 0], side="right") - 1


def _has_row_conflict(pieces: bd.IntArray, group: bd.IntArray) -> bool:
    """Whether two pieces of one group share a row; pieces sorted by (group, first row)."""
    return bool(np.any((group[1:] == group[:-1]) & (pieces[1:, bd.Q0] < pieces[:-1, bd.Q1])))


def _layers(pieces: bd.IntArray, group: bd.IntArray) -> bd.IntArray:
    """Splits each group into layers without shared rows: first fit, as few layers as can be.

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


def _fill_bounds(pieces, pass_of_piece, pass_tile, num_rows: int, block_m: int) -> Int32Array:
    num_passes = len(pass_tile)
    flat = np.zeros((num_passes * block_m, 2), dtype=np.int32)
    counts = pieces[:, bd.Q1] - pieces[:, bd.Q0]
    index, row = bd.expand(pieces[:, bd.Q0], counts)
    at = row + ((pass_of_piece - pass_tile[pass_of_piece]) * block_m)[index]
    flat[at, 0] = np.maximum(pieces[index, bd.K0], row + pieces[index, bd.D_LO])
    flat[at, 1] = np.minimum(pieces[index, bd.K1], row + pieces[index, bd.D_HI])
    bounds = flat.reshape(num_passes, block_m, 2)
    tail = num_rows % block_m
    if tail:
        bounds[pass_tile == num_rows // block_m, tail:] = (0, EVERYTHING)
    return bounds


def _describe_passes(pieces, pass_of_piece, bounds, num_passes: int, block_m: int, block_n: int) -> Int32Array:
    passes = np.zeros((num_passes, 8), dtype=np.int32)
    if not num_passes:
        return passes
    starts = np.searchsorted(pass_of_piece, np.arange(num_passes))
    begin = np.minimum.reduceat(pieces[:, bd.K0], starts) // block_n
    end = -(-np.maximum.reduceat(pieces[:, bd.K1], starts) // block_n)
    passes[:, 0], passes[:, 1] = begin, end
    halves = bounds.reshape(num_passes, block_m // SUB_ROWS, SUB_ROWS, 2)
    full_begin = -(-halves[..., 0].max(axis=2) // block_n)
    full_end = halves[..., 1].min(axis=2) // block_n
    full_begin = np.clip(full_begin, begin[:, None], end[:, None])
    full_end = np.clip(full_end, full_begin, end[:, None])
    for half in range(block_m // SUB_ROWS):
        passes[:, 2 + 2 * half], passes[:, 3 + 2 * half] = full_begin[:, half], full_end[:, half]
    passes[1:, 6] = np.cumsum(end - begin)[:-1]
    return passes
