"""``rowsum(dout * out)``, for a backward in stages."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_magi.backends.sm90 import kernels as hopper_kernels
from megatron_magi.backends.sm90.support import check_support, in_dtype, loadable
from megatron_magi.cuda.launch import Launch, prepared
from megatron_magi.cuda.streams import current_stream
from megatron_magi.operands.merge import row_products

_ELEMENTS = 8 * 256 * 4  # of out, of a thread block


def row_delta(dout: Tensor, out: Tensor) -> Tensor:
    """``rowsum(dout * out)``, fp32 ``[num_rows, num_heads_q]``; for an fp32 ``out``, as in stages, computed by torch.

    Raises:
        ValueError: the device or head dim is not supported.
    """
    num_rows, num_heads, head_dim = out.shape
    if out.dtype.itemsize > 2:
        return row_products(dout, out)
    check_support(out, (head_dim, head_dim))
    dout, out = loadable(in_dtype(dout, out.dtype)), loadable(out)
    delta = out.new_empty(num_rows, num_heads, dtype=torch.float32)
    if not out.numel():
        return delta

    def make() -> Launch:
        variant = hopper_kernels.row_delta(out.dtype, head_dim)
        params = variant.params(
            dout_row=dout.stride(0), dout_head=dout.stride(1), out_row=out.stride(0), out_head=out.stride(1),
            num_rows=num_rows, num_heads=num_heads,
        )  # fmt: skip
        lanes = 1 << (head_dim // 8 - 1).bit_length()
        return Launch(variant.load(out.device), -(-num_rows * num_heads * lanes * 8 // _ELEMENTS), params)

    launch = prepared(("row_delta", out.device, out.dtype, out.shape, dout.stride(), out.stride()), make)
    with launch.lock:
        params = launch.params
        params.dout, params.out, params.delta = dout.data_ptr(), out.data_ptr(), delta.data_ptr()
        launch.fire(current_stream(out.device))
    return delta
