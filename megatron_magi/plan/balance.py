"""Chunk -> rank: the dispatch algorithms."""

from __future__ import annotations

import heapq

import numpy as np

from megatron_magi.config import DispatchConfig
from megatron_magi.mask import AttnMask
from megatron_magi.plan.chunks import chunk_areas, needed_blocks

_MAX_SWAPS = 400
_MAX_BLOCKS = 2048
_AFFINITY_WORK = 4e8
"""Bool operations that the affinity search may cost: about half a second."""


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
    balanced = refine(_min_heap(area, capacity), area, cp_size, target=0.0)
    if config.algorithm == "min_heap":
        return balanced
    return _affinity(mask, bounds, area, capacity, balanced, config.balance_tolerance)


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


def refine(rank: np.ndarray, area: np.ndarray, cp_size: int, target: float) -> np.ndarray:
    """Swaps chunks of the fullest rank with others while that lowers the largest load.

    Swaps keep the number of chunks of every rank. Stops once the largest load is at most
    ``target``, or when no single swap helps.
    """
    rank = rank.copy()
    load = np.zeros(cp_size, dtype=np.int64)
    np.add.at(load, rank, area)
    for _ in range(_MAX_SWAPS):
        top = int(np.argmax(load))
        if load[top] <= target:
            break
        mine = np.flatnonzero(rank == top)
        others = np.flatnonzero(rank != top)
        if not len(mine) or not len(others):
            break
        moved = area[mine][:, None] - area[others][None, :]
        after = np.maximum(load[top] - moved, load[rank[others]][None, :] + moved)
        best = int(np.argmin(after))
        if after.flat[best] >= load[top]:
            break
        i, j = mine[best // len(others)], others[best % len(others)]
        delta = area[i] - area[j]
        load[top] -= delta
        load[rank[j]] += delta
        rank[i], rank[j] = rank[j], rank[i]
    return rank


def _affinity(
    mask: AttnMask,
    bounds: np.ndarray,
    area: np.ndarray,
    capacity: np.ndarray,
    balanced: np.ndarray,
    tolerance: float,
) -> np.ndarray:
    """Keeps queries near the keys they need, within the tolerance; else ``balanced``.

    Chunks by falling area; each goes, among the ranks with room and whose load stays within
    the limit, to the one that would have to fetch the fewest new keys for it. Swaps then
    repair what balance is left to repair. The outcome is used only if it moves fewer keys.
    """
    cp_size = len(capacity)
    mean = area.sum() / cp_size
    limit = max(tolerance * mean, float(_loads(balanced, area, cp_size).max()))
    blocks = int(max(64, min(_MAX_BLOCKS, _AFFINITY_WORK / max(1, cp_size * len(area)))))
    needs, block = needed_blocks(mask, bounds, blocks)
    block_rows = np.zeros(needs.shape[1], dtype=np.int64)
    np.add.at(block_rows, block, np.diff(bounds))
    greedy = _greedy_affinity(needs, block, block_rows, area, capacity, limit)
    greedy = refine(greedy, area, cp_size, target=limit)
    if _loads(greedy, area, cp_size).max() > limit:
        return balanced
    candidates = (balanced, greedy)
    fetched = [_fetched_rows(c, needs, block, block_rows, cp_size) for c in candidates]
    return candidates[int(np.argmin(fetched))]


def _greedy_affinity(
    needs: np.ndarray,
    block: np.ndarray,
    block_rows: np.ndarray,
    area: np.ndarray,
    capacity: np.ndarray,
    limit: float,
) -> np.ndarray:
    cp_size = len(capacity)
    missing = np.tile(block_rows, (cp_size, 1))  # rows of each block that a rank does not hold yet
    load = np.zeros(cp_size, dtype=np.float64)
    room = capacity.copy()
    rank = np.empty(len(area), dtype=np.int64)
    for chunk in np.argsort(-area, kind="stable").tolist():
        wanted = np.flatnonzero(needs[chunk])
        fetch = missing[:, wanted].sum(axis=1)
        fits = (room > 0) & (load + area[chunk] <= limit)
        if fits.any():
            # Fewest new keys first, then the least loaded rank.
            cost = np.where(fits, fetch, np.iinfo(np.int64).max)
            ties = np.flatnonzero(cost == cost.min())
            r = int(ties[np.argmin(load[ties])])
        else:
            r = int(np.argmin(np.where(room > 0, load, np.inf)))
        rank[chunk] = r
        load[r] += area[chunk]
        room[r] -= 1
        missing[r, wanted] = 0
        missing[r, block[chunk]] = 0
    return rank


def _loads(rank: np.ndarray, area: np.ndarray, cp_size: int) -> np.ndarray:
    load = np.zeros(cp_size, dtype=np.int64)
    np.add.at(load, rank, area)
    return load


def _fetched_rows(
    rank: np.ndarray, needs: np.ndarray, block: np.ndarray, block_rows: np.ndarray, cp_size: int
) -> int:
    """Rows that all ranks fetch together, counted in whole blocks."""
    total = 0
    for r in range(cp_size):
        mine = rank == r
        want = needs[mine].any(axis=0)
        want[block[mine]] = False
        total += int(block_rows[want].sum())
    return total
