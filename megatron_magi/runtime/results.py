"""What functions with a backward of their own return."""

from __future__ import annotations

import torch


def unviewed(x: torch.Tensor) -> torch.Tensor:
    """A tensor over the memory of ``x`` that is no view to autograd, without a copy.

    Torch refuses to change a view in place that was made in the forward of an autograd function, or where no gradients
    are recorded. The result can be changed. It shares the version of ``x``, so a backward for which ``x`` was saved
    still finds out. For tensors without a gradient, as those of a forward.
    """
    return x.detach() if x._is_view() else x
