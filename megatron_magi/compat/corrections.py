"""Joining partial results of attention, with the names of MagiAttention.

A partial result over a set of keys is its output and lse (`megatron_magi.operands.merge`). Two of them over disjoint
keys join, and a sink, which has a logit and no value, joins one. All functions are differentiable unless ``inplace``.

Shapes: out ``[num_rows, num_heads_q, head_dim_v]``, lse ``[num_rows, num_heads_q]``, natural log, -inf where a row sees
nothing; sink ``[num_sinks, num_heads_q]`` with ``sink_layout="sh"``, ``[num_rows, num_sinks, num_heads_q]`` with "ssh".
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_magi.operands.merge import merge, sink_lse
from megatron_magi.operands.options import check_tensor


def correct_attn_lse(lse1: Tensor, lse2: Tensor, inplace: bool = False) -> Tensor:
    """The lse of both partial results together, in the dtype of ``lse1``; written to ``lse1`` if ``inplace``.

    Raises:
        ValueError: shapes disagree.
    """
    _check_tensors(lse1=lse1, lse2=lse2)
    _check_shape("lse2", lse2, lse1)
    nothing = lse1.new_zeros(*lse1.shape, 0)
    return _written(merge(nothing, lse1, nothing, lse2)[1], lse1, inplace)


def correct_attn_out(
    out1: Tensor, lse1: Tensor, out2: Tensor, lse2: Tensor, lse: Tensor, inplace: bool = False
) -> Tensor:
    """The output of both partial results together, in the dtype of ``out1``; written to ``out1`` if ``inplace``.

    Args:
        lse: of both together, as `correct_attn_lse` gives it. It may also hold more keys, of results yet to come.

    Raises:
        ValueError: shapes disagree.
    """
    _check_tensors(out1=out1, lse1=lse1, out2=out2, lse2=lse2, lse=lse)
    _check_shape("out2", out2, out1)
    _check_lse("lse", lse, "out1", out1)
    parts = [_scaled(out, part, lse, name) for out, part, name in ((out1, lse1, "lse1"), (out2, lse2, "lse2"))]
    return _written(parts[0] + parts[1], out1, inplace)


def correct_attn_out_lse(
    out1: Tensor, lse1: Tensor, out2: Tensor, lse2: Tensor, inplace: bool = False
) -> tuple[Tensor, Tensor]:
    """Output and lse of both partial results together; written to ``out1`` and ``lse1`` if ``inplace``.

    Raises:
        ValueError: shapes disagree.
    """
    _check_tensors(out1=out1, lse1=lse1, out2=out2, lse2=lse2)
    _check_shape("out2", out2, out1)
    _check_lse("lse1", lse1, "out1", out1)
    _check_lse("lse2", lse2, "out2", out2)
    out, lse = merge(out1, lse1, out2, lse2)
    return _written(out, out1, inplace), _written(lse, lse1, inplace)


def correct_attn_lse_with_sink(lse: Tensor, sink: Tensor, sink_layout: str = "sh", inplace: bool = False) -> Tensor:
    """The lse with sinks in the denominator; written to ``lse`` if ``inplace``.

    Raises:
        ValueError: the sink's shape does not fit ``lse`` and ``sink_layout``.
    """
    return correct_attn_lse(lse, _lse_of_sink(sink, lse, sink_layout), inplace)


def correct_attn_out_with_sink(
    out: Tensor, lse: Tensor, sink: Tensor, sink_layout: str = "sh", inplace: bool = False
) -> Tensor:
    """The output with sinks in the denominator; written to ``out`` if ``inplace``.

    Args:
        lse: of ``out``, without the sinks.

    Raises:
        ValueError: shapes do not fit.
    """
    _check_tensors(lse=lse)
    return correct_attn_out_lse_with_sink(out, lse.clone(), sink, sink_layout, inplace)[0]


def correct_attn_out_lse_with_sink(
    out: Tensor, lse: Tensor, sink: Tensor, sink_layout: str = "sh", inplace: bool = False
) -> tuple[Tensor, Tensor]:
    """Output and lse with sinks in the denominator; written to ``out`` and ``lse`` if ``inplace``.

    Raises:
        ValueError: shapes do not fit.
    """
    _check_tensors(out=out, lse=lse)
    _check_lse("lse", lse, "out", out)
    return correct_attn_out_lse(out, lse, torch.zeros_like(out), _lse_of_sink(sink, lse, sink_layout), inplace)


def _lse_of_sink(sink: Tensor, lse: Tensor, sink_layout: str) -> Tensor:
    if sink_layout not in ("sh", "ssh"):
        raise ValueError(f"sink_layout: expected 'sh' or 'ssh', got {sink_layout!r}")
    _check_tensors(lse=lse, sink=sink)
    if lse.ndim != 2:
        raise ValueError(f"lse: expected shape [num_rows, num_heads_q], got {list(lse.shape)}")
    num_rows, num_heads = lse.shape
    fits = (-1, num_heads) if sink_layout == "sh" else (num_rows, -1, num_heads)
    if sink.ndim != len(fits) or any(n not in (-1, have) for n, have in zip(fits, sink.shape, strict=True)):
        raise ValueError(f"sink: expected shape {list(fits)}, -1 for any number of sinks, got {list(sink.shape)}")
    return sink_lse(sink, lse.dtype).expand_as(lse)


def _scaled(out: Tensor, part: Tensor, total: Tensor, name: str) -> Tensor:
    """The share of one partial result in an output whose lse is ``total``; 0 where it saw nothing."""
    _check_shape(name, part, total)
    empty = part == -torch.inf
    # Before the exponential, so that no gradient is NaN.
    weight = torch.exp(torch.where(empty, 0, part) - torch.where(empty, 0, total)).masked_fill(empty, 0)[..., None]
    return torch.where(weight > 0, out, 0) * weight


def _written(result: Tensor, target: Tensor, inplace: bool) -> Tensor:
    return target.copy_(result) if inplace else result.to(target.dtype)


def _check_tensors(**tensors: Tensor) -> None:
    for name, t in tensors.items():
        check_tensor(name, t)


def _check_lse(name: str, lse: Tensor, of: str, out: Tensor) -> None:
    if lse.shape != out.shape[:-1]:
        expected = list(out.shape[:-1])
        raise ValueError(
            f"{name}: expected the shape of {of} without its last dimension, {expected}, got {list(lse.shape)}"
        )


def _check_shape(name: str, x: Tensor, like: Tensor) -> None:
    if x.shape != like.shape:
        raise ValueError(f"{name}: expected shape {list(like.shape)}, got {list(x.shape)}")
