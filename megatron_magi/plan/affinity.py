"""The default dispatch: queries are placed near the keys they need, as far as balance allows."""

from __future__ import annotations

import numpy as np

from megatron_magi.plan import cpp_solver
from megatron_magi.plan.swaps import Shards, gather, repair, sum_by_rank
from megatron_magi.plan.traffic import Holdings, SearchInput, Start, Traffic

_RUNGS = (1500, 1200, 1100, 1050, 1020, 1010, 1005, 1001)
"""Target loads of repair, one after the other rather than the lowest at once, so that there are more swaps to choose
from. The last is ``tight``."""
_PLACING_SLACK = (5, 6, 8)
"""Loads, in quarters of the target, up to which chunks are placed before repair: with 4 up to a quarter more is
fetched. The larger ones are used only if the limit allows as much."""


def affinity(
    traffic: Traffic,
    area: np.ndarray,
    balanced: np.ndarray,
    tight: int,
    limits: list[int],
    use_cpp: bool,
) -> np.ndarray:
    """For each limit the dispatch that moves the fewest keys among those found whose largest load is within it.

    Every start is repaired down to ``tight`` in the same steps for any limit, so a wider limit only adds
    candidates and never moves more, and one search serves several limits.

    Args:
        traffic: what chunks need.
        area: of each chunk, int64 ``[num_chunks]``.
        balanced: a dispatch within ``tight``, which gives the number of chunks of each rank.
        tight: load at which balance is good enough, at most any limit.
        use_cpp: search in C++.

    Returns:
        int64 ``[num_limits, num_chunks]``.
    """
    capacity = np.bincount(balanced)
    starts = _starts(area, capacity, tight, max(limits))
    targets = [tight * rung // _RUNGS[-1] for rung in _RUNGS]
    run = cpp_solver.search if use_cpp else search
    return run(SearchInput(traffic, area, balanced, starts, targets, limits))


def search(of: SearchInput) -> np.ndarray:
    """Completes and repairs each start, and returns for each limit the best dispatch visited, int64
    ``[num_limits, num_chunks]``.
    """
    traffic, area, balanced, starts, targets, limits = of
    capacity, within = np.bincount(balanced), np.array(limits)
    best = np.tile(balanced, (len(limits), 1))
    fewest = np.full(len(limits), Holdings(traffic, balanced, len(capacity)).fetched)
    reached = False

    def note(shards: Shards, holdings: Holdings, least: int) -> None:
        """Records the dispatch for each limit from ``least`` on that it meets, if it fetches the fewest rows so far."""
        better = (holdings.fetched < fewest) & (max(int(shards.load.max()), least) <= within)
        best[better], fewest[better] = shards.rank, holdings.fetched

    for start, most, least in starts:
        rank = _place_greedily(start, traffic, area, capacity, most)
        shards, holdings = Shards(rank, area, len(capacity)), Holdings(traffic, rank, len(capacity))
        for target in targets:
            for _ in repair(shards, target, holdings):
                note(shards, holdings, least)
        # A start for wider limits only must not change the results of narrower ones.
        reached = reached or (most == starts[0].most and shards.load.max() <= targets[-1])
    if not reached:
        # Few, uneven chunks: limits that no start reached are approached from the balanced dispatch.
        shards, holdings = Shards(balanced, area, len(capacity)), Holdings(traffic, balanced, len(capacity))
        gather(shards, targets[-1], holdings)
        note(shards, holdings, 0)
    return best


def _starts(area: np.ndarray, capacity: np.ndarray, tight: int, widest: int) -> list[Start]:
    """The starts of `search`: nothing placed, and contiguous pieces."""
    nothing = np.full(len(area), -1, dtype=np.int64)
    first, *wider = (tight * slack // 4 for slack in _PLACING_SLACK)
    least = [-(-tight * slack // 5) for slack in _PLACING_SLACK[1:]]
    starts = [Start(nothing, most, at) for most, at in zip(wider, least, strict=True) if at <= widest]
    return [Start(nothing, first, 0), *starts, Start(_contiguous_start(area, capacity), first, 0)]


def _contiguous_start(area: np.ndarray, capacity: np.ndarray) -> np.ndarray:
    """Contiguous pieces of equal area; of a piece with too many chunks, the largest. Others are -1."""
    cp_size, total = len(capacity), int(area.sum())
    share, rest = divmod(total, cp_size)
    edges = share * np.arange(1, cp_size) + rest * np.arange(1, cp_size) // cp_size
    piece = np.searchsorted(edges, np.cumsum(area) - area // 2, side="right")
    order = np.lexsort((-area, piece))
    position = np.arange(len(area)) - np.searchsorted(piece[order], piece[order])
    kept = order[position < capacity[piece[order]]]
    rank = np.full(len(area), -1, dtype=np.int64)
    rank[kept] = piece[kept]
    return rank


def _place_greedily(
    start: np.ndarray, traffic: Traffic, area: np.ndarray, capacity: np.ndarray, most: int
) -> np.ndarray:
    """Places the chunks that ``start`` leaves open (-1), by decreasing area.

    Each goes, among the ranks with room and whose load stays within ``most``, to the one that
    would have to fetch the fewest new keys for it.
    """
    cp_size = len(capacity)
    nothing = np.iinfo(np.int64).max
    rank = start.copy()
    missing = np.tile(traffic.block_rows[:, None], cp_size)  # rows of each block that a rank does not hold yet
    placed = np.flatnonzero(rank >= 0)
    i, block = traffic.needs_of(placed)
    np.subtract.at(missing, (traffic.block[placed], rank[placed]), traffic.chunk_rows[placed])
    missing[block, rank[placed[i]]] = 0
    load = sum_by_rank(rank[placed], area[placed], cp_size)
    room = capacity - np.bincount(rank[placed], minlength=cp_size)
    open_chunks = np.flatnonzero(rank < 0)
    for chunk in open_chunks[np.argsort(-area[open_chunks], kind="stable")].tolist():
        wanted = traffic.needs(chunk)
        fits = (room > 0) & (load + area[chunk] <= most)
        if fits.any():
            # Fewest new keys first, then the least loaded rank.
            cost = np.where(fits, missing[wanted].sum(axis=0), nothing)
            r = int(np.argmin(np.where(cost == cost.min(), load, nothing)))
        else:
            r = int(np.argmin(np.where(room > 0, load, nothing)))
        rank[chunk] = r
        load[r] += area[chunk]
        room[r] -= 1
        missing[wanted, r] = 0
        own = traffic.block[chunk]
        missing[own, r] = max(0, missing[own, r] - traffic.chunk_rows[chunk])
    return rank
