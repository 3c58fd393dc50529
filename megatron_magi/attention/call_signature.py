"""The record of a call of distributed attention, which ranks compare, and checks of its arguments."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist

from megatron_magi.backends.base import Backend, is_changing
from megatron_magi.config import MagiConfig
from megatron_magi.operands.finite import Describe, is_visible, kind_of_row
from megatron_magi.operands.options import check_qkv, check_sink, check_tensor
from megatron_magi.plan import RankPlan


class AttentionCall(NamedTuple):
    """What ranks must agree on in addition to the plan; the number of rows of each rank is in the plan.

    Attributes:
        sink: layout, number of sinks, and whether its gradient is wanted.
        gradient: a backward will follow, which is collective.
    """

    operation: str
    dtype: torch.dtype
    num_heads_q: int
    num_heads_kv: int
    head_dim: int
    head_dim_v: int
    sink: tuple[str, int, bool] | None
    softmax_scale: float
    softcap: float
    max_logits: bool
    gradient: bool
    sanity_check: bool

    @classmethod
    def of(
        cls,
        operation: str,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sink: torch.Tensor | None,
        *,
        sink_layout: str,
        softmax_scale: float,
        softcap: float,
        max_logits: bool,
        sanity_check: bool,
    ) -> AttentionCall:
        """The record for these tensors, whose shapes have been checked."""
        wants = sink is not None and sink.requires_grad
        (_, num_heads_q, head_dim), (_, num_heads_kv, head_dim_v) = q.shape, v.shape
        return cls(
            operation,
            q.dtype,
            num_heads_q,
            num_heads_kv,
            head_dim,
            head_dim_v,
            None if sink is None else (sink_layout, sink.shape[-2], wants),
            softmax_scale,
            softcap,
            max_logits,
            torch.is_grad_enabled() and (wants or q.requires_grad or k.requires_grad or v.requires_grad),
            sanity_check,
        )


def verifies(config: MagiConfig) -> bool:
    """Whether ranks compare their calls of attention, and hear of each other's errors."""
    return config.comm.verify or config.attend.sanity_check


def describe_row(plan: RankPlan) -> Describe:
    """What a row of this rank's shard is: padding, computed elsewhere, visible in the whole mask, or hidden by it."""

    def describe(name: str, row: int) -> str:
        rank, of_copy = f", on rank {plan.cp_rank} of the group", row
        if plan.head_groups > 1:
            group, of_copy = divmod(row, plan.num_rows // plan.head_groups)
            rank = f", in row {of_copy} of group {group} of heads{rank}"
        if name == "sink":
            return rank.removeprefix(", ")
        if of_copy >= plan.num_tokens:
            return f"it is padding{rank}"
        if name in ("k", "v"):
            sent = any((transfer.send_index == row).any() for transfer in plan.transfers)
            return kind_of_row(name, sent or is_visible(plan.bands[0], row, by_key=True)) + rank
        if plan.moves is not None and (plan.moves.rows == row).any():
            return f"another rank computes it{rank}"
        return kind_of_row(name, any(is_visible(bands, row, by_key=False) for bands in plan.bands)) + rank

    return describe


def check_inputs(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: RankPlan, group: dist.ProcessGroup | None
) -> None:
    """Raises ValueError for tensors or a group that do not fit the plan."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, x)
        if x.dim() != 3 or x.shape[0] != plan.num_rows:
            raise ValueError(
                f"{name}: expected [{plan.num_rows}, heads, dim], the rows of this rank's shard, got {list(x.shape)}"
            )
    check_qkv(q, k, v)
    if plan.cp_size == 1:
        return
    if group is None:
        raise ValueError(f"group: the plan is for {plan.cp_size} ranks, so a process group is needed")
    if group.size() != plan.cp_size or group.rank() != plan.cp_rank:
        raise ValueError(
            f"group: this process is rank {group.rank()} of {group.size()}, "
            f"the plan is for rank {plan.cp_rank} of {plan.cp_size}"
        )


def check_static(plan: RankPlan, backend: Backend, sanity_check: bool) -> None:
    """Raises ValueError if a static plan cannot be used: with another implementation, or with checks on the host."""
    bands = plan.bands[0]
    if not is_changing(bands):
        return
    of_other = backend.name != bands.mask.backend
    if of_other or sanity_check:
        what = f"with impl {bands.mask.backend!r} alone, not {backend.name!r}" if of_other else "without sanity_check"
        raise ValueError(f"rank_plan: a static key, or plans of StaticPlans, work {what}")


def check_sinks(sink: torch.Tensor | None, layout: str, q: torch.Tensor) -> None:
    """Raises ValueError for sinks that do not fit their layout or the queries."""
    dims = {"sh": 2, "ssh": 3}
    if layout not in dims:
        raise ValueError(f"sink_layout: expected one of {', '.join(dims)}, got {layout!r}")
    if sink is None:
        return
    check_tensor("sink", sink)
    if sink.dim() != dims[layout]:
        raise ValueError(
            f"sink: expected {dims[layout]} dimensions with sink_layout {layout!r}, got {list(sink.shape)}"
        )
    check_sink(sink, q)
