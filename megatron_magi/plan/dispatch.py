"""Chunk -> rank: the dispatch algorithms."""

from __future__ import annotations

import heapq
from collections.abc import Callable

import numpy as np

from megatron_magi.backends.costs import DEFAULT
from megatron_magi.config import DispatchConfig, OverlapConfig
from megatron_magi.plan import cpp_partition, cpp_predict, cpp_solver
from megatron_magi.plan.affinity import affinity
from megatron_magi.plan.chunks import ChunkedMask, chunk_areas
from megatron_magi.plan.counts import count_all
from megatron_magi.plan.predict import Prediction, predict_all
from megatron_magi.plan.swaps import refine, sum_by_rank
from megatron_magi.plan.traffic import Traffic

_EVEN_ENOUGH = 1
"""Thousandths of the mean area: a load this close to the mean is good enough to move no more keys for balance."""
_WIDER = (1.03, 1.1)
"""Tolerances that are tried in addition to the requested one. From 1.2 on a search has more starts."""
_OTHERS = ("min_heap", "zigzag", "sequential")
_ALIKE = 1.01
"""Predictions within this ratio count as equal: their error is 5 % and more."""


def assign_chunks(
    chunked: ChunkedMask, config: DispatchConfig, overlap: OverlapConfig, ranks_per_node: int | None = None
) -> np.ndarray:
    """The rank of each chunk, int64 ``[num_chunks]``.

    Ranks get equally many chunks, or numbers that differ by one where the count does not
    divide (only with ``uneven_shard``).

    Args:
        overlap: how stages will be chosen, and the shape of the attention, for the times that ``auto`` predicts.
        ranks_per_node: see `CommConfig`; those of the rates when None.
    """
    found = candidates(chunked, config)
    if len(found) == 1:
        return next(iter(found.values()))
    return found[fastest(predictions(found, chunked, config, overlap, ranks_per_node))]


def candidates(chunked: ChunkedMask, config: DispatchConfig) -> dict[str, np.ndarray]:
    """The candidate dispatches by name: one, or with ``auto`` several that differ from each other.

    The names are those of `DispatchConfig.algorithm`, and ``affinity`` with its tolerance. That of
    ``config.balance_tolerance`` is the first.
    """
    mask, bounds, cp_size = chunked
    num_chunks, algorithm = len(bounds) - 1, config.algorithm
    if cp_size == 1:
        return {algorithm: np.zeros(num_chunks, dtype=np.int64)}
    capacity = np.full(cp_size, num_chunks // cp_size, dtype=np.int64)
    capacity[: num_chunks % cp_size] += 1
    found: dict[str, np.ndarray] = {}
    use_cpp = cpp_solver.chosen(config.planner)
    area, needs = cpp_partition.needed_blocks(mask, bounds, cp_size) if use_cpp else (chunk_areas(mask, bounds), None)
    if algorithm in ("auto", "affinity"):
        wider = _WIDER if algorithm == "auto" else ()
        tolerances = [config.balance_tolerance, *(t for t in wider if t > config.balance_tolerance)]
        traffic = Traffic(mask, bounds, cp_size, needs)
        found |= _affine(traffic, area, capacity, tolerances, use_cpp)
    makers: dict[str, Callable[[], np.ndarray]] = {
        "min_heap": lambda: (cpp_solver.even if use_cpp else _even)(area, capacity, 0),
        "sorted_sequential": lambda: _deal(area, capacity),
        "zigzag": lambda: _zigzag(capacity),
        "sequential": lambda: np.repeat(np.arange(cp_size, dtype=np.int64), capacity),
    }
    wanted = _OTHERS if algorithm == "auto" else (algorithm,)
    found |= {name: make() for name, make in makers.items() if name in wanted}
    different: dict[bytes, tuple[str, np.ndarray]] = {}
    for name, ranks in found.items():
        different.setdefault(ranks.tobytes(), (name, ranks))
    return dict(different.values())


def predictions(
    found: dict[str, np.ndarray],
    chunked: ChunkedMask,
    config: DispatchConfig,
    overlap: OverlapConfig,
    ranks_per_node: int | None = None,
) -> dict[str, Prediction]:
    """The predicted step of each candidate; arguments as in `assign_chunks`."""
    rates, use_cpp = config.rates or DEFAULT, cpp_solver.chosen(config.planner)
    counts, predicts = (cpp_solver.count_all, cpp_predict.predict_all) if use_cpp else (count_all, predict_all)
    node, lengths = ranks_per_node or rates.ranks_per_node, np.diff(chunked.bounds)
    counted = counts(chunked, np.stack(list(found.values())), node)
    rows = [int(sum_by_rank(rank, lengths, chunked.cp_size).max()) for rank in found.values()]
    return dict(zip(found, predicts(counted, rows, rates, overlap), strict=True))


def fastest(found: dict[str, Prediction]) -> str:
    """The candidate with the shortest step; of equal ones the shortest on the GPU, then that with the least host time,
    then that with the fewest rows sent, then the first.
    """
    shortest = _ALIKE * min(p.step_us for p in found.values())
    near = [name for name in found if found[name].step_us <= shortest]
    shortest = _ALIKE * min(found[name].device_us for name in near)
    near = [name for name in near if found[name].device_us <= shortest]
    return min(near, key=lambda name: (found[name].host_us, found[name].num_rows))


def _affine(
    traffic: Traffic,
    area: np.ndarray,
    capacity: np.ndarray,
    tolerances: list[float],
    use_cpp: bool,
) -> dict[str, np.ndarray]:
    """The dispatch of `affinity` at each tolerance, by name."""
    total, cp_size = int(area.sum()), len(capacity)
    tight = total * (1000 + _EVEN_ENOUGH) // (1000 * cp_size)
    balanced = (cpp_solver.even if use_cpp else _even)(area, capacity, tight)
    tight = max(tight, int(sum_by_rank(balanced, area, cp_size).max()))
    # A tolerance of cp_size allows everything; larger ones are equivalent.
    limits = [max(tight, int(min(tolerance, cp_size) * total / cp_size)) for tolerance in tolerances]
    found = affinity(traffic, area, balanced, tight, limits, use_cpp)
    return {f"affinity {tolerance:g}": rank for tolerance, rank in zip(tolerances, found, strict=True)}


def _zigzag(capacity: np.ndarray) -> np.ndarray:
    """Two pieces for each rank: first ones in rank order, then second ones in reverse order."""
    ranks = np.arange(len(capacity), dtype=np.int64)
    return np.concatenate([np.repeat(ranks, capacity - capacity // 2), np.repeat(ranks[::-1], capacity[::-1] // 2)])


def _even(area: np.ndarray, capacity: np.ndarray, target: int) -> np.ndarray:
    """Balances loads with a min-heap and swaps, down to ``target``."""
    return refine(_min_heap(area, capacity), area, len(capacity), target)


def _deal(area: np.ndarray, capacity: np.ndarray) -> np.ndarray:
    """Assigns chunks by decreasing area to ranks in serpentine order."""
    cp_size = len(capacity)
    order = np.argsort(-area, kind="stable")
    position = np.arange(len(area))
    column = position % cp_size
    turn = np.where(position // cp_size % 2 == 0, column, cp_size - 1 - column)
    # A last, incomplete round goes to the ranks that have room for it.
    tail = len(area) % cp_size
    if tail:
        turn[-tail:] = np.arange(tail)
    rank = np.empty(len(area), dtype=np.int64)
    rank[order] = turn
    return rank


def _min_heap(area: np.ndarray, capacity: np.ndarray) -> np.ndarray:
    """Largest chunk first, each to the least loaded rank with room."""
    heap = [(0, r) for r in range(len(capacity)) if capacity[r] > 0]
    room = capacity.tolist()
    rank = np.empty(len(area), dtype=np.int64)
    for chunk in np.argsort(-area, kind="stable").tolist():
        load, r = heapq.heappop(heap)
        rank[chunk] = r
        room[r] -= 1
        if room[r]:
            heapq.heappush(heap, (load + int(area[chunk]), r))
    return rank
