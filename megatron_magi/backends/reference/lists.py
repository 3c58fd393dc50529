"""Reference attention over lists of single keys: plain formulas, over so many queries at a time as memory is given to.

What a list names is gathered, so the work is that of the listed keys, and a key that is named twice is there twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_magi.backends.reference.attention import weights
from megatron_magi.operands.merge import accumulate_dtype
from megatron_magi.operands.passes import BackwardInputs, ForwardInputs
from megatron_magi.operands.sparse_pattern import SparsePattern

CHUNK_BYTES = 128 << 20
"""Memory for the gathered keys and values, and for the logits, of the queries that are computed together."""


class _Chunk(NamedTuple):
    """Some queries and what they see.

    Attributes:
        rows: which queries.
        key: numbers of keys, ``[num_heads_kv, rows, topk]``; 0 where there is none.
        there: whether there is one, ``[num_heads_kv, rows, 1, topk]``.
        keys, values: ``[num_heads_kv, rows, topk, head_dim]``; zeros where there is none, as key 0 may not be finite.
    """

    rows: slice
    key: Tensor
    there: Tensor
    keys: Tensor
    values: Tensor

    def grouped(self, x: Tensor) -> Tensor:
        """``[num_rows, num_heads_q, ...]`` as ``[num_heads_kv, rows, heads of a key head, ...]``."""
        return x[self.rows].to(self.keys.dtype).unflatten(1, (len(self.key), -1)).transpose(0, 1)


def _zero_if_absent(rows: Tensor, there: Tensor) -> Tensor:
    """``[num_heads_kv, rows, topk, ...]`` with zeros where there is no key; ``there`` as of a `_Chunk`."""
    return rows.masked_fill(~there.transpose(2, 3), 0)


def _chunks(q: Tensor, k: Tensor, v: Tensor, pattern: SparsePattern) -> Iterator[_Chunk]:
    """All queries in turn; at least one chunk, which may be empty."""
    dtype, num_keys, heads_kv = accumulate_dtype(q.dtype), k.shape[0], k.shape[1]
    entries = pattern.tensors[0] if num_keys else pattern.tensors[0][..., :0]
    width = max(entries.shape[2], 1) * (heads_kv * (k.shape[2] + v.shape[2]) + 4 * q.shape[1])
    step = max(1, CHUNK_BYTES // (width * dtype.itemsize))
    head = torch.arange(heads_kv, device=k.device)[:, None, None]
    for first in range(0, max(q.shape[0], 1), step):
        listed = entries[:, first : first + step].long()
        there = (listed >= 0) & (listed < num_keys)
        key = listed.where(there, 0).expand(heads_kv, -1, -1)
        there = there.expand_as(key)[:, :, None]
        rows = (_zero_if_absent(x[key, head].to(dtype), there) for x in (k, v))
        yield _Chunk(slice(first, first + step), key, there, *rows)


def forward(
    inputs: ForwardInputs, pattern: SparsePattern, softmax_scale: float, return_max_logits: bool = False
) -> tuple[Tensor, Tensor, Tensor | None]:
    """See `megatron_magi.backends.reference.sparse.forward`."""
    q, k, v, sinks = inputs
    if sinks is not None:
        sinks = sinks.to(accumulate_dtype(q.dtype)).expand(q.shape[:2])
    outs, lses, tops = [], [], []
    for chunk in _chunks(q, k, v, pattern):
        logits = (chunk.grouped(q) @ chunk.keys.transpose(2, 3) * softmax_scale).masked_fill(~chunk.there, -torch.inf)
        p, lse = weights(logits, None if sinks is None else chunk.grouped(sinks))
        outs.append((p @ chunk.values).transpose(0, 1).flatten(1, 2).to(q.dtype))
        lses.append(lse.transpose(0, 1).flatten(1, 2))
        if return_max_logits:
            least = logits.new_full((*lse.shape, 1), -torch.inf)
            tops.append(torch.cat([logits, least], -1).amax(-1).transpose(0, 1).flatten(1, 2))
    top = None
    if return_max_logits:
        top = torch.cat([*tops, tops[0].new_full((1, q.shape[1]), -torch.inf)]).amax(0)
    return torch.cat(outs), torch.cat(lses), top


def backward(inputs: BackwardInputs, pattern: SparsePattern, softmax_scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """See `megatron_magi.backends.reference.sparse.backward`; dk and dv in the dtype of sums."""
    q, k, v, dout, lse, delta = inputs
    dtype = accumulate_dtype(q.dtype)
    dq, dk, dv = [], k.new_zeros(k.shape, dtype=dtype), v.new_zeros(v.shape, dtype=dtype)
    shift = lse.masked_fill(lse == -torch.inf, 0)
    head = torch.arange(k.shape[1], device=k.device)[:, None, None]
    for chunk in _chunks(q, k, v, pattern):
        query, grad = chunk.grouped(q), chunk.grouped(dout)
        logits = (query @ chunk.keys.transpose(2, 3) * softmax_scale).masked_fill(~chunk.there, -torch.inf)
        p = torch.exp(logits - chunk.grouped(shift)[..., None])
        ds = p * (grad @ chunk.values.transpose(2, 3) - chunk.grouped(delta)[..., None]) * softmax_scale
        dq.append((ds @ chunk.keys).transpose(0, 1).flatten(1, 2).to(q.dtype))
        places = (chunk.key * k.shape[1] + head).flatten()
        _add_rows(dk, places, _zero_if_absent(ds.transpose(2, 3) @ query, chunk.there))
        _add_rows(dv, places, _zero_if_absent(p.transpose(2, 3) @ grad, chunk.there))
    return torch.cat(dq), dk, dv


def _add_rows(sums: Tensor, places: Tensor, rows: Tensor) -> None:
    """Adds ``rows``, ``[..., head_dim]``, to ``sums``, ``[num_keys, num_heads_kv, head_dim]``, always in one order."""
    into, rows = sums.view(-1, sums.shape[2]), rows.reshape(-1, sums.shape[2])
    if sums.is_cuda:
        into.index_put_((places,), rows, accumulate=True)  # sorts; index_add_ adds atomically there
    else:
        into.index_add_(0, places, rows)
