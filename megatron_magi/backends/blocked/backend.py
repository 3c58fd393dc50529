"""The backend ``torch``."""

from __future__ import annotations

from typing import ClassVar

import torch

from megatron_magi.backends.base import Backend
from megatron_magi.backends.blocked import attention


class Blocked(Backend):
    """Attention in torch, block by block, on any device."""

    name: ClassVar[str] = "torch"

    forward = staticmethod(attention.forward)
    backward = staticmethod(attention.backward)

    def why_not(self, device: torch.device, dtype: torch.dtype, dims: tuple[int, int], instead: str = "") -> None:
        """It takes all tensors."""
