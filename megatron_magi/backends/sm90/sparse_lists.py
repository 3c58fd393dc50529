"""Lists of keys, or of queries, for the sparse kernels: made and transposed on the device."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from megatron_magi.backends.sm90.kernels import params as params_of
from megatron_magi.backends.sm90.sparse_kernels import small_kernel
from megatron_magi.backends.sm90.support import launch_counter
from megatron_magi.cuda.launch import Launch, prepared
from megatron_magi.cuda.streams import current_stream
from megatron_magi.operands.sparse_pattern import SparsePattern, num_blocks

_LISTS_OF_BLOCK = 8  # of threads
_CHUNKS = 264  # of all lists, at most, but one a list: two for each SM
_COLUMNS_OF_BLOCK, _SLICES, _MOST_CHUNKS_OF_SLICE = 8, 32, 17  # as in sparse_transpose.cu


@dataclass(frozen=True, eq=False)
class Lists:
    """Lists of indices of blocks or of tokens, int32.

    Attributes:
        entries: ``[lists, rows, width]`` with contiguous rows, or with offsets ``[n]``.
        counts: ``[lists, rows]``, length of each; None: the width of ``entries``.
        offsets: ``[lists, rows + 1]``, or one after another.
    """

    entries: Tensor
    counts: Tensor | None = None
    offsets: Tensor | None = None

    def point(self, tiles: ctypes.Structure, counter: Tensor) -> None:
        """Sets the addresses of the lists, and of the counter of the persistent scheduler."""
        tiles.counter = counter.data_ptr()
        tiles.entries = self.entries.data_ptr()
        tiles.width = tiles.num_entries = self.entries.shape[-1]
        tiles.offsets = 0 if self.offsets is None else self.offsets.data_ptr()
        tiles.counts = 0 if self.counts is None else self.counts.data_ptr()
        if self.offsets is None:
            tiles.head_step, tiles.list_step, _ = self.entries.stride()


def lists_of(pattern: SparsePattern) -> Lists:
    """The lists of a pattern.

    Raises:
        ValueError: offsets would not fit into 32 bits.
    """
    if pattern.is_mask:
        return lists_of_mask(pattern.tensors[0])
    entries = pattern.tensors[-1]
    if entries.ndim == 1:
        _check_count(entries.shape[0])
    if entries.dtype != torch.int32:  # clamped, so that invalid entries stay invalid
        entries = entries.clamp(-1, torch.iinfo(torch.int32).max).to(torch.int32)
    if entries.stride(-1) != 1:
        entries = entries.contiguous()
    offsets = pattern.tensors[0].to(torch.int32).contiguous() if len(pattern.tensors) == 2 else None
    return Lists(entries, offsets=offsets)


def _check_count(num_entries: int) -> None:
    if num_entries > torch.iinfo(torch.int32).max:
        raise ValueError(f"blocks: kernels take fewer than 2^31 numbers of blocks, got {num_entries}; give a mask")


def lists_of_mask(mask: Tensor) -> Lists:
    """Columns that are set in each row of a mask, bool ``[lists, rows, columns]`` of any strides, ascending."""
    lists, rows, columns = mask.shape
    made = Lists(
        torch.empty((lists, rows, columns), dtype=torch.int32, device=mask.device),
        torch.empty((lists, rows), dtype=torch.int32, device=mask.device),
    )

    def make() -> Launch:
        head_stride, row_stride, column_stride = mask.stride()
        params = params_of("sparse_lists")(
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


def lists_of_queries(pattern: SparsePattern, lists: Lists | None, num_rows: int, num_keys: int) -> Lists:
    """For each block of keys the blocks of queries that see it, ascending, with multiplicity.

    ``lists``: `lists_of` the pattern; None for a mask.

    Raises:
        ValueError: places in the lists would not fit into 32 bits.
    """
    if lists is None or pattern.is_mask:
        return lists_of_mask(pattern.tensors[0].transpose(1, 2))
    rows, columns = num_blocks(num_rows, pattern.q_block), num_blocks(num_keys, pattern.k_block)
    num_lists, entries, offsets = pattern.num_lists, lists.entries, lists.offsets
    device, stream = entries.device, current_stream(entries.device)
    counter = launch_counter(device, stream)
    chunk_rows = num_blocks(num_lists * rows, _CHUNKS)
    chunks = num_blocks(rows, chunk_rows)
    assert chunks <= _SLICES * _MOST_CHUNKS_OF_SLICE
    most = num_lists * entries.shape[0] if entries.ndim == 1 else entries.numel()  # lists may share entries
    _check_count(most)
    sizes = [num_lists * columns + 1, most, num_lists * columns * chunks]
    starts, turned, counts = torch.empty(sum(sizes), dtype=torch.int32, device=device).split(sizes)
    steps, width = (entries.stride()[:2], entries.shape[-1]) if offsets is None else ((0, 0), 0)

    def make(part: int) -> Launch:
        params = params_of("sparse_transpose")(
            head_step=steps[0], list_step=steps[1], width=width, num_lists=num_lists,
            num_rows=rows, num_columns=columns, chunks=chunks, chunk_rows=chunk_rows,
        )  # fmt: skip
        blocks = num_blocks(num_lists * columns, _COLUMNS_OF_BLOCK) if part == 1 else num_lists * chunks
        return Launch(small_kernel(device, "sparse_transpose", (f"PART={part}",)), blocks, params)

    for part in range(3):
        key = ("sparse_transpose", part, device, stream, num_lists, rows, columns, width, steps)
        launch = prepared(key, partial(make, part))
        with launch.lock:
            params = launch.params
            params.entries, params.offsets = entries.data_ptr(), 0 if offsets is None else offsets.data_ptr()
            params.counts, params.starts, params.rows = counts.data_ptr(), starts.data_ptr(), turned.data_ptr()
            params.num_entries, params.num_places = entries.shape[-1], most
            params.counter = counter.data_ptr()
            launch.fire(stream, overlaps=part > 0)
    return Lists(turned, offsets=starts)
