"""Chunk -> rank: the dispatch algorithms."""

from __future__ import annotations

import heapq

import numpy as np

from megatron_magi.config import DispatchConfig
from megatron_magi.mask import AttnMask
from megatron_magi.plan.chunks import chunk_areas, needed_blocks

_MAX_SWAPS = 400
_SWAPS_TRIED = 12
_PLACING_SLACK = 1.25
"""How far over the limit a rank may be filled before swaps repair it: 1.0 fetches up to a quarter more."""
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


def refine(
    rank: np.ndarray, area: np.ndarray, cp_size: int, target: float, traffic: _Traffic | None = None
) -> np.ndarray:
    """Swaps chunks of the fullest rank with others while that lowers the largest load.

    Swaps keep the number of chunks of every rank. Stops once the largest load is at most
    ``target``, or when no single swap helps. Takes the swap that lowers the load most; with
    ``traffic`` the one, among the best few that are good enough, that adds the fewest rows to fetch.
    """
    rank = rank.copy()
    load = _loads(rank, area, cp_size)
    for _ in range(_MAX_SWAPS):
        top = int(np.argmax(load))
        if load[top] <= target:
            break
        mine, partner, after = _best_swaps(rank, area, load, top)
        if not len(after) or after.min() >= load[top]:
            break
        best = int(np.argmin(after))
        if traffic is not None:
            # Good enough: within the target, or at least half of the possible gain.
            enough = np.flatnonzero(after <= max(target, (int(after[best]) + int(load[top])) // 2))
            tried = enough[:: max(1, len(enough) // _SWAPS_TRIED)][:_SWAPS_TRIED]
            costs = traffic.swap_costs(rank, [(int(mine[c]), int(partner[c])) for c in tried])
            best = int(tried[int(np.argmin(costs))])
        i, j = int(mine[best]), int(partner[best])
        delta = area[i] - area[j]
        load[top] -= delta
        load[rank[j]] += delta
        rank[i], rank[j] = rank[j], rank[i]
    return rank


def _best_swaps(
    rank: np.ndarray, area: np.ndarray, load: np.ndarray, top: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For each chunk of rank ``top`` and each other rank, the chunks there that even out the two best.

    The two loads meet if the chunks differ in area by half the difference of the loads; the
    neighbours of that area in the sorted areas of the other rank are the candidates.

    Returns:
        ``(chunk, partner, after)``: pairs, and the larger load of the two ranks after the swap.
    """
    chunks = np.argsort(rank * (int(area.max()) + 1) + area, kind="stable")
    start = np.searchsorted(rank[chunks], np.arange(len(load)))
    stop = np.append(start[1:], len(chunks))
    mine = chunks[start[top] : stop[top]]
    ranks = np.flatnonzero((np.arange(len(load)) != top) & (stop > start))
    wanted = area[mine][:, None] - (load[top] - load[ranks])[None, :] // 2
    lifted = rank[chunks] * (int(area.max()) + 1) + area[chunks]
    place = np.searchsorted(lifted, ranks * (int(area.max()) + 1) + np.clip(wanted, 0, int(area.max())))
    places = np.stack([place - 1, place], axis=-1)
    places = np.clip(places, start[ranks][None, :, None], stop[ranks][None, :, None] - 1)
    partner = chunks[places]
    chunk = np.broadcast_to(mine[:, None, None], partner.shape)
    moved = area[chunk] - area[partner]
    after = np.maximum(load[top] - moved, load[rank[partner]] + moved)
    return chunk.reshape(-1), partner.reshape(-1), after.reshape(-1)


class _Traffic:
    """Rows that ranks have to fetch, counted in whole blocks of keys (see `needed_blocks`)."""

    def __init__(self, mask: AttnMask, bounds: np.ndarray, max_blocks: int) -> None:
        self.needs, self.block = needed_blocks(mask, bounds, max_blocks)
        self.block_rows = np.zeros(self.needs.shape[1], dtype=np.int64)
        np.add.at(self.block_rows, self.block, np.diff(bounds))

    def swap_costs(self, rank: np.ndarray, pairs: list[tuple[int, int]]) -> list[int]:
        """Change in the rows that the two ranks of each pair fetch together, if its chunks are swapped."""
        state: dict[int, tuple[np.ndarray, np.ndarray, int]] = {}
        costs = []
        for pair in pairs:
            cost = 0
            for out, into in (pair, pair[::-1]):
                r = int(rank[out])
                if r not in state:
                    mine = np.flatnonzero(rank == r)
                    users = self.needs[mine].sum(axis=0, dtype=np.int32)  # chunks of the rank that need each block
                    held = np.bincount(self.block[mine], minlength=len(self.block_rows))
                    state[r] = users, held, self._rows(users, held)
                users, held, before = state[r]
                held = held.copy()
                held[self.block[out]] -= 1
                held[self.block[into]] += 1
                users = users - self.needs[out] + self.needs[into]
                cost += self._rows(users, held) - before
            costs.append(cost)
        return costs

    def _rows(self, users: np.ndarray, held: np.ndarray) -> int:
        return int(self.block_rows[(users > 0) & (held == 0)].sum())

    def total(self, rank: np.ndarray, cp_size: int) -> int:
        """Rows that all ranks fetch together."""
        rows = 0
        for r in range(cp_size):
            mine = np.flatnonzero(rank == r)
            rows += self._rows(
                self.needs[mine].any(axis=0), np.bincount(self.block[mine], minlength=len(self.block_rows))
            )
        return rows


def _affinity(
    mask: AttnMask,
    bounds: np.ndarray,
    area: np.ndarray,
    capacity: np.ndarray,
    balanced: np.ndarray,
    tolerance: float,
) -> np.ndarray:
    """Keeps queries near the keys they need, within the tolerance; else ``balanced``.

    Three starts: nothing placed; contiguous pieces of equal area, as far as ranks have room for
    their chunks; and ``balanced``. The rest is placed greedily, swaps repair the balance, and the
    outcome that moves the fewest keys within the limit wins.
    """
    cp_size = len(capacity)
    limit = max(tolerance * area.sum() / cp_size, float(_loads(balanced, area, cp_size).max()))
    blocks = int(max(64, min(_MAX_BLOCKS, _AFFINITY_WORK / max(1, cp_size * len(area)))))
    traffic = _Traffic(mask, bounds, blocks)
    best, fewest = balanced, traffic.total(balanced, cp_size)
    for start in (np.full(len(area), -1, dtype=np.int64), _contiguous_start(area, capacity)):
        rank = _place_greedily(start, traffic, area, capacity, limit)
        rank = refine(rank, area, cp_size, limit, traffic)
        fetched = traffic.total(rank, cp_size)
        if _loads(rank, area, cp_size).max() <= limit and fetched < fewest:
            best, fewest = rank, fetched
    return best


def _contiguous_start(area: np.ndarray, capacity: np.ndarray) -> np.ndarray:
    """Contiguous pieces of equal area; of a piece with too many chunks, the largest. Others are -1."""
    cp_size = len(capacity)
    middle = np.cumsum(area) - area / 2
    piece = np.minimum((middle * cp_size / max(1, int(area.sum()))).astype(np.int64), cp_size - 1)
    rank = np.full(len(area), -1, dtype=np.int64)
    for r in range(cp_size):
        mine = np.flatnonzero(piece == r)
        rank[mine[np.argsort(-area[mine], kind="stable")][: capacity[r]]] = r
    return rank


def _place_greedily(
    start: np.ndarray, traffic: _Traffic, area: np.ndarray, capacity: np.ndarray, limit: float
) -> np.ndarray:
    """Places the chunks that ``start`` leaves open (-1), by falling area.

    Each goes, among the ranks with room and whose load stays near ``limit``, to the one that
    would have to fetch the fewest new keys for it.
    """
    cp_size = len(capacity)
    rank = start.copy()
    missing = np.tile(traffic.block_rows, (cp_size, 1))  # rows of each block that a rank does not hold yet
    placed = np.flatnonzero(rank >= 0)
    for r in range(cp_size):
        mine = placed[rank[placed] == r]
        missing[r, traffic.needs[mine].any(axis=0)] = 0
        missing[r, traffic.block[mine]] = 0
    load = _loads(rank[placed], area[placed], cp_size).astype(np.float64)
    room = capacity - np.bincount(rank[placed], minlength=cp_size)
    open_chunks = np.flatnonzero(rank < 0)
    for chunk in open_chunks[np.argsort(-area[open_chunks], kind="stable")].tolist():
        wanted = np.flatnonzero(traffic.needs[chunk])
        fetch = missing[:, wanted].sum(axis=1)
        fits = (room > 0) & (load + area[chunk] <= _PLACING_SLACK * limit)
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
        missing[r, traffic.block[chunk]] = 0
    return rank


def _loads(rank: np.ndarray, area: np.ndarray, cp_size: int) -> np.ndarray:
    load = np.zeros(cp_size, dtype=np.int64)
    np.add.at(load, rank, area)
    return load
