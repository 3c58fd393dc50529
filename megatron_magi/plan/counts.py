"""Counts of what the ranks of a dispatch compute and send, from which its time is predicted (`predict`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from megatron_magi.mask import bands as bd
from megatron_magi.plan.chunks import ChunkedMask
from megatron_magi.plan.partition import Runs, from_others
from megatron_magi.plan.swaps import sum_by_rank


class Work(NamedTuple):
    """What ranks compute.

    A *piece* is the part of one band in the rows of one run; its own keys, and its fetched keys, are contiguous on a
    rank. Rows and keys are counted once for each piece.

    Attributes:
        area: visible pairs.
        rows: rows that see some of these keys.
        keys: keys that are seen.
        row_edges: rows times the diagonals that cut their piece.
        key_edges: keys times these.
        starts: different first rows of pieces.
        tallest: most rows that see the same key, assuming that a key of a piece is seen by all its rows, or by as many
            as fit between its diagonals.
    """

    area: np.ndarray
    rows: np.ndarray
    keys: np.ndarray
    row_edges: np.ndarray
    key_edges: np.ndarray
    starts: np.ndarray
    tallest: np.ndarray

    def with_fetched(self, fetched: Work) -> Work:
        """That of one launch over own keys, of which this is, and fetched ones: each row is counted once."""
        both = Work(*(a + b for a, b in zip(self, fetched, strict=True)))
        most = Work(*(np.maximum(a, b) for a, b in zip(self, fetched, strict=True)))
        return both._replace(rows=most.rows, starts=most.starts, tallest=most.tallest)


class Counts(NamedTuple):
    """Counts of a dispatch, int64 ``[2, cp_size]`` each.

    Attributes:
        work: with own keys, and with fetched ones.
        received: rows that a rank fetches from its own node, and from others.
        sent: rows that it sends.
    """

    work: Work
    received: np.ndarray
    sent: np.ndarray

    @classmethod
    def of_table(cls, table: Iterable[np.ndarray]) -> Counts:
        """The inverse of `table`."""
        *work, received, sent = table
        return cls(Work(*work), received, sent)

    def table(self) -> list[np.ndarray]:
        """All counts, those of the work first."""
        return [*self.work, self.received, self.sent]

    def map(self, function: Callable[[np.ndarray], np.ndarray]) -> Counts:
        """What ``function`` makes of each."""
        return Counts.of_table(map(function, self.table()))


def count(chunked: ChunkedMask, rank: np.ndarray, ranks_per_node: int, host: np.ndarray | None = None) -> Counts:
    """Counts the work and the traffic of a dispatch without making its plan.

    Args:
        rank: of each chunk, int64 ``[num_chunks]``.
        ranks_per_node: number of consecutive ranks that share a node.
        host: rank that computes the queries of each chunk, int64 ``[num_chunks]``; ``rank`` when None. The traffic is
            that of keys.
    """
    mask, bounds, cp_size = chunked
    runs = Runs.of_chunks(bounds, rank)
    host = rank if host is None else host
    first = np.flatnonzero((np.diff(rank, prepend=-1) != 0) | (np.diff(host, prepend=-1) != 0))
    pieces, run = bd.cut_rows(mask.bands, np.append(bounds[first], bounds[-1]))
    pieces, index = bd.tighten_with_index(pieces)
    dst = host[first[run[index]]]
    own, fetched = _spans(pieces, dst, runs)
    counts = np.zeros((len(Work._fields), 2, cp_size), dtype=np.int64)
    for place, (spans, area, keys) in enumerate((own, fetched)):
        _count_place(counts[:, place], pieces, dst, spans, area, keys)
    return Counts(Work(*counts), *_count_travel(pieces, dst, runs, cp_size, ranks_per_node))


def count_all(chunked: ChunkedMask, ranks: np.ndarray, ranks_per_node: int, hosts: np.ndarray | None = None) -> Counts:
    """`count` of several dispatches, int64 ``[num_dispatches, 2, cp_size]`` each; ``ranks`` and ``hosts``: int64
    ``[num_dispatches, num_chunks]``.
    """
    pairs = zip(ranks, ranks if hosts is None else hosts, strict=True)
    counted = [count(chunked, rank, ranks_per_node, host).table() for rank, host in pairs]
    return Counts.of_table(np.stack(counted, axis=1))


def count_moves(
    bounds: np.ndarray, home: np.ndarray, hosts: np.ndarray, cp_size: int, ranks_per_node: int
) -> tuple[np.ndarray, np.ndarray]:
    """Rows of queries that ranks receive to compute them for others, and that they send: inside a node, and between
    nodes; int64 ``[num_dispatches, 2, cp_size]`` each.

    Args:
        bounds: of the chunks, int64 ``[num_chunks + 1]``.
        home: rank that holds each, int64 ``[num_chunks]``.
        hosts: rank that computes each, int64 ``[num_dispatches, num_chunks]``.
        ranks_per_node: number of consecutive ranks that share a node.
    """
    received, sent = (np.zeros((len(hosts), 2, cp_size), dtype=np.int64) for _ in range(2))
    which, chunk = np.nonzero(hosts != home)
    to, of, rows = hosts[which, chunk], home[chunk], np.diff(bounds)[chunk]
    is_far = (to // ranks_per_node != of // ranks_per_node).astype(np.int64)
    np.add.at(received, (which, is_far, to), rows)
    np.add.at(sent, (which, is_far, of), rows)
    return received, sent


def _spans(pieces: np.ndarray, dst: np.ndarray, runs: Runs) -> tuple[tuple, tuple]:
    """For own keys, and for keys of other ranks: first and past-the-last key, visible area and number of keys of each
    piece.
    """
    num, (start, end, lift) = len(pieces), runs.by_rank()
    up = dst * lift
    i, j = bd.cut_intervals(pieces[:, bd.K0] + up, pieces[:, bd.K1] + up, start, end)
    part = pieces[i]
    part[:, bd.K0] = np.maximum(part[:, bd.K0], start[j] - up[i])
    part[:, bd.K1] = np.minimum(part[:, bd.K1], end[j] - up[i])
    area, keys = np.zeros(num, dtype=np.int64), np.zeros(num, dtype=np.int64)
    np.add.at(area, i, bd.areas(part))
    np.add.at(keys, i, part[:, bd.K1] - part[:, bd.K0])
    own, fetched = (np.stack([pieces[:, bd.K0], pieces[:, bd.K1]], axis=1) for _ in range(2))
    # Parts are in the order of pieces; between two runs of a rank there are always keys of others.
    at = np.flatnonzero(np.diff(i, prepend=-1))
    last = np.append(at, len(i))[1:] - 1
    own[i[at], 0], own[i[at], 1] = part[at, bd.K0], part[last, bd.K1]
    from_start, to_end = own[i[at], 0] == fetched[i[at], 0], own[i[at], 1] == fetched[i[at], 1]
    fetched[i[at[from_start]], 0] = part[at[from_start], bd.K1]
    fetched[i[at[to_end]], 1] = part[last[to_end], bd.K0]
    total = pieces[:, bd.K1] - pieces[:, bd.K0]
    return (own, area, keys), (fetched, bd.areas(pieces) - area, total - keys)


def _count_place(
    counts: np.ndarray, pieces: np.ndarray, dst: np.ndarray, spans: np.ndarray, area: np.ndarray, keys: np.ndarray
) -> None:
    """Adds the counts of pieces for own or for fetched keys, within ``spans``; ``counts``: ``[7, cp_size]``."""
    some = np.flatnonzero(keys)
    seen = pieces[some]
    seen[:, [bd.K0, bd.K1]] = spans[some]
    seen, index = bd.tighten_with_index(seen)
    some = some[index]
    rank, rows = dst[some], seen[:, bd.Q1] - seen[:, bd.Q0]
    edges = (seen[:, bd.D_LO] != -bd.NO_DIAGONAL).astype(np.int64) + (seen[:, bd.D_HI] != bd.NO_DIAGONAL)
    for row, values in enumerate((area[some], rows, keys[some], rows * edges, keys[some] * edges)):
        np.add.at(counts[row], rank, values)
    lift = 1 + int(seen[:, bd.Q0].max(initial=0))
    np.add.at(counts[5], np.unique(rank * lift + seen[:, bd.Q0]) // lift, 1)
    # A piece adds its rows to those that see a key at its first key, and removes them after its last one.
    rows = np.minimum(rows, seen[:, bd.D_HI] - seen[:, bd.D_LO])
    key, change = np.concatenate([seen[:, bd.K0], seen[:, bd.K1]]), np.concatenate([rows, -rows])
    rank = np.concatenate([rank, rank])
    order = np.lexsort((change, key, rank))
    np.maximum.at(counts[6], rank[order], np.cumsum(change[order]))


def _count_travel(
    pieces: np.ndarray, dst: np.ndarray, runs: Runs, cp_size: int, ranks_per_node: int
) -> tuple[np.ndarray, np.ndarray]:
    """Rows that ranks receive and send, ``[2, cp_size]`` each: inside a node, and between nodes."""
    to, start, end = from_others(pieces[:, [bd.K0, bd.K1]], dst, runs)
    lift = int(runs.end[-1]) + 1
    up, run_up = (rank // ranks_per_node * lift for rank in (to, runs.rank))
    near = bd.rows_within(start + up, end + up, runs.start + run_up, runs.end + run_up)
    near_sent = bd.rows_within(runs.start + run_up, runs.end + run_up, start + up, end + up)
    far, far_sent = end - start - near, bd.rows_within(runs.start, runs.end, start, end) - near_sent
    received, sent = (
        np.stack([sum_by_rank(rank, rows, cp_size) for rows in both])
        for rank, both in ((to, (near, far)), (runs.rank, (near_sent, far_sent)))
    )
    return received, sent
