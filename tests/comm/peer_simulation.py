"""What the kernels of `megatron_magi.comm.impl.native` do with their tables, in numpy: several ranks in one process."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from megatron_magi.comm.cast_args import CastTables
from megatron_magi.comm.peer_tables import CHUNK_ROWS, MAX_RANKS, PEER_SHIFT, ROUTE_WORDS
from tests.comm.random_transfers import Transfers


class Route(NamedTuple):
    """Route of put.cuh."""

    first: np.ndarray
    there: np.ndarray
    comes: np.ndarray
    num_results: int

    @classmethod
    def of(cls, words: np.ndarray) -> Route:
        first, there, comes, num_results = np.split(words, np.cumsum([MAX_RANKS + 1, MAX_RANKS, MAX_RANKS + 1]))
        return cls(first, there, comes, int(num_results[0]))


class Rank:
    """One rank: its tables, and a slot in which a row that was not written is NaN."""

    def __init__(self, transfers: Transfers, rank: int) -> None:
        num_ranks = len(transfers.rows)
        sends = [len(rows) for rows in transfers.rows[rank]]
        receives = [len(transfers.rows[i][rank]) for i in range(num_ranks)]
        send_index = np.concatenate(transfers.rows[rank])
        tables = CastTables.of(send_index, sends, receives, transfers.recv_order[rank], transfers.peers(rank))
        _, arrays = tables.arrays()
        self.send_index, self.rows, self.starts, self.sources, *orders = arrays[:-5]
        self.recv_order, self.recv_position = orders or (None, None)
        self.fetch, self.published, self.chunk_starts, self.counts, routes = arrays[-5:]
        self.cast, self.back, self.add = map(Route.of, routes.reshape(3, ROUTE_WORDS))
        self.rank, self.num_ranks = rank, num_ranks
        self.slot = np.full(0, np.nan)
        self.chunks: set[tuple[int, int]] = set()  # by rank that wrote it

    def clear(self, most: int, shape: tuple[int, ...]) -> None:
        """Takes another slot."""
        self.slot, self.chunks = np.full((most, *shape), np.nan), set()

    def send(self, ranks: list[Rank], x: np.ndarray, index: np.ndarray | None, route: Route, shift: int) -> None:
        """Writes rows of ``x``, those of ``index`` or all, into the slots of others chunk by chunk."""
        for to in range(self.num_ranks):
            first, there, count = route.first[to], route.there[to], route.first[to + 1] - route.first[to]
            for chunk in range(there >> shift, ((there + count - 1) >> shift) + 1 if count else 0):
                rows = np.arange(max(chunk << shift, there), min((chunk + 1) << shift, there + count))
                assert np.isnan(ranks[to].slot[rows]).all() and (self.rank, chunk) not in ranks[to].chunks
                at = rows - there + first
                ranks[to].slot[rows] = x[at if index is None else index[at]]
                ranks[to].chunks.add((self.rank, chunk))

    def taken(self, row: int, route: Route, shift: int) -> np.ndarray:
        """A row of the slot, which must be in a chunk that the rank that it comes from has written."""
        source = int(np.searchsorted(route.comes, row, side="right")) - 1
        assert route.comes[source] <= row < route.comes[source + 1] and (source, row >> shift) in self.chunks
        return self.slot[row]

    def publish(self, x: np.ndarray, shift: int, most: int) -> None:
        """Puts the rows that others need in the slot, chunk by chunk."""
        self.clear(most, x.shape[1:])
        more = shift - CHUNK_ROWS.bit_length() + 1
        for chunk in range((self.counts[2] + (1 << more) - 1) >> more):
            first, last = chunk << more, min((chunk + 1) << more, self.counts[2])
            rows = self.published[self.chunk_starts[first] : self.chunk_starts[last]]
            assert (rows >> shift == chunk).all()
            if len(rows):
                self.slot[rows] = x[rows]
                self.chunks.add((self.rank, chunk))


def pulled(ranks: list[Rank], tensors: list[np.ndarray], shift: int, most: int) -> list[np.ndarray]:
    """What each rank reads of what others have published."""
    for rank, x in zip(ranks, tensors, strict=True):
        rank.publish(x, shift, most)
    found = []
    for rank in ranks:
        rows = []
        for place in rank.fetch.tolist():
            peer, row = place >> PEER_SHIFT, place & ((1 << PEER_SHIFT) - 1)
            assert (peer, row >> shift) in ranks[peer].chunks
            rows.append(ranks[peer].slot[row])
        found.append(np.array(rows).reshape(-1, *tensors[0].shape[1:]))
    return found


def cast(ranks: list[Rank], tensors: list[np.ndarray], shift: int, most: int) -> list[np.ndarray]:
    """What each rank receives."""
    for rank in ranks:
        rank.clear(most, tensors[0].shape[1:])
    for rank, x in zip(ranks, tensors, strict=True):
        rank.send(ranks, x, rank.send_index, rank.cast, shift)
    found = []
    for rank in ranks:
        order = np.arange(rank.cast.num_results) if rank.recv_order is None else rank.recv_order
        rows = [rank.taken(row, rank.cast, shift) for row in order[: rank.cast.num_results].tolist()]
        found.append(np.array(rows).reshape(-1, *tensors[0].shape[1:]))
    return found


def _send_back(ranks: list[Rank], partials: list[np.ndarray], shift: int, most: int) -> None:
    for rank in ranks:
        rank.clear(most, partials[0].shape[1:])
    for rank, x in zip(ranks, partials, strict=True):
        rank.send(ranks, x, rank.recv_position, rank.back, shift)


def give_back(ranks: list[Rank], partials: list[np.ndarray], shift: int, most: int) -> list[np.ndarray]:
    """The partial rows of each rank's sent rows, in the order in which they were sent."""
    _send_back(ranks, partials, shift, most)
    return [
        np.array([rank.taken(row, rank.back, shift) for row in range(rank.back.num_results)]).reshape(
            -1, *partials[0].shape[1:]
        )
        for rank in ranks
    ]


def add(
    ranks: list[Rank], partials: list[np.ndarray], into: list[np.ndarray], shift: int, most: int
) -> list[np.ndarray]:
    """``into`` of each rank with what came back to it."""
    _send_back(ranks, partials, shift, most)
    sums = [x.copy() for x in into]
    for rank, total in zip(ranks, sums, strict=True):
        for i in range(rank.add.num_results):
            for row in rank.sources[rank.starts[i] : rank.starts[i + 1]].tolist():
                total[rank.rows[i]] += rank.taken(row, rank.add, shift)
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
