"""The backend ``triton``."""

from __future__ import annotations

from typing import ClassVar

import torch

from megatron_magi.backends import base
from megatron_magi.backends.base import Backend
from megatron_magi.backends.triton import attention, latent, sparse, support
from megatron_magi.backends.triton.tables import HostTables


class TritonKernels(Backend):
    """Kernels in Triton: any mask, all gradients bitwise repeatable, on GPUs of compute capability 8.0 and higher."""

    name: ClassVar[str] = "triton"
    title: ClassVar[str] = "kernels in Triton"
    tables: ClassVar[base.HostTables | None] = HostTables()
    sparse: ClassVar[base.Sparse | None] = sparse
    latent: ClassVar[base.Latent | None] = latent

    forward = staticmethod(attention.forward)
    backward = staticmethod(attention.backward)
    row_delta = staticmethod(attention.row_delta)

    def why_not(
        self, device: torch.device, dtype: torch.dtype, dims: tuple[int, int], instead: str = "'torch'"
    ) -> str | None:
        """See `megatron_magi.backends.base.Backend.why_not`."""
        return support.why_not(device, dtype, dims, instead)
