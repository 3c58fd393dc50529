"""Global bands -> what each rank computes and what it must fetch, for all ranks at once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_magi.mask import AttnMask
from megatron_magi.mask import bands as bd
from megatron_magi.plan.types import Dispatch


@dataclass(frozen=True, eq=False)
class Runs:
    """Maximal pieces of the sequence that lie together on one rank, in global order."""

    bounds: np.ndarray  # [num_runs + 1]
    rank: np.ndarray  # [num_runs]
    local: np.ndarray  # [num_runs]: row of the run's first token in its rank's shard

    @classmethod
    def of(cls, dispatch: Dispatch) -> Runs:
        """The runs of a dispatch."""
        return cls.of_chunks(dispatch.chunk_bounds, dispatch.chunk_rank)

    @classmethod
    def of_chunks(cls, chunk_bounds: np.ndarray, chunk_rank: np.ndarray) -> Runs:
        """The runs of chunks that are given to ranks."""
        change = np.flatnonzero(np.diff(chunk_rank)) + 1
        first = np.concatenate([[0], change])
        bounds = np.append(chunk_bounds[first], chunk_bounds[-1])
        rank = chunk_rank[first]
        length = np.diff(bounds)
        local = np.zeros(len(rank), dtype=np.int64)
        order = np.argsort(rank, kind="stable")
        ends = np.cumsum(length[order])
        starts = ends - length[order]
        rank_start = starts[np.searchsorted(rank[order], rank[order], side="left")]
        local[order] = starts - rank_start
        return cls(bounds, rank, local)


@dataclass(frozen=True, eq=False)
class RemotePieces:
    """Every token range that travels, once for each rank that needs it, sorted by (dst, start).

    ``position`` counts the rows before the piece among all that ``dst`` fetches.
    """

    dst: np.ndarray
    run: np.ndarray
    start: np.ndarray
    end: np.ndarray
    position: np.ndarray
    stage: np.ndarray  # 1..degree

    @property
    def length(self) -> np.ndarray:
        """Rows of each piece."""
        return self.end - self.start


@dataclass(frozen=True, eq=False)
class Partition:
    """Bands by rank in global coordinates, and the pieces that travel (one stage)."""

    runs: Runs
    bands: np.ndarray  # tight, each inside one run's rows
    band_run: np.ndarray
    remote: RemotePieces
    remote_rows: np.ndarray  # [cp_size]


def partition(mask: AttnMask, dispatch: Dispatch) -> Partition:
    """Gives each rank the rows it holds, and finds the keys that those rows need from others.

    A rank needs exactly the keys that at least one of its rows sees; what it does not hold
    itself is fetched, once. That is the lower bound on what any schedule must move.
    """
    runs = Runs.of(dispatch)
    pieces, run = bd.cut_rows(mask.bands, runs.bounds)
    pieces, index = bd.tighten_with_index(pieces)
    run = run[index]
    needed, dst = bd.merge_ranges(pieces[:, [bd.K0, bd.K1]], runs.rank[run])
    i, src_run = bd.cut_intervals(needed[:, 0], needed[:, 1], runs.bounds[:-1], runs.bounds[1:])
    travels = runs.rank[src_run] != dst[i]
    i, src_run = i[travels], src_run[travels]
    start = np.maximum(needed[i, 0], runs.bounds[src_run])
    end = np.minimum(needed[i, 1], runs.bounds[src_run + 1])
    dst = dst[i]
    rows = np.zeros(dispatch.cp_size, dtype=np.int64)
    np.add.at(rows, dst, end - start)
    before = np.cumsum(rows) - rows
    position = np.cumsum(end - start) - (end - start) - before[dst]
    remote = RemotePieces(dst, src_run, start, end, position, np.ones_like(dst))
    return Partition(runs, pieces, run, remote, rows)


def areas_by_place(part: Partition) -> tuple[np.ndarray, np.ndarray]:
    """Visible pairs of each rank's rows with its own keys, and with keys of others, int64 ``[cp_size]`` each."""
    runs, cp_size = part.runs, len(part.remote_rows)
    rank = runs.rank[part.band_run]
    order = np.argsort(runs.rank, kind="stable")  # runs are in global order
    lift = int(runs.bounds[-1]) + 1
    start, end = (bounds[order] + runs.rank[order] * lift for bounds in (runs.bounds[:-1], runs.bounds[1:]))
    up = rank * lift
    i, j = bd.cut_intervals(part.bands[:, bd.K0] + up, part.bands[:, bd.K1] + up, start, end)
    own = part.bands[i]
    own[:, bd.K0] = np.maximum(own[:, bd.K0], start[j] - up[i])
    own[:, bd.K1] = np.minimum(own[:, bd.K1], end[j] - up[i])
    local, total = np.zeros(cp_size, dtype=np.int64), np.zeros(cp_size, dtype=np.int64)
    np.add.at(local, rank[i], bd.areas(own))
    np.add.at(total, rank, bd.areas(part.bands))
    return local, total - local


def split_stages(part: Partition, degree: int) -> RemotePieces:
    """Deals the rows that each rank fetches to ``degree`` stages of equal length, in global order."""
    remote = part.remote
    if degree <= 1:
        return remote
    cp_size = len(part.remote_rows)
    # Lift the positions of each rank above those of the one before, so that one cut serves all.
    lift = np.cumsum(part.remote_rows) - part.remote_rows
    edges = lift[:, None] + part.remote_rows[:, None] * np.arange(degree + 1) // degree
    starts, ends = edges[:, :-1].reshape(-1), edges[:, 1:].reshape(-1)
    lo = remote.position + lift[remote.dst]
    i, segment = bd.cut_intervals(lo, lo + remote.length, starts, ends)
    # A rank with fewer rows than stages has empty segments, which nothing meets.
    keep = starts[segment] < ends[segment]
    i, segment = i[keep], segment[keep]
    cut_lo = np.maximum(lo[i], starts[segment])
    cut_hi = np.minimum(lo[i] + remote.length[i], ends[segment])
    start = remote.start[i] + cut_lo - lo[i]
    assert cp_size * degree == len(starts)
    return RemotePieces(
        dst=remote.dst[i],
        run=remote.run[i],
        start=start,
        end=start + cut_hi - cut_lo,
        position=cut_lo - lift[remote.dst[i]],
        stage=segment % degree + 1,
    )


def stage_offsets(pieces: RemotePieces, cp_size: int, degree: int) -> np.ndarray:
    """Row of each piece in the buffer of its stage: the buffer is in global order."""
    key = pieces.dst * (degree + 1) + pieces.stage
    rows = np.zeros(cp_size * (degree + 1), dtype=np.int64)
    np.add.at(rows, key, pieces.length)
    ahead = (np.cumsum(rows) - rows)[key]
    return np.cumsum(pieces.length) - pieces.length - ahead


def localise(part: Partition, pieces: RemotePieces, cp_size: int, degree: int) -> list[tuple[np.ndarray, ...]]:
    """Bands of each rank and stage in local coordinates: rows of the shard, rows of the stage's keys.

    Returns:
        For each rank a tuple of ``degree + 1`` tables, stage 0 (own keys) first.
    """
    runs = part.runs
    offset = stage_offsets(pieces, cp_size, degree)
    # Where a rank finds a global key: its own runs, and the pieces that it fetches.
    owner = np.concatenate([runs.rank, pieces.dst])
    start = np.concatenate([runs.bounds[:-1], pieces.start])
    end = np.concatenate([runs.bounds[1:], pieces.end])
    stage = np.concatenate([np.zeros_like(runs.rank), pieces.stage])
    place = np.concatenate([runs.local, offset])
    lift = owner * (int(runs.bounds[-1]) + 1)
    order = np.argsort(start + lift, kind="stable")
    owner, start, end, stage, place, lift = (a[order] for a in (owner, start, end, stage, place, lift))
    owner, start, end, stage, place, lift = _join(owner, start, end, stage, place, lift)

    rank = runs.rank[part.band_run]
    up = rank * (int(runs.bounds[-1]) + 1)
    i, j = bd.cut_intervals(part.bands[:, bd.K0] + up, part.bands[:, bd.K1] + up, start + lift, end + lift)
    out = part.bands[i]
    out[:, bd.K0] = np.maximum(out[:, bd.K0], start[j])
    out[:, bd.K1] = np.minimum(out[:, bd.K1], end[j])
    out, index = bd.tighten_with_index(out)
    i, j = i[index], j[index]
    run = part.band_run[i]
    shift(out, runs.local[run] - runs.bounds[run], place[j] - start[j])
    return _group(out, owner[j], stage[j], cp_size, degree)


def shift(bands: np.ndarray, by_q: np.ndarray, by_k: np.ndarray) -> None:
    """Moves bands in place: queries by ``by_q``, keys by ``by_k``, int64 ``[n]`` each."""
    bands[:, bd.Q0] += by_q
    bands[:, bd.Q1] += by_q
    bands[:, bd.K0] += by_k
    bands[:, bd.K1] += by_k
    for column, missing in ((bd.D_LO, -bd.NO_DIAGONAL), (bd.D_HI, bd.NO_DIAGONAL)):
        diagonal = bands[:, column]
        bands[:, column] = np.where(diagonal == missing, missing, diagonal + by_k - by_q)


def _join(owner, start, end, stage, place, lift):
    """Joins segments that touch. Buffers are in global order, so these touch where they are kept, too."""
    touch = (owner[1:] == owner[:-1]) & (stage[1:] == stage[:-1]) & (start[1:] == end[:-1])
    first = np.flatnonzero(np.append(True, ~touch))
    last = np.append(first[1:], len(owner)) - 1
    return owner[first], start[first], end[last], stage[first], place[first], lift[first]


def _group(bands, rank, stage, cp_size: int, degree: int) -> list[tuple[np.ndarray, ...]]:
    """Sorts by (rank, stage, rows, keys), joins what touches, and cuts into tables."""
    key = rank * (degree + 1) + stage
    order = np.lexsort((bands[:, bd.K0], bands[:, bd.Q1], bands[:, bd.Q0], key))
    bands, key = bands[order], key[order]
    if len(bands):
        same = np.all(bands[1:][:, [0, 1, 4, 5]] == bands[:-1][:, [0, 1, 4, 5]], axis=1)
        touch = same & (key[1:] == key[:-1]) & (bands[1:, bd.K0] == bands[:-1, bd.K1])
        first = np.flatnonzero(np.append(True, ~touch))
        last = np.append(first[1:], len(bands)) - 1
        joined = bands[first].copy()
        joined[:, bd.K1] = bands[last, bd.K1]
        bands, key = joined, key[first]
    edges = np.searchsorted(key, np.arange(cp_size * (degree + 1) + 1))
    bands.setflags(write=False)
    tables = [bands[edges[i] : edges[i + 1]] for i in range(len(edges) - 1)]
    return [tuple(tables[r * (degree + 1) : (r + 1) * (degree + 1)]) for r in range(cp_size)]
