"""Which keys each query attends to, by the scores of an indexer, and the loss that trains the indexer.

An indexer has a few heads of queries, one head of keys, and a weight for each query and head. As in section 2.1 of the
DeepSeek-V3.2 report (https://github.com/deepseek-ai/DeepSeek-V3.2-Exp/blob/main/DeepSeek_V3_2.pdf) its score is

    I[t, s] = sum over heads h of weights[t, h] * relu(q[t, h] . k[s])

and its loss the divergence of softmax(I[t]) from the attention's own probabilities, summed over heads and normalised:

    L[t] = sum over keys s of p[t, s] * (log p[t, s] - log softmax(I[t])[s])

Scores are computed in fp32 for some queries and heads at a time: memory does not grow with the square of the length.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_magi.ops.derivatives import once_differentiable

ROW_ELEMENTS = 1 << 24
"""Queries times keys of a chunk: 64 MiB of scores."""
HEAD_ELEMENTS = 1 << 26
"""The same times heads: 256 MiB."""
_LEAST = 1e-10
"""Probabilities are no smaller in logarithms and divisions, as in Megatron."""


@dataclass(frozen=True)
class Scores:
    """What an indexer has computed of this rank's queries and of all keys.

    Attributes:
        q: ``[num_rows, num_heads, head_dim]``.
        weights: ``[num_rows, num_heads]``.
        k: ``[num_keys, head_dim]``, in the order of the sequence.
        visible: int ``[2, n, num_rows]``, first and past-the-last of the keys that a query may choose, in n intervals.
        relu: of products of queries and keys; else these themselves.
    """

    q: Tensor
    weights: Tensor
    k: Tensor
    visible: Tensor
    relu: bool = True

    def chunks(self) -> Iterator[slice]:
        """Rows whose scores are computed together."""
        num_rows, num_keys = self.q.shape[0], self.k.shape[0]
        size = max(1, ROW_ELEMENTS // max(num_keys, 1))
        return (slice(start, min(start + size, num_rows)) for start in range(0, num_rows, size))

    def visibility(self, rows: slice) -> Tensor:
        """Bool ``[rows, num_keys]``."""
        key = torch.arange(self.k.shape[0], device=self.k.device)
        seen = torch.zeros((rows.stop - rows.start, len(key)), dtype=torch.bool, device=key.device)
        for first, past in self.visible[:, :, rows, None].unbind(1):
            seen |= (key >= first) & (key < past)
        return seen

    def products(self, rows: slice) -> Iterator[tuple[slice, Tensor]]:
        """Heads, and their products of queries and keys, fp32 ``[rows, heads, num_keys]``."""
        keys = self.k.float().t()
        for heads in _head_chunks(self.q.shape[1], rows, self.k.shape[0]):
            yield heads, self.q[rows, heads].float() @ keys

    def of(self, rows: slice) -> Tensor:
        """The scores, fp32 ``[rows, num_keys]``."""
        total = None
        for heads, product in self.products(rows):
            # Multiplied and added up as in Megatron, so that of keys with almost the same score the same is chosen.
            product = product.relu_() if self.relu else product
            part = product.mul_(self.weights[rows, heads, None].float()).sum(1)
            total = part if total is None else total + part
        return total


def _head_chunks(num_heads: int, rows: slice, num_keys: int) -> Iterator[slice]:
    size = max(1, HEAD_ELEMENTS // max((rows.stop - rows.start) * num_keys, 1))
    return (slice(start, min(start + size, num_heads)) for start in range(0, num_heads, size))


@torch.no_grad()
def best_keys(scores: Scores, topk: int) -> Tensor:
    """The ``topk`` visible keys with the largest scores.

    Returns:
        int32 ``[num_rows, min(topk, num_keys)]``, ascending; -1 at the end where fewer are visible.
    """
    num_keys = scores.k.shape[0]
    found = [
        _best(scores.of(rows).masked_fill_(~scores.visibility(rows), -torch.inf), min(topk, num_keys))
        for rows in scores.chunks()
    ]
    return torch.cat(found) if found else scores.visible.new_empty((0, min(topk, num_keys)))


def _best(values: Tensor, topk: int) -> Tensor:
    top, keys = values.topk(topk, dim=-1, sorted=False)
    num_keys = values.shape[1]
    keys = keys.masked_fill_(top == -torch.inf, num_keys).sort(-1).values
    return keys.masked_fill_(keys == num_keys, -1).int()


@dataclass(frozen=True)
class Target:
    """The attention that an indexer is to predict.

    Attributes:
        query: ``[num_rows, num_heads, head_dim]``, this rank's.
        key: ``[num_keys, num_heads or 1, head_dim]``, in the order of the sequence.
        softmax_scale: of logits.
        tp_group: ranks that have other heads of the same queries.
        lists: int ``[num_rows, topk]``, keys to which attention and indexer are confined; None for all visible ones.
    """

    query: Tensor
    key: Tensor
    softmax_scale: float
    tp_group: dist.ProcessGroup
    lists: Tensor | None = None

    def confined(self, rows: slice, visible: Tensor) -> Tensor:
        """``visible``, bool ``[rows, num_keys]``, without keys that the lists do not name."""
        if self.lists is None:
            return visible
        lists, num_keys = self.lists[rows].long(), visible.shape[1]
        named = visible.new_zeros((visible.shape[0], num_keys + 1))
        named.scatter_(1, lists.where(lists >= 0, num_keys), True)
        return visible & named[:, :num_keys]

    def of(self, rows: slice, seen: Tensor) -> Tensor:
        """Mean over heads of the attention's probabilities, fp32 ``[rows, num_keys]``; rows without keys are 0."""
        total = torch.zeros(seen.shape, dtype=torch.float32, device=seen.device)
        for heads in _head_chunks(self.query.shape[1], rows, seen.shape[1]):
            keys = self.key if self.key.shape[1] == 1 else self.key[:, heads]
            query, keys = (x.float().transpose(0, 1) for x in (self.query[rows, heads], keys))
            logits = (query @ keys.transpose(1, 2)).mul_(self.softmax_scale)
            total += masked_softmax(logits, seen).sum(0)
        if self.tp_group.size() > 1:
            dist.all_reduce(total, group=self.tp_group)
        return total / total.sum(-1, keepdim=True).clamp_min(_LEAST)


def masked_softmax(x: Tensor, seen: Tensor) -> Tensor:
    """Over the last dimension, of what is seen; 0 elsewhere, and in rows that see nothing."""
    return x.masked_fill(~seen, -torch.inf).softmax(-1).masked_fill(~seen, 0.0)


def indexer_loss(scores: Scores, target: Target) -> Tensor:
    """The sum of the losses of this rank's queries, fp32 ``[]``; differentiable in q, weights and k of the scores.

    Gradients are computed in the forward, chunk by chunk, in place of what a backward would need to compute them.
    Differentiable once: a second derivative is a RuntimeError.
    """
    operands = scores.q, scores.weights, scores.k
    # Saved for the backward, which is a function of q, weights and k; these themselves would take memory until then.
    paths = [x[:0].clone() for x in operands]
    return _IndexerLoss.apply(*operands, scores, target, *paths)


class _IndexerLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, weights: Tensor, k: Tensor, scores: Scores, target: Target, *paths: Tensor
    ) -> Tensor:
        grads = [torch.zeros_like(x, dtype=torch.float32) for x in (q, weights, k)]
        losses = []
        for rows in scores.chunks():
            seen = target.confined(rows, scores.visibility(rows))
            wanted = target.of(rows, seen)
            predicted = scores.of(rows).masked_fill_(~seen, -torch.inf).log_softmax(-1)
            terms = wanted * (wanted.clamp_min(_LEAST).log() - predicted)
            losses.append(terms.masked_fill_(~seen, 0.0).sum())
            gradient = (predicted.exp() - wanted).masked_fill_(~seen, 0.0)
            _accumulate(grads, scores, rows, gradient)
        # fp16 has no room for gradients that are yet to be scaled.
        kept = [g if x.dtype == torch.float16 else g.to(x.dtype) for g, x in zip(grads, (q, weights, k), strict=True)]
        ctx.save_for_backward(*kept, *paths)
        ctx.dtypes = (q.dtype, weights.dtype, k.dtype)
        return torch.stack(losses).sum() if losses else grads[0].sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, saved: tuple[Tensor, ...], dloss: Tensor) -> tuple[Tensor | None, ...]:
        dq, dweights, dk = ((g.float() * dloss).to(dtype) for g, dtype in zip(saved[:3], ctx.dtypes, strict=True))
        return dq, dweights, dk, None, None, None, None, None


def _accumulate(grads: list[Tensor], scores: Scores, rows: slice, gradient: Tensor) -> None:
    """Adds to the gradients of q, weights and k what follows from that of the scores of some rows."""
    dq, dweights, dk = grads
    for heads, product in scores.products(rows):
        dproduct = gradient[:, None] * scores.weights[rows, heads, None].float()
        if scores.relu:
            dproduct *= product > 0
            product.relu_()
        dweights[rows, heads] = torch.einsum("rhk,rk->rh", product, gradient)
        dq[rows, heads] = dproduct @ scores.k.float()
        dk += torch.einsum("rhk,rhd->kd", dproduct, scores.q[rows, heads].float())
