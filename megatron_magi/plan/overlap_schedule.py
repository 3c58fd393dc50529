"""The order of the steps of a pass, with overlap, without overlap, and with a hidden last reduction."""

from __future__ import annotations

from functools import lru_cache

from megatron_magi.plan.types import Schedule, Step, StepKind

_FETCH, _ATTEND, _REDUCE = StepKind.FETCH, StepKind.ATTEND, StepKind.REDUCE


@lru_cache(maxsize=64)
def make_schedule(degree: int, *, overlap: bool = True, hide_tail_reduce: bool = False) -> Schedule:
    """Steps of the forward and the backward pass for ``degree`` remote stages.

    With overlap, stage s + 1 is fetched while stage s is computed, so at most two stages'
    keys are in memory. The backward fetches the keys again instead of keeping them.

    ``hide_tail_reduce`` keeps the last stage's keys from the forward: the backward starts with
    them and ends with the local stage, which overlaps with the last reduction.
    """
    if degree == 0:
        only = (Step(_ATTEND, 0),)
        return Schedule(only, only)
    if not overlap:
        forward = [s for i in range(1, degree + 1) for s in (Step(_FETCH, i), Step(_ATTEND, i))]
        backward = [s for i in range(1, degree + 1) for s in (Step(_FETCH, i), Step(_ATTEND, i), Step(_REDUCE, i))]
        return Schedule((*forward, Step(_ATTEND, 0)), (*backward, Step(_ATTEND, 0)))
    forward = _pipelined(list(range(degree + 1)), saved=None, reduce=False)
    if hide_tail_reduce:
        order = [degree, *range(1, degree), 0]
        return Schedule(forward, _pipelined(order, saved=degree, reduce=True), saved_stage=degree)
    return Schedule(forward, _pipelined(list(range(degree + 1)), saved=None, reduce=True))


def _pipelined(order: list[int], saved: int | None, reduce: bool) -> tuple[Step, ...]:
    """Attends the stages in ``order``; each fetch starts before the attend that precedes its use."""
    to_fetch = [s for s in order if s not in (0, saved)]
    steps: list[Step] = []
    for stage in order:
        if stage in to_fetch[:1] and Step(_FETCH, stage) not in steps:
            steps.append(Step(_FETCH, stage))  # not overlapped: the first stage is remote
        if stage in to_fetch:
            to_fetch.remove(stage)
        if to_fetch and Step(_FETCH, to_fetch[0]) not in steps:
            steps.append(Step(_FETCH, to_fetch[0]))
        steps.append(Step(_ATTEND, stage))
        if reduce and stage != 0:
            steps.append(Step(_REDUCE, stage))
    return tuple(steps)
