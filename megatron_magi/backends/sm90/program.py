"""Passes of attention over one mask, as lists of launches that are prepared once; calls fill in addresses.

A pass is one launch over this rank's own keys and fetched keys, which arrive while the kernel runs; or one of several
stages, each over keys that are there, whose results are merged. A stage is a pass without fetched keys, which may add
to results over other keys.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import WeakValueDictionary, ref

import numpy as np
import torch
from torch import Tensor

from megatron_magi.backends.base import KeyTransfer, StepMover
from megatron_magi.backends.sm90 import backward_steps as back
from megatron_magi.backends.sm90 import forward_steps
from megatron_magi.backends.sm90 import mask_numbers as of_mask
from megatron_magi.backends.sm90.backward_targets import STORE_FLOAT, Targets
from megatron_magi.backends.sm90.kernels import WHOLE_DIMS, kernel_dims
from megatron_magi.backends.sm90.plan import DevicePlan
from megatron_magi.backends.sm90.stream_launches import LaunchesForm, StreamLaunches, brought
from megatron_magi.backends.sm90.support import in_dtype, loadable
from megatron_magi.cuda.arriving import Arriving, part_rows
from megatron_magi.cuda.driver import fits_tensor_map
from megatron_magi.cuda.launch_list import Step
from megatron_magi.cuda.layout import Layout
from megatron_magi.cuda.streams import current_stream
from megatron_magi.operands.merge import sink_lse
from megatron_magi.operands.options import AttnOptions
from megatron_magi.operands.passes import BackwardInputs, ForwardInputs, ForwardOutput, Gradients
from megatron_magi.profiling import profiled_backward_calls, profiled_forward_calls
from megatron_magi.runtime.lru import LruCache, Use

MAX_BYTES, MAX_LISTS = 512 << 20, 1024
_bound: LruCache[tuple, _BoundLaunches] = LruCache(MAX_BYTES, MAX_LISTS)
"""By program and layout; bounded by the device memory of the tables that they read."""

_ALIGNMENT, _TMA_ALIGNMENT = 256, 16
_REMOTE_FORWARD = "k_rows", "v_rows", "scratch"
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
        targets: memory that gradients are written to, if not all are written by the kernels themselves; of a backward.
        tables: the tables that the calls read.
        num_bytes: their device memory.
        use: of its place in the cache; None if no cache holds it.
    """

    def __init__(
        self, calls: StreamLaunches, numbers: Mapping[str, int], read: of_mask.PassTables | None = None
    ) -> None:
        self.calls, self.num_scratch = calls, numbers["num_scratch"]
        self.later = (numbers["later.dk"], numbers["later.dv"]) if calls.form.left else None
        targets: Targets | None = getattr(calls.form.kernels, "targets", None)
        self.targets = None if targets is None or targets.are_gradients else targets
        self.tables: Mapping[str, DevicePlan] = {} if read is None else read.plans
        self.num_bytes = 0 if read is None else read.num_bytes
        self.use: Use | None = None

    def holds(self) -> bool:
        """Whether it is still valid."""
        if self.use is not None:
            self.use.note()
        return self.calls.hold()


@profiled_forward_calls
def _attend(queue: Callable[..., None], addresses: Sequence[int], q: Tensor, v: Tensor, bands) -> None:
    """Queues a forward pass."""
    queue(*addresses)


@profiled_backward_calls
def _attend_back(queue: Callable[..., None], addresses: Sequence[int], q: Tensor, v: Tensor, bands) -> None:
    """Queues a backward pass."""
    queue(*addresses)


_MOST_LAYOUTS = 64

type Maker = Callable[[LaunchProgram], _BoundLaunches | None]
"""Makes the launches of a layout for a mask. Must not refer to those of another: they live only as long as the tables
that they read.
"""


def new_makers() -> LruCache[tuple, Maker]:
    """For `LaunchProgram.makers`: an LRU cache by layout, as strides and streams may differ in every call."""
    return LruCache(0, _MOST_LAYOUTS)


class _Adds(NamedTuple):
    """What a stage adds to: dq; dk and dv. None in its place if it is a whole pass, which writes all gradients."""

    dq: bool
    keys: bool


class SharedSums:
    """Backward passes of the same queries, each over keys of its own, that accumulate dq in the same sums.

    For passes for which `choices.sums_meet` holds, on one stream, of the same dout, lse and delta. The last one writes
    dq; they may use its memory, contiguous and in the dtype of q, until then.

    Attributes:
        left: passes that remain.
        memory: of the first pass: row statistics and sums.
    """

    def __init__(self, count: int) -> None:
        self.left = count
        self.memory: Tensor | None = None

    @property
    def part(self) -> back.Part:
        """Which of them the next one is."""
        return back.Part(self.memory is None, self.left == 1)


@dataclass(frozen=True, eq=False)
class LaunchProgram:
    """State of one mask, for calls that differ in addresses, and in layouts of tensors returned by autograd.

    Attributes:
        bands: over all keys, indexed as in `mask_numbers`; immutable.
        num_keys: this rank's own keys, or those of a stage.
        makers: of launches, by layout, which begins with the stream; shared by masks whose calls are otherwise equal.
        remote: fetches keys; None if no rank fetches any, or for a stage.
        is_prepared: the tables of the mask belong to a prepared plan.
        numbers: the mask's numbers for a forward and a backward, if they were prepared with the plan.
        bound: launches of both passes, by layout. Held by a cache that bounds the device memory of their tables; and by
            ``kept`` if they add no memory or it belongs to the plan.
        last_get: the fetching kernel for one layout, its implementation and version: both passes launch it, on
            one stream.
        token: stands for this object in the cache.
    """

    bands: np.ndarray
    num_keys: int
    makers: LruCache[tuple, Maker]
    remote: KeyTransfer | None = None
    is_prepared: bool = False
    numbers: tuple[of_mask.MaskNumbers | None, of_mask.MaskNumbers | None] = (None, None)
    bound: WeakValueDictionary[tuple, _BoundLaunches] = field(default_factory=WeakValueDictionary)
    kept: dict[tuple, _BoundLaunches] = field(default_factory=dict)
    last_get: list = field(default_factory=list)
    token: object = field(default_factory=object)

    @property
    def num_recv(self) -> int:
        """Keys that arrive."""
        return 0 if self.remote is None else self.remote.num_recv

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sink: Tensor | None,
        options: AttnOptions,
        return_max_logits: bool,
    ) -> tuple[Tensor, Tensor, Tensor | None] | None:
        """Output, lse and largest logits; None, on all ranks, if rows cannot be fetched while a kernel waits for them,
        or if that would be slower.
        """
        if self.remote is not None and not self.remote.forward_pays(k, v):
            return None
        stream, of_call = current_stream(q.device), (return_max_logits, 0 if sink is None else sink.dim())
        known = self._direct((stream, *of_call, q.stride(), k.stride(), v.stride()), (q, k, v))
        rows_k, rows_v = k, v
        if known is None:
            q, k, v = loadable(q), loadable(k), loadable(v)
            rows_k, rows_v = self._rows(k), self._rows(v)
        num_rows, num_heads, _ = q.shape
        out = q.new_empty(num_rows, num_heads, v.shape[2])  # passing the shape as a tuple takes twice the host time
        lse = q.new_empty(num_rows, num_heads, dtype=torch.float32)
        if sink is not None:
            sink = sink_lse(sink, torch.float32).expand(lse.shape)
        if known is None:
            known = self._known(
                (stream, *of_call, q.stride(), k.stride(), v.stride()), LaunchProgram._make_forward,
                (q, k, v, rows_k, rows_v, out, lse, sink), options, False, return_max_logits, stream,
            )  # fmt: skip
        if known is None:
            return None
        of_keys, scratch = (), None
        if self.remote is not None:
            # Tensor maps need a valid address even if no keys are fetched.
            scratch = q.new_empty(known.num_scratch or _ALIGNMENT, dtype=torch.uint8)
            of_keys = rows_k.data_ptr(), rows_v.data_ptr(), scratch.data_ptr()
        max_logits, more = None, []
        if sink is not None:
            more.append(sink.data_ptr())
        if return_max_logits:
            max_logits = torch.full((num_heads,), -torch.inf, dtype=torch.float32, device=q.device)
            more.append(max_logits.data_ptr())
        if known.calls.form.is_empty:
            known.calls.queue(*of_keys)
            return out, lse, max_logits
        rest = q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), lse.data_ptr(), *more
        _attend(known.calls.queue, (*of_keys, *rest), q, v, self.bands)
        return out, lse, max_logits

    def forward_stage(self, inputs: ForwardInputs, output: ForwardOutput, options: AttnOptions) -> bool:
        """Writes attention to ``output``, or merges it into that; False if kernels cannot use the tensors in place.

        Args:
            inputs: q, k and v; the log-sum-exp of sinks of every row, fp32, or None.
            output: out, lse and largest logits, the last two fp32, and whether they hold a result over other keys.
            options: of the call.
        """
        (q, k, v, sink), (out, lse, accumulate, max_logits), stream = inputs, output, current_stream(inputs.q.device)
        assert k.shape[0] == self.num_keys
        key = (
            stream, accumulate, max_logits is not None, None if sink is None else sink.stride(), out.dtype,
            out.shape[2], q.stride(), k.stride(), v.stride(), out.stride(), lse.stride(),
        )  # fmt: skip
        known = self._direct(key, (q, k, v, out))
        if known is None:
            if not can_store(q, v, out) or not all(map(fits_tensor_map, (q, k, v))):
                return False
            known = self._known(
                key, LaunchProgram._make_forward, (q, k, v, k, v, out, lse, sink), options, accumulate,
                max_logits is not None, stream,
            )  # fmt: skip
            assert known is not None, "no keys are fetched"
        more = (t.data_ptr() for t in (sink, max_logits) if t is not None)
        known.calls.queue(q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), lse.data_ptr(), *more)
        return True

    def backward(
        self,
        dout: Tensor,
        qkv: tuple[Tensor, Tensor, Tensor],
        out: Tensor,
        lse: Tensor,
        options: AttnOptions,
        partial: torch.dtype,
        wants_delta: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None] | None:
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
        known = self._direct(key, (q, k, v, dout, out))
        if known is None:
            q, k, v, dout, out = map(loadable, (q, k, v, dout, out))
            rows_k, rows_v = self._rows(k), self._rows(v)
        dq, dk, dv = _new_like(q), _new_like(k, dtype=partial), _new_like(v, dtype=partial)
        if known is None:
            known = self._known(
                self._backward_key(stream, (q, k, v, dout, out, lse), wants_delta), LaunchProgram._make_backward,
                (q, k, v, rows_k, rows_v, dout, out, lse, None, dq, dk, dv), options, None, back.Part(), wants_delta,
                stream,
            )  # fmt: skip
        if known is None:
            return None
        scratch = q.new_empty(known.num_scratch, dtype=torch.uint8)
        memory, of_keys = scratch.data_ptr(), (dk.data_ptr(), dv.data_ptr())
        if self.remote is not None:
            of_keys = rows_k.data_ptr(), rows_v.data_ptr(), *of_keys
        delta = _new_like(lse) if wants_delta else None
        if known.calls.form.is_empty:
            known.calls.queue(memory, *of_keys)
            dk.zero_()
            dv.zero_()
        else:
            rest = (t.data_ptr() for t in (q, k, v, dout, lse, dq, out, *(() if delta is None else (delta,))))
            _attend_back(known.calls.queue, (memory, *of_keys, memory, *rest), q, v, self.bands)
        if known.later is None and known.calls.form.is_empty:
            known.calls.queue(memory, *of_keys, part=1)
        if known.later is not None:
            assert self.remote is not None
            shapes = ((self.num_recv, *t.shape[1:]) for t in (k, v))
            later = [_view(scratch, at, shape, partial) for at, shape in zip(known.later, shapes, strict=True)]
            self.remote.give_back(later, [dk, dv])
        return dq, dk, dv, delta

    def backward_stage(
        self, inputs: BackwardInputs, grads: Gradients, options: AttnOptions, shared: SharedSums | None
    ) -> bool:
        """Writes gradients to ``grads``, or adds to them; False if kernels cannot read the tensors in place.

        Args:
            inputs: q, k, v and dout in one dtype, and lse and delta, fp32 ``[num_rows, num_heads]``, over all keys.
            grads: of any dtypes and layouts.
            options: of the call.
            shared: sums of dq, to which this pass adds.
        """
        q, k, v, dout, _, delta = inputs
        assert k.shape[0] == self.num_keys
        part, adds = back.Part(), _Adds(*grads[3:])
        if shared is not None:
            part, adds = shared.part, adds._replace(dq=False)
        stream = current_stream(q.device)
        aligned = () if _are_aligned(grads[:3]) else tuple(grad.data_ptr() % _TMA_ALIGNMENT for grad in grads[:3])
        key = (
            stream, adds, part, shared is not None, *aligned, *[grad.dtype for grad in grads[:3]],
            *[t.stride() for t in (*inputs, *grads[:3])],
        )  # fmt: skip
        known = self._direct(key, (q, k, v, dout))
        if known is None:
            if not all(map(fits_tensor_map, (q, k, v, dout))):
                return False
            tensors = (q, k, v, k, v, dout, None, inputs.lse, delta, *grads[:3])
            known = self._known(key, LaunchProgram._make_backward, tensors, options, adds, part, False, stream)
            assert known is not None, "no keys are fetched"
        targets = known.targets
        buffers = grads[:3] if targets is None else targets.buffers(grads)
        memory = scratch = torch.empty(known.num_scratch, dtype=torch.uint8, device=q.device)
        if shared is not None:
            memory = shared.memory = scratch if shared.memory is None else shared.memory
            shared.left -= 1
        of_keys = scratch.data_ptr(), buffers[1].data_ptr(), buffers[2].data_ptr(), memory.data_ptr()
        known.calls.queue(*of_keys, *[t.data_ptr() for t in (q, k, v, dout, inputs.lse, buffers[0], delta)])
        if targets is not None:
            targets.finish(grads, buffers, has_dq=part.is_last)
        return True

    @staticmethod
    def _backward_key(stream: int, tensors: Sequence[Tensor], wants_delta: bool) -> tuple:
        return stream, wants_delta, *[t.stride() for t in tensors]

    def _direct(self, key: tuple, tensors: Sequence[Tensor]) -> _BoundLaunches | None:
        """The known launches of a layout whose tensors all kernels use in place; None if there are none."""
        known = self.bound.get(key)
        if known is None or not known.calls.form.is_direct or not known.holds():
            return None
        return known if _are_aligned(tensors) else None

    def _rows(self, x: Tensor) -> Tensor:
        """The tensor to publish; unchanged if nothing is published."""
        return x if self.remote is None else self.remote.published(x)

    def _known(self, key: tuple, make: Callable, tensors: Sequence[Any], *of_call: Any) -> _BoundLaunches | None:
        """The launches of a layout; made if there are none or they are no longer valid."""
        known = self.bound.get(key)
        if known is None or not known.holds():
            maker = self.makers.get(key)
            if maker is None:
                layouts = tuple(None if t is None else Layout.of(t) for t in tensors)
                maker = functools.partial(_made, make, layouts, of_call, {})
            known = self.make(key, maker)
        return known

    def make(self, key: tuple, maker: Maker) -> _BoundLaunches | None:
        """Makes the launches of a layout and keeps them for calls."""
        made = maker(self)
        if made is not None:
            self.makers.put(key, maker, 0)
            if self.is_prepared or not made.num_bytes:
                self.kept[key] = made
            else:
                made.use = Use(_bound, (self.token, key))
                _bound.put((self.token, key), made, made.num_bytes)
            self.bound[key] = made
        return made

    def _make_forward(
        self, tensors: tuple[Layout, ...], made: dict, options: AttnOptions, accumulate: bool, max_logits: bool,
        stream: int,
    ) -> _BoundLaunches | None:  # fmt: skip
        q, k, v, rows_k, rows_v, out, lse, sink = tensors
        k, v, rows_k, rows_v = self._with_keys(k, v, rows_k, rows_v)
        numbers = _later_numbers(self.num_recv, {"later.k": k, "later.v": v})
        mover, arriving = self._get_step(rows_k, rows_v, stream)
        if self.remote is not None and mover is None:
            return None
        moving, slots = () if arriving is None else (arriving.step,), _REMOTE_FORWARD if self.remote is not None else ()
        numbers |= brought(moving)
        form = LaunchesForm(q.device, stream, self.num_recv > 0, _are_same((k, v), (rows_k, rows_v)), not q.shape[0])
        if form.is_empty:
            return self._walk(made, form, mover, lambda: [moving], slots, numbers)
        # Rows that see none of these keys keep what they have, unless a sink joins them.
        shape = of_mask.pass_shape((q, k, v), self.num_recv, options, merges=accumulate and sink is None)
        read = of_mask.forward_tables(shape, self.bands, q.device, stream, self.numbers[0])

        def steps() -> list[Sequence[Step]]:
            operands = ForwardInputs(q, k, v, sink), ForwardOutput(out, lse, accumulate)
            attention = forward_steps.forward_step(*operands, arriving, read.form, options, stream, max_logits)
            return [(*moving, attention)]

        more = [name for name, there in (("sink", sink is not None), ("max_logits", max_logits)) if there]
        slots = (*slots, "q", "k", "v", "out", "lse", *more)
        form, numbers = form._replace(kernels=read.form), numbers | read.numbers
        return self._walk(made, form, mover, steps, slots, numbers, read)

    def _make_backward(
        self, tensors: tuple[Layout, ...], made: dict, options: AttnOptions, adds: _Adds | None, part: back.Part,
        delta: bool, stream: int,
    ) -> _BoundLaunches | None:  # fmt: skip
        q, k, v, rows_k, rows_v, dout, out, lse, given_delta, dq, dk, dv = tensors
        k, v, rows_k, rows_v, dk, dv = self._with_keys(k, v, rows_k, rows_v, dk, dv)
        numbers = _later_numbers(self.num_recv, {"later.k": k, "later.v": v, "later.dk": dk, "later.dv": dv})
        mover, arriving = self._get_step(rows_k, rows_v, stream)
        if self.remote is not None and mover is None:
            return None
        moving, left, returned = () if arriving is None else (arriving.step,), False, ()
        if self.remote is not None:
            later = tuple(dk.new_empty((self.num_recv, *t.shape[1:])) for t in (dk, dv))
            sums = self.remote.put_step(later, (dk, dv), _OF_LATER, _GRADIENTS)
            left, returned = sums is None, () if sums is None else (sums,)
        numbers |= brought((*moving, *returned))
        slots = ("scratch", *(("k_rows", "v_rows") if self.remote is not None else ()), "dk", "dv")
        is_direct = _are_same((k, v), (rows_k, rows_v))
        form = LaunchesForm(q.device, stream, self.num_recv > 0, is_direct, not q.shape[0], left)
        if form.is_empty:
            return self._walk(made, form, mover, lambda: [moving, returned], slots, numbers)
        shape, grads = of_mask.pass_shape((q, k, v), self.num_recv, options), Gradients(dq, dk, dv, *(adds or ()))

        def targets_of(splits: int) -> tuple[Targets, int | None]:
            targets = Targets.of(grads, shape.problem.dims, q.dtype, splits)
            return targets, targets.room_in_dq(grads)

        read = of_mask.backward_tables(
            shape, self.bands, q.device, stream, self.numbers[1], None if adds is None else targets_of
        )
        kernels = read.form
        if adds is None and dk.dtype != q.dtype:
            kernels = kernels._replace(targets=kernels.targets._replace(store_keys=STORE_FLOAT))
        numbers |= read.numbers
        given_delta = lse.new_empty(lse.shape) if given_delta is None else given_delta
        written = tuple(kernels.targets.layouts(grads))
        layouts = back.BackwardLayouts((q, k, v, dout), out, lse, given_delta, written)
        scratch, numbers["num_scratch"] = back.scratch_numbers(
            layouts, kernels, options, numbers["key_sums"], numbers["num_scratch"], part.is_first
        )
        numbers |= scratch

        def steps() -> list[Sequence[Step]]:
            comes = arriving if self.num_recv else None
            sent = back.Sent(comes, _OF_LATER, moves=bool(moving), returns=bool(returned))
            found = back.backward_steps(layouts, kernels, options, stream, sent=sent, part=part, wants_delta=delta)
            ends = [*returned, *found.rest]
            if found.rest_is_apart and returned and arriving.overlaps:
                ends[0] = returned[0].overlapping()
            elif found.rest_is_apart:  # it would occupy its SMs until the other ranks arrive
                ends = [*found.rest, *returned]
            return [[*moving, *found.before, *found.keys, *ends]]

        slots += "stats", "q", "k", "v", "dout", "lse", "dq", *(("delta",) if out is None else ("out",))
        slots += ("delta",) if delta else ()
        return self._walk(made, form._replace(kernels=kernels), mover, steps, slots, numbers, read)

    @staticmethod
    def _walk(
        made: dict[LaunchesForm, StreamLaunches],
        form: LaunchesForm,
        mover: StepMover | None,
        steps: Callable[[], Sequence[Sequence[Step]]],
        slots: Sequence[str],
        numbers: Mapping[str, int],
        read: of_mask.PassTables | None = None,
    ) -> _BoundLaunches:
        """Launches with these numbers.

        Args:
            made: lists of other masks, by form; valid ones are copied.
            form: of these.
            mover: launches kernels that transfer rows; None if there are none.
            steps: makes the steps if there are none to copy.
            slots: as `LaunchList` takes them.
            numbers: of the mask.
            read: its tables.
        """
        known = made.get(form)
        if known is None or not known.hold():
            known = StreamLaunches(form, mover, steps(), slots)
        made[form] = calls = known.like(mover, numbers)
        return _BoundLaunches(calls, numbers, read)

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


def _made(make: Callable, tensors: tuple, of_call: tuple, made: dict, one: LaunchProgram) -> _BoundLaunches | None:
    """One of `LaunchProgram.makers`; ``made``: the lists that it has made, by form."""
    return make(one, tensors, made, *of_call)


def _are_aligned(tensors: Sequence[Tensor]) -> bool:
    """Whether the addresses of all tensors are aligned for tensor maps."""
    bits = 0
    for t in tensors:
        bits |= t.data_ptr()
    return bits % _TMA_ALIGNMENT == 0


def can_store(q: Tensor, v: Tensor, out: Tensor) -> bool:
    """Whether the forward kernel writes ``out`` itself."""
    dims = kernel_dims((q.shape[2], v.shape[2]), backward=False)
    assert dims is not None
    return out.shape[2] == dims[1] and out.dtype in (q.dtype, torch.float32) and fits_tensor_map(out)


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


def _view(memory: Tensor, at: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A view of byte memory at an offset."""
    return memory[at : at + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)


def backward_pays(dims: tuple[int, int]) -> bool:
    """Whether the backward is one launch too if the forward is; ``dims``: head dims of q and k, and of v."""
    return dims in WHOLE_DIMS
