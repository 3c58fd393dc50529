"""torch's ``scaled_dot_product_attention`` with a sink."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from megatron_magi.checks import flag
from megatron_magi.extensions.options import finite
from megatron_magi.extensions.sink import Tensors, attention_with_sink, check_tensors
from megatron_magi.operands.options import check_tensor

_LSE_GRAIN, _BIAS_GRAIN, _HEAD_DIM_GRAIN, _MOST_HEAD_DIM = 32, 16, 8, 256
"""Multiples in which torch's CUDA kernels take rows of lse, columns of a mask and head dims; the largest head dim."""


def sdpa_func_with_sink(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None = None,
    sink_layout: str = "sh",
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """``scaled_dot_product_attention`` with a sink. Differentiable, except in the mask.

    Args:
        q, k, v: ``[batch_size, num_heads, seqlen, head_dim]``, as torch has them, on a CPU or with CUDA. There may be
            no queries, no keys and no batch.
        sink: ``[num_sinks, num_heads]`` with ``sink_layout="sh"``, ``[batch_size, seqlen_q, num_sinks, num_heads]``
            with "ssh".
        attn_mask: bool (True is seen) or added to logits; broadcastable to ``[batch_size, num_heads, seqlen_q,
            seqlen_k]``.
        is_causal, scale, enable_gqa: as torch has them.
        return_lse: return ``(out, lse)``, lse ``[batch_size, num_heads, seqlen_q]``, natural log, the sink in it.

    Raises:
        ValueError: q, k and v do not fit together, or the sink or the mask not to them; a mask with ``is_causal``,
            or one that needs a gradient; an option is of another kind.
    """
    is_causal, enable_gqa = flag(is_causal, "is_causal"), flag(enable_gqa, "enable_gqa")
    return_lse = flag(return_lse, "return_lse")
    if attn_mask is not None:
        check_tensor("attn_mask", attn_mask)
        if is_causal or attn_mask.requires_grad:
            raise ValueError("attn_mask: not together with is_causal, and without a gradient")
        if attn_mask.dtype != torch.bool and not attn_mask.dtype.is_floating_point:
            raise ValueError(f"attn_mask: expected bool, or floats to add, got {attn_mask.dtype}")
    _check_shapes(q, k, v, enable_gqa)
    if enable_gqa:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scale = q.shape[-1] ** -0.5 if scale is None else finite(scale, "scale")
    head_dim_v = v.shape[-1]
    if q.is_cuda:
        q, k, v = (F.pad(x, (0, -x.shape[-1] % _HEAD_DIM_GRAIN)) for x in (q, k, v))
    elif q.shape[-1] != head_dim_v:  # the kernel takes one for all
        width = max(q.shape[-1], head_dim_v)
        q, k, v = (F.pad(x, (0, width - x.shape[-1])) for x in (q, k, v))
    mask = None if attn_mask is None else _additive(attn_mask, (*q.shape[:3], k.shape[2]), q)
    kernel = _kernel(q, k, v, mask)(scale, is_causal, mask)
    out, lse = attention_with_sink(kernel, *(x.transpose(1, 2) for x in (q, k, v)), sink, sink_layout)
    out = out.transpose(1, 2)[..., :head_dim_v]
    return (out, lse) if return_lse else out


def _check_shapes(q: Tensor, k: Tensor, v: Tensor, enable_gqa: bool) -> None:
    """Raises ValueError, naming the argument: torch's kernels rely on what its own function checks before."""
    check_tensors(q, k, v, of_heads=-3)
    if q.ndim != 4:
        raise ValueError(f"q: expected [batch_size, num_heads, seqlen, head_dim], got {list(q.shape)}")
    heads = k.shape[1] if enable_gqa and k.shape[1] and q.shape[1] % k.shape[1] == 0 else q.shape[1]
    expected = [q.shape[0], heads, k.shape[2], q.shape[3]]
    if list(k.shape) != expected:
        raise ValueError(f"k: expected {expected}, got {list(k.shape)}")
    if v.shape[:3] != k.shape[:3]:
        raise ValueError(f"v: expected the batch, heads and tokens of k, {list(k.shape[:3])}, got {list(v.shape)}")


def _additive(mask: Tensor, shape: tuple[int, ...], like: Tensor) -> Tensor:
    if mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, dtype=like.dtype, device=like.device).masked_fill(~mask, -math.inf)
    mask = mask.to(like.dtype)
    if like.is_cuda:
        mask = F.pad(mask, (0, -shape[-1] % _BIAS_GRAIN))[..., : shape[-1]]
    try:
        return mask.expand(shape)
    except RuntimeError:
        raise ValueError(f"attn_mask: expected what broadcasts to {list(shape)}, got {list(mask.shape)}") from None


@dataclass(frozen=True, eq=False)
class _Sdpa:
    """A kernel of torch, for ``[batch_size, num_heads, seqlen, head_dim]``."""

    scale: float
    is_causal: bool
    mask: Tensor | None
    empty_lse: float = -math.inf

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensors]:
        out, lse, kept = self._run(*(x.transpose(1, 2) for x in (q, k, v)))
        if self.mask is not None:  # not every kernel says so of rows that see nothing
            lse = lse.masked_fill((self.mask == -math.inf).all(-1), -math.inf)
        return out.transpose(1, 2), lse, kept

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, kept: Tensors
    ) -> tuple[Tensor, Tensor, Tensor]:
        dout, q, k, v, out = (x.transpose(1, 2) for x in (dout, q, k, v, out))
        # A finite lse hides such a row as well, and is no -inf - -inf.
        grads = self._run_backward(dout, q, k, v, out, lse.masked_fill(lse == -math.inf, 0), kept)
        dq, dk, dv = (x.transpose(1, 2) for x in grads)
        return dq, dk, dv

    def _run(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensors]:
        raise NotImplementedError

    def _run_backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, kept: Tensors
    ) -> tuple[Tensor, Tensor, Tensor]:
        raise NotImplementedError


class _OnCpu(_Sdpa):
    def _run(self, q, k, v):
        run = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return *run(q, k, v, 0.0, self.is_causal, attn_mask=self.mask, scale=self.scale), ()

    def _run_backward(self, dout, q, k, v, out, lse, kept):
        run = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        return run(dout, q, k, v, out, lse, 0.0, self.is_causal, attn_mask=self.mask, scale=self.scale)


class _Flash(_Sdpa):
    def _run(self, q, k, v):
        run = torch.ops.aten._scaled_dot_product_flash_attention
        out, lse, _, _, _, _, seed, offset, _ = run(q, k, v, 0.0, self.is_causal, False, scale=self.scale)
        return out, lse, (seed, offset)

    def _run_backward(self, dout, q, k, v, out, lse, kept):
        run = torch.ops.aten._scaled_dot_product_flash_attention_backward
        lengths = (None, None, q.shape[2], k.shape[2])
        return run(dout, q, k, v, out, lse, *lengths, 0.0, self.is_causal, *kept, scale=self.scale)


class _Efficient(_Sdpa):
    def _run(self, q, k, v):
        run = torch.ops.aten._scaled_dot_product_efficient_attention
        out, lse, seed, offset = run(q, k, v, self.mask, True, 0.0, self.is_causal, scale=self.scale)
        return out, lse[..., : q.shape[2]], (seed, offset)

    def _run_backward(self, dout, q, k, v, out, lse, kept):
        run = torch.ops.aten._scaled_dot_product_efficient_attention_backward
        lse = F.pad(lse, (0, -q.shape[2] % _LSE_GRAIN), value=math.inf)
        grads = [True, True, True, False]
        out = run(dout, q, k, v, self.mask, out, lse, *kept, 0.0, grads, self.is_causal, scale=self.scale)
        return out[:3]


def _kernel(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> type[_Sdpa]:
    """torch's fast kernels, by what they take."""
    if not q.is_cuda:
        return _OnCpu
    is_narrow = q.dtype in (torch.float16, torch.bfloat16) and q.shape[-1] == v.shape[-1] <= _MOST_HEAD_DIM
    return _Flash if is_narrow and mask is None and q.shape[2] == k.shape[2] else _Efficient
