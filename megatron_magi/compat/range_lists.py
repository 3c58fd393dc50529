"""Masks as range lists: what users of MagiAttention pass to ``magi_attn_flex_key``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from megatron_magi.api.mask_types import AttnMaskType, GeneralAttnMaskType, as_ranges, mask_types
from megatron_magi.api.masks import mask_from_cu_seqlens, window_of
from megatron_magi.checks import IntArrayLike, int_at_least
from megatron_magi.compat.ranges import AttnRanges
from megatron_magi.mask import AttnRange, builders
from megatron_magi.mask.documents import Documents

RangeLists = tuple[AttnRanges, AttnRanges, list[AttnMaskType]]


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
    left, right = window_of(window_size)
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


def apply_padding(
    q_ranges: Iterable,
    k_ranges: Iterable,
    attn_mask_type: GeneralAttnMaskType,
    total_seqlen: int,
    pad_size: int,
) -> RangeLists:
    """The slices of a mask and one more: of the padding at the end, which sees no key.

    Args:
        q_ranges, k_ranges, attn_mask_type: the mask, see `megatron_magi.api.magi_attn_flex_key`.
        total_seqlen: tokens before the padding.
        pad_size: tokens of padding.

    Returns:
        New ``(q_ranges, k_ranges, attn_mask_type)`` with ``[total_seqlen, total_seqlen + pad_size)``, ``[0, 0)`` and
        `AttnMaskType.FULL` at their ends.

    Raises:
        ValueError: an argument is wrong.
    """
    start, pad_size = int_at_least(total_seqlen, "total_seqlen", 0), int_at_least(pad_size, "pad_size", 0)
    queries, keys = (AttnRanges(as_ranges(r, name)) for r, name in ((q_ranges, "q_ranges"), (k_ranges, "k_ranges")))
    types = [AttnMaskType.from_int_type(number) for number in mask_types(attn_mask_type, len(queries))]
    queries.append(AttnRange(start, start + pad_size))
    keys.append(AttnRange(0, 0))
    return queries, keys, [*types, AttnMaskType.FULL]


def range_lists(table: np.ndarray) -> RangeLists:
    """Queries, keys and types of slices, int64 ``[n, 5]`` as `AttnMask.table`."""
    return (
        AttnRanges.from_ranges(table[:, :2]),
        AttnRanges.from_ranges(table[:, 2:4]),
        [AttnMaskType.from_int_type(t) for t in table[:, 4].tolist()],
    )
