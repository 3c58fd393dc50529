"""Where documents begin and end: reads lengths, cumulative lengths and end-of-document tokens."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from megatron_magi.checks import MAX_TOKENS, IntArrayLike, int_array, int_at_least, integer
from megatron_magi.mask.bands import IntArray


class Documents(NamedTuple):
    """Query and key bounds of each document, int64 ``[num_documents]`` each, half-open."""

    q0: IntArray
    q1: IntArray
    k0: IntArray
    k1: IntArray

    @property
    def total_q(self) -> int:
        """Number of query tokens."""
        return int(self.q1[-1]) if len(self.q1) else 0

    @property
    def total_k(self) -> int:
        """Number of key tokens."""
        return int(self.k1[-1]) if len(self.k1) else 0


def cumulative(cu_seqlens: IntArrayLike, name: str) -> IntArray:
    """Checked cumulative lengths, int64 ``[num_documents + 1]``.

    Raises:
        ValueError: empty, not starting at 0, decreasing somewhere, or of too many tokens.
    """
    cu = int_array(cu_seqlens, name)
    if not len(cu) or cu[0] != 0:
        raise ValueError(f"{name}: expected cumulative lengths that start with 0, got {cu[:1].tolist()}")
    falls = cu[1:] < cu[:-1]
    if falls.any():
        i = int(np.flatnonzero(falls)[0])
        raise ValueError(f"{name}: must not decrease, got {cu[i]} then {cu[i + 1]} at index {i + 1}")
    if cu[-1] > MAX_TOKENS:
        raise ValueError(f"{name}: expected at most {MAX_TOKENS} tokens, got {cu[-1]}")
    return cu


def lengths_to_cumulative(doc_lengths: IntArrayLike, name: str) -> IntArray:
    """Cumulative lengths of documents, int64 ``[num_documents + 1]``.

    Raises:
        ValueError: a length is negative.
    """
    lengths = int_array(doc_lengths, name)
    bad = np.flatnonzero(lengths < 0)
    if len(bad):
        raise ValueError(f"{name}: must not be negative, got {lengths[bad[0]]} at index {int(bad[0])}")
    if len(lengths) and (lengths.max() > MAX_TOKENS or lengths.sum() > MAX_TOKENS):
        raise ValueError(f"{name}: expected at most {MAX_TOKENS} tokens in all")
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])


def read_documents(
    seqlen: int | None = None,
    cu_seqlens: IntArrayLike | None = None,
    doc_lengths: IntArrayLike | None = None,
    cu_seqlens_k: IntArrayLike | None = None,
    doc_lengths_k: IntArrayLike | None = None,
) -> Documents:
    """Documents from exactly one of ``seqlen``, ``cu_seqlens`` and ``doc_lengths``.

    The keys have the same documents unless ``cu_seqlens_k`` or ``doc_lengths_k`` is given.

    Raises:
        ValueError: none or several were given, or queries and keys differ in number of documents.
    """
    options = {"seqlen": seqlen, "cu_seqlens": cu_seqlens, "doc_lengths": doc_lengths}
    given = [name for name, value in options.items() if value is not None]
    if len(given) != 1:
        raise ValueError(f"seqlen, cu_seqlens, doc_lengths: give exactly one, got {' and '.join(given) or 'none'}")
    if seqlen is not None:
        cu_q = np.array([0, int_at_least(seqlen, "seqlen", 0)], dtype=np.int64)
    elif cu_seqlens is not None:
        cu_q = cumulative(cu_seqlens, "cu_seqlens")
    else:
        cu_q = lengths_to_cumulative(doc_lengths, "doc_lengths")

    if cu_seqlens_k is not None and doc_lengths_k is not None:
        raise ValueError("cu_seqlens_k, doc_lengths_k: give at most one")
    cu_k, name_k = cu_q, ""
    if cu_seqlens_k is not None and cu_seqlens_k is not cu_seqlens:
        cu_k, name_k = cumulative(cu_seqlens_k, "cu_seqlens_k"), "cu_seqlens_k"
    elif doc_lengths_k is not None:
        cu_k, name_k = lengths_to_cumulative(doc_lengths_k, "doc_lengths_k"), "doc_lengths_k"
    return documents_of(cu_q, cu_k, name_k)


def documents_of(cu_q: IntArray, cu_k: IntArray, name_k: str) -> Documents:
    """Documents from results of `cumulative`; ``name_k``: the argument that ``cu_k`` comes from.

    Raises:
        ValueError: queries and keys differ in number of documents.
    """
    if len(cu_k) != len(cu_q):
        raise ValueError(f"{name_k}: {len(cu_k) - 1} documents of keys, but {len(cu_q) - 1} of queries")
    return Documents(cu_q[:-1], cu_q[1:], cu_k[:-1], cu_k[1:])


def cu_seqlens_from_eod(
    positions: IntArrayLike | None = None,
    seqlen: int | None = None,
    *,
    tokens: IntArrayLike | None = None,
    eod: int | None = None,
    batch_size: int = 1,
) -> IntArray:
    """Finds the cumulative document lengths of packed sequences whose documents end with an EOD token.

    The EOD token belongs to the document that it ends. A batch is packed one sequence after
    the other; a document ends with its sequence even without an EOD token.

    Args:
        positions: int ``[num_eod]``, ascending indices of the EOD tokens, counted over the
            packed batch (token t of sequence i is ``i * seqlen + t``). Needs ``seqlen``.
        seqlen: tokens of one sequence.
        tokens: int ``[seqlen]`` or ``[batch_size, seqlen]``, in place of the three above.
        eod: the EOD token's id. Needs ``tokens``.
        batch_size: number of sequences, with ``positions``.

    Returns:
        int64 ``[num_documents + 1]``; no document is empty.

    Raises:
        ValueError: not exactly one of ``positions`` and ``tokens``, a missing companion, or
            positions that are out of bounds.
    """
    if (positions is None) == (tokens is None):
        raise ValueError("positions, tokens: give exactly one")
    if tokens is not None:
        if eod is None:
            raise ValueError("eod: needed to find documents in tokens")
        eod = integer(eod, "eod")
        ids = int_array(tokens, "tokens", ndim=getattr(tokens, "ndim", 0) or np.ndim(tokens))
        if ids.ndim not in (1, 2):
            raise ValueError(f"tokens: expected [seqlen] or [batch_size, seqlen], got shape {list(ids.shape)}")
        num, length = (1, len(ids)) if ids.ndim == 1 else ids.shape
        ends = np.flatnonzero(ids.reshape(-1) == eod) + 1
    else:
        length, num = int_at_least(seqlen, "seqlen", 0), int_at_least(batch_size, "batch_size", 1)
        at = int_array(positions, "positions")
        if len(at) and (at.min() < 0 or at.max() >= num * length):
            raise ValueError(f"positions: expected indices in [0, {num * length}), got {at.min()} to {at.max()}")
        ends = at + 1
    sequence_ends = np.arange(num + 1, dtype=np.int64) * length
    return np.unique(np.concatenate([sequence_ends, ends.astype(np.int64)]))
