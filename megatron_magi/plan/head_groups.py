"""Groups of heads as a second axis of what travels: a query may be computed by one rank for some heads, by another for
others.

A group is some key heads with their query heads. Attention of each is independent, so the problem is that of a longer
sequence with fewer heads: one copy of the mask and of the layout for each group, one after the other. Hosts then fetch
the keys of the groups that they compute, not of all heads.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from megatron_magi.config import CostModel, MagiConfig, OverlapConfig
from megatron_magi.cost_model import Rates
from megatron_magi.mask import AttnMask
from megatron_magi.plan.types import Dispatch

MOST_GROUPS = 8
"""More are joined: each copies the mask, so that planning takes as many times longer."""


def num_groups(config: MagiConfig) -> int:
    """Groups that queries may travel by: 1 unless ``dispatch.flatten_head_groups``, else a divisor of the key heads."""
    heads = config.overlap.cost.num_heads_kv
    if not config.dispatch.flatten_head_groups:
        return 1
    return max(groups for groups in range(1, MOST_GROUPS + 1) if heads % groups == 0)


def copied_mask(mask: AttnMask, padded_seqlen: int, groups: int) -> AttnMask:
    """The mask of each group, one after the other; padding, which sees nothing, is part of each copy.

    Args:
        mask: of the sequence.
        padded_seqlen: tokens of a copy, padding included.
        groups: number of copies.
    """
    offset = np.array([padded_seqlen] * 4 + [0])  # ranges of queries and of keys, type
    table = np.asarray(mask.table)
    return AttnMask(np.concatenate([table + group * offset for group in range(groups)]), groups * padded_seqlen)


def copied_chunks(dispatch: Dispatch, groups: int) -> tuple[int, np.ndarray, np.ndarray, int, np.ndarray]:
    """Arguments of `dispatch_from_chunks` for a copy of a layout for each group: a rank has its rows of each."""
    padded, starts = dispatch.padded_seqlen, dispatch.chunk_bounds[:-1]
    length = np.array(dispatch.shard_lengths, dtype=np.int64)[dispatch.chunk_rank]
    at = np.arange(groups, dtype=np.int64)[:, None]
    bounds = np.append((starts + at * padded).ravel(), groups * padded)
    rows = (dispatch.chunk_row + at * length).ravel()
    return groups * padded, bounds, np.tile(dispatch.chunk_rank, groups), dispatch.cp_size, rows


def cost_of_group(cost: CostModel, groups: int) -> CostModel:
    """The shape of the attention of one group.

    Raises:
        ValueError: the heads are no multiple of ``groups``.
    """
    for name in ("num_heads_q", "num_heads_kv"):
        if getattr(cost, name) % groups:
            raise ValueError(f"head_groups: {groups} do not divide {name}={getattr(cost, name)}")
    return replace(cost, num_heads_q=cost.num_heads_q // groups, num_heads_kv=cost.num_heads_kv // groups)


def overlap_of_group(overlap: OverlapConfig, groups: int) -> OverlapConfig:
    """The configuration for the attention of one group."""
    return overlap if groups == 1 else replace(overlap, cost=cost_of_group(overlap.cost, groups))


def copies_us(num_rows: int, cost: CostModel, rates: Rates) -> float:
    """Microseconds to bring q, k, v, out and their gradients into the order of groups, or back: read and written."""
    dk, dv = cost.head_dims
    elements = 2 * (cost.num_heads_q + cost.num_heads_kv) * (dk + dv)
    return 2 * num_rows * elements * cost.element_bytes / (rates.memory_gbytes_per_s * 1e3)
