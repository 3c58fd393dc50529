"""The backward pass on Hopper GPUs: statistics of rows, the kernels that do the work, and what finishes their sums."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from megatron_magi.cuda.driver import fits_tensor_map
from megatron_magi.cuda.launch import Launch, prepared
from megatron_magi.ops.hopper import backward_parts as hopper_parts
from megatron_magi.ops.hopper import kernels as hopper_kernels
from megatron_magi.ops.hopper import plan as hopper_plan
from megatron_magi.ops.hopper.backward_ends import (
    Floats,
    RowStats,
    finish_dq,
    finish_keys,
    new_floats,
    padded,
    row_stats,
)
from megatron_magi.ops.hopper.choices import WHOLE_TILE, backward_choice, most_apart
from megatron_magi.ops.hopper.params import BackwardParams
from megatron_magi.ops.hopper.plan import DevicePlan, DeviceSchedule, Tiling
from megatron_magi.ops.hopper.support import (
    LOG2_E,
    check_support,
    current_stream,
    grid_size,
    in_dtype,
    loadable,
    may_overlap,
    num_processors,
    problem_of,
    query_box,
    stream_lock,
    work_counter,
)
from megatron_magi.ops.hopper.tiles import UNIT
from megatron_magi.ops.options import AttnOptions

_STORE_HALF, _STORE_FLOAT, _ADD_FLOAT, _ADD_HALF = range(4)


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
    grads: tuple[Tensor, Tensor, Tensor],
    accumulate: bool,
    accumulate_keys: bool | None = None,
) -> None:
    """Writes dq, dk, dv to ``grads``, or adds to them; see `slice_attention_backward`.

    ``accumulate_keys`` says it for dk and dv where it is not the same as for dq. Beside the gradients it takes one
    fp32 dq of device memory, and up to 16 MB of sums of dk and dv, which else lie in dq until it is written. Where dq
    is added to, or not contiguous, and a key head has at least four query heads, it takes an fp32 dk and dv more. Wide
    heads, deterministic results, and many queries that see few keys each, take no fp32 dq; wide heads an fp32 dk
    and dv where processors would idle.

    Raises:
        ValueError: the device, dtype or head dims are not supported.
    """
    adds_keys = accumulate if accumulate_keys is None else accumulate_keys
    if q.shape[0] == 0 or k.shape[0] == 0:
        for grad, adds in zip(grads, (accumulate, adds_keys, adds_keys), strict=True):
            if not adds:
                grad.zero_()
        return
    dims = (q.shape[2], v.shape[2])
    check_support(q, dims, hopper_kernels.BACKWARD_DIMS)
    q, k, v, dout = map(loadable, (q, k, v, in_dtype(dout, q.dtype)))
    stream = current_stream(q.device)
    problem = problem_of(q, k, v)
    choice = backward_choice(hopper_plan.mask_facts(bands), problem, options.deterministic)
    whole, adds_dq, shape, packed = choice
    plan = hopper_plan.device_plan(bands, Tiling(True, k.shape[0], shape, packed), q.device)
    processors = max(1, num_processors(q.device) - options.sm_margin)
    splits = 1
    if not whole and not options.deterministic:
        splits = hopper_plan.group_splits(plan, k.shape[1], q.shape[1] // packed // k.shape[1], processors)
    store, dk, dv = _key_gradients(grads[1:], q.dtype, adds_keys, splits)
    dq_store, dq = _query_gradient(grads[0], q.dtype, accumulate)
    inputs = (q, k, v, dout)
    overlaps = may_overlap(options)
    with stream_lock(q.device, stream):
        if whole:
            room = _room(dq) if dq_store in (_STORE_HALF, _STORE_FLOAT) else None
            apart = most_apart(choice, problem, None if room is None else room.numel() * room.element_size())
            group = problem.group // packed
            schedule = hopper_plan.schedule_of(plan, k.shape[1], group, processors, apart)
            sums = _sum_buffers(q, k, schedule, shape, adds_dq, room)
            stats = row_stats(lse, delta, shape[1], packed, sums if adds_dq else (), stream, overlaps)
            _run_backward(inputs, stats, bands, options, adds_dq, plan, schedule, store, (dk, dv), sums, stream)
            if schedule.num_apart:
                num_apart, scale = schedule.num_apart, options.softmax_scale
                finish_keys(sums[1], (dk, dv), plan, num_apart, q.dtype, scale, store, stream, overlaps)
        else:
            stats = row_stats(lse, delta, shape[1], packed, (), stream, overlaps)
            hopper_parts.key_gradients(inputs, stats, bands, options, plan, splits, store, (dk, dv), stream)
        if adds_dq:
            finish_dq(sums[0], dq, stats.row // UNIT, q.dtype, options.softmax_scale, dq_store, stream, overlaps)
        else:
            hopper_parts.query_gradient(inputs, stats, bands, options, dq_store, dq, stream)
    for grad, buffer, adds in zip(grads, (dq, dk, dv), (accumulate, adds_keys, adds_keys), strict=True):
        if buffer is not grad:
            grad.copy_(grad + buffer if adds else buffer)


def _room(dq: Tensor) -> Tensor | None:
    """dq, if other things can lie in its memory."""
    return dq if dq.is_contiguous() and dq.data_ptr() % 16 == 0 else None


def _sum_buffers(
    q: Tensor, k: Tensor, schedule: DeviceSchedule, shape: tuple[int, int], adds_dq: bool, room: Tensor | None
) -> tuple[Floats, Floats]:
    """Memory for sums of dq, and of dk and dv: in ``room``, which is free until dq is finished, if they fit."""
    num_rows, num_heads, dim = q.shape
    keys, queries = shape
    count = num_heads * padded(num_rows, queries) * dim * adds_dq
    key_count = 2 * schedule.num_apart * keys * k.shape[1] * dim
    sums = new_floats(count, q.device)
    if room is not None and key_count * 4 <= room.numel() * room.element_size():
        return sums, Floats(room.data_ptr(), key_count, room)
    return sums, new_floats(key_count, q.device)


def _run_backward(
    inputs,
    stats: RowStats,
    bands,
    options: AttnOptions,
    adds_dq: bool,
    plan: DevicePlan,
    schedule: DeviceSchedule,
    store: int,
    grads: tuple[Tensor, Tensor],
    sums: tuple[Floats, Floats],
    stream: int,
) -> None:
    """Adds to the sums of dq, dk and dv; writes dk and dv of what is not summed. ``adds_dq``: or leaves dq out."""
    (q, k, v, dout), (dk, dv) = inputs, grads
    launch = prepared(
        (
            "backward", hopper_plan.content_digest(bands), q.device, stream, q.dtype, options, store, q.shape, v.shape,
            schedule.num_apart, adds_dq, q.stride(), k.stride(), v.stride(), dout.stride(), dk.stride(), dv.stride(),
        ),
        lambda: _prepare_backward(inputs, stats, options, adds_dq, plan, schedule, store, grads, stream),
    )  # fmt: skip
    with launch.lock:
        launch.point_maps(q.data_ptr(), k.data_ptr(), v.data_ptr(), dout.data_ptr())
        params = launch.params
        params.lse, params.delta = stats.lse, stats.delta
        params.dq, params.key_sums = sums[0].address, sums[1].address
        params.dk, params.dv = dk.data_ptr(), dv.data_ptr()
        launch.fire(stream, may_overlap(options))


def _prepare_backward(
    inputs,
    stats: RowStats,
    options: AttnOptions,
    adds_dq: bool,
    plan: DevicePlan,
    schedule: DeviceSchedule,
    store: int,
    grads,
    stream,
) -> Launch:
    q, k, v, dout = inputs
    dk, dv = grads
    num_heads_kv, stats_row = k.shape[1], stats.row
    keys, queries = WHOLE_TILE
    softcap, scale, num_items = options.softcap, options.softmax_scale, len(schedule.items)
    params = BackwardParams(
        tiles=plan.tiles, passes=plan.passes, bounds=plan.bounds, step=plan.host.step,
        items=schedule.items.data_ptr(), counter=work_counter(q.device, stream).data_ptr(),
        dk_row=dk.stride(0), dk_head=dk.stride(1), dv_row=dv.stride(0), dv_head=dv.stride(1),
        num_items=num_items, group=q.shape[1] // plan.packed // num_heads_kv, heads_kv=num_heads_kv,
        heads_inner=int(plan.host.heads_inner), stats_row=stats_row, units=stats_row // UNIT, store=store,
        scale=scale, scale_log2=(softcap or scale) * LOG2_E, softcap_factor=scale / softcap if softcap else 0.0,
        log2_packed=plan.log2_packed,
    )  # fmt: skip
    kernel = hopper_kernels.backward_kernel(q.device, q.dtype, (q.shape[2], v.shape[2]), softcap > 0, adds_dq)
    grid = grid_size(q.device, num_items, options.sm_margin)
    maps = (query_box(q, queries, plan), (k, keys), (v, keys), query_box(dout, queries, plan))
    return Launch(kernel, grid, params, maps, plan=plan)  # which keeps its schedules


def _query_gradient(grad: Tensor, dtype: torch.dtype, accumulate: bool) -> tuple[int, Tensor]:
    """How dq is written, and where to: the gradient itself, or what is yet to be put there."""
    if grad.dtype not in (dtype, torch.float32) or not fits_tensor_map(grad):
        return _STORE_FLOAT, torch.empty(grad.shape, dtype=torch.float32, device=grad.device)
    if grad.dtype == torch.float32:
        return _ADD_FLOAT if accumulate else _STORE_FLOAT, grad
    return _ADD_HALF if accumulate else _STORE_HALF, grad


def _key_gradients(grads, dtype: torch.dtype, accumulate: bool, splits: int) -> tuple[int, Tensor, Tensor]:
    """How dk and dv are written, and where to."""
    fits = all(fits_tensor_map(g) for g in grads)
    if splits == 1 and not accumulate and fits and grads[0].dtype == grads[1].dtype:
        if grads[0].dtype == dtype:
            return _STORE_HALF, *grads
        if grads[0].dtype == torch.float32:
            return _STORE_FLOAT, *grads
    return _ADD_FLOAT, *(_sum_buffer(g, accumulate) for g in grads)


def _sum_buffer(grad: Tensor, accumulate: bool) -> Tensor:
    """Where fp32 sums go: the gradient itself if it can hold them, else a zeroed buffer."""
    if grad.dtype == torch.float32 and fits_tensor_map(grad):
        return grad if accumulate else grad.zero_()
    return torch.zeros(grad.shape, dtype=torch.float32, device=grad.device)
