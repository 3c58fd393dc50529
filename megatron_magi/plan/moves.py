"""Queries that ranks compute for others: where they are computed, and how their rows get there and back."""

from __future__ import annotations

import numpy as np

from megatron_magi.plan.exchange import rows_of
from megatron_magi.plan.partition import Ranges, Runs
from megatron_magi.plan.swaps import sum_by_rank
from megatron_magi.plan.transfers import transfer_of
from megatron_magi.plan.types import Dispatch, Moves


class QueryMoves:
    """The rows that are not computed by the rank that holds them (their home) but by another one (their host).

    Attributes:
        queries: all rows as ranks compute them: `Runs.local` of a host's guests follows its own rows.
        num_guests: rows that each rank computes for others, int64 ``[cp_size]``.
    """

    def __init__(self, dispatch: Dispatch, compute: Dispatch, ranks_per_node: int | None = None) -> None:
        """
        Args:
            dispatch: who holds the tokens.
            compute: who computes them: a rank for each token; the order of its rows has no effect.
            ranks_per_node: nodes, if they are distinguished.
        """
        self._num_ranks, self._ranks_per_node = dispatch.cp_size, ranks_per_node
        start, end, home, host, row = _pieces(dispatch, compute)
        moved = np.flatnonzero(home != host)
        self._start, self._end, self._home, self._host = (x[moved] for x in (start, end, home, host))
        length = self._end - self._start
        self._guest, self._returned = (_places(rank, length) for rank in (self._host, self._home))
        self.num_guests = sum_by_rank(self._host, length, dispatch.cp_size)
        local, self._home_row = row.copy(), row[moved]
        local[moved] = np.array(dispatch.shard_lengths, dtype=np.int64)[self._host] + self._guest
        self.queries = Runs(start, end, host, local)

    @property
    def any(self) -> bool:
        """Whether any row moves."""
        return len(self._start) > 0

    def digest_arrays(self) -> tuple[np.ndarray, ...]:
        """What moves where, for a hash."""
        return self._start, self._end, self._host

    def for_rank(self, rank: int) -> Moves:
        """The moves of one rank."""
        homes = Runs(self._start, self._end, self._home, self._home_row)
        hosts = Runs(self._start, self._end, self._host, self._guest)
        there, back = (
            transfer_of(_ranges(to.rank, place, source), source, rank, self._num_ranks, self._ranks_per_node)
            for source, to, place in ((homes, hosts, self._guest), (hosts, homes, self._returned))
        )
        mine = np.flatnonzero(self._home == rank)
        mine = mine[np.argsort(self._returned[mine])]
        return Moves(there, back, rows_of(self._home_row[mine], (self._end - self._start)[mine]))


def _ranges(dst: np.ndarray, place: np.ndarray, runs: Runs) -> Ranges:
    order = np.lexsort((runs.start, dst))
    return Ranges(dst[order], runs.start[order], runs.end[order], place[order])


def _pieces(dispatch: Dispatch, compute: Dispatch) -> tuple[np.ndarray, ...]:
    """``(start, end, home, host, row)`` of pieces of the sequence with one home and one host, ascending; ``row``: of
    the first token at home.

    Padding stays at home.
    """
    total, runs = dispatch.total_seqlen, Runs.of_chunks(dispatch.chunk_bounds, dispatch.chunk_rank, dispatch.chunk_row)
    inner = compute.chunk_bounds[(compute.chunk_bounds > 0) & (compute.chunk_bounds < total)]
    last = [total] if 0 < total < dispatch.padded_seqlen else []
    bounds = np.unique(np.concatenate([runs.bounds, inner, last]).astype(np.int64))
    start = bounds[:-1]
    at = np.searchsorted(runs.start, start, side="right") - 1
    home, row = runs.rank[at], runs.local[at] + start - runs.start[at]
    host = home.copy()
    real = start < total
    host[real] = compute.chunk_rank[np.searchsorted(compute.chunk_bounds, start[real], side="right") - 1]
    is_new = (np.diff(at) != 0) | (np.diff(host) != 0)
    first = np.append(0, np.flatnonzero(is_new) + 1)
    return start[first], np.append(start[first[1:]], bounds[-1]), home[first], host[first], row[first]


def _places(rank: np.ndarray, length: np.ndarray) -> np.ndarray:
    """Row of the first token of each piece in a buffer of its rank, in which pieces are in order."""
    order = np.argsort(rank, kind="stable")
    before = np.cumsum(length[order]) - length[order]
    place = np.empty_like(length)
    place[order] = before - before[np.searchsorted(rank[order], rank[order])]
    return place
