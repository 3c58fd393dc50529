"""The backward pass on Hopper GPUs: statistics of rows, the kernels that do the work, and what finishes their sums.

What a pass over tensors of one layout does, for one mask, is found out once (`_Pass`); calls fill in addresses.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from functools import partial, reduce
from operator import or_
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron_magi.cuda.driver import fits_tensor_map
from megatron_magi.cuda.launch import MAX_BYTES, MAX_LAUNCHES, Launch, Numbers, prepared
from megatron_magi.cuda.layout import Layout, Like
from megatron_magi.lru import LruCache
from megatron_magi.ops.hopper import backward_parts as hopper_parts
from megatron_magi.ops.hopper import kernels as hopper_kernels
from megatron_magi.ops.hopper import plan as hopper_plan
from megatron_magi.ops.hopper.backward_ends import finish_dq_launch, finish_keys_launch, padded, stats_launch
from megatron_magi.ops.hopper.choices import WHOLE_TILE, RowTiles, backward_choice, most_split, query_tiles
from megatron_magi.ops.hopper.params import BackwardParams, CapturedBackwardParams, GatedBackwardParams
from megatron_magi.ops.hopper.plan import DevicePlan, DeviceSchedule, Tiling
from megatron_magi.ops.hopper.support import (
    LOG2_E,
    check_support,
    current_stream,
    grid_size,
    in_dtype,
    loadable,
    may_overlap,
    problem_of,
    query_box,
    seen_rows,
    sm_count,
    stream_lock,
    work_counter,
)
from megatron_magi.ops.hopper.tiles import UNIT
from megatron_magi.ops.options import AttnOptions

Grads = tuple[Tensor, Tensor, Tensor]
"""Gradients of q, k and v, or what becomes them."""

STORE_HALF, STORE_FLOAT, _ADD_FLOAT, _ADD_HALF = range(4)
SUMS_ALIGNMENT = 32  # floats: a cache line
_passes: LruCache[tuple, _Pass] = LruCache(MAX_BYTES, MAX_LAUNCHES)


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    bands: np.ndarray,
    options: AttnOptions,
    *,
    grads: Grads,
    accumulate: bool,
    accumulate_keys: bool | None = None,
    memo: MutableMapping | None = None,
    parts: Parts | None = None,
) -> None:
    """Writes dq, dk, dv to ``grads``, or adds to them; see `slice_attention_backward`.

    ``accumulate_keys`` says it for dk and dv where it is not the same as for dq. Beside the gradients it takes one
    fp32 dq of device memory, and up to 16 MB of sums of dk and dv, which else lie in dq until it is written. Where dq
    is added to, or not contiguous, and a key head has at least four query heads, it takes an fp32 dk and dv more. Wide
    heads, deterministic results, and many queries that see few keys each, take no fp32 dq; wide heads an fp32 dk
    and dv where SMs would idle.

    ``memo`` remembers how, for calls that differ in nothing but addresses, strides and the dtype of ``dout``. With
    ``parts`` this is one of several passes, of which the last writes dq, whatever ``accumulate`` says.

    Raises:
        ValueError: the device, dtype or head dims are not supported.
    """
    if memo:
        known = memo.get(_layout(current_stream(q.device), q, k, v, dout, lse, grads))
        if known is not None and not reduce(or_, [t.data_ptr() for t in (q, k, v, dout, *grads)]) % 16:
            known.run((q, k, v, dout), lse, delta, grads, parts)
            return
    adds_keys = accumulate if accumulate_keys is None else accumulate_keys
    if parts is not None:
        accumulate = False
    if q.shape[0] == 0 or k.shape[0] == 0:
        assert parts is None, "passes without rows or keys have no part in sums"
        for grad, adds in zip(grads, (accumulate, adds_keys, adds_keys), strict=True):
            if not adds:
                grad.zero_()
        return
    check_support(q, (q.shape[2], v.shape[2]))
    stream = current_stream(q.device)
    given = q, k, v, dout, lse, delta
    inputs = tuple(map(loadable, (q, k, v, in_dtype(dout, q.dtype))))
    lse, delta = in_dtype(lse, torch.float32), in_dtype(delta, torch.float32)
    tensors = *inputs, lse, delta, *grads
    found = _known(tensors, (accumulate, adds_keys), parts is not None, bands, options, stream)
    found.run(inputs, lse, delta, grads, parts)
    is_given = all(a is b for a, b in zip(given, tensors, strict=False))
    if memo is not None and is_given and not any(t.data_ptr() % 16 for t in grads):
        memo[_layout(stream, q, k, v, dout, lse, grads)] = found


def _known(
    tensors: Sequence[Like], adds: tuple[bool, bool], is_part: bool, bands: np.ndarray, options: AttnOptions,
    stream: int,
) -> _Pass:  # fmt: skip
    """The pass over tensors of a layout, made unless it is kept."""
    key = (
        hopper_plan.content_digest(bands), tensors[0].device, stream, options, *adds, is_part,
        *((t.dtype, tuple(t.shape), t.stride()) for t in tensors), *(t.data_ptr() % 16 for t in tensors[-3:]),
    )  # fmt: skip
    found = _passes.get(key)
    if found is None:
        layouts = tuple(map(Layout.of, tensors))
        found = _Pass(layouts, adds, bands, options, stream)
        found.make = partial(_make_pass, layouts, adds, is_part, options, stream)
        _passes.put(key, found, found.num_bytes)
    return found


def _make_pass(
    tensors: Sequence[Layout], adds: tuple[bool, bool], is_part: bool, options: AttnOptions, stream: int,
    bands: np.ndarray, num_keys: int,
) -> _Pass:  # fmt: skip
    """A `_Pass.make`."""
    q, k, v, dout, lse, delta, dq, dk, dv = tensors
    k, v, dk, dv = (t.with_rows(num_keys) for t in (k, v, dk, dv))
    return _known((q, k, v, dout, lse, delta, dq, dk, dv), adds, is_part, bands, options, stream)


def _layout(stream: int, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, lse: Tensor, grads: Grads) -> tuple:
    """What may change from call to call: hooks of saved tensors may give them back with other strides."""
    return stream, dout.dtype, *[t.stride() for t in (q, k, v, dout, lse, *grads)]


class Parts:
    """Backward passes of the same queries, over keys of their own, whose dq is added in one place.

    For passes of which `choices.sums_meet` holds, on one stream, of the same dout, lse and delta. The last one writes
    dq, whose memory, contiguous and in the dtype of q, is theirs until then.
    """

    def __init__(self, count: int) -> None:
        self.left = count
        self.memory: Tensor | None = None  # of the first pass: statistics of rows and sums
        self.addresses = (0, 0, 0)  # of lse, of -delta, and of sums


class _Target(NamedTuple):
    """Where a gradient is written to.

    Attributes:
        columns: of memory of its own, from where it is copied or added to the gradient; 0: the gradient itself.
        dtype: of that memory.
        is_zeroed: it is added to, and begins with zeros.
    """

    columns: int = 0
    dtype: torch.dtype = torch.float32
    is_zeroed: bool = False

    def layout(self, grad: Layout) -> Layout:
        """Of `buffer`."""
        return grad.new_empty((*grad.shape[:2], self.columns), self.dtype) if self.columns else grad

    def buffer(self, grad: Tensor) -> Tensor:
        """What the kernels write to."""
        if self.columns:
            grad = torch.empty((*grad.shape[:2], self.columns), dtype=self.dtype, device=grad.device)
        return grad.zero_() if self.is_zeroed else grad


class _Pass:
    """The kernels of a backward pass over tensors of one layout, on one stream.

    Attributes:
        num_bytes: of device memory that is kept: the tile plans.
        make: makes one for another mask, over so many keys.
    """

    make: Callable[[np.ndarray, int], _Pass]

    def __init__(self, tensors: Sequence[Layout], adds, bands, options, stream: int) -> None:
        q, k, v, dout, lse, delta, *grads = tensors
        inputs = q, k, v, dout
        problem, dtype, scale = problem_of(q, k, v), q.dtype, options.softmax_scale
        choice = backward_choice(hopper_plan.mask_facts(bands), problem, options.deterministic)
        whole, adds_dq, shape, packed = choice
        plan = hopper_plan.device_plan(bands, Tiling(True, k.shape[0], shape, packed), q.device)
        num_sms = max(1, sm_count(q.device) - options.sm_margin)
        splits, group = 1, problem.group // packed
        if not whole and not options.deterministic:
            splits = hopper_plan.group_splits(plan, k.shape[1], group, num_sms)
        dims = problem.dims
        last_row, last_key = seen_rows(bands)
        seen = last_row, last_key, last_key, last_row  # of q, k, v, dout
        dq_store, of_dq = _query_target(grads[0], dims[0], dtype, adds[0])
        store, of_dk, of_dv = _key_targets(grads[1:], dims, dtype, adds[1], splits)
        self._targets, self._adds = (of_dq, of_dk, of_dv), (adds[0], adds[1], adds[1])
        self._is_direct = not any(target.columns or target.is_zeroed for target in self._targets)
        dq, dk, dv = (target.layout(grad) for target, grad in zip(self._targets, grads, strict=True))
        rows = padded(q.shape[0], shape[1])
        self._stream, self._overlaps, self._device = stream, may_overlap(options), q.device
        self._lock = stream_lock(q.device, stream)
        is_split = hopper_kernels.splits_stats(dtype, dims, options.softcap > 0, adds_dq)
        self.num_bytes = plan.num_bytes
        self._finish_dq = self._finish_keys = self._queries = None
        self._key_sums_in_dq, self._whole, num_stats = False, whole, rows * packed
        common = hopper_parts.Common(inputs, dims, num_stats, seen, options, stream)
        # Statistics of rows, and sums: one block of memory, in this order.
        self._num_stats = -(-problem.num_heads * rows * (1 + is_split) // SUMS_ALIGNMENT) * SUMS_ALIGNMENT
        self._num_sums = problem.num_heads * rows * dims[0] if adds_dq else 0
        self._num_key_sums = self._num_zeroed = numbers = 0
        if whole:
            room = _room_bytes(dq) if dq_store in (STORE_HALF, STORE_FLOAT) and not adds[0] else None
            most = most_split(choice, problem, room)
            schedule = hopper_plan.schedule_of(plan, k.shape[1], group, num_sms, most, problem.is_narrow)
            numbers = plan.fields(schedule=schedule).get("numbers", 0)
            self._keys, self._keys_numbers = keys_launch(common, adds_dq, plan, schedule, store, (dk, dv))
            self._split(schedule.num_split, plan, 2 * shape[0] * k.shape[1] * dims[0], room)
            if schedule.num_split:
                self._finish_keys = finish_keys_launch(dk, dv, dtype, scale, store, numbers=numbers)
                self._tiles, self._finish_keys_blocks = plan.tiles, 4 * schedule.num_split * k.shape[1]
        else:
            self._keys, self._keys_numbers = hopper_parts.keys_launch(common, plan, splits, store, (dk, dv))
        self._stats = stats_launch(
            lse, delta, rows, packed, adds_dq, is_split * scale * LOG2_E, numbers=numbers,
        )  # fmt: skip
        if adds_dq:
            self._finish_dq = finish_dq_launch(dq, num_stats // UNIT, dtype, scale, dq_store)
        else:
            self._queries, self._queries_numbers = self._queries_of(
                common, bands, query_tiles(problem, packed), dq_store, dq
            )
        own_key_sums = 0 if self._key_sums_in_dq else self._num_key_sums
        self._num_floats = 2 * self._num_stats + self._num_sums + own_key_sums

    def _split(self, num_split: int, plan: DevicePlan, tile_sums: int, room: int | None) -> None:
        """Notes where sums of so many tiles lie, of ``tile_sums`` floats each; ``room``: bytes in dq."""
        self._num_key_sums = num_split * tile_sums
        self._num_zeroed = tile_sums if plan.is_static else self._num_key_sums
        self._key_sums_in_dq = room is not None and self._num_key_sums * 4 <= room

    def _queries_of(
        self, common: hopper_parts.Common, bands: np.ndarray, tiles: RowTiles, store: int, dq: Like
    ) -> tuple[Launch, Numbers]:
        """The kernel for dq."""
        q = common.inputs[0]
        plan = hopper_plan.device_plan(bands, Tiling(False, q.shape[0], *tiles), q.device)
        self.num_bytes += plan.num_bytes
        return hopper_parts.queries_launch(common, plan, store, dq)

    def run(
        self, inputs: hopper_parts.Inputs, lse: Tensor, delta: Tensor, grads: Grads, parts: Parts | None = None
    ) -> None:
        """Queues the kernels, for tensors of the layout."""
        addresses = [t.data_ptr() for t in inputs]
        buffers = grads if self._is_direct else tuple(t.buffer(g) for t, g in zip(self._targets, grads, strict=True))
        dq, dk, dv = (buffer.data_ptr() for buffer in buffers)
        is_first, is_last = parts is None or parts.memory is None, parts is None or parts.left == 1
        memory, (stats, minus_delta, sums, key_sums) = self._places(dq, parts)
        stream, overlaps = self._stream, self._overlaps
        with self._lock:
            launch = self._stats
            if is_first or self._num_key_sums:
                with launch.lock:
                    params = launch.params
                    params.lse, params.delta = lse.data_ptr(), delta.data_ptr()
                    params.lse_out, params.delta_out = stats, minus_delta
                    if self._finish_dq is not None:
                        params.sums, params.key_sums = sums, key_sums
                        params.num_sums = self._num_sums // 4 if is_first else 0
                        params.num_key_sums = self._num_zeroed // 4
                    launch.fire(stream, overlaps)
            launch = self._keys
            launch.take(self._keys_numbers, *inputs)
            launch.point_maps(*addresses)
            params = launch.params
            params.lse, params.delta, params.dk, params.dv = stats, minus_delta, dk, dv
            if self._whole:
                params.dq, params.key_sums = sums, key_sums
            launch.fire(stream, overlaps)
            launch = self._finish_keys
            if launch is not None:
                with launch.lock:
                    params = launch.params
                    params.sums, params.tiles, params.dk, params.dv = key_sums, self._tiles, dk, dv
                    launch.fire(stream, overlaps, self._finish_keys_blocks)
            launch = self._finish_dq
            if launch is not None and is_last:
                with launch.lock:
                    launch.params.sums, launch.params.dq = sums, dq
                    launch.fire(stream, overlaps)
            launch = self._queries
            if launch is not None:
                launch.take(self._queries_numbers, *inputs)
                launch.point_maps(*addresses, dq)
                params = launch.params
                params.lse, params.delta, params.dq = stats, minus_delta, dq
                launch.fire(stream, overlaps)
        del memory  # all is queued, so it may be handed out again
        if parts is not None:
            parts.left -= 1
        if not self._is_direct:
            for target, grad, buffer, adds in zip(self._targets, grads, buffers, self._adds, strict=True):
                if target.columns and (is_last or grad is not grads[0]):
                    made = buffer[..., : grad.shape[2]]
                    grad.copy_(grad + made if adds else made)

    def _places(self, dq: int, parts: Parts | None) -> tuple[Tensor, tuple[int, int, int, int]]:
        """Memory for this pass, and addresses of lse, of -delta, of sums, and of those of dk and dv."""
        if parts is None or parts.memory is None:
            memory = torch.empty(self._num_floats, dtype=torch.float32, device=self._device)
            stats = memory.data_ptr()
            places = stats, stats + 4 * self._num_stats, stats + 8 * self._num_stats
            key_sums = places[2] + 4 * self._num_sums
            if parts is not None:
                parts.memory, parts.addresses = memory, places
        else:
            places = parts.addresses
            count = 0 if self._key_sums_in_dq else self._num_key_sums
            memory = torch.empty(count, dtype=torch.float32, device=self._device)
            key_sums = memory.data_ptr()
        return memory, (*places, dq if self._key_sums_in_dq else key_sums)


def _room_bytes(dq: Tensor) -> int | None:
    """Bytes of dq, if other things can lie in its memory."""
    return dq.numel() * dq.element_size() if dq.is_contiguous() and dq.data_ptr() % 16 == 0 else None


def keys_launch(
    common: hopper_parts.Common,
    adds_dq: bool,
    plan: DevicePlan,
    schedule: DeviceSchedule,
    store: int,
    grads: tuple[Tensor, Tensor],
) -> tuple[Launch, Numbers]:
    """Adds to the sums of dq, dk and dv; writes dk and dv of what is not summed. ``adds_dq``: or leaves dq out."""
    inputs, dims, stats_row, seen, options, stream, arriving = common
    (q, k, v, dout), (dk, dv) = inputs, grads
    keys, queries = WHOLE_TILE

    def make() -> Launch:
        softcap, scale = options.softcap, options.softmax_scale
        kind = GatedBackwardParams if arriving else CapturedBackwardParams if plan.is_static else BackwardParams
        params = kind(
            counter=0 if plan.is_static else work_counter(q.device, stream).data_ptr(),
            dk_row=dk.stride(0), dk_head=dk.stride(1), dv_row=dv.stride(0), dv_head=dv.stride(1),
            group=q.shape[1] // plan.packed // k.shape[1], heads_kv=k.shape[1],
            stats_row=stats_row, units=stats_row // UNIT, store=store,
            scale=scale, scale_log2=(softcap or scale) * LOG2_E, softcap_factor=scale / softcap if softcap else 0.0,
            log2_packed=plan.log2_packed,
        )  # fmt: skip
        kernel = hopper_kernels.backward_kernel(
            q.device, q.dtype, dims, softcap > 0, adds_dq, bool(arriving), plan.is_static
        )
        of_keys = ((t, keys) for t in (k, v, *arriving))
        maps = (query_box(q, queries, plan), *of_keys, query_box(dout, queries, plan))
        return Launch(kernel, 1, params, maps)

    num_items = len(schedule.items)
    numbers = Numbers(
        plan, grid_size(q.device, num_items, options.sm_margin), seen,  # the plan keeps its schedules
        tiles=plan.tiles, passes=plan.passes, bounds=plan.bounds, step=plan.host.step,
        items=schedule.items.data_ptr(), num_items=num_items, heads_inner=int(plan.host.heads_inner),
        **plan.fields(schedule=schedule),
    )  # fmt: skip
    key = (
        "backward", bool(arriving), plan.is_static, q.device, stream, q.dtype, options, store, adds_dq, plan.packed,
        q.shape, k.shape[1:], v.shape[1:], *(t.stride() for t in (*inputs, *grads)),
    )  # fmt: skip
    return prepared(key, make), numbers


def _query_target(grad: Tensor, columns: int, dtype: torch.dtype, adds: bool) -> tuple[int, _Target]:
    """How dq is written, and where to; ``columns``: of what the kernels write."""
    if grad.shape[2] != columns and grad.dtype == dtype and not adds:
        return STORE_HALF, _Target(columns, dtype)
    if grad.shape[2] != columns or grad.dtype not in (dtype, torch.float32) or not fits_tensor_map(grad):
        return STORE_FLOAT, _Target(columns)
    if grad.dtype == torch.float32:
        return _ADD_FLOAT if adds else STORE_FLOAT, _Target()
    return _ADD_HALF if adds else STORE_HALF, _Target()


def _key_targets(
    grads: tuple[Tensor, Tensor], dims: tuple[int, int], dtype: torch.dtype, adds: bool, splits: int
) -> tuple[int, _Target, _Target]:
    """How dk and dv are written, and where to; ``dims``: columns of what the kernels write."""
    fits = all(g.shape[2] != dim or fits_tensor_map(g) for g, dim in zip(grads, dims, strict=True))
    if splits == 1 and not adds and fits and grads[0].dtype == grads[1].dtype in (dtype, torch.float32):
        wide = (_Target() if g.shape[2] == d else _Target(d, g.dtype) for g, d in zip(grads, dims, strict=True))
        return STORE_FLOAT if grads[0].dtype == torch.float32 else STORE_HALF, *wide
    return _ADD_FLOAT, *(_sum_target(g, dim, adds) for g, dim in zip(grads, dims, strict=True))


def _sum_target(grad: Tensor, columns: int, adds: bool) -> _Target:
    """Where fp32 sums go: the gradient itself if it can hold them, else a zeroed buffer."""
    if grad.shape[2] == columns and grad.dtype == torch.float32 and fits_tensor_map(grad):
        return _Target(is_zeroed=not adds)
    return _Target(columns, is_zeroed=True)
