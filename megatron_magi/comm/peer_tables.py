"""Tables for ranks that read each other's memory: where each row lies that a rank fetches, or gets back.

A rank publishes the rows that others need, each at its own number: rows of its shard in a cast, rows of its buffer in
a reduction. It says so chunk by chunk, and the others read rows as soon as their chunk is there.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from torch import Tensor

CHUNK_ROWS = 16
"""Rows that are published together, at least: those of which the numbers divided by this are equal."""
PEER_SHIFT = 32
"""A place is ``peer << PEER_SHIFT | row``."""
NUM_ARRAYS = 6


class PeerRows(NamedTuple):
    """The other side of each row that travels.

    Attributes:
        owner_rows: row of each received row in its owner's tensors, in the order of arrival, int64 ``[num_recv]``.
        buffer_rows: row of each sent row in its destination's buffer, int64 ``[num_send]``.
        most_rows: of any rank: rows up to the last that it sends. Equal on all ranks, like ``most_recv``.
        most_recv: of any rank: rows that it receives.
    """

    owner_rows: np.ndarray
    buffer_rows: np.ndarray
    most_rows: int
    most_recv: int


class PeerTables(NamedTuple):
    """`peer_arrays` on a device, int64, and the bounds of `PeerRows`.

    Attributes:
        fetch: place of each row of the buffer.
        back: place of the partial row of each sent row.
        parts: the same in the order of `Arrivals.sources`.
        published: the rows that others fetch, ascending.
        starts: chunk i of them is ``published[starts[i]:starts[i + 1]]``.
        counts: lengths of ``fetch``, ``back``, `Arrivals.rows`, and the number of chunks.
    """

    fetch: Tensor
    back: Tensor
    parts: Tensor
    published: Tensor
    starts: Tensor
    counts: Tensor
    most_rows: int
    most_recv: int


def peer_arrays(
    send_index: np.ndarray,
    send_splits: tuple[int, ...],
    recv_splits: tuple[int, ...],
    recv_order: np.ndarray | None,
    sources: np.ndarray,
    peers: PeerRows,
) -> list[np.ndarray]:
    """The arrays of `PeerTables`, in their order.

    Args:
        send_index, send_splits, recv_splits, recv_order: of `GroupCastArgs`.
        sources: of `Arrivals`.
        peers: the other side.
    """
    ranks = np.arange(len(send_splits), dtype=np.int64) << PEER_SHIFT
    fetch = np.repeat(ranks, recv_splits) | peers.owner_rows
    if recv_order is not None:
        fetch = fetch[recv_order]
    back = np.repeat(ranks, send_splits) | peers.buffer_rows
    published = np.unique(send_index)
    num_chunks = -(-(int(send_index.max(initial=-1)) + 1) // CHUNK_ROWS)
    starts = np.searchsorted(published, np.arange(num_chunks + 1) * CHUNK_ROWS).astype(np.int64)
    counts = np.array([len(fetch), len(back), len(published), num_chunks], dtype=np.int64)
    return [fetch, back, back[sources], published, starts, counts]
