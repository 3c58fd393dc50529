"""Attention in one launch over own keys and the fetched keys of all stages, which arrive while it runs.

If no keys are fetched, as for one rank, it is a launch over own keys.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron_magi.attention.collective_args import joined_cast
from megatron_magi.backends.base import Program, Programs, is_changing
from megatron_magi.backends.costs import DEFAULT, kernel_costs_of
from megatron_magi.comm.fused_steps import get_step, put_step
from megatron_magi.comm.group_collective import GroupCastArgs, group_reduce
from megatron_magi.comm.impl.native import Native
from megatron_magi.comm.row_memory import with_rows
from megatron_magi.comm.transport import FOR_CAPTURES, may_use_peer_memory
from megatron_magi.cuda.arriving import Arriving, StepRows
from megatron_magi.cuda.launch_list import Step
from megatron_magi.mask import bands as bd
from megatron_magi.plan import RankPlan
from megatron_magi.plan.types import own
from megatron_magi.runtime.lru import LruCache

_MOST_FORWARD_BYTES = kernel_costs_of(DEFAULT.device).most_forward_bytes
"""Not by the GPU that is there: all ranks decide alike."""


@dataclass(frozen=True)
class Fetched:
    """A `megatron_magi.backends.base.KeyTransfer`.

    Attributes:
        cast: fetches the keys of all stages.
        group: returns the ranks; raises RuntimeError if the group was destroyed.
        impl: of the cast.
    """

    cast: GroupCastArgs
    group: Callable[[], dist.ProcessGroup | None]
    impl: str

    @property
    def num_recv(self) -> int:
        """Rows that arrive."""
        return self.cast.num_recv

    def forward_pays(self, k: torch.Tensor, v: torch.Tensor) -> bool:
        """As of a `KeyTransfer`."""
        if self.cast.num_ranks == 2 or self.cast.most is None:
            return True
        row_bytes = sum(t.shape[1] * t.shape[2] * t.element_size() for t in (k, v))
        received = self.cast.most.received if self.cast.usual is None else self.cast.usual
        return received * row_bytes <= _MOST_FORWARD_BYTES

    def published(self, x: torch.Tensor) -> torch.Tensor:
        """As of a `KeyTransfer`."""
        return with_rows(x)

    def get_step(self, rows: StepRows) -> tuple[Native, Arriving] | None:
        """As of a `KeyTransfer`."""
        return get_step(rows, self.cast, self.group(), self.impl)

    def put_step(self, rows: StepRows) -> Step | None:
        """As of a `KeyTransfer`."""
        return put_step(rows, self.cast, self.group(), self.impl)

    def give_back(self, tensors: list[torch.Tensor], into: list[torch.Tensor]) -> None:
        """As of a `KeyTransfer`."""
        group_reduce(tensors, self.cast, self.group(), into=into, impl=self.impl, at_once=True, kept=True).wait()


def program_of(
    plan: RankPlan,
    programs: Programs,
    impl: str,
    device: torch.device,
    group: Callable[[], dist.ProcessGroup | None],
    makers: LruCache[tuple, Any],
) -> Program:
    """The program of a plan; ``group`` as in `Fetched`, ``makers`` as in `Programs.of_plan`."""
    impl = impl if plan.runtime.tail is None else FOR_CAPTURES
    transfer = Fetched(joined_cast(plan, device), group, impl) if plan.degree else None
    is_prepared, numbers = bool(plan.runtime.tables), plan.runtime.mask_numbers
    return programs.of_plan(joined_bands(plan, programs), plan.num_rows, makers, transfer, is_prepared, numbers)


def stage_program(
    plan: RankPlan, stage: int, num_keys: int, programs: Programs, makers: LruCache[tuple, Any]
) -> Program:
    """The program of a stage of a plan over ``num_keys`` keys; ``makers`` as in `Programs.of_plan`."""
    return programs.of_plan(plan.bands[stage], num_keys, makers, None, bool(plan.runtime.tables), None)


def joined_bands(plan: RankPlan, programs: Programs) -> np.ndarray:
    """The mask of a plan over own keys and those of all stages, read-only int64 ``[n, 6]``; made once for a plan."""
    if not plan.transfers:
        return plan.bands[0]
    known = plan.runtime.joined_bands
    if known is None:
        firsts = np.cumsum([programs.first_fetched(plan.num_rows), *(t.num_recv for t in plan.transfers)])
        later = (bd.shift_keys(table, at) for table, at in zip(plan.bands[1:], firsts, strict=False))
        known = keep_joined_bands(plan, np.concatenate([plan.bands[0], *later]))
    return known


def keep_joined_bands(plan: RankPlan, made: np.ndarray) -> np.ndarray:
    """Gives a plan its `joined_bands` that another process has made for the same plan, and returns them."""
    if not plan.transfers:
        return plan.bands[0]
    if plan.runtime.joined_bands is None:
        plan.runtime.joined_bands = own(made)
    return plan.runtime.joined_bands


def is_alone(plan: RankPlan, dims: tuple[int, int], programs: Programs | None) -> bool:
    """Whether no rank fetches anything, and programs serve these head dims."""
    if programs is None or plan.degree or is_changing(plan.bands[0]):
        return False
    return programs.reads_in_place(dims)


def pays(plan: RankPlan, dims: tuple[int, int], programs: Programs | None, impl: str) -> bool:
    """Whether the forward of a plan is one launch: enabled and supported by kernels and collectives; same on all ranks.

    Args:
        plan: of this rank.
        dims: head dims of q and k, and of v; copies would be needed if they are smaller than those of the kernels.
        programs: of the backend.
        impl: of the collectives.
    """
    if programs is None or not may_join(plan) or not programs.reads_in_place(dims):
        return False
    return may_use_peer_memory(plan.cp_size, impl)


def may_join(plan: RankPlan) -> bool:
    """Whether a plan lets the keys of all its stages arrive during one launch; the same on all ranks."""
    if not plan.one_launch or not plan.degree:
        return False
    if plan.schedule.saved_stage is not None or plan.schedule.forward[-1].stage == 0:
        return False  # the backward reuses a stage's keys (hide_tail_reduce), or stages must not overlap
    return plan.transfers[0].levels is None
