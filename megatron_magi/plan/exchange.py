"""What one rank sees of an exchange of rows between ranks."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from megatron_magi.mask import bands as bd
from megatron_magi.plan.swaps import sum_by_rank
from megatron_magi.plan.types import Transfer


class Pieces(NamedTuple):
    """Rows that travel, in runs; int64 ``[num_pieces]`` each.

    Attributes:
        src, dst: ranks.
        row: of the first in the tensors of ``src``.
        length: rows.
        place: row of the first in the buffer of ``dst``.
    """

    src: np.ndarray
    dst: np.ndarray
    row: np.ndarray
    length: np.ndarray
    place: np.ndarray

    def take(self, index: np.ndarray) -> Pieces:
        """The pieces at ``index``."""
        return Pieces(*(array[index] for array in self))


def exchange(pieces: Pieces, rank: int, num_ranks: int) -> tuple[Transfer, Pieces]:
    """What one rank sends and receives: rows to each rank in turn, and to each in their order.

    Args:
        pieces: of all ranks, in any order. They fill the buffer of each rank.
        rank: whose view.
        num_ranks: of the exchange.

    Returns:
        ``(transfer, arriving)``: without ``recv_order`` and ``levels``, and the pieces that the rank receives, in the
        order of arrival.
    """
    sent, arriving = (pieces.take(np.flatnonzero(peer == rank)) for peer in (pieces.src, pieces.dst))
    sent = sent.take(np.lexsort((sent.row, sent.dst)))
    arriving = arriving.take(np.lexsort((arriving.row, arriving.src)))
    before, ahead = (np.flatnonzero(peer < rank) for peer in (pieces.src, pieces.dst))
    transfer = Transfer(
        send_index=rows_of(sent.row, sent.length),
        send_splits=_splits(sent.dst, sent.length, num_ranks),
        recv_splits=_splits(arriving.src, arriving.length, num_ranks),
        recv_order=None,
        owner_rows=rows_of(arriving.row, arriving.length),
        first_there=_splits(pieces.dst[before], pieces.length[before], num_ranks),
        first_back=_splits(pieces.src[ahead], pieces.length[ahead], num_ranks),
        most_rows=int((pieces.row + pieces.length).max(initial=0)),
        most_recv=max(_splits(pieces.dst, pieces.length, num_ranks)),
        most_send=max(_splits(pieces.src, pieces.length, num_ranks)),
    )
    return transfer, arriving


def rows_of(first: np.ndarray, length: np.ndarray) -> np.ndarray:
    """Runs of rows one by one, read-only int64 ``[sum(length)]``."""
    out = bd.expand(first, length)[1]
    out.setflags(write=False)
    return out


def _splits(peer: np.ndarray, length: np.ndarray, num_ranks: int) -> tuple[int, ...]:
    return tuple(sum_by_rank(peer, length, num_ranks).tolist())
