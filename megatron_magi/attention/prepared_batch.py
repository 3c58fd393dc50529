"""A prepared batch: everything attention needs for a microbatch, made on the CPU before its step.

A worker process of a data loader, or a thread, makes it (`prepare_batch`): plans of this rank, index arrays of their
collectives, tile plans of both passes and every stage. None of this needs a GPU. In the step of the microbatch,
`PreparedBatch.to` copies all of it to the device in one asynchronous copy. Layers then only look up tables and launch.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron_magi.attention.collective_args import cast_tables, joined_transfer, uploaded_args
from megatron_magi.attention.distributed import make_calls_ready
from megatron_magi.attention.fused_comm import is_alone, joined_bands, keep_joined_bands, pays
from megatron_magi.attention.travel import TravelArgs
from megatron_magi.backends.base import Backend, MaskTables, Ready, StageMasks, TableUse
from megatron_magi.checks import instance
from megatron_magi.comm.group_collective import CastFacts, LevelFacts
from megatron_magi.config import MagiConfig
from megatron_magi.ops.slice_passes import backend_that, table_backend
from megatron_magi.plan import RankPlan, StepKind
from megatron_magi.plan.types import Runtime
from megatron_magi.runtime.shm_transport import Sendable
from megatron_magi.runtime.upload import PackedArrays, pack


class AttnShape(NamedTuple):
    """Heads and dtype of attention, on one tensor-parallel rank.

    Attributes:
        num_heads_q, num_heads_kv: of queries; of keys and values.
        head_dim: of queries and keys.
        head_dim_v: of values.
        dtype: of q, k and v.
        num_sms: streaming multiprocessors of the GPU, if the backend makes tables of masks on the host (`kernels_for`);
            None for others, for which there is nothing to prepare.
        backend: the name of that backend; the first of those that make tables if only ``num_sms`` is given.
        kind: what else of the GPU tables depend on (`megatron_magi.backends.base.HostTables.kind`).
    """

    num_heads_q: int
    num_heads_kv: int
    head_dim: int
    head_dim_v: int
    dtype: torch.dtype
    num_sms: int | None = None
    backend: str | None = None
    kind: Any = None

    def kernels_for(self, device: torch.device | str, impl: str = "auto") -> AttnShape:
        """The shape with `num_sms` of a device and the backend that ``impl`` selects there, or without both."""
        device = torch.device(device)
        backend = table_backend(impl, device, self.dtype, (self.head_dim, self.head_dim_v))
        if backend is None or backend.tables is None:
            return self._replace(num_sms=None, backend=None, kind=None)
        tables = backend.tables
        return self._replace(num_sms=tables.sm_count(device), backend=backend.name, kind=tables.kind(device))

    def of_group(self, groups: int) -> AttnShape:
        """The shape of one of several groups of heads.

        Raises:
            ValueError: the heads are no multiple of ``groups``.
        """
        if self.num_heads_kv % groups or self.num_heads_q % groups:
            raise ValueError(
                f"shape: {self.num_heads_q}:{self.num_heads_kv} heads, and plans for {groups} groups of them"
            )
        return self._replace(num_heads_q=self.num_heads_q // groups, num_heads_kv=self.num_heads_kv // groups)

    @property
    def table_backend(self) -> Backend | None:
        """The backend for which tables are made; None if there is nothing to prepare."""
        return None if self.num_sms is None else backend_that("tables", self.backend)


class StaticFacts(NamedTuple):
    """The facts by which static plans choose kernels and tile shapes (`ChangingMask.facts`).

    Attributes:
        stages: one for each stage.
        joined: of own keys and those of all stages, if passes are one launch; else None.
    """

    stages: tuple[Any, ...]
    joined: Any = None


class _Closed(Sendable[tuple[MaskTables, ...]]):
    """Tables that stay packed after transfer until first use."""

    def _pinned(self, parts: tuple[MaskTables, ...]) -> tuple[MaskTables, ...]:
        return parts  # without the arrays that are copied to the device


@dataclass(frozen=True, eq=False)
class _PreparedPlan:
    """A `RankPlan` with the tables of its collectives and stages, without the arrays.

    Attributes:
        plan: of this rank.
        casts: two for rows that travel, if there are any; one for each stage, and one for all stages at once if one
            launch is prepared and there are several.
        tables: for the bands of each stage; if one launch is prepared, for the bands of all stages at once; or empty.
        stages: tables for the bands of each stage, if one launch is prepared; seldom needed.
        joined: the bands of all stages at once, if one launch is prepared.
        num_arrays, num_tile_plans: total number of arrays, and of tile plans.
        numbers: `StageTables.numbers` of the backend.
    """

    plan: RankPlan
    casts: tuple[CastFacts | LevelFacts, ...]
    tables: tuple[MaskTables, ...] = ()
    stages: _Closed | None = None
    joined: np.ndarray | None = None
    num_arrays: int = 0
    num_tile_plans: int = 0
    numbers: Any = None

    def keep(self, tensors: Sequence[Tensor], device: torch.device, ready: Ready | None, plan_bytes: int) -> None:
        """Makes the plan ready to run on ``device``, where its arrays, ``tensors``, are."""
        at, casts = 0, []
        for cast in self.casts:
            casts.append(uploaded_args(cast, tensors[at : at + cast.num_arrays]))
            at += cast.num_arrays
        runtime, moves = self.plan.runtime, self.plan.moves
        if moves is not None:
            there, back, *casts = casts
            runtime.moves[device] = TravelArgs(there, back, tensors[at], self.plan.num_rows)
            at += 1
        runtime.casts[device] = tuple(casts[: self.plan.degree])
        if len(casts) > self.plan.degree:
            runtime.joined_casts[device] = casts[-1]
        runtime.mask_numbers = self.numbers
        joined = () if self.joined is None else (keep_joined_bands(self.plan, self.joined),)
        kept, bands = runtime.tables, self.plan.bands

        def keep_tables(masks: Sequence[np.ndarray], tables: Sequence[MaskTables], tensors: Sequence[Tensor]) -> None:
            left = iter(tensors)
            for mask, table in zip(masks, tables, strict=True):
                kept.extend(table.keep(mask, list(islice(left, table.num_arrays)), ready, plan_bytes))

        stages, of_tables = self.stages, tensors[at:]
        if stages is None:
            keep_tables((*bands, *joined) if self.tables else (), self.tables, of_tables)
            return
        keep_tables(joined, self.tables, of_tables)
        of_stages = of_tables[sum(table.num_arrays for table in self.tables) :]
        runtime.keep_stage_tables = cache(lambda: keep_tables(bands, stages.parts, of_stages))


class _Parts(NamedTuple):
    """The parts of a `PreparedBatch`: plans, names of the caller's arrays, and all arrays, the caller's first."""

    plans: dict[Hashable, _PreparedPlan]
    names: tuple[str, ...]
    packed: PackedArrays


class PreparedBatch(Sendable[_Parts]):
    """Made by `prepare_batch`; can be sent from one process to another."""

    @property
    def plans(self) -> dict[Hashable, RankPlan]:
        """This rank's plans by name, such as one for each kind of layer."""
        return {name: prepared.plan for name, prepared in self.parts.plans.items()}

    @property
    def num_bytes(self) -> int:
        """Bytes that `to` copies."""
        return self.parts.packed.num_bytes

    def _pinned(self, parts: _Parts) -> _Parts:
        return parts._replace(packed=parts.packed.pin_memory())

    def to(self, device: torch.device | str, like: Mapping[Any, RankPlan] | None = None) -> dict[str, Tensor]:
        """Copies everything to ``device`` and makes the plans ready to run there.

        One asynchronous copy on the current stream. Call it in the thread and on the stream in which the layers will
        run.

        Args:
            device: where the layers run.
            like: `plans` of an earlier batch that layers have used: the same launches are prepared now instead of in
                the first layer. Best while the device is busy with that batch. Collective over the ranks of the plans.

        Returns:
            The ``arrays`` of `prepare_batch`, on the device.
        """
        device, parts = torch.device(device), self.parts
        tensors = parts.packed.to(device)
        ready = None
        if tensors and tensors[0].is_cuda:
            device = tensors[0].device  # with its index
            stream = torch.cuda.current_stream(device)
            ready = Ready(stream.record_event(), stream.cuda_stream)
        # All arrays are views of one block of memory, which lives as long as any of them.
        num_tile_plans = sum(prepared.num_tile_plans for prepared in parts.plans.values())
        plan_bytes = -(-parts.packed.num_bytes // max(num_tile_plans, 1))
        at = len(parts.names)
        named = dict(zip(parts.names, tensors[:at], strict=True))
        for prepared in parts.plans.values():
            prepared.keep(tensors[at : at + prepared.num_arrays], device, ready, plan_bytes)
            at += prepared.num_arrays
        for name, plan in self.plans.items():
            if like is not None and name in like:
                make_calls_ready(plan, like[name])
        return named


@dataclass(frozen=True, eq=False)
class PreparedPlans:
    """Made by `prepare_plans`."""

    _plans: dict[Hashable, _PreparedPlan]
    _tables: list[np.ndarray]

    def batch(self, arrays: Mapping[str, np.ndarray] | None = None) -> PreparedBatch:
        """A microbatch with plans of its own, equal to these; ``arrays`` as in `prepare_batch`."""
        own = {name: replace(p, plan=replace(p.plan, runtime=Runtime())) for name, p in self._plans.items()}
        return replace(self, _plans=own).as_batch(arrays)

    def as_batch(self, arrays: Mapping[str, np.ndarray] | None = None) -> PreparedBatch:
        """A microbatch of these plans."""
        arrays = {} if arrays is None else arrays
        if not isinstance(arrays, Mapping):
            raise ValueError(f"arrays: expected an array for each name, got {type(arrays).__name__}")
        for name, array in arrays.items():
            if not isinstance(array, np.ndarray) or array.dtype.kind not in "biuf":
                found = array.dtype if isinstance(array, np.ndarray) else type(array).__name__
                raise ValueError(f"arrays[{name!r}]: expected a numpy array of numbers, got {found}")
        return PreparedBatch(_Parts(self._plans, tuple(arrays), pack([*arrays.values(), *self._tables])))


def prepare_batch(
    plans: Mapping[Any, RankPlan],
    shape: AttnShape,
    config: MagiConfig,
    arrays: Mapping[str, np.ndarray] | None = None,
    *,
    needs_backward: bool = True,
    like: Mapping[Any, StaticFacts] | None = None,
) -> PreparedBatch:
    """Prepares a microbatch on the CPU.

    Args:
        plans: this rank's plans by name, ``plan.for_rank(cp_rank)``.
        shape: heads and dtype of the attention. Layers of another shape work too, but make their tables themselves.
        config: how the plans were made and will be run.
        arrays: other arrays for the same copy, such as positions.
        needs_backward: False if no gradients are needed.
        like: `StaticPlans.facts`, if these plans will be loaded into static plans: by plan.

    Raises:
        ValueError: an argument is of another type, a plan has more stages than what it is to be like, or ``shape`` is
            for another backend than ``config`` or ``like``; the message begins with the argument's name.
    """
    return prepare_plans(plans, shape, config, needs_backward=needs_backward, like=like).as_batch(arrays)


def prepare_plans(
    plans: Mapping[Any, RankPlan],
    shape: AttnShape,
    config: MagiConfig,
    *,
    needs_backward: bool = True,
    like: Mapping[Any, StaticFacts] | None = None,
) -> PreparedPlans:
    """The part of `prepare_batch` that depends on masks alone, for microbatches of equal masks; arguments as there."""
    if not isinstance(plans, Mapping):
        raise ValueError(f"plans: expected a plan for each name, got {type(plans).__name__}")
    known = {} if like is None else like
    for name, plan in plans.items():
        instance(plan, f"plans[{name!r}]", RankPlan)
        stages = known[name].stages if name in known else plan.bands
        if len(stages) < len(plan.bands):
            most = len(stages) - 1
            raise ValueError(f"plans: {name!r} has {plan.degree} remote stages, what it is prepared like has {most}")
    instance(shape, "shape", AttnShape)
    instance(config, "config", MagiConfig)
    _check_backend(shape, config, bool(known))
    tables: list[np.ndarray] = []
    prepared = {
        name: _prepare_plan(plan, shape, config, needs_backward, tables, known.get(name))
        for name, plan in plans.items()
    }
    return PreparedPlans(prepared, tables)


def _check_backend(shape: AttnShape, config: MagiConfig, is_static: bool) -> None:
    """Raises ValueError for tables that no call would read: of another backend than calls, or static plans, take."""
    backend, impl = shape.table_backend, config.attend.impl
    if backend is None or shape.backend is None:
        return
    if impl not in ("auto", backend.name):
        raise ValueError(f"shape: its tables are those of impl {backend.name!r} (kernels_for), config has {impl!r}")
    if is_static and backend.capture is None:
        raise ValueError(f"like: static plans read no tables of impl {backend.name!r}, which shape is for")


def _prepare_plan(
    plan: RankPlan,
    shape: AttnShape,
    config: MagiConfig,
    needs_backward: bool,
    arrays: list[np.ndarray],
    like: StaticFacts | None,
) -> _PreparedPlan:
    """Appends the arrays that the plan needs to ``arrays``, in the order in which `_PreparedPlan.keep` takes them."""
    shape = shape.of_group(plan.head_groups)
    casts, before, backend = [], len(arrays), shape.table_backend
    dims, programs = (shape.head_dim, shape.head_dim_v), None if backend is None else backend.programs
    is_fused = pays(plan, dims, programs, config.comm.impl)
    moved = () if plan.moves is None else (plan.moves.there, plan.moves.back)
    for transfer in (*moved, *plan.transfers, *([plan.joined] if is_fused and plan.joined is not None else ())):
        facts, made = cast_tables(transfer).arrays()
        casts.append(facts)
        arrays += made
    if plan.moves is not None:
        arrays.append(plan.moves.rows)
    if backend is None or backend.tables is None:
        return _PreparedPlan(plan, tuple(casts), num_arrays=len(arrays) - before)
    masks = StageMasks(
        bands=plan.bands,
        num_rows=plan.num_queries,
        num_keys=(plan.num_rows, *(transfer.num_recv for transfer in plan.transfers)),
        first_backward=next(step.stage for step in plan.schedule.backward if step.kind is StepKind.ATTEND),
        facts=None if like is None else like.stages[: len(plan.bands)],
        is_fused=is_fused,
        is_alone=is_alone(plan, dims, programs),
        joined=joined_bands(plan, programs) if is_fused and programs is not None else None,
        num_fetched=joined_transfer(plan).num_recv if plan.degree else 0,
        joined_facts=None if like is None else like.joined,
    )
    made = backend.tables.make(masks, _table_use(plan, shape, config, needs_backward))
    arrays += made.arrays
    num_tile_plans = sum(table.num_plans for table in (*made.tables, *(made.seldom or ())))
    stages = None if made.seldom is None else _Closed(made.seldom)
    num_arrays = len(arrays) - before
    return _PreparedPlan(
        plan, tuple(casts), made.tables, stages, masks.joined, num_arrays, num_tile_plans, made.numbers
    )  # fmt: skip


def _table_use(plan: RankPlan, shape: AttnShape, config: MagiConfig, needs_backward: bool) -> TableUse:
    """How `megatron_magi.attention.distributed` will call the passes of a plan."""
    assert shape.num_sms is not None
    attend = config.attend
    return TableUse(
        num_heads=(shape.num_heads_q, shape.num_heads_kv),
        dims=(shape.head_dim, shape.head_dim_v),
        dtype=shape.dtype,
        num_sms=shape.num_sms,
        # If nothing is fetched, no collective runs concurrently with attention.
        sm_margins=(attend.forward_sm_margin, attend.backward_sm_margin) if plan.degree else (0, 0),
        deterministic=attend.deterministic or torch.are_deterministic_algorithms_enabled(),
        needs_backward=needs_backward,
        accumulates=bool(plan.degree),
        planner=config.dispatch.planner,
        kind=shape.kind,
    )
