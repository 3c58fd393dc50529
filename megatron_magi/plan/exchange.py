"""The part of one rank in an exchange of rows between ranks."""

from __future__ import annotations

import numpy as np

from megatron_magi.mask import bands as bd
from megatron_magi.plan.partition import Ranges, Runs
from megatron_magi.plan.swaps import sum_by_rank
from megatron_magi.plan.types import Transfer


def exchange(ranges: Ranges, runs: Runs, rank: int, num_ranks: int) -> tuple[Transfer, np.ndarray, np.ndarray]:
    """The rows that one rank sends and receives, by peer, and for each peer in order.

    Totals over pairs of ranks are computed without a list of pairs, which would grow with the square of their number.

    Args:
        ranges: ranges that ranks fetch. Tokens on no run are transferred otherwise.
        runs: where ranks hold them.
        rank: this rank.
        num_ranks: number of ranks of the exchange.

    Returns:
        ``(transfer, place, length)``: without ``recv_order`` and ``levels``, and the pieces that the rank receives, in
        the order of arrival: row of the first in its buffer, and rows.
    """
    sent, _, row, length = _meet(ranges, runs.take(np.flatnonzero(runs.rank == rank)))
    order = np.lexsort((row, sent.dst))
    send_index, send_splits = rows_of(row[order], length[order]), _splits(sent.dst, length, num_ranks)
    got, src, row, length = _meet(ranges.take(np.flatnonzero(ranges.dst == rank)), runs)
    order = np.lexsort((row, src))
    recv_splits, row, length = _splits(src, length, num_ranks), row[order], length[order]
    before, ahead = runs.take(np.flatnonzero(runs.rank < rank)), ranges.take(np.flatnonzero(ranges.dst < rank))
    transfer = Transfer(
        send_index=send_index,
        send_splits=send_splits,
        recv_splits=recv_splits,
        recv_order=None,
        owner_rows=rows_of(row, length),
        first_there=_splits(ranges.dst, _rows_within(ranges, before), num_ranks),
        first_back=_splits(runs.rank, _rows_within(runs, ahead), num_ranks),
        most_rows=_most_rows(ranges, runs),
        most_recv=max(_splits(ranges.dst, _rows_within(ranges, runs), num_ranks)),
        most_send=max(_splits(runs.rank, _rows_within(runs, ranges), num_ranks)),
    )
    return transfer, got.place[order], length


def _meet(ranges: Ranges, runs: Runs) -> tuple[Ranges, np.ndarray, np.ndarray, np.ndarray]:
    """``(pieces, src, row, length)``: the ranges, cut at boundaries of runs, and the location of each piece."""
    i, j = bd.cut_intervals(ranges.start, ranges.end, runs.start, runs.end)
    start, end = np.maximum(ranges.start[i], runs.start[j]), np.minimum(ranges.end[i], runs.end[j])
    pieces = Ranges(ranges.dst[i], start, end, ranges.place[i] + start - ranges.start[i])
    return pieces, runs.rank[j], runs.local[j] + start - runs.start[j], end - start


def _rows_within(some: Ranges | Runs, others: Ranges | Runs) -> np.ndarray:
    return bd.rows_within(some.start, some.end, others.start, others.end)


def _most_rows(ranges: Ranges, runs: Runs) -> int:
    """Maximum over ranks of the rows up to the last that a rank sends."""
    if not len(ranges.start):
        return 0
    order = np.argsort(ranges.start)
    start, reach = ranges.start[order], np.maximum.accumulate(ranges.end[order])
    last = np.searchsorted(start, runs.end) - 1  # of the ranges that start before the end
    sent = np.minimum(reach[last], runs.end) - runs.start
    return int((runs.local + sent)[(last >= 0) & (sent > 0)].max(initial=0))


def rows_of(first: np.ndarray, length: np.ndarray) -> np.ndarray:
    """The rows of runs, read-only int64 ``[sum(length)]``."""
    out = bd.expand(first, length)[1]
    out.setflags(write=False)
    return out


def _splits(peer: np.ndarray, length: np.ndarray, num_ranks: int) -> tuple[int, ...]:
    return tuple(sum_by_rank(peer, length, num_ranks).tolist())
