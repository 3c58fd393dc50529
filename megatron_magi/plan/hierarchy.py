"""A transfer in two levels: rows that several ranks of another node need are sent to it once and relayed inside."""

from __future__ import annotations

import numpy as np

from megatron_magi.mask import bands as bd
from megatron_magi.plan.exchange import exchange, rows_of
from megatron_magi.plan.partition import Ranges, Runs, from_others
from megatron_magi.plan.types import Levels


def two_levels(ranges: Ranges, runs: Runs, rank: int, num_ranks: int, ranks_per_node: int) -> Levels:
    """The two levels of a transfer.

    Args:
        ranges: ranges that all ranks fetch.
        runs: where they are; at least one.
        rank: this rank.
        num_ranks: ranks of the group, a multiple of ``ranks_per_node``.
    """
    per_node = ranks_per_node
    node, at = divmod(rank, per_node)
    to_here = ranges.take(np.flatnonzero(ranges.dst // per_node == node))
    to_here = to_here._replace(dst=to_here.dst % per_node)
    node_of, place_of = runs.rank // per_node, runs.rank % per_node
    inside = runs._replace(rank=place_of).take(np.flatnonzero(node_of == node))
    near, *near_pieces = exchange(to_here, inside, at, per_node)

    # Rows that any rank of a node needs from other nodes, each once.
    needed = np.stack([ranges.start, ranges.end], axis=1)
    dst, start, end = from_others(needed, ranges.dst // per_node, runs._replace(rank=node_of))
    once = Ranges(dst, start, end, np.zeros_like(dst))
    same = runs._replace(rank=node_of).take(np.flatnonzero(place_of == at))
    far, *_ = exchange(once, same, node, num_ranks // per_node)
    relay, *relay_pieces = exchange(
        to_here, _arrived(once.take(np.flatnonzero(dst == node)), runs, per_node), at, per_node
    )
    return Levels(per_node, near, far, relay, rows_of(*near_pieces), rows_of(*relay_pieces))


def _arrived(ranges: Ranges, runs: Runs, per_node: int) -> Runs:
    """Runs of the rows that a node fetches from others, in the buffers of the ranks that receive them first."""
    i, j = bd.cut_intervals(ranges.start, ranges.end, runs.start, runs.end)
    start, end, src = np.maximum(ranges.start[i], runs.start[j]), np.minimum(ranges.end[i], runs.end[j]), runs.rank[j]
    holder = src % per_node
    # As `exchange` sends them: by row of the owner, which need not ascend with tokens.
    order = np.lexsort((runs.local[j] + start - runs.start[j], src, holder))
    length, holders = (end - start)[order], holder[order]
    ahead = np.cumsum(length) - length
    local = np.empty_like(start)
    local[order] = ahead - ahead[np.searchsorted(holders, holders)]
    return Runs(start, end, holder, local)
