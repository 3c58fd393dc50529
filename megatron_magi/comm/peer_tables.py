"""Tables for ranks that can access each other's memory: source and destination of rows.

Sent rows are written into the slots of the ranks that need them, ordered by source rank. Rows that a kernel waits for
itself are instead published in the own slot, each at its own row index, and fetched by the ranks that need them. Both
are signaled chunk by chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from torch import Tensor

CHUNK_ROWS = 16
"""Smallest chunk of published rows: row indices with equal quotient by this number."""
PEER_SHIFT = 32
"""A place is ``peer << PEER_SHIFT | row``."""
NUM_ARRAYS = 5
MAX_RANKS = 8
ROUTE_WORDS = 3 * MAX_RANKS + 3
"""Size of Route of ``csrc/group_collective/put.cuh``, in words of 8 bytes."""


class MostRows(NamedTuple):
    """The most rows of any rank; equal on all ranks.

    Attributes:
        held: up to the last that a rank sends in a cast.
        received: in a cast.
        sent: in a cast; received when rows go back.
    """

    held: int
    received: int
    sent: int


class PeerRows(NamedTuple):
    """The remote side of sent and received rows.

    Attributes:
        owner_rows: row of each received row in its owner's tensors, in the order of arrival, int64 ``[num_recv]``.
        first_there: for each rank, the number of rows that it receives before the first from this rank.
        first_back: for each rank, the number of rows that it sends before the first to this rank.
        most_rows: maximum over ranks of the rows up to the last that a rank sends. Equal on all ranks, as the next two.
        most_recv: maximum over ranks of received rows.
        most_send: maximum over ranks of sent rows.
    """

    owner_rows: np.ndarray
    first_there: Sequence[int]
    first_back: Sequence[int]
    most_rows: int
    most_recv: int
    most_send: int

    @property
    def most(self) -> MostRows:
        """The last three."""
        return MostRows(self.most_rows, self.most_recv, self.most_send)


class PeerTables(NamedTuple):
    """`peer_arrays` on a device, int64.

    Attributes:
        fetch: place of each row of the buffer, if rows are published.
        published: the rows that other ranks fetch, ascending.
        starts: chunk i of them is ``published[starts[i]:starts[i + 1]]``.
        counts: lengths of ``fetch`` and of ``published``, and the number of chunks.
        routes: Route of a cast, of `give_back`, and of `add`, ``[3, ROUTE_WORDS]``; zeros in a group of more than
            `MAX_RANKS`.
    """

    fetch: Tensor
    published: Tensor
    starts: Tensor
    counts: Tensor
    routes: Tensor


def peer_arrays(
    send_index: np.ndarray,
    send_splits: tuple[int, ...],
    recv_splits: tuple[int, ...],
    recv_order: np.ndarray | None,
    num_owned: int,
    peers: PeerRows,
) -> list[np.ndarray]:
    """The arrays of `PeerTables`, in their order.

    Args:
        send_index, send_splits, recv_splits, recv_order: of `GroupCastArgs`.
        num_owned: rows that receive contributions back.
        peers: the remote side.
    """
    ranks = np.arange(len(send_splits), dtype=np.int64) << PEER_SHIFT
    fetch = np.repeat(ranks, recv_splits) | peers.owner_rows
    if recv_order is not None:
        fetch = fetch[recv_order]
    published = np.flatnonzero(np.bincount(send_index))
    num_chunks = -(-(int(send_index.max(initial=-1)) + 1) // CHUNK_ROWS)
    starts = np.searchsorted(published, np.arange(num_chunks + 1) * CHUNK_ROWS).astype(np.int64)
    counts = np.array([len(fetch), len(published), num_chunks], dtype=np.int64)
    routes = np.zeros((3, ROUTE_WORDS), dtype=np.int64)
    if len(send_splits) <= MAX_RANKS:
        back = recv_splits, peers.first_back, send_splits
        routes[0] = _route(send_splits, peers.first_there, recv_splits, len(fetch))
        routes[1], routes[2] = _route(*back, len(send_index)), _route(*back, num_owned)
    return [fetch, published, starts, counts, routes.reshape(-1)]


def _route(sends: Sequence[int], there: Sequence[int], receives: Sequence[int], num_results: int) -> list[int]:
    rest = [0] * (MAX_RANKS - len(sends))
    return [
        *accumulate((*sends, *rest), initial=0),
        *there,
        *rest,
        *accumulate((*receives, *rest), initial=0),
        num_results,
    ]
