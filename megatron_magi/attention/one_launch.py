"""Attention in one launch over all stages: own keys, and behind them those of all stages, which arrive meanwhile.

Where no keys arrive, as for one rank, it is one over own keys.

What a pass queues is prepared once for a layout of its tensors, as a list of calls; the calls give addresses.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary, ref

import numpy as np
import torch
import torch.distributed as dist

from megatron_magi.attention.runtime import joined_cast
from megatron_magi.comm.announced import announced_cast, may_announce, returned_sums
from megatron_magi.comm.group_collective import GroupCastArgs, group_reduce
from megatron_magi.comm.impl.native import Native
from megatron_magi.comm.row_memory import with_rows
from megatron_magi.cuda.call_list import CallList, Place, Step
from megatron_magi.cuda.layout import Layout
from megatron_magi.mask import bands as bd
from megatron_magi.ops.hopper import gated, gated_backward
from megatron_magi.ops.hopper.backward_kernels import StepOptions
from megatron_magi.ops.hopper.kernels import WHOLE_DIMS, kernel_dims
from megatron_magi.ops.hopper.plan import is_static
from megatron_magi.ops.hopper.support import current_stream, in_dtype, loadable, stream_lock
from megatron_magi.ops.impl import hopper
from megatron_magi.ops.merge import sink_lse
from megatron_magi.ops.operands import BackwardInputs, ForwardInputs, ForwardOutput, Gradients
from megatron_magi.ops.options import AttnOptions
from megatron_magi.ops.slice_passes import forward_pass
from megatron_magi.plan import RankPlan
from megatron_magi.plan.predict import MOST_FORWARD_BYTES
from megatron_magi.plan.types import own
from megatron_magi.profiling import profiled_backward_calls, profiled_forward_calls

_ALIGNMENT = 256
_PUBLISHED = ("k_rows", 0), ("v_rows", 0)
_GRADIENTS = ("dk", 0), ("dv", 0)


class _Walk:
    """What a pass queues, for tensors of one layout on one stream.

    Attributes:
        num_scratch: bytes of memory that it takes.
        later: where in them partial gradients of fetched keys and values are, which are left to be sent.
        is_empty: this rank has no rows; the calls move those of others, there and in a second list back.
        make: makes one for another mask, of its `OneLaunch` and the group.
    """

    make: Callable[[OneLaunch, dist.ProcessGroup | None], tuple[_Walk | None, Any]]

    def __init__(
        self,
        native: Native | None,
        lists: Sequence[Sequence[Step]],
        slots: Sequence[str],
        stream: int,
        device: torch.device,
        num_scratch: int,
        later: tuple[int, int] | None = None,
        is_empty: bool = False,
    ) -> None:
        # Not kept alive: with the group goes memory that other ranks have mapped.
        self._native = None if native is None else ref(native)
        self._version = None if native is None else native.version()
        self._stream, self.num_scratch, self.later, self.is_empty = stream, num_scratch, later, is_empty
        lock = stream_lock(device, stream)
        self._lists = [CallList(steps, slots, stream, lock) for steps in lists]

    def holds(self) -> bool:
        """Whether it can be queued still."""
        if self._native is None:
            return True
        native = self._native()
        return native is not None and native.version() == self._version

    def queue(self, *addresses: int, part: int = 0) -> None:
        """Queues one of the lists."""
        if self._native is None:
            self._lists[part].queue(*addresses)
        else:
            self._native().queue(self._lists[part], self._stream, *addresses)


@profiled_forward_calls
def _attend(queue: Callable[..., None], addresses: Sequence[int], q: torch.Tensor, v: torch.Tensor, bands) -> None:
    """Queues a forward pass."""
    queue(*addresses)


@profiled_backward_calls
def _attend_back(queue: Callable[..., None], addresses: Sequence[int], q: torch.Tensor, v: torch.Tensor, bands) -> None:
    """Queues a backward pass."""
    queue(*addresses)


@dataclass(frozen=True, eq=False)
class OneLaunch:
    """What calls of a plan need for it that differ in addresses, and in strides of what autograd gives back.

    Attributes:
        cast: brings the keys of all stages; None where there are none.
        bands: over all keys, as `gated` numbers them.
        impl: of the cast.
        is_prepared: tables of the mask came with the plan, and go with it.
        walks: of both passes, by layout. Kept by the passes, which hold device memory and are forgotten when that is
            too much; and by `kept`, with its pass, where that adds none or goes with the plan.
        last_announced: what brings the keys for one layout, the implementation that does and its version: both passes
            queue it, on one stream.
    """

    cast: GroupCastArgs | None
    bands: np.ndarray
    impl: str
    is_prepared: bool
    walks: WeakValueDictionary[tuple, _Walk] = field(default_factory=WeakValueDictionary)
    kept: dict[tuple, tuple[_Walk, Any]] = field(default_factory=dict)
    last_announced: list = field(default_factory=list)

    @classmethod
    def of(cls, plan: RankPlan, impl: str, device: torch.device) -> OneLaunch:
        """For a plan."""
        cast = joined_cast(plan, device) if plan.degree else None
        return cls(cast, joined_bands(plan), impl, is_prepared=bool(plan.runtime.get("tables")))

    @property
    def num_recv(self) -> int:
        """Keys that arrive."""
        return 0 if self.cast is None else self.cast.num_recv

    def forward(
        self,
        group: dist.ProcessGroup | None,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sink: torch.Tensor | None,
        options: AttnOptions,
        return_max_logits: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None] | None:
        """Output, lse and largest logits; None, on all ranks, where stages do it: where rows do not travel so that a
        kernel can wait, and where that takes longer.
        """
        if self.cast is not None and not forward_pays(self.cast, k, v):
            return None
        q, k, v = loadable(q), loadable(k), loadable(v)
        rows_k, rows_v = self._rows(k), self._rows(v)
        device, stream = q.device, current_stream(q.device)
        num_rows, num_heads, _ = q.shape
        out = torch.empty((num_rows, num_heads, v.shape[2]), dtype=q.dtype, device=device)
        lse = torch.empty((num_rows, num_heads), dtype=torch.float32, device=device)
        given = sink
        if sink is not None:
            sink = sink_lse(sink, torch.float32).expand(lse.shape)
        key = stream, q.stride(), k.stride(), v.stride()
        walk = self._known(
            key, group, OneLaunch._make_forward, (q, k, v, rows_k, rows_v, out, lse, sink),
            options, return_max_logits, stream,
        )  # fmt: skip
        if walk is None:
            return None
        scratch = torch.empty(walk.num_scratch, dtype=torch.uint8, device=device)
        if walk.is_empty:
            walk.queue(rows_k.data_ptr(), rows_v.data_ptr(), scratch.data_ptr())
            return forward_pass((q, k, v), self.bands, options, hopper, given, return_max_logits, q.dtype)
        max_logits, more = None, []
        if sink is not None:
            more.append(sink.data_ptr())
        if return_max_logits:
            max_logits = torch.full((num_heads,), -torch.inf, dtype=torch.float32, device=device)
            more.append(max_logits.data_ptr())
        addresses = (
            rows_k.data_ptr(), rows_v.data_ptr(), scratch.data_ptr(),
            q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), lse.data_ptr(), *more,
        )  # fmt: skip
        _attend(walk.queue, addresses, q, v, self.bands)
        return out, lse, max_logits

    def backward(
        self,
        group: dist.ProcessGroup | None,
        dout: torch.Tensor,
        qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        out: torch.Tensor,
        lse: torch.Tensor,
        options: AttnOptions,
        partial: torch.dtype,
        wants_delta: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None] | None:
        """Gradients of q, in its dtype, and of k and v, in that which travels, and delta; None as in `forward`.

        Args:
            group: of the ranks.
            dout: of any float dtype.
            qkv: q, k and v.
            out, lse: of the forward, ``lse`` fp32 ``[num_rows, num_heads]``.
            options: of the call.
            partial: dtype of the parts that ranks have of gradients of k and v: those that travel, and this rank's own,
                to which they are added, in fp32, and rounded once.
            wants_delta: ``rowsum(dout * out)``, fp32 ``[num_rows, num_heads]``, is returned too.
        """
        q, k, v = map(loadable, qkv)
        rows_k, rows_v = self._rows(k), self._rows(v)
        dout, out = loadable(in_dtype(dout, q.dtype)), loadable(out)
        device, stream = q.device, current_stream(q.device)
        new = functools.partial(torch.empty, device=device)
        dq, dk, dv = new(q.shape, dtype=q.dtype), new(k.shape, dtype=partial), new(v.shape, dtype=partial)
        key = stream, q.stride(), k.stride(), v.stride(), dout.stride(), out.stride(), lse.stride(), wants_delta
        walk = self._known(
            key, group, OneLaunch._make_backward, (q, k, v, rows_k, rows_v, dout, out, lse, dq, dk, dv),
            options, wants_delta, stream,
        )  # fmt: skip
        if walk is None:
            return None
        scratch = new(walk.num_scratch, dtype=torch.uint8)
        addresses = rows_k.data_ptr(), rows_v.data_ptr(), scratch.data_ptr(), dk.data_ptr(), dv.data_ptr()
        delta = new(lse.shape, dtype=torch.float32) if wants_delta and not walk.is_empty else None
        if walk.is_empty:
            delta = hopper.row_delta(dout, out)
            walk.queue(*addresses)
            hopper.backward(
                BackwardInputs(q, k, v, dout, lse, delta), self.bands, options, Gradients(dq, dk, dv)
            )  # fmt: skip
        else:
            rest = (t.data_ptr() for t in (q, k, v, dout, out, lse, dq, *(() if delta is None else (delta,))))
            _attend_back(walk.queue, (*addresses, *rest), q, v, self.bands)
        if walk.later is None and walk.is_empty:
            walk.queue(*addresses, part=1)
        if walk.later is not None:
            assert self.cast is not None
            shapes = ((self.cast.num_recv, *t.shape[1:]) for t in (k, v))
            later = [_view(scratch, at, shape, partial) for at, shape in zip(walk.later, shapes, strict=True)]
            group_reduce(later, self.cast, group, into=[dk, dv], impl=self.impl, at_once=True, kept=True).wait()
        return dq, dk, dv, delta

    def _rows(self, x: torch.Tensor) -> torch.Tensor:
        """What is published; where nothing is it need not lie in rows."""
        return x if self.cast is None else with_rows(x)

    def _known(
        self, key: tuple, group: dist.ProcessGroup | None, make: Callable, tensors: Sequence[Any], *options: Any
    ) -> _Walk | None:
        """The walk of a layout, made where there is none or it does not hold any more."""
        walk = self.walks.get(key)
        if walk is None or not walk.holds():
            layouts = tuple(None if t is None else Layout.of(t) for t in tensors)
            walk = self.make(key, group, functools.partial(_made, make, layouts, options))
        return walk

    def make(self, key: tuple, group: dist.ProcessGroup | None, make: Callable) -> _Walk | None:
        """A walk, as `_Walk.make` makes one; kept for calls of a layout."""
        walk, keeper = make(self, group)
        if walk is not None:
            walk.make = make
            if keeper is None or self.is_prepared:
                self.kept[key] = walk, keeper
            else:
                keeper.lists.setdefault(self, {})[key] = walk
            self.walks[key] = walk
        return walk

    def _make_forward(
        self, group, tensors: tuple[Layout, ...], options: AttnOptions, max_logits: bool, stream: int
    ) -> tuple[_Walk | None, Any]:
        q, k, v, rows_k, rows_v, out, lse, sink = tensors
        places, num_scratch = _places("scratch", [(self.num_recv, k), (self.num_recv, v)])
        native, arriving = self._announced(group, rows_k, rows_v, places, stream)
        if self.cast is not None and native is None:
            return None, None
        moving = () if arriving is None else arriving.steps
        if not q.shape[0]:
            slots = "k_rows", "v_rows", "scratch"
            return _Walk(native, [moving], slots, stream, q.device, num_scratch, is_empty=True), None
        given = {"max_logits": max_logits, "stream": stream, "remembered": not self.is_prepared}
        if self.num_recv:
            keeper, step = gated.forward_step(
                q, k, v, arriving, self.bands, options, out=out, lse=lse, sink_lse=sink, **given
            )
        else:
            inputs, output = ForwardInputs(q, k, v, sink), ForwardOutput(out, lse)
            keeper, step = hopper.forward_step(inputs, self.bands, options, output, **given)
        more = [name for name, there in (("sink", sink is not None), ("max_logits", max_logits)) if there]
        slots = ("k_rows", "v_rows", "scratch", "q", "k", "v", "out", "lse", *more)
        return _Walk(native, [(*moving, step)], slots, stream, q.device, num_scratch), keeper

    def _make_backward(
        self, group, tensors: tuple[Layout, ...], options: AttnOptions, delta: bool, stream: int
    ) -> tuple[_Walk | None, Any]:
        q, k, v, rows_k, rows_v, dout, out, lse, dq, dk, dv = tensors
        count, device = self.num_recv, q.device
        places, num_scratch = _places("scratch", [(count, k), (count, v), (count, dk), (count, dv)])
        of_keys, of_gradients = places[:2], places[2:]
        native, arriving = self._announced(group, rows_k, rows_v, of_keys, stream)
        if self.cast is not None and native is None:
            return None, None
        moving, left, back = () if arriving is None else arriving.steps, None, ()
        later = tuple(dk.new_empty((count, *t.shape[1:])) for t in (dk, dv))
        if self.cast is not None:
            sums = returned_sums(later, self.cast, group, self.impl, (dk, dv), of_gradients, _GRADIENTS)
            left, back = (tuple(at for _, at in of_gradients), ()) if sums is None else (None, (sums,))
        slots: tuple[str, ...] = ("k_rows", "v_rows", "scratch", "dk", "dv")
        if not q.shape[0]:
            return _Walk(native, [moving, back], slots, stream, device, num_scratch, left, is_empty=True), None
        scratch, sends, inputs = ("scratch", num_scratch), bool(back), (q, k, v, dout)
        given = {"stream": stream, "remembered": not self.is_prepared}
        if count:
            keeper, steps = gated_backward.backward_steps(
                inputs, out, lse, arriving, self.bands, options, grads=(dq, dk, dv), arriving_grads=later,
                places=of_gradients, scratch=scratch, delta=delta, sends=sends, **given,
            )  # fmt: skip
        else:
            keeper, steps = hopper.backward_steps(
                inputs, ForwardOutput(out, lse), self.bands, options, Gradients(dq, dk, dv),
                wanted=StepOptions(scratch, delta, sends, bool(moving)), **given,
            )  # fmt: skip
        ends = [*back, *steps.rest]
        if steps.rest_is_apart and back:
            if arriving.overlaps:
                back[0].config.num_attributes = 1
            else:  # it would keep its SMs until the other ranks come
                ends = [*steps.rest, *back]
        queued = [*moving, *steps.before, *steps.keys, *ends]
        slots += "q", "k", "v", "dout", "out", "lse", "dq", *(("delta",) if delta else ())
        return _Walk(native, [queued], slots, stream, device, num_scratch + keeper.num_scratch, left), keeper

    def _announced(self, group, k: Layout, v: Layout, places: tuple[Place, ...], stream: int):
        """The implementation of the cast, and what it queues; None and None where no keys arrive, or not so."""
        if self.cast is None:
            return None, None
        form = stream, places, [(t.shape, t.stride(), t.dtype, t.data_ptr()) for t in (k, v)]
        of_form, native, version, arriving = self.last_announced or (None, lambda: None, None, None)
        native = native()
        if of_form != form or native is None or native.version() != version:
            into = [t.new_empty((self.num_recv, *t.shape[1:])) for t in (k, v)]
            found = announced_cast([k, v], self.cast, group, self.impl, into, _PUBLISHED, places)
            if found is None:
                return None, None
            native, arriving = found
            self.last_announced[:] = form, ref(native), native.version(), arriving
        return native, arriving


def _made(make: Callable, tensors: tuple, options: tuple, one: OneLaunch, group: dist.ProcessGroup | None):
    """A `_Walk.make`."""
    return make(one, group, tensors, *options)


def _places(slot: str, rows: Sequence[tuple[int, Layout]]) -> tuple[tuple[Place, ...], int]:
    """Where rows like those of tensors, so many of each, lie one behind the other, and bytes of all."""
    places, end = [], 0
    for count, like in rows:
        places.append((slot, end))
        end += -(-count * like[:1].numel() * like.element_size() // _ALIGNMENT) * _ALIGNMENT
    return tuple(places), end


def _view(memory: torch.Tensor, at: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Rows in memory of bytes."""
    return memory[at : at + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)


def joined_bands(plan: RankPlan, made: np.ndarray | None = None) -> np.ndarray:
    """The mask of a plan over own keys and those of all stages, read-only int64 ``[n, 6]``; made once a plan.

    ``made``: by another process, for the same plan.
    """
    if not plan.transfers:
        return plan.bands[0]
    known = plan.runtime.get("joined bands")
    if known is None:
        if made is None:
            firsts = np.cumsum([gated.first_arriving(plan.num_rows), *(t.num_recv for t in plan.transfers)])
            later = (bd.shift_keys(table, at) for table, at in zip(plan.bands[1:], firsts, strict=False))
            made = np.concatenate([plan.bands[0], *later])
        known = plan.runtime["joined bands"] = own(made)
    return known


def backward_pays(dims: tuple[int, int]) -> bool:
    """Whether the backward, too, is one launch where the forward is; ``dims``: of a head of q and k, and of v."""
    return dims in WHOLE_DIMS


def forward_pays(cast: GroupCastArgs, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether the forward is one launch where the backward is; the same on all ranks. ``cast``: of keys and values."""
    if cast.num_ranks == 2 or cast.most is None:
        return True
    return cast.most[1] * sum(t.shape[1] * t.shape[2] * t.element_size() for t in (k, v)) <= MOST_FORWARD_BYTES


def is_alone(plan: RankPlan, dims: tuple[int, int]) -> bool:
    """Whether no rank fetches anything, and kernels take heads of such dims as they are."""
    return not plan.degree and not is_static(plan.bands[0]) and kernel_dims(dims) == dims


def pays(plan: RankPlan, dims: tuple[int, int], impl: str) -> bool:
    """Whether the forward of a plan is to be one launch, and kernels and collectives can; the same on all ranks.

    Args:
        plan: of this rank.
        dims: of a head of q and k, and of v; narrower than those of the kernels, they take copies.
        impl: of the collectives.
    """
    if not plan.one_launch:
        return False
    if not plan.degree or plan.schedule.saved_stage is not None or plan.schedule.forward[-1].stage == 0:
        return False  # stages are kept, or are to follow each other without overlap
    if plan.transfers[0].levels is not None or kernel_dims(dims) != dims:
        return False
    return may_announce(plan.cp_size, impl)
