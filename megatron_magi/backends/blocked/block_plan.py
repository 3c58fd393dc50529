"""Plan of the blocked implementation for a table of bands: blocks of rows, their keys, and masks.

A *block* is a set of query rows that are computed together, against all keys that any of them
sees and no other key. Adjacent short documents share a block if that costs less
than another round of calls; long ones are cut. Only rows that see something are in a block, so
tokens in no visible pair are never read.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_magi.mask import bands as bd
from megatron_magi.runtime.lru import LruCache
from megatron_magi.runtime.upload import upload

Selection = slice | Tensor
"""Tokens of a block: a slice where they are contiguous, else an int64 index."""


@dataclass(frozen=True)
class BlockLimits:
    """Sizes that suit a device.

    Attributes:
        call_cost: cost of the calls for one more block, in logits.
        min_rows, max_rows: bounds of the height of a block.
        max_logits: logits that exist at once, all heads together.
    """

    call_cost: int
    min_rows: int
    max_rows: int
    max_logits: int

    def rows(self, num_heads_q: int) -> int:
        """Height of a block: a causal block wastes rows^2 / 2 logits a head, a cut costs calls."""
        best = math.isqrt(2 * self.call_cost // num_heads_q)
        return min(max(best, self.min_rows), self.max_rows)


MIN_CHUNK = 16
"""Fewest keys a chunk, however many rows and heads there are."""

LIMITS = {
    "cpu": BlockLimits(call_cost=50_000, min_rows=64, max_rows=512, max_logits=1 << 20),
    "cuda": BlockLimits(call_cost=8_000_000, min_rows=256, max_rows=2048, max_logits=1 << 26),
}


@dataclass(frozen=True, eq=False)
class ChunkMask:
    """Which pairs of a chunk are hidden, within its columns ``[first, last)``.

    ``start, stop``: int32 ``[num_rows, 1]``, the row sees ``start <= column < stop``; None where
    the bound hides nothing. Rows with several intervals have ``edges`` instead: flat positions
    in ``[num_rows, last - first + 1]`` where an interval starts, and where it stops.
    """

    first: int
    last: int
    start: Tensor | None = None
    stop: Tensor | None = None
    edges: tuple[Tensor, Tensor] | None = None

    def hidden(self, columns: Tensor, num_rows: int) -> Tensor:
        """bool ``[num_rows, last - first]``. ``columns``: int32, 0, 1, 2, ..."""
        columns = columns[self.first : self.last]
        if self.edges is not None:
            width = self.last - self.first
            steps = torch.zeros(num_rows * (width + 1), dtype=torch.int8, device=columns.device)
            steps.index_fill_(0, self.edges[0], 1).index_fill_(0, self.edges[1], -1)
            return steps.view(num_rows, width + 1)[:, :width].cumsum(1, dtype=torch.int8) == 0
        if self.start is None:
            return columns >= self.stop
        before = columns < self.start
        return before if self.stop is None else before.logical_or_(columns >= self.stop)


@dataclass(frozen=True, eq=False)
class KeyChunk:
    """Keys of a block that are computed at once; ``mask`` is None if every row sees them all."""

    keys: Selection
    num_keys: int
    mask: ChunkMask | None


@dataclass(frozen=True, eq=False)
class RowBlock:
    """Query rows that are computed together; every row sees a key in at least one chunk."""

    rows: Selection
    num_rows: int
    chunks: tuple[KeyChunk, ...]


@dataclass(frozen=True, eq=False)
class BlockPlan:
    """All blocks of a table of bands. ``columns``: int32 0, 1, 2, ... up to the widest chunk."""

    blocks: tuple[RowBlock, ...]
    columns: Tensor

    @property
    def num_bytes(self) -> int:
        """Memory of the plan's tensors and a rough size of its objects."""
        tensors: list = [self.columns]
        for block in self.blocks:
            tensors.append(block.rows)
            for chunk in block.chunks:
                tensors.append(chunk.keys)
                if chunk.mask is not None:
                    tensors += [chunk.mask.start, chunk.mask.stop, *(chunk.mask.edges or ())]
        return sum(t.numel() * t.element_size() for t in tensors if isinstance(t, Tensor)) + 256 * len(tensors)


_plans: LruCache[tuple, BlockPlan] = LruCache(max_bytes=128 << 20)


def block_plan(bands: np.ndarray, num_heads_q: int, device: torch.device) -> BlockPlan:
    """The plan for a table of bands, from a bounded cache: every layer asks for the same ones."""
    key = (np.ascontiguousarray(bands).tobytes(), num_heads_q, device)
    plan = _plans.get(key)
    if plan is None:
        plan = make_block_plan(bands, num_heads_q, device, LIMITS.get(device.type, LIMITS["cuda"]))
        _plans.put(key, plan, len(key[0]) + plan.num_bytes)
    return plan


def make_block_plan(bands: np.ndarray, num_heads_q: int, device: torch.device, limits: BlockLimits) -> BlockPlan:
    """Cuts and joins the rows of ``bands`` into blocks. Pure; see `block_plan` for the cache."""
    bands = bd.tighten(bands)
    bounds = _row_bounds(bands, limits.rows(num_heads_q))
    pieces, atom = bd.cut_rows(bands, bounds)
    if not len(pieces):
        return BlockPlan((), torch.zeros(0, dtype=torch.int32, device=device))
    order = np.argsort(atom, kind="stable")
    pieces, atom = pieces[order], atom[order]
    # Keys that the rows of the piece see: its rectangle, cut to its diagonals.
    pieces[:, bd.K0] = np.maximum(pieces[:, bd.K0], pieces[:, bd.Q0] + pieces[:, bd.D_LO])
    pieces[:, bd.K1] = np.minimum(pieces[:, bd.K1], pieces[:, bd.Q1] - 1 + pieces[:, bd.D_HI])
    atoms = _Atoms(bounds, pieces, atom)
    blocks = [
        _make_block(pieces[atoms.piece_range(first, last)], np.array(keys, np.int64), num_heads_q, limits)
        for first, last, keys in _join(atoms, num_heads_q, limits)
    ]
    widest = max(chunk.num_keys for block in blocks for chunk in block.chunks)
    return BlockPlan(_uploaded(blocks, device), torch.arange(widest, dtype=torch.int32, device=device))


def _row_bounds(bands: np.ndarray, height: int) -> np.ndarray:
    """Where rows are cut: at every start and end of a band, and evenly inside longer stretches."""
    marks = np.unique(bands[:, [bd.Q0, bd.Q1]])
    if len(marks) < 2:
        return marks
    length = np.diff(marks)
    parts = -(-length // height)
    index, part = bd.expand(np.zeros_like(parts), parts)
    inner = marks[index] + part * length[index] // parts[index]
    return np.append(inner, marks[-1])


class _Atoms:
    """Stretches of rows that are never cut, with the keys that they see."""

    def __init__(self, bounds: np.ndarray, pieces: np.ndarray, atom: np.ndarray) -> None:
        self.ids, self.first_piece = np.unique(atom, return_index=True)
        self.last_piece = np.append(self.first_piece[1:], len(pieces))
        self.num_rows = (bounds[self.ids + 1] - bounds[self.ids]).tolist()
        keys, group = bd.merge_ranges(pieces[:, [bd.K0, bd.K1]], atom)
        split = np.searchsorted(group, self.ids)
        ends = np.append(split[1:], len(keys)).tolist()
        table = keys.tolist()
        self.keys = [table[a:b] for a, b in zip(split.tolist(), ends, strict=True)]

    def piece_range(self, first: int, last: int) -> slice:
        """Pieces of the atoms ``[first, last)``."""
        return slice(int(self.first_piece[first]), int(self.last_piece[last - 1]))


def _join(atoms: _Atoms, num_heads_q: int, limits: BlockLimits) -> list[tuple[int, int, list]]:
    """Joins adjacent atoms while one block is cheaper than two: ``(first, last, keys)``."""
    free = limits.call_cost // num_heads_q
    height = limits.rows(num_heads_q)
    blocks = []
    first, rows, keys, width = 0, atoms.num_rows[0], atoms.keys[0], _width(atoms.keys[0])
    for i in range(1, len(atoms.ids)):
        more_rows, more_keys = atoms.num_rows[i], atoms.keys[i]
        more_width = _width(more_keys)
        if rows + more_rows <= height:
            union = _union(keys, more_keys)
            union_width = _width(union)
            if (rows + more_rows) * union_width <= rows * width + more_rows * more_width + free:
                rows, keys, width = rows + more_rows, union, union_width
                continue
        blocks.append((first, i, keys))
        first, rows, keys, width = i, more_rows, more_keys, more_width
    blocks.append((first, len(atoms.ids), keys))
    return blocks


def _width(ranges: list) -> int:
    return sum(b - a for a, b in ranges)


def _union(a: list, b: list) -> list:
    out: list = []
    for start, end in sorted(a + b):
        if out and start <= out[-1][1]:
            out[-1][1] = max(out[-1][1], end)
        else:
            out.append([start, end])
    return out


def _make_block(pieces: np.ndarray, key_ranges: np.ndarray, num_heads_q: int, limits: BlockLimits) -> RowBlock:
    """A block with numpy arrays instead of index tensors, see `_uploaded`."""
    row_ranges, _ = bd.merge_ranges(pieces[:, [bd.Q0, bd.Q1]])
    num_rows, num_keys = _total(row_ranges), _total(key_ranges)
    # What each row sees, in positions within the block: disjoint, non-touching, sorted by row.
    piece, row = bd.expand(pieces[:, bd.Q0], pieces[:, bd.Q1] - pieces[:, bd.Q0])
    lo, hi = bd.row_bounds(pieces[piece], row)
    seen = np.stack([_position(lo, key_ranges), _position(hi - 1, key_ranges) + 1], axis=1)
    seen, row = bd.merge_ranges(seen, _position(row, row_ranges))
    num_chunks = -(-num_keys // max(limits.max_logits // (num_rows * num_heads_q), MIN_CHUNK))
    cuts = [i * num_keys // num_chunks for i in range(num_chunks + 1)]
    keys = _tokens(key_ranges)
    chunks = []
    for first, last in pairwise(cuts):
        mask = _chunk_mask(np.clip(seen, first, last) - first, row, num_rows, last - first)
        chunks.append(KeyChunk(_selection(keys[first:last]), last - first, mask))
    return RowBlock(_selection(_tokens(row_ranges)), num_rows, tuple(chunks))


def _chunk_mask(seen: np.ndarray, row: np.ndarray, num_rows: int, num_keys: int) -> ChunkMask | None:
    some = seen[:, 0] < seen[:, 1]
    seen, row = seen[some], row[some]
    if len(row) and np.bincount(row).max() > 1:
        edges = (seen + (row * (num_keys + 1))[:, None]).T
        return ChunkMask(0, num_keys, edges=(edges[0], edges[1]))
    start, stop = np.full((2, num_rows, 1), num_keys, dtype=np.int32)
    start[row, 0], stop[row, 0] = seen[:, 0], seen[:, 1]
    # Columns in [all_start, all_stop) are seen by every row.
    all_start, all_stop = int(start.max()), int(stop.min())
    if all_start == 0 and all_stop == num_keys:
        return None
    if all_start == 0:
        return ChunkMask(all_stop, num_keys, stop=stop)
    if all_stop == num_keys:
        return ChunkMask(0, all_start, start=start)
    return ChunkMask(0, num_keys, start=start, stop=stop)


def _total(ranges: np.ndarray) -> int:
    return int((ranges[:, 1] - ranges[:, 0]).sum())


def _tokens(ranges: np.ndarray) -> np.ndarray:
    return bd.expand(ranges[:, 0], ranges[:, 1] - ranges[:, 0])[1]


def _position(token: np.ndarray, ranges: np.ndarray) -> np.ndarray:
    """Place of each token in the concatenation of sorted, disjoint ``ranges``, all of which hold it."""
    length = ranges[:, 1] - ranges[:, 0]
    offset = np.cumsum(length) - length - ranges[:, 0]
    return token + offset[np.searchsorted(ranges[:, 0], token, side="right") - 1]


def _selection(tokens: np.ndarray) -> slice | np.ndarray:
    first, last = int(tokens[0]), int(tokens[-1]) + 1
    return slice(first, last) if last - first == len(tokens) else tokens


def _uploaded(blocks: list[RowBlock], device: torch.device) -> tuple[RowBlock, ...]:
    """The blocks with tensors in place of arrays: one copy to the device, however many blocks."""
    arrays: list[np.ndarray] = []
    for block in blocks:
        _with_arrays(block, arrays.append)
    tensors = iter(upload(arrays, device))
    return tuple(_with_arrays(block, lambda _array: next(tensors)) for block in blocks)


def _with_arrays(block: RowBlock, change: Callable[[np.ndarray], Any]) -> RowBlock:
    """A block in which each array is what ``change`` makes of it, in an order that is always the same."""

    def changed(part: Any) -> Any:
        if isinstance(part, tuple):
            return tuple(changed(item) for item in part)
        return change(part) if isinstance(part, np.ndarray) else part

    chunks = []
    for chunk in block.chunks:
        mask = chunk.mask
        if mask is not None:
            mask = replace(mask, start=changed(mask.start), stop=changed(mask.stop), edges=changed(mask.edges))
        chunks.append(replace(chunk, keys=changed(chunk.keys), mask=mask))
    return replace(block, rows=changed(block.rows), chunks=tuple(chunks))
