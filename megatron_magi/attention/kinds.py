"""What calls of attention have in common that differ in nothing but addresses, and with calls of other masks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass
from functools import cached_property
from types import ModuleType
from typing import NamedTuple
from weakref import WeakValueDictionary

import numpy as np
import torch
import torch.distributed as dist

from megatron_magi.attention.calls import AttentionCall
from megatron_magi.comm.group_collective import Args
from megatron_magi.config import MagiConfig
from megatron_magi.cuda.layout import Layout
from megatron_magi.lru import LruCache
from megatron_magi.ops.hopper.one_launch import Maker, OneLaunch
from megatron_magi.ops.hopper.support import current_stream
from megatron_magi.ops.options import AttnOptions
from megatron_magi.plan import Schedule


def living(group_ref: Callable[[], dist.ProcessGroup | None]) -> dist.ProcessGroup:
    """The group of a reference.

    Raises:
        RuntimeError: it has ended: None would stand for another one.
    """
    group = group_ref()
    if group is None:
        raise RuntimeError("group: does not exist any more")
    return group


class Kind(NamedTuple):
    """What calls of one kind share, whatever their mask.

    Attributes:
        layouts: of q, k and v.
        made: of earlier masks, by form, stage, pass and layout: what makes the kernels of another mask of that form
            (`Call.form`). Calls of later masks add to it.
        makers: likewise of those in one launch (`OneLaunch.makers`), by whether keys are fetched.
        room: for how many rows collectives have memory, as `CastFacts.most`; empty where that is not known.
    """

    layouts: tuple[Layout, Layout, Layout]
    group_ref: Callable[[], dist.ProcessGroup | None]
    config: MagiConfig
    module: ModuleType
    softmax_scale: float
    softcap: float
    deterministic: bool
    sink_layout: str
    return_max_logits: bool
    record: AttentionCall
    made: LruCache[tuple, Callable]
    makers: tuple[LruCache[tuple, Maker], LruCache[tuple, Maker]]
    room: list[int]


@dataclass(frozen=True, eq=False)
class Call:
    """What calls fix that differ in nothing but addresses and content of their tensors.

    It is kept with the plan, to which it does not refer: a cycle would keep device memory until the garbage collector
    runs. Nor does it keep the group, which may end before the plan.

    Attributes:
        kind: what calls of other masks share with it.
        group_ref, config, module, sink_layout, return_max_logits, record: those of ``kind``, at hand for each call.
        module: the implementation.
        record, backward_record: what other ranks must mean too.
        hints: of each stage, forward and backward: where the implementation remembers what calls have in common.
        delta_memo: likewise, for `row_delta`; None where the implementation does not remember.
        tail: rows behind those that are fetched, to be cleared; None where their number is known.
        stage_tables: see `know_stages`; None where there is nothing to do.
        comm_impl: of the collectives; where the host does not know the number of rows, the one that need not.
        one_launch: passes over all stages at once, where that pays and the implementation has them.
    """

    kind: Kind
    schedule: Schedule
    bands: tuple[np.ndarray, ...]
    casts: tuple[Args, ...]
    plan_hash: int
    cp_size: int
    group_ref: Callable[[], dist.ProcessGroup | None]
    config: MagiConfig
    module: ModuleType
    forward_options: AttnOptions
    backward_options: AttnOptions
    sink_layout: str
    return_max_logits: bool
    record: AttentionCall
    backward_record: AttentionCall
    hints: tuple[tuple[dict[str, WeakValueDictionary], dict[str, WeakValueDictionary]], ...]
    one_launch: OneLaunch | None
    stage_tables: Callable[[], None] | None
    delta_memo: dict | None
    tail: torch.Tensor | None
    comm_impl: str

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The ranks; None for one.

        Raises:
            RuntimeError: the group has ended.
        """
        return self.group_ref() if self.cp_size == 1 else living(self.group_ref)

    @property
    def accumulates(self) -> bool:
        """Whether several stages' partial results meet, and are kept wide until the end."""
        return bool(self.casts)

    @cached_property
    def sums_meet(self) -> bool:
        """Whether the backward passes of the stages are parts of one, which writes dq in the end."""
        (q, k, v), of_keys = self.kind.layouts, [cast.num_recv for cast in self.casts]
        if not self.module.TAKES_MEMO:
            return False
        return self.module.sums_meet(q, k, v, self.bands, [q.shape[0], *of_keys], self.backward_options)

    @property
    def form(self) -> tuple[bool, bool]:
        """What passes over tensors of equal layouts differ in from mask to mask: dtypes of partial results and margins
        of SMs, where keys are fetched, and whether the passes of a backward are parts of one.
        """
        return self.accumulates, self.sums_meet

    def _memos(self) -> Iterator[tuple[int, int, MutableMapping, np.ndarray, int]]:
        """Where passes are remembered: stage and pass as in `Kind.made`, what they are over, and how many keys."""
        own, of_keys = self.kind.layouts[0].shape[0], [cast.num_recv for cast in self.casts]
        for stage, (bands, count) in enumerate(zip(self.bands, (own, *of_keys), strict=True)):
            for which in (0, 1):
                if "memo" in self.hints[stage][which]:
                    yield stage, which, self.hints[stage][which]["memo"], bands, count

    def know_stages(self) -> None:
        """Before stages run: those of their tables that were prepared are found from now on."""
        if self.stage_tables is not None:
            self.stage_tables()

    def note_made(self) -> None:
        """Tells the kind what calls of this mask have found out."""
        for stage, which, memo, *_ in self._memos():
            for layout, known in memo.items():
                self.kind.made.put((self.form, stage, which, layout), known.make, 0)

    def make_ready(self) -> None:
        """Makes what calls of other masks on the current stream have found out for this one.

        Layouts begin with their stream. Calls on another one make theirs: there they wait for the tables, and keep
        the memory of these until it has used them.
        """
        made, stream = self.kind.made.items(), current_stream(self.kind.layouts[0].device)
        for stage, which, memo, bands, count in self._memos():
            for (form, of, passes, layout), make in made:
                if (of, passes, layout[0]) == (stage, which, stream) and form == self.form and count:
                    self.know_stages()
                    memo[layout] = make(bands, count)
        if self.one_launch is not None:
            for layout, maker in self.one_launch.makers.items():
                if layout[0] == stream:
                    self.one_launch.make(layout, maker)
