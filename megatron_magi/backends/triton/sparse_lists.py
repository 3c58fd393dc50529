"""Lists of keys, or of queries, for the kernels of attention over lists: made and turned around on the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_magi.backends.triton.attention import sparse_kernels
from megatron_magi.operands.sparse_pattern import SparsePattern, num_blocks, sorted_into

_MOST_COLUMNS = 1024  # of a mask that a program looks at together
_INT32 = torch.iinfo(torch.int32)


@dataclass(frozen=True, eq=False)
class Lists:
    """Lists of numbers of blocks or of tokens.

    Attributes:
        entries: int32 ``[n]``, one list after another.
        spans: int64 ``[lists, rows, 2]``, begin and end of each in ``entries``; empty where the end is not behind it.
    """

    entries: Tensor
    spans: Tensor


def lists_of(pattern: SparsePattern) -> Lists:
    """The lists of a pattern; entries that are no numbers of blocks are still among them."""
    if pattern.is_mask:
        return _lists_of_mask(pattern.tensors[0])
    entries = pattern.tensors[-1]
    if entries.dtype != torch.int32:  # clamped, so that invalid entries stay invalid
        entries = entries.clamp(-1, _INT32.max).to(torch.int32)
    if len(pattern.tensors) == 2:
        offsets = pattern.tensors[0].long().clamp(0, entries.shape[0])
        return Lists(entries.contiguous(), torch.stack([offsets[:, :-1], offsets[:, 1:]], 2))
    lists, rows, width = entries.shape
    begin = torch.arange(lists * rows, device=entries.device).view(lists, rows) * width
    return Lists(entries.reshape(-1), torch.stack([begin, begin + width], 2))


def _lists_of_mask(mask: Tensor) -> Lists:
    """Columns that are set in each row of a mask, bool ``[lists, rows, columns]`` of any strides, ascending."""
    lists, rows, columns = mask.shape
    entries = torch.empty(mask.numel(), dtype=torch.int32, device=mask.device)
    counts = torch.zeros((lists, rows), dtype=torch.int32, device=mask.device)
    if mask.numel():
        width = min(_MOST_COLUMNS, 1 << (columns - 1).bit_length())
        sparse_kernels().lists_of_mask_kernel[(lists * rows,)](
            mask.view(torch.int8), entries, counts, rows, columns, *mask.stride(), COLUMNS=width
        )
    begin = torch.arange(lists * rows, device=mask.device).view(lists, rows) * columns
    return Lists(entries, torch.stack([begin, begin + counts], 2))


def lists_of_queries(pattern: SparsePattern, lists: Lists, num_rows: int, num_keys: int) -> Lists:
    """For each block of keys the blocks of queries that see it, ascending, as often as these name it.

    ``lists``: `lists_of` the pattern.
    """
    if pattern.is_mask:
        return _lists_of_mask(pattern.tensors[0].transpose(1, 2))
    rows, columns = num_blocks(num_rows, pattern.q_block), num_blocks(num_keys, pattern.k_block)
    number, device = pattern.num_lists, lists.entries.device
    if len(pattern.tensors) == 1:
        named = lists.entries.view(number, rows, -1)
        row = torch.arange(rows, dtype=torch.int32, device=device)[:, None].expand_as(named)
        is_named = torch.ones_like(named, dtype=torch.bool)
    else:  # lists of several key heads may share entries
        ends = lists.spans[..., 1].contiguous()
        at = torch.arange(lists.entries.shape[0], device=device).expand(number, -1).contiguous()
        found = torch.searchsorted(ends, at, right=True)
        row = found.clamp(max=max(rows - 1, 0)).to(torch.int32)
        is_named = (found < rows) & (at >= lists.spans[:, :1, 0])
        named = lists.entries.expand(number, -1)
    is_named = is_named & (named >= 0) & (named < columns)
    first = torch.arange(number, device=device).view(-1, *[1] * (named.ndim - 1)) * columns
    order, bounds = sorted_into(torch.where(is_named, named + first, number * columns), number * columns)
    spans = torch.stack([bounds[:-1], bounds[1:]], 1).view(number, columns, 2)
    return Lists(row.flatten()[order], spans)
