"""Chunk -> rank: the dispatch algorithms."""

from __future__ import annotations

import heapq

import numpy as np

from megatron_magi.config import DispatchConfig
from megatron_magi.mask import AttnMask
from megatron_magi.plan import native
from megatron_magi.plan.affinity import affinity
from megatron_magi.plan.chunks import chunk_areas
from megatron_magi.plan.swaps import refine, sum_by_rank

_EVEN_ENOUGH = 1
"""Thousandths of the mean area: a rank that is no further above it could gain nothing by moving more keys."""


def assign_chunks(mask: AttnMask, bounds: np.ndarray, cp_size: int, config: DispatchConfig) -> np.ndarray:
    """The rank of each chunk, int64 ``[num_chunks]``.

    Ranks get equally many chunks, or numbers that differ by one where the count does not
    divide (only with ``uneven_shard``).
    """
    num_chunks = len(bounds) - 1
    if cp_size == 1:
        return np.zeros(num_chunks, dtype=np.int64)
    area = chunk_areas(mask, bounds)
    capacity = np.full(cp_size, num_chunks // cp_size, dtype=np.int64)
    capacity[: num_chunks % cp_size] += 1
    if config.algorithm == "sequential":
        return np.repeat(np.arange(cp_size, dtype=np.int64), capacity)
    if config.algorithm == "sorted_sequential":
        return _deal(area, capacity)
    use_native = native.chosen(config.planner)
    even = native.even if use_native else _even
    if config.algorithm == "min_heap":
        return even(area, capacity, 0)
    total = int(area.sum())
    tight = total * (1000 + _EVEN_ENOUGH) // (1000 * cp_size)
    balanced = even(area, capacity, tight)
    tight = max(tight, int(sum_by_rank(balanced, area, cp_size).max()))
    # A tolerance of cp_size allows everything, any above it no more than that.
    limit = max(tight, int(min(config.balance_tolerance, cp_size) * total / cp_size))
    return affinity(mask, bounds, area, balanced, tight, limit, use_native)


def _even(area: np.ndarray, capacity: np.ndarray, target: int) -> np.ndarray:
    """Loads as equal as a min-heap and swaps make them, but no better than ``target``."""
    return refine(_min_heap(area, capacity), area, len(capacity), target)


def _deal(area: np.ndarray, capacity: np.ndarray) -> np.ndarray:
    """Chunks by falling area, dealt to the ranks to and fro."""
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
