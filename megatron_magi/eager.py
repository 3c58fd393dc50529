"""Functions that run as they are under `torch.compile`, between compiled graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

Function = TypeVar("Function", bound=Callable)

try:
    # Loads the compiler, a second or more, when a function is first called and not when the package is imported.
    from torch._compile import _disable_dynamo as _disable
except ImportError:
    _disable = torch.compiler.disable


def outside_graphs(function: Function) -> Function:
    """Keeps ``function`` and what it calls out of graphs, as `torch.compiler.disable` does."""
    return _disable(function)
