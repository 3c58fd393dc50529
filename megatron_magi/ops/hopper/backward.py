"""The backward pass on Hopper GPUs: four kernels, of which the second does the work."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from megatron_magi.ops.hopper import kernels as hopper_kernels
from megatron_magi.ops.hopper import plan as hopper_plan
from megatron_magi.ops.hopper.common import (
    LOG2_E,
    check_support,
    grid_size,
    loadable,
    num_processors,
    work_counter,
)
from megatron_magi.ops.hopper.driver import fits_tensor_map
from megatron_magi.ops.hopper.launch import Launch, prepared
from megatron_magi.ops.hopper.params import BackwardParams, FinishParams, PrepareParams, RowDeltaParams
from megatron_magi.ops.hopper.tiles import UNIT
from megatron_magi.ops.options import AttnOptions

_QUERIES = 64  # of a block
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
    fp32 dq of device memory.

    Raises:
        ValueError: the device, dtype or head dims are not supported.
    """
    adds_keys = accumulate if accumulate_keys is None else accumulate_keys
    if q.shape[0] == 0 or k.shape[0] == 0:
        for grad, adds in zip(grads, (accumulate, adds_keys, adds_keys), strict=True):
            if not adds:
                grad.zero_()
        return
    check_support(q, (q.shape[2], v.shape[2]), hopper_kernels.BACKWARD_DIMS)
    q, k, v, dout = map(loadable, (q, k, v, dout.to(q.dtype)))
    stream = torch.cuda.current_stream(q.device).cuda_stream
    plan = hopper_plan.backward_plan(bands, k.shape[0], options.deterministic, q.device)
    splits = 1
    if not options.deterministic:
        processors = num_processors(q.device) - options.sm_margin
        splits = hopper_plan.group_splits(plan, k.shape[1], q.shape[1] // k.shape[1], processors)
    stats = _row_stats(lse, delta, stream)
    sums = torch.zeros((q.shape[1], stats.shape[2], q.shape[2]), dtype=torch.float32, device=q.device)
    store, dk, dv = _key_gradients(grads[1:], q.dtype, adds_keys, splits)
    launch = prepared(
        (
            "backward", hopper_plan.content_digest(bands), q.device, stream, q.dtype, options, store, q.shape, v.shape,
            q.stride(), k.stride(), v.stride(), dout.stride(), dk.stride(), dv.stride(),
        ),
        lambda: _prepare_backward(q, k, v, dout, options, plan, splits, store, dk, dv, stream),
    )  # fmt: skip
    done = None
    if options.deterministic:
        done = torch.zeros((q.shape[1], stats.shape[2] // UNIT, 2), dtype=torch.int32, device=q.device)
    with launch.lock:
        launch.point_maps(q.data_ptr(), k.data_ptr(), v.data_ptr(), dout.data_ptr())
        params = launch.params
        params.lse, params.delta = stats[0].data_ptr(), stats[1].data_ptr()
        params.dq, params.dk, params.dv = sums.data_ptr(), dk.data_ptr(), dv.data_ptr()
        params.done = 0 if done is None else done.data_ptr()
        launch.fire(stream)
    _finish_dq(sums, grads[0], q.dtype, options.softmax_scale, accumulate, stream)
    for grad, buffer in zip(grads[1:], (dk, dv), strict=True):
        if buffer is not grad:
            grad.copy_(grad + buffer if adds_keys else buffer)


def _prepare_backward(q, k, v, dout, options: AttnOptions, plan, splits: int, store: int, dk, dv, stream) -> Launch:
    (num_rows, num_heads, _), num_heads_kv = q.shape, k.shape[1]
    softcap, scale = options.softcap, options.softmax_scale
    params = BackwardParams(
        tiles=plan.tiles, passes=plan.passes, bounds=plan.bounds, step=plan.step, turns=plan.turns,
        counter=work_counter(q.device, stream).data_ptr(),
        dk_row=dk.stride(0), dk_head=dk.stride(1), dv_row=dv.stride(0), dv_head=dv.stride(1),
        num_tiles=plan.num_tiles, num_items=plan.num_tiles * num_heads_kv * splits, group=num_heads // num_heads_kv,
        heads=num_heads // (num_heads_kv * splits), head_section=num_heads_kv * splits,
        heads_inner=int(plan.heads_inner), stats_row=_padded(num_rows), units=_padded(num_rows) // UNIT, store=store,
        scale=scale, scale_log2=(softcap or scale) * LOG2_E, softcap_factor=scale / softcap if softcap else 0.0,
    )  # fmt: skip
    kernel = hopper_kernels.backward_kernel(
        q.device, q.dtype, (q.shape[2], v.shape[2]), softcap > 0, options.deterministic
    )
    grid = grid_size(q.device, plan.num_tiles * num_heads_kv * splits, options.sm_margin)
    return Launch(kernel, grid, params, ((q, _QUERIES), (k, 128), (v, 128), (dout, _QUERIES)), keep=plan)


def row_delta(dout: Tensor, out: Tensor) -> Tensor:
    """``rowsum(dout * out)``, fp32 ``[num_rows, num_heads_q]``, of bf16 or fp16 tensors on a GPU."""
    num_rows, num_heads, head_dim = out.shape
    dout, out = loadable(dout.to(out.dtype)), loadable(out)
    delta = torch.empty((num_rows, num_heads), dtype=torch.float32, device=out.device)
    if not delta.numel():
        return delta

    def make() -> Launch:
        params = RowDeltaParams(
            dout_row=dout.stride(0), dout_head=dout.stride(1), out_row=out.stride(0), out_head=out.stride(1),
            num_rows=num_rows, num_heads=num_heads,
        )  # fmt: skip
        defines = (f"HEAD_DIM_V={head_dim}", hopper_kernels.element(out.dtype))
        kernel = hopper_kernels.small_kernel(out.device, "row_delta", defines)
        return Launch(kernel, -(-num_rows * num_heads // 8), params)

    launch = prepared(("row_delta", out.device, out.dtype, out.shape, dout.stride(), out.stride()), make)
    with launch.lock:
        params = launch.params
        params.dout, params.out, params.delta = dout.data_ptr(), out.data_ptr(), delta.data_ptr()
        launch.fire(torch.cuda.current_stream(out.device).cuda_stream)
    return delta


def _padded(num_rows: int) -> int:
    """Rows with what the last block reads behind them."""
    return -(-num_rows // 32) * 32 + _QUERIES


def _row_stats(lse: Tensor, delta: Tensor, stream: int) -> Tensor:
    """lse * log2(e) and -delta, fp32 ``[2, num_heads, padded rows]``."""
    (num_rows, num_heads), device = lse.shape, lse.device
    padded = _padded(num_rows)
    stats = torch.empty((2, num_heads, padded), dtype=torch.float32, device=device)
    lse, delta = lse.to(torch.float32), delta.to(torch.float32)

    def make() -> Launch:
        params = PrepareParams(
            lse_row=lse.stride(0), lse_head=lse.stride(1), delta_row=delta.stride(0), delta_head=delta.stride(1),
            num_rows=num_rows, num_heads=num_heads, stats_row=padded,
        )  # fmt: skip
        return Launch(hopper_kernels.small_kernel(device, "prepare", ()), padded // 32 * -(-num_heads // 32), params)

    launch = prepared(("prepare", device, lse.shape, lse.stride(), delta.stride()), make)
    with launch.lock:
        params = launch.params
        params.lse, params.delta = lse.data_ptr(), delta.data_ptr()
        params.lse_out, params.delta_out = stats[0].data_ptr(), stats[1].data_ptr()
        launch.fire(stream)
    return stats


def _finish_dq(sums: Tensor, grad: Tensor, dtype: torch.dtype, scale: float, accumulate: bool, stream: int) -> None:
    """Writes scale times the sums to the gradient of q, or adds them to it."""
    num_rows, num_heads, head_dim = grad.shape
    direct = grad.dtype in (dtype, torch.float32) and fits_tensor_map(grad)
    target = grad if direct else torch.empty(grad.shape, dtype=torch.float32, device=grad.device)
    store = _STORE_FLOAT if target.dtype == torch.float32 else _STORE_HALF
    if direct and accumulate:
        store = _ADD_FLOAT if store == _STORE_FLOAT else _ADD_HALF

    def make() -> Launch:
        blocks = -(-num_rows // _QUERIES)
        params = FinishParams(
            dq_row=target.stride(0), dq_head=target.stride(1), num_rows=num_rows, blocks=blocks,
            units=sums.shape[1] // UNIT, store=store,
            scale=scale,
        )  # fmt: skip
        defines = (f"HEAD_DIM={head_dim}", hopper_kernels.element(dtype))
        return Launch(hopper_kernels.small_kernel(grad.device, "finish_dq", defines), num_heads * blocks, params)

    launch = prepared(("finish_dq", grad.device, dtype, store, scale, grad.shape, target.stride()), make)
    with launch.lock:
        launch.params.sums, launch.params.dq = sums.data_ptr(), target.data_ptr()
        launch.fire(stream)
    if target is not grad:
        grad.copy_(grad + target if accumulate else target)


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
