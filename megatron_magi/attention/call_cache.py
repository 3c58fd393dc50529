"""State that calls of attention share: those that differ only in addresses (`CachedCall`), and those that differ in the
mask too (`CallTemplate`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from megatron_magi.attention.call_signature import AttentionCall
from megatron_magi.attention.travel import TravelArgs
from megatron_magi.backends.base import Backend, Program
from megatron_magi.comm.group_collective import Args
from megatron_magi.config import MagiConfig
from megatron_magi.cuda.layout import Layout
from megatron_magi.cuda.streams import current_stream
from megatron_magi.operands.options import AttnOptions
from megatron_magi.plan import Schedule
from megatron_magi.runtime.lru import LruCache


def living(group_ref: Callable[[], dist.ProcessGroup | None]) -> dist.ProcessGroup:
    """The group of a reference.

    Raises:
        RuntimeError: it was destroyed; None would mean the default group.
    """
    group = group_ref()
    if group is None:
        raise RuntimeError("group: does not exist any more")
    return group


class CallTemplate(NamedTuple):
    """What calls with different masks share.

    Attributes:
        layouts: of q, k and v.
        makers: what prepares the launches of passes in one launch (`Program.makers`), without and with fetched keys.
        stage_makers: likewise of stages; by whether keys are fetched, and stage.
        room: rows for which collectives have memory, as `CastFacts.most`; empty if not known.
    """

    layouts: tuple[Layout, Layout, Layout]
    group_ref: Callable[[], dist.ProcessGroup | None]
    config: MagiConfig
    backend: Backend
    softmax_scale: float
    softcap: float
    deterministic: bool
    sink_layout: str
    return_max_logits: bool
    record: AttentionCall
    makers: tuple[LruCache[tuple, Any], LruCache[tuple, Any]]
    stage_makers: dict[tuple[bool, int], LruCache[tuple, Any]]
    room: list[int]

    def makers_of(self, fetches: bool, stage: int) -> LruCache[tuple, Any]:
        """What prepares the launches of a stage; ``fetches``: some rank fetches keys."""
        known = self.stage_makers.get((fetches, stage))
        if known is None:
            assert self.backend.programs is not None
            known = self.stage_makers.setdefault((fetches, stage), self.backend.programs.new_makers())
        return known


@dataclass(frozen=True, eq=False)
class CachedCall:
    """State shared by calls that differ only in addresses and content of their tensors.

    It is kept with the plan and does not refer back to it: a cycle would keep device memory until the garbage collector
    runs. Nor does it keep the group alive, which may be destroyed before the plan.

    Attributes:
        template: what it shares with calls of other masks.
        group_ref, config, backend, sink_layout, return_max_logits, record: those of ``template``, for fast access.
        record, backward_record: compared with other ranks.
        stages: passes over each stage, if the implementation prepares them.
        tail: rows after the fetched ones, to be zeroed; None if the number of fetched rows is known on the host.
        stage_tables: see `know_stages`; None if there is nothing to do.
        comm_impl: of the collectives; one that reads numbers of rows on the device if the host does not know them.
        travel: rows that other ranks compute; None if there are none.
        program: passes over all stages at once, if the implementation has them and they are faster.
    """

    template: CallTemplate
    schedule: Schedule
    bands: tuple[np.ndarray, ...]
    casts: tuple[Args, ...]
    plan_hash: int
    cp_size: int
    group_ref: Callable[[], dist.ProcessGroup | None]
    config: MagiConfig
    backend: Backend
    forward_options: AttnOptions
    backward_options: AttnOptions
    sink_layout: str
    return_max_logits: bool
    record: AttentionCall
    backward_record: AttentionCall
    stages: tuple[Program | None, ...]
    travel: TravelArgs | None
    program: Program | None
    stage_tables: Callable[[], None] | None
    tail: torch.Tensor | None
    comm_impl: str

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The ranks; None for one.

        Raises:
            RuntimeError: the group was destroyed.
        """
        return self.group_ref() if self.cp_size == 1 else living(self.group_ref)

    @property
    def accumulates(self) -> bool:
        """Whether partial results of several stages are merged, in fp32 until the end."""
        return bool(self.casts)

    @cached_property
    def sums_meet(self) -> bool:
        """Whether the backward passes of the stages share the sums of dq, which the last one converts to dq."""
        (q, k, v), of_keys = self.template.layouts, [cast.num_recv for cast in self.casts]
        if self.travel is not None:
            q = q.new_empty((q.shape[0] + self.travel.there.num_recv, *q.shape[1:]))
        return self.backend.sums_meet(q, k, v, self.bands, [k.shape[0], *of_keys], self.backward_options)

    def hints(self, stage: int) -> dict[str, Program]:
        """Further arguments of the backend for the passes of a stage."""
        program = self.stages[stage]
        return {} if program is None else {"program": program}

    def know_stages(self) -> None:
        """Registers prepared tables of stages, before stages run."""
        if self.stage_tables is not None:
            self.stage_tables()

    def make_ready(self) -> None:
        """Prepares the launches that calls of other masks used on the current stream, for this mask.

        Calls on other streams prepare their own: there they must wait for the tables and keep their memory alive.
        """
        stream = current_stream(self.template.layouts[0].device)
        for stage, program in enumerate((self.program, *self.stages)):
            if program is None or (stage and not program.num_keys):
                continue
            for layout, maker in program.makers.items():
                if layout[0] == stream:
                    if stage:
                        self.know_stages()
                    program.make(layout, maker)
