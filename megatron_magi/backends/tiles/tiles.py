"""Tile plans: the description of a mask that the Hopper kernels read.

A kernel computes tiles of at most ``block_m`` rows. The mask of a tile is a list of *passes*; a pass is a
run of blocks of ``block_n`` columns and, for each row of the tile, one interval of columns that it sees.
Rows whose columns are close together share a pass, so many short documents in one tile cost one
block, not one each. A row with several intervals is in several passes (`passes.py`). Neither tiles nor
blocks are aligned: tiles start at document boundaries, and a pass starts at its first visible column.

The forward plan has queries as rows and keys as columns; the backward plan is the same function
of the transposed mask.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from megatron_magi.backends.tiles import costs as tile_costs
from megatron_magi.backends.tiles.passes import assign_passes
from megatron_magi.backends.tiles.tile_starts import tile_starts
from megatron_magi.mask import bands as bd

Int32Array = NDArray[np.int32]

EVERYTHING = 1 << 30
"""Past-the-last column of rows after the end of a tile, whose results are not used."""

GAP = 256
"""Gap in indices between own and fetched columns: more than a block, so that no block has both."""

UNIT = 16
"""Columns whose gradients a warp of a backward kernel adds together."""


@dataclass(frozen=True, eq=False)
class TilePlan:
    """Tiles of one mask, sorted by decreasing cost.

    Attributes:
        tiles: int32 ``[num_tiles, 4]``: first row, first pass, past-the-last pass, number of rows.
            Every row of the tensor is in one tile, also those that see nothing.
        passes: int32 ``[num_passes, 8]``: first column of the first block; number of blocks; for each part of
            the tile, the first and past-the-last block that all its rows see completely.
            Block i begins at column ``first + i * step``.
        bounds: int32 ``[num_passes, block_m, 2]``: first and past-the-last column of each row.
        costs: int64 ``[num_tiles]``: blocks of each tile.
        block_m, block_n: rows and columns of a block.
        step: ``block_n``, or ``-block_n`` where blocks are visited from the last column to the first.
    """

    tiles: Int32Array
    passes: Int32Array
    bounds: Int32Array
    costs: bd.IntArray
    block_m: int
    block_n: int
    step: int

    @property
    def num_blocks(self) -> int:
        """Computed blocks of all tiles."""
        return int(self.passes[:, 1].sum())


def plan_tiles(
    bands: bd.IntArray,
    num_rows: int,
    block_m: int,
    block_n: int,
    *,
    align: int = 1,
    hide_tail: bool = False,
    parts: int = 2,
    packed: int = 1,
) -> TilePlan:
    """Plans the tiles of a mask.

    Args:
        bands: int64 ``[n, 6]``, inside ``num_rows`` rows and `EVERYTHING` columns, more than a GPU holds; no two
            overlap.
        num_rows: rows of the mask.
        block_m: most rows of a tile.
        block_n: columns of a block.
        align: first columns of passes are multiples of it.
        hide_tail: rows after the end of a tile see nothing, for kernels in which they contribute to results of other
            rows; else they see everything, so that no block has to be masked because of them.
        parts: of a tile, up to three, one for each warpgroup, whose fully visible blocks are recorded separately. If
            there are fewer, the first ones are repeated.
        packed: heads of a block, which multiply its cost; see `pack_columns`.
    """
    assert bands[:, bd.K1].max(initial=0) <= EVERYTHING
    bands = _join_columns(bd.tighten(bands))
    starts = tile_starts(bands, num_rows, block_m, tile_costs.MASKED_COST if hide_tail else 0.0)
    pieces, tile = _pieces(bands, starts, num_rows)
    pass_cost = tile_costs.PASS_COST_BLOCKS * 128 / (block_n * packed)
    pieces, pass_of_piece, pass_tile = assign_passes(pieces, tile, block_n, align, pass_cost)
    tiles = np.zeros((len(starts), 4), dtype=np.int32)
    tiles[:, 0], tiles[:, 3] = starts, np.diff(starts, append=num_rows)
    tiles[:, 1] = np.searchsorted(pass_tile, np.arange(len(starts)), side="left")
    tiles[:, 2] = np.searchsorted(pass_tile, np.arange(len(starts)), side="right")
    bounds = _fill_bounds(pieces, pass_of_piece, pass_tile, tiles, block_m, 0 if hide_tail else EVERYTHING)
    passes = _describe_passes(
        pieces, pass_of_piece, tiles[pass_tile], block_m // parts, parts, block_n, align, hide_tail
    )
    blocks = np.bincount(pass_tile, passes[:, 1], minlength=len(starts)).astype(np.int64)
    cost = blocks + pass_cost * (1 + tiles[:, 2] - tiles[:, 1])
    order = np.argsort(-cost, kind="stable")
    return TilePlan(tiles[order], passes, bounds, blocks[order], block_m, block_n, block_n)


def descending(plan: TilePlan) -> TilePlan:
    """Reverses the order of the passes of each tile, and of the blocks of each pass."""
    first, past = plan.tiles[:, 1].astype(np.int64), plan.tiles[:, 2].astype(np.int64)
    tile, passes = bd.expand(first, past - first)
    order = np.empty(len(plan.passes), dtype=np.int64)
    order[passes] = (first + past - 1)[tile] - passes
    out = plan.passes[order]
    count = out[:, 1].copy()
    out[:, 0] += (count - 1) * plan.block_n
    for part in (2, 4, 6):
        out[:, part], out[:, part + 1] = count - plan.passes[order, part + 1], count - plan.passes[order, part]
    return replace(plan, passes=out, bounds=np.ascontiguousarray(plan.bounds[order]), step=-plan.block_n)


def local_first(plan: TilePlan, first: int, num_arriving: int, late: int, lead: int) -> TilePlan:
    """Moves tiles that do not have to wait for fetched columns to the front.

    Columns arrive in ascending order and a tile visits its passes in order, so passes over own columns come first.

    Args:
        plan: by decreasing cost.
        first: first fetched column.
        num_arriving: number of fetched columns.
        late: blocks that an SM computes until all have arrived.
        lead: blocks that all SMs together compute in this time.
    """
    needs = _first_needed(plan, first, num_arriving, late)
    by_need = np.argsort(needs, kind="stable")
    by_need = by_need[plan.costs[by_need] > 0].tolist()
    front: list[int] = []
    there: list[int] = []  # tiles whose columns have arrived, the longest, with the lowest index, first
    done, at = 0, 0
    while done < lead and at < len(by_need):  # at the end the rest of them are in their order already
        while at < len(by_need) and needs[by_need[at]] * lead <= done * late:
            heapq.heappush(there, by_need[at])
            at += 1
        if not there:
            there.append(by_need[at])
            at += 1
        front.append(heapq.heappop(there))
        done += int(plan.costs[front[-1]])
    order = np.append(front, np.delete(np.arange(len(plan.costs)), front)).astype(np.int64)
    return replace(plan, tiles=plan.tiles[order], costs=plan.costs[order])


def _first_needed(plan: TilePlan, first: int, num_arriving: int, late: int) -> np.ndarray:
    """Earliest start of each tile without waiting, in blocks of an SM, float64 ``[num_tiles]``."""
    begin, past = plan.tiles[:, 1].astype(np.int64), plan.tiles[:, 2].astype(np.int64)
    tile, index = bd.expand(begin, past - begin)
    column, blocks = (plan.passes[index, i].astype(np.int64) for i in (0, 1))
    before = np.append(0, np.cumsum(plan.passes[:, 1], dtype=np.int64))
    before = before[index] - before[begin[tile]]
    ends = np.stack([np.minimum(blocks, 1), blocks])  # its first block, and all
    arrived = (column + ends * plan.block_n - first).clip(0, num_arriving) * (late / max(num_arriving, 1))
    needs = np.zeros(len(begin))
    np.maximum.at(needs, tile, np.where(column >= first, arrived - (before + ends - 1), 0.0).max(axis=0))
    return needs


def side_by_side(own: TilePlan, arriving: TilePlan, first: int) -> TilePlan:
    """Tiles of two plans by decreasing cost; rows of the second have indices from ``first`` on."""
    more = arriving.tiles + np.array([first, len(own.passes), len(own.passes), 0], dtype=np.int32)
    tiles, costs = np.concatenate([own.tiles, more]), np.concatenate([own.costs, arriving.costs])
    order = np.argsort(-costs, kind="stable")
    return replace(
        own,
        tiles=tiles[order],
        costs=costs[order],
        passes=np.concatenate([own.passes, arriving.passes]),
        bounds=np.concatenate([own.bounds, arriving.bounds]),
    )


def pack_columns(plan: TilePlan, packed: int) -> TilePlan:
    """The plan of the mask with each column repeated ``packed`` times."""
    passes = plan.passes.copy()
    passes[:, 0] *= packed
    sizes = {"block_n": plan.block_n * packed, "step": plan.step * packed}
    return replace(plan, passes=passes, bounds=plan.bounds * packed, **sizes)


def drift(plan: TilePlan) -> tuple[float, float]:
    """Distance in columns of starts, and of ends, of adjacent tiles: medians over tiles with columns in common."""
    tiles = plan.tiles[np.argsort(plan.tiles[:, 0])]
    tiles = tiles[tiles[:, 1] < tiles[:, 2]]
    first = plan.passes[tiles[:, 1], 0]
    last_pass = tiles[:, 2] - 1
    last = plan.passes[last_pass, 0] + plan.passes[last_pass, 1] * plan.block_n
    common = (first[1:] < last[:-1]) & (first[:-1] < last[1:])
    if not common.any():
        return 0.0, 0.0
    return tuple(float(np.median(np.abs(np.diff(x))[common])) for x in (first, last))


def _pieces(bands: bd.IntArray, starts: bd.IntArray, num_rows: int) -> tuple[bd.IntArray, bd.IntArray]:
    """Bands cut at tile boundaries, made tight, and their tiles."""
    pieces, tile = bd.cut_rows(bands, np.append(starts, num_rows))
    pieces, index = bd.tighten_with_index(pieces)
    return pieces, tile[index]


def _join_columns(bands: bd.IntArray) -> bd.IntArray:
    """Joins rectangles of the same rows with adjacent columns, for fewer intervals a row."""
    if len(bands) < 2:
        return bands
    order = np.lexsort((bands[:, bd.K0], bands[:, bd.Q1], bands[:, bd.Q0]))
    b = bands[order]
    same = (b[1:, bd.Q0] == b[:-1, bd.Q0]) & (b[1:, bd.Q1] == b[:-1, bd.Q1]) & (b[1:, bd.K0] == b[:-1, bd.K1])
    # The boundary between two pieces is vertical: the left one has no diagonal on the right, and vice versa.
    joins = same & (b[:-1, bd.D_HI] == bd.NO_DIAGONAL) & (b[1:, bd.D_LO] == -bd.NO_DIAGONAL)
    if not joins.any():
        return bands
    first = np.flatnonzero(np.append(True, ~joins))
    last = np.append(first[1:], len(b)) - 1
    out = b[first]
    out[:, bd.K1] = b[last, bd.K1]
    out[:, bd.D_HI] = b[last, bd.D_HI]
    return out


def _fill_bounds(
    pieces: bd.IntArray, pass_of_piece: bd.IntArray, pass_tile: bd.IntArray, tiles: Int32Array, block_m: int, past: int
) -> Int32Array:
    """First and past-the-last columns of the rows of each pass, int32 ``[num_passes, block_m, 2]``.

    Args:
        pieces: int64 ``[n, 6]``, sorted by (pass, first row).
        pass_of_piece, pass_tile: int64 ``[n]`` and ``[num_passes]``.
        tiles: int32 ``[num_tiles, 4]``, see `TilePlan`.
        past: past-the-last column of rows after the end of a tile.
    """
    num_passes = len(pass_tile)
    origin = pass_of_piece * block_m - tiles[pass_tile[pass_of_piece], 0]  # from rows to rows of the flat result
    begin, end = pieces[:, bd.Q0] + origin, pieces[:, bd.Q1] + origin
    # The flat result is runs of equal rows: for each piece the rows before it and its own; after the last piece of
    # a pass the rows up to the end of the tile and those after it.
    own = np.arange(len(pieces)) + pass_of_piece
    behind = np.searchsorted(pass_of_piece, np.arange(num_passes), side="right") + np.arange(num_passes)
    stop = np.zeros((len(pieces) + num_passes, 2), dtype=np.int64)
    stop[own, 0], stop[own, 1] = begin, end
    stop[behind, 1] = np.arange(1, num_passes + 1) * block_m
    stop[behind, 0] = stop[behind, 1] - block_m + tiles[pass_tile, 3]
    values = np.zeros((len(stop), 2, 2), dtype=np.int32)
    values[own, 1], values[behind, 1, 1] = pieces[:, [bd.K0, bd.K1]], past
    counts = np.diff(stop.reshape(-1), prepend=0)
    flat = np.repeat(values.view(np.int64).reshape(-1), counts).view(np.int32).reshape(-1, 2)  # a pair as one number
    # The boundary is a diagonal over the rows; without one, a line so far away that it cuts nothing.
    for side, diagonal, none in ((0, bd.D_LO, -EVERYTHING), (1, bd.D_HI, EVERYTHING)):
        crosses = np.abs(pieces[:, diagonal]) != bd.NO_DIAGONAL
        if crosses.any():
            shift = np.full(len(counts), none, dtype=np.int32)
            shift[2 * own + 1] = np.where(crosses, pieces[:, diagonal] - origin, none)
            line = np.repeat(shift, counts)
            line += np.arange(len(line), dtype=np.int32)
            (np.minimum if side else np.maximum)(flat[:, side], line, out=flat[:, side])
    return flat.reshape(num_passes, block_m, 2)


def _describe_passes(
    pieces, pass_of_piece, tiles, part_rows: int, parts: int, block_n: int, align: int, hide_tail: bool
) -> Int32Array:
    """`TilePlan.passes`; ``tiles``: the tile of each pass, int32 ``[num_passes, 4]``."""
    num_passes = len(tiles)
    passes = np.zeros((num_passes, 8), dtype=np.int32)
    if not num_passes:
        return passes
    starts = np.searchsorted(pass_of_piece, np.arange(num_passes))
    first = np.minimum.reduceat(pieces[:, bd.K0], starts) // align * align
    count = -((first - np.maximum.reduceat(pieces[:, bd.K1], starts)) // block_n)
    passes[:, 0], passes[:, 1] = first, count
    seen = []
    for row0 in range(0, parts * part_rows, part_rows):
        rows = np.full(num_passes, part_rows) if hide_tail else np.clip(tiles[:, 3] - row0, 0, part_rows)
        seen.append(_seen_by_rows(pieces, pass_of_piece, starts, tiles[:, 0] + row0, rows))
    for part in range(3):
        begin, end = seen[part % parts]
        full_begin = np.clip(-((first - begin) // block_n), 0, count)
        passes[:, 2 + 2 * part] = full_begin
        passes[:, 3 + 2 * part] = np.clip((end - first) // block_n, full_begin, count)
    return passes


def _seen_by_rows(pieces, pass_of_piece, starts, row0, rows) -> tuple[bd.IntArray, bd.IntArray]:
    """First and past-the-last column that all rows ``row0`` to ``row0 + rows`` see, for each pass."""
    first = np.maximum(pieces[:, bd.Q0], row0[pass_of_piece])
    past = np.minimum(pieces[:, bd.Q1], (row0 + rows)[pass_of_piece])
    none = first >= past
    begin = np.maximum(pieces[:, bd.K0], past - 1 + pieces[:, bd.D_LO])
    end = np.minimum(pieces[:, bd.K1], first + pieces[:, bd.D_HI])
    begin[none], end[none] = 0, EVERYTHING
    begin, end = np.maximum.reduceat(begin, starts), np.minimum.reduceat(end, starts)
    end[np.add.reduceat(np.where(none, 0, past - first), starts) < rows] = 0  # some see nothing
    return begin, end
