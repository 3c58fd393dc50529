"""Attention over bands for torch.compile: two operators.

The mask is a list of tensors (`megatron_magi.ops.mask_tensors`), so that a graph holds no mask; max_logits and dsink
are empty if not requested, as operators cannot return None.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from megatron_magi.operands.finite import describe_by_bands, require_finite
from megatron_magi.operands.merge import accumulate_dtype
from megatron_magi.operands.meta import AttnForwardMeta
from megatron_magi.operands.options import AttnOptions, check_bands, check_qkv, check_sink, make_options
from megatron_magi.ops.derivatives import refuse_second
from megatron_magi.ops.mask_tensors import bands_of
from megatron_magi.ops.slice_passes import SliceCall, attend, attend_back, program_of

# A captured CUDA graph would replay the launch of one mask for all.
_TAGS = tuple(getattr(torch.Tag, name) for name in ("cudagraph_unsafe",) if hasattr(torch.Tag, name))
_OPTIONS = "float softmax_scale, float softcap, bool deterministic, int sm_margin, bool sanity_check, str impl"


def _checked(q, k, v, sink, mask, *options) -> tuple[np.ndarray, AttnOptions]:
    """Bands of the mask and options, of arguments that fit together."""
    check_qkv(q, k, v)
    if sink is not None:
        check_sink(sink, q)
    return check_bands(bands_of(mask, q.shape[0], k.shape[0]), q.shape[0], k.shape[0]), make_options(q, *options)


@torch.library.custom_op(
    "megatron_magi::slice_attention",
    mutates_args=(),
    tags=_TAGS,
    schema=f"(Tensor q, Tensor k, Tensor v, Tensor? sink, Tensor[] mask, bool return_max_logits, {_OPTIONS})"
    " -> (Tensor, Tensor, Tensor)",
)
def _forward_operator(
    q, k, v, sink, mask, return_max_logits, softmax_scale, softcap, deterministic, sm_margin, sanity_check, impl
):
    bands, options = _checked(q, k, v, sink, mask, softmax_scale, softcap, deterministic, sm_margin, sanity_check)
    if sanity_check:
        require_finite({"q": q, "k": k, "v": v, "sink": sink}, describe_by_bands(bands))
    (out, lse, max_logits), _ = attend(q, k, v, sink, SliceCall(bands, options, impl, return_max_logits))
    return out, lse, lse.new_empty(0) if max_logits is None else max_logits


@_forward_operator.register_fake
def _(q, k, v, sink, mask, return_max_logits, *_options):
    num_rows, num_heads, _ = q.shape
    dtype = accumulate_dtype(q.dtype)
    lse, max_logits = q.new_empty((num_rows, num_heads), dtype=dtype), q.new_empty(num_heads, dtype=dtype)
    return q.new_empty((num_rows, num_heads, v.shape[2])), lse, max_logits if return_max_logits else lse.new_empty(0)


@torch.library.custom_op(
    "megatron_magi::slice_attention_backward",
    mutates_args=(),
    tags=_TAGS,
    schema="(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor? sink, Tensor out, Tensor lse, Tensor[] mask, "
    f"{_OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor)",
)
def _backward_operator(
    dout, q, k, v, sink, out, lse, mask, softmax_scale, softcap, deterministic, sm_margin, sanity_check, impl
):
    bands, options = _checked(q, k, v, sink, mask, softmax_scale, softcap, deterministic, sm_margin, sanity_check)
    if sanity_check:
        require_finite({"q": q, "k": k, "v": v, "sink": sink, "dout": dout}, describe_by_bands(bands))
    program = program_of(q, k, v, bands, options, impl)
    *grads, dsink = attend_back(dout, (q, k, v), sink, out, lse, SliceCall(bands, options, impl, False), program)
    return *grads, lse.new_empty(0) if dsink is None else dsink


@_backward_operator.register_fake
def _(dout, q, k, v, sink, out, lse, *_rest):
    dq, dk, dv = (t.new_empty(t.shape) for t in (q, k, v))
    return dq, dk, dv, lse.new_empty(0) if sink is None else sink.new_empty(sink.shape)


def _keep_for_backward(ctx, inputs, output):
    q, k, v, sink, mask, _, *options = inputs
    out, lse, _ = output
    ctx.save_for_backward(q, k, v, sink, out, lse, *mask)
    ctx.options = options
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _operator_backward(ctx, dout, _dlse, _dmax_logits):
    q, k, v, sink, out, lse, *mask = ctx.saved_tensors
    dq = dk = dv = dsink = None
    if dout is not None:
        dq, dk, dv, dsink = _backward_operator(dout, q, k, v, sink, out, lse, mask, *ctx.options)
    return dq, dk, dv, None if sink is None else dsink, [None] * len(mask), None, *[None] * len(ctx.options)


_forward_operator.register_autograd(_operator_backward, setup_context=_keep_for_backward)
_backward_operator.register_autograd(refuse_second)


def slice_attention_traced(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Sequence[Tensor],
    *,
    sink: Tensor | None,
    softmax_scale: float | None,
    softcap: float,
    return_max_logits: bool,
    deterministic: bool,
    sm_margin: int,
    sanity_check: bool,
    impl: str,
) -> tuple[Tensor, AttnForwardMeta]:
    """`slice_attention` as one operator of a graph; arguments are checked when it runs.

    Args:
        mask: as tensors, see `megatron_magi.ops.mask_tensors`.
    """
    if softmax_scale is None:
        softmax_scale = 1.0 / math.sqrt(q.shape[-1])
    out, lse, max_logits = _forward_operator(
        q, k, v, sink, list(mask), return_max_logits,
        float(softmax_scale), float(softcap), deterministic, sm_margin, sanity_check, impl,
    )  # fmt: skip
    return out, AttnForwardMeta(lse=lse, max_logits=max_logits if return_max_logits else None)
