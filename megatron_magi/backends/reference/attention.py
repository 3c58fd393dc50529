"""Dense reference attention: plain formulas, seqlen_q x seqlen_k memory."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from megatron_magi.mask.dense import dense_bands
from megatron_magi.operands.merge import accumulate_dtype, write_result_
from megatron_magi.operands.options import AttnOptions
from megatron_magi.operands.passes import BackwardInputs, ForwardInputs, ForwardOutput, Gradients


@torch.no_grad()
def forward(inputs: ForwardInputs, bands: np.ndarray, options: AttnOptions, output: ForwardOutput) -> None:
    """Writes attention over ``bands`` to ``output``, or merges it into that; arguments are already checked."""
    q, k, v, sink_lse = inputs
    visible = _visible(bands, q, k)
    q, k, v = _operands(q, k, v, visible)
    logits, _ = _logits(q, k, visible, options)
    p, row_lse = weights(logits, None if sink_lse is None else sink_lse.expand(output.lse.shape).t())
    write_result_(output, (p @ v).transpose(0, 1), row_lse.t())
    if output.max_logits is not None and logits.numel():
        output.max_logits.copy_(logits.amax(dim=(1, 2)))


@torch.no_grad()
def backward(inputs: BackwardInputs, bands: np.ndarray, options: AttnOptions, grads: Gradients) -> None:
    """Writes dq, dk, dv to ``grads``, or adds to them; arguments are already checked.

    With p = exp(s - lse): dv = p^T dout, dp = dout v^T, ds = p * (dp - delta), dq = ds k, dk = ds^T q. ``lse`` and
    ``delta`` may belong to more keys than are given here; the formulas hold for each part.
    """
    q, k, v, dout, lse, delta = inputs
    visible = _visible(bands, q, k)
    num_heads_kv = k.shape[1]
    q, k, v = _operands(q, k, v, visible)
    dout, lse, delta = (
        _hide_rows(t, visible.any(dim=1)).to(q.dtype).transpose(0, 1) for t in (dout, lse[..., None], delta[..., None])
    )
    logits, slope = _logits(q, k, visible, options)
    p = _probabilities(logits, lse[..., 0])
    dv = p.transpose(1, 2) @ dout
    ds = p * (dout @ v.transpose(1, 2) - delta) * slope * options.softmax_scale
    dq = ds @ k
    dk = ds.transpose(1, 2) @ q
    # Query heads that share a key head add up.
    dk, dv = (g.unflatten(0, (num_heads_kv, -1)).sum(dim=1) for g in (dk, dv))
    grads.put(grad.transpose(0, 1) for grad in (dq, dk, dv))


@torch.no_grad()
def weights(logits: Tensor, sinks: Tensor | None, counts: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Weights of keys, and the log-sum-exp of rows; of a row that sees nothing 0 and -inf.

    Weights are divided by their own sum. ``exp(logit - lse)`` has the rounding error of the lse, so that those of keys
    whose large logits are about equal would not add up to 1.

    Args:
        logits: ``[..., rows, num_keys]``, -inf where hidden.
        sinks: log-sum-exp of the sinks of each row, expandable to ``[..., rows]``.
        counts: how often a key is there, as logits; once when None.
    """
    largest = logits.new_full(logits.shape[:-1], -torch.inf)
    if logits.shape[-1]:
        largest = logits.amax(-1)
    if sinks is not None:
        sinks = sinks.to(logits.dtype)
        largest = torch.maximum(largest, sinks.masked_fill(sinks.isposinf(), -torch.inf))
    shift = largest.masked_fill(largest.isinf(), 0)
    p = torch.exp(logits - shift[..., None])
    if counts is not None:
        p = p * counts
    total = p.sum(-1)
    if sinks is not None:
        total = total + torch.exp(sinks - shift)
    return p / total.masked_fill(total == 0, 1)[..., None], total.log() + shift


def _visible(bands: np.ndarray, q: Tensor, k: Tensor) -> Tensor:
    return torch.from_numpy(dense_bands(bands, q.shape[0], k.shape[0])).to(q.device)


def _hide_rows(t: Tensor, keep: Tensor) -> Tensor:
    # A probability of 0 does not hide a NaN: 0 * NaN is NaN. So tokens in no pair become 0.
    return torch.where(keep[:, None, None], t, 0)


def _operands(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v as ``[num_heads_q, tokens, dim]`` in the accumulation dtype, unseen tokens 0."""
    dtype, repeats = accumulate_dtype(q.dtype), q.shape[1] // k.shape[1]
    q = _hide_rows(q, visible.any(dim=1))
    k, v = (_hide_rows(t, visible.any(dim=0)).repeat_interleave(repeats, dim=1) for t in (k, v))
    return tuple(t.to(dtype).transpose(0, 1) for t in (q, k, v))


def _logits(q: Tensor, k: Tensor, visible: Tensor, options: AttnOptions) -> tuple[Tensor, Tensor | float]:
    """Logits with -inf where hidden, and their slope with respect to the uncapped ones."""
    logits = q @ k.transpose(1, 2) * options.softmax_scale
    slope: Tensor | float = 1.0
    if options.softcap > 0:
        capped = torch.tanh(logits / options.softcap)
        logits, slope = capped * options.softcap, 1 - capped * capped
    return logits.masked_fill(~visible, -torch.inf), slope


def _probabilities(logits: Tensor, row_lse: Tensor) -> Tensor:
    # Rows without any key or sink have lse -inf; all their logits are -inf, so p is 0.
    shift = row_lse.masked_fill(row_lse == -torch.inf, 0)
    return torch.exp(logits - shift[..., None])
