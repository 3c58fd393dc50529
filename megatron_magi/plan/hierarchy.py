"""A transfer in two levels: what several ranks of another node need crosses once, and is handed on inside."""

from __future__ import annotations

import numpy as np

from megatron_magi.mask import bands as bd
from megatron_magi.plan.exchange import Pieces, exchange, rows_of
from megatron_magi.plan.types import Levels


def two_levels(pieces: Pieces, rank: int, num_ranks: int, ranks_per_node: int) -> Levels:
    """The two levels of a transfer.

    Args:
        pieces: of all ranks.
        rank: whose view.
        num_ranks: of the group, a multiple of ``ranks_per_node``.
    """
    per_node, node = ranks_per_node, rank // ranks_per_node
    src_node, dst_node = pieces.src // per_node, pieces.dst // per_node
    inside = pieces.take(np.flatnonzero((src_node == node) & (dst_node == node)))
    near, near_arriving = exchange(_in_node(inside, per_node), rank % per_node, per_node)

    # What any rank of a node needs of a rank outside it, each row once.
    crossing = pieces.take(np.flatnonzero(src_node != dst_node))
    key = crossing.dst // per_node * num_ranks + crossing.src
    ranges, key = bd.merge_ranges(np.stack([crossing.row, crossing.row + crossing.length], axis=1), key)
    once = Pieces(key % num_ranks, key // num_ranks, ranges[:, 0], ranges[:, 1] - ranges[:, 0], np.zeros_like(key))
    mine = once.take(np.flatnonzero(once.src % per_node == rank % per_node))
    far, _ = exchange(mine._replace(src=mine.src // per_node), node, num_ranks // per_node)

    arriving = once.take(np.flatnonzero(once.dst == node))
    arriving = arriving.take(np.lexsort((arriving.row, arriving.src, arriving.src % per_node)))
    before = _before(arriving.length, arriving.src % per_node)
    handed_on = crossing.take(np.flatnonzero(crossing.dst // per_node == node))
    # Where each lies in the buffer of the rank that it comes to first.
    order = np.lexsort((arriving.row, arriving.src))
    lift = int(max(arriving.row.max(initial=0), handed_on.row.max(initial=0))) + 1
    starts = (arriving.src * lift + arriving.row)[order]
    at = order[np.searchsorted(starts, handed_on.src * lift + handed_on.row, side="right") - 1]
    handed_on = handed_on._replace(row=before[at] + handed_on.row - arriving.row[at])
    relay, relay_arriving = exchange(_in_node(handed_on, per_node), rank % per_node, per_node)
    near_rows, relay_rows = (rows_of(some.place, some.length) for some in (near_arriving, relay_arriving))
    return Levels(per_node, near, far, relay, near_rows, relay_rows)


def _in_node(pieces: Pieces, per_node: int) -> Pieces:
    return pieces._replace(src=pieces.src % per_node, dst=pieces.dst % per_node)


def _before(length: np.ndarray, group: np.ndarray) -> np.ndarray:
    """Rows of the same group before each piece; pieces are sorted by group."""
    ahead = np.cumsum(length) - length
    first = np.searchsorted(group, group, side="left")
    return ahead - ahead[first] if len(ahead) else ahead
