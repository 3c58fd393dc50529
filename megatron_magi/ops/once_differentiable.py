"""torch's `once_differentiable`, without its hole."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable as stock


def once_differentiable(backward: Callable) -> Callable:
    """Marks the backward of an autograd function; its second derivative is an error.

    torch's own is silent where the first gradient needs none: gradients then count as constants, although they
    depend on the tensors that the forward has kept.
    """
    once = stock(backward)

    @functools.wraps(backward)
    def checked(ctx: Any, dout: Tensor | None, *others: Tensor | None) -> Any:
        if dout is not None and torch.is_grad_enabled():
            dout = dout.detach().requires_grad_()
        return once(ctx, dout, *others)

    return checked
