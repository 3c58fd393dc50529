"""Errors for unsupported derivatives: attention has first-order reverse-mode gradients only."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from megatron_magi.operands.options import written_out
from megatron_magi.runtime.no_compile import refuse_transforms


def once_differentiable(backward: Callable) -> Callable:
    """Makes the backward of an autograd function of ``backward(ctx, saved, dout, ...)``; its derivative is an error.

    torch's own decorator returns gradients that hang on copies: they depend neither on the saved tensors nor on the
    incoming gradients, so `torch.autograd.grad` finds no path to these and second derivatives are 0 without an error.

    Args:
        backward: as in `torch.autograd.Function`, with ``ctx.saved_tensors`` as its second argument.
    """

    @functools.wraps(backward)
    def checked(ctx: Any, dout: Tensor | None, *others: Tensor | None) -> Any:
        refuse_transforms("the gradient of attention")
        if dout is not None and dout.is_neg():
            (dout,) = written_out(dout)
        saved = ctx.saved_tensors  # read once, as checkpoints may compute them in a second forward
        if not torch.is_grad_enabled():  # nothing is recorded, so there is nothing to reject
            return backward(ctx, saved, dout, *others)
        return _Once.apply(lambda: backward(ctx, saved, dout, *others), *saved, dout, *others)

    return checked


def refuse_second(ctx: Any, *grads: Tensor | None) -> None:
    """The backward of gradients: a RuntimeError."""
    raise RuntimeError(
        "cannot differentiate twice: attention has first derivatives only, and a gradient of it that was computed with "
        "create_graph=True is differentiated"
    )


class _Once(torch.autograd.Function):
    """What ``compute()`` returns, as a function of ``tensors`` that has no derivative."""

    @staticmethod
    def forward(ctx: Any, compute: Callable[[], Any], *tensors: Tensor | None) -> Any:
        return compute()

    backward = staticmethod(refuse_second)


def refuse_tangents(*tensors: Tensor | None) -> None:
    """Raises RuntimeError for dual tensors of forward-mode AD, whose tangents kernels and operators would drop.

    Also in transforms of `torch.func`.
    """
    refuse_transforms("attention")
    # A check in every call of every layer has to be cheap; no public function is.
    if forward_ad._current_level < 0:
        return
    if any(isinstance(t, Tensor) and forward_ad.unpack_dual(t).tangent is not None for t in tensors):
        raise RuntimeError("q, k, v, sink: attention has no forward-mode derivative, got a dual tensor")
