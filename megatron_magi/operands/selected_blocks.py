"""Lists of blocks over a sequence, renumbered to a buffer that holds the listed blocks alone.

The buffer has *slots* of a block each: first those of any listed blocks, as many as may come, then *areas* of blocks
whose places are known on the host. With causality the areas are the blocks of a rank's own tokens, in their order, so
that for each run of consecutive queries a beginning of the buffer ends with the run itself, and all that comes before
is visible: kernels hide keys by their distance from the end. Else there is one area, the last block, which may be
short.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron_magi.operands.sparse_pattern import SparsePattern, num_blocks
from megatron_magi.runtime.upload import upload

_ENTRIES_AT_A_TIME = 1 << 24
"""Of lists whose numbers are looked up, to bound what they take in memory."""


class Run(NamedTuple):
    """Consecutive tokens of a shard: its rows from ``row`` on are the tokens ``start`` to ``end`` of the sequence."""

    row: int
    start: int
    end: int


def listed(pattern: SparsePattern, num_keys: int, ends: Tensor | None = None) -> Tensor:
    """Which blocks of keys any list names, bool ``[lists, num_k_blocks]``; of CSR for all key heads together, ``[1,
    num_k_blocks]``.

    Args:
        pattern: checked; numbers that are no blocks are passed over.
        num_keys: tokens of the sequence.
        ends: blocks of keys up to which a block of queries sees, int64 ``[num_q_blocks]``; all when None.
    """
    columns = num_blocks(num_keys, pattern.k_block)
    first, entries = pattern.tensors[0], pattern.tensors[-1]
    if pattern.is_mask:
        if ends is not None:
            first = first & (torch.arange(columns, device=first.device) < ends[:, None])
        return first.any(dim=1)
    if len(pattern.tensors) == 2:
        row = _rows_of_entries(*pattern.tensors)
        inside = (row >= 0) & (row < first.shape[1] - 1)
        limit = columns if ends is None else torch.nn.functional.pad(ends, (0, 1))[row]
        inside &= (entries >= 0) & (entries < limit)
        return _named(entries.where(inside, columns), columns).any(dim=0, keepdim=True)
    found = torch.zeros((entries.shape[0], columns), dtype=torch.bool, device=entries.device)
    step = max(1, _ENTRIES_AT_A_TIME // max(1, entries.shape[0] * entries.shape[2]))
    for start in range(0, entries.shape[1], step):
        part = entries[:, start : start + step]
        limit = columns if ends is None else ends[start : start + step, None]
        part = part.where((part >= 0) & (part < limit), columns)
        found |= _named(part.flatten(1), columns)
    return found


def _named(numbers: Tensor, columns: int) -> Tensor:
    """Which of ``columns`` numbers occur in each row; ``columns`` itself is passed over."""
    found = torch.zeros((numbers.shape[0], columns + 1), dtype=torch.bool, device=numbers.device)
    return found.scatter_(1, numbers.long(), True)[:, :columns]


def _rows_of_entries(offsets: Tensor, entries: Tensor) -> Tensor:
    """In CSR, of each list of key heads the row that an entry belongs to, int64 ``[lists, n]``; outside of 0 to
    num_q_blocks - 1 where it belongs to none. There is one row more than numbers of rows.
    """
    at = torch.arange(entries.shape[0], device=entries.device).expand(offsets.shape[0], -1).contiguous()
    return torch.searchsorted(offsets.long().contiguous(), at, right=True) - 1


def renumbered(entries: Tensor, table: Tensor) -> Tensor:
    """Entries of lists by a table, int32; what is no number of the table becomes -1.

    Args:
        entries: int, ``[lists, ...]``; or ``[n]`` with a table of one list.
        table: new numbers, int ``[lists, n]``, -1 for none.
    """
    lists, columns = table.shape
    flat = torch.nn.functional.pad(table.to(torch.int32), (0, 1), value=-1).flatten()
    at = entries.where((entries >= 0) & (entries < columns), columns)
    if lists > 1:
        first = torch.arange(lists, device=at.device, dtype=at.dtype) * (columns + 1)
        at = at + first.view(-1, *[1] * (at.dim() - 1))
    return flat.index_select(0, at.flatten()).view(entries.shape)


@dataclass(frozen=True, eq=False)
class BlockTables:
    """What is known on the host of the buffers for lists of blocks of a rank; see the module.

    Attributes:
        num_keys: tokens of the sequence.
        runs: of the rank's queries; one for all without causality.
        areas: tokens of each area, in ascending order; an area begins with a block, and the next one at another.
        q_block, k_block: tokens of a block.
        causal: see the module.
        parts: of each other rank, how many blocks it has tokens of, and the fewest that it has of such a block; the
            last block of the sequence left out.
        num_own: blocks outside the areas that this rank has tokens of.
        area_slot: of each block its slot, counted over the areas; -1 outside of them. int64 ``[num_k_blocks]``
        area_block: block of each slot of the areas, int64.
        ends: of each block of queries, blocks of keys up to the run's end, int64 ``[num_q_blocks]``.
    """

    num_keys: int
    runs: tuple[Run, ...]
    areas: tuple[tuple[int, int], ...]
    q_block: int
    k_block: int
    causal: bool
    parts: tuple[tuple[int, int], ...]
    num_own: int
    area_slot: Tensor
    area_block: Tensor
    ends: Tensor

    @classmethod
    def build(
        cls,
        global_index: Sequence[np.ndarray],
        rank: int,
        runs: Sequence[Run],
        num_keys: int,
        blocks: tuple[int, int],
        causal: bool,
        device: torch.device | str,
    ) -> BlockTables:
        """Copies the tables to ``device``.

        Args:
            global_index: for each rank the token of each row, int64 ``[num_rows]``, padding included.
            rank: this rank.
            runs: its tokens, in the order of its rows.
            num_keys: tokens of the sequence, at least 1.
            blocks: tokens of a block of queries and of keys.
            causal: whether queries see keys up to their own position only.
            device: where keys live.
        """
        q_block, k_block = blocks
        columns, rows = num_blocks(num_keys, k_block), sum(run.end - run.start for run in runs)
        areas = _areas(runs, k_block) if causal else [((columns - 1) * k_block, num_keys)]
        slot = np.full(columns, -1, np.int64)
        area_block = [np.arange(start // k_block, num_blocks(end, k_block)) for start, end in areas]
        area_block = np.concatenate([*area_block, np.empty(0, np.int64)])
        slot[area_block] = np.arange(len(area_block))
        parts, num_own = [], 0
        for owner, index in enumerate(global_index):
            found, counts = np.unique(index[index < num_keys] // k_block, return_counts=True)
            counts = counts[found < columns - 1]
            if owner == rank:
                num_own = int((slot[found] < 0).sum())
            else:
                parts.append((len(counts), int(counts.min(initial=k_block))))
        ends = [np.full(num_blocks(end - start, q_block), num_blocks(end, k_block)) for _, start, end in runs]
        ends = np.concatenate(ends).astype(np.int64)
        tables = upload([slot, area_block, ends], device)
        runs = tuple(runs) if causal else (Run(0, num_keys - rows, num_keys),)
        return cls(num_keys, runs, tuple(areas), q_block, k_block, causal, tuple(parts), num_own, *tables)

    def num_slots(self, capacity: int, most_listed: int) -> int:
        """Slots before the areas: as many as blocks can be listed, if no other rank sends more than ``capacity`` rows.

        Args:
            capacity: rows from each other rank.
            most_listed: entries of all lists of a key head.
        """
        others = sum(min(count, capacity // least) for count, least in self.parts)
        outside = len(self.area_slot) - len(self.area_block)
        return max(1, min(outside, self.num_own + others, most_listed))  # a buffer has rows


def _areas(runs: Sequence[Run], k_block: int) -> list[tuple[int, int]]:
    """Tokens of whole blocks up to the ends of runs, ascending; those that share a block are one."""
    areas: list[tuple[int, int]] = []
    for _, start, end in sorted((run for run in runs if run.end > run.start), key=lambda run: run.start):
        if areas and start < num_blocks(areas[-1][1], k_block) * k_block:
            areas[-1] = areas[-1][0], end
        else:
            areas.append((start // k_block * k_block, end))
    return areas


class BlockCall(NamedTuple):
    """One call of `block_sparse_attention` over a part of the buffer.

    Attributes:
        rows: of the rank's queries.
        num_keys: rows of the buffer, from its beginning.
        blocks: its ``blocks``.
    """

    rows: slice
    num_keys: int
    blocks: Tensor | tuple[Tensor, Tensor]


class PackedBlocks(NamedTuple):
    """Where the listed blocks are in a buffer.

    Attributes:
        tables: what is known on the host.
        num_slots: slots before the areas.
        slot: of each block, int64 ``[lists, num_k_blocks]``; -1 where no list names it and it is in no area.
        block: of each slot, int64 ``[lists, slots]``; any one where a slot is free.
        is_taken: of each slot, bool likewise.
    """

    tables: BlockTables
    num_slots: int
    slot: Tensor
    block: Tensor
    is_taken: Tensor

    @classmethod
    def of(cls, chosen: Tensor, tables: BlockTables, num_slots: int) -> PackedBlocks:
        """Gives slots to the blocks that are listed, bool ``[lists, num_k_blocks]``, in ascending order."""
        lists, columns = chosen.shape
        device, is_free = chosen.device, chosen & (tables.area_slot < 0)
        number = is_free.cumsum(1)
        place = (number - 1).clamp(max=num_slots - 1)  # there are no more, unless rows of keys did not fit either
        slot = place.masked_fill(~is_free, -1).maximum(
            torch.where(tables.area_slot < 0, -1, tables.area_slot + num_slots)
        )
        order = torch.zeros((lists, num_slots + 1), dtype=torch.int64, device=device)
        to = (number - 1).masked_fill(~is_free | (number > num_slots), num_slots)
        order.scatter_(1, to, torch.arange(columns, device=device).expand(lists, -1))
        block = torch.cat([order[:, :num_slots], tables.area_block.expand(lists, -1)], 1)
        at = torch.arange(block.shape[1], device=device)
        return cls(tables, num_slots, slot, block, (at < number[:, -1:]) | (at >= num_slots))

    def from_source(self, source: Tensor) -> Tensor:
        """Row of the source of each row of the buffer, int64 ``[lists, rows]``; any one where it holds no key.

        Args:
            source: row of each token, ``[lists, num_keys]``; -1 for none.
        """
        k_block = self.tables.k_block
        tokens = self.block[..., None] * k_block + torch.arange(k_block, device=source.device)
        return source.gather(1, tokens.flatten(1).clamp_(max=source.shape[1] - 1)).clamp_(min=0)

    def to_source(self, tokens: Tensor) -> Tensor:
        """Row of the buffer of each row of the source, int64 ``[lists, rows]``; -1 where it is in none.

        Args:
            tokens: of each row of the source, ``[lists, rows]``; the number of tokens where there is none.
        """
        k_block, num_keys = self.tables.k_block, self.tables.num_keys
        slot = self.slot.gather(1, (tokens // k_block).clamp(max=self.slot.shape[1] - 1))
        return (slot * k_block + tokens % k_block).masked_fill((slot < 0) | (tokens >= num_keys), -1)

    def parts(self, pattern: SparsePattern) -> list[BlockCall]:
        """The lists of each run, renumbered."""
        tables, found = self.tables, []
        q_block, k_block = tables.q_block, tables.k_block
        for row, start, end in tables.runs:
            rows = slice(row // q_block, num_blocks(row + end - start, q_block))
            num_keys, first = 0, self.num_slots
            for area_start, area_end in tables.areas:
                if area_start < end and start < area_end:
                    num_keys = first * k_block + end - area_start
                first += num_blocks(area_end - area_start, k_block)
            if not tables.causal:  # all queries, and with them the last block
                rows, num_keys = slice(0, None), self.num_slots * k_block + tables.num_keys - tables.areas[0][0]
            blocks = self._lists(pattern, rows, num_blocks(num_keys, k_block), num_blocks(end, k_block))
            found.append(BlockCall(slice(row, row + end - start), num_keys, blocks))
        return found

    def _lists(self, pattern: SparsePattern, rows: slice, num_slots: int, end: int) -> Tensor | tuple[Tensor, Tensor]:
        """Those of some blocks of queries, over the first slots, without blocks of keys from ``end`` on."""
        if pattern.is_mask:
            mask, block = pattern.tensors[0][:, rows], self.block[:, :num_slots]
            seen = mask.gather(2, block[:, None].expand(-1, mask.shape[1], -1))
            return seen & (self.is_taken[:, :num_slots] & (block < end))[:, None]
        is_early = torch.arange(self.slot.shape[1], device=self.slot.device) < end
        table = self.slot.masked_fill(~is_early, -1)
        if len(pattern.tensors) == 2:
            offsets = pattern.tensors[0]
            last = None if rows.stop is None else rows.stop + 1
            return offsets[:, rows.start : last], renumbered(pattern.tensors[1], table)
        return renumbered(pattern.tensors[0][:, rows], table)


class _Gathered(torch.autograd.Function):
    """Rows of a source in another order. Of the rows that read the same one, at most one has a gradient."""

    @staticmethod
    def forward(ctx: Any, source: Tensor, rows: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return _rows(source, rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (back,) = ctx.saved_tensors
        found = _rows(grad.contiguous(), back.clamp(min=0)).unflatten(1, (back.shape[0], -1))
        return found.masked_fill_(back.t()[..., None, None] < 0, 0).flatten(1, 2), None, None


def _rows(source: Tensor, rows: Tensor) -> Tensor:
    """``rows[list]`` of the heads of each list, ``[rows, num_heads, dim]``."""
    lists, num_rows = rows.shape
    at = rows.t() * lists + torch.arange(lists, device=rows.device)
    found = source.reshape(source.shape[0] * lists, -1).index_select(0, at.flatten())
    return found.view(num_rows, *source.shape[1:])


def packed_rows(source: Tensor, packed: PackedBlocks, places: Tensor, tokens: Tensor) -> Tensor:
    """The buffer of keys; differentiable, without sums.

    Args:
        source: rows of keys, ``[num_rows, num_heads, dim]``; the number of lists is 1 or num_heads.
        packed: where blocks are.
        places: row of each token in the source, ``[lists, num_keys]``; -1 for none.
        tokens: of each row of the source, ``[lists, num_rows]``; the number of tokens for none.
    """
    return _Gathered.apply(source, packed.from_source(places), packed.to_source(tokens))
