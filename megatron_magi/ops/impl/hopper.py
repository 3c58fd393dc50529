"""Attention on Hopper GPUs: the kernels of ``csrc/attention/sm90``.

Takes fp16 and bf16; head dims (qk/v) 64/64, 128/128, 192/128 and 256/256 forward, the first two backward.
Row statistics and sums are fp32.
"""

from __future__ import annotations

import ctypes
from functools import cache

import numpy as np
import torch
from torch import Tensor

from megatron_magi.ops.hopper import build as hopper_build
from megatron_magi.ops.hopper import driver as hopper_driver
from megatron_magi.ops.hopper import plan as hopper_plan
from megatron_magi.ops.options import AttnOptions

_LOG2_E = 1.4426950408889634
_FORWARD_WIDTHS = {(64, 64): (128,), (128, 128): (128, 176), (192, 128): (128,), (256, 256): (64,)}
_BACKWARD_DIMS = ((64, 64), (128, 128))
_L2_BYTES = 24 << 20  # keys and values of the heads that are worked on together


class _ForwardParams(ctypes.Structure):
    _fields_ = [
        ("q", ctypes.c_char * 128), ("k", ctypes.c_char * 128), ("v", ctypes.c_char * 128),
        ("tiles", ctypes.c_void_p), ("passes", ctypes.c_void_p), ("bounds", ctypes.c_void_p),
        ("out", ctypes.c_void_p), ("lse", ctypes.c_void_p), ("max_logits", ctypes.c_void_p),
        ("sink_lse", ctypes.c_void_p), ("counter", ctypes.c_void_p),
        ("out_row", ctypes.c_int64), ("out_head", ctypes.c_int64),
        ("lse_row", ctypes.c_int64), ("lse_head", ctypes.c_int64),
        ("sink_row", ctypes.c_int64), ("sink_head", ctypes.c_int64),
        ("num_tiles", ctypes.c_int32), ("num_rows", ctypes.c_int32), ("num_heads", ctypes.c_int32),
        ("group", ctypes.c_int32), ("head_section", ctypes.c_int32),
        ("scale_log2", ctypes.c_float), ("softcap_factor", ctypes.c_float), ("logit_scale", ctypes.c_float),
        ("accumulate", ctypes.c_int32), ("out_fp32", ctypes.c_int32),
        ("pad", ctypes.c_char * 64),
    ]  # fmt: skip


class _BackwardParams(ctypes.Structure):
    _fields_ = [
        ("q", ctypes.c_char * 128), ("k", ctypes.c_char * 128), ("v", ctypes.c_char * 128),
        ("dout", ctypes.c_char * 128),
        ("tiles", ctypes.c_void_p), ("passes", ctypes.c_void_p), ("bounds", ctypes.c_void_p),
        ("lse", ctypes.c_void_p), ("delta", ctypes.c_void_p),
        ("dq", ctypes.c_void_p), ("dk", ctypes.c_void_p), ("dv", ctypes.c_void_p),
        ("counter", ctypes.c_void_p),
        ("dk_row", ctypes.c_int64), ("dk_head", ctypes.c_int64),
        ("dv_row", ctypes.c_int64), ("dv_head", ctypes.c_int64),
        ("num_tiles", ctypes.c_int32), ("num_rows", ctypes.c_int32), ("num_keys", ctypes.c_int32),
        ("num_heads_kv", ctypes.c_int32), ("group", ctypes.c_int32), ("splits", ctypes.c_int32),
        ("stats_row", ctypes.c_int32), ("store", ctypes.c_int32),
        ("scale", ctypes.c_float), ("scale_log2", ctypes.c_float), ("softcap_factor", ctypes.c_float),
        ("pad", ctypes.c_char * 64),
    ]  # fmt: skip


class _PrepareParams(ctypes.Structure):
    _fields_ = [
        ("lse", ctypes.c_void_p), ("delta", ctypes.c_void_p),
        ("lse_out", ctypes.c_void_p), ("delta_out", ctypes.c_void_p),
        ("lse_row", ctypes.c_int64), ("lse_head", ctypes.c_int64),
        ("delta_row", ctypes.c_int64), ("delta_head", ctypes.c_int64),
        ("num_rows", ctypes.c_int32), ("num_heads", ctypes.c_int32), ("stats_row", ctypes.c_int32),
        ("scale", ctypes.c_float), ("pad", ctypes.c_char * 64),
    ]  # fmt: skip


class _FinishParams(ctypes.Structure):
    _fields_ = [
        ("sums", ctypes.c_void_p), ("dq", ctypes.c_void_p), ("dq_row", ctypes.c_int64), ("dq_head", ctypes.c_int64),
        ("num_rows", ctypes.c_int32), ("blocks", ctypes.c_int32), ("store", ctypes.c_int32),
        ("pad", ctypes.c_char * 64),
    ]  # fmt: skip


class _RowDeltaParams(ctypes.Structure):
    _fields_ = [
        ("dout", ctypes.c_void_p), ("out", ctypes.c_void_p), ("delta", ctypes.c_void_p),
        ("dout_row", ctypes.c_int64), ("dout_head", ctypes.c_int64),
        ("out_row", ctypes.c_int64), ("out_head", ctypes.c_int64),
        ("num_rows", ctypes.c_int32), ("num_heads", ctypes.c_int32), ("pad", ctypes.c_char * 64),
    ]  # fmt: skip


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bands: np.ndarray,
    options: AttnOptions,
    *,
    out: Tensor,
    lse: Tensor,
    accumulate: bool,
    sink_lse: Tensor | None,
    return_max_logits: bool,
) -> Tensor | None:
    """Writes attention to ``out`` and ``lse``, or merges it into them; see `slice_attention_forward`.

    Raises:
        ValueError: the device, dtype or head dims are not supported.
    """
    _check_support(q, v, _FORWARD_WIDTHS)
    num_rows, num_heads, head_dim = q.shape
    max_logits = q.new_full((num_heads,), -torch.inf, dtype=torch.float32) if return_max_logits else None
    if num_rows == 0:
        return max_logits
    widths = _FORWARD_WIDTHS[head_dim, v.shape[2]]
    plan = hopper_plan.forward_plan(bands, num_rows, k.shape[0], widths, q.device)
    q, k, v = (t if hopper_driver.fits_tensor_map(t) else t.contiguous() for t in (q, k, v))
    if k.shape[0] == 0:
        k, v = q[:1], q.new_zeros((1, 1, v.shape[2]))
    direct = out.stride(2) == 1 and out.dtype in (q.dtype, torch.float32) and hopper_driver.fits_tensor_map(out)
    target = out if direct else out.to(torch.float32).contiguous()
    params = _ForwardParams(
        tiles=plan.tiles, passes=plan.passes, bounds=plan.bounds,
        out=target.data_ptr(), lse=lse.data_ptr(), max_logits=max_logits.data_ptr() if return_max_logits else 0,
        out_row=target.stride(0), out_head=target.stride(1), lse_row=lse.stride(0), lse_head=lse.stride(1),
        num_tiles=plan.num_tiles, num_rows=num_rows, num_heads=num_heads, group=num_heads // k.shape[1],
        head_section=_head_section(num_heads, num_heads // k.shape[1], k, v),
        accumulate=int(accumulate), out_fp32=int(target.dtype == torch.float32),
    )  # fmt: skip
    _set_bytes(params, "q", hopper_driver.tensor_map(q, 64))
    _set_bytes(params, "k", hopper_driver.tensor_map(k, plan.block_n))
    _set_bytes(params, "v", hopper_driver.tensor_map(v, plan.block_n))
    softcap = options.softcap
    params.logit_scale = softcap if softcap else options.softmax_scale
    params.scale_log2 = params.logit_scale * _LOG2_E
    params.softcap_factor = options.softmax_scale / softcap if softcap else 0.0
    if sink_lse is not None:
        sink = sink_lse.to(torch.float32).expand(num_rows, num_heads)
        params.sink_lse, params.sink_row, params.sink_head = sink.data_ptr(), sink.stride(0), sink.stride(1)
    kernel = _forward_kernel(q.device, q.dtype, head_dim, v.shape[2], plan.block_n, softcap > 0)
    stream = torch.cuda.current_stream(q.device).cuda_stream
    params.counter = _counter(q.device, stream).data_ptr()
    kernel.launch(_grid(q.device, plan.num_tiles * num_heads, options.sm_margin), stream, params)
    if target is not out:
        out.copy_(target)
    return max_logits


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
) -> None:
    """Writes dq, dk, dv to ``grads``, or adds to them; see `slice_attention_backward`.

    Beside the gradients it takes one fp32 dq of device memory.

    Raises:
        ValueError: the device, dtype or head dims are not supported.
    """
    _check_support(q, v, _BACKWARD_DIMS)
    if options.deterministic:
        raise ValueError("deterministic: the backward of impl 'ffa' adds dq in any order; use impl 'torch'")
    if q.shape[0] == 0 or k.shape[0] == 0:
        if not accumulate:
            for grad in grads:
                grad.zero_()
        return
    dtype, num_rows, num_heads, group = q.dtype, q.shape[0], q.shape[1], q.shape[1] // k.shape[1]
    q, k, v, dout = (t if hopper_driver.fits_tensor_map(t) else t.contiguous() for t in (q, k, v, dout.to(dtype)))
    plan = hopper_plan.backward_plan(bands, num_rows, k.shape[0], q.device)
    stream = torch.cuda.current_stream(q.device).cuda_stream
    stats = _row_stats(lse, delta, options.softmax_scale, q.device, stream)
    splits = hopper_plan.group_splits(plan, k.shape[1], group, _num_sms(q.device) - options.sm_margin)
    blocks = stats.shape[2] // 64
    dq = torch.zeros((num_heads, blocks, 64 * q.shape[2]), dtype=torch.float32, device=q.device)
    store, dk, dv = _key_gradient_buffers(grads[1:], dtype, accumulate, splits)
    params = _BackwardParams(
        tiles=plan.tiles, passes=plan.passes, bounds=plan.bounds,
        lse=stats[0].data_ptr(), delta=stats[1].data_ptr(), dq=dq.data_ptr(), dk=dk.data_ptr(), dv=dv.data_ptr(),
        dk_row=dk.stride(0), dk_head=dk.stride(1),
        dv_row=dv.stride(0), dv_head=dv.stride(1),
        num_tiles=plan.num_tiles, num_rows=num_rows, num_keys=k.shape[0], num_heads_kv=k.shape[1],
        group=group, splits=splits, stats_row=stats.shape[2], store=store,
    )  # fmt: skip
    _set_bytes(params, "q", hopper_driver.tensor_map(q, 64))
    _set_bytes(params, "dout", hopper_driver.tensor_map(dout, 64))
    _set_bytes(params, "k", hopper_driver.tensor_map(k, 128))
    _set_bytes(params, "v", hopper_driver.tensor_map(v, 128))
    softcap = options.softcap
    params.scale = options.softmax_scale
    params.scale_log2 = (softcap if softcap else options.softmax_scale) * _LOG2_E
    params.softcap_factor = options.softmax_scale / softcap if softcap else 0.0
    params.counter = _counter(q.device, stream).data_ptr()
    kernel = _backward_kernel(q.device, dtype, q.shape[2], v.shape[2], softcap > 0)
    num_items = plan.num_tiles * k.shape[1] * splits
    kernel.launch(_grid(q.device, num_items, options.sm_margin), stream, params)
    _finish_dq(dq, grads[0], dtype, accumulate, stream)
    for grad, buffer in zip(grads[1:], (dk, dv), strict=True):
        if buffer is not grad:
            grad.copy_(grad + buffer if accumulate else buffer)


def row_delta(dout: Tensor, out: Tensor) -> Tensor:
    """``rowsum(dout * out)``, fp32 ``[num_rows, num_heads_q]``, of bf16 or fp16 tensors on a GPU."""
    num_rows, num_heads, head_dim = out.shape
    dout = dout.to(out.dtype)
    dout, out = (t if hopper_driver.fits_tensor_map(t) else t.contiguous() for t in (dout, out))
    delta = torch.empty((num_rows, num_heads), dtype=torch.float32, device=out.device)
    params = _RowDeltaParams(
        dout=dout.data_ptr(), out=out.data_ptr(), delta=delta.data_ptr(),
        dout_row=dout.stride(0), dout_head=dout.stride(1), out_row=out.stride(0), out_head=out.stride(1),
        num_rows=num_rows, num_heads=num_heads,
    )  # fmt: skip
    kernel = _small_kernel(out.device, "row_delta", (f"HEAD_DIM_V={head_dim}", f"DTYPE={_ctype(out.dtype)}"))
    kernel.launch(-(-num_rows * num_heads // 8), torch.cuda.current_stream(out.device).cuda_stream, params)
    return delta


def _row_stats(lse: Tensor, delta: Tensor, scale: float, device, stream: int) -> Tensor:
    """lse * log2(e) and delta * scale, fp32 ``[2, num_heads, rows padded to 64]``."""
    num_rows, num_heads = lse.shape
    padded = -(-num_rows // 64) * 64
    stats = torch.empty((2, num_heads, padded), dtype=torch.float32, device=device)
    lse, delta = lse.to(torch.float32), delta.to(torch.float32)
    params = _PrepareParams(
        lse=lse.data_ptr(), delta=delta.data_ptr(),
        lse_out=stats[0].data_ptr(), delta_out=stats[1].data_ptr(),
        lse_row=lse.stride(0), lse_head=lse.stride(1), delta_row=delta.stride(0), delta_head=delta.stride(1),
        num_rows=num_rows, num_heads=num_heads, stats_row=padded, scale=scale,
    )  # fmt: skip
    blocks = padded // 32 * -(-num_heads // 32)
    _small_kernel(device, "prepare", ()).launch(blocks, stream, params)
    return stats


_STORE_HALF, _STORE_FLOAT, _ADD_FLOAT, _ADD_HALF = range(4)


def _finish_dq(sums: Tensor, grad: Tensor, dtype: torch.dtype, accumulate: bool, stream: int) -> None:
    """Writes the sums to the gradient of q, or adds them to it."""
    num_rows, num_heads, head_dim = grad.shape
    direct = grad.dtype in (dtype, torch.float32) and hopper_driver.fits_tensor_map(grad)
    target = grad if direct else torch.empty(grad.shape, dtype=torch.float32, device=grad.device)
    store = _STORE_FLOAT if target.dtype == torch.float32 else _STORE_HALF
    if direct and accumulate:
        store = _ADD_FLOAT if store == _STORE_FLOAT else _ADD_HALF
    params = _FinishParams(
        sums=sums.data_ptr(), dq=target.data_ptr(), dq_row=target.stride(0), dq_head=target.stride(1),
        num_rows=num_rows, blocks=sums.shape[1], store=store,
    )  # fmt: skip
    kernel = _small_kernel(grad.device, "finish_dq", (f"HEAD_DIM={head_dim}", f"DTYPE={_ctype(dtype)}"))
    kernel.launch(num_heads * sums.shape[1], stream, params)
    if target is not grad:
        grad.copy_(grad + target if accumulate else target)


def _sum_buffer(grad: Tensor, accumulate: bool) -> Tensor:
    """Where fp32 sums go: the gradient itself if it can hold them, else a zeroed buffer."""
    if grad.dtype == torch.float32 and grad.stride(2) == 1 and hopper_driver.fits_tensor_map(grad):
        return grad if accumulate else grad.zero_()
    return torch.zeros(grad.shape, dtype=torch.float32, device=grad.device)


def _key_gradient_buffers(grads, dtype, accumulate: bool, splits: int) -> tuple[int, Tensor, Tensor]:
    """How dk and dv are written, and where to."""
    fits = all(g.stride(2) == 1 and hopper_driver.fits_tensor_map(g) for g in grads)
    if splits == 1 and not accumulate and fits and grads[0].dtype == grads[1].dtype:
        if grads[0].dtype == dtype:
            return _STORE_HALF, *grads
        if grads[0].dtype == torch.float32:
            return _STORE_FLOAT, *grads
    return _ADD_FLOAT, *(_sum_buffer(g, accumulate) for g in grads)


def is_supported(q: Tensor, v: Tensor, deterministic: bool) -> bool:
    """Whether both passes take tensors like these."""
    return (
        not deterministic
        and q.dtype in (torch.bfloat16, torch.float16)
        and (q.shape[2], v.shape[2]) in _BACKWARD_DIMS
        and q.device.type == "cuda"
        and torch.cuda.get_device_capability(q.device) == (9, 0)
    )


def _check_support(q: Tensor, v: Tensor, known_dims) -> None:
    if q.device.type != "cuda" or torch.cuda.get_device_capability(q.device)[0] != 9:
        where = q.device.type if q.device.type != "cuda" else torch.cuda.get_device_name(q.device)
        raise ValueError(f"impl: 'ffa' needs a Hopper GPU (compute capability 9.0), q is on {where}; use 'torch'")
    if q.dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"q: impl 'ffa' takes bf16 and fp16, got {q.dtype}; use impl 'torch'")
    dims = (q.shape[2], v.shape[2])
    if dims not in known_dims:
        known = ", ".join(f"{a}/{b}" for a, b in known_dims)
        raise ValueError(f"q, v: impl 'ffa' takes head dims {known} (qk/v), got {dims[0]}/{dims[1]}; use impl 'torch'")


def _set_bytes(params: ctypes.Structure, name: str, value: bytes) -> None:
    ctypes.memmove(ctypes.addressof(params) + getattr(type(params), name).offset, value, len(value))


def _head_section(num_heads: int, group: int, k: Tensor, v: Tensor) -> int:
    """Heads worked on together: whole groups whose keys and values fit in the L2 cache."""
    bytes_per_head = k.shape[0] * (k.shape[2] + v.shape[2]) * k.element_size()
    groups = max(1, min(num_heads // group, _L2_BYTES // max(1, bytes_per_head)))
    while (num_heads // group) % groups:
        groups -= 1
    return groups * group


@cache
def _num_sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _grid(device: torch.device, num_items: int, sm_margin: int) -> int:
    return max(1, min(num_items, _num_sms(device) - sm_margin))


@cache
def _counter(device: torch.device, stream: int) -> Tensor:
    """Work counter of a stream: kernels of one stream follow each other and leave it at zero."""
    return torch.zeros(8, dtype=torch.int32, device=device)


@cache
def _forward_kernel(device, dtype, head_dim: int, head_dim_v: int, block_n: int, softcap: bool):
    stages = 2
    defines = (
        f"HEAD_DIM={head_dim}", f"HEAD_DIM_V={head_dim_v}", f"BLOCK_N={block_n}", f"STAGES={stages}",
        f"DTYPE={_ctype(dtype)}", f"SOFTCAP={int(softcap)}",
    )  # fmt: skip
    image = hopper_build.build("attention/sm90/forward.cu", defines)
    shared = 2 * (128 * head_dim + stages * block_n * (head_dim + head_dim_v)) + 1024
    with torch.cuda.device(device):
        return hopper_driver.load_kernel(image, "ffa_forward", 384, shared)


@cache
def _backward_kernel(device, dtype, head_dim: int, head_dim_v: int, softcap: bool):
    stages = 2
    defines = (
        f"HEAD_DIM={head_dim}", f"HEAD_DIM_V={head_dim_v}", f"STAGES={stages}",
        f"DTYPE={_ctype(dtype)}", f"SOFTCAP={int(softcap)}",
    )  # fmt: skip
    image = hopper_build.build("attention/sm90/backward.cu", defines)
    shared = 2 * ((128 + stages * 64) * (head_dim + head_dim_v) + 2 * 128 * 64) + 256 * head_dim + stages * 512 + 1024
    with torch.cuda.device(device):
        return hopper_driver.load_kernel(image, "ffa_backward", 384, shared)


@cache
def _small_kernel(device, name: str, defines: tuple[str, ...]):
    image = hopper_build.build(f"attention/sm90/{name}.cu", defines)
    with torch.cuda.device(device):
        return hopper_driver.load_kernel(image, f"ffa_{name}", 256, 0)


def _ctype(dtype: torch.dtype) -> str:
    return "Bf16" if dtype == torch.bfloat16 else "Fp16"
