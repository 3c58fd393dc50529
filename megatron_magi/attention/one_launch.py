"""Attention in one launch over all stages: own keys, and behind them those of all stages, which arrive meanwhile.

Where no keys arrive, as for one rank, it is one over own keys.

What a pass queues is prepared once for a layout of its tensors, as a list of calls; the calls give addresses.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary, ref

import numpy as np
import torch
import torch.distributed as dist

from megatron_magi.attention.runtime import joined_cast
from megatron_magi.attention.stream_calls import CallsForm, StreamCalls, brought
from megatron_magi.comm.announced import announced_cast, may_announce, returned_sums
from megatron_magi.comm.group_collective import GroupCastArgs, group_reduce
from megatron_magi.comm.impl.native import Native
from megatron_magi.comm.row_memory import with_rows
from megatron_magi.cuda.arriving import part_rows
from megatron_magi.cuda.call_list import Step
from megatron_magi.cuda.layout import Layout
from megatron_magi.mask import bands as bd
from megatron_magi.ops.hopper import gated, gated_backward
from megatron_magi.ops.hopper.kernels import WHOLE_DIMS, kernel_dims
from megatron_magi.ops.hopper.plan import is_static
from megatron_magi.ops.hopper.support import current_stream, in_dtype, loadable
from megatron_magi.ops.impl import hopper
from megatron_magi.ops.merge import sink_lse
from megatron_magi.ops.operands import BackwardInputs, Gradients
from megatron_magi.ops.options import AttnOptions
from megatron_magi.ops.slice_passes import forward_pass
from megatron_magi.plan import RankPlan
from megatron_magi.plan.predict import MOST_FORWARD_BYTES
from megatron_magi.plan.types import own
from megatron_magi.profiling import profiled_backward_calls, profiled_forward_calls

_ALIGNMENT, _TMA_ALIGNMENT = 256, 16
_PUBLISHED = ("k_rows", 0), ("v_rows", 0)
_LATER = ("scratch", "later.k"), ("scratch", "later.v")
_OF_LATER = ("scratch", "later.dk"), ("scratch", "later.dv")
_GRADIENTS = ("dk", 0), ("dv", 0)


class _Walk:
    """What a pass queues, for tensors of one layout on one stream.

    Attributes:
        calls: lists of them.
        num_scratch: bytes of memory that they take.
        later: where in them partial gradients of fetched keys and values are, which are left to be sent.
        make: makes one for another mask, of its `OneLaunch` and the group. It does not refer to this one, which is gone
            when the tables are that the calls read.
    """

    make: Callable[[OneLaunch, dist.ProcessGroup | None], tuple[_Walk | None, Any]]

    def __init__(self, calls: StreamCalls, numbers: Mapping[str, int]) -> None:
        self.calls, self.num_scratch = calls, numbers["num_scratch"]
        self.later = (numbers["later.dk"], numbers["later.dv"]) if calls.form.left else None

    def holds(self) -> bool:
        """Whether it can be queued still."""
        return self.calls.hold()


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
        numbers: what the mask makes of a forward and of a backward, where that came with the plan.
        walks: of both passes, by layout. Kept by the passes, which hold device memory and are forgotten when that is
            too much; and by `kept`, with its pass, where that adds none or goes with the plan.
        last_announced: what brings the keys for one layout, the implementation that does and its version: both passes
            queue it, on one stream.
    """

    cast: GroupCastArgs | None
    bands: np.ndarray
    impl: str
    is_prepared: bool
    numbers: tuple[gated.MaskNumbers | None, gated.MaskNumbers | None] = (None, None)
    walks: WeakValueDictionary[tuple, _Walk] = field(default_factory=WeakValueDictionary)
    kept: dict[tuple, tuple[_Walk, Any]] = field(default_factory=dict)
    last_announced: list = field(default_factory=list)

    @classmethod
    def of(cls, plan: RankPlan, impl: str, device: torch.device) -> OneLaunch:
        """For a plan."""
        cast = joined_cast(plan, device) if plan.degree else None
        numbers = plan.runtime.get("numbers", (None, None))
        return cls(cast, joined_bands(plan), impl, bool(plan.runtime.get("tables")), numbers)

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
        device, stream = q.device, current_stream(q.device)
        key = stream, q.stride(), k.stride(), v.stride()
        if self._is_direct(key, (q, k, v)):
            rows_k, rows_v = k, v
        else:
            q, k, v = loadable(q), loadable(k), loadable(v)
            rows_k, rows_v, key = self._rows(k), self._rows(v), (stream, q.stride(), k.stride(), v.stride())
        num_rows, num_heads, _ = q.shape
        out = torch.empty((num_rows, num_heads, v.shape[2]), dtype=q.dtype, device=device)
        lse = torch.empty((num_rows, num_heads), dtype=torch.float32, device=device)
        given = sink
        if sink is not None:
            sink = sink_lse(sink, torch.float32).expand(lse.shape)
        walk = self._known(
            key, group, OneLaunch._make_forward, (q, k, v, rows_k, rows_v, out, lse, sink),
            options, return_max_logits, stream,
        )  # fmt: skip
        if walk is None:
            return None
        scratch = torch.empty(walk.num_scratch, dtype=torch.uint8, device=device)
        if walk.calls.form.is_empty:
            walk.calls.queue(rows_k.data_ptr(), rows_v.data_ptr(), scratch.data_ptr())
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
        _attend(walk.calls.queue, addresses, q, v, self.bands)
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
        q, k, v = qkv
        device, stream, dout = q.device, current_stream(q.device), in_dtype(dout, q.dtype)
        key = self._backward_key(stream, (q, k, v, dout, out, lse), wants_delta)
        if self._is_direct(key, (q, k, v, dout, out)):
            rows_k, rows_v = k, v
        else:
            q, k, v, dout, out = map(loadable, (q, k, v, dout, out))
            rows_k, rows_v = self._rows(k), self._rows(v)
            key = self._backward_key(stream, (q, k, v, dout, out, lse), wants_delta)
        new = functools.partial(torch.empty, device=device)
        dq, dk, dv = new(q.shape, dtype=q.dtype), new(k.shape, dtype=partial), new(v.shape, dtype=partial)
        walk = self._known(
            key, group, OneLaunch._make_backward, (q, k, v, rows_k, rows_v, dout, out, lse, dq, dk, dv),
            options, wants_delta, stream,
        )  # fmt: skip
        if walk is None:
            return None
        scratch = new(walk.num_scratch, dtype=torch.uint8)
        addresses = rows_k.data_ptr(), rows_v.data_ptr(), scratch.data_ptr(), dk.data_ptr(), dv.data_ptr()
        delta = new(lse.shape, dtype=torch.float32) if wants_delta and not walk.calls.form.is_empty else None
        if walk.calls.form.is_empty:
            delta = hopper.row_delta(dout, out)
            walk.calls.queue(*addresses)
            hopper.backward(BackwardInputs(q, k, v, dout, lse, delta), self.bands, options, Gradients(dq, dk, dv))
        else:
            rest = (t.data_ptr() for t in (q, k, v, dout, out, lse, dq, *(() if delta is None else (delta,))))
            _attend_back(walk.calls.queue, (*addresses, *rest), q, v, self.bands)
        if walk.later is None and walk.calls.form.is_empty:
            walk.calls.queue(*addresses, part=1)
        if walk.later is not None:
            assert self.cast is not None
            shapes = ((self.cast.num_recv, *t.shape[1:]) for t in (k, v))
            later = [_view(scratch, at, shape, partial) for at, shape in zip(walk.later, shapes, strict=True)]
            group_reduce(later, self.cast, group, into=[dk, dv], impl=self.impl, at_once=True, kept=True).wait()
        return dq, dk, dv, delta

    @staticmethod
    def _backward_key(stream: int, tensors: Sequence[torch.Tensor], wants_delta: bool) -> tuple:
        return stream, wants_delta, *[t.stride() for t in tensors]

    def _is_direct(self, key: tuple, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether tensors of a layout are known to be taken as they are, by all that is queued."""
        walk = self.walks.get(key)
        if walk is None or not walk.calls.form.is_direct:
            return False
        bits = 0
        for t in tensors:
            bits |= t.data_ptr()
        return not bits % _TMA_ALIGNMENT

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
            walk = self.make(key, group, functools.partial(_made, make, layouts, options, {}))
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
        self, group, tensors: tuple[Layout, ...], made: dict, options: AttnOptions, max_logits: bool, stream: int
    ) -> tuple[_Walk | None, Any]:
        q, k, v, rows_k, rows_v, out, lse, sink = tensors
        numbers = _later_numbers(self.num_recv, {"later.k": k, "later.v": v})
        native, arriving = self._announced(group, rows_k, rows_v, stream)
        if self.cast is not None and native is None:
            return None, None
        moving, slots = () if arriving is None else (arriving.step,), ("k_rows", "v_rows", "scratch")
        numbers |= brought(moving)
        form = CallsForm(q.device, stream, self.num_recv > 0, _are_same((k, v), (rows_k, rows_v)), not q.shape[0])
        if form.is_empty:
            return self._walk(made, form, native, lambda: [moving], slots, numbers), None
        use = gated.PassUse(options, stream, remembered=not self.is_prepared)
        lie = gated.ForwardTensors(q, k, v, out, lse, sink)
        known = gated.forward_pass(lie, self.num_recv, self.bands, use, self.numbers[0])

        def steps() -> list[Sequence[Step]]:
            if self.num_recv:
                return [(*moving, gated.forward_step(lie, arriving, known.form, use, max_logits))]
            return [(*moving, gated.own_forward_step(lie, known.form, use, max_logits))]

        more = [name for name, there in (("sink", sink is not None), ("max_logits", max_logits)) if there]
        slots = (*slots, "q", "k", "v", "out", "lse", *more)
        form, numbers = form._replace(kernels=known.form), numbers | known.numbers
        return self._walk(made, form, native, steps, slots, numbers), known

    def _make_backward(
        self, group, tensors: tuple[Layout, ...], made: dict, options: AttnOptions, delta: bool, stream: int
    ) -> tuple[_Walk | None, Any]:
        q, k, v, rows_k, rows_v, dout, out, lse, dq, dk, dv = tensors
        numbers = _later_numbers(self.num_recv, {"later.k": k, "later.v": v, "later.dk": dk, "later.dv": dv})
        native, arriving = self._announced(group, rows_k, rows_v, stream)
        if self.cast is not None and native is None:
            return None, None
        moving, left, back = () if arriving is None else (arriving.step,), False, ()
        if self.cast is not None:
            later = tuple(dk.new_empty((self.num_recv, *t.shape[1:])) for t in (dk, dv))
            sums = returned_sums(later, self.cast, group, self.impl, (dk, dv), _OF_LATER, _GRADIENTS)
            left, back = sums is None, () if sums is None else (sums,)
        numbers |= brought((*moving, *back))
        is_direct, slots = _are_same((k, v), (rows_k, rows_v)), ("k_rows", "v_rows", "scratch", "dk", "dv")
        form = CallsForm(q.device, stream, self.num_recv > 0, is_direct, not q.shape[0], left)
        if form.is_empty:
            return self._walk(made, form, native, lambda: [moving, back], slots, numbers), None
        use = gated.PassUse(options, stream, remembered=not self.is_prepared)
        lie = gated_backward.BackwardTensors((q, k, v, dout), out, lse, (dq, dk, dv))
        known = gated_backward.backward_pass(lie, self.num_recv, self.bands, use, self.numbers[1])
        numbers |= known.numbers
        scratch, numbers["num_scratch"] = gated_backward.scratch_numbers(
            lie, known.form, use, numbers["key_sums"], numbers["num_scratch"]
        )
        numbers |= scratch

        def steps() -> list[Sequence[Step]]:
            comes = arriving if self.num_recv else None
            sent = gated_backward.Sent(comes, _OF_LATER, moves=bool(moving), returns=bool(back))
            found = gated_backward.backward_steps(lie, sent, known, use, delta)
            ends = [*back, *found.rest]
            if found.rest_is_apart and back and arriving.overlaps:
                ends[0] = back[0].overlapping()
            elif found.rest_is_apart:  # it would keep its SMs until the other ranks come
                ends = [*found.rest, *back]
            return [[*moving, *found.before, *found.keys, *ends]]

        slots += "q", "k", "v", "dout", "out", "lse", "dq", *(("delta",) if delta else ())
        return self._walk(made, form._replace(kernels=known.form), native, steps, slots, numbers), known

    @staticmethod
    def _walk(
        made: dict[CallsForm, StreamCalls],
        form: CallsForm,
        native: Native | None,
        steps: Callable[[], Sequence[Sequence[Step]]],
        slots: Sequence[str],
        numbers: Mapping[str, int],
    ) -> _Walk:
        """A walk for these numbers.

        Args:
            made: calls of other masks, by form; those that hold are copied.
            form: of these.
            native: by which they move rows.
            steps: makes them where there are none to copy.
            slots: as `CallList` takes them.
            numbers: of the mask.
        """
        known = made.get(form)
        if known is None or not known.hold():
            known = StreamCalls(form, native, steps(), slots)
        made[form] = calls = known.like(native, numbers)
        return _Walk(calls, numbers)

    def _announced(self, group, k: Layout, v: Layout, stream: int):
        """The implementation of the cast, and what it queues; None and None where no keys arrive, or not so."""
        if self.cast is None:
            return None, None
        form = stream, [(t.shape, t.stride(), t.dtype, t.data_ptr()) for t in (k, v)]
        of_form, native, version, arriving = self.last_announced or (None, lambda: None, None, None)
        native = native()
        if of_form != form or native is None or native.version() != version:
            into = [t.new_empty((self.num_recv, *t.shape[1:])) for t in (k, v)]
            found = announced_cast([k, v], self.cast, group, self.impl, into, _PUBLISHED, _LATER)
            if found is None:
                return None, None
            native, arriving = found
            self.last_announced[:] = form, ref(native), native.version(), arriving
        return native, arriving


def _made(make: Callable, tensors: tuple, options: tuple, made: dict, one: OneLaunch, group: dist.ProcessGroup | None):
    """A `_Walk.make`; ``made``: those that it has made, by form."""
    return make(one, group, tensors, made, *options)


def _are_same(tensors: Sequence[Layout], others: Sequence[Layout]) -> bool:
    """Whether tensors are others, of which they are copies else, with other strides."""
    return all(a.stride() == b.stride() for a, b in zip(tensors, others, strict=True))


def _later_numbers(count: int, rows: Mapping[str, Layout]) -> dict[str, int]:
    """Of ``count`` keys that arrive: where in the memory of a call ``rows`` like those of tensors lie, by name, and how
    much that is.
    """
    numbers, end = {"later.num_rows": count, "later.part_rows": part_rows(count)}, 0
    for name, like in rows.items():
        numbers[name] = end
        end += -(-count * like.shape[1] * like.shape[2] * like.element_size() // _ALIGNMENT) * _ALIGNMENT
    return {**numbers, "num_scratch": end}


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
