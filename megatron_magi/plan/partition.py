"""Partition of global bands: what each rank computes and which keys it must fetch."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from megatron_magi.mask import AttnMask
from megatron_magi.mask import bands as bd
from megatron_magi.plan.swaps import sum_by_rank
from megatron_magi.plan.types import Dispatch


class Runs(NamedTuple):
    """Contiguous pieces of the sequence on one rank: disjoint and ascending, int64 ``[num_runs]`` each.

    Attributes:
        start, end: tokens.
        rank: rank that holds them.
        local: row of the first token in the tensors of ``rank``.
    """

    start: np.ndarray
    end: np.ndarray
    rank: np.ndarray
    local: np.ndarray

    @classmethod
    def of_chunks(cls, chunk_bounds: np.ndarray, chunk_rank: np.ndarray, chunk_row: np.ndarray | None = None) -> Runs:
        """The maximal runs of chunks; they cover the sequence. Rows ascend with tokens unless ``chunk_row`` is given:
        the row of each chunk's first token.
        """
        is_new = np.diff(chunk_rank) != 0
        if chunk_row is not None:
            is_new |= np.diff(chunk_row) != np.diff(chunk_bounds)[:-1]
        first = np.append(0, np.flatnonzero(is_new) + 1)
        bounds = np.append(chunk_bounds[first], chunk_bounds[-1])
        rank = chunk_rank[first]
        by_rank = np.argsort(rank, kind="stable")
        local = rows_of_chunks(bounds, rank, by_rank) if chunk_row is None else chunk_row[first]
        return cls(bounds[:-1], bounds[1:], rank, local)

    @property
    def bounds(self) -> np.ndarray:
        """Boundaries of runs that cover the sequence, int64 ``[num_runs + 1]``."""
        return np.append(self.start, self.end[-1])

    def take(self, index: np.ndarray) -> Runs:
        """The runs at ``index``."""
        return Runs(*(array[index] for array in self))

    def by_rank(self) -> tuple[np.ndarray, np.ndarray, int]:
        """``(start, end, lift)`` sorted by rank, with an offset of ``r * lift`` for rank r, so that one binary search
        serves all ranks.
        """
        order, lift = np.argsort(self.rank, kind="stable"), int(self.end[-1]) + 1
        up = self.rank[order] * lift
        return self.start[order] + up, self.end[order] + up, lift


def rows_of_chunks(bounds: np.ndarray, rank: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Row of the first token of each chunk in the shard of its rank, int64 ``[num_chunks]``.

    Args:
        bounds: of the chunks, int64 ``[num_chunks + 1]``.
        rank: of each, int64 ``[num_chunks]``.
        order: the chunks by rank, and within a rank in order of rows.
    """
    length, by_rank = np.diff(bounds)[order], rank[order]
    starts = np.cumsum(length) - length
    row = np.empty(len(rank), dtype=np.int64)
    row[order] = starts - starts[np.searchsorted(by_rank, by_rank, side="left")]
    return row


class Ranges(NamedTuple):
    """Tokens that ranks fetch, sorted by (dst, start) and disjoint for each; int64 ``[num_ranges]`` each.

    Attributes:
        dst: rank that fetches them.
        start, end: tokens, on one rank or several.
        place: row of the first token in the buffer of ``dst``.
    """

    dst: np.ndarray
    start: np.ndarray
    end: np.ndarray
    place: np.ndarray

    def take(self, index: np.ndarray) -> Ranges:
        """The ranges at ``index``."""
        return Ranges(*(array[index] for array in self))


@dataclass(frozen=True, eq=False)
class Partition:
    """Bands by rank in global coordinates, and the ranges to fetch, in one stage.

    Its size grows with the number of runs of the sequence, not with the pairs of ranks that exchange rows.
    """

    runs: Runs  # of keys
    queries: Runs  # as ranks compute them: `runs` where all are computed by the ranks that hold them
    bands: np.ndarray  # tight, each inside the rows of one run of queries
    band_run: np.ndarray  # of queries
    remote: Ranges
    remote_rows: np.ndarray  # [cp_size]


def partition(mask: AttnMask, dispatch: Dispatch, queries: Runs | None = None) -> Partition:
    """Assigns each rank its rows, and finds the keys that these rows need from other ranks.

    A rank needs exactly the keys that at least one of the rows that it computes sees, and fetches those that it does
    not hold once: the minimum for any schedule.

    Args:
        mask: of the whole sequence.
        dispatch: who holds the keys.
        queries: runs of the sequence on the ranks that compute its queries; those of ``dispatch`` when None.
    """
    runs = Runs.of_chunks(dispatch.chunk_bounds, dispatch.chunk_rank, dispatch.chunk_row)
    queries = runs if queries is None else queries
    pieces, run = bd.cut_rows(mask.bands, queries.bounds)
    pieces, index = bd.tighten_with_index(pieces)
    run = run[index]
    dst, start, end = from_others(pieces[:, [bd.K0, bd.K1]], queries.rank[run], runs)
    rows = sum_by_rank(dst, end - start, dispatch.cp_size)
    before = np.cumsum(rows) - rows
    place = np.cumsum(end - start) - (end - start) - before[dst]
    return Partition(runs, queries, pieces, run, Ranges(dst, start, end, place), rows)


def whole(mask: AttnMask, dispatch: Dispatch) -> Partition | None:
    """The partition of one rank that holds all tokens in their order, whose bands are also those of its rows; None for
    other dispatches, and for masks whose bands would have to be put in order.
    """
    if dispatch.cp_size > 1 or len(dispatch.ranges[0]) > 1:
        return None
    bands, zero = mask.bands, np.zeros(1, dtype=np.int64)
    if (bands[1:, bd.Q0] <= bands[:-1, bd.Q0]).any():
        return None
    runs, nothing = Runs(zero, np.array([dispatch.padded_seqlen]), zero, zero), zero[:0]
    band_run = np.zeros(len(bands), dtype=np.int64)
    return Partition(runs, runs, bands, band_run, Ranges(nothing, nothing, nothing, nothing), zero)


def from_others(needed: np.ndarray, rank: np.ndarray, runs: Runs) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The tokens that ranks need and do not hold.

    Args:
        needed: half-open ranges in any order, int64 ``[n, 2]``.
        rank: rank that needs each, int64 ``[n]``.
        runs: runs that cover the sequence.

    Returns:
        ``(rank, start, end)``: disjoint, non-adjacent ranges, sorted by (rank, start).
    """
    needed, rank = bd.merge_ranges(needed, rank)
    start, end, lift = runs.by_rank()
    start, end = np.append(0, end), np.append(start, np.iinfo(np.int64).max)  # of the gaps between, which others hold
    start, end = start[start < end], end[start < end]
    up = rank * lift
    i, j = bd.cut_intervals(needed[:, 0] + up, needed[:, 1] + up, start, end)
    up = up[i]
    return rank[i], np.maximum(needed[i, 0], start[j] - up), np.minimum(needed[i, 1], end[j] - up)


def areas_by_place(part: Partition) -> tuple[np.ndarray, np.ndarray]:
    """Visible pairs of each rank's rows with its own keys, and with keys of others, int64 ``[cp_size]`` each."""
    cp_size, rank = len(part.remote_rows), part.queries.rank[part.band_run]
    start, end, lift = part.runs.by_rank()
    up = rank * lift
    i, j = bd.cut_intervals(part.bands[:, bd.K0] + up, part.bands[:, bd.K1] + up, start, end)
    own = part.bands[i]
    own[:, bd.K0] = np.maximum(own[:, bd.K0], start[j] - up[i])
    own[:, bd.K1] = np.minimum(own[:, bd.K1], end[j] - up[i])
    areas = bd.areas(np.concatenate([own, part.bands]))
    local, total = sum_by_rank(rank[i], areas[: len(own)], cp_size), sum_by_rank(rank, areas[len(own) :], cp_size)
    return local, total - local


def split_stages(part: Partition, degree: int) -> tuple[Ranges, ...]:
    """Divides the rows that each rank fetches into ``degree`` stages of equal length, in global order."""
    if degree <= 1:
        return (part.remote,) * degree
    dst, start, end, first = part.remote
    stages = []
    for stage in range(degree):
        low, high = (part.remote_rows * edge // degree for edge in (stage, stage + 1))
        begin, stop = np.maximum(first, low[dst]), np.minimum(first + end - start, high[dst])
        some = np.flatnonzero(begin < stop)
        to, moved = dst[some], (start - first)[some]
        stages.append(Ranges(to, begin[some] + moved, stop[some] + moved, begin[some] - low[to]))
    return tuple(stages)


def localise(part: Partition, stages: tuple[Ranges, ...], rank: int) -> tuple[np.ndarray, ...]:
    """Bands of one rank in local coordinates: rows of the shard and guests times rows of the stage's keys.

    Returns:
        A table for each stage, that of stage 0 (own keys) first.
    """
    own = part.runs.take(np.flatnonzero(part.runs.rank == rank))
    fetched = [stage.take(np.flatnonzero(stage.dst == rank)) for stage in stages]
    # Location of a global key on this rank: in its own runs, or in the ranges that it fetches.
    start, end = (np.concatenate([getattr(some, name) for some in (own, *fetched)]) for name in ("start", "end"))
    place = np.concatenate([own.local, *(some.place for some in fetched)])
    stage = np.repeat(np.arange(len(stages) + 1), [len(some.start) for some in (own, *fetched)])
    order = np.argsort(start, kind="stable")
    start, end, place, stage = (array[order] for array in (start, end, place, stage))

    mine = np.flatnonzero(part.queries.rank[part.band_run] == rank)
    bands, run = part.bands[mine], part.band_run[mine]
    i, j = bd.cut_intervals(bands[:, bd.K0], bands[:, bd.K1], start, end)
    out = bands[i]
    out[:, bd.K0] = np.maximum(out[:, bd.K0], start[j])
    out[:, bd.K1] = np.minimum(out[:, bd.K1], end[j])
    out, index = bd.tighten_with_index(out)
    run, j = run[i[index]], j[index]
    shift(out, part.queries.local[run] - part.queries.start[run], place[j] - start[j])
    return _group(out, stage[j], len(stages))


def shift(bands: np.ndarray, by_q: np.ndarray, by_k: np.ndarray) -> None:
    """Moves bands in place: queries by ``by_q``, keys by ``by_k``, int64 ``[n]`` each."""
    bands[:, bd.Q0] += by_q
    bands[:, bd.Q1] += by_q
    bands[:, bd.K0] += by_k
    bands[:, bd.K1] += by_k
    for column, missing in ((bd.D_LO, -bd.NO_DIAGONAL), (bd.D_HI, bd.NO_DIAGONAL)):
        diagonal = bands[:, column]
        bands[:, column] = np.where(diagonal == missing, missing, diagonal + by_k - by_q)


def _group(bands: np.ndarray, stage: np.ndarray, degree: int) -> tuple[np.ndarray, ...]:
    """Sorts by (stage, rows, keys), joins adjacent bands, and splits into tables."""
    order = np.lexsort((bands[:, bd.K0], bands[:, bd.Q1], bands[:, bd.Q0], stage))
    bands, stage = bands[order], stage[order]
    if len(bands):
        same = np.all(bands[1:][:, [0, 1, 4, 5]] == bands[:-1][:, [0, 1, 4, 5]], axis=1)
        touch = same & (stage[1:] == stage[:-1]) & (bands[1:, bd.K0] == bands[:-1, bd.K1])
        first = np.flatnonzero(np.append(True, ~touch))
        last = np.append(first[1:], len(bands)) - 1
        joined = bands[first].copy()
        joined[:, bd.K1] = bands[last, bd.K1]
        bands, stage = joined, stage[first]
    edges = np.searchsorted(stage, np.arange(degree + 2)).tolist()
    return tuple(bands[low:high] for low, high in pairwise(edges))
