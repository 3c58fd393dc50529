"""Reference sparse attention: plain formulas; seqlen_q x seqlen_k memory, but for lists of single keys."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_magi.backends.reference import lists
from megatron_magi.backends.reference.attention import weights
from megatron_magi.operands.merge import accumulate_dtype
from megatron_magi.operands.passes import BackwardInputs, ForwardInputs
from megatron_magi.operands.sparse_pattern import SparsePattern, num_blocks


def multiplicity(pattern: SparsePattern, num_rows: int, num_keys: int) -> Tensor:
    """How often each query sees each key, ``[lists, num_rows, num_keys]``."""
    rows, columns = num_blocks(num_rows, pattern.q_block), num_blocks(num_keys, pattern.k_block)
    counts = pattern.tensors[0].int() if pattern.is_mask else _count_entries(pattern.tensors, rows, columns)
    counts = counts.repeat_interleave(pattern.q_block, 1)[:, :num_rows]
    counts = counts.repeat_interleave(pattern.k_block, 2)[..., :num_keys]
    if not pattern.causal:
        return counts
    row, key = (torch.arange(n, device=counts.device) for n in (num_rows, num_keys))
    return counts * (key <= row[:, None] + num_keys - num_rows)


def _count_entries(tensors: tuple[Tensor, ...], rows: int, columns: int) -> Tensor:
    entries = tensors[-1].long()
    if len(tensors) == 1:
        inside = torch.ones_like(entries, dtype=torch.bool)
    else:
        at = torch.arange(entries.shape[0], device=entries.device)
        first, past = tensors[0][:, :-1, None], tensors[0][:, 1:, None]
        inside = (at >= first) & (at < past)
        entries = entries.expand_as(inside)
    inside = inside & (entries >= 0) & (entries < columns)
    counts = entries.new_zeros((entries.shape[0], rows, columns + 1))
    return counts.scatter_add_(2, entries.where(inside, columns), inside.long())[..., :columns]


def why_not(device: torch.device, dtype: torch.dtype, dims: tuple[int, int]) -> None:
    """It takes all tensors."""


def packed_heads(group: int) -> int:
    """It has no tiles."""
    del group
    return 1


def forward(
    inputs: ForwardInputs, pattern: SparsePattern, softmax_scale: float, return_max_logits: bool = False
) -> tuple[Tensor, Tensor, Tensor | None]:
    """``(out, lse, max_logits)`` of checked arguments.

    The log-sum-exp of sinks is ``[num_heads_q]`` or ``[num_rows, num_heads_q]``.
    """
    if pattern.k_block == 1:
        return lists.forward(inputs, pattern, softmax_scale, return_max_logits)
    q, k, v, sink_lse = inputs
    dtype, group = accumulate_dtype(q.dtype), q.shape[1] // k.shape[1]
    counts = multiplicity(pattern, q.shape[0], k.shape[0])
    counts = counts.repeat_interleave(q.shape[1] // counts.shape[0], 0)
    keys, values = (t.to(dtype).repeat_interleave(group, 1).transpose(0, 1) for t in (k, v))
    raw = q.to(dtype).transpose(0, 1) @ keys.transpose(1, 2) * softmax_scale
    logits = raw.masked_fill(counts == 0, -torch.inf)
    p, lse = weights(logits, None if sink_lse is None else sink_lse.expand(q.shape[:2]).t(), counts)
    max_logits = None
    if return_max_logits:
        visible = logits.flatten(1)
        max_logits = torch.cat([visible, visible.new_full((len(visible), 1), -torch.inf)], 1).amax(1)
    return (p @ values).transpose(0, 1).to(q.dtype), lse.t().contiguous(), max_logits


def backward(
    inputs: BackwardInputs, pattern: SparsePattern, softmax_scale: float, deterministic: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """``(dq, dk, dv)`` of checked arguments; lse and delta, rowsum(dout * out), as the forward left them."""
    del deterministic
    q, k, v, dout, lse, delta = inputs
    if pattern.k_block == 1:
        dq, dk, dv = lists.backward(inputs, pattern, softmax_scale)
        return dq, dk.to(k.dtype), dv.to(v.dtype)
    dtype, heads_kv = accumulate_dtype(q.dtype), k.shape[1]
    counts = multiplicity(pattern, q.shape[0], k.shape[0])
    counts = counts.repeat_interleave(q.shape[1] // counts.shape[0], 0)
    query, grad = (t.to(dtype).transpose(0, 1) for t in (q, dout))
    keys, values = (t.to(dtype).repeat_interleave(q.shape[1] // heads_kv, 1).transpose(0, 1) for t in (k, v))
    shift = lse.masked_fill(lse == -torch.inf, 0).t()[..., None]
    p = torch.exp((query @ keys.transpose(1, 2) * softmax_scale).masked_fill(counts == 0, -torch.inf) - shift) * counts
    ds = p * (grad @ values.transpose(1, 2) - delta.t()[..., None]) * softmax_scale
    dk, dv = (
        g.unflatten(0, (heads_kv, -1)).sum(1).transpose(0, 1)
        for g in (ds.transpose(1, 2) @ query, p.transpose(1, 2) @ grad)
    )
    return (ds @ keys).transpose(0, 1).to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)
