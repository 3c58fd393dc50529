"""FlashAttention 3 (module flash_attn_interface) with a sink; names and arguments of ``magi_attn_extensions``.

The functions are those of FlashAttention 3 with ``sink`` and ``sink_layout`` (see `attention_with_sink`). With
``return_attn_probs`` they return ``(out, lse)``. ``qv`` and ``attention_chunk`` are refused: they have no backward.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_magi.checks import integer
from megatron_magi.extensions.options import checked, length
from megatron_magi.extensions.sink import Tensors, attention_with_sink, check_tensors, kernel_module


def _module() -> ModuleType:
    return kernel_module("flash_attn_interface", "fa3_*_with_sink need FlashAttention 3")


class _Options(NamedTuple):
    """Arguments of both functions below, in their order."""

    softmax_scale: float | None
    causal: bool
    qv: Tensor | None
    q_descale: Tensor | None
    k_descale: Tensor | None
    v_descale: Tensor | None
    window_size: tuple[int, int]
    attention_chunk: int
    softcap: float
    num_splits: int
    pack_gqa: bool | None
    deterministic: bool
    sm_margin: int
    return_attn_probs: bool


@dataclass(frozen=True, eq=False)
class _FlashAttention3:
    """``lengths`` are cu_seqlens, seqused and max_seqlen of packed sequences, each of queries and keys."""

    options: _Options
    softmax_scale: float
    lengths: tuple
    empty_lse: float = -math.inf

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensors]:
        options, (left, right) = self.options, self.options.window_size
        names = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "max_seqlen_q", "max_seqlen_k")
        as_given = ("causal", "q_descale", "k_descale", "v_descale", "softcap", "num_splits", "pack_gqa", "sm_margin")
        out, lse, *_ = _module()._flash_attn_forward(
            q,
            k,
            v,
            **dict(zip(names, self.lengths, strict=True)),
            softmax_scale=self.softmax_scale,
            window_size_left=left,
            window_size_right=right,
            **{name: getattr(options, name) for name in as_given},
        )
        return out, lse, ()

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, kept: Tensors
    ) -> tuple[Tensor, Tensor, Tensor]:
        grads, given = (torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)), self.options
        # By position: versions name some of them differently.
        options = (self.softmax_scale, given.causal, *given.window_size, given.softcap, given.deterministic)
        _module()._flash_attn_backward(dout, q, k, v, out, lse, *self.lengths, *grads, *options, given.sm_margin)
        return grads


_NO_LENGTHS = (None,) * 6


def _attend(
    q: Tensor, k: Tensor, v: Tensor, lengths: tuple, sink: Tensor | None, sink_layout: str, options: _Options
) -> Tensor | tuple[Tensor, Tensor]:
    check_tensors(q, k, v)
    options = checked(options)
    for name, is_given in (("qv", options.qv is not None), ("attention_chunk", bool(options.attention_chunk))):
        if is_given:
            raise ValueError(f"{name}: not supported, it has no backward")
    scale = q.shape[-1] ** -0.5 if options.softmax_scale is None else options.softmax_scale
    out, lse = attention_with_sink(_FlashAttention3(options, scale, lengths), q, k, v, sink, sink_layout)
    return (out, lse) if options.return_attn_probs else out


def fa3_func_with_sink(
    q,
    k,
    v,
    sink=None,
    sink_layout="sh",
    softmax_scale=None,
    causal=False,
    qv=None,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    window_size=(-1, -1),
    attention_chunk=0,
    softcap=0.0,
    num_splits=1,
    pack_gqa=None,
    deterministic=False,
    sm_margin=0,
    return_attn_probs=False,
):
    """``flash_attn_func`` with a sink: q, k, v ``[batch_size, seqlen, num_heads, head_dim]``. Differentiable.

    Args:
        sink, sink_layout: as in `fa2_func_with_sink`.
        others: those of FlashAttention 3.

    Returns:
        out like q; with ``return_attn_probs`` ``(out, lse)``, lse fp32 ``[batch_size, num_heads_q, seqlen_q]``, natural
        log, the sink in it.

    Raises:
        ImportError: FlashAttention 3 is not installed.
        ValueError: the sink's shape does not fit; an option is of another kind; ``qv`` or ``attention_chunk`` is given.
    """
    options = _Options(
        softmax_scale, causal, qv, q_descale, k_descale, v_descale, window_size, attention_chunk, softcap, num_splits,
        pack_gqa, deterministic, sm_margin, return_attn_probs,
    )  # fmt: skip
    return _attend(q, k, v, _NO_LENGTHS, sink, sink_layout, options)


def fa3_varlen_func_with_sink(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    sink=None,
    sink_layout="sh",
    seqused_q=None,
    seqused_k=None,
    softmax_scale=None,
    causal=False,
    qv=None,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    window_size=(-1, -1),
    attention_chunk=0,
    softcap=0.0,
    num_splits=1,
    pack_gqa=None,
    deterministic=False,
    sm_margin=0,
    return_attn_probs=False,
):
    """``flash_attn_varlen_func`` with a sink: q, k, v ``[total_seqlen, num_heads, head_dim]``.

    Otherwise as `fa3_func_with_sink`; a sink by rows is ``[total_seqlen_q, num_sinks, num_heads_q]``, lse
    ``[num_heads_q, total_seqlen_q]``.
    """
    longest = (length(max_seqlen_q, "max_seqlen_q"), length(max_seqlen_k, "max_seqlen_k"))
    lengths = (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, *longest)
    options = _Options(
        softmax_scale, causal, qv, q_descale, k_descale, v_descale, window_size, attention_chunk, softcap, num_splits,
        pack_gqa, deterministic, sm_margin, return_attn_probs,
    )  # fmt: skip
    return _attend(q, k, v, lengths, sink, sink_layout, options)


def fa3_qkvpacked_func_with_sink(
    qkv,
    sink=None,
    sink_layout="sh",
    softmax_scale=None,
    causal=False,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    window_size=(-1, -1),
    attention_chunk=0,
    softcap=0.0,
    deterministic=False,
    num_heads_q=None,
    sm_margin=0,
    return_attn_probs=False,
):
    """``flash_attn_qkvpacked_func`` with a sink.

    Args:
        qkv: ``[batch_size, seqlen, 3, num_heads, head_dim]``, or ``[batch_size, seqlen, num_heads, head_dim]`` with the
            heads of q, k and v one after another, ``num_heads_q`` of them of q.

    Raises:
        ValueError: ``num_heads_q`` is needed, or leaves an odd number of heads.
    """
    if qkv.ndim == 5:
        q, k, v = qkv.unbind(-3)
    else:
        others = None if num_heads_q is None else qkv.shape[-2] - integer(num_heads_q, "num_heads_q")
        if others is None or others <= 0 or others % 2:
            raise ValueError(f"num_heads_q: of {qkv.shape[-2]} heads, got {num_heads_q}")
        q, k, v = qkv.split([num_heads_q, others // 2, others // 2], dim=-2)
    return fa3_func_with_sink(
        q,
        k,
        v,
        sink,
        sink_layout,
        softmax_scale,
        causal,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        window_size=window_size,
        attention_chunk=attention_chunk,
        softcap=softcap,
        deterministic=deterministic,
        sm_margin=sm_margin,
        return_attn_probs=return_attn_probs,
    )
