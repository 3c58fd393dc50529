"""The backward pass on Hopper GPUs, from tensors to kernel launches.

The kernels are, in launch order:

1. ``preprocess``: lse and delta in the layout of the next kernels, and zeros in memory that they add to.
2. ``backward``: dk and dv, and sums of dq in device memory if that is faster. For wide heads ``backward_keys``: dk, dv.
3. ``postprocess_keys``: dk and dv of tiles whose query heads were split, from their sums.
4. ``postprocess_dq``: dq from its sums; or ``backward_queries``, which computes dq without sums.

The launches of a pass over tensors of one layout, for one mask, are prepared once (`_Pass`); calls fill in addresses.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron_magi.backends.sm90 import plan as hopper_plan
from megatron_magi.backends.sm90.backward_ends import RowMemory, finish_dq_launch, finish_keys_launch, stats_launch
from megatron_magi.backends.sm90.backward_kernels import (
    Common,
    keys_launch,
    keys_numbers,
    queries_launch,
    queries_numbers,
    whole_launch,
    whole_numbers,
)
from megatron_magi.backends.sm90.backward_targets import Targets
from megatron_magi.backends.sm90.choices import BackwardChoice, Problem, backward_choice, most_split, query_tiles
from megatron_magi.backends.sm90.plan import DevicePlan, DeviceSchedule, Tiling
from megatron_magi.backends.sm90.support import (
    LOG2_E,
    check_support,
    in_dtype,
    loadable,
    may_overlap,
    problem_of,
    seen_rows,
    sm_count,
)
from megatron_magi.backends.tiles.tiles import UNIT
from megatron_magi.cuda.launch import MAX_BYTES, MAX_LAUNCHES
from megatron_magi.cuda.layout import Layout
from megatron_magi.cuda.streams import current_stream, stream_lock
from megatron_magi.operands.options import AttnOptions
from megatron_magi.operands.passes import BackwardInputs, Gradients
from megatron_magi.runtime.lru import LruCache

_passes: LruCache[tuple, _Pass] = LruCache(MAX_BYTES, MAX_LAUNCHES)


def backward(
    inputs: BackwardInputs,
    bands: np.ndarray,
    options: AttnOptions,
    grads: Gradients,
    *,
    memo: MutableMapping | None = None,
    shared: SharedSums | None = None,
) -> None:
    """Writes dq, dk, dv to ``grads``, or adds to them; see `slice_attention_backward`.

    Memory besides the gradients: an fp32 dq, and up to 16 MB for sums of dk and dv, which otherwise use the memory of
    dq until it is written. If dq is added to, or not contiguous, and a key head has at least four query heads, also an
    fp32 dk and dv. Wide heads, deterministic mode, and many queries that see few keys each need no fp32 dq; wide heads
    need an fp32 dk and dv if SMs would otherwise idle.

    ``memo`` caches the pass for calls that differ only in addresses, strides and the dtype of ``dout``. With
    ``shared`` this is one of several passes, of which the last writes dq, whatever ``grads`` says.

    Raises:
        ValueError: the device, dtype or head dims are not supported.
    """
    q, k, v, dout, lse, delta = inputs
    if memo:  # most calls: tensors of the layout of an earlier call
        known = memo.get(_layout(current_stream(q.device), inputs, grads))
        if known is not None and known.run(inputs, grads, shared):
            return
    if shared is not None:
        grads = grads._replace(accumulate_dq=False)
    if q.shape[0] == 0 or k.shape[0] == 0:
        assert shared is None, "passes without rows or keys have no part in sums"
        for grad, adds in grads.tensors():
            if not adds:
                grad.zero_()
        return
    check_support(q, (q.shape[2], v.shape[2]))
    mapped = map(loadable, (q, k, v, in_dtype(dout, q.dtype)))
    loaded = BackwardInputs(*mapped, in_dtype(lse, torch.float32), in_dtype(delta, torch.float32))
    signature = _Signature(loaded, grads, options, current_stream(q.device), shared is not None)
    known = _pass_of(signature, bands)
    fired = known.run(loaded, grads, shared)
    assert fired
    is_given = all(a is b for a, b in zip(inputs, loaded, strict=True))
    if memo is not None and is_given and not any(grad.data_ptr() % 16 for grad in grads[:3]):
        memo[_layout(signature.stream, inputs, grads)] = known


def _layout(stream: int, inputs: BackwardInputs, grads: Gradients) -> tuple:
    """What may differ between calls: hooks of saved tensors may return them with other strides."""
    (q, k, v, dout, lse, _), (dq, dk, dv, *_) = inputs, grads
    return stream, dout.dtype, *[t.stride() for t in (q, k, v, dout, lse, dq, dk, dv)]


class SharedSums:
    """Backward passes of the same queries, each over keys of its own, that accumulate dq in the same sums.

    For passes for which `choices.sums_meet` holds, on one stream, of the same dout, lse and delta. The last one writes
    dq; they may use its memory, contiguous and in the dtype of q, until then.

    Attributes:
        left: passes that remain.
        memory: of the first pass: row statistics and sums.
        addresses: of lse, of -delta, and of sums.
    """

    def __init__(self, count: int) -> None:
        self.left = count
        self.memory: Tensor | None = None
        self.addresses = (0, 0, 0)


class _Signature(NamedTuple):
    """What a pass depends on, apart from its mask.

    Attributes:
        inputs, grads: tensors of the layout of the calls, or the layouts.
        options: of the calls.
        stream: raw handle.
        is_shared: dq is accumulated in `SharedSums`.
    """

    inputs: BackwardInputs
    grads: Gradients
    options: AttnOptions
    stream: int
    is_shared: bool

    def key(self, bands: np.ndarray) -> tuple:
        """Cache key of its pass over a mask: all that this depends on except addresses."""
        inputs, (dq, dk, dv, *adds), options, stream, is_shared = self
        return (
            hopper_plan.content_digest(bands), dq.device, stream, options, *adds, is_shared,
            *[(t.dtype, t.shape, t.stride()) for t in (*inputs, dq, dk, dv)],
            dq.data_ptr() % 16, dk.data_ptr() % 16, dv.data_ptr() % 16,
        )  # fmt: skip

    def without_memory(self) -> _Signature:
        """The same with layouts instead of tensors."""
        inputs, (dq, dk, dv, *adds), options, stream, is_shared = self
        grads = Gradients(*map(Layout.of, (dq, dk, dv)), *adds)
        return _Signature(BackwardInputs(*map(Layout.of, inputs)), grads, options, stream, is_shared)

    def make(self, bands: np.ndarray, num_keys: int) -> _Pass:
        """The pass over another mask with ``num_keys`` keys; for a signature without memory."""
        k, v, dk, dv = (t.with_rows(num_keys) for t in (*self.inputs[1:3], *self.grads[1:3]))
        inputs, grads = self.inputs._replace(k=k, v=v), self.grads._replace(dk=dk, dv=dv)
        return _pass_of(self._replace(inputs=inputs, grads=grads), bands)


def _pass_of(signature: _Signature, bands: np.ndarray) -> _Pass:
    """The pass of a signature over a mask, from the cache or made."""
    key = signature.key(bands)
    known = _passes.get(key)
    if known is None:
        known = _Pass(signature.without_memory(), bands)
        _passes.put(key, known, known.num_bytes)
    return known


@dataclass(frozen=True)
class _Scratch:
    """Scratch memory of a pass, in fp32 numbers: row statistics and sums, in this order.

    Attributes:
        num_stats: of lse, and as many of -delta.
        num_sums: of dq.
        num_key_sums: of dk and dv, of tiles that are split by query head.
        key_sums_in_dq: these are in the memory of dq until it is written.
        num_zeroed: how many of them to zero: all; for a static mask those of one tile, as the kernel knows the number
            of tiles.
    """

    num_stats: int
    num_sums: int
    num_key_sums: int
    key_sums_in_dq: bool
    num_zeroed: int

    @property
    def offsets(self) -> tuple[int, int, int]:
        """Byte offsets of -delta, of the sums of dq, and of those of dk and dv unless these are in dq."""
        return 4 * self.num_stats, 8 * self.num_stats, 8 * self.num_stats + 4 * self.num_sums

    @property
    def own_key_sums(self) -> int:
        """Sums of dk and dv that are not in the memory of dq."""
        return 0 if self.key_sums_in_dq else self.num_key_sums

    @property
    def num_floats(self) -> int:
        """Total size."""
        return 2 * self.num_stats + self.num_sums + self.own_key_sums


@dataclass(frozen=True)
class _Design:
    """Decisions about a pass, before its launches are prepared.

    Attributes:
        problem: its shape.
        choice: of kernels.
        plan: tiles of keys.
        splits: splits of a group of query heads, if dk and dv have a kernel of their own.
        schedule: work items, if one kernel computes dk, dv and possibly dq; else None.
        targets: memory that gradients are written to.
        of_rows: sizes of row statistics and of sums of dq.
        scratch: memory for these, and for sums of dk and dv.
    """

    problem: Problem
    choice: BackwardChoice
    plan: DevicePlan
    splits: int
    schedule: DeviceSchedule | None
    targets: Targets
    of_rows: RowMemory
    scratch: _Scratch

    @classmethod
    def of(cls, signature: _Signature, bands: np.ndarray) -> _Design:
        """For a mask."""
        (q, k, v, *_), grads, options = signature[:3]
        problem = problem_of(q, k, v)
        choice = backward_choice(hopper_plan.mask_facts(bands), problem, options.deterministic)
        plan = hopper_plan.device_plan(bands, Tiling(True, problem.num_keys, choice.shape, choice.packed), q.device)
        num_sms = max(1, sm_count(q.device) - options.sm_margin)
        of_heads = problem.num_heads_kv, problem.group // choice.packed, num_sms
        splits, schedule, room = 1, None, None
        if not choice.whole and not options.deterministic:
            splits = hopper_plan.group_splits(plan, *of_heads)
        targets = Targets.of(grads, problem.dims, q.dtype, splits)
        if choice.whole:
            room = targets.room_in_dq(grads)
            most = most_split(choice, problem, room)
            schedule = hopper_plan.schedule_of(plan, *of_heads, most, problem.is_narrow)
        of_rows = RowMemory.of(problem.num_rows, problem.num_heads, problem.dims, q.dtype, options.softcap, choice)
        tile_sums = 2 * choice.shape[0] * problem.num_heads_kv * problem.dims[0]
        key_sums = 0 if schedule is None else schedule.num_split * tile_sums
        scratch = _Scratch(
            num_stats=of_rows.stats,
            num_sums=of_rows.sums,
            num_key_sums=key_sums,
            key_sums_in_dq=room is not None and 4 * key_sums <= room,
            num_zeroed=tile_sums if plan.is_static else key_sums,
        )
        return cls(problem, choice, plan, splits, schedule, targets, of_rows, scratch)


class _Pass:
    """The kernels of a backward pass over tensors of one layout, on one stream.

    Attributes:
        num_bytes: device memory that is kept alive: the tile plans.
        make: makes a pass for another mask and number of keys.
    """

    def __init__(self, signature: _Signature, bands: np.ndarray) -> None:
        (q, k, v, dout, lse, delta), grads, options, stream, _ = signature
        self.make = signature.make
        self._device, self._stream, self._lock = q.device, stream, stream_lock(q.device, stream)
        self._overlaps = may_overlap(options)
        design = _Design.of(signature, bands)
        choice, plan, schedule, targets = design.choice, design.plan, design.schedule, design.targets
        self._targets, self._is_direct, self._is_whole = targets, targets.are_gradients, choice.whole
        self._scratch, self._offsets = design.scratch, design.scratch.offsets
        self._num_vectors, self._num_key_vectors = design.scratch.num_sums // 4, design.scratch.num_zeroed // 4
        dq, *of_keys = targets.layouts(grads)
        scale, rows, stats_row = options.softmax_scale, design.of_rows.rows, design.of_rows.rows * choice.packed
        seen = seen_rows(bands)
        common = Common((q, k, v, dout), design.problem.dims, stats_row, options, stream)
        mask_numbers = 0 if schedule is None else plan.fields(schedule=schedule).get("numbers", 0)
        split = design.of_rows.splits_stats * scale * LOG2_E
        self._prepare = stats_launch(lse, delta, rows, choice.packed, choice.adds_dq, split, numbers=mask_numbers)
        self._finish_keys = self._finish_dq = self._queries = None
        if schedule is None:
            self._keys = keys_launch(common, plan, targets.store_keys, of_keys)
            self._keys_numbers = keys_numbers(common, plan, design.splits, seen)
        else:
            self._keys = whole_launch(common, choice.adds_dq, plan, targets.store_keys, of_keys)
            self._keys_numbers = whole_numbers(common, plan, schedule, seen)
            if schedule.num_split:
                self._finish_keys = finish_keys_launch(
                    *of_keys, q.dtype, scale, targets.store_keys, numbers=mask_numbers
                )
                self._tiles, self._finish_keys_blocks = plan.tiles, 4 * schedule.num_split * k.shape[1]
        self.num_bytes = plan.num_bytes
        if choice.adds_dq:
            self._finish_dq = finish_dq_launch(dq, stats_row // UNIT, q.dtype, scale, targets.store_dq)
        else:
            tiling = Tiling(False, q.shape[0], *query_tiles(design.problem, choice.packed))
            plan = hopper_plan.device_plan(bands, tiling, q.device)
            self.num_bytes += plan.num_bytes
            self._queries = queries_launch(common, plan, targets.store_dq, dq)
            self._queries_numbers = queries_numbers(common, plan, seen)

    def run(self, inputs: BackwardInputs, grads: Gradients, shared: SharedSums | None = None) -> bool:
        """Launches the kernels for tensors of the layout; False if an address is not aligned for a tensor map."""
        q, k, v, dout, lse, delta = inputs
        of_q, of_k, of_v, of_dout = addresses = q.data_ptr(), k.data_ptr(), v.data_ptr(), dout.data_ptr()
        buffers = grads[:3] if self._is_direct else self._targets.buffers(grads)
        dq, dk, dv = [buffer.data_ptr() for buffer in buffers]
        if (of_q | of_k | of_v | of_dout | dq | dk | dv) % 16:
            return False
        is_first, is_last = shared is None or shared.memory is None, shared is None or shared.left == 1
        memory, (stats, minus_delta, sums, key_sums) = self._memory(dq, shared)
        stream, overlaps = self._stream, self._overlaps
        with self._lock:
            # 1. Row statistics, zeros.
            launch = self._prepare
            if is_first or self._scratch.num_key_sums:
                with launch.lock:
                    params = launch.params
                    params.lse, params.delta = lse.data_ptr(), delta.data_ptr()
                    params.lse_out, params.delta_out = stats, minus_delta
                    if self._finish_dq is not None:
                        params.sums, params.key_sums = sums, key_sums
                        params.num_sums = self._num_vectors if is_first else 0
                        params.num_key_sums = self._num_key_vectors
                    launch.fire(stream, overlaps)
            # 2. dk and dv, sums of dq.
            launch = self._keys
            launch.take(self._keys_numbers, q, k, v, dout)
            launch.point_maps(*addresses)
            params = launch.params
            params.lse, params.delta, params.dk, params.dv = stats, minus_delta, dk, dv
            if self._is_whole:
                params.dq, params.key_sums = sums, key_sums
            launch.fire(stream, overlaps)
            # 3. dk and dv from their sums.
            launch = self._finish_keys
            if launch is not None:
                with launch.lock:
                    params = launch.params
                    params.sums, params.tiles, params.dk, params.dv = key_sums, self._tiles, dk, dv
                    launch.fire(stream, overlaps, self._finish_keys_blocks)
            # 4. dq, from its sums or by a kernel of its own.
            launch = self._finish_dq
            if launch is not None and is_last:
                with launch.lock:
                    launch.params.sums, launch.params.dq = sums, dq
                    launch.fire(stream, overlaps)
            launch = self._queries
            if launch is not None:
                launch.take(self._queries_numbers, q, k, v, dout)
                launch.point_maps(*addresses, dq)
                params = launch.params
                params.lse, params.delta, params.dq = stats, minus_delta, dq
                launch.fire(stream, overlaps)
        del memory  # all is queued, so the allocator may reuse it
        if shared is not None:
            shared.left -= 1
        if not self._is_direct:
            self._targets.finish(grads, buffers, has_dq=is_last)
        return True

    def _memory(self, dq: int, shared: SharedSums | None) -> tuple[Tensor, tuple[int, int, int, int]]:
        """Scratch memory of a call, and addresses of lse, of -delta, of sums, and of those of dk and dv."""
        if shared is None or shared.memory is None:
            memory = torch.empty(self._scratch.num_floats, dtype=torch.float32, device=self._device)
            begin, (at_delta, at_sums, at_key_sums) = memory.data_ptr(), self._offsets
            places, key_sums = (begin, begin + at_delta, begin + at_sums), begin + at_key_sums
            if shared is not None:
                shared.memory, shared.addresses = memory, places
        else:
            memory = torch.empty(self._scratch.own_key_sums, dtype=torch.float32, device=self._device)
            places, key_sums = shared.addresses, memory.data_ptr()
        return memory, (*places, dq if self._scratch.key_sums_in_dq else key_sums)
