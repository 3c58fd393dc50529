"""The tensors of one pass of attention for implementations: inputs, and outputs that are written or added to.

Shapes are those of `megatron_magi.ops.slice_passes`. A pass that is prepared without tensors takes layouts (`Layout`)
instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_magi.cuda.layout import Like

type WhyNot = Callable[[torch.device, torch.dtype, tuple[int, int]], str | None]
"""As `megatron_magi.backends.base.Sparse.why_not`."""


class ForwardInputs(NamedTuple):
    """Inputs of a forward pass.

    Attributes:
        q, k, v: queries, keys and values.
        sink_lse: logsumexp of a head's sinks, ``[num_heads_q]`` or ``[num_rows, num_heads_q]``; None without sinks.
    """

    q: Like
    k: Like
    v: Like
    sink_lse: Like | None = None


def check_support(why_not: WhyNot, q: Tensor, v: Tensor) -> None:
    """Raises ValueError for tensors that kernels do not take.

    Args:
        why_not: the reason for a device, a dtype and the head dims of q and v; None if they do.
    """
    if (reason := why_not(q.device, q.dtype, (q.shape[2], v.shape[2]))) is not None:
        raise ValueError(reason)


def with_output(inputs: ForwardInputs, why_not: WhyNot) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """What a forward of kernels over lists reads and writes, in memory of its own. Raises as `check_support`.

    Returns:
        ``(q, k, v, out, lse, sink_lse)``: out ``[num_rows, num_heads_q, head_dim_v]`` in the dtype of q, lse fp32
        ``[num_rows, num_heads_q]``, neither of them set; the sinks of each row, ``[num_rows, num_heads_q]``, None
        without sinks.
    """
    q, k, v, sink_lse = inputs
    check_support(why_not, q, v)
    num_rows, num_heads, _ = q.shape
    out = torch.empty((num_rows, num_heads, v.shape[2]), dtype=q.dtype, device=q.device)
    lse = torch.empty((num_rows, num_heads), dtype=torch.float32, device=q.device)
    return q, k, v, out, lse, None if sink_lse is None else sink_lse.expand(num_rows, num_heads)


class ForwardOutput(NamedTuple):
    """Outputs of a forward pass.

    Attributes:
        out, lse: the result.
        accumulate: both hold a result over other keys, into which this one is merged; else they are overwritten.
        max_logits: ``[num_heads_q]`` of -inf, for the largest visible logit of each head; None if it is not wanted.
    """

    out: Like
    lse: Like
    accumulate: bool = False
    max_logits: Like | None = None


class BackwardInputs(NamedTuple):
    """Inputs of a backward pass.

    Attributes:
        q, k, v: inputs of the forward.
        dout: gradient of the output, in any float dtype.
        lse: of the forward, over all keys and sinks of a row; these may be more than are given here.
        delta: ``rowsum(dout * out)``; None if the backend is given ``out`` instead (`Backend.takes_out`).
    """

    q: Like
    k: Like
    v: Like
    dout: Like
    lse: Like
    delta: Like | None


class Gradients(NamedTuple):
    """Outputs of a backward pass.

    Attributes:
        dq, dk, dv: the gradients.
        accumulate_dq: dq is added to; else overwritten.
        accumulate_keys: likewise dk and dv.
    """

    dq: Like
    dk: Like
    dv: Like
    accumulate_dq: bool = False
    accumulate_keys: bool = False

    def tensors(self) -> tuple[tuple[Tensor, bool], ...]:
        """dq, dk and dv, each with whether it is added to."""
        dq, dk, dv, adds_dq, adds_keys = self
        return (dq, adds_dq), (dk, adds_keys), (dv, adds_keys)

    def put(self, computed: Iterable[Tensor]) -> None:
        """Writes dq, dk and dv, which are given in this order, or adds them."""
        for (into, adds), grad in zip(self.tensors(), computed, strict=True):
            into.copy_(into + grad if adds else grad)
