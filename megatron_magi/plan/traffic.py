"""Rows that ranks would have to fetch, counted in whole blocks of keys."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from megatron_magi.mask import AttnMask
from megatron_magi.mask import bands as bd
from megatron_magi.plan.chunks import needed_blocks


class Start(NamedTuple):
    """Start of a search for a dispatch.

    Attributes:
        rank: rank of the chunks that are placed at the start, -1 for others; int64 ``[num_chunks]``.
        most: load up to which other chunks are placed on a rank.
        least: smallest limit of the load for which dispatches found from this start are candidates.
    """

    rank: np.ndarray
    most: int
    least: int


class Traffic:
    """The blocks of keys that the queries of each chunk need (see `needed_blocks`); ``needs``: these, if known.

    Attributes:
        first, needed: as `needed_blocks` returns them.
        block: block of each chunk, int64 ``[num_chunks]``.
        chunk_rows: rows of each chunk, int64 ``[num_chunks]``.
        block_rows: rows of each block, int64 ``[num_blocks]``.
    """

    def __init__(
        self,
        mask: AttnMask,
        bounds: np.ndarray,
        cp_size: int,
        needs: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None,
    ) -> None:
        self.first, self.needed, self.block = needed_blocks(mask, bounds, cp_size) if needs is None else needs
        self.chunk_rows = np.diff(bounds)
        self.block_rows = np.zeros(int(self.block[-1]) + 1, dtype=np.int64)
        np.add.at(self.block_rows, self.block, self.chunk_rows)

    def needs(self, chunk: int) -> np.ndarray:
        """Blocks that a chunk needs, ascending."""
        return self.needed[self.first[chunk] : self.first[chunk + 1]]

    def needs_of(self, chunks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """``(i, block)``: the blocks that each of ``chunks`` needs, one after the other."""
        i, at = bd.expand(self.first[chunks], self.first[chunks + 1] - self.first[chunks])
        return i, self.needed[at]


class SearchInput(NamedTuple):
    """What `affinity.search` takes.

    Attributes:
        traffic: what chunks need.
        area: of each chunk, int64 ``[num_chunks]``.
        balanced: a dispatch, which gives the number of chunks of each rank.
        starts: dispatches of some chunks, each of which is completed and repaired.
        targets: loads to repair to, one after the other, decreasing.
        limits: of the load, for each of which the best dispatch is sought.
    """

    traffic: Traffic
    area: np.ndarray
    balanced: np.ndarray
    starts: list[Start]
    targets: list[int]
    limits: list[int]


class Holdings:
    """How many chunks of each rank need a block, and how many of its rows the rank holds: ``[cp_size, num_blocks]``.

    Attributes:
        fetched: rows that all ranks fetch together: of each block that one of their chunks needs, what they
            do not hold.
    """

    def __init__(self, traffic: Traffic, rank: np.ndarray, cp_size: int) -> None:
        self._traffic = traffic
        shape = cp_size, len(traffic.block_rows)
        self._users, self._held = np.zeros(shape, dtype=np.int32), np.zeros(shape, dtype=np.int32)
        i, block = traffic.needs_of(np.arange(len(rank)))
        np.add.at(self._users, (rank[i], block), 1)
        np.add.at(self._held, (rank, traffic.block), traffic.chunk_rows)
        self.fetched = int(((self._users > 0) * (traffic.block_rows - self._held)).sum())

    def swap(self, rank: np.ndarray, one: int, other: int) -> None:
        """Exchanges the ranks of two chunks; ``rank`` is that of each chunk before."""
        t = self._traffic
        self.fetched += int(self.swap_costs(rank, np.array([one]), np.array([other]))[0])
        for r, out, into in ((rank[one], one, other), (rank[other], other, one)):
            self._users[r, t.needs(out)] -= 1
            self._users[r, t.needs(into)] += 1
            self._held[r, t.block[out]] -= t.chunk_rows[out]
            self._held[r, t.block[into]] += t.chunk_rows[into]

    def nearest(self, chunk: int, rank: int) -> int:
        """The rank, other than ``rank``, that holds or fetches the most of the blocks that ``chunk`` needs."""
        needs = self._traffic.needs(chunk)
        there = (self._users[:, needs] > 0) | (self._held[:, needs] > 0)
        rows = there @ self._traffic.block_rows[needs]
        rows[rank] = -1
        return int(np.argmax(rows))

    def swap_costs(self, rank: np.ndarray, one: np.ndarray, other: np.ndarray) -> np.ndarray:
        """Change in the rows that the two ranks of each pair of chunks fetch together, if these are swapped."""
        t = self._traffic
        out, into = np.concatenate([one, other]), np.concatenate([other, one])
        side = np.arange(len(out))
        shape = len(out), len(t.block_rows)
        users, held, seen = np.zeros(shape, np.int8), np.zeros(shape, np.int32), np.zeros(shape, bool)
        i, blocks = t.needs_of(out)
        j, more = t.needs_of(into)
        users[i, blocks] -= 1
        users[j, more] += 1
        held[side, t.block[out]] -= t.chunk_rows[out]
        held[side, t.block[into]] += t.chunk_rows[into]
        for pair in ((i, blocks), (j, more), (side, t.block[out]), (side, t.block[into])):
            seen[pair] = True
        s, b = np.nonzero(seen)
        r = rank[out[s]]
        n, missing = self._users[r, b], t.block_rows[b] - self._held[r, b]
        change = np.where(n + users[s, b] > 0, missing - held[s, b], 0) - np.where(n > 0, missing, 0)
        cost = np.zeros(len(out), dtype=np.int64)
        np.add.at(cost, s, change)
        return cost[: len(one)] + cost[len(one) :]
