"""Attention over lists of single keys, by the name and arguments that ``magi_attn_extensions`` has for it."""

from __future__ import annotations

from torch import Tensor

from megatron_magi.ops.sparse_attention import index_sparse_attention

BACKENDS = ("flex", "ffa_sparse_load", "ffa_index_attn", "sdpa")


def dsa_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    index_map: Tensor,
    softmax_scale: float | None = None,
    backend: str = "flex",
) -> tuple[Tensor, Tensor]:
    """Attention in which each query sees a list of single keys for each key head; differentiable in q, k and v.

    `megatron_magi.index_sparse_attention`, which takes the lists by query.

    Args:
        q: ``[num_tokens_q, num_heads_q, head_dim]``, fp16, bf16, fp32 or fp64.
        k, v: ``[num_tokens_k, num_heads_kv, head_dim]``.
        index_map: int ``[num_heads_kv, num_tokens_q, topk]``: numbers of keys in any order; -1 is passed over.
        softmax_scale: ``1 / sqrt(head_dim)`` when None.
        backend: ``flex``, ``ffa_sparse_load``, ``ffa_index_attn`` or ``sdpa``; without effect, as all are the same
            attention: the device and the dtype decide which kernel computes it.

    Returns:
        ``(out, lse)``: ``[num_tokens_q, num_heads_q, head_dim]`` in the dtype of q, and ``[num_tokens_q,
        num_heads_q]``, fp32 (fp64 for fp64 inputs), without a gradient.

    Raises:
        ValueError: an argument, named in the message, has a wrong shape, dtype or value.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend: {backend!r} is unknown; use one of {', '.join(BACKENDS)}")
    shape = (k.shape[1], q.shape[0])
    if index_map.dim() != 3 or tuple(index_map.shape[:2]) != shape:
        raise ValueError(
            f"index_map: {list(index_map.shape)} is not [num_heads_kv, num_tokens_q, topk] = "
            f"[{shape[0]}, {shape[1]}, topk]; index_sparse_attention takes lists by query"
        )
    out, meta = index_sparse_attention(q, k, v, index_map.transpose(0, 1), softmax_scale=softmax_scale)
    return out, meta.lse
