"""Ranges that are a mask of blocks, or lists of keys, as the sparse kernels take them.

`flex_flash_attn_func` takes ranges as MagiAttention's sparse attention does, a slice for each block of queries and run
of keys. Where few queries make a block, tiles of the dense kernels, which pack at most 8 heads, stay partly empty;
those of the sparse kernels, which pack up to 128, do not. Ranges known to be such are kept as lists on the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megatron_magi.backends.registry import fast_sparse
from megatron_magi.operands.options import AttnOptions
from megatron_magi.operands.sparse_pattern import K_BLOCKS, MAX_Q_BLOCK, SparsePattern, num_blocks
from megatron_magi.ops.mask_tensors import HostRanges
from megatron_magi.runtime.lasting import lasting
from megatron_magi.runtime.lru import LruCache

_FEW_SLICES = 64
_MOST_PAIRS = 1 << 24
_MOST_BYTES, _MOST_RANGES = 256 << 20, 256  # of what is kept, on the host and on all devices
_MOST_PADDING = 4  # of lists of single keys, all as long as the longest: times the keys that are listed
_DENSE_HEADS, _TILE = 8, 128  # heads that dense kernels pack at most; places of a tile


@dataclass(frozen=True)
class BlockLists:
    """Which blocks of keys each block of queries sees.

    Attributes:
        q_block, k_block: tokens; a ``k_block`` of 1 stands for any that is neither 64 nor 128.
        offsets: int32 ``[num_q_blocks + 1]``.
        entries: int32, numbers of blocks in rising order.
    """

    q_block: int
    k_block: int
    offsets: np.ndarray
    entries: np.ndarray


_lists: LruCache[int, tuple[BlockLists | None]] = LruCache(_MOST_BYTES, _MOST_RANGES)
_patterns: LruCache[tuple, SparsePattern] = LruCache(_MOST_BYTES, _MOST_RANGES)


def sparse_pattern_of(
    ranges: HostRanges, q: Tensor, k: Tensor, v: Tensor, options: AttnOptions
) -> SparsePattern | None:
    """The pattern of ranges that sparse kernels take and compute faster than dense ones; None where they do not."""
    if len(ranges.table) < _FEW_SLICES or options.softcap or options.sm_margin or options.sanity_check:
        return None
    sparse = fast_sparse(q.device, q.dtype, (q.shape[2], v.shape[2]))
    if sparse is None:
        return None
    found = _lists_of(ranges)
    heads = sparse.packed_heads(q.shape[1] // k.shape[1])
    if found is None or not _is_faster(found, heads, options.deterministic):
        return None
    # Memory of one stream is not handed out again while that reads it; another stream gets tensors of its own.
    key = ranges.number, q.device, torch.cuda.current_stream(q.device).cuda_stream if q.is_cuda else 0
    pattern = _patterns.get(key)
    if pattern is None:
        pattern = _pattern(found, q.device)
        _patterns.put(key, pattern, sum(x.nbytes for x in pattern.tensors))
    return pattern


def _lists_of(ranges: HostRanges) -> BlockLists | None:
    """The lists, made once."""
    known = _lists.get(ranges.number)
    if known is None:
        made = block_lists(ranges.table, ranges.num_rows, ranges.num_keys)
        known = (made,)
        _lists.put(ranges.number, known, 0 if made is None else made.offsets.nbytes + made.entries.nbytes)
    return known[0]


def _is_faster(lists: BlockLists, heads: int, deterministic: bool) -> bool:
    places = lists.q_block * heads
    if lists.k_block == 1:
        if lists.q_block > 1 or heads < _TILE // 2 or deterministic:
            return False
        counts = np.diff(lists.offsets)
        if counts.max() * len(counts) > _MOST_PADDING * len(lists.entries):
            return False
    return min(places, _TILE) > lists.q_block * min(heads, _DENSE_HEADS)


@lasting()  # patterns are kept, and saved for backwards
def _pattern(lists: BlockLists, device: torch.device) -> SparsePattern:
    if lists.k_block > 1:
        tensors = tuple(torch.from_numpy(x).to(device) for x in (lists.offsets[None], lists.entries))
        return SparsePattern(tensors, lists.q_block, lists.k_block, causal=False)
    counts = np.diff(lists.offsets)
    table = np.full((1, len(counts), int(counts.max(initial=1))), -1, dtype=np.int32)
    table[0][np.arange(table.shape[2]) < counts[:, None]] = lists.entries
    return SparsePattern.of_keys(torch.from_numpy(table).to(device))


def block_lists(table: np.ndarray, num_rows: int, num_keys: int) -> BlockLists | None:
    """The lists of slices, int64 ``[n, 5]``, that are full and whose ranges begin and end with blocks; else None.

    None too where they are no valid mask: they overlap, are inverted, or lie outside.
    """
    if table[:, 4].any():
        return None
    begin, end = table[:, 0:4:2], table[:, 1:4:2]
    if (begin < 0).any() or (begin > end).any() or (end > (num_rows, num_keys)).any():
        return None
    table = table[(begin < end).all(axis=1)]
    if not len(table):
        return None
    step = _common_step(table[:, :2], num_rows)
    q_block = next(b for b in range(min(step, MAX_Q_BLOCK), 0, -1) if step % b == 0)
    step = _common_step(table[:, 2:4], num_keys)
    k_block = next((b for b in sorted(K_BLOCKS, reverse=True) if step % b == 0), 1)
    first_row, first_key = table[:, 0] // q_block, table[:, 2] // k_block
    rows, keys = -(-table[:, 1] // q_block) - first_row, -(-table[:, 3] // k_block) - first_key
    pairs, columns = rows * keys, num_blocks(num_keys, k_block)
    if pairs.sum() > _MOST_PAIRS:
        return None
    within = np.arange(pairs.sum()) - np.repeat(np.cumsum(pairs) - pairs, pairs)
    row = np.repeat(first_row, pairs) + within // np.repeat(keys, pairs)
    pair = row * columns + np.repeat(first_key, pairs) + within % np.repeat(keys, pairs)
    pair.sort()
    if (np.diff(pair) == 0).any():
        return None
    counts = np.bincount(pair // columns, minlength=num_blocks(num_rows, q_block))
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    return BlockLists(q_block, k_block, offsets, (pair % columns).astype(np.int32))


def _common_step(ranges: np.ndarray, total: int) -> int:
    """The largest block that all ranges begin and end with; the last may be short."""
    step = int(np.gcd.reduce(ranges[ranges < total], initial=0))
    return step or MAX_Q_BLOCK
