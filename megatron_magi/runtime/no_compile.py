"""Functions that run as they are: between graphs under `torch.compile`, and in no transform of `torch.func`."""

from __future__ import annotations

from collections.abc import Callable

import torch

try:
    # Loads the compiler, a second or more, when a function is first called and not when the package is imported.
    from torch._compile import _disable_dynamo as _disable
except ImportError:
    _disable = torch.compiler.disable


def outside_graphs[Function: Callable](function: Function) -> Function:
    """Keeps ``function`` and what it calls out of graphs, as `torch.compiler.disable` does."""
    return _disable(function)


def refuse_transforms(operation: str) -> None:
    """Raises RuntimeError inside `torch.vmap`, `torch.func.grad` and the like, which run no kernels of others."""
    # What is asked of every call has to be cheap, and there is no public way.
    if torch._C._are_functorch_transforms_active():
        raise RuntimeError(
            f"{operation} cannot be transformed by torch.vmap or torch.func: for gradients use torch.autograd, "
            "for a batch make its sequences documents of one mask (docs/own_loop.md)"
        )
