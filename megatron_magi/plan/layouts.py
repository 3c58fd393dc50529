"""Dispatches of tokens that are distributed already: layouts by name, or the positions that each rank holds."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_magi.checks import IntArrayLike, int_array, int_at_least
from megatron_magi.config import DispatchConfig
from megatron_magi.plan.chunks import check_sizes
from megatron_magi.plan.plan import MAX_RANKS, dispatch_from_chunks
from megatron_magi.plan.types import Dispatch

LAYOUTS = ("contiguous", "zigzag", "zigzag_documents")
"""Names of layouts."""

Layout = str | Sequence[IntArrayLike]
"""A name of `LAYOUTS`, or for each rank the global position of each of its rows."""


def given_dispatch(
    layout: Layout,
    total_seqlen: int,
    cp_size: int,
    *,
    cu_seqlens: IntArrayLike | None = None,
    pad_size: int | None = None,
) -> Dispatch:
    """The dispatch of tokens whose owners are given, for ``make_plan(..., dispatch=...)``.

    Args:
        layout: ``"contiguous"``: rank r holds the r-th of ``cp_size`` equal pieces of the sequence. ``"zigzag"``:
            pieces r and ``2 * cp_size - 1 - r`` of ``2 * cp_size``. ``"zigzag_documents"``: these pieces of each
            document. Or one array of integers for each rank: global position of each of its rows, in any order and
            number. Positions of ``total_seqlen`` or more are padding, and must be a rank's last rows.
        total_seqlen: tokens of the sequence, without padding.
        cp_size: number of ranks.
        cu_seqlens: bounds of the documents, int ``[num_documents + 1]``, from 0 to ``total_seqlen``; for
            ``"zigzag_documents"`` alone.
        pad_size: tokens of padding at the end of the sequence; for ``"contiguous"`` and ``"zigzag"`` the least that
            makes pieces equal when None. Other layouts have what their rows say.

    Raises:
        ValueError: an argument, named in the message, is wrong: positions overlap or are missing, arrays for another
            number of ranks, a length that does not divide.
    """
    cp_size = int_at_least(cp_size, "cp_size", 1, most=MAX_RANKS)
    total_seqlen = int_at_least(total_seqlen, "total_seqlen", 0)
    if pad_size is not None:
        pad_size = int_at_least(pad_size, "pad_size", 0)
    if isinstance(layout, str) and layout not in LAYOUTS:
        raise ValueError(f"layout: expected one of {', '.join(LAYOUTS)}, or positions of each rank, got {layout!r}")
    if (cu_seqlens is not None) != (isinstance(layout, str) and layout == "zigzag_documents"):
        raise ValueError('cu_seqlens: bounds of documents are for layout="zigzag_documents", which needs them')
    if not isinstance(layout, str):
        dispatch = _of_positions(layout, total_seqlen, cp_size)
    elif layout == "zigzag_documents":
        dispatch = _of_documents(int_array(cu_seqlens, "cu_seqlens"), total_seqlen, cp_size)
    else:
        dispatch = _of_sequence(layout == "zigzag", total_seqlen, cp_size, pad_size)
    padding = dispatch.padded_seqlen - total_seqlen
    if pad_size not in (None, padding):
        raise ValueError(f"pad_size: got {pad_size}, but the layout has {padding} rows of padding")
    return dispatch


def _of_sequence(zigzag: bool, total_seqlen: int, cp_size: int, pad_size: int | None) -> Dispatch:
    # On one rank nothing is cut.
    pieces = cp_size * (2 if zigzag and cp_size > 1 else 1)
    if pad_size is None:
        pad_size = -total_seqlen % pieces if total_seqlen else pieces
    check_sizes(total_seqlen, cp_size, DispatchConfig(alignment=pieces // cp_size, pad_size=pad_size))
    size = (total_seqlen + pad_size) // pieces
    return _joined(total_seqlen, np.arange(pieces + 1, dtype=np.int64) * size, _ranks_of(pieces, cp_size), cp_size)


def _of_documents(cu_seqlens: np.ndarray, total_seqlen: int, cp_size: int) -> Dispatch:
    lengths = np.diff(cu_seqlens)
    if len(cu_seqlens) < 2 or cu_seqlens[0] != 0 or cu_seqlens[-1] != total_seqlen or (lengths < 0).any():
        raise ValueError(f"cu_seqlens: expected ascending bounds from 0 to {total_seqlen}")
    if total_seqlen == 0:
        raise ValueError("cu_seqlens: no document has a token")
    pieces = 2 * cp_size if cp_size > 1 else 1
    wrong = np.flatnonzero(lengths % pieces)
    if len(wrong):
        at = int(wrong[0])
        raise ValueError(
            f"cu_seqlens: document {at} has {lengths[at]} tokens, no multiple of {pieces} (2 * the number of ranks); "
            "count its padding with it and hide it by the mask"
        )
    some = lengths > 0
    starts, sizes = cu_seqlens[:-1][some], lengths[some] // pieces
    bounds = (starts[:, None] + np.arange(pieces) * sizes[:, None]).ravel()
    rank = np.tile(_ranks_of(pieces, cp_size), len(starts))
    return _joined(total_seqlen, np.append(bounds, total_seqlen), rank, cp_size)


def _ranks_of(pieces: int, cp_size: int) -> np.ndarray:
    """Ranks of the pieces: in order, and back again."""
    ranks = np.arange(cp_size, dtype=np.int64)
    return np.concatenate([ranks, ranks[::-1]]) if pieces > cp_size else ranks


def _joined(total_seqlen: int, bounds: np.ndarray, rank: np.ndarray, cp_size: int) -> Dispatch:
    """Equal layouts get equal dispatches: adjacent pieces of a rank are one."""
    first = np.flatnonzero(np.diff(rank, prepend=-1))
    return dispatch_from_chunks(total_seqlen, np.append(bounds[first], bounds[-1]), rank[first], cp_size)


def _of_positions(layout: Sequence[IntArrayLike], total_seqlen: int, cp_size: int) -> Dispatch:
    if not isinstance(layout, Sequence) or len(layout) != cp_size:
        got = f"{len(layout)} arrays" if isinstance(layout, Sequence) else type(layout).__name__
        raise ValueError(f"layout: expected positions for each of {cp_size} ranks, got {got}")
    held = [int_array(positions, f"layout[{rank}]") for rank, positions in enumerate(layout)]
    lengths = np.array([len(positions) for positions in held], dtype=np.int64)
    position = np.concatenate(held)
    length = len(position)
    if length < max(total_seqlen, 1):
        raise ValueError(f"layout: {length} positions for {total_seqlen} tokens; some are missing")
    if position.min() < 0 or position.max() >= length:
        raise ValueError(f"layout: {length} positions must be all from 0 to {length - 1}, some are missing or beyond")
    holders = np.bincount(position, minlength=length)
    if (holders != 1).any():
        at = int(np.argmax(holders > 1))
        raise ValueError(f"layout: position {at} is held {holders[at]} times, position {np.argmin(holders)} never")
    rank = np.repeat(np.arange(cp_size, dtype=np.int64), lengths)
    row = np.arange(length, dtype=np.int64) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    is_pad = position >= total_seqlen
    late = np.flatnonzero(~is_pad[1:] & is_pad[:-1] & (rank[1:] == rank[:-1]))
    if len(late):
        raise ValueError(f"layout[{rank[late[0]]}]: padding must be the last rows of a rank")
    owner, place = np.empty(length, dtype=np.int64), np.empty(length, dtype=np.int64)
    owner[position], place[position] = rank, row
    first = np.append(0, np.flatnonzero((np.diff(owner) != 0) | (np.diff(place) != 1)) + 1)
    bounds = np.append(first, length)
    return dispatch_from_chunks(total_seqlen, bounds, owner[first], cp_size, place[first])
