"""The architectures that kernels of the package are compiled for. Importing it does not import torch."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

TARGETS = {(9, 0): "sm_90a"}
"""The compiler's name of an architecture, by compute capability."""

DEFAULT_TARGET = "sm_90a"
"""What is compiled for on a machine without a GPU."""


@cache
def target_of(device: torch.device) -> str | None:
    """The architecture that kernels for a device are compiled for; None if there are none for it."""
    import torch  # compiling needs none

    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    return TARGETS.get(torch.cuda.get_device_capability(device))


def capabilities() -> str:
    """The compute capabilities that there are kernels for, in words."""
    return " and ".join(f"{major}.{minor}" for major, minor in TARGETS)
