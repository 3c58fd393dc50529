"""The launch of the forward kernel."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_magi.backends.sm90 import kernels as hopper_kernels
from megatron_magi.backends.sm90.choices import RowTiles
from megatron_magi.backends.sm90.params import CapturedForwardParams, ForwardParams, GatedForwardParams
from megatron_magi.backends.sm90.support import LOG2_E, work_counter
from megatron_magi.cuda.launch import Launch
from megatron_magi.operands.options import AttnOptions
from megatron_magi.operands.passes import ForwardInputs, ForwardOutput


def make_launch(
    inputs: ForwardInputs,
    output: ForwardOutput,
    options: AttnOptions,
    stream: int,
    tiles: RowTiles,
    *,
    arriving: Sequence[Tensor] = (),
    captured: bool = False,
) -> Launch:
    """The forward kernel with all parameters that depend neither on the mask nor on addresses.

    Args:
        inputs, output: tensors of the layout of the calls.
        options: of the calls.
        stream: raw handle.
        tiles: of queries.
        arriving: fetched keys and values.
        captured: the kernel reads the mask's numbers from memory, see `static_plan`.
    """
    (q, k, v, sink_lse), (out, lse, accumulate), (tile, packed) = inputs, output, tiles
    softcap, scale = options.softcap, options.softmax_scale
    kind = GatedForwardParams if arriving else CapturedForwardParams if captured else ForwardParams
    params = kind(
        counter=0 if captured else work_counter(q.device, stream).data_ptr(),
        out_row=out.stride(0), out_head=out.stride(1), lse_row=lse.stride(0), lse_head=lse.stride(1),
        logit_scale=softcap or scale,
        scale_log2=(softcap or scale) * LOG2_E, softcap_factor=scale / softcap if softcap else 0.0,
        accumulate=int(accumulate), out_fp32=int(out.dtype == torch.float32),
    )  # fmt: skip
    if sink_lse is not None:
        params.sink_row, params.sink_head = sink_lse.stride()
    dims = hopper_kernels.kernel_dims((q.shape[2], v.shape[2]), backward=False)
    kernel = hopper_kernels.forward_kernel(q.device, q.dtype, dims, tile, softcap > 0, bool(arriving), captured)
    keys = ((t, tile[1]) for t in (k, v, *arriving))
    stored = out if out.dtype == q.dtype else q  # fp32 output is not stored by TMA and needs no map
    return Launch(kernel, 1, params, ((q, 64 // packed, packed), *keys, (stored, 16 // packed, packed)))
