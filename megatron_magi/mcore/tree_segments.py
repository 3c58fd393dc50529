"""Trees as ``TreePackedSeqParams`` describes them, which Megatron-LM's pull request 7387 proposes for megatron-core.

There a microbatch is one packed sequence of segments in depth-first order, each rank holds given tokens of it, and
every query attends causally to its segment and its ancestors. `key_of_segments` makes a key of it, so that `calc_attn`
computes this attention over tokens where they lie, in one pass and with the keys that a rank lacks, instead of once for
each run of queries over gathered keys. No release of megatron-core has the class: any object with its fields is taken.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from megatron_magi.api import DistAttnRuntimeKey, magi_attn_flex_key
from megatron_magi.api.make_key import made_on_all_ranks
from megatron_magi.checks import int_array, integer
from megatron_magi.comm.groups import Group, group_of
from megatron_magi.config import MagiConfig
from megatron_magi.mask import AttnMask
from megatron_magi.mask.prefix_tree import mask_of_parents

_FIELDS = ("starts", "lengths", "parents", "depths")


def key_of_segments(
    params: Any,
    num_heads_q: int | None = None,
    num_heads_kv: int | None = None,
    head_dim: int | None = None,
    cp_group_or_mesh: Group = None,
    config: MagiConfig | None = None,
) -> DistAttnRuntimeKey:
    """Makes the key of a microbatch. Collective, if there are several ranks.

    Args:
        params: with ``tree_segment_starts``, ``tree_segment_lengths``, ``tree_segment_parents`` (-1 for a root) and
            ``tree_segment_depths`` (tokens before a segment in its samples), int ``[num_segments]``;
            ``tree_cp_gather_inverse``, int ``[num_tokens]``: for each token its row in the shards of all ranks, one
            after another, which are equally long; ``tree_cp_local_token_count``, the rows of a shard; and
            ``tree_local_position_ids``, int ``[num_rows]`` of this rank.
        num_heads_q, num_heads_kv, head_dim: of the attention on this rank.
        cp_group_or_mesh: the context-parallel ranks; one rank when None.
        config: how the mask is planned and attention runs; None for the defaults.

    Returns:
        A key whose rows are the shard of ``params``; tokens of no segment see nothing.

    Raises:
        ValueError: a field is missing or does not fit the others or the ranks.
    """
    group = group_of(cp_group_or_mesh, "cp_group_or_mesh")
    cp_size, cp_rank = (1, 0) if group is None else (group.size(), group.rank())
    with made_on_all_ranks(group, config):
        row_of_token = _field(params, "tree_cp_gather_inverse")
        count = integer(getattr(params, "tree_cp_local_token_count", None), "tree_cp_local_token_count")
        total = len(row_of_token)
        if count * cp_size != total:
            raise ValueError(f"tree_cp_local_token_count: {total} tokens on {cp_size} ranks, got {count} on this one")
        if not np.array_equal(np.sort(row_of_token), np.arange(total)):
            raise ValueError("tree_cp_gather_inverse: expected each row of the shards once")
        shards = np.argsort(row_of_token).reshape(cp_size, count)
        mask, positions = _mask(params, total)
        expected, found = positions[shards[cp_rank]], _field(params, "tree_local_position_ids")
        is_token = expected >= 0
        if len(found) != count or (found[is_token] != expected[is_token]).any():
            raise ValueError("tree_local_position_ids: they are not those of the segments' tokens on this rank")
    return magi_attn_flex_key(
        *mask.to_ranges(),
        num_heads_q=num_heads_q,
        num_heads_kv=num_heads_kv,
        head_dim=head_dim,
        cp_group_or_mesh=group,
        dist_attn_config=config,
        layout=list(shards),
    )


def _field(params: Any, name: str) -> np.ndarray:
    value = getattr(params, name, None)
    if value is None:
        raise ValueError(f"{name}: expected integers, got None")
    return int_array(value, name).astype(np.int64)


def _mask(params: Any, total: int) -> tuple[AttnMask, np.ndarray]:
    """The mask, and each token's place in its samples, -1 where it is in no segment."""
    starts, lengths, parents, depths = (_field(params, f"tree_segment_{name}") for name in _FIELDS)
    num_segments = len(starts)
    if not len(lengths) == len(parents) == len(depths) == num_segments:
        raise ValueError("tree_segment_lengths, tree_segment_parents, tree_segment_depths: as many as starts")
    if (parents < -1).any() or (parents >= np.arange(num_segments)).any():
        raise ValueError(f"tree_segment_parents: expected an earlier segment or -1, got {parents.tolist()}")
    ends = starts + lengths
    if (lengths < 0).any() or (starts < np.append(0, ends[:-1])).any() or ends.max(initial=0) > total:
        raise ValueError(f"tree_segment_starts: segments overlap or are not within {total} tokens")
    before = np.where(parents < 0, 0, depths[parents] + lengths[parents]) if num_segments else depths
    if not np.array_equal(depths, before):
        raise ValueError(f"tree_segment_depths: expected {before.tolist()} by the parents, got {depths.tolist()}")
    # Before each segment and at the end a node in no path, of the tokens that are in no segment.
    gaps = np.append(starts, total) - np.append(0, ends)
    node_lengths = np.append(np.column_stack([gaps[:-1], lengths]).reshape(-1), gaps[-1])
    mask = mask_of_parents(
        node_lengths, {2 * i + 1: 2 * p + 1 if p >= 0 else -1 for i, p in enumerate(parents.tolist())}
    )
    positions = np.full(total, -1)
    for start, end, depth in zip(starts.tolist(), ends.tolist(), depths.tolist(), strict=True):
        positions[start:end] = np.arange(depth, depth + end - start)
    return mask, positions
