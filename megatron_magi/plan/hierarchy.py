"""A transfer in two levels: what several ranks of another node need crosses once, and is handed on inside."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from megatron_magi.mask import bands as bd
from megatron_magi.plan.types import Levels, Transfer


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
        """Some of them."""
        return Pieces(*(array[index] for array in self))


def two_levels(pieces: Pieces, rank: int, num_ranks: int, ranks_per_node: int) -> Levels:
    """The two levels of a transfer.

    Args:
        pieces: of all ranks.
        rank: whose view.
        num_ranks: of the group, a multiple of ``ranks_per_node``.
    """
    per_node, node = ranks_per_node, rank // ranks_per_node
    src_node, dst_node = pieces.src // per_node, pieces.dst // per_node
    inside = pieces.take(np.flatnonzero((src_node == node) & (dst_node == node)))
    near, near_rows = _among(_in_node(inside, per_node), rank % per_node, per_node)

    # What any rank of a node needs of a rank outside it, each row once.
    crossing = pieces.take(np.flatnonzero(src_node != dst_node))
    key = crossing.dst // per_node * num_ranks + crossing.src
    ranges, key = bd.merge_ranges(np.stack([crossing.row, crossing.row + crossing.length], axis=1), key)
    once = Pieces(key % num_ranks, key // num_ranks, ranges[:, 0], ranges[:, 1] - ranges[:, 0], np.zeros_like(key))
    mine = once.take(np.flatnonzero(once.src % per_node == rank % per_node))
    far, _ = _among(mine._replace(src=mine.src // per_node), node, num_ranks // per_node)

    arriving = once.take(np.flatnonzero(once.dst == node))
    arriving = arriving.take(np.lexsort((arriving.row, arriving.src, arriving.src % per_node)))
    before = _before(arriving.length, arriving.src % per_node)
    handed_on = crossing.take(np.flatnonzero(crossing.dst // per_node == node))
    # Where each lies in the buffer of the rank that it comes to first.
    order = np.lexsort((arriving.row, arriving.src))
    lift = int(max(arriving.row.max(initial=0), handed_on.row.max(initial=0))) + 1
    starts = (arriving.src * lift + arriving.row)[order]
    at = order[np.searchsorted(starts, handed_on.src * lift + handed_on.row, side="right") - 1]
    handed_on = handed_on._replace(row=before[at] + handed_on.row - arriving.row[at])
    relay, relay_rows = _among(_in_node(handed_on, per_node), rank % per_node, per_node)
    return Levels(per_node, near, far, relay, near_rows, relay_rows)


def _in_node(pieces: Pieces, per_node: int) -> Pieces:
    return pieces._replace(src=pieces.src % per_node, dst=pieces.dst % per_node)


def _among(pieces: Pieces, rank: int, num_ranks: int) -> tuple[Transfer, np.ndarray]:
    """What a rank sees of an exchange, and the places of the rows that it receives, in the order of arrival."""
    pieces = pieces.take(np.lexsort((pieces.row, pieces.src, pieces.dst)))
    sent, received = np.flatnonzero(pieces.src == rank), np.flatnonzero(pieces.dst == rank)
    before, ahead = np.flatnonzero(pieces.src < rank), np.flatnonzero(pieces.dst < rank)
    transfer = Transfer(
        send_index=_rows(pieces.row[sent], pieces.length[sent]),
        send_splits=_splits(pieces.dst[sent], pieces.length[sent], num_ranks),
        recv_splits=_splits(pieces.src[received], pieces.length[received], num_ranks),
        recv_order=None,
        owner_rows=_rows(pieces.row[received], pieces.length[received]),
        first_there=_splits(pieces.dst[before], pieces.length[before], num_ranks),
        first_back=_splits(pieces.src[ahead], pieces.length[ahead], num_ranks),
        most_rows=int((pieces.row + pieces.length).max(initial=0)),
        most_recv=max(_splits(pieces.dst, pieces.length, num_ranks)),
        most_send=max(_splits(pieces.src, pieces.length, num_ranks)),
    )
    return transfer, _rows(pieces.place[received], pieces.length[received])


def _before(length: np.ndarray, group: np.ndarray) -> np.ndarray:
    """Rows of the same group before each piece; pieces are sorted by group."""
    ahead = np.cumsum(length) - length
    first = np.searchsorted(group, group, side="left")
    return ahead - ahead[first] if len(ahead) else ahead


def _splits(peer: np.ndarray, length: np.ndarray, num_ranks: int) -> tuple[int, ...]:
    rows = np.zeros(num_ranks, dtype=np.int64)
    np.add.at(rows, peer, length)
    return tuple(rows.tolist())


def _rows(first: np.ndarray, length: np.ndarray) -> np.ndarray:
    out = bd.expand(first, length)[1]
    out.setflags(write=False)
    return out
