"""Errors for unsupported derivatives: attention has first-order reverse-mode gradients only."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable as stock

from megatron_magi.eager import refuse_transforms


def once_differentiable(backward: Callable) -> Callable:
    """Marks the backward of an autograd function; its second derivative is an error.

    torch's own decorator raises no error if the incoming gradient does not require grad: gradients then count as
    constants, although they depend on the saved tensors.
    """
    once = stock(backward)

    @functools.wraps(backward)
    def checked(ctx: Any, dout: Tensor | None, *others: Tensor | None) -> Any:
        if not torch.is_grad_enabled():  # nothing is recorded, so there is nothing to reject
            return backward(ctx, dout, *others)
        if dout is not None:
            dout = dout.detach().requires_grad_()
        return once(ctx, dout, *others)

    return checked


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
