"""What runs before and after the backward kernels: statistics of rows, zeros, and sums that become gradients."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megatron_magi.cuda.launch import Launch, prepared
from megatron_magi.ops.hopper import kernels as hopper_kernels
from megatron_magi.ops.hopper.params import FinishKeysParams, FinishParams, PrepareParams, RowDeltaParams
from megatron_magi.ops.hopper.plan import DevicePlan
from megatron_magi.ops.hopper.support import check_support, current_stream, in_dtype, loadable
from megatron_magi.ops.merge import row_products

_FINISHED_ROWS = 64  # of a block of the kernel that finishes dq
_ZEROING_BLOCKS = 1024
_DELTA_ELEMENTS = 8 * 256 * 4  # of out, of a block of the kernel for delta


class Floats(NamedTuple):
    """fp32 memory that kernels add to: its address, how many numbers, and the tensor that it belongs to."""

    address: int
    count: int
    owner: Tensor


class RowStats(NamedTuple):
    """Numbers of each row as the kernels want them, fp32 ``[num_heads / packed, row]`` each.

    Attributes:
        lse: address of lse * log2(e).
        delta: address of -delta.
        row: rows with their padding, times the heads that are packed, which take turns.
        packed: heads that are counted as one.
        owner: tensor they belong to.
    """

    lse: int
    delta: int
    row: int
    packed: int
    owner: Tensor


def new_floats(count: int, device: torch.device) -> Floats:
    """New memory, not zeroed."""
    memory = torch.empty(count, dtype=torch.float32, device=device)
    return Floats(memory.data_ptr(), count, memory)


def row_delta(dout: Tensor, out: Tensor) -> Tensor:
    """``rowsum(dout * out)``, fp32 ``[num_rows, num_heads_q]``; of an out in fp32, as stages have it, by torch.

    Raises:
        ValueError: the device or head dim is not supported.
    """
    num_rows, num_heads, head_dim = out.shape
    if out.dtype.itemsize > 2:
        return row_products(dout, out)
    check_support(out, (head_dim, head_dim), hopper_kernels.DELTA_DIMS)
    dout, out = loadable(in_dtype(dout, out.dtype)), loadable(out)
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
        return Launch(kernel, -(-num_rows * num_heads * head_dim // _DELTA_ELEMENTS), params)

    launch = prepared(("row_delta", out.device, out.dtype, out.shape, dout.stride(), out.stride()), make)
    with launch.lock:
        params = launch.params
        params.dout, params.out, params.delta = dout.data_ptr(), out.data_ptr(), delta.data_ptr()
        launch.fire(current_stream(out.device))
    return delta


def padded(num_rows: int, block: int) -> int:
    """Rows with what the last block reads behind them."""
    return -(-num_rows // 32) * 32 + block


def row_stats(
    lse: Tensor, delta: Tensor, block: int, packed: int, to_zero: tuple[Floats, ...], stream: int, overlaps: bool
) -> RowStats:
    """Statistics of rows; fills ``to_zero``, two or none, with zeros; ``overlaps``: see `Launch.fire`."""
    (num_rows, num_heads), device = lse.shape, lse.device
    rows = padded(num_rows, block)
    memory = torch.empty(2 * num_heads * rows, dtype=torch.float32, device=device)
    stats = RowStats(memory.data_ptr(), memory.data_ptr() + 4 * num_heads * rows, rows * packed, packed, memory)
    lse, delta = in_dtype(lse, torch.float32), in_dtype(delta, torch.float32)

    def make() -> Launch:
        params = PrepareParams(
            lse_row=lse.stride(0), lse_head=lse.stride(1), delta_row=delta.stride(0), delta_head=delta.stride(1),
            num_rows=num_rows, num_heads=num_heads, stats_row=stats.row, log2_packed=packed.bit_length() - 1,
        )  # fmt: skip
        blocks = max(rows // 32 * -(-num_heads // 32), _ZEROING_BLOCKS if to_zero else 1)
        return Launch(hopper_kernels.small_kernel(device, "prepare", ()), blocks, params)

    key = ("prepare", device, rows, packed, lse.shape, lse.stride(), delta.stride(), len(to_zero))
    launch = prepared(key, make)
    with launch.lock:
        params = launch.params
        params.lse, params.delta = lse.data_ptr(), delta.data_ptr()
        params.lse_out, params.delta_out = stats.lse, stats.delta
        if to_zero:
            params.sums, params.key_sums = to_zero[0].address, to_zero[1].address
            params.num_sums, params.num_key_sums = to_zero[0].count // 4, to_zero[1].count // 4
        launch.fire(stream, overlaps)
    return stats


def finish_dq(
    sums: Floats, dq: Tensor, units: int, dtype: torch.dtype, scale: float, store: int, stream: int, overlaps: bool
) -> None:
    """Writes scale times the sums, ``units`` of 16 rows a head, to dq, or adds them to it."""
    num_rows, num_heads, head_dim = dq.shape

    def make() -> Launch:
        blocks = -(-num_rows // _FINISHED_ROWS)
        params = FinishParams(
            dq_row=dq.stride(0), dq_head=dq.stride(1), num_rows=num_rows, blocks=blocks,
            units=units, store=store, scale=scale,
        )  # fmt: skip
        defines = (f"HEAD_DIM={head_dim}", hopper_kernels.element(dtype))
        return Launch(hopper_kernels.small_kernel(dq.device, "finish_dq", defines), num_heads * blocks, params)

    launch = prepared(("finish_dq", dq.device, dtype, store, scale, units, dq.shape, dq.stride()), make)
    with launch.lock:
        launch.params.sums, launch.params.dq = sums.address, dq.data_ptr()
        launch.fire(stream, overlaps)


def finish_keys(
    sums: Floats,
    grads: tuple[Tensor, Tensor],
    plan: DevicePlan,
    num_tiles: int,
    dtype: torch.dtype,
    scale: float,
    store: int,
    stream: int,
    overlaps: bool,
) -> None:
    """Writes the sums of the first tiles to dk (times scale) and dv, or adds them to them."""
    dk, dv = grads
    heads_kv, dim = dk.shape[1:]

    def make() -> Launch:
        params = FinishKeysParams(
            tiles=plan.tiles, heads_kv=heads_kv, store=store, scale=scale,
            dk_row=dk.stride(0), dk_head=dk.stride(1), dv_row=dv.stride(0), dv_head=dv.stride(1),
        )  # fmt: skip
        defines = (f"HEAD_DIM={dim}", hopper_kernels.element(dtype))
        kernel = hopper_kernels.small_kernel(dk.device, "finish_keys", defines)
        return Launch(kernel, 4 * num_tiles * heads_kv, params, plan=plan)

    key = ("finish_keys", plan.tiles, num_tiles, dk.device, dtype, store, scale, dk.shape, dk.stride(), dv.stride())
    launch = prepared(key, make)
    with launch.lock:
        params = launch.params
        params.sums, params.dk, params.dv = sums.address, dk.data_ptr(), dv.data_ptr()
        launch.fire(stream, overlaps)
