"""FlashAttention 4 (flash_attn.cute) with sinks; names and arguments of ``magi_attn_extensions``.

FlashAttention 4 has a sink of its own, one a head. These take any number, and one for each row. With
``return_attn_probs`` they return ``(out, lse)``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

from torch import Tensor

from megatron_magi.extensions.options import checked, length
from megatron_magi.extensions.sink import Tensors, attention_with_sink, check_tensors, kernel_module


def _module() -> ModuleType:
    return kernel_module("flash_attn.cute.interface", "fa4_*_with_sink need FlashAttention 4")


class _Options(NamedTuple):
    """Arguments of both functions below, in their order."""

    softmax_scale: float | None
    causal: bool
    softcap: float
    num_splits: int
    pack_gqa: bool | None
    deterministic: bool
    return_attn_probs: bool


@dataclass(frozen=True, eq=False)
class _FlashAttention4:
    """``shared`` are options of both passes: scale, mask and lengths of packed sequences."""

    shared: dict[str, Any]
    options: _Options
    empty_lse: float = -math.inf

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensors]:
        own = {"num_splits": self.options.num_splits, "pack_gqa": self.options.pack_gqa}
        out, lse, *_ = _module()._flash_attn_fwd(q, k, v, return_lse=True, **self.shared, **own)
        return out, lse, ()

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, kept: Tensors
    ) -> tuple[Tensor, Tensor, Tensor]:
        own = {"deterministic": self.options.deterministic}
        dq, dk, dv, *_ = _module()._flash_attn_bwd(q, k, v, out, dout, lse, **self.shared, **own)
        return dq, dk, dv


def _attend(
    q: Tensor, k: Tensor, v: Tensor, lengths: dict[str, Any], sink: Tensor | None, sink_layout: str, options: _Options
) -> Tensor | tuple[Tensor, Tensor]:
    check_tensors(q, k, v)
    options = checked(options)
    scale = q.shape[-1] ** -0.5 if options.softmax_scale is None else options.softmax_scale
    shared = {"softmax_scale": scale, "causal": options.causal, "softcap": options.softcap, **lengths}
    out, lse = attention_with_sink(_FlashAttention4(shared, options), q, k, v, sink, sink_layout)
    return (out, lse) if options.return_attn_probs else out


def fa4_func_with_sink(
    q,
    k,
    v,
    sink=None,
    sink_layout="sh",
    softmax_scale=None,
    causal=False,
    softcap=0.0,
    num_splits=1,
    pack_gqa=None,
    deterministic=False,
    return_attn_probs=False,
):
    """``flash_attn_func`` with a sink: q, k, v ``[batch_size, seqlen, num_heads, head_dim]``. Differentiable.

    Args:
        sink, sink_layout: as in `fa2_func_with_sink`.
        others: those of FlashAttention 4.

    Returns:
        out like q; with ``return_attn_probs`` ``(out, lse)``, lse fp32 ``[batch_size, num_heads_q, seqlen_q]``, natural
        log, the sink in it.

    Raises:
        ImportError: FlashAttention 4 is not installed.
        ValueError: the sink's shape does not fit; an option is of another kind.
    """
    options = _Options(softmax_scale, causal, softcap, num_splits, pack_gqa, deterministic, return_attn_probs)
    return _attend(q, k, v, {}, sink, sink_layout, options)


def fa4_varlen_func_with_sink(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    sink=None,
    sink_layout="sh",
    softmax_scale=None,
    causal=False,
    softcap=0.0,
    num_splits=1,
    pack_gqa=None,
    deterministic=False,
    return_attn_probs=False,
):
    """``flash_attn_varlen_func`` with a sink: q, k, v ``[total_seqlen, num_heads, head_dim]``.

    Otherwise as `fa4_func_with_sink`; a sink by rows is ``[total_seqlen_q, num_sinks, num_heads_q]``, lse
    ``[num_heads_q, total_seqlen_q]``.
    """
    lengths = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    longest = {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
    lengths |= {name: length(value, name) for name, value in longest.items()}
    options = _Options(softmax_scale, causal, softcap, num_splits, pack_gqa, deterministic, return_attn_probs)
    return _attend(q, k, v, lengths, sink, sink_layout, options)
