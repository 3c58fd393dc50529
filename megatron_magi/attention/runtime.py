"""A rank's plan on its device: what the steps of a schedule need, made once a plan and device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron_magi.comm.group_collective import GroupCastArgs
from megatron_magi.plan import RankPlan


@dataclass(frozen=True, eq=False)
class PlanRuntime:
    """Device copies of the index arrays of a plan; ``casts[s - 1]`` feeds stage s."""

    plan: RankPlan
    casts: tuple[GroupCastArgs, ...]


def plan_runtime(plan: RankPlan, device: torch.device) -> PlanRuntime:
    """The runtime of ``plan`` on ``device``; kept with the plan, so it lives as long as the plan."""
    key = str(device)
    runtime = plan.runtime.get(key)
    if runtime is None:
        casts = tuple(
            GroupCastArgs.build(t.send_index, t.send_splits, t.recv_splits, t.recv_order, device)
            for t in plan.transfers
        )
        runtime = plan.runtime[key] = PlanRuntime(plan, casts)
    return runtime
