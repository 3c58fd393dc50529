"""Attention over a mask or a table of bands on one device, as one autograd operation."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from megatron_magi.backends.base import is_changing
from megatron_magi.backends.readings import check_reading, reading_of_forward
from megatron_magi.checks import flag
from megatron_magi.mask import AttnMask
from megatron_magi.operands.finite import describe_by_bands, require_finite
from megatron_magi.operands.frozen import frozen
from megatron_magi.operands.meta import AttnForwardMeta
from megatron_magi.operands.options import check_bands, check_qkv, check_sink, make_options, written_out
from megatron_magi.ops.derivatives import once_differentiable, refuse_tangents
from megatron_magi.ops.slice_operator import slice_attention_traced
from megatron_magi.ops.slice_passes import SliceCall, attend_back
from megatron_magi.ops.slice_passes import attend as attend_forward


class _SliceAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, sink, call: SliceCall):
        ctx.reading = reading_of_forward(call.bands, has_gradients=True)
        (out, lse, max_logits), ctx.program = attend_forward(q, k, v, sink, call)
        ctx.save_for_backward(q, k, v, sink, out, lse)
        ctx.call = call
        ctx.mark_non_differentiable(*(t for t in (lse, max_logits) if t is not None))
        ctx.set_materialize_grads(False)
        return out, lse, max_logits

    @staticmethod
    @once_differentiable
    def backward(ctx, saved, dout, _dlse, _dmax_logits):
        if dout is None:
            return (None,) * 5
        q, k, v, sink, out, lse = saved
        read = check_reading(ctx.call.bands, ctx.reading)
        if ctx.call.options.sanity_check:
            require_finite({"q": q, "k": k, "v": v, "sink": sink, "dout": dout}, describe_by_bands(ctx.call.bands))
        wanted = sink if ctx.needs_input_grad[3] else None
        grads = attend_back(dout, (q, k, v), wanted, out, lse, ctx.call, ctx.program, read)
        return *grads, None


def slice_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask_or_bands: AttnMask | np.ndarray,
    *,
    sink: Tensor | None = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    return_max_logits: bool = False,
    deterministic: bool = False,
    sm_margin: int = 0,
    sanity_check: bool = False,
    impl: str = "auto",
) -> tuple[Tensor, AttnForwardMeta]:
    """Computes attention on one device, with gradients for q, k, v and sink.

    Functions that call it can be compiled as a whole (``fullgraph=True``): masks are inputs of the graph, which is
    compiled again for masks of another size class (see `AttnMask.packed`), not for each mask.

    Args:
        q: ``[num_rows, num_heads_q, head_dim]``, fp16, bf16, fp32 or fp64, any strides; finite, hidden rows too.
        k: ``[num_keys, num_heads_kv, head_dim]``, likewise; num_heads_kv divides num_heads_q.
        v: ``[num_keys, num_heads_kv, head_dim_v]``, likewise.
        mask_or_bands: an `AttnMask` over ``num_rows`` x ``num_keys`` tokens, or a table of bands.
        sink: logits without a value that join the softmax's denominator, ``[num_sinks, num_heads_q]`` or
            ``[num_rows, num_sinks, num_heads_q]``, any float dtype.
        softmax_scale: factor of the products of queries and keys; ``1 / sqrt(head_dim)`` when None.
        softcap: 0 for none, else logits become ``softcap * tanh(logit / softcap)``.
        return_max_logits: fill ``meta.max_logits``, the largest visible logit of each head.
        deterministic: bitwise repeatable gradients; a forward always is.
        sm_margin: streaming multiprocessors that the Hopper kernels leave free.
        impl: ``auto``, ``reference`` (dense), ``torch`` (blocked), ``ffa`` (Hopper kernels), ``cudnn`` (the cuDNN
            frontend) or ``triton``; an explicit choice never falls back to another.
        sanity_check: look for NaN and inf in q, k, v, the sink (NaN alone) and the gradient of the output, hidden rows
            too, in both passes: a pass over memory and a wait for the device each.

    Returns:
        ``(out, meta)``: out ``[num_rows, num_heads_q, head_dim_v]`` in the dtype of q; ``meta.lse`` ``[num_rows,
        num_heads_q]``, natural log, without gradient. Rows that see nothing: out 0, lse -inf.

    Raises:
        ValueError: an argument, named in the message, has a wrong shape, dtype or value; with ``sanity_check`` a row
            is not finite, in the backward too.
    """
    flag(return_max_logits, "return_max_logits")
    if torch.compiler.is_compiling():
        is_mask = isinstance(mask_or_bands, AttnMask)
        # The backward reads it again: a table of the caller's could have changed.
        table = torch.from_numpy(mask_or_bands.packed) if is_mask else torch.from_numpy(mask_or_bands).clone()
        return slice_attention_traced(
            q, k, v, [table],
            sink=sink, softmax_scale=softmax_scale, softcap=softcap, return_max_logits=return_max_logits,
            deterministic=deterministic, sm_margin=sm_margin, sanity_check=sanity_check, impl=impl,
        )  # fmt: skip
    check_qkv(q, k, v)
    if isinstance(mask_or_bands, AttnMask):
        mask = mask_or_bands
        if (mask.total_seqlen_q, mask.total_seqlen_k) != (q.shape[0], k.shape[0]):
            raise ValueError(
                f"mask_or_bands: the mask is over {mask.total_seqlen_q} x {mask.total_seqlen_k} tokens, "
                f"q and k have {q.shape[0]} and {k.shape[0]}"
            )
        bands = mask.bands
    elif not isinstance(mask_or_bands, np.ndarray):
        found = type(mask_or_bands).__name__
        raise ValueError(f"mask_or_bands: expected an AttnMask, as megatron_magi.mask.builders make it, got {found}")
    else:
        bands = check_bands(mask_or_bands, q.shape[0], k.shape[0], "mask_or_bands")
        bands = bands if is_changing(bands) else frozen(bands)  # the backward reads it again
    if sink is not None:
        check_sink(sink, q)
    options = make_options(q, softmax_scale, softcap, deterministic, sm_margin, sanity_check)
    return attend(q, k, v, sink, SliceCall(bands, options, impl, return_max_logits))


def attend(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, call: SliceCall) -> tuple[Tensor, AttnForwardMeta]:
    """`slice_attention` of q, k, v and bands that are known to fit together."""
    refuse_tangents(q, k, v, sink)
    q, k, v, sink = written_out(q, k, v, sink)
    if call.options.sanity_check:
        require_finite({"q": q, "k": k, "v": v, "sink": sink}, describe_by_bands(call.bands))
    wanted = q.requires_grad or k.requires_grad or v.requires_grad or (sink is not None and sink.requires_grad)
    if wanted and torch.is_grad_enabled():
        out, lse, max_logits = _SliceAttention.apply(q, k, v, sink, call)
    else:
        reading_of_forward(call.bands, has_gradients=False)
        (out, lse, max_logits), _ = attend_forward(q, k, v, sink, call)
    return out, AttnForwardMeta(lse=lse, max_logits=max_logits)
