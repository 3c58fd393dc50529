"""Forward and backward by `cudnn.flex_attention`.

Tensors are passed as one sequence, ``[1, num_tokens, num_heads, head_dim]``, or without the first dimension if the mask
is planned as several (`sequences`). The backward takes lse and output over all
keys and sinks, and computes delta from the output, less a gradient of the lse. Where delta is given without the output,
the output is given as zeros and that gradient as ``-delta``.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_magi.backends.cudnn import plans, support
from megatron_magi.backends.cudnn.plans import Planned, Shape
from megatron_magi.operands.merge import merge_finite_, merge_sink_
from megatron_magi.operands.options import AttnOptions
from megatron_magi.operands.passes import BackwardInputs, ForwardInputs, ForwardOutput, Gradients
from megatron_magi.runtime.lru import LruCache

_ALIGNMENT, _WIDE_ALIGNMENT = 16, 128
"""Bytes to which tensors must be aligned; those of head dim 256."""
_WIDE = (256, 256)
_MOST_KERNELS = 256
_kernels: LruCache[tuple, Any] = LruCache(0, _MOST_KERNELS)
"""`FlexAttentionFwd` and `FlexAttentionBwd` objects by the layouts of their tensors; they share compiled kernels."""


def check(q: Tensor, v: Tensor, options: AttnOptions, bands: np.ndarray) -> None:
    """Raises ValueError, naming what would work, if it does not compute such a call."""
    reason = support.why_not(q.device, q.dtype, (q.shape[2], v.shape[2]), "'torch'", q.shape[1] // v.shape[1])
    reason = reason or support.why_not_call(options, bands, "'torch'")
    if reason is not None:
        raise ValueError(reason)


def forward(inputs: ForwardInputs, bands: np.ndarray, options: AttnOptions, output: ForwardOutput) -> None:
    """See `megatron_magi.backends.base.Backend.forward`."""
    q, k, v, sink = inputs
    out, lse, adds, max_logits = output
    check(q, v, options, bands)
    if not plans.facts_of(bands).sees:
        if not adds:
            out.zero_()
            lse.fill_(-torch.inf)
    else:
        is_direct = not adds and out.dtype == q.dtype and _is_loadable(out, _ALIGNMENT)
        part = out if is_direct else torch.empty(out.shape, dtype=q.dtype, device=q.device)
        part_lse = torch.empty(q.shape[1], q.shape[0], dtype=torch.float32, device=q.device)
        _run_forward((q, k, v), part, part_lse, max_logits, bands, options)
        if adds:
            merge_finite_(out, lse, part, part_lse.t())
        else:
            lse.copy_(part_lse.t())
            if not is_direct:
                out.copy_(part)
    if sink is not None:
        merge_sink_(out, lse, sink)


def backward(
    inputs: BackwardInputs, bands: np.ndarray, options: AttnOptions, grads: Gradients, *, out: Tensor | None = None
) -> None:
    """See `megatron_magi.backends.base.Backend.backward`; ``out`` is the output over all keys and sinks."""
    q, k, v, dout, lse, delta = inputs
    check(q, v, options, bands)
    if not plans.facts_of(bands).sees:
        for into, adds in grads.tensors():
            if not adds:
                into.zero_()
        return
    alignment = _WIDE_ALIGNMENT if (q.shape[2], v.shape[2]) == _WIDE else _ALIGNMENT
    made = []
    for (into, adds), like in zip(grads.tensors(), (q, k, v), strict=True):
        is_direct = not adds and into.dtype == q.dtype and _is_loadable(into, alignment)
        made.append(into if is_direct else torch.empty(like.shape, dtype=q.dtype, device=q.device))
    if out is None:
        assert delta is not None
        of_lse = _by_heads(delta).neg_()
        out = _zeros(q.device, q.dtype)[: v.shape[2]].as_strided(dout.shape, (0, 0, 1))
    else:
        of_lse, out = None, _loadable(out, alignment)
    outs = out, _loadable(dout.to(q.dtype), alignment), _by_heads(lse), of_lse
    _run_backward((q, k, v), outs, made, bands, options, alignment)
    for (into, adds), part in zip(grads.tensors(), made, strict=True):
        if adds:
            into.add_(part)
        elif part is not into:
            into.copy_(part)


def _by_heads(rows: Tensor) -> Tensor:
    """A copy of ``[num_rows, num_heads]`` as ``[num_heads, num_rows]``, with the strides of a new tensor."""
    return torch.empty(rows.shape[1], rows.shape[0], dtype=torch.float32, device=rows.device).copy_(rows.t())


def _shape(q: Tensor, k: Tensor, v: Tensor, has_backward: bool) -> Shape:
    return Shape(
        q.shape[0], k.shape[0], (q.shape[1], k.shape[1]), (q.shape[2], v.shape[2]), q.dtype, has_backward
    )  # fmt: skip


def _run_forward(
    qkv: tuple[Tensor, Tensor, Tensor],
    out: Tensor,
    lse: Tensor,
    max_logits: Tensor | None,
    bands: np.ndarray,
    options: AttnOptions,
) -> None:
    planned = plans.plan_of(bands, _shape(*qkv, has_backward=False), out.device)
    plan = planned.plan()
    q, k, v, out, lse = _shaped(plan, *(_loadable(t, _ALIGNMENT) for t in qkv), out, lse)
    key = "forward", *_layouts(q, k, v, out), max_logits is None, _form(plan)
    kernel = _kernels.get(key)
    if kernel is None:
        kernel = support.library().FlexAttentionFwd(q, k, v, out, plan, lse, sample_max_logit=max_logits)
        _compile(kernel, key)
    workspace = _workspace(kernel, q.device)
    kernel.execute(
        q, k, v, out, plan, lse, workspace=workspace, softmax_scale=options.softmax_scale,
        current_stream=_noted_stream(planned, q.device, False), max_logit_tensor=max_logits,
    )  # fmt: skip


def _run_backward(
    qkv: tuple[Tensor, Tensor, Tensor],
    outs: tuple[Tensor, Tensor, Tensor, Tensor | None],
    grads: list[Tensor],
    bands: np.ndarray,
    options: AttnOptions,
    alignment: int,
) -> None:
    planned = plans.plan_of(bands, _shape(*qkv, has_backward=True), qkv[0].device)
    plan, deterministic = planned.plan(), options.deterministic
    q, k, v, dq, dk, dv = _shaped(plan, *(_loadable(t, alignment) for t in qkv), *grads)
    out, dout, lse, of_lse = _shaped(plan, *outs)
    key = "backward", *_layouts(q, k, v, out, dout, dq, dk, dv), of_lse is None, deterministic, _form(plan)
    key += _sizes(plan, deterministic)
    kernel = _kernels.get(key)
    if kernel is None:
        kernel = support.library().FlexAttentionBwd(
            q, k, v, out, dout, lse, dq, dk, dv, plan, of_lse, deterministic=deterministic
        )
        _compile(kernel, key)
    workspace = _workspace(kernel, q.device)
    kernel.execute(
        q, k, v, out, dout, lse, dq, dk, dv, plan, of_lse, workspace=workspace,
        softmax_scale=options.softmax_scale, current_stream=_noted_stream(planned, q.device, deterministic),
    )  # fmt: skip


def _compile(kernel: Any, key: tuple) -> None:
    with plans.building:
        kernel.check_support()
        kernel.compile()
    _kernels.put(key, kernel, 0)


def _noted_stream(planned: Planned, device: torch.device, deterministic: bool) -> torch.cuda.Stream | None:
    """The current stream at its first use of a plan, which notes that it reads the plan's memory; None afterwards."""
    stream = torch.cuda.current_stream(device)
    return stream if planned.first_use(stream, deterministic) else None


def _workspace(kernel: Any, device: torch.device) -> Tensor | None:
    return torch.empty(kernel.workspace_size, dtype=torch.uint8, device=device) if kernel.workspace_size else None


def _form(plan: Any) -> object:
    """By what of a mask, beside its shape, kernels are chosen on Blackwell."""
    return getattr(getattr(plan, "_packed_plan", None), "narrow_workset", None)


def _sizes(plan: Any, deterministic: bool) -> tuple[int, ...]:
    """By what of a mask's sequences buffers of a backward have their sizes."""
    facts = plan.metadata
    return facts.batch_size, *((facts.max_seqlen_q, facts.max_seqlen_k) if deterministic else ())


def _shaped(plan: Any, *tensors: Tensor | None) -> tuple[Any, ...]:
    """The tensors with the dimensions that a plan takes."""
    return tensors if plans.is_split(plan) else tuple(None if t is None else t[None] for t in tensors)


def _layouts(*tensors: Tensor) -> tuple:
    return tuple((t.shape, t.stride(), t.dtype, t.device.index) for t in tensors)


@cache
def _zeros(device: torch.device, dtype: torch.dtype) -> Tensor:
    """An output of 0, which all rows share."""
    return torch.zeros(256, dtype=dtype, device=device)


def _is_loadable(t: Tensor, alignment: int) -> bool:
    """Whether kernels can access a tensor in place: aligned rows."""
    elements = alignment // t.element_size()
    return t.stride(-1) == 1 and t.data_ptr() % alignment == 0 and all(s % elements == 0 for s in t.stride()[:-1])


def _loadable(t: Tensor, alignment: int) -> Tensor:
    """The tensor if kernels can read it in place, else a contiguous copy."""
    return t if _is_loadable(t, alignment) else t.clone(memory_format=torch.contiguous_format)
