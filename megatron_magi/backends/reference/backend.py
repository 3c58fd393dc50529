"""The backend ``reference``."""

from __future__ import annotations

from typing import ClassVar

import torch

from megatron_magi.backends.base import Backend, Latent, Sparse
from megatron_magi.backends.reference import attention, latent, sparse


class Reference(Backend):
    """Dense attention, on any device."""

    name: ClassVar[str] = "reference"
    sparse: ClassVar[Sparse | None] = sparse
    latent: ClassVar[Latent | None] = latent

    forward = staticmethod(attention.forward)
    backward = staticmethod(attention.backward)

    def why_not(self, device: torch.device, dtype: torch.dtype, dims: tuple[int, int], instead: str = "") -> None:
        """It takes all tensors."""
