"""Training whose attention does nothing: how fast steps would be if attention cost no time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


class _NoAttention(torch.autograd.Function):
    """The queries; gradients of all but these are 0."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, *others: Tensor | None) -> Tensor:
        ctx.others = [None if x is None else (x.shape, x.dtype) for x in others]
        return q.view_as(q)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        return dout, *(x and dout.new_zeros(x[0], dtype=x[1]) for x in ctx.others)


def _attend(q: Tensor, k: Tensor, v: Tensor, *_: Any, sink: Tensor | None, **__: Any) -> tuple[Tensor, None]:
    return _NoAttention.apply(q, k, v, sink), None


@contextmanager
def no_attention() -> Iterator[None]:
    """A context in which magi's layers neither attend nor communicate. All heads must be equally wide."""
    from megatron_magi.mcore import core_attention

    stock, core_attention.distributed_attention = core_attention.distributed_attention, _attend
    try:
        yield
    finally:
        core_attention.distributed_attention = stock
