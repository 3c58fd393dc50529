"""Where queries are computed: at home, on the rank that holds them, or by a host that has less to do.

Several ways to even the work out are compared by their predicted steps; computing all at home is one of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from megatron_magi.backends.costs import DEFAULT
from megatron_magi.config import CostModel, MagiConfig
from megatron_magi.cost_model import Rates
from megatron_magi.mask import AttnMask
from megatron_magi.mask import bands as bd
from megatron_magi.plan import cpp_solver
from megatron_magi.plan.chunks import ChunkedMask, chunk_areas
from megatron_magi.plan.counts import count_all, count_moves
from megatron_magi.plan.partition import Runs
from megatron_magi.plan.predict import Moved, Prediction, predict_all
from megatron_magi.plan.swaps import sum_by_rank
from megatron_magi.plan.types import Dispatch

EVEN = 1.02
"""Largest area over the mean up to which all queries stay at home."""
TARGETS = (1.01, 1.04, 1.1, 1.25, 1.5)
NEAR_TARGETS = (1.01, 1.1, 1.25)
"""Largest area over the mean that is aimed at: less balance moves fewer rows. If queries travel inside nodes alone,
over the mean of the node that has the largest."""
BETTER = 0.96
"""A step counts as shorter than the one at home up to this ratio: predictions are not exact. On two H200s a step that
was predicted 3 % shorter took 1.4 % longer (block causal, zigzag, 32k, in layouts_2gpu.csv)."""
MOST_BLOCKS = 1 << 14
"""Layouts of more pieces than this are computed at home."""
_MOST_CELLS = 1 << 22
"""Most pairs of a rank and a block."""
_BLOCKS_PER_RANK, _FEWEST_BLOCKS_PER_RANK = 64, 8
_MIN_BLOCK = 128
"""Rows of a kernel's query tile."""
MOST_HOSTS = 8
"""Ranks with the least to do that are compared for a run of queries; of its own node, as many again."""
FIXED_ROWS = 64
"""Rows of queries that a run costs in addition: its tiles are partly empty."""


@dataclass(frozen=True)
class Blocks:
    """Runs of queries that move as a whole, int64 ``[num_blocks]`` each.

    Attributes:
        bounds: tokens, ascending, int64 ``[num_blocks + 1]``.
        home: rank that holds them.
        rows: tokens, without padding.
        area: visible pairs.
        low, high: blocks of the first and past-the-last key that they see.
    """

    bounds: np.ndarray
    home: np.ndarray
    rows: np.ndarray
    area: np.ndarray
    low: np.ndarray
    high: np.ndarray


@dataclass(frozen=True)
class Weights:
    """Costs of rows that move, in bytes: those on links of a node.

    Attributes:
        query: q, out, lse, and both gradients.
        key: k and v in both passes, and both gradients, less what kernels hide.
        far: factor of rows between nodes.
        ranks_per_node: consecutive ranks that share a node.
    """

    query: int
    key: int
    far: int
    ranks_per_node: int

    @classmethod
    def of(cls, cost: CostModel, rates: Rates, ranks_per_node: int) -> Weights:
        """The weights of attention of a shape."""
        query = cost.num_heads_q * (2 * sum(cost.head_dims) * cost.element_bytes + 4)
        key = int(cost.row_bytes * (3.0 - 2.0 * rates.hidden))
        return cls(query, max(key, 1), max(1, round(rates.gbytes_per_s / rates.far_gbytes_per_s)), ranks_per_node)


@dataclass(frozen=True)
class Choice:
    """Where queries are computed.

    Attributes:
        hosts: bounds of runs of queries, int64 ``[num_runs + 1]``, and the rank that computes each; None if all are
            computed at home.
        home: predicted step of computing all at home; None if that is even, and nothing was predicted.
        predicted: predicted step of the choice; likewise.
    """

    hosts: tuple[np.ndarray, np.ndarray] | None
    home: Prediction | None = None
    predicted: Prediction | None = None


def choose_hosts(mask: AttnMask, dispatch: Dispatch, config: MagiConfig) -> Choice:
    """The rank that computes each query, by predicted steps: never one that is predicted slower than all at home.

    Deterministic: equal on all ranks, in numpy and in C++.

    Args:
        mask: of the whole sequence.
        dispatch: who holds the tokens.
        config: ``dispatch.rates``, ``overlap`` and ``comm.ranks_per_node`` decide.
    """
    blocks = make_blocks(mask, dispatch) if dispatch.cp_size > 1 else None
    if blocks is None:
        return Choice(None)
    load = sum_by_rank(blocks.home, blocks.area, dispatch.cp_size)
    mean, most = int(load.sum()) / dispatch.cp_size, int(load.max())
    if most <= EVEN * mean:
        return Choice(None)
    rates = config.dispatch.rates or DEFAULT
    node = config.comm.ranks_per_node or rates.ranks_per_node
    weights = Weights.of(config.overlap.cost, rates, node)
    aims = _aims(load, node)
    use_cpp = cpp_solver.chosen(config.dispatch.planner)
    made = (_spread_in_cpp if use_cpp else spread)(blocks, weights, aims, load)
    hosts = np.stack(list({host.tobytes(): host for host in (blocks.home, *made)}.values()))  # home first
    homes = np.broadcast_to(blocks.home, hosts.shape)
    counts = cpp_solver.count_all if use_cpp else count_all
    counted = counts(ChunkedMask(mask, blocks.bounds, dispatch.cp_size), np.ascontiguousarray(homes), node, hosts)
    moved = Moved(*count_moves(blocks.bounds, blocks.home, hosts, dispatch.cp_size, node))
    rows = [max(dispatch.shard_lengths)] * len(hosts)
    found = predict_all(counted, rows, rates, config.overlap, moved)
    best = min(range(len(hosts)), key=lambda at: (found[at].step_us, found[at].device_us, at))
    if found[best].step_us > BETTER * found[0].step_us:
        best = 0
    return Choice((blocks.bounds, hosts[best]) if best else None, found[0], found[best])


class Aim(NamedTuple):
    """What an assignment of hosts aims at.

    Attributes:
        target: largest area of a rank.
        near: queries travel inside nodes alone.
    """

    target: int
    near: bool


def _aims(load: np.ndarray, ranks_per_node: int) -> list[Aim]:
    """The aims that are compared, for the area of each rank at home."""
    mean, most = int(load.sum()) / len(load), int(load.max())
    node = np.arange(len(load)) // ranks_per_node
    sizes = np.bincount(node)
    wanted = [(mean * target, False) for target in TARGETS]
    if len(sizes) > 1:
        of_nodes = float((sum_by_rank(node, load, len(sizes)) / sizes).max())
        wanted += [(of_nodes * target, True) for target in NEAR_TARGETS]
    return [Aim(int(target), near) for target, near in wanted if target < most]


def make_blocks(mask: AttnMask, dispatch: Dispatch) -> Blocks | None:
    """The runs of a layout, cut into blocks, where possible between documents; None if there are too many."""
    runs, cp_size = Runs.of_chunks(dispatch.chunk_bounds, dispatch.chunk_rank, dispatch.chunk_row), dispatch.cp_size
    most = min(MOST_BLOCKS, _MOST_CELLS // cp_size)
    if len(runs.start) > most:
        return None
    shard = -(-dispatch.padded_seqlen // cp_size)
    size = min(max(-(-shard // _BLOCKS_PER_RANK), _MIN_BLOCK), max(1, shard // _FEWEST_BLOCKS_PER_RANK))
    size = max(size, -(-dispatch.padded_seqlen // max(1, most - len(runs.start))))
    length = runs.end - runs.start
    inner = bd.expand(np.zeros_like(length), (length - 1) // size)
    cuts = runs.start[inner[0]] + (inner[1] + 1) * size
    edges = np.unique(mask.bands[:, [bd.Q0, bd.Q1]])
    cuts = _near(cuts, edges, size // 2)
    total = min(dispatch.total_seqlen, dispatch.padded_seqlen)
    bounds = np.unique(np.concatenate([runs.bounds, cuts, [total]])).astype(np.int64)
    home = runs.rank[np.searchsorted(runs.start, bounds[:-1], side="right") - 1]
    pieces, block = bd.cut_rows(mask.bands, bounds)
    pieces, index = bd.tighten_with_index(pieces)
    block = block[index]
    low, high = np.full(len(home), len(home), dtype=np.int64), np.zeros(len(home), dtype=np.int64)
    np.minimum.at(low, block, np.searchsorted(bounds, pieces[:, bd.K0], side="right") - 1)
    np.maximum.at(high, block, np.searchsorted(bounds, pieces[:, bd.K1], side="left"))
    return Blocks(bounds, home, np.diff(bounds), chunk_areas(mask, bounds), np.minimum(low, high), high)


def _near(cuts: np.ndarray, edges: np.ndarray, within: int) -> np.ndarray:
    """The cuts, each moved to the nearest edge if one is at most ``within`` tokens away."""
    if not len(edges):
        return cuts
    after = np.minimum(np.searchsorted(edges, cuts), len(edges) - 1)
    before = np.maximum(after - 1, 0)
    nearest = np.where(np.abs(edges[before] - cuts) <= np.abs(edges[after] - cuts), edges[before], edges[after])
    return np.where(np.abs(nearest - cuts) <= within, nearest, cuts)


def spread(blocks: Blocks, weights: Weights, aims: list[Aim], load: np.ndarray) -> list[np.ndarray]:
    """Hosts of the blocks, one assignment for each aim.

    The rank with the largest area gives runs of blocks away, one after the other: each time the run, to a rank with
    room for it, that costs the fewest bytes for its area. Blocks of a document follow each other to the host that has
    fetched its keys.

    Args:
        load: area of each rank at home, int64 ``[cp_size]``.
    """
    return [_Spreading(blocks, weights, aim, load).run() for aim in aims]


def _spread_in_cpp(blocks: Blocks, weights: Weights, aims: list[Aim], load: np.ndarray) -> np.ndarray:
    """`spread` in C++."""
    arrays = [blocks.home, blocks.rows, blocks.area, blocks.low, blocks.high]
    of_rows = [weights.query, weights.key, weights.far, weights.ranks_per_node, MOST_HOSTS, FIXED_ROWS]
    return cpp_solver.spread(arrays, of_rows, [tuple(aim) for aim in aims], load)


class _Spreading:
    def __init__(self, blocks: Blocks, weights: Weights, aim: Aim, load: np.ndarray) -> None:
        self._blocks, self._weights, (self._target, self._near) = blocks, weights, aim
        self._load, self._host = load.copy(), blocks.home.copy()
        self._prices: dict[int, np.ndarray] = {}
        self._held: dict[int, np.ndarray] = {}
        self._last = np.full(len(load), -1, dtype=np.int64)

    def run(self) -> np.ndarray:
        open_ranks = self._load > self._target
        while open_ranks.any():
            rank = int(np.argmax(np.where(open_ranks, self._load, -1)))
            open_ranks[rank] = self._give(rank) and self._load[rank] > self._target
        return self._host

    def _give(self, rank: int) -> bool:
        """Gives one run of a rank's blocks away; False if no other has room for any."""
        b, hosts = self._blocks, self._hosts_for(rank)
        left = np.flatnonzero((b.home == rank) & (self._host == rank) & (b.area > 0))
        if not len(hosts) or not len(left):
            return False
        area, rows = (np.append(0, np.cumsum(x[left])) for x in (b.area, b.rows))
        segment = np.append(np.flatnonzero(np.diff(left) != 1) + 1, len(left))
        stop = segment[np.searchsorted(segment, np.arange(len(left)), side="right")]
        room, excess = self._target - self._load[hosts], self._load[rank] - self._target
        # Up to what the host has room for; no further than needed.
        end = np.searchsorted(area, area[:-1] + room[:, None], side="right") - 1
        end = np.minimum(np.minimum(end, np.searchsorted(area, area[:-1] + excess)), stop)
        which, start = np.nonzero(end > np.arange(len(left)))
        if not len(which):
            return False
        last = end[which, start] - 1
        keys = self._key_costs(hosts, left)
        of_keys = keys[0][which, start] + keys[1][which, last] - keys[1][which, start]
        far = np.where(self._node(hosts) == self._node(rank), 1, self._weights.far)[which]
        costs = (rows[last + 1] - rows[start] + FIXED_ROWS) * self._weights.query * far + of_keys
        gained = area[last + 1] - area[start]
        best = int(np.argmin(costs / gained))
        self._move(left[start[best] : last[best] + 1], rank, int(hosts[which[best]]), int(gained[best]))
        return True

    def _node(self, rank):
        return rank // self._weights.ranks_per_node

    def _hosts_for(self, rank: int) -> np.ndarray:
        """Ranks that are compared, ascending."""
        load, ranks = self._load, np.arange(len(self._load))
        by_load = np.argsort(load, kind="stable")
        near = by_load[self._node(by_load) == self._node(rank)]
        some = np.concatenate(
            [by_load[:MOST_HOSTS], near[:MOST_HOSTS], ranks[max(rank - 1, 0) : rank + 2], self._last[rank, None]]
        )
        some = np.unique(some[some >= 0])
        if self._near:
            some = some[self._node(some) == self._node(rank)]
        return some[(load[some] < self._target) & (some != rank)]

    def _key_costs(self, hosts: np.ndarray, left: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Costs of the keys that each block needs, and of those that it needs besides those of the block before it,
        summed up; int64 ``[num_hosts, len(left)]``.
        """
        price = np.stack([self._price(int(host)) for host in hosts])
        low, high = self._blocks.low[left], self._blocks.high[left]
        before_low, before_high = np.append(low[:1], low[:-1]), np.append(low[:1], high[:-1])
        full = price[:, high] - price[:, low]
        below = np.maximum(low, np.minimum(high, before_low))
        above = np.minimum(high, np.maximum(low, before_high))
        more = price[:, below] - price[:, low] + price[:, high] - price[:, above]
        return full, np.cumsum(more, axis=1)

    def _price(self, host: int) -> np.ndarray:
        """Cost of the keys before each block that a rank neither holds nor fetches, int64 ``[num_blocks + 1]``."""
        known = self._prices.get(host)
        if known is None:
            b, held = self._blocks, self._held.get(host)
            if held is None:
                of_host = np.flatnonzero((b.home == host) & (b.area > 0))
                held = self._held[host] = _covered(b.low[of_host], b.high[of_host], len(b.home)) | (b.home == host)
            far = np.where(self._node(b.home) == self._node(host), 1, self._weights.far)
            cost = np.where(held, 0, b.rows * far * self._weights.key)
            known = self._prices[host] = np.append(0, np.cumsum(cost))
        return known

    def _move(self, run: np.ndarray, rank: int, host: int, area: int) -> None:
        b = self._blocks
        self._host[run] = host
        self._load[rank] -= area
        self._load[host] += area
        self._held[host] |= _covered(b.low[run], b.high[run], len(b.home))
        self._last[rank] = host
        del self._prices[host]


def _covered(low: np.ndarray, high: np.ndarray, num_blocks: int) -> np.ndarray:
    """Whether each block lies in any of the ranges."""
    change = np.zeros(num_blocks + 1, dtype=np.int64)
    np.add.at(change, low, 1)
    np.add.at(change, high, -1)
    return np.cumsum(change[:-1]) > 0
