"""Masks as range lists: what users of MagiAttention pass to ``magi_attn_flex_key``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from megatron_magi.checks import IntArrayLike, flag, int_array, int_at_least
from megatron_magi.compat.types import AttnMaskType, AttnRanges, GeneralAttnMaskType, as_ranges, mask_types
from megatron_magi.mask import AttnMask, AttnRange, builders
from megatron_magi.mask.documents import Documents, cumulative

RangeLists = tuple[AttnRanges, AttnRanges, list[AttnMaskType]]


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


def infer_attn_mask_from_sliding_window(
    q_range: AttnRange | Sequence[int], k_range: AttnRange | Sequence[int], window_size: tuple[int, int]
) -> RangeLists:
    """A sliding window inside one rectangle of queries and keys.

    The last query is aligned with the last key; queries aligned with no key see nothing.

    Args:
        q_range, k_range: the rectangle.
        window_size: ``(left, right)`` keys visible on each side of the query's own; -1 is unlimited.

    Returns:
        ``(q_ranges, k_ranges, attn_mask_type)`` of at most three slices.

    Raises:
        ValueError: ``window_size`` is not a pair of integers from -1 on, or a range is wrong.
    """
    left, right = _window(window_size)
    q, k = (AttnRange.from_range(r, name=name) for r, name in ((q_range, "q_range"), (k_range, "k_range")))
    for range_, name in ((q, "q_range"), (k, "k_range")):
        if range_.start < 0:
            raise ValueError(f"{name}: tokens are counted from 0, got {range_!r}")
    docs = Documents(*(np.array([bound], dtype=np.int64) for bound in (q.start, q.end, k.start, k.end)))
    return range_lists(builders.window_slices(docs, left, right, 0))


def infer_attn_mask_from_cu_seqlens(
    cu_seqlens_q: IntArrayLike,
    cu_seqlens_k: IntArrayLike,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    global_window_size: int = 0,
) -> tuple[AttnRanges, AttnRanges, list[AttnMaskType], int, int]:
    """Packed documents, full, causal or with a sliding window.

    Args:
        cu_seqlens_q, cu_seqlens_k: int ``[num_documents + 1]``, cumulative lengths from 0.
        causal: causal inside each document; ``window_size`` must then be left alone.
        window_size: as in `infer_attn_mask_from_sliding_window`.
        global_window_size: leading keys of each document that stay visible outside the window,
            as far as the window's right bound allows.

    Returns:
        ``(q_ranges, k_ranges, attn_mask_type, total_seqlen_q, total_seqlen_k)``.

    Raises:
        ValueError: a window with ``causal``, or lengths that are wrong or disagree.
    """
    mask = mask_from_cu_seqlens(cu_seqlens_q, cu_seqlens_k, causal, window_size, global_window_size)
    return (*range_lists(mask.table), mask.total_seqlen_q, mask.total_seqlen_k)


def mask_from_cu_seqlens(
    cu_seqlens_q: IntArrayLike,
    cu_seqlens_k: IntArrayLike,
    causal: bool,
    window_size: tuple[int, int],
    global_window_size: int = 0,
) -> AttnMask:
    """The mask whose range lists `infer_attn_mask_from_cu_seqlens` returns, with its arguments and errors."""
    left, right = _window(window_size)
    global_window_size = int_at_least(global_window_size, "global_window_size", 0)
    flag(causal, "causal")
    cu_q, cu_k = cumulative(cu_seqlens_q, "cu_seqlens_q"), cumulative(cu_seqlens_k, "cu_seqlens_k")
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
    return builders.varlen(cu_q, cu_seqlens_k=cu_k, causal=True)


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


def _window(window_size: tuple[int, int]) -> tuple[int, int]:
    window = int_array(window_size, "window_size").tolist()
    if len(window) != 2 or min(window) < -1:
        raise ValueError(f"window_size: expected (left, right), each -1 or more, got {window_size}")
    return window[0], window[1]


def range_lists(table: np.ndarray) -> RangeLists:
    """Queries, keys and types of slices, int64 ``[n, 5]`` as `AttnMask.table`."""
    return (
        AttnRanges.from_ranges(table[:, :2]),
        AttnRanges.from_ranges(table[:, 2:4]),
        [AttnMaskType.from_int_type(t) for t in table[:, 4].tolist()],
    )
