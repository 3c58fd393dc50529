"""Derivatives that there are none of are errors: attention has gradients alone, first ones."""

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

    torch's own is silent where the first gradient needs none: gradients then count as constants, although they
    depend on the tensors that the forward has kept.
    """
    once = stock(backward)

    @functools.wraps(backward)
    def checked(ctx: Any, dout: Tensor | None, *others: Tensor | None) -> Any:
        if not torch.is_grad_enabled():  # nothing is recorded, so that there is nothing to refuse
            return backward(ctx, dout, *others)
        if dout is not None:
            dout = dout.detach().requires_grad_()
        return once(ctx, dout, *others)

    return checked


def refuse_tangents(*tensors: Tensor | None) -> None:
    """Raises RuntimeError for tensors of forward-mode AD, whose tangents kernels and operators would drop.

    And in transforms of `torch.func`.
    """
    refuse_transforms("attention")
    # What is asked of every call of every layer has to be cheap, and there is no public way that is.
    if forward_ad._current_level < 0:
        return
    if any(isinstance(t, Tensor) and forward_ad.unpack_dual(t).tangent is not None for t in tensors):
        raise RuntimeError("q, k, v, sink: attention has no forward-mode derivative, got a dual tensor")
