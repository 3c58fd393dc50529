"""FlashAttention 2 (package flash-attn, 2.7 and newer) with a sink; names and arguments of ``magi_attn_extensions``.

The functions are those of flash-attn with ``sink`` and ``sink_layout`` (see `attention_with_sink`) behind the tensors.
With ``return_attn_probs`` they return ``(out, lse, None)``; the mask of dropout, which flash-attn returns for its own
tests, is not available.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_magi.extensions.options import checked, length
from megatron_magi.extensions.sink import Tensors, attention_with_sink, check_tensors, kernel_module

_HEAD_DIM_GRAIN = 8


def _module() -> ModuleType:
    return kernel_module("flash_attn.flash_attn_interface", "fa2_*_with_sink need the package flash-attn, 2.7 or newer")


class _Options(NamedTuple):
    """Arguments of both functions below, in their order."""

    dropout_p: float
    softmax_scale: float | None
    causal: bool
    window_size: tuple[int, int]
    softcap: float
    alibi_slopes: Tensor | None
    deterministic: bool
    return_attn_probs: bool


@dataclass(frozen=True, eq=False)
class _FlashAttention2:
    """``lengths`` are cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k of packed sequences."""

    options: _Options
    softmax_scale: float
    lengths: tuple
    empty_lse: float = math.inf

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensors]:
        given, (left, right) = self.options, self.options.window_size
        run = getattr(_module(), f"_wrapped_flash_attn_{'varlen_' if self.lengths else ''}forward")
        options = {
            "causal": given.causal,
            "window_size_left": left,
            "window_size_right": right,
            "softcap": given.softcap,
            "alibi_slopes": given.alibi_slopes,
            "return_softmax": False,
        }
        out, lse, _, rng_state = run(q, k, v, *self.lengths, given.dropout_p, self.softmax_scale, **options)
        return out, lse, (rng_state,)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, kept: Tensors
    ) -> tuple[Tensor, Tensor, Tensor]:
        grads, given = (torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)), self.options
        run = getattr(_module(), f"_wrapped_flash_attn_{'varlen_' if self.lengths else ''}backward")
        options = (given.dropout_p, self.softmax_scale, given.causal, *given.window_size, given.softcap)
        options += (given.alibi_slopes, given.deterministic)
        run(dout, q, k, v, out, lse, *grads, *self.lengths, *options, rng_state=kept[0])
        return grads


def _attend(
    q: Tensor, k: Tensor, v: Tensor, lengths: tuple, sink: Tensor | None, sink_layout: str, options: _Options
) -> Tensor | tuple[Tensor, Tensor, None]:
    check_tensors(q, k, v)
    options = checked(options)
    if options.return_attn_probs and options.dropout_p:
        raise ValueError("return_attn_probs: the mask of dropout is not available; set dropout_p=0")
    head_dim = q.shape[-1]
    scale = head_dim**-0.5 if options.softmax_scale is None else options.softmax_scale
    pad = (0, -head_dim % _HEAD_DIM_GRAIN)
    if pad[1]:
        q, k, v = (torch.nn.functional.pad(x, pad) for x in (q, k, v))
    out, lse = attention_with_sink(_FlashAttention2(options, scale, lengths), q, k, v, sink, sink_layout)
    out = out[..., :head_dim]
    return (out, lse, None) if options.return_attn_probs else out


def fa2_func_with_sink(
    q,
    k,
    v,
    sink=None,
    sink_layout="sh",
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
):
    """``flash_attn_func`` with a sink. Differentiable.

    Args:
        q, k, v: fp16 or bf16 ``[batch_size, seqlen, num_heads, head_dim]``.
        sink: ``[num_sinks, num_heads_q]``, or with ``sink_layout="ssh"`` ``[batch_size, seqlen_q, num_sinks,
            num_heads_q]``; logits, best in fp32. None for none.
        others: those of flash-attn.

    Returns:
        out like q; with ``return_attn_probs`` ``(out, lse, None)``, lse fp32 ``[batch_size, num_heads_q, seqlen_q]``,
        natural log, the sink in it.

    Raises:
        ImportError: flash-attn is not installed.
        ValueError: the sink's shape does not fit; an option is of another kind; ``return_attn_probs`` with dropout.
    """
    options = _Options(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )
    return _attend(q, k, v, (), sink, sink_layout, options)


def fa2_qkvpacked_func_with_sink(qkv, sink=None, sink_layout="sh", *args, **options):
    """``flash_attn_qkvpacked_func`` with a sink: qkv ``[batch_size, seqlen, 3, num_heads, head_dim]``.

    Further arguments: those of `fa2_func_with_sink` from ``dropout_p`` on.
    """
    return fa2_func_with_sink(*qkv.unbind(-3), sink, sink_layout, *args, **options)


def fa2_kvpacked_func_with_sink(q, kv, sink=None, sink_layout="sh", *args, **options):
    """``flash_attn_kvpacked_func`` with a sink: kv ``[batch_size, seqlen, 2, num_heads, head_dim]``.

    Further arguments: those of `fa2_func_with_sink` from ``dropout_p`` on.
    """
    return fa2_func_with_sink(q, *kv.unbind(-3), sink, sink_layout, *args, **options)


def fa2_varlen_func_with_sink(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    sink=None,
    sink_layout="sh",
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    block_table=None,
):
    """``flash_attn_varlen_func`` with a sink: q, k, v ``[total_seqlen, num_heads, head_dim]``.

    Otherwise as `fa2_func_with_sink`; a sink by rows is ``[total_seqlen_q, num_sinks, num_heads_q]``, lse
    ``[num_heads_q, total_seqlen_q]``.

    Raises:
        ValueError: also where ``block_table`` is given: paged keys have no backward.
    """
    if block_table is not None:
        raise ValueError("block_table: not supported")
    longest = (length(max_seqlen_q, "max_seqlen_q"), length(max_seqlen_k, "max_seqlen_k"))
    lengths = (cu_seqlens_q, cu_seqlens_k, *longest)
    options = _Options(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )
    return _attend(q, k, v, lengths, sink, sink_layout, options)


def fa2_varlen_qkvpacked_func_with_sink(qkv, cu_seqlens, max_seqlen, sink=None, sink_layout="sh", *args, **options):
    """``flash_attn_varlen_qkvpacked_func`` with a sink: qkv ``[total_seqlen, 3, num_heads, head_dim]``.

    Further arguments: those of `fa2_varlen_func_with_sink` from ``dropout_p`` on.
    """
    lengths = (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    return fa2_varlen_func_with_sink(*qkv.unbind(-3), *lengths, sink, sink_layout, *args, **options)


def fa2_varlen_kvpacked_func_with_sink(
    q, kv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, sink=None, sink_layout="sh", *args, **options
):
    """``flash_attn_varlen_kvpacked_func`` with a sink: kv ``[total_seqlen, 2, num_heads, head_dim]``.

    Further arguments: those of `fa2_varlen_func_with_sink` from ``dropout_p`` on.
    """
    lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return fa2_varlen_func_with_sink(q, *kv.unbind(-3), *lengths, sink, sink_layout, *args, **options)
