"""Who computes what and what travels when: pure data, made on the CPU.

`plan` is the entrance; `dispatch` decides which rank holds which tokens, `predict` predicts times, `types` is the
result.
"""

from megatron_magi.plan.layouts import LAYOUTS, Layout, given_dispatch
from megatron_magi.plan.plan import Plan, PlanStats, dispatch_from_chunks, make_dispatch, make_plan, who_computes
from megatron_magi.plan.plan_set import PlanSet
from megatron_magi.plan.types import Dispatch, RankPlan, Schedule, Step, StepKind, Transfer

__all__ = [
    "LAYOUTS",
    "Dispatch",
    "Layout",
    "Plan",
    "PlanSet",
    "PlanStats",
    "RankPlan",
    "Schedule",
    "Step",
    "StepKind",
    "Transfer",
    "dispatch_from_chunks",
    "given_dispatch",
    "make_dispatch",
    "make_plan",
    "who_computes",
]
