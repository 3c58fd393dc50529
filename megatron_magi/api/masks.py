"""The mask of a key, from ranges or from cumulative lengths."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from megatron_magi.api.mask_types import GeneralAttnMaskType, as_ranges, mask_types
from megatron_magi.checks import IntArrayLike, flag, int_array, int_at_least
from megatron_magi.mask import AttnMask, AttnRanges, MaskType, builders
from megatron_magi.mask.documents import cumulative, documents_of


def mask_from_ranges(
    q_ranges: Iterable,
    k_ranges: Iterable,
    attn_mask_type: GeneralAttnMaskType,
    total_seqlen_q: int,
    total_seqlen_k: int,
) -> AttnMask:
    """The mask in which ``q_ranges[i]`` sees ``k_ranges[i]`` as ``attn_mask_type[i]``.

    Raises:
        ValueError: an argument, named in the message, is wrong; two slices overlap.
    """
    queries, keys = as_ranges(q_ranges, "q_ranges"), as_ranges(k_ranges, "k_ranges")
    if len(queries) != len(keys):
        raise ValueError(f"k_ranges: {len(keys)} ranges for {len(queries)} of queries")
    total_q = int_at_least(total_seqlen_q, "total_seqlen_q", 0)
    total_k = int_at_least(total_seqlen_k, "total_seqlen_k", 0)
    _check_same_tokens("total_seqlen_k", total_q, total_k)
    table = np.empty((len(queries), 5), dtype=np.int64)
    table[:, :2] = _bounds(queries, "q_ranges", total_q)
    table[:, 2:4] = _bounds(keys, "k_ranges", total_k)
    table[:, 4] = mask_types(attn_mask_type, len(queries))
    try:
        return AttnMask(table, total_q, total_k)
    except ValueError as error:  # all that is left are slices that overlap
        raise ValueError(f"q_ranges, k_ranges: {str(error).removeprefix('slices: ')}") from None


def _bounds(ranges: AttnRanges, name: str, total: int) -> np.ndarray:
    bounds = np.reshape(ranges.to_naive_ranges(), (-1, 2))
    outside = np.flatnonzero((bounds[:, 0] < 0) | (bounds[:, 0] > bounds[:, 1]) | (bounds[:, 1] > total))
    if len(outside):
        i = int(outside[0])
        raise ValueError(f"{name}[{i}]: expected 0 <= start <= end <= {total}, got {ranges[i]!r}")
    return bounds


def _check_same_tokens(name: str, total_q: int, total_k: int) -> None:
    if total_q != total_k:
        raise ValueError(
            f"{name}: queries and keys must be the same tokens, got total_seqlen_q={total_q} and "
            f"total_seqlen_k={total_k}"
        )


def mask_from_cu_seqlens(
    cu_seqlens_q: IntArrayLike,
    cu_seqlens_k: IntArrayLike,
    causal: bool,
    window_size: tuple[int, int],
    global_window_size: int = 0,
) -> AttnMask:
    """The mask whose range lists `infer_attn_mask_from_cu_seqlens` returns, with its arguments and errors."""
    left, right = window_of(window_size)
    global_window_size = int_at_least(global_window_size, "global_window_size", 0)
    flag(causal, "causal")
    cu_q = cumulative(cu_seqlens_q, "cu_seqlens_q")
    # The same tensor is read once: for one on a GPU the host waits.
    cu_k = cu_q if cu_seqlens_k is cu_seqlens_q else cumulative(cu_seqlens_k, "cu_seqlens_k")
    if not causal:
        return builders.sliding_window(
            left=left,
            right=right,
            cu_seqlens=cu_q,
            cu_seqlens_k=cu_k,
            global_tokens=global_window_size,
        )
    if (left, right) != (-1, -1):
        raise ValueError(
            f"window_size: expected (-1, -1) with causal=True, got {(left, right)}; leave out causal: right=0 means it"
        )
    return builders.of_documents(documents_of(cu_q, cu_k, "cu_seqlens_k"), MaskType.CAUSAL)


def mask_of_key(
    cu_seqlens_q: IntArrayLike,
    cu_seqlens_k: IntArrayLike,
    causal: bool,
    window_size: tuple[int, int],
    total_seqlen: int | None = None,
) -> AttnMask:
    """`mask_from_cu_seqlens` of a key: queries and keys are the same tokens, ``total_seqlen`` of them if given."""
    mask = mask_from_cu_seqlens(cu_seqlens_q, cu_seqlens_k, causal, window_size)
    if total_seqlen is not None and mask.total_seqlen_q != total_seqlen:
        raise ValueError(f"cu_seqlens_q: ends with {mask.total_seqlen_q}, key_for_dispatch has {total_seqlen} tokens")
    _check_same_tokens("cu_seqlens_k", mask.total_seqlen_q, mask.total_seqlen_k)
    return mask


def window_of(window_size: tuple[int, int]) -> tuple[int, int]:
    """The keys visible on each side of a query's own, -1 for all.

    Raises:
        ValueError: not a pair of integers from -1 on.
    """
    window = int_array(window_size, "window_size").tolist()
    if len(window) != 2 or min(window) < -1:
        raise ValueError(f"window_size: expected (left, right), each -1 or more, got {window_size}")
    return window[0], window[1]
