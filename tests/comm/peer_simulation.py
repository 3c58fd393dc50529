"""What the kernels of `megatron_magi.comm.impl.native` do with their tables, in numpy: several ranks in one process."""

from __future__ import annotations

import numpy as np

from megatron_magi.comm.cast_args import CastTables
from megatron_magi.comm.peer_tables import CHUNK_ROWS, PEER_SHIFT
from tests.comm.random_transfers import Transfers


class Rank:
    """One rank: its tables, and a slot in which a row that was not published is NaN."""

    def __init__(self, transfers: Transfers, rank: int) -> None:
        num_ranks = len(transfers.rows)
        sends = [len(rows) for rows in transfers.rows[rank]]
        receives = [len(transfers.rows[i][rank]) for i in range(num_ranks)]
        send_index = np.concatenate(transfers.rows[rank])
        tables = CastTables.of(send_index, sends, receives, transfers.recv_order[rank], transfers.peers(rank))
        _, arrays = tables.arrays()
        self.rows, self.starts = arrays[1:3]
        self.fetch, self.back, self.parts, self.published, self.chunk_starts, self.counts = arrays[-6:]
        self.slot = np.full(0, np.nan)
        self.chunks: set[int] = set()

    def publish(self, x: np.ndarray, index: np.ndarray | None, shift: int, most: int) -> None:
        """Puts rows of ``x`` in the slot, those of ``index`` chunk by chunk, or all."""
        self.slot, self.chunks = np.full((most, *x.shape[1:]), np.nan), set()
        more = shift - CHUNK_ROWS.bit_length() + 1
        base = self.counts[3] if index is not None else -(-self.counts[0] // CHUNK_ROWS)
        for chunk in range((base + (1 << more) - 1) >> more):
            rows = np.arange(chunk << shift, min((chunk + 1) << shift, self.counts[0]))
            if index is not None:
                first, last = chunk << more, min((chunk + 1) << more, base)
                rows = index[self.chunk_starts[first] : self.chunk_starts[last]]
                assert (rows >> shift == chunk).all()
            if len(rows):
                self.slot[rows] = x[rows]
                self.chunks.add(chunk)


def read(ranks: list[Rank], places: np.ndarray, shift: int) -> list[np.ndarray]:
    """The rows at ``places``, each of which must be in a chunk that its owner has published."""
    found = []
    for place in places.tolist():
        peer, row = place >> PEER_SHIFT, place & ((1 << PEER_SHIFT) - 1)
        assert row >> shift in ranks[peer].chunks
        found.append(ranks[peer].slot[row])
    return found


def cast(ranks: list[Rank], tensors: list[np.ndarray], shift: int, most: int) -> list[np.ndarray]:
    """What each rank receives."""
    for rank, x in zip(ranks, tensors, strict=True):
        rank.publish(x, rank.published, shift, most)
    return [np.array(read(ranks, rank.fetch, shift)).reshape(-1, *tensors[0].shape[1:]) for rank in ranks]


def give_back(ranks: list[Rank], partials: list[np.ndarray], shift: int, most: int) -> list[np.ndarray]:
    """The partial rows of each rank's sent rows, in the order in which they were sent."""
    for rank, x in zip(ranks, partials, strict=True):
        rank.publish(x, None, shift, most)
    return [np.array(read(ranks, rank.back, shift)).reshape(-1, *partials[0].shape[1:]) for rank in ranks]


def add(
    ranks: list[Rank], partials: list[np.ndarray], into: list[np.ndarray], shift: int, most: int
) -> list[np.ndarray]:
    """``into`` of each rank with what came back to it."""
    for rank, x in zip(ranks, partials, strict=True):
        rank.publish(x, None, shift, most)
    sums = [x.copy() for x in into]
    for rank, total in zip(ranks, sums, strict=True):
        for i, row in enumerate(rank.rows[: rank.counts[2]]):
            for part in read(ranks, rank.parts[rank.starts[i] : rank.starts[i + 1]], shift):
                total[row] += part
    return sums


def expected_back(transfers: Transfers, partials: list[np.ndarray], rank: int) -> np.ndarray:
    """`give_back` by the definition of `GroupCastArgs`."""
    parts = []
    for j in range(len(transfers.rows)):
        order = transfers.recv_order[j]
        received = partials[j] if order is None else partials[j][np.argsort(order)]
        first = sum(len(transfers.rows[i][j]) for i in range(rank))
        parts.append(received[first : first + len(transfers.rows[rank][j])])
    return np.concatenate(parts)
