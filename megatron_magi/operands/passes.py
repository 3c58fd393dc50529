"""The tensors of one pass of attention for implementations: inputs, and outputs that are written or added to.

Shapes are those of `megatron_magi.ops.slice_passes`. A pass that is prepared without tensors takes layouts (`Layout`)
instead.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor

from megatron_magi.cuda.layout import Like


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
