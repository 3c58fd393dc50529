"""Attention whose queries travel by groups of heads: tensors in the order of groups, and results back.

In the order of groups the rows of a shard with the heads of the first group come first, then the same rows with those
of the second, and so on: the sequence that `megatron_magi.plan.head_groups` plans.
"""

from __future__ import annotations

from torch import Tensor

from megatron_magi.config import MagiConfig
from megatron_magi.operands.options import check_tensor
from megatron_magi.plan import RankPlan


def check_options(plan: RankPlan, config: MagiConfig, return_max_logits: bool) -> None:
    """Raises ValueError for options that groups do not have; with ``flatten_head_groups`` for masks without groups too,
    as those of another step may have them.
    """
    if return_max_logits and (plan.head_groups > 1 or (config.dispatch.flatten_head_groups and plan.cp_size > 1)):
        raise ValueError("return_max_logits: not with dispatch.flatten_head_groups, a row has parts on several ranks")
    if plan.head_groups > 1 and config.comm.dsink_all_reduce != "none":
        raise ValueError(
            f"dsink_all_reduce: {config.comm.dsink_all_reduce!r} does not go with dispatch.flatten_head_groups"
        )


def check_groups(q: Tensor, k: Tensor, v: Tensor, plan: RankPlan) -> None:
    """Raises ValueError for tensors that cannot be brought into the order of groups."""
    groups, rows = plan.head_groups, plan.num_rows // plan.head_groups
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, x)
        if x.dim() != 3 or x.shape[0] != rows:
            raise ValueError(
                f"{name}: expected [{rows}, heads, dim], the rows of this rank's shard, got {list(x.shape)}"
            )
        if x.shape[1] % groups:
            raise ValueError(
                f"{name}: {x.shape[1]} heads, but the plan is for {groups} groups of them; give its key the heads"
            )


def to_groups(x: Tensor, groups: int) -> Tensor:
    """``[rows, heads, ...]`` as ``[groups * rows, heads / groups, ...]``; a copy, differentiable."""
    return x.unflatten(1, (groups, -1)).transpose(0, 1).flatten(0, 1)


def from_groups(x: Tensor, groups: int) -> Tensor:
    """The inverse of `to_groups`."""
    return x.unflatten(0, (groups, -1)).transpose(0, 1).flatten(1, 2)


def sink_of_groups(sink: Tensor, layout: str, rows: int, groups: int) -> Tensor:
    """The sink of each row of each group, ``[groups * rows, num_sinks, heads / groups]`` (layout ``ssh``).

    Args:
        sink: ``[num_sinks, heads]`` (layout ``sh``) or ``[rows, num_sinks, heads]`` (``ssh``).
        layout: which of both.
        rows: of the shard.
        groups: number of groups.
    """
    if layout == "sh":
        sink = sink.expand(rows, *sink.shape)
    return sink.unflatten(2, (groups, -1)).permute(2, 0, 1, 3).flatten(0, 1)
