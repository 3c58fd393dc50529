"""Pair swaps of chunks that reduce the load of the most loaded rank."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from megatron_magi.plan.traffic import Holdings

SWAPS_PER_CHUNK = 4
PARTNERS = 16
"""Least loaded ranks, which are tried first; the others are tried if none of these helps."""
SWAPS_TRIED = 12
GATHERING_PASSES = 4


def sum_by_rank(rank: np.ndarray, area: np.ndarray, cp_size: int) -> np.ndarray:
    """Area of each rank, int64 ``[cp_size]``."""
    load = np.zeros(cp_size, dtype=np.int64)
    np.add.at(load, rank, area)
    return load


def repair(shards: Shards, target: int, holdings: Holdings | None = None) -> Iterator[None]:
    """Swaps chunks of the most loaded rank with others while that reduces the largest load.

    Yields before the first swap and after each. Swaps keep the number of chunks of every rank. Stops once the
    largest load is at most ``target``, or when no single swap helps. Takes the swap that lowers the load most;
    with ``holdings`` the one, among some that are good enough, that adds the fewest rows to fetch.
    """
    yield
    for _ in range(SWAPS_PER_CHUNK * len(shards.rank)):
        top = int(np.argmax(shards.load))
        swap = None if shards.load[top] <= target else _choose(shards, top, target, holdings)
        if swap is None:
            return
        if holdings is not None:
            holdings.swap(shards.rank, *swap)
        shards.swap(*swap)
        yield


def refine(rank: np.ndarray, area: np.ndarray, cp_size: int, target: int) -> np.ndarray:
    """The rank of each chunk after `repair`, for balance alone."""
    shards = Shards(rank, area, cp_size)
    for _ in repair(shards, target):
        pass
    return shards.rank


def _choose(shards: Shards, top: int, target: int, holdings: Holdings | None) -> tuple[int, int] | None:
    """A chunk of rank ``top`` and one of another rank, None if no swap lowers the larger of the two loads."""
    order = np.argsort(shards.load, kind="stable")
    order = order[order != top]
    load = int(shards.load[top])
    for partners in (order[:PARTNERS], order[PARTNERS:]):
        mine, partner, after = shards.best_swaps(top, partners)
        if not len(after) or after.min() >= load:
            continue
        best = int(np.argmin(after))
        if holdings is not None:
            # Good enough: within the target, or at least half of the possible gain.
            enough = np.flatnonzero(after <= max(target, (int(after[best]) + load) // 2))
            tried = _some(enough)
            costs = holdings.swap_costs(shards.rank, mine[tried], partner[tried])
            best = int(tried[int(np.argmin(costs))])
        return int(mine[best]), int(partner[best])
    return None


def gather(shards: Shards, limit: int, holdings: Holdings) -> None:
    """Swaps chunks to where their keys are, while that lowers the rows to fetch and no load passes ``limit``."""
    for _ in range(GATHERING_PASSES):
        before = holdings.fetched
        for chunk in np.argsort(-shards.area, kind="stable").tolist():
            partners = shards.swaps_within(chunk, holdings.nearest(chunk, int(shards.rank[chunk])), limit)
            if not len(partners):
                continue
            costs = holdings.swap_costs(shards.rank, np.full(len(partners), chunk), partners)
            best = int(np.argmin(costs))
            if costs[best] < 0:
                swap = chunk, int(partners[best])
                holdings.swap(shards.rank, *swap)
                shards.swap(*swap)
        if holdings.fetched == before:
            return


class Shards:
    """The chunks of each rank, sorted by area.

    Attributes:
        rank: of each chunk, int64 ``[num_chunks]``.
        area: of each chunk, int64 ``[num_chunks]``.
        load: area of each rank, int64 ``[cp_size]``.
    """

    def __init__(self, rank: np.ndarray, area: np.ndarray, cp_size: int) -> None:
        self.rank = rank.copy()
        self.load = sum_by_rank(rank, area, cp_size)
        self.area = area
        self._count = np.bincount(rank, minlength=cp_size)
        chunks = np.lexsort((area, rank))
        place = np.arange(len(rank)) - (np.cumsum(self._count) - self._count)[rank[chunks]]
        self._chunks = np.zeros((cp_size, int(self._count.max())), dtype=np.int64)
        self._chunks[rank[chunks], place] = chunks

    def best_swaps(self, top: int, partners: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """For each chunk of rank ``top`` and each partner, the partner's chunks that balance the two ranks best.

        The two loads meet if the chunks differ in area by half the difference of the loads; the
        neighbours of that area in the sorted areas of the partner are the candidates.

        Returns:
            ``(chunk, partner, after)``: pairs, and the larger load of the two ranks after the swap.
        """
        mine = self._chunks[top, : self._count[top]]
        held = np.arange(self._chunks.shape[1]) < self._count[partners][:, None]
        theirs = self._chunks[partners][held]
        stop = np.cumsum(self._count[partners])
        start = stop - self._count[partners]
        lift = int(self.area.max()) + 1
        lifted = self.area[theirs] + np.repeat(np.arange(len(partners)), self._count[partners]) * lift
        wanted = self.area[mine][:, None] - (self.load[top] - self.load[partners])[None, :] // 2
        place = np.searchsorted(lifted, np.arange(len(partners)) * lift + np.clip(wanted, 0, lift - 1))
        places = np.clip(np.stack([place - 1, place], axis=-1), start[:, None], stop[:, None] - 1)
        partner = theirs[places]
        chunk = np.broadcast_to(mine[:, None, None], partner.shape)
        moved = self.area[chunk] - self.area[partner]
        after = np.maximum(self.load[top] - moved, self.load[self.rank[partner]] + moved)
        return chunk.reshape(-1), partner.reshape(-1), after.reshape(-1)

    def swaps_within(self, chunk: int, other: int, limit: int) -> np.ndarray:
        """Some chunks of rank ``other`` that ``chunk`` can be swapped with, so that no load passes ``limit``."""
        theirs = self._chunks[other, : self._count[other]]
        least = self.load[other] + self.area[chunk] - limit
        most = limit - self.load[self.rank[chunk]] + self.area[chunk]
        low = np.searchsorted(self.area[theirs], least, side="left")
        return _some(theirs[low : np.searchsorted(self.area[theirs], most, side="right")])

    def swap(self, one: int, other: int) -> None:
        """Exchanges the ranks of two chunks."""
        delta = self.area[one] - self.area[other]
        for r, out, into, gain in (
            (int(self.rank[one]), one, other, -delta),
            (int(self.rank[other]), other, one, delta),
        ):
            row = self._chunks[r, : self._count[r]]
            row[np.flatnonzero(row == out)] = into
            row[:] = row[np.lexsort((row, self.area[row]))]
            self.load[r] += gain
        self.rank[one], self.rank[other] = self.rank[other], self.rank[one]


def _some(candidates: np.ndarray) -> np.ndarray:
    """At most `SWAPS_TRIED` of the candidates, evenly spaced."""
    return candidates[:: max(1, len(candidates) // SWAPS_TRIED)][:SWAPS_TRIED]
