"""A pass of attention in one launch: over this rank's own keys and fetched keys, which arrive while the kernel runs.

The launches of a pass are prepared once for a layout of its tensors, as a list of calls; calls fill in addresses.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary, ref

import numpy as np
import torch

from megatron_magi.backends.base import KeyTransfer, StepMover
from megatron_magi.backends.sm90 import fused_backward, fused_forward
from megatron_magi.backends.sm90.kernels import WHOLE_DIMS
from megatron_magi.backends.sm90.plan import DevicePlan
from megatron_magi.backends.sm90.stream_launches import LaunchesForm, StreamLaunches, brought
from megatron_magi.backends.sm90.support import in_dtype, loadable
from megatron_magi.cuda.arriving import Arriving, part_rows
from megatron_magi.cuda.launch_list import Step
from megatron_magi.cuda.layout import Layout
from megatron_magi.cuda.streams import current_stream
from megatron_magi.operands.merge import sink_lse
from megatron_magi.operands.options import AttnOptions
from megatron_magi.operands.passes import ForwardInputs, ForwardOutput
from megatron_magi.profiling import profiled_backward_calls, profiled_forward_calls
from megatron_magi.runtime.lru import LruCache, Use

_ALIGNMENT, _TMA_ALIGNMENT = 256, 16
_PUBLISHED = ("k_rows", 0), ("v_rows", 0)
_LATER = ("scratch", "later.k"), ("scratch", "later.v")
_OF_LATER = ("scratch", "later.dk"), ("scratch", "later.dv")
_GRADIENTS = ("dk", 0), ("dv", 0)


_new_like = functools.partial(torch.empty_like, memory_format=torch.contiguous_format)


class _BoundLaunches:
    """The launches of a pass, as lists of calls (csrc/calls), for tensors of one layout on one stream.

    Attributes:
        calls: lists of them.
        num_scratch: bytes of scratch memory.
        later: offsets in it of partial gradients of fetched keys and values that the caller has to send.
        tables: the tables that the calls read; kept alive if another thread evicts the pass from its cache.
        use: of the pass; None if no cache holds it.
    """

    def __init__(self, calls: StreamLaunches, numbers: Mapping[str, int]) -> None:
        self.calls, self.num_scratch = calls, numbers["num_scratch"]
        self.later = (numbers["later.dk"], numbers["later.dv"]) if calls.form.left else None
        self.tables: Mapping[str, DevicePlan] = {}
        self.use: Use | None = None

    def holds(self) -> bool:
        """Whether it is still valid."""
        if self.use is not None:
            self.use.note()
        return self.calls.hold()


@profiled_forward_calls
def _attend(queue: Callable[..., None], addresses: Sequence[int], q: torch.Tensor, v: torch.Tensor, bands) -> None:
    """Queues a forward pass."""
    queue(*addresses)


@profiled_backward_calls
def _attend_back(queue: Callable[..., None], addresses: Sequence[int], q: torch.Tensor, v: torch.Tensor, bands) -> None:
    """Queues a backward pass."""
    queue(*addresses)


_MOST_LAYOUTS = 64

type Maker = Callable[[LaunchProgram], tuple[_BoundLaunches | None, Any]]
"""Makes the walk of a layout for a mask, and the pass with which to cache it. Must not refer to a walk: walks live only
as long as the tables that their calls read.
"""


def new_makers() -> LruCache[tuple, Maker]:
    """For `LaunchProgram.makers`: an LRU cache by layout, as strides and streams may differ in every call."""
    return LruCache(0, _MOST_LAYOUTS)


@dataclass(frozen=True, eq=False)
class LaunchProgram:
    """State of one mask, for calls that differ in addresses, and in strides of tensors returned by autograd.

    Attributes:
        bands: over all keys, indexed as in `fused_forward`; immutable.
        num_keys: this rank's own keys.
        makers: of walks, by layout; shared by masks whose calls are otherwise equal.
        remote: fetches keys; None if no rank fetches any.
        is_prepared: the tables of the mask belong to a prepared plan.
        numbers: the mask's numbers for a forward and a backward, if they were prepared with the plan.
        walks: of both passes, by layout. Held by the passes, which own device memory and may be evicted; and by `kept`,
            with its pass, if that adds no memory or belongs to the plan.
        last_get: the fetching kernel for one layout, its implementation and version: both passes launch it, on
            one stream.
    """

    bands: np.ndarray
    num_keys: int
    makers: LruCache[tuple, Maker]
    remote: KeyTransfer | None = None
    is_prepared: bool = False
    numbers: tuple[fused_forward.MaskNumbers | None, fused_forward.MaskNumbers | None] = (None, None)
    walks: WeakValueDictionary[tuple, _BoundLaunches] = field(default_factory=WeakValueDictionary)
    kept: dict[tuple, tuple[_BoundLaunches, Any]] = field(default_factory=dict)
    last_get: list = field(default_factory=list)

    @property
    def num_recv(self) -> int:
        """Keys that arrive."""
        return 0 if self.remote is None else self.remote.num_recv

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sink: torch.Tensor | None,
        options: AttnOptions,
        return_max_logits: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None] | None:
        """Output, lse and largest logits; None, on all ranks, if rows cannot be fetched while a kernel waits for them,
        or if that would be slower.
        """
        if self.remote is not None and not self.remote.forward_pays(k, v):
            return None
        stream = current_stream(q.device)
        walk, rows_k, rows_v = self._direct((stream, q.stride(), k.stride(), v.stride()), (q, k, v)), k, v
        if walk is None:
            q, k, v = loadable(q), loadable(k), loadable(v)
            rows_k, rows_v = self._rows(k), self._rows(v)
        num_rows, num_heads, _ = q.shape
        out = q.new_empty(num_rows, num_heads, v.shape[2])  # passing the shape as a tuple takes twice the host time
        lse = q.new_empty(num_rows, num_heads, dtype=torch.float32)
        if sink is not None:
            sink = sink_lse(sink, torch.float32).expand(lse.shape)
        if walk is None:
            walk = self._known(
                (stream, q.stride(), k.stride(), v.stride()), LaunchProgram._make_forward,
                (q, k, v, rows_k, rows_v, out, lse, sink), options, return_max_logits, stream,
            )  # fmt: skip
        if walk is None:
            return None
        # Tensor maps need a valid address even if no keys are fetched.
        scratch = q.new_empty(walk.num_scratch or _ALIGNMENT, dtype=torch.uint8) if self.remote is not None else None
        of_keys = rows_k.data_ptr(), rows_v.data_ptr(), 0 if scratch is None else scratch.data_ptr()
        max_logits, more = None, []
        if sink is not None:
            more.append(sink.data_ptr())
        if return_max_logits:
            max_logits = torch.full((num_heads,), -torch.inf, dtype=torch.float32, device=q.device)
            more.append(max_logits.data_ptr())
        if walk.calls.form.is_empty:
            walk.calls.queue(*of_keys)
            return out, lse, max_logits
        rest = q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), lse.data_ptr(), *more
        _attend(walk.calls.queue, (*of_keys, *rest), q, v, self.bands)
        return out, lse, max_logits

    def backward(
        self,
        dout: torch.Tensor,
        qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        out: torch.Tensor,
        lse: torch.Tensor,
        options: AttnOptions,
        partial: torch.dtype,
        wants_delta: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None] | None:
        """Gradients of q, in its dtype, and of k and v, in dtype ``partial``, and delta; None as in `forward`,
        or for head dims whose backward runs in stages.

        Args:
            dout: of any float dtype.
            qkv: q, k and v.
            out, lse: of the forward, ``lse`` fp32 ``[num_rows, num_heads]``.
            options: of the call.
            partial: dtype of each rank's partial gradients of k and v, both those that are sent and this rank's own;
                parts are summed in fp32 and rounded once.
            wants_delta: also return ``rowsum(dout * out)``, fp32 ``[num_rows, num_heads]``.
        """
        q, k, v = qkv
        if not backward_pays((q.shape[2], v.shape[2])):
            return None
        stream, dout = current_stream(q.device), in_dtype(dout, q.dtype)
        key, rows_k, rows_v = self._backward_key(stream, (q, k, v, dout, out, lse), wants_delta), k, v
        walk = self._direct(key, (q, k, v, dout, out))
        if walk is None:
            q, k, v, dout, out = map(loadable, (q, k, v, dout, out))
            rows_k, rows_v = self._rows(k), self._rows(v)
        dq, dk, dv = _new_like(q), _new_like(k, dtype=partial), _new_like(v, dtype=partial)
        if walk is None:
            walk = self._known(
                self._backward_key(stream, (q, k, v, dout, out, lse), wants_delta), LaunchProgram._make_backward,
                (q, k, v, rows_k, rows_v, dout, out, lse, dq, dk, dv), options, wants_delta, stream,
            )  # fmt: skip
        if walk is None:
            return None
        scratch = q.new_empty(walk.num_scratch, dtype=torch.uint8)
        addresses = rows_k.data_ptr(), rows_v.data_ptr(), scratch.data_ptr(), dk.data_ptr(), dv.data_ptr()
        delta = _new_like(lse) if wants_delta else None
        if walk.calls.form.is_empty:
            walk.calls.queue(*addresses)
            dk.zero_()
            dv.zero_()
        else:
            rest = (t.data_ptr() for t in (q, k, v, dout, out, lse, dq, *(() if delta is None else (delta,))))
            _attend_back(walk.calls.queue, (*addresses, *rest), q, v, self.bands)
        if walk.later is None and walk.calls.form.is_empty:
            walk.calls.queue(*addresses, part=1)
        if walk.later is not None:
            assert self.remote is not None
            shapes = ((self.num_recv, *t.shape[1:]) for t in (k, v))
            later = [_view(scratch, at, shape, partial) for at, shape in zip(walk.later, shapes, strict=True)]
            self.remote.give_back(later, [dk, dv])
        return dq, dk, dv, delta

    @staticmethod
    def _backward_key(stream: int, tensors: Sequence[torch.Tensor], wants_delta: bool) -> tuple:
        return stream, wants_delta, *[t.stride() for t in tensors]

    def _direct(self, key: tuple, tensors: Sequence[torch.Tensor]) -> _BoundLaunches | None:
        """The known walk of a layout whose tensors all kernels read in place; None if there is none."""
        walk = self.walks.get(key)
        if walk is None or not walk.calls.form.is_direct or not walk.holds():
            return None
        bits = 0
        for t in tensors:
            bits |= t.data_ptr()
        return None if bits % _TMA_ALIGNMENT else walk

    def _rows(self, x: torch.Tensor) -> torch.Tensor:
        """The tensor to publish; unchanged if nothing is published."""
        return x if self.remote is None else self.remote.published(x)

    def _known(self, key: tuple, make: Callable, tensors: Sequence[Any], *options: Any) -> _BoundLaunches | None:
        """The walk of a layout; made if there is none or it is no longer valid."""
        walk = self.walks.get(key)
        if walk is None or not walk.holds():
            maker = self.makers.get(key)
            if maker is None:
                layouts = tuple(None if t is None else Layout.of(t) for t in tensors)
                maker = functools.partial(_made, make, layouts, options, {})
            walk = self.make(key, maker)
        return walk

    def make(self, key: tuple, maker: Maker) -> _BoundLaunches | None:
        """Makes the walk of a layout and keeps it for calls."""
        walk, keeper = maker(self)
        if walk is not None:
            self.makers.put(key, maker, 0)
            if keeper is not None:
                walk.tables, walk.use = keeper.plans, keeper.use
            if keeper is None or self.is_prepared:
                self.kept[key] = walk, keeper
            else:
                keeper.lists.setdefault(self, {})[key] = walk
            self.walks[key] = walk
        return walk

    def _make_forward(
        self, tensors: tuple[Layout, ...], made: dict, options: AttnOptions, max_logits: bool, stream: int
    ) -> tuple[_BoundLaunches | None, Any]:
        q, k, v, rows_k, rows_v, out, lse, sink = tensors
        k, v, rows_k, rows_v = self._with_keys(k, v, rows_k, rows_v)
        numbers = _later_numbers(self.num_recv, {"later.k": k, "later.v": v})
        mover, arriving = self._get_step(rows_k, rows_v, stream)
        if self.remote is not None and mover is None:
            return None, None
        moving, slots = () if arriving is None else (arriving.step,), ("k_rows", "v_rows", "scratch")
        numbers |= brought(moving)
        form = LaunchesForm(q.device, stream, self.num_recv > 0, _are_same((k, v), (rows_k, rows_v)), not q.shape[0])
        if form.is_empty:
            return self._walk(made, form, mover, lambda: [moving], slots, numbers), None
        use = fused_forward.PassUse(options, stream, remembered=not self.is_prepared)
        operands = ForwardInputs(q, k, v, sink), ForwardOutput(out, lse)
        known = fused_forward.forward_pass(*operands, self.num_recv, self.bands, use, self.numbers[0])

        def steps() -> list[Sequence[Step]]:
            return [(*moving, fused_forward.forward_step(*operands, arriving, known.form, use, max_logits))]

        more = [name for name, there in (("sink", sink is not None), ("max_logits", max_logits)) if there]
        slots = (*slots, "q", "k", "v", "out", "lse", *more)
        form, numbers = form._replace(kernels=known.form), numbers | known.numbers
        return self._walk(made, form, mover, steps, slots, numbers), known

    def _make_backward(
        self, tensors: tuple[Layout, ...], made: dict, options: AttnOptions, delta: bool, stream: int
    ) -> tuple[_BoundLaunches | None, Any]:
        q, k, v, rows_k, rows_v, dout, out, lse, dq, dk, dv = tensors
        k, v, rows_k, rows_v, dk, dv = self._with_keys(k, v, rows_k, rows_v, dk, dv)
        numbers = _later_numbers(self.num_recv, {"later.k": k, "later.v": v, "later.dk": dk, "later.dv": dv})
        mover, arriving = self._get_step(rows_k, rows_v, stream)
        if self.remote is not None and mover is None:
            return None, None
        moving, left, back = () if arriving is None else (arriving.step,), False, ()
        if self.remote is not None:
            later = tuple(dk.new_empty((self.num_recv, *t.shape[1:])) for t in (dk, dv))
            sums = self.remote.put_step(later, (dk, dv), _OF_LATER, _GRADIENTS)
            left, back = sums is None, () if sums is None else (sums,)
        numbers |= brought((*moving, *back))
        is_direct, slots = _are_same((k, v), (rows_k, rows_v)), ("k_rows", "v_rows", "scratch", "dk", "dv")
        form = LaunchesForm(q.device, stream, self.num_recv > 0, is_direct, not q.shape[0], left)
        if form.is_empty:
            return self._walk(made, form, mover, lambda: [moving, back], slots, numbers), None
        use = fused_forward.PassUse(options, stream, remembered=not self.is_prepared)
        lie = fused_backward.BackwardTensors((q, k, v, dout), out, lse, (dq, dk, dv))
        known = fused_backward.backward_pass(lie, self.num_recv, self.bands, use, self.numbers[1])
        numbers |= known.numbers
        scratch, numbers["num_scratch"] = fused_backward.scratch_numbers(
            lie, known.form, use, numbers["key_sums"], numbers["num_scratch"]
        )
        numbers |= scratch

        def steps() -> list[Sequence[Step]]:
            comes = arriving if self.num_recv else None
            sent = fused_backward.Sent(comes, _OF_LATER, moves=bool(moving), returns=bool(back))
            found = fused_backward.backward_steps(lie, sent, known, use, delta)
            ends = [*back, *found.rest]
            if found.rest_is_apart and back and arriving.overlaps:
                ends[0] = back[0].overlapping()
            elif found.rest_is_apart:  # it would occupy its SMs until the other ranks arrive
                ends = [*found.rest, *back]
            return [[*moving, *found.before, *found.keys, *ends]]

        slots += "q", "k", "v", "dout", "out", "lse", "dq", *(("delta",) if delta else ())
        return self._walk(made, form._replace(kernels=known.form), mover, steps, slots, numbers), known

    @staticmethod
    def _walk(
        made: dict[LaunchesForm, StreamLaunches],
        form: LaunchesForm,
        mover: StepMover | None,
        steps: Callable[[], Sequence[Sequence[Step]]],
        slots: Sequence[str],
        numbers: Mapping[str, int],
    ) -> _BoundLaunches:
        """A walk for these numbers.

        Args:
            made: calls of other masks, by form; valid ones are copied.
            form: of these.
            mover: launches kernels that transfer rows; None if there are none.
            steps: makes the steps if there are none to copy.
            slots: as `LaunchList` takes them.
            numbers: of the mask.
        """
        known = made.get(form)
        if known is None or not known.hold():
            known = StreamLaunches(form, mover, steps(), slots)
        made[form] = calls = known.like(mover, numbers)
        return _BoundLaunches(calls, numbers)

    def _with_keys(self, *tensors: Layout) -> Iterator[Layout]:
        """Layouts of key tensors of another mask, with this mask's number of keys."""
        return (t.with_rows(self.num_keys) for t in tensors)

    def _get_step(self, k: Layout, v: Layout, stream: int) -> tuple[StepMover | None, Arriving | None]:
        """The mover of keys and the kernel that it launches; None and None if no keys are fetched in this way."""
        if self.remote is None:
            return None, None
        form = stream, [(t.shape, t.stride(), t.dtype, t.data_ptr()) for t in (k, v)]
        of_form, mover, version, arriving = self.last_get or (None, lambda: None, None, None)
        mover = mover()
        if of_form != form or mover is None or mover.version() != version:
            into = [t.new_empty((self.num_recv, *t.shape[1:])) for t in (k, v)]
            found = self.remote.get_step((k, v), into, _PUBLISHED, _LATER)
            if found is None:
                return None, None
            mover, arriving = found
            self.last_get[:] = form, ref(mover), mover.version(), arriving
        return mover, arriving


def _made(make: Callable, tensors: tuple, options: tuple, made: dict, one: LaunchProgram):
    """One of `LaunchProgram.makers`; ``made``: the calls that it has made, by form."""
    return make(one, tensors, made, *options)


def _are_same(tensors: Sequence[Layout], others: Sequence[Layout]) -> bool:
    """Whether the tensors are those of ``others``; else they are copies with other strides."""
    return all(a.stride() == b.stride() for a, b in zip(tensors, others, strict=True))


def _later_numbers(count: int, rows: Mapping[str, Layout]) -> dict[str, int]:
    """Offsets, in the memory of a call, of ``count`` rows of each layout of ``rows``, by name, and the total size."""
    numbers, end = {"later.num_rows": count, "later.part_rows": part_rows(count)}, 0
    for name, like in rows.items():
        numbers[name] = end
        end += -(-count * like.shape[1] * like.shape[2] * like.element_size() // _ALIGNMENT) * _ALIGNMENT
    return {**numbers, "num_scratch": end}


def _view(memory: torch.Tensor, at: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A view of byte memory at an offset."""
    return memory[at : at + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)


def backward_pays(dims: tuple[int, int]) -> bool:
    """Whether the backward is one launch too if the forward is; ``dims``: head dims of q and k, and of v."""
    return dims in WHOLE_DIMS
