"""Combining partial attention results, and the mathematics of sinks.

A partial result over a set of keys is a pair ``(out, lse)``: the normalised output and the
log of its denominator. Two results over disjoint keys combine by

    lse = log(exp(lse_a) + exp(lse_b)),   out = exp(lse_a - lse) * out_a + exp(lse_b - lse) * out_b

which is associative and commutative, with ``(0, -inf)``, the result over no key, as identity.
A result with lse inf, from an infinite sink, has weight 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_magi.operands.passes import ForwardOutput


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp64 for fp64, fp32 for everything narrower: the dtype of lse and of sums."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def row_products(dout: Tensor, out: Tensor) -> Tensor:
    """``rowsum(dout * out)``; see `megatron_magi.ops.slice_passes.row_delta`."""
    dtype = accumulate_dtype(out.dtype)
    return torch.where(out == 0, 0, dout.to(dtype) * out.to(dtype)).sum(dim=-1)


def merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """The attention over the keys of both partial results. Differentiable.

    Args:
        out_a, out_b: ``[num_rows, num_heads_q, head_dim_v]``, any float dtypes.
        lse_a, lse_b: ``[num_rows, num_heads_q]``, natural log, -inf where a row saw no key.

    Returns:
        ``(out, lse)``: out in the wider dtype of the two outs. Rows that are -inf on both
        sides give out 0 and lse -inf, without NaN, in the gradients too.

    Raises:
        ValueError: shapes disagree.
    """
    _check_partial("out_a", out_a, "lse_a", lse_a)
    _check_partial("out_b", out_b, "lse_b", lse_b)
    if out_a.shape != out_b.shape:
        raise ValueError(f"out_b: expected the shape of out_a, {list(out_a.shape)}, got {list(out_b.shape)}")
    weight_a, weight_b, lse = _weights(lse_a, lse_b)
    # A side without keys is dropped, not multiplied by 0: its output may be NaN.
    part_a = torch.where(weight_a[..., None] > 0, out_a, 0) * weight_a[..., None]
    part_b = torch.where(weight_b[..., None] > 0, out_b, 0) * weight_b[..., None]
    return (part_a + part_b).to(torch.promote_types(out_a.dtype, out_b.dtype)), lse


@torch.no_grad()
def merge_(out: Tensor, lse: Tensor, out_new: Tensor, lse_new: Tensor) -> None:
    """`merge` of a new partial result into ``(out, lse)``, in place; keeps their dtypes.

    Raises:
        ValueError: shapes disagree.
    """
    merged, merged_lse = merge(out, lse, out_new, lse_new)
    out.copy_(merged)
    lse.copy_(merged_lse)


@torch.no_grad()
def write_result_(output: ForwardOutput, result: Tensor, lse: Tensor, sink_lse: Tensor | None = None) -> None:
    """Writes the result of a pass to its output, or merges it into that.

    Args:
        result: ``[num_rows, num_heads_q, head_dim_v]``; changed in place by sinks.
        lse: ``[num_rows, num_heads_q]``, likewise.
        sink_lse: of `ForwardInputs`; None if there are no sinks, or they are in the result.
    """
    if sink_lse is not None:
        merge_sink_(result, lse, sink_lse)
    if output.accumulate:
        merge_(output.out, output.lse, result, lse)
    else:
        output.out.copy_(result)
        output.lse.copy_(lse)


@torch.no_grad()
def merge_finite_(out: Tensor, lse: Tensor, out_new: Tensor, lse_new: Tensor) -> None:
    """`merge_` of tensors that are finite wherever they have no weight, without a copy of ``out``.

    Args:
        out, lse: fp32 or wider, or the dtype in which sums are to be rounded.
        out_new, lse_new: the new partial result, any float dtype.
    """
    weight, weight_new, total = _weights(lse, lse_new)
    out.mul_(weight[..., None]).add_(out_new * weight_new[..., None])
    lse.copy_(total)


def _weights(lse_a: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    largest = torch.maximum(lse_a, lse_b).detach()
    nothing, infinite = largest == -torch.inf, largest == torch.inf
    # If a side is inf, only infinite sides have weight.
    lse_a, lse_b = (torch.where(infinite, torch.where(x == torch.inf, 0, -torch.inf), x) for x in (lse_a, lse_b))
    # The shift cancels in the result. 0 in these two cases avoids inf - inf.
    shift = largest.masked_fill(nothing | infinite, 0)
    exp_a, exp_b = torch.exp(lse_a - shift), torch.exp(lse_b - shift)
    # The denominator of an empty row is 1, so that neither value nor gradient divides by 0.
    total = (exp_a + exp_b).masked_fill(nothing, 1)
    lse = (total.log() + shift).masked_fill(nothing, -torch.inf).masked_fill(infinite, torch.inf)
    return exp_a / total, exp_b / total, lse


def _check_partial(out_name: str, out: Tensor, lse_name: str, lse: Tensor) -> None:
    if out.ndim < 1 or lse.shape != out.shape[:-1]:
        raise ValueError(
            f"{lse_name}: expected the shape of {out_name} without its last dimension, "
            f"{list(out.shape[:-1])}, got {list(lse.shape)}"
        )


def sink_lse(sink: Tensor, dtype: torch.dtype) -> Tensor:
    """All sinks of a head as one term of the denominator.

    Sinks are logits without a value: a row's denominator gains ``sum_i exp(sink_i)`` and its
    output gains nothing. As a partial result that is ``(0, sink_lse)``. With a sink of inf
    the row's output is 0, its lse inf, and all gradients through it are 0.

    Args:
        sink: ``[num_sinks, num_heads_q]`` for all rows ("sh"), or ``[num_rows, num_sinks,
            num_heads_q]`` ("ssh").
        dtype: dtype of the result.

    Returns:
        ``[num_heads_q]`` or ``[num_rows, num_heads_q]``; -inf when there is no sink. It may be a view of ``sink``.
    """
    sink = sink.to(dtype)
    # logsumexp would need nine launches.
    return sink.squeeze(-2).contiguous() if sink.shape[-2] == 1 else torch.logsumexp(sink, dim=-2)


@torch.no_grad()
def merge_sink_(out: Tensor, lse: Tensor, sinks: Tensor) -> None:
    """Adds sinks to the denominator of ``(out, lse)``, in place: `merge_` with ``(0, sinks)``.

    Args:
        out, lse: a partial result, out 0 where lse is -inf.
        sinks: from `sink_lse`, broadcastable to lse.
    """
    weight, _, total = _weights(lse, sinks.to(lse.dtype).expand_as(lse))
    out.mul_(weight[..., None])
    lse.copy_(total)


def sink_gradient(sink: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """Gradient of the sink, from quantities that the backward of attention already has.

    The output of a row is ``sum_k p_k v_k`` with ``p_k = exp(s_k - lse)``. A sink enters by lse
    alone, with ``d lse / d sink = exp(sink - lse)``, its share of the denominator. So
    ``d out / d sink = -exp(sink - lse) * out``, and summed against dout

        dsink = -sum over rows of exp(sink - lse) * delta,   delta = rowsum(dout * out)

    Args:
        sink: either layout of `sink_lse`.
        lse: ``[num_rows, num_heads_q]``, final: over all keys and the sink.
        delta: ``[num_rows, num_heads_q]``, rowsum(dout * out).

    Returns:
        Gradient with the shape and dtype of ``sink``, over the rows given.
    """
    per_row = sink.ndim == 3
    logits = (sink if per_row else sink[None]).to(lse.dtype)
    # lse is -inf only if every sink of the head is too, and inf only if one is: such a row's output is 0 whatever
    # the sinks are, so nothing flows through it.
    share = (logits - lse[:, None]).exp_().masked_fill_(lse.isinf()[:, None], 0)
    grad = share.mul_(delta[:, None])
    return (grad if per_row else grad.sum(0)).neg_().to(sink.dtype)
