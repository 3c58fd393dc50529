"""Renumbers ranks so that those that need each other's keys share a node; shards stay the same."""

from __future__ import annotations

import numpy as np

from megatron_magi.mask import AttnMask
from megatron_magi.plan.traffic import Traffic

_MOST_PASSES = 4
_MOST_EXCHANGED = 16
"""Ranks up to which pairs are exchanged: 23 ms of planning for four nodes of four."""


def nodes_in_use(ranks_per_node: int | None, cp_size: int) -> int | None:
    """``ranks_per_node`` if there are several nodes of several ranks, else None: nodes are not distinguished.

    Raises:
        ValueError: the ranks are no whole number of nodes.
    """
    if ranks_per_node is None or ranks_per_node == 1 or ranks_per_node >= cp_size:
        return None
    if cp_size % ranks_per_node:
        raise ValueError(f"ranks_per_node: {cp_size} ranks are no whole number of nodes of {ranks_per_node}")
    return ranks_per_node


def gather_in_nodes(
    mask: AttnMask, bounds: np.ndarray, chunk_rank: np.ndarray, cp_size: int, ranks_per_node: int
) -> np.ndarray:
    """``chunk_rank`` with renumbered ranks if fewer rows cross between nodes then; else unchanged.

    The shard of each rank stays the same, under another number.

    Returns:
        int64 ``[num_chunks]``.
    """
    if len(np.unique(np.bincount(chunk_rank, minlength=cp_size))) > 1:
        return chunk_rank  # uneven shards: the first ranks hold one chunk more
    shards = _Shards(Traffic(mask, bounds, cp_size), chunk_rank, cp_size)
    present = np.arange(cp_size).reshape(-1, ranks_per_node)
    nodes = shards.improved(shards.grouped(ranks_per_node))
    if shards.crossing(nodes) >= shards.crossing(present):
        return chunk_rank
    # Nodes, and ranks in a node, are ordered by their first chunks, so that the numbering is unique.
    first = np.array([int(np.argmax(chunk_rank == r)) for r in range(cp_size)])
    nodes = np.stack([node[np.argsort(first[node])] for node in nodes])
    nodes = nodes[np.argsort(first[nodes[:, 0]])]
    number = np.empty(cp_size, dtype=np.int64)
    number[nodes.reshape(-1)] = np.arange(cp_size)
    return number[chunk_rank]


class _Shards:
    """The blocks of keys that each rank needs, and the rows of each block that it holds."""

    def __init__(self, traffic: Traffic, chunk_rank: np.ndarray, cp_size: int) -> None:
        num_blocks = len(traffic.block_rows)
        self._needs = np.zeros((cp_size, num_blocks), dtype=bool)
        self._held = np.zeros((cp_size, num_blocks), dtype=np.int64)
        i, block = traffic.needs_of(np.arange(len(chunk_rank)))
        self._needs[chunk_rank[i], block] = True
        np.add.at(self._held, (chunk_rank, traffic.block), traffic.chunk_rows)
        self._block_rows = traffic.block_rows
        self._cp_size = cp_size

    def crossing(self, nodes: np.ndarray) -> int:
        """Rows that cross between ``nodes``, int64 ``[num_nodes, ranks_per_node]``, each once to a node."""
        return sum(self._missing(node) for node in nodes)

    def _missing(self, node: np.ndarray) -> int:
        return int((self._block_rows - self._held[node].sum(axis=0))[self._needs[node].any(axis=0)].sum())

    def grouped(self, ranks_per_node: int) -> np.ndarray:
        """Forms nodes greedily: the lowest remaining rank, and the ranks that exchange the most rows with it."""
        flow = self._needs.astype(np.float64) @ self._held.T.astype(np.float64)
        flow += flow.T
        left, nodes = np.ones(self._cp_size, dtype=bool), []
        while left.any():
            node = [int(np.argmax(left))]
            left[node] = False
            while len(node) < ranks_per_node:
                gain = np.where(left, flow[node].sum(axis=0), -1.0)
                node.append(int(np.argmax(gain)))
                left[node[-1]] = False
            nodes.append(node)
        return np.array(nodes)

    def improved(self, nodes: np.ndarray) -> np.ndarray:
        """``nodes`` after swaps of two ranks that reduce the rows that cross; only for few ranks."""
        if self._cp_size > _MOST_EXCHANGED:
            return nodes
        nodes = nodes.copy()
        for _ in range(_MOST_PASSES):
            before = self.crossing(nodes)
            for a in range(len(nodes)):
                for b in range(a + 1, len(nodes)):
                    self._exchange(nodes, a, b)
            if self.crossing(nodes) == before:
                break
        return nodes

    def _exchange(self, nodes: np.ndarray, a: int, b: int) -> None:
        best = self._missing(nodes[a]) + self._missing(nodes[b])
        for i in range(nodes.shape[1]):
            for j in range(nodes.shape[1]):
                nodes[a, i], nodes[b, j] = nodes[b, j], nodes[a, i]
                cost = self._missing(nodes[a]) + self._missing(nodes[b])
                if cost < best:
                    best = cost
                else:
                    nodes[a, i], nodes[b, j] = nodes[b, j], nodes[a, i]
