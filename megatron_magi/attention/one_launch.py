"""Attention in one launch over own keys and the fetched keys of all stages, which arrive while it runs.

If no keys are fetched, as for one rank, it is a launch over own keys.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from megatron_magi.attention.runtime import joined_cast
from megatron_magi.backends.sm90 import gated
from megatron_magi.backends.sm90.kernels import kernel_dims
from megatron_magi.backends.sm90.one_launch import Maker, OneLaunch
from megatron_magi.backends.sm90.plan import is_static
from megatron_magi.comm.announced import announced_cast, may_announce, returned_sums
from megatron_magi.comm.group_collective import GroupCastArgs, group_reduce
from megatron_magi.comm.impl.native import Native
from megatron_magi.comm.row_memory import with_rows
from megatron_magi.cuda.arriving import Arriving
from megatron_magi.cuda.call_list import Place, Step
from megatron_magi.cuda.layout import Layout
from megatron_magi.lru import LruCache
from megatron_magi.mask import bands as bd
from megatron_magi.plan import RankPlan
from megatron_magi.plan.predict import MOST_FORWARD_BYTES
from megatron_magi.plan.types import own


@dataclass(frozen=True)
class Fetched:
    """A `megatron_magi.backends.sm90.one_launch.Remote`.

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
        """As of a `Remote`."""
        if self.cast.num_ranks == 2 or self.cast.most is None:
            return True
        return self.cast.most[1] * sum(t.shape[1] * t.shape[2] * t.element_size() for t in (k, v)) <= MOST_FORWARD_BYTES

    def published(self, x: torch.Tensor) -> torch.Tensor:
        """As of a `Remote`."""
        return with_rows(x)

    def announced(
        self, tensors: Sequence[Layout], into: Sequence[Layout], sources: Sequence[Place], places: tuple[Place, Place]
    ) -> tuple[Native, Arriving] | None:
        """As of a `Remote`."""
        return announced_cast(tensors, self.cast, self.group(), self.impl, into, sources, places)

    def returned(
        self, tensors: Sequence[Layout], into: Sequence[Layout], sources: Sequence[Place], places: Sequence[Place]
    ) -> Step | None:
        """As of a `Remote`."""
        return returned_sums(tensors, self.cast, self.group(), self.impl, into, sources, places)

    def give_back(self, tensors: list[torch.Tensor], into: list[torch.Tensor]) -> None:
        """As of a `Remote`."""
        group_reduce(tensors, self.cast, self.group(), into=into, impl=self.impl, at_once=True, kept=True).wait()


def one_launch_of(
    plan: RankPlan,
    impl: str,
    device: torch.device,
    group: Callable[[], dist.ProcessGroup | None],
    makers: LruCache[tuple, Maker],
) -> OneLaunch:
    """The `OneLaunch` of a plan; ``group`` as in `Fetched`, ``makers`` as in `OneLaunch`."""
    remote = Fetched(joined_cast(plan, device), group, impl) if plan.degree else None
    is_prepared, numbers = bool(plan.runtime.tables), plan.runtime.mask_numbers
    return OneLaunch(joined_bands(plan), plan.num_rows, makers, remote, is_prepared, numbers)


def joined_bands(plan: RankPlan, made: np.ndarray | None = None) -> np.ndarray:
    """The mask of a plan over own keys and those of all stages, read-only int64 ``[n, 6]``; made once for a plan.

    ``made``: the result, if another process has made it for the same plan.
    """
    if not plan.transfers:
        return plan.bands[0]
    known = plan.runtime.joined_bands
    if known is None:
        if made is None:
            firsts = np.cumsum([gated.first_arriving(plan.num_rows), *(t.num_recv for t in plan.transfers)])
            later = (bd.shift_keys(table, at) for table, at in zip(plan.bands[1:], firsts, strict=False))
            made = np.concatenate([plan.bands[0], *later])
        known = plan.runtime.joined_bands = own(made)
    return known


def is_alone(plan: RankPlan, dims: tuple[int, int]) -> bool:
    """Whether no rank fetches anything, and kernels have exactly these head dims."""
    return not plan.degree and not is_static(plan.bands[0]) and kernel_dims(dims) == dims


def pays(plan: RankPlan, dims: tuple[int, int], impl: str) -> bool:
    """Whether the forward of a plan is one launch: enabled and supported by kernels and collectives; same on all ranks.

    Args:
        plan: of this rank.
        dims: head dims of q and k, and of v; copies would be needed if they are smaller than those of the kernels.
        impl: of the collectives.
    """
    if not plan.one_launch:
        return False
    if not plan.degree or plan.schedule.saved_stage is not None or plan.schedule.forward[-1].stage == 0:
        return False  # the backward reuses a stage's keys (hide_tail_reduce), or stages must not overlap
    if plan.transfers[0].levels is not None or kernel_dims(dims) != dims:
        return False
    return may_announce(plan.cp_size, impl)
