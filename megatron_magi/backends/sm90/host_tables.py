"""Tables of a mask for the Hopper kernels, made on the CPU, without tensors or a GPU.

The tables that a call would make for a new mask are made here by the same choices and registered under the same keys.
A call that needs a table that was not prepared makes it itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron_magi.backends.base import Ready, StageMasks, StageTables, TableUse
from megatron_magi.backends.sm90 import plan as hopper_plan
from megatron_magi.backends.sm90.choices import (
    BackwardChoice,
    MaskFacts,
    Problem,
    backward_choice,
    forward_tiles,
    make_problem,
    most_split,
    most_split_at_once,
    query_tiles,
    sums_meet,
)
from megatron_magi.backends.sm90.mask_numbers import (
    PassShape,
    Prepared,
    backward_numbers,
    forward_numbers,
    key_tiling,
    row_tiling,
    seen_numbers,
)
from megatron_magi.backends.sm90.plan import DevicePlan, DeviceSchedule, HostPlan, Tiling
from megatron_magi.backends.sm90.program import backward_pays
from megatron_magi.backends.sm90.schedule import Schedule
from megatron_magi.backends.sm90.support import sm_count
from megatron_magi.operands.merge import accumulate_dtype

__all__ = ["MaskTables", "facts_meet", "kind", "make", "sm_count"]


@dataclass(frozen=True)
class BackwardUse:
    """How a backward pass will be called.

    Attributes:
        deterministic: bitwise repeatable results.
        num_sms: streaming multiprocessors that it may use.
        rooms: for each way in which it may be called, the size of dq in bytes if its memory can hold sums until dq is
            written, that is, if dq is not added to; else None.
    """

    deterministic: bool
    num_sms: int
    rooms: tuple[int | None, ...]


class PassShapes(NamedTuple):
    """Shapes of a forward and a backward in one launch each; no backward if it runs in stages."""

    forward: PassShape
    backward: PassShape | None


@dataclass(frozen=True, eq=False)
class MaskTables:
    """Descriptions of the tables of both passes over one mask, without the arrays; made by `make_tables`.

    Attributes:
        digest, facts: of the mask.
        plans: tilings with their plans, without tables.
        schedules: schedules of the backward in one kernel: tiling, `hopper_plan.schedule_key`, and `num_split`.
        numbers: the mask's numbers for a forward and a backward in one launch, if these were asked for.
    """

    digest: bytes
    facts: MaskFacts
    plans: tuple[tuple[Tiling, HostPlan], ...]
    schedules: tuple[tuple[Tiling, tuple, int], ...]
    numbers: Prepared = (None, None)

    @property
    def num_arrays(self) -> int:
        """Number of arrays that are copied to the device."""
        return len(self.plans) + len(self.schedules)

    @property
    def num_plans(self) -> int:
        """Number of plans, each of which keeps the copied memory alive."""
        return len(self.plans)

    def keep(
        self, bands: np.ndarray, tensors: Sequence[Tensor], ready: Ready | None, plan_bytes: int
    ) -> list[DevicePlan]:
        """Registers the tables for calls; they are found as long as the caller keeps the returned objects.

        Args:
            bands: the mask; immutable.
            tensors: the arrays of `make_tables` on the device.
            ready: completion of their copy; None if complete.
            plan_bytes: device memory that each plan keeps alive.
        """
        hopper_plan.remember(bands, self.digest, self.facts)
        left = iter(tensors)
        plans = {tiling: DevicePlan(host, next(left), ready, plan_bytes) for tiling, host in self.plans}
        for tiling, key, num_split in self.schedules:
            plans[tiling].schedules[key] = DeviceSchedule(next(left), num_split, ready)
        return [hopper_plan.keep(self.digest, tiling, plan) for tiling, plan in plans.items()]


def facts_meet(facts: Sequence[MaskFacts], problems: Sequence[Problem], deterministic: bool) -> bool:
    """`choices.sums_meet` of backward passes over masks with these facts; with ``problems`` of the same queries."""
    if not all(p.num_rows for p in problems):
        return False
    chosen = [backward_choice(f, p, deterministic) for f, p in zip(facts, problems, strict=True)]
    return sums_meet(chosen, problems)


def kind(device: torch.device) -> None:
    """Tables depend on nothing of a device but the number of its SMs; see `HostTables`."""
    del device


def make(masks: StageMasks, use: TableUse) -> StageTables:
    """Tables of a plan's masks, on the CPU; see `megatron_magi.backends.base.HostTables`."""
    problems = [make_problem(masks.num_rows, count, *use.num_heads, use.dims) for count in masks.num_keys]
    facts = [hopper_plan.mask_facts(bands) for bands in masks.bands] if masks.facts is None else list(masks.facts)
    if masks.joined_facts is not None and not masks.num_fetched:
        facts[0] = masks.joined_facts  # the mask of the first stage is also that of all
    meet = use.needs_backward and facts_meet(facts, problems, use.deterministic)
    at_once = None
    if masks.is_fused and use.needs_backward and backward_pays(use.dims):
        at_once = _backward_use(masks, use, problems[0], True, meet=True)  # it writes dq in its dtype
    shapes = _pass_shapes(masks, use, problems[0])
    tables, arrays = [], []
    for stage, (bands, problem) in enumerate(zip(masks.bands, problems, strict=True)):
        writes_dq = stage == masks.first_backward == 0
        backward = _backward_use(masks, use, problem, writes_dq, meet) if use.needs_backward else None
        if stage == 0 and at_once is not None and not masks.num_fetched:
            backward = replace(backward, rooms=(*backward.rooms, *at_once.rooms))  # of a rank that fetches nothing
        of_own = shapes if stage == 0 and shapes is not None and not shapes.forward.num_arriving else None
        table, made = make_tables(bands, problem, backward, use.planner, facts[stage], of_own)
        tables.append(table)
        arrays += made
    seldom, numbers = None, tables[0].numbers
    if masks.is_fused:
        assert masks.joined is not None and shapes is not None
        table, made = make_gated_tables(masks.joined, shapes, at_once, use.planner, masks.joined_facts)
        if table.plans:
            seldom, tables, arrays = tuple(tables), [table], [*made, *arrays]
            numbers = table.numbers
        else:
            tables.append(table)
    return StageTables(tuple(tables), arrays, seldom, numbers)


def _pass_shapes(masks: StageMasks, use: TableUse, problem: Problem) -> PassShapes | None:
    """Shapes of passes in one launch each; None if no pass is. ``problem``: of this rank's own keys."""
    if not masks.is_fused and not masks.is_alone:
        return None
    forward = PassShape(
        problem._replace(num_keys=masks.num_keys[0] + masks.num_fetched), masks.num_fetched, use.num_sms,
        use.sm_margins[0], use.deterministic,
    )  # fmt: skip
    backward = forward._replace(sm_margin=use.sm_margins[1])
    return PassShapes(forward, backward if use.needs_backward and backward_pays(use.dims) else None)


def _backward_use(masks: StageMasks, use: TableUse, problem: Problem, writes_dq: bool, meet: bool) -> BackwardUse:
    """How the backward of a stage will be called; ``meet``: stages share their sums of dq."""
    dtype = accumulate_dtype(use.dtype) if use.accumulates and not meet else use.dtype
    dq_bytes = masks.num_rows * use.num_heads[0] * problem.dims[0] * dtype.itemsize
    return BackwardUse(
        deterministic=use.deterministic,
        num_sms=max(1, use.num_sms - use.sm_margins[1]),
        rooms=(dq_bytes if writes_dq or meet else None,),
    )


def make_tables(
    bands: np.ndarray,
    problem: Problem,
    backward: BackwardUse | None,
    planner: str = "auto",
    facts: MaskFacts | None = None,
    shapes: PassShapes | None = None,
) -> tuple[MaskTables, list[np.ndarray]]:
    """Tables of a mask, on the CPU.

    Args:
        bands: int64 ``[n, 6]``.
        problem: shape of the passes.
        backward: how the backward will be called; None if there is none.
        planner: ``native`` plans tiles in C++, ``python`` in numpy, with equal results; ``auto`` in C++ if it is built.
        facts: used to choose kernels; the mask's own when None.
        shapes: of the passes, if each is one launch.

    Returns:
        ``(tables, arrays)``: copy the arrays to the device, then pass them to `MaskTables.keep`.
    """
    digest, facts = hopper_plan.content_digest(bands), hopper_plan.mask_facts(bands) if facts is None else facts
    if not problem.num_rows or not problem.num_keys:
        return MaskTables(digest, facts, (), ()), []
    num_arriving, num_sms = (0, 0) if shapes is None else (shapes.forward.num_arriving, shapes.forward.num_sms)
    plans: dict[Tiling, HostPlan] = {}
    schedules: list[tuple[Tiling, tuple, Schedule]] = []
    _make(bands, plans, planner, row_tiling(problem, forward_tiles(facts, problem), num_arriving, num_sms))
    if backward is not None:
        choice, num_sms = backward_choice(facts, problem, backward.deterministic), backward.num_sms
        tiling = key_tiling(problem, choice, num_arriving, num_sms)
        plan = _make(bands, plans, planner, tiling)
        if choice.whole:
            most = [
                most_split_at_once(choice, problem, room or 0) if num_arriving else most_split(choice, problem, room)
                for room in backward.rooms
            ]
            schedules += _schedules(plan, tiling, problem, choice, backward, most)
        if not choice.adds_dq:
            tiles = query_tiles(problem, choice.packed)
            _make(bands, plans, planner, row_tiling(problem, tiles, num_arriving, num_sms, products=3.0))
    tables, arrays = _as_tables(digest, facts, plans, schedules)
    return replace(tables, numbers=_numbers(bands, facts, shapes, plans, schedules)), arrays


def make_gated_tables(
    bands: np.ndarray,
    shapes: PassShapes,
    backward: BackwardUse | None,
    planner: str = "auto",
    facts: MaskFacts | None = None,
) -> tuple[MaskTables, list[np.ndarray]]:
    """`make_tables` of passes with fetched keys; no tables if this rank fetches none.

    Args:
        bands: over keys indexed as in `mask_numbers`.
        shapes: of the passes.
        backward, planner, facts: as in `make_tables`.
    """
    problem, num_arriving, *_ = shapes.forward
    if not problem.num_rows or not num_arriving:
        return MaskTables(hopper_plan.content_digest(bands), hopper_plan.mask_facts(bands), (), ()), []
    return make_tables(bands, problem, backward, planner, facts, shapes)


def _numbers(
    bands: np.ndarray,
    facts: MaskFacts,
    shapes: PassShapes | None,
    plans: dict[Tiling, HostPlan],
    schedules: list[tuple[Tiling, tuple, Schedule]],
) -> Prepared:
    """The mask's numbers for passes of these shapes."""
    if shapes is None:
        return None, None
    shape, known = shapes.forward, {(tiling, key): schedule for tiling, key, schedule in schedules}

    def schedule_of(tiling: Tiling, key: tuple) -> tuple[int, int]:
        schedule = known[tiling, key]
        return len(schedule.items), schedule.num_split

    seen, of_plans = seen_numbers(bands, shape.num_own), plans.__getitem__
    backward = None
    if shapes.backward is not None:
        backward = backward_numbers(facts, seen, shapes.backward, of_plans, schedule_of)
    return forward_numbers(facts, seen, shape, of_plans), backward


def _schedules(
    plan: HostPlan,
    tiling: Tiling,
    problem: Problem,
    choice: BackwardChoice,
    use: BackwardUse,
    splits: Sequence[int],
) -> list[tuple[Tiling, tuple, Schedule]]:
    """Schedules of the kernel for dk and dv: one for each distinct result of ``splits`` (`most_split`)."""
    group = problem.group // choice.packed
    keys = [
        hopper_plan.schedule_key(plan, problem.num_heads_kv, group, use.num_sms, split, problem.is_narrow)
        for split in splits
    ]
    return [(tiling, key, plan.schedule(*key)) for key in dict.fromkeys(keys)]


def _as_tables(
    digest: bytes, facts: MaskFacts, plans: dict[Tiling, HostPlan], schedules: list[tuple[Tiling, tuple, Schedule]]
) -> tuple[MaskTables, list[np.ndarray]]:
    tables = MaskTables(
        digest,
        facts,
        tuple((tiling, plan.without_table()) for tiling, plan in plans.items()),
        tuple((tiling, key, made.num_split) for tiling, key, made in schedules),
    )
    return tables, [*(plan.table for plan in plans.values()), *(made.items for *_, made in schedules)]


def _make(bands: np.ndarray, plans: dict[Tiling, HostPlan], planner: str, tiling: Tiling) -> HostPlan:
    if tiling not in plans:
        plans[tiling] = hopper_plan.make_host_plan(bands, tiling, planner)
    return plans[tiling]
