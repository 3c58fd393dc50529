"""Masks that are common enough to have a name. Each returns an `AttnMask` of few, disjoint slices.

Lengths, cumulative lengths and tokens may be lists, numpy arrays or tensors. Documents never
see each other. Where a document has more or fewer keys than queries, its last query is
aligned with its last key.
"""

from __future__ import annotations

import numpy as np

from megatron_magi.checks import IntArrayLike, flag, int_array, int_at_least
from megatron_magi.mask import bands as bd
from megatron_magi.mask.bands import IntArray
from megatron_magi.mask.block_sparse import block_sparse
from megatron_magi.mask.documents import Documents, cu_seqlens_from_eod, lengths_to_cumulative, read_documents
from megatron_magi.mask.prefix_tree import prefix_tree
from megatron_magi.mask.slices import AttnMask, MaskType, slice_table

__all__ = [
    "block_causal",
    "block_sparse",
    "causal",
    "cu_seqlens_from_eod",
    "from_eod_positions",
    "full",
    "prefix_lm",
    "prefix_tree",
    "sliding_window",
    "varlen",
    "window_slices",
]


def full(seqlen_q: int, seqlen_k: int | None = None) -> AttnMask:
    """Makes the mask in which every query sees every key.

    Raises:
        ValueError: a length is negative.
    """
    return _one_document(seqlen_q, seqlen_k, MaskType.FULL)


def causal(seqlen_q: int, seqlen_k: int | None = None) -> AttnMask:
    """Makes the causal mask: the last query sees every key, each query before it one key less.

    Raises:
        ValueError: a length is negative.
    """
    return _one_document(seqlen_q, seqlen_k, MaskType.CAUSAL)


def varlen(
    cu_seqlens: IntArrayLike | None = None,
    *,
    doc_lengths: IntArrayLike | None = None,
    causal: bool = True,
    cu_seqlens_k: IntArrayLike | None = None,
    doc_lengths_k: IntArrayLike | None = None,
) -> AttnMask:
    """Makes the mask of packed documents: full or causal attention inside each.

    Args:
        cu_seqlens: int ``[num_documents + 1]``, cumulative lengths from 0.
        doc_lengths: int ``[num_documents]``, in place of ``cu_seqlens``; 0 is allowed.
        causal: causal inside each document, else full.
        cu_seqlens_k, doc_lengths_k: documents of the keys, where they differ.

    Raises:
        ValueError: none or both ways were used, cumulative lengths decrease or do not start
            at 0, queries and keys differ in number of documents, or ``causal`` is no bool.
    """
    docs = read_documents(None, cu_seqlens, doc_lengths, cu_seqlens_k, doc_lengths_k)
    return of_documents(docs, MaskType.CAUSAL if flag(causal, "causal") else MaskType.FULL)


def sliding_window(
    seqlen: int | None = None,
    left: int = -1,
    right: int = -1,
    *,
    causal: bool = False,
    global_tokens: int = 0,
    cu_seqlens: IntArrayLike | None = None,
    doc_lengths: IntArrayLike | None = None,
    cu_seqlens_k: IntArrayLike | None = None,
    doc_lengths_k: IntArrayLike | None = None,
) -> AttnMask:
    """Makes the mask of a window around each query, and optionally the first keys of its document.

    The query aligned with key p of its document sees key j of it exactly when
    ``j <= p + right and (j >= p - left or j < global_tokens)``. So global tokens never show a
    query anything beyond its right bound. Where a document has more queries than keys, the
    first queries are aligned with no key and see nothing (unless both sides are unlimited).

    Args:
        seqlen: tokens of the only document; or one of ``cu_seqlens`` and ``doc_lengths``.
        left, right: keys visible on each side of the query's own; -1 is unlimited.
        causal: the same as ``right=0``.
        global_tokens: number of leading keys of each document that stay visible.
        cu_seqlens, doc_lengths, cu_seqlens_k, doc_lengths_k: as in `varlen`.

    Raises:
        ValueError: a window or ``global_tokens`` is below its minimum, ``causal`` with a
            positive ``right``, or as in `varlen`.
    """
    left, right = int_at_least(left, "left", -1), int_at_least(right, "right", -1)
    global_tokens = int_at_least(global_tokens, "global_tokens", 0)
    if flag(causal, "causal"):
        if right > 0:
            raise ValueError(f"right: a causal window ends at the query, got {right}")
        right = 0
    docs = read_documents(seqlen, cu_seqlens, doc_lengths, cu_seqlens_k, doc_lengths_k)
    if left == -1 and right == -1:
        return of_documents(docs, MaskType.FULL)
    return AttnMask(window_slices(docs, left, right, global_tokens), docs.total_q, docs.total_k)


def block_causal(
    seqlen: int | None = None,
    block_size: int | None = None,
    *,
    cu_seqlens: IntArrayLike | None = None,
    doc_lengths: IntArrayLike | None = None,
) -> AttnMask:
    """Makes the mask in which tokens see their whole block (a frame of a video) and every earlier block.

    Blocks start again with each document; the last one of a document may be shorter.

    Args:
        seqlen: tokens of the only document; or one of ``cu_seqlens`` and ``doc_lengths``.
        block_size: tokens a block, at least 1.
        cu_seqlens, doc_lengths: as in `varlen`.

    Raises:
        ValueError: ``block_size`` is missing or not positive, or as in `varlen`.
    """
    block_size = int_at_least(block_size, "block_size", 1)
    docs = read_documents(seqlen, cu_seqlens, doc_lengths)
    num_blocks = -(-(docs.q1 - docs.q0) // block_size)
    doc, block = bd.expand(np.zeros(len(num_blocks), np.int64), num_blocks)
    start = docs.q0[doc] + block * block_size
    end = np.minimum(start + block_size, docs.q1[doc])
    table = slice_table(start, end, docs.k0[doc], end, MaskType.FULL)
    return AttnMask(table, docs.total_q)


def prefix_lm(prefix_lengths: IntArrayLike, doc_lengths: IntArrayLike) -> AttnMask:
    """Makes the mask of full attention inside each document's prefix and causal attention after it.

    Args:
        prefix_lengths: int ``[num_documents]``, from 0 (causal) to the document's length (full).
        doc_lengths: int ``[num_documents]``.

    Raises:
        ValueError: the two differ in length, or a prefix is longer than its document.
    """
    prefix = int_array(prefix_lengths, "prefix_lengths")
    cu = lengths_to_cumulative(doc_lengths, "doc_lengths")
    lengths = np.diff(cu)
    if len(prefix) != len(lengths):
        raise ValueError(f"prefix_lengths: {len(prefix)} prefixes for {len(lengths)} documents")
    bad = np.flatnonzero((prefix < 0) | (prefix > lengths))
    if len(bad):
        i = int(bad[0])
        raise ValueError(f"prefix_lengths: prefix {i} has {prefix[i]} tokens, its document has {lengths[i]}")
    # A prefix of one token sees what a causal token sees: it needs no slice of its own.
    prefix = np.where((prefix == 1) & (lengths > 1), 0, prefix)
    start, end = cu[:-1], cu[1:]
    split = start + prefix
    inside = slice_table(start, split, start, split, MaskType.FULL)
    after = slice_table(split, end, start, end, MaskType.CAUSAL)
    table = np.stack([inside, after], axis=1).reshape(-1, 5)
    return AttnMask(table[table[:, 0] < table[:, 1]], int(cu[-1]))


def from_eod_positions(
    positions: IntArrayLike | None = None,
    seqlen: int | None = None,
    *,
    tokens: IntArrayLike | None = None,
    eod: int | None = None,
    batch_size: int = 1,
    causal: bool = True,
) -> AttnMask:
    """Makes the mask of packed documents that end with an EOD token, over one or several sequences.

    The arguments, but for ``causal`` (as in `varlen`), and the errors are those of
    `cu_seqlens_from_eod`, whose result also fits `sliding_window` and `block_causal`.
    """
    cu = cu_seqlens_from_eod(positions, seqlen, tokens=tokens, eod=eod, batch_size=batch_size)
    return varlen(cu, causal=causal)


def _one_document(seqlen_q: int, seqlen_k: int | None, mask_type: MaskType) -> AttnMask:
    seqlen_q = int_at_least(seqlen_q, "seqlen_q", 0)
    seqlen_k = seqlen_q if seqlen_k is None else int_at_least(seqlen_k, "seqlen_k", 0)
    rows = [(0, seqlen_q, 0, seqlen_k, int(mask_type))] if seqlen_q and seqlen_k else []
    return AttnMask(rows, seqlen_q, seqlen_k)


def of_documents(docs: Documents, mask_type: MaskType) -> AttnMask:
    """`varlen` of documents that are checked already."""
    table = slice_table(*docs, mask_type)
    keep = (docs.q0 < docs.q1) & (docs.k0 < docs.k1)
    return AttnMask._of_valid(table[keep], docs.total_q, docs.total_k)


def window_slices(docs: Documents, left: int, right: int, num_global: int) -> IntArray:
    """The slices of `sliding_window` as a table, document by document, int64 ``[n, 5]``.

    ``left`` and ``right`` as there, with -1 on both sides too; nothing is checked.

    In a document's own coordinates, row p sees keys from ``lo`` to ``hi``. ``lo`` stays 0 until
    the window's left edge passes the global tokens, then follows the row; ``hi`` follows the row
    until it meets the last key, then stays. Rows over which neither changes its manner are
    one slice, so a document has at most three, and one more for the global tokens.
    """
    num_keys = docs.k1 - docs.k0
    shift = docs.q1 - num_keys  # query = p + shift
    last_fixed_lo = left + np.minimum(num_global, num_keys) if left >= 0 else num_keys
    first_fixed_hi = num_keys - 1 - right if right >= 0 else np.full_like(num_keys, -1)
    stop = num_keys
    row = np.where(num_keys > 0, np.maximum(docs.q0 - shift, 0), stop)
    parts, global_start = [], stop.copy()
    for _ in range(3):
        lo_moves, hi_moves = row >= last_fixed_lo, row < first_fixed_hi
        end = np.minimum(stop, np.where(lo_moves, stop, last_fixed_lo + 1))
        end = np.minimum(end, np.where(hi_moves, first_fixed_hi + 1, stop))
        end = np.maximum(row, end)
        # At row == last_fixed_lo both manners agree; alone, it is spared a slice of global tokens.
        lo_moves &= (row > last_fixed_lo) | (row + 1 < stop)
        k_start = np.where(lo_moves, row - left, 0)
        k_end = np.where(hi_moves, np.minimum(end + right, num_keys), num_keys)
        # Rows of a single-row slice are its corners: every type says the same, FULL says it simply.
        kind = np.where(end - row > 1, MaskType.CAUSAL * hi_moves + MaskType.INV_CAUSAL * lo_moves, MaskType.FULL)
        parts.append(slice_table(row + shift, end + shift, docs.k0 + k_start, docs.k0 + k_end, kind))
        global_start = np.where(lo_moves & (row < end), np.minimum(global_start, row), global_start)
        row = end
    num_seen = np.minimum(num_global, num_keys)
    parts.append(slice_table(global_start + shift, stop + shift, docs.k0, docs.k0 + num_seen, MaskType.FULL))
    table = np.stack(parts, axis=1).reshape(-1, 5)
    return table[(table[:, 0] < table[:, 1]) & (table[:, 2] < table[:, 3])]
