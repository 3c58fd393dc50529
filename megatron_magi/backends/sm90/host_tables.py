"""Tables of a mask for the Hopper kernels, made on the CPU, without tensors or a GPU.

The tables that a call would make for a new mask are made here by the same choices and registered under the same keys.
A call that needs a table that was not prepared makes it itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megatron_magi.backends.base import Ready, StageMasks, StageTables, TableUse
from megatron_magi.backends.sm90 import plan as hopper_plan
from megatron_magi.backends.sm90.choices import MaskFacts, Problem, backward_choice, make_problem, sums_meet
from megatron_magi.backends.sm90.mask_numbers import (
    PassShape,
    Prepared,
    backward_numbers,
    forward_numbers,
    items_key,
    seen_numbers,
    tilings_of,
)
from megatron_magi.backends.sm90.plan import DevicePlan, DeviceSchedule, HostPlan, ScheduleKey, Tiling
from megatron_magi.backends.sm90.program import backward_pays
from megatron_magi.backends.sm90.schedule import Schedule
from megatron_magi.backends.sm90.support import sm_count
from megatron_magi.operands.merge import accumulate_dtype

__all__ = ["MaskTables", "facts_meet", "kind", "make", "sm_count"]


@dataclass(frozen=True, eq=False)
class MaskTables:
    """Descriptions of the tables of both passes over one mask, without the arrays; made by `make_tables`.

    Attributes:
        digest, facts: of the mask.
        plans: tilings with their plans, without tables.
        schedules: schedules of the backward in one kernel: tiling, key, and `num_split`.
        numbers: the mask's numbers for a forward and a backward in one launch, if these were asked for.
    """

    digest: bytes
    facts: MaskFacts
    plans: tuple[tuple[Tiling, HostPlan], ...]
    schedules: tuple[tuple[Tiling, ScheduleKey, int], ...]
    numbers: Prepared = (None, None)

    @classmethod
    def nothing(cls, bands: np.ndarray, facts: MaskFacts | None = None) -> MaskTables:
        """Of passes that launch no kernel."""
        return cls(hopper_plan.content_digest(bands), facts or hopper_plan.mask_facts(bands), (), ())

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

    def shapes_of(problem: Problem, num_fetched: int = 0) -> tuple[PassShape, PassShape | None]:
        forward = PassShape(problem, num_fetched, use.num_sms, use.sm_margins[0], use.deterministic)
        return forward, forward._replace(sm_margin=use.sm_margins[1]) if use.needs_backward else None

    tables, arrays = [], []
    for stage, (bands, problem) in enumerate(zip(masks.bands, problems, strict=True)):
        writes_dq = stage == masks.first_backward == 0
        dtype = accumulate_dtype(use.dtype) if use.accumulates and not meet else use.dtype
        dq_bytes = masks.num_rows * use.num_heads[0] * problem.dims[0] * dtype.itemsize
        table, made = make_tables(
            bands, *shapes_of(problem), rooms=(dq_bytes if writes_dq or meet else None,),
            one_launch=stage == 0 and (masks.is_alone or masks.is_fused) and not masks.num_fetched,
            planner=use.planner, facts=facts[stage],
        )  # fmt: skip
        tables.append(table)
        arrays += made
    seldom, numbers = None, tables[0].numbers
    if masks.is_fused:
        assert masks.joined is not None
        table, made = MaskTables.nothing(masks.joined), []
        if masks.num_fetched and masks.num_rows:
            num_keys = masks.num_keys[0] + masks.num_fetched
            forward, backward = shapes_of(problems[0]._replace(num_keys=num_keys), masks.num_fetched)
            backward = backward if backward_pays(use.dims) else None
            table, made = make_tables(
                masks.joined, forward, backward, one_launch=True, planner=use.planner, facts=masks.joined_facts
            )
        if table.plans:
            seldom, tables, arrays = tuple(tables), [table], [*made, *arrays]
            numbers = table.numbers
        else:
            tables.append(table)
    return StageTables(tuple(tables), arrays, seldom, numbers)


def make_tables(
    bands: np.ndarray,
    forward: PassShape,
    backward: PassShape | None,
    *,
    rooms: Sequence[int | None] = (),
    one_launch: bool,
    planner: str = "auto",
    facts: MaskFacts | None = None,
) -> tuple[MaskTables, list[np.ndarray]]:
    """Tables of a mask, on the CPU.

    Args:
        bands: int64 ``[n, 6]``, over keys indexed as in `mask_numbers`.
        forward, backward: shapes of the passes; None if there is no backward.
        rooms: for each way in which the backward may be called as a stage, the size of dq in bytes if its memory can
            hold sums until dq is written, that is, if dq is not added to; else None.
        one_launch: the forward, and the backward if its head dims allow, may be one launch, whose numbers are kept.
        planner: ``native`` plans tiles in C++, ``python`` in numpy, with equal results; ``auto`` in C++ if it is built.
        facts: used to choose kernels; the mask's own when None.

    Returns:
        ``(tables, arrays)``: copy the arrays to the device, then pass them to `MaskTables.keep`.
    """
    facts, problem = hopper_plan.mask_facts(bands) if facts is None else facts, forward.problem
    if not problem.num_rows or not problem.num_keys:
        return MaskTables.nothing(bands, facts), []
    plans: dict[Tiling, HostPlan] = {}
    schedules: dict[tuple[Tiling, ScheduleKey], Schedule] = {}

    def plan_of(tiling: Tiling) -> HostPlan:
        if tiling not in plans:
            plans[tiling] = hopper_plan.make_host_plan(bands, tiling, planner)
        return plans[tiling]

    def schedule_of(tiling: Tiling, key: ScheduleKey) -> Schedule:
        if (tiling, key) not in schedules:
            schedules[tiling, key] = plan_of(tiling).schedule(*key)
        return schedules[tiling, key]

    plan_of(tilings_of(False, facts, forward)["rows"])
    if backward is not None:
        choice, tilings = backward_choice(facts, problem, backward.deterministic), tilings_of(True, facts, backward)
        for tiling in tilings.values():
            plan_of(tiling)
        for room in rooms if choice.whole else ():
            tiling = tilings["keys"]
            schedule_of(tiling, items_key(choice, plan_of(tiling), backward, room))
    numbers: Prepared = None, None
    if one_launch:
        given, of_backward = (facts, seen_numbers(bands, forward.num_own)), None
        if backward is not None and backward_pays(problem.dims):
            of_backward = backward_numbers(*given, backward, plan_of, schedule_of)
        numbers = forward_numbers(*given, forward, plan_of), of_backward
    tables = MaskTables(
        hopper_plan.content_digest(bands),
        facts,
        tuple((tiling, plan.without_table()) for tiling, plan in plans.items()),
        tuple((tiling, key, made.num_split) for (tiling, key), made in schedules.items()),
        numbers,
    )
    return tables, [*(plan.table for plan in plans.values()), *(made.items for made in schedules.values())]
