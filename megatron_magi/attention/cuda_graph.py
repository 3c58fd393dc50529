"""Plans whose tables are at fixed addresses, for attention in captured CUDA graphs."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from megatron_magi.attention.collective_args import joined_transfer, plan_casts
from megatron_magi.attention.fused_comm import joined_bands, may_join
from megatron_magi.attention.prepared_batch import StaticFacts
from megatron_magi.attention.static_moves import StaticMoves
from megatron_magi.backends.base import Backend, ChangingMask, ChangingMemory, MaskSize, copy_tables, refuse_capture
from megatron_magi.checks import number
from megatron_magi.comm.agreement import start_agreement, told
from megatron_magi.comm.group_collective import GroupCastArgs, raise_failure
from megatron_magi.comm.groups import Group, group_of
from megatron_magi.comm.static_args import StaticArgs
from megatron_magi.mask import bands as bd
from megatron_magi.ops.slice_passes import backend_that
from megatron_magi.plan import RankPlan
from megatron_magi.plan.overlap_schedule import make_schedule
from megatron_magi.plan.types import Runtime
from megatron_magi.runtime.lasting import lasting

_NOTHING = np.zeros((0, bd.NUM_COLUMNS), dtype=np.int64)
_NOTHING.setflags(write=False)
_AT_HOME = 'plan it with dispatch.queries="home"'
_OTHER_MASK = (
    "key: a CUDA graph ran a backward after a static key, or static plans, had been given another mask than the "
    "forward read; its gradients are NaN; load after the replay of the backward"
)


class StaticPlans:
    """Plans of a rank by name, such as one for each kind of layer, in device memory at fixed addresses.

    `distributed_attention` takes them like other plans, with the Hopper kernels and, on several ranks, if these can
    access each other's memory (``comm.impl`` ``native``). A CUDA graph that has captured such calls can be replayed for
    another microbatch after `load`; it refers to memory of this object. Kernels and tile shapes are chosen for the
    first plans and used for all masks. Making it is collective over the group.

    Args:
        plans: of the first microbatch, which is loaded. On several ranks of at most one remote stage
            (``OverlapConfig(degree=1)``), with ``comm.ranks_per_node`` None and without ``dispatch.uneven_shard`` and
            groups of heads (`RankPlan.head_groups`). A pass is one launch where it is one in eager mode
            (`OverlapConfig.one_launch`).
        device: a Hopper GPU.
        group: the ranks; None for one.
        headroom: capacity of tables, and of fetched rows, as a multiple of the longest of ``plans`` and ``samples``; at
            least 1. There is room for ``headroom - 1`` times this rank's own rows in addition, at most for all rows of
            the others. The same on all ranks.
        samples: plans of other microbatches that must fit, the same ones on all ranks. Kernels are chosen for the first
            of them, if any.
        queries: ``home``: queries of no plan travel (`RankPlan.moves`). ``travel``: they can, if those of ``plans`` or
            of a sample do; this has run on two ranks that shared a GPU.
        backend: name of the implementation whose launches are captured; the first that can be when None.

    Attributes:
        plans: for `distributed_attention`, in eager mode or captured; run each call once before it is captured.
        facts: for `prepare_batch` of later microbatches, so that it prepares the tables that `load` needs.

    Raises:
        ValueError: an argument, named in the message, is not as above.
        RuntimeError: ranks differ in rows, ``headroom``, ``samples`` or in whether a pass is one launch, or another
            rank raised an error.
    """

    @lasting()
    def __init__(
        self,
        plans: Mapping[Any, RankPlan],
        device: torch.device | str,
        group: Group = None,
        *,
        headroom: float = 2.0,
        samples: Sequence[Mapping[Any, RankPlan]] = (),
        queries: Literal["home", "travel"] = "home",
        backend: str | None = None,
    ) -> None:
        device = torch.device(device)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        self._device, self._group = device, group_of(group)
        maker = backend_that("capture", backend)
        assert maker.capture is not None
        self._memory = maker.capture.memory(device)
        with told(self._group):
            number(headroom, "headroom", 1)
            if queries not in ("home", "travel"):
                raise ValueError(f"queries: expected 'home' or 'travel', got {queries!r}")
            for sample in (*samples, plans):
                _check_names(plans, sample)
                _check_queries(sample, queries)
            of_all = device, maker, self._memory, headroom
            made = {name: _StaticPlan(name, [of[name] for of in (*samples, plans)], *of_all) for name in plans}
        if self._group is not None:  # ranks that have room for different numbers of rows exchange different chunks
            compared = {
                "rows of static plans (not with uneven_shard)": tuple(plan.num_rows for plan in plans.values()),
                "headroom and samples of static plans": tuple(static.room for static in made.values()),
                "one_launch of static plans": tuple(static.joined is not None for static in made.values()),
            }
            for what, counts in compared.items():
                start_agreement(hash(counts) % (1 << 63), self._group, what).wait()
        self._static = made
        self.plans: dict[Hashable, RankPlan] = {name: static.plan for name, static in made.items()}
        self.facts = {name: static.facts for name, static in made.items()}
        self._load(plans)

    def load(self, plans: Mapping[Any, RankPlan]) -> str | None:
        """Loads the plans of another microbatch, for work that is queued on the current stream afterwards.

        If the microbatch was prepared (`PreparedBatch.to`), this copies tables on the device, asynchronously. Call it
        on the stream on which the graph runs. On several ranks it is collective, and hosts wait for each other: all
        load, or none.

        Args:
            plans: by the same names.

        Returns:
            None; or the reason why they do not fit: then nothing has changed, and the step must run in eager mode.

        Raises:
            ValueError: other names.
            RuntimeError: another rank raised an error in this call, or timed out in an earlier one; it is named. Or a
                graph is being captured, or one has run a backward after another microbatch had been loaded than its
                forward read, and its gradients are NaN.
        """
        large = load_together([(self, plans)])
        return None if large is None else large[1]

    def _why_not(self, plans: Mapping[Any, RankPlan]) -> str | None:
        """The reason why plans do not fit on this rank; None if they fit."""
        refuse_capture(self._device)
        _check_names(self.plans, plans)
        if self._memory.take_failure():
            raise RuntimeError(_OTHER_MASK)
        return next(filter(None, (self._static[name].why_not(plan) for name, plan in plans.items())), None)

    def _load(self, plans: Mapping[Any, RankPlan]) -> None:
        tables = [table for name, plan in plans.items() for table in self._static[name].take(plan)]
        copy_tables(tables)
        self._memory.send()


def load_together(pairs: Sequence[tuple[StaticPlans, Mapping[Any, RankPlan]]]) -> tuple[int, str] | None:
    """`StaticPlans.load` of several objects of one group, at least one: all, or none.

    Returns:
        None; or the index of a pair that does not fit, the same on all ranks, and the reason.

    Raises:
        ValueError, RuntimeError: as `StaticPlans.load`.
    """
    group = pairs[0][0]._group
    with told(group):
        reasons = [static._why_not(plans) for static, plans in pairs]
    first = next((number for number, reason in enumerate(reasons) if reason), len(pairs))
    ranks: list[int] = []
    if group is not None and group.size() > 1:
        raise_failure(group)
        found = start_agreement(first, group, "static plans").values()
        first = min(found)
        ranks = [rank for rank, number in enumerate(found) if number == first]
    if first < len(pairs):
        return first, reasons[first] or f"no room on ranks {ranks} of the group"
    for static, plans in pairs:
        static._load(plans)
    return None


class _StaticPlan:
    """One plan of `StaticPlans`.

    Attributes:
        plan: represents the plan of the microbatch that was loaded last.
        masks: one for each stage.
        joined: over own keys and the fetched ones, for calls that are one launch; None if none is.
        room: of the collectives, in rows, see `GroupCastArgs.most`; None for one rank.
    """

    def __init__(
        self,
        name: Hashable,
        samples: Sequence[RankPlan],
        device: torch.device,
        backend: Backend,
        memory: ChangingMemory,
        headroom: float,
    ) -> None:
        plan = max(samples, key=lambda sample: sample.degree)
        cp_size, num_rows = plan.cp_size, plan.num_rows
        if any((sample.cp_size, sample.num_rows) != (cp_size, num_rows) for sample in samples):
            raise ValueError(f"samples: {name!r} has other numbers of rows or ranks than the first")
        if any(sample.head_groups > 1 for sample in samples):
            raise ValueError(f"plans: groups of heads of {name!r} travel apart, those of static plans do not")
        self._device, self._args, self._moves, most_keys = device, None, None, [num_rows]
        runtime = Runtime()
        if cp_size > 1:
            if plan.degree > 1:
                raise ValueError(
                    f"plans: {name!r} has {plan.degree} remote stages, static plans of several ranks have one"
                )
            casts = []
            for cast in (cast for sample in samples for cast in plan_casts(sample, device)):
                if not isinstance(cast, GroupCastArgs):
                    raise ValueError(f"plans: {name!r} tells nodes apart (ranks_per_node), static plans do not")
                casts.append(cast)
            self._args = StaticArgs(casts, num_rows, cp_size, device, headroom, own=num_rows)
            most_keys.append(self._args.args.num_recv)
            runtime = Runtime(casts={device: (self._args.args,)}, tail=self._args.tail)
        self.room = None if self._args is None else self._args.args.most
        moves = next((sample.moves for sample in samples if sample.moves is not None), None)
        if moves is not None:
            self._moves = StaticMoves(samples, device, headroom)
            runtime.moves[device] = self._moves.args
            self.room = self.room, self._moves.room
        most_rows = num_rows if self._moves is None else self._moves.num_queries
        assert backend.capture is not None
        stages = zip(*(_stages(sample, len(most_keys)) for sample in samples), strict=True)
        self.masks = [
            backend.capture.mask(masks, most_rows, most, device, memory, headroom)
            for masks, most in zip(stages, most_keys, strict=True)
        ]
        self.joined, self._programs = None, backend.programs
        if self._programs is not None and may_join(plan):
            joined = [self._joined(sample) for sample in samples]
            most = sum(most_keys)
            self.joined = backend.capture.mask(joined, most_rows, most, device, memory, headroom, num_rows)
            runtime.joined_bands = self.joined.as_bands()
        self.plan = replace(
            plan,
            bands=tuple(mask.as_bands() for mask in self.masks),
            joined=None,
            one_launch=self.joined is not None,
            moves=moves,
            schedule=make_schedule(len(self.masks) - 1),
            runtime=runtime,
        )

    @property
    def facts(self) -> StaticFacts:
        """For `prepare_batch`."""
        return StaticFacts(tuple(mask.facts for mask in self.masks), None if self.joined is None else self.joined.facts)

    def why_not(self, plan: RankPlan) -> str | None:
        """The reason why another plan does not fit; None if it fits."""
        if (plan.num_rows, plan.cp_size) != (self.plan.num_rows, self.plan.cp_size):
            return (
                f"it has {plan.num_rows} rows, of {plan.cp_size} ranks, not {self.plan.num_rows} of {self.plan.cp_size}"
            )
        if plan.moves is not None and self._moves is None:
            return f"its queries travel, those of the first plans do not; {_AT_HOME}"
        if plan.head_groups > 1:
            return "groups of its heads travel apart"
        if plan.degree >= len(self.masks):
            return f"it has {plan.degree} remote stages, not {len(self.masks) - 1}"
        short = [] if self._args is None else [self._args.shortage(self._cast(plan))]
        if self._moves is not None:
            short += self._moves.shortages(plan)
        if not any(short):
            short += [mask.shortage(given) for mask, given in self._read(plan)]
        found = [of_one for of_one in short if of_one is not None]
        if not found:
            return None
        return f"{found[0][0]}; {_more_room(max(least for _, least in found))}"

    def take(self, plan: RankPlan) -> list[tuple[Tensor, Tensor]]:
        """The copies that load a plan that fits."""
        tables = [table for mask, given in self._read(plan) for table in mask.take(given, plan.plan_hash)]
        if self._moves is not None:
            tables += self._moves.take(plan)
        return tables if self._args is None else [*tables, *self._args.take(self._cast(plan))]

    def _read(self, plan: RankPlan) -> list[tuple[ChangingMask, MaskSize]]:
        """The masks, with those of a plan that are loaded into them."""
        if plan.runtime.keep_stage_tables is not None and any(mask.is_read for mask in self.masks):
            plan.runtime.keep_stage_tables()
        found = list(zip(self.masks, _stages(plan, len(self.masks)), strict=True))
        return found if self.joined is None else [*found, (self.joined, self._joined(plan))]

    def _joined(self, plan: RankPlan) -> MaskSize:
        """The mask over own keys and the fetched ones."""
        assert self._programs is not None
        num_fetched = joined_transfer(plan).num_recv if plan.degree else 0
        return MaskSize(joined_bands(plan, self._programs), plan.num_rows + num_fetched, plan.num_queries)

    def _cast(self, plan: RankPlan) -> GroupCastArgs | None:
        """The cast of the remote stage; None if no rank fetches anything."""
        cast = next(iter(plan_casts(plan, self._device)), None)
        assert cast is None or isinstance(cast, GroupCastArgs)
        return cast


def _more_room(headroom: float) -> str:
    """What to do where this headroom would do; inf: where none would."""
    first = "make the static key, or static plans, with a larger mask first"
    return f"{first}, or with headroom={math.ceil(10 * headroom) / 10}" if math.isfinite(headroom) else first


def _check_queries(plans: Mapping[Any, RankPlan], queries: str) -> None:
    travel = [name for name, plan in plans.items() if plan.moves is not None]
    if travel and queries == "home":
        raise ValueError(f"plans: queries of {travel[0]!r} travel, those of static plans do not; {_AT_HOME}")


def _check_names(expected: Mapping[Any, RankPlan], plans: Mapping[Any, RankPlan]) -> None:
    if plans.keys() != expected.keys():
        raise ValueError(f"plans: expected {', '.join(map(repr, expected))}, got {', '.join(map(repr, plans))}")


def _stages(plan: RankPlan, num_stages: int) -> list[MaskSize]:
    """The mask of each stage, including a stage that fetches nothing."""
    num_keys, num_rows = [plan.num_rows, *(transfer.num_recv for transfer in plan.transfers)], plan.num_queries
    stages = [MaskSize(bands, count, num_rows) for bands, count in zip(plan.bands, num_keys, strict=True)]
    return stages + [MaskSize(_NOTHING, 0, num_rows)] * (num_stages - len(stages))
