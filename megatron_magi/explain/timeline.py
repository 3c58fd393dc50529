"""When each rank computes and communicates, by the rates that a plan's stages are chosen with.

Those leave out launches and what tiles compute in addition to the mask, which `plan.predict` counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_magi.mask import bands as bd
from megatron_magi.plan import Plan
from megatron_magi.plan.degree import BACKWARD_WORK, stage_costs
from megatron_magi.plan.types import RankPlan, Step, StepKind


@dataclass(frozen=True)
class Span:
    """One step of one rank.

    Attributes:
        step: what is done, and of which stage.
        start, end: microseconds from the start of the pass.
    """

    step: Step
    start: float
    end: float


def forward_timeline(plan: Plan) -> list[list[Span]]:
    """Steps of the forward pass of each rank, in their order."""
    return [_walk(plan, plan.for_rank(rank), plan.schedule.forward, 1.0) for rank in range(plan.cp_size)]


def backward_timeline(plan: Plan) -> list[list[Span]]:
    """Steps of the backward pass of each rank, in their order."""
    return [_walk(plan, plan.for_rank(rank), plan.schedule.backward, BACKWARD_WORK) for rank in range(plan.cp_size)]


def _walk(plan: Plan, rank_plan: RankPlan, steps: Sequence[Step], work: float) -> list[Span]:
    """Attention steps follow each other, and so do transfers; one transfer runs at the same time as one attention step.

    A fetch starts when the attention step before it in the schedule has ended, as keys of at most two stages are kept.
    """
    cost = stage_costs(plan.config.overlap.cost, plan.config.dispatch.rates)
    computed = sent = 0.0
    ready: dict[int, float] = {}  # when fetched keys are there; own ones are from the start
    spans = []
    for step in steps:
        if step.kind is StepKind.ATTEND:
            area = int(bd.areas(rank_plan.bands[step.stage]).sum())
            start = max(computed, ready.get(step.stage, 0.0))
            end = computed = start + work * float(cost.attend_us(area)) + cost.stage_latency_us
        else:
            transfer = rank_plan.transfers[step.stage - 1]
            rows = transfer.num_recv if step.kind is StepKind.FETCH else transfer.num_send
            start = max(sent, computed)
            end = sent = start + float(cost.fetch_us(rows))
            if step.kind is StepKind.FETCH:
                ready[step.stage] = end
        spans.append(Span(step, start, end))
    return spans
