"""Lists of keys, or of queries, as the sparse kernels read them: made and turned around on the device alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_magi.cuda.launch import Launch, prepared
from megatron_magi.ops.hopper.sparse_kernels import small_kernel
from megatron_magi.ops.hopper.sparse_params import SparseListsParams, SparseTiles
from megatron_magi.ops.hopper.support import current_stream
from megatron_magi.ops.sparse_pattern import SparsePattern, num_blocks

_LISTS_OF_BLOCK = 8  # of threads


@dataclass(frozen=True, eq=False)
class Lists:
    """Numbers of blocks or of tokens, int32.

    Attributes:
        entries: ``[lists, rows, width]`` with contiguous rows, or with offsets ``[n]``.
        counts: ``[lists, rows]``, how long each is; None: as long as the rows of ``entries``.
        offsets: ``[lists, rows + 1]``, or one after another.
    """

    entries: Tensor
    counts: Tensor | None = None
    offsets: Tensor | None = None

    def point(self, tiles: SparseTiles) -> None:
        """Sets the addresses of the lists."""
        tiles.entries, tiles.width = self.entries.data_ptr(), self.entries.shape[-1]
        tiles.offsets = 0 if self.offsets is None else self.offsets.data_ptr()
        tiles.counts = 0 if self.counts is None else self.counts.data_ptr()
        if self.offsets is None:
            tiles.head_step, tiles.list_step, _ = self.entries.stride()


def lists_of(pattern: SparsePattern) -> Lists:
    """The lists of a pattern."""
    if pattern.is_mask:
        return lists_of_mask(pattern.tensors[0])
    entries = pattern.tensors[-1]
    if entries.dtype != torch.int32:  # what is too large stays behind the last
        entries = entries.clamp(-1, torch.iinfo(torch.int32).max).to(torch.int32)
    if entries.stride(-1) != 1:
        entries = entries.contiguous()
    offsets = pattern.tensors[0].to(torch.int32).contiguous() if len(pattern.tensors) == 2 else None
    return Lists(entries, offsets=offsets)


def lists_of_mask(mask: Tensor) -> Lists:
    """Columns that are set in each row of a mask, bool ``[lists, rows, columns]`` of any strides, in rising order."""
    lists, rows, columns = mask.shape
    made = Lists(
        torch.empty((lists, rows, columns), dtype=torch.int32, device=mask.device),
        torch.empty((lists, rows), dtype=torch.int32, device=mask.device),
    )

    def make() -> Launch:
        head_stride, row_stride, column_stride = mask.stride()
        params = SparseListsParams(
            head_stride=head_stride, row_stride=row_stride, column_stride=column_stride,
            num_rows=rows, num_columns=columns, num_lists=lists * rows,
        )  # fmt: skip
        return Launch(small_kernel(mask.device, "sparse_lists"), num_blocks(lists * rows, _LISTS_OF_BLOCK), params)

    launch = prepared(("sparse_lists", mask.device, mask.shape, mask.stride()), make)
    with launch.lock:
        launch.params.mask = mask.data_ptr()
        launch.params.entries, launch.params.counts = made.entries.data_ptr(), made.counts.data_ptr()
        launch.fire(current_stream(mask.device))
    return made


def lists_of_queries(pattern: SparsePattern, num_rows: int, num_keys: int) -> Lists:
    """For each block of keys the blocks of queries that see it, in rising order, as often as they list it."""
    if pattern.is_mask:
        return lists_of_mask(pattern.tensors[0].transpose(1, 2))
    rows, columns = num_blocks(num_rows, pattern.q_block), num_blocks(num_keys, pattern.k_block)
    entries = pattern.tensors[-1].long()
    if len(pattern.tensors) == 2:
        # An entry lies in the list of the last offset that is not behind it; behind each head's last is none.
        offsets = pattern.tensors[0].long()
        at = torch.arange(entries.shape[0], device=entries.device).expand(offsets.shape[0], -1).contiguous()
        row = torch.searchsorted(offsets.contiguous(), at, right=True) - 1
        inside = (row >= 0) & (row < rows)
        entries = entries.expand_as(row)
    else:
        row = torch.arange(rows, device=entries.device)[:, None].expand(entries.shape[1:])
        row, entries = row.expand(entries.shape).flatten(1), entries.flatten(1)
        inside = torch.ones_like(entries, dtype=torch.bool)
    lists = entries.shape[0]
    head = torch.arange(lists, device=entries.device)[:, None]
    key = torch.where(inside & (entries >= 0) & (entries < columns), head * columns + entries, lists * columns)
    key, order = key.flatten().sort(stable=True)
    offsets = torch.searchsorted(key, torch.arange(lists * columns + 1, device=key.device))
    return Lists(row.flatten()[order].to(torch.int32), offsets=offsets.to(torch.int32))
