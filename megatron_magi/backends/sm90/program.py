"""Passes of attention over one mask, as lists of launches that are prepared once; calls fill in addresses.

A pass is one launch over this rank's own keys and fetched keys, which arrive while the kernel runs; or one of several
stages, each over keys that are there, whose results are merged. A stage is a pass without fetched keys, which may add
to results over other keys.
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
from torch import Tensor

from megatron_magi.backends.base import KeyTransfer, StepMover
from megatron_magi.backends.sm90 import backward_steps as back
from megatron_magi.backends.sm90 import forward_steps
from megatron_magi.backends.sm90 import mask_numbers as of_mask
from megatron_magi.backends.sm90.backward_targets import STORE_FLOAT, Targets
from megatron_magi.backends.sm90.kernels import WHOLE_DIMS, kernel_dims
from megatron_magi.backends.sm90.plan import DevicePlan
from megatron_magi.backends.sm90.support import in_dtype, loadable
from megatron_magi.cuda.arriving import Arriving, StepRows, part_rows
from megatron_magi.cuda.driver import fits_tensor_map
from megatron_magi.cuda.launch_list import LaunchList, Step
from megatron_magi.cuda.layout import Layout
from megatron_magi.cuda.streams import current_stream, stream_lock
from megatron_magi.operands.merge import sink_lse
from megatron_magi.operands.options import AttnOptions
from megatron_magi.operands.passes import BackwardInputs, ForwardInputs, ForwardOutput, Gradients
from megatron_magi.profiling import profiled_backward_calls, profiled_forward_calls
from megatron_magi.runtime.lru import LruCache, Use
from megatron_magi.runtime.upload import together, when_there

MAX_BYTES, MAX_LISTS = 512 << 20, 1024
_bound: LruCache[tuple, BoundLaunches] = LruCache(MAX_BYTES, MAX_LISTS)
"""By program and layout; bounded by the device memory of the tables that they read."""

_ALIGNMENT, _TMA_ALIGNMENT = 256, 16
_REMOTE_FORWARD = "k_rows", "v_rows", "scratch"
_PUBLISHED = ("k_rows", 0), ("v_rows", 0)
_LATER = ("scratch", "later.k"), ("scratch", "later.v")
_GRADIENTS = ("dk", 0), ("dv", 0)


_new_like = functools.partial(torch.empty_like, memory_format=torch.contiguous_format)


class BoundLaunches:
    """The launches of a pass over one mask, for tensors of one layout on one stream.

    Args:
        lists: the launches. On a rank without rows these only take part in the communication, the way back in a second
            list.
        mover: launches the lists, if they transfer rows between ranks.
        stream: raw handle.
        numbers: of the mask and of the memory of a call.
        read: the mask's numbers and tables; None on a rank without rows.
        is_direct: keys and values are published from the tensors that attention reads, without a copy.
        left: the caller has to send the partial gradients of fetched keys and values.

    Attributes:
        lists, is_direct: as given.
        form: what the kernels depend on besides numbers; None on a rank without rows.
        num_scratch: bytes of scratch memory.
        later: offsets in it of the gradients that the caller has to send; else None.
        targets: memory that gradients are written to, if not all are written by the kernels themselves; of a backward.
        tables: the tables that the launches read.
        num_bytes: their device memory.
        use: of its place in the cache; None if no cache holds it.
    """

    def __init__(
        self,
        lists: list[LaunchList],
        mover: StepMover | None,
        stream: int,
        numbers: Mapping[str, int],
        read: of_mask.MaskNumbers | None,
        is_direct: bool,
        left: bool = False,
    ) -> None:
        self.lists, self.is_direct, self.form = lists, is_direct, None if read is None else read.form
        self._mover, self._stream = _state(mover), stream
        self.num_scratch = numbers["num_scratch"]
        self.later = (numbers["later.dk"], numbers["later.dv"]) if left else None
        targets: Targets | None = getattr(self.form, "targets", None)
        self.targets = None if targets is None or targets.are_gradients else targets
        self.tables: Mapping[str, DevicePlan] = {} if read is None else read.plans
        self.num_bytes = sum(plan.num_bytes for plan in self.tables.values())
        self.use: Use | None = None
        self._content = numbers.get("keys.content")

    def expected(self, read: Tensor | None) -> tuple[int, ...]:
        """Address of the content that the forward of a backward read: by default what is loaded; nothing if masks do
        not change.
        """
        if self._content is None:
            assert read is None, "of masks that change"
            return ()
        return (self._content if read is None else read.data_ptr(),)

    def holds(self) -> bool:
        """Whether it is still valid."""
        if self.use is not None:
            self.use.note()
        if self._mover is None:
            return True
        mover = self._mover[0]()
        return mover is not None and mover.version() == self._mover[1]

    def queue(self, *addresses: int, part: int = 0) -> None:
        """Launches one of the lists."""
        if self._mover is None:
            self.lists[part].queue(*addresses)
        else:
            self._mover[0]().queue(self.lists[part], self._stream, *addresses)


_State = tuple[ref[StepMover], tuple] | None


def _state(mover: StepMover | None) -> _State:
    """A mover, by a weak reference as the group owns memory that other ranks have mapped, and its version."""
    return None if mover is None else (ref(mover), mover.version())


@profiled_forward_calls
def _attend(queue: Callable[..., None], addresses: Sequence[int], q: Tensor, v: Tensor, bands) -> None:
    """Queues a forward pass."""
    queue(*addresses)


@profiled_backward_calls
def _attend_back(queue: Callable[..., None], addresses: Sequence[int], q: Tensor, v: Tensor, bands) -> None:
    """Queues a backward pass."""
    queue(*addresses)


_MOST_LAYOUTS = 64

type Maker = Callable[[LaunchProgram], BoundLaunches | None]
"""Makes the launches of a layout for a mask. Must not refer to those of another: they live only as long as the tables
that they read.
"""
type _Made = dict[object, tuple[_State, list[LaunchList]]]
"""Lists that a maker made last, by what steps depend on besides the mask's numbers, to be copied for other masks."""


def new_makers() -> LruCache[tuple, Maker]:
    """For `LaunchProgram.makers`: an LRU cache by layout, as strides and streams may differ in every call."""
    return LruCache(0, _MOST_LAYOUTS)


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
    numbers: of_mask.Prepared | None = None
    bound: WeakValueDictionary[tuple, BoundLaunches] = field(default_factory=WeakValueDictionary)
    kept: dict[tuple, BoundLaunches] = field(default_factory=dict)
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
        key = self._forward_key(q, k, v, sink, return_max_logits)
        known = self._direct(key, (q, k, v))
        rows_k, rows_v = k, v
        if known is None:
            q, k, v = loadable(q), loadable(k), loadable(v)
            rows_k, rows_v = self._rows(k), self._rows(v)
        num_rows, num_heads, _ = q.shape
        out = q.new_empty(num_rows, num_heads, v.shape[2])  # passing the shape as a tuple takes twice the host time
        lse = q.new_empty(num_rows, num_heads, dtype=torch.float32)
        given, max_logits = sink, None
        if sink is not None:
            sink = sink_lse(sink, torch.float32).expand(lse.shape)
        if return_max_logits:
            max_logits = torch.full((num_heads,), -torch.inf, dtype=torch.float32, device=q.device)
        if known is None:
            inputs, output = ForwardInputs(q, k, v, sink), ForwardOutput(out, lse, max_logits=max_logits)
            of_call = inputs, (rows_k, rows_v), output, options, key[0]
            key = self._forward_key(q, k, v, given, return_max_logits)
            known = self._known(key, LaunchProgram._make_forward, *of_call)
        if known is None:
            return None
        of_keys, scratch = (), None
        if self.remote is not None:
            # Tensor maps need a valid address even if no keys are fetched.
            scratch = q.new_empty(known.num_scratch or _ALIGNMENT, dtype=torch.uint8)
            of_keys = rows_k.data_ptr(), rows_v.data_ptr(), scratch.data_ptr()
        if known.form is None:
            known.queue(*of_keys)
            return out, lse, max_logits
        more = [t.data_ptr() for t in (sink, max_logits) if t is not None]
        rest = q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), lse.data_ptr(), *more
        _attend(known.queue, (*of_keys, *rest), q, v, self.bands)
        return out, lse, max_logits

    def prepare_forward(self, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, return_max_logits: bool) -> None:
        """Prepares the launch of `forward` with such tensors, where that of another mask can be copied."""
        if self.remote is not None and not self.remote.forward_pays(k, v):
            return
        key = self._forward_key(q, k, v, sink, return_max_logits)
        maker = self.makers.get(key)
        if maker is not None:
            self.make(key, maker)

    def forward_stage(self, inputs: ForwardInputs, output: ForwardOutput, options: AttnOptions) -> None:
        """Writes attention to ``output``, or merges it into that.

        Args:
            inputs: q, k and v; the log-sum-exp of sinks of every row, fp32, or None.
            output: out, lse and largest logits, the last two fp32, and whether they hold a result over other keys.
            options: of the call.
        """
        q, k, v, sink = inputs
        out, lse, accumulate, max_logits = output
        assert k.shape[0] == self.num_keys
        stream = current_stream(q.device)
        of_call = stream, accumulate, max_logits is not None, None if sink is None else sink.stride(), lse.stride()
        known = self._direct((*of_call, *_forward_layout(q, k, v, out)), (q, k, v, out))
        written = out
        if known is None:
            q, k, v, written = loadable(q), loadable(k), loadable(v), _storable(q, v, output)
            key, inputs = (*of_call, *_forward_layout(q, k, v, written)), ForwardInputs(q, k, v, sink)
            output = output._replace(out=written)
            known = self._known(key, LaunchProgram._make_forward, inputs, (k, v), output, options, stream)
            assert known is not None, "no keys are fetched"
        more = (t.data_ptr() for t in (sink, max_logits) if t is not None)
        known.queue(q.data_ptr(), k.data_ptr(), v.data_ptr(), written.data_ptr(), lse.data_ptr(), *more)
        if written is not out:
            out.copy_(written[..., : out.shape[2]])

    def backward(
        self,
        dout: Tensor,
        qkv: tuple[Tensor, Tensor, Tensor],
        out: Tensor,
        lse: Tensor,
        options: AttnOptions,
        partial: torch.dtype,
        wants_delta: bool,
        read: Tensor | None = None,
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
            read: see `megatron_magi.backends.base.Program`.
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
            key, part = self._backward_key(stream, (q, k, v, dout, out, lse), wants_delta), back.WHOLE
            inputs, grads = BackwardInputs(q, k, v, dout, lse, None), Gradients(dq, dk, dv)
            known = self._known(
                key, LaunchProgram._make_backward, inputs, (rows_k, rows_v), out, grads, options, stream, part,
                wants_delta,
            )  # fmt: skip
        if known is None:
            return None
        scratch = q.new_empty(known.num_scratch, dtype=torch.uint8)
        memory, of_keys = scratch.data_ptr(), (dk.data_ptr(), dv.data_ptr())
        if self.remote is not None:
            of_keys = rows_k.data_ptr(), rows_v.data_ptr(), *of_keys
        delta = _new_like(lse) if wants_delta else None
        if known.form is None:
            known.queue(memory, *of_keys)
            dk.zero_()
            dv.zero_()
        else:
            rest = (t.data_ptr() for t in (q, k, v, dout, lse, dq, out, *(() if delta is None else (delta,))))
            addresses = memory, *of_keys, memory, *rest, *known.expected(read)
            _attend_back(known.queue, addresses, q, v, self.bands)
        if known.later is None and known.form is None:
            known.queue(memory, *of_keys, part=1)
        if known.later is not None:
            assert self.remote is not None
            shapes = ((self.num_recv, *t.shape[1:]) for t in (k, v))
            later = [_view(scratch, at, shape, partial) for at, shape in zip(known.later, shapes, strict=True)]
            self.remote.give_back(later, [dk, dv])
        return dq, dk, dv, delta

    def backward_stage(
        self,
        inputs: BackwardInputs,
        grads: Gradients,
        options: AttnOptions,
        shared: SharedSums | None,
        read: Tensor | None = None,
    ) -> None:
        """Writes gradients to ``grads``, or adds to them.

        Args:
            inputs: q, k, v and dout in one dtype, and lse and delta, fp32 ``[num_rows, num_heads]``, over all keys.
            grads: of any dtypes and layouts.
            options: of the call.
            shared: sums of dq, to which this pass adds.
            read: see `megatron_magi.backends.base.Program`.
        """
        assert inputs.k.shape[0] == self.num_keys
        part = back.WHOLE
        if shared is not None:
            part, grads = shared.part, grads._replace(accumulate_dq=False)
        stream, tensors = current_stream(inputs.q.device), grads[:3]
        aligned = () if _are_aligned(tensors) else tuple(grad.data_ptr() % _TMA_ALIGNMENT for grad in tensors)
        of_call = stream, part, *grads[3:], *aligned, *[grad.dtype for grad in tensors]
        known = self._direct((*of_call, *[t.stride() for t in (*inputs, *tensors)]), inputs[:4])
        if known is None:
            inputs = BackwardInputs(*map(loadable, inputs[:4]), *inputs[4:])
            key = *of_call, *[t.stride() for t in (*inputs, *tensors)]
            known = self._known(
                key, LaunchProgram._make_backward, inputs, inputs[1:3], None, grads, options, stream, part, False
            )
            assert known is not None, "no keys are fetched"
        targets = known.targets
        buffers = tensors if targets is None else targets.buffers(grads)
        memory = scratch = torch.empty(known.num_scratch, dtype=torch.uint8, device=inputs.q.device)
        if shared is not None:
            memory = shared.memory = scratch if shared.memory is None else shared.memory
            shared.left -= 1
        q, k, v, dout, lse, delta = inputs
        of_keys = scratch.data_ptr(), buffers[1].data_ptr(), buffers[2].data_ptr(), memory.data_ptr()
        rest = [t.data_ptr() for t in (q, k, v, dout, lse, buffers[0], delta)]
        known.queue(*of_keys, *rest, *known.expected(read))
        if targets is not None:
            targets.finish(grads, buffers, has_dq=part.is_last)

    @staticmethod
    def _forward_key(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, return_max_logits: bool) -> tuple:
        of_sink = 0 if sink is None else sink.dim()
        return current_stream(q.device), return_max_logits, of_sink, q.stride(), k.stride(), v.stride()

    @staticmethod
    def _backward_key(stream: int, tensors: Sequence[Tensor], wants_delta: bool) -> tuple:
        return stream, wants_delta, *[t.stride() for t in tensors]

    def _direct(self, key: tuple, tensors: Sequence[Tensor]) -> BoundLaunches | None:
        """The known launches of a layout whose tensors all kernels use in place; None if there are none."""
        known = self.bound.get(key)
        if known is None or not known.is_direct or not known.holds():
            return None
        return known if _are_aligned(tensors) else None

    def _rows(self, x: Tensor) -> Tensor:
        """The tensor to publish; unchanged if nothing is published."""
        return x if self.remote is None else self.remote.published(x)

    def _known(self, key: tuple, make: Callable, *of_call: Any) -> BoundLaunches | None:
        """The launches of a layout; made if there are none or they are no longer valid."""
        known = self.bound.get(key)
        if known is None or not known.holds():
            with together(of_call[0].q.device):
                known = self.make(key, self.makers.get(key) or _maker(make, of_call))
        return known

    def make(self, key: tuple, maker: Maker) -> BoundLaunches | None:
        """Makes the launches of a layout, and keeps them for calls once their tables are on the device."""
        made = maker(self)
        if made is not None:
            self.makers.put(key, maker, 0)
            when_there(lambda: self._keep(key, made))
        return made

    def _keep(self, key: tuple, made: BoundLaunches) -> None:
        if self.is_prepared or not made.num_bytes:
            self.kept[key] = made
        else:
            made.use = Use(_bound, (self.token, key))
            _bound.put((self.token, key), made, made.num_bytes)
        self.bound[key] = made

    def _make_forward(
        self,
        made: _Made,
        inputs: ForwardInputs,
        rows: Sequence[Layout],
        output: ForwardOutput,
        options: AttnOptions,
        stream: int,
    ) -> BoundLaunches | None:
        """Launches for tensors of these layouts; ``rows``: keys and values to publish."""
        inputs, rows = self._with_keys(inputs, "k", "v"), [t.with_rows(self.num_keys) for t in rows]
        q, k, v, sink = inputs
        numbers = _later_numbers(self.num_recv, {"later.k": k, "later.v": v})
        mover, arriving = self._get_step(rows, stream)
        if self.remote is not None and mover is None:
            return None
        slots, moving = () if self.remote is None else _REMOTE_FORWARD, [] if arriving is None else [arriving.step]
        for step in moving:
            numbers |= step.brings
        read = None
        if q.shape[0]:
            # Rows that see none of these keys keep what they have, unless a sink joins them.
            merges = output.accumulate and sink is None
            shape = of_mask.pass_shape((q, k, v), self.num_recv, options, merges=merges)
            read = of_mask.numbers_on_device(False, shape, self.bands, q.device, stream, self.numbers)
            numbers |= read.numbers
            more = [name for name, t in (("sink", sink), ("max_logits", output.max_logits)) if t is not None]
            slots = (*slots, "q", "k", "v", "out", "lse", *more)

        def steps() -> list[list[Step]]:
            if read is None:
                return [moving]
            return [forward_steps.forward_steps(inputs, output, read.form, options, stream, arriving)]

        lists = _lists(made, read and read.form, mover, steps, slots, (q.device, stream), numbers)
        return BoundLaunches(lists, mover, stream, numbers, read, _lie_alike((k, v), rows))

    def _make_backward(
        self,
        made: _Made,
        inputs: BackwardInputs,
        rows: Sequence[Layout],
        out: Layout | None,
        grads: Gradients,
        options: AttnOptions,
        stream: int,
        part: back.Part,
        wants_delta: bool,
    ) -> BoundLaunches | None:
        """As `_make_forward`; with ``out`` of a pass over all keys, without it of a stage."""
        inputs, grads = self._with_keys(inputs, "k", "v"), self._with_keys(grads, "dk", "dv")
        rows = [t.with_rows(self.num_keys) for t in rows]
        (q, k, v, _, lse, _), (_, dk, dv, *_) = inputs, grads
        numbers = _later_numbers(self.num_recv, {"later.k": k, "later.v": v, "later.dk": dk, "later.dv": dv})
        mover, arriving = self._get_step(rows, stream)
        slots, returning = ("scratch", "dk", "dv"), None
        if self.remote is not None:
            if mover is None:
                return None
            later = [t.new_empty((self.num_recv, *t.shape[1:])) for t in (dk, dv)]
            returning = self.remote.put_step(StepRows(later, (dk, dv), back.OF_FETCHED, _GRADIENTS))
            slots = "scratch", "k_rows", "v_rows", "dk", "dv"
        left, home = self.remote is not None and returning is None, [] if returning is None else [returning]
        moving = [] if arriving is None else [arriving.step]
        for step in (*moving, *home):
            numbers |= step.brings
        read = form = kernels = None
        if q.shape[0]:
            read = self._backward_tables(q, k, v, None if out is not None else grads, options, stream)
            form = read.form
            if out is not None:
                inputs = inputs._replace(delta=lse.new_empty(lse.shape))
                if dk.dtype != q.dtype:
                    form = form._replace(targets=form.targets._replace(store_keys=STORE_FLOAT))
            kernels = back.BackwardSteps(
                inputs, out, Gradients(*form.targets.layouts(grads)), form, options, stream, arriving, returning,
                part, wants_delta,
            )  # fmt: skip
            numbers |= read.numbers
            numbers |= kernels.scratch(numbers["key_sums"], numbers["num_scratch"])
            slots += "stats", "q", "k", "v", "dout", "lse", "dq", *(("delta",) if out is None else ("out",))
            slots += (*(("delta",) if wants_delta else ()), *(("read",) if form.captured else ()))

        def steps() -> list[list[Step]]:
            return [moving, home] if kernels is None else [kernels.steps()]

        lists = _lists(made, (left, form), mover, steps, slots, (q.device, stream), numbers)
        return BoundLaunches(lists, mover, stream, numbers, read, _lie_alike((k, v), rows), left)

    def _backward_tables(
        self, q: Layout, k: Layout, v: Layout, grads: Gradients | None, options: AttnOptions, stream: int
    ) -> of_mask.MaskNumbers:
        """The mask's tables; ``grads``: of a stage, which may be added to, or have other dtypes and layouts."""
        shape = of_mask.pass_shape((q, k, v), self.num_recv, options)

        def targets_of(splits: int) -> tuple[Targets, int | None]:
            targets = Targets.of(grads, shape.problem.dims, q.dtype, splits)
            return targets, targets.room_in_dq(grads)

        chosen = None if grads is None else targets_of
        return of_mask.numbers_on_device(True, shape, self.bands, q.device, stream, self.numbers, chosen)

    def _with_keys[T: (ForwardInputs, BackwardInputs, Gradients)](self, layouts: T, *names: str) -> T:
        """Layouts of another mask, in which tensors of keys have this mask's number of keys."""
        return layouts._replace(**{name: getattr(layouts, name).with_rows(self.num_keys) for name in names})

    def _get_step(self, rows: Sequence[Layout], stream: int) -> tuple[StepMover | None, Arriving | None]:
        """The mover of keys and the kernel that it launches; None and None if no keys are fetched in this way."""
        if self.remote is None:
            return None, None
        form = stream, [(t.shape, t.stride(), t.dtype, t.data_ptr()) for t in rows]
        of_form, mover, version, arriving = self.last_get or (None, lambda: None, None, None)
        mover = mover()
        if of_form != form or mover is None or mover.version() != version:
            into = [t.new_empty((self.num_recv, *t.shape[1:])) for t in rows]
            found = self.remote.get_step(StepRows(rows, into, _PUBLISHED, _LATER))
            if found is None:
                return None, None
            mover, arriving = found
            self.last_get[:] = form, ref(mover), mover.version(), arriving
        return mover, arriving


def _maker(make: Callable[..., BoundLaunches | None], of_call: Sequence[object]) -> Maker:
    """One of `LaunchProgram.makers`, for calls with tensors that lie as these."""
    made, layouts = {}, [_layouts(x) for x in of_call]
    return lambda program: make(program, made, *layouts)


def _layouts(x: Any) -> Any:
    """The same with layouts in the place of tensors."""
    if isinstance(x, Tensor):
        return Layout.of(x)
    if not isinstance(x, tuple):
        return x
    items = map(_layouts, x)
    return type(x)(*items) if hasattr(x, "_fields") else tuple(items)


def _lists(
    made: _Made,
    form: object,
    mover: StepMover | None,
    steps: Callable[[], Sequence[Sequence[Step]]],
    slots: Sequence[str],
    where: tuple[torch.device, int],
    numbers: Mapping[str, int],
) -> list[LaunchList]:
    """Lists of launches with these numbers.

    Args:
        made: of other masks, which are copied if they are valid.
        form: what steps depend on besides the numbers.
        mover: launches those that transfer rows.
        steps: makes those of each list.
        slots: as `LaunchList` takes them.
        where: device and stream.
        numbers: of the mask.
    """
    (of_state, known), state = made.get(form, (None, None)), _state(mover)
    if known is None or of_state != state:
        known = [LaunchList(of_list, slots, where[1], stream_lock(*where)) for of_list in steps()]
    copies = [calls.with_numbers(numbers) for calls in known]
    made[form] = state, copies
    return copies


def _are_aligned(tensors: Sequence[Tensor]) -> bool:
    """Whether the addresses of all tensors are aligned for tensor maps."""
    bits = 0
    for t in tensors:
        bits |= t.data_ptr()
    return bits % _TMA_ALIGNMENT == 0


def _forward_layout(q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> tuple:
    return out.dtype, out.shape[2], q.stride(), k.stride(), v.stride(), out.stride()


def _storable(q: Tensor, v: Tensor, output: ForwardOutput) -> Tensor:
    """What the forward kernel writes: the output, or a buffer, which may be wider, that is copied to it."""
    out, dims = output.out, kernel_dims((q.shape[2], v.shape[2]), backward=False)
    assert dims is not None
    if out.shape[2] == dims[1]:
        if out.dtype in (q.dtype, torch.float32) and fits_tensor_map(out):
            return out
        return out.to(torch.float32, memory_format=torch.contiguous_format, copy=True)
    wide = out.new_empty((*out.shape[:2], dims[1]), dtype=q.dtype if out.dtype == q.dtype else torch.float32)
    if output.accumulate:
        wide[..., : out.shape[2]] = out
    return wide


def _lie_alike(tensors: Sequence[Layout], others: Sequence[Layout]) -> bool:
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
