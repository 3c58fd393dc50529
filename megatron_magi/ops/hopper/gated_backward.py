"""The backward over own keys and over keys that arrive while it runs, at once: what `backward` is to stages.

For head dims whose backward can be one kernel (`kernels.WHOLE_DIMS`). Keys are numbered as in `gated`.
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence

import numpy as np
import torch
from torch import Tensor

from megatron_magi.cuda.arriving import Arriving
from megatron_magi.cuda.launch import MAX_BYTES, MAX_LAUNCHES
from megatron_magi.lru import LruCache
from megatron_magi.ops.hopper import backward_parts as hopper_parts
from megatron_magi.ops.hopper import kernels as hopper_kernels
from megatron_magi.ops.hopper import plan as hopper_plan
from megatron_magi.ops.hopper.backward import STORE_FLOAT, STORE_HALF, SUMS_ALIGNMENT, keys_launch
from megatron_magi.ops.hopper.backward_ends import finish_dq_launch, finish_keys_launch, padded, stats_launch
from megatron_magi.ops.hopper.choices import Problem, backward_choice, most_split_at_once, query_tiles
from megatron_magi.ops.hopper.gated import GateOf, first_arriving, key_tiling, row_tiling, seen_rows_and_keys
from megatron_magi.ops.hopper.support import LOG2_E, current_stream, may_overlap, sm_count, stream_lock
from megatron_magi.ops.hopper.tiles import UNIT
from megatron_magi.ops.options import AttnOptions

_passes: LruCache[tuple, _Pass] = LruCache(MAX_BYTES, MAX_LAUNCHES)


def backward(
    inputs: hopper_parts.Inputs,
    lse: Tensor,
    delta: Tensor,
    arriving: Arriving,
    bands: np.ndarray,
    options: AttnOptions,
    *,
    grads: tuple[Tensor, Tensor, Tensor],
    arriving_grads: tuple[Tensor, Tensor],
    memo: MutableMapping,
) -> None:
    """Queues what brings the arriving keys, and the kernels that write all gradients.

    Args:
        inputs: q, k, v, dout in one dtype, as TMA can read them.
        lse, delta: fp32 ``[num_rows, num_heads]``.
        arriving: keys and values, at least one row.
        bands: the mask, over keys numbered as in `gated`.
        options: of the call.
        grads: dq in the dtype of q; dk and dv of own keys in it or in fp32; contiguous.
        arriving_grads: dk and dv of the others, likewise.
        memo: remembers how, for calls that differ in nothing but addresses and strides.
    """
    stream = current_stream(inputs[0].device)
    layout = stream, lse.stride(), delta.stride(), *(t.stride() for t in inputs)
    known = memo.get(layout)
    if known is None:
        q, k, v, _ = inputs
        key = (
            hopper_plan.content_digest(bands), q.device, q.dtype, options, q.shape, k.shape, v.shape,
            len(arriving.tensors[0]), grads[1].dtype, arriving_grads[0].dtype, *layout,
        )  # fmt: skip
        known = _passes.get(key)
        if known is None:
            known = _Pass(inputs, lse, delta, arriving.tensors, bands, options, grads, arriving_grads, stream)
            _passes.put(key, known, known.num_bytes)
        memo[layout] = known
    known.run(inputs, lse, delta, arriving, grads, arriving_grads)


class _Pass:
    """The kernels over tensors of one layout, for one mask, on one stream.

    Attributes:
        num_bytes: of device memory that is kept: the tile plans.
    """

    def __init__(self, inputs, lse, delta, keys: Sequence[Tensor], bands, options, grads, later, stream: int) -> None:
        q, k, v, _ = inputs
        (dq, dk, dv), (num_rows, num_heads, dim), device = grads, q.shape, q.device
        num_arriving, num_sms = len(keys[0]), max(1, sm_count(device) - options.sm_margin)
        problem = Problem(num_rows, len(k) + num_arriving, num_heads, k.shape[1], (dim, v.shape[2]))
        choice = backward_choice(hopper_plan.mask_facts(bands), problem, options.deterministic)
        assert choice.whole
        group = problem.group // choice.packed
        plan = hopper_plan.device_plan(bands, key_tiling(problem, choice, num_arriving, num_sms), device)
        self._gate = GateOf(num_arriving, first_arriving(len(k)))
        self._stream, self._lock, self._overlaps = stream, stream_lock(device, stream), may_overlap(options)
        self._device, self.num_bytes = device, plan.num_bytes
        rows = padded(num_rows, choice.shape[1])
        scale = options.softmax_scale * LOG2_E
        is_split = hopper_kernels.splits_stats(q.dtype, problem.dims, options.softcap > 0, choice.adds_dq)
        self._stats = stats_launch(lse, delta, rows, choice.packed, choice.adds_dq, scale if is_split else 0.0)
        num_stats = rows * choice.packed
        self._num_stats = -(-num_heads * rows * (1 + is_split) // SUMS_ALIGNMENT) * SUMS_ALIGNMENT
        self._num_sums = num_heads * rows * dim if choice.adds_dq else 0
        # Sums of dk and dv lie in dq until it is written, if there is room.
        room = dq.numel() * dq.element_size()
        schedule = hopper_plan.schedule_of(plan, k.shape[1], group, num_sms, most_split_at_once(choice, problem, room))
        self._num_key_sums = 2 * schedule.num_split * choice.shape[0] * k.shape[1] * dim
        self._in_dq = self._num_key_sums * 4 <= room
        self._store = STORE_HALF if later[0].dtype == q.dtype else STORE_FLOAT
        store = STORE_HALF if dk.dtype == q.dtype else STORE_FLOAT
        of_inputs = seen_rows_and_keys(bands, first_arriving(len(k)))
        dims, seen = problem.dims, (*of_inputs, of_inputs[0])
        self._keys, self._keys_numbers = keys_launch(
            inputs, dims, num_stats, options, choice.adds_dq, plan, schedule, seen, store, (dk, dv), stream, keys
        )
        self._finish_keys = self._finish_dq = self._queries = None
        if schedule.num_split:
            self._finish_keys = finish_keys_launch(dk, dv, q.dtype, options.softmax_scale, store, gated=True)
            self._tiles, self._finish_keys_blocks = plan.tiles, 4 * schedule.num_split * k.shape[1]
        if choice.adds_dq:
            self._finish_dq = finish_dq_launch(dq, num_stats // UNIT, q.dtype, options.softmax_scale, STORE_HALF)
        else:
            tiles = query_tiles(problem, choice.packed)
            rows_plan = hopper_plan.device_plan(
                bands, row_tiling(problem, tiles, num_arriving, num_sms, products=3.0), device
            )
            self._queries, self._queries_numbers = hopper_parts.queries_launch(
                inputs, dims, num_stats, options, rows_plan, seen, STORE_HALF, dq, stream, keys
            )
            self.num_bytes += rows_plan.num_bytes
        self._num_floats = 2 * self._num_stats + self._num_sums + (0 if self._in_dq else self._num_key_sums)

    def run(self, inputs, lse, delta, arriving: Arriving, grads, later) -> None:
        """Queues the kernels, for tensors of the layout."""
        q, k, v, dout = inputs
        keys, stream, gate = (q, k, v, *arriving.tensors), self._stream, self._gate.of(arriving)
        addresses = [t.data_ptr() for t in (*keys, dout)]
        dq, dk, dv = (t.data_ptr() for t in grads)
        dk_later, dv_later = (t.data_ptr() for t in later)
        memory = torch.empty(self._num_floats, dtype=torch.float32, device=self._device)
        stats = memory.data_ptr()
        minus_delta, sums = stats + 4 * self._num_stats, stats + 8 * self._num_stats
        key_sums = dq if self._in_dq else sums + 4 * self._num_sums
        with self._lock:
            launch = self._stats
            with launch.lock:
                params = launch.params
                params.lse, params.delta = lse.data_ptr(), delta.data_ptr()
                params.lse_out, params.delta_out = stats, minus_delta
                params.sums, params.key_sums = sums, key_sums
                params.num_sums, params.num_key_sums = self._num_sums // 4, self._num_key_sums // 4
                launch.fire(stream, self._overlaps)
            launch = self._keys
            launch.take(self._keys_numbers, *keys, dout)
            launch.point_maps(*addresses)
            params = launch.params
            params.lse, params.delta, params.dk, params.dv = stats, minus_delta, dk, dv
            params.dq, params.key_sums = sums, key_sums
            params.dk_remote, params.dv_remote, params.store_remote = dk_later, dv_later, self._store
            params.gate = gate
            arriving.begin(stream)
            launch.fire(stream, arriving.overlaps)
            launch = self._finish_keys
            if launch is not None:
                with launch.lock:
                    params = launch.params
                    params.sums, params.tiles, params.dk, params.dv = key_sums, self._tiles, dk, dv
                    params.dk_remote, params.dv_remote, params.store_remote = dk_later, dv_later, self._store
                    params.gate = gate
                    launch.fire(stream, self._overlaps, self._finish_keys_blocks)
            launch = self._finish_dq
            if launch is not None:
                with launch.lock:
                    launch.params.sums, launch.params.dq = sums, dq
                    launch.fire(stream, self._overlaps)
            launch = self._queries
            if launch is not None:
                launch.take(self._queries_numbers, *keys, dout)
                launch.point_maps(*addresses, dq)
                params = launch.params
                params.lse, params.delta, params.dq, params.gate = stats, minus_delta, dq, gate
                launch.fire(stream, self._overlaps)
        del memory  # all is queued, so it may be handed out again
