"""The backend ``ffa``: kernels for Hopper GPUs, and what they offer beside the two passes."""

from __future__ import annotations

from typing import ClassVar

import torch

from megatron_magi.backends.base import (
    Backend,
    Capture,
    HostTables,
    Kernels,
    LatentPart,
    ModelKind,
    Programs,
    Sparse,
)
from megatron_magi.backends.sm90 import attention, host_tables, latent, mask_numbers, program, sparse, support
from megatron_magi.backends.sm90 import kernels as sm90_kernels
from megatron_magi.backends.sm90.changing_mask import StaticMask, StaticMemory
from megatron_magi.backends.sm90.kernel_list import needed_kernels


class _Programs:
    """See `Programs`."""

    reads_in_place = staticmethod(sm90_kernels.are_kernel_dims)
    fuses_backward = staticmethod(program.backward_pays)
    first_fetched = staticmethod(mask_numbers.first_arriving)
    new_makers = staticmethod(program.new_makers)
    of_tensors = staticmethod(attention.one_launch)
    of_plan = program.LaunchProgram


class _Capture:
    """See `Capture`."""

    memory, mask = StaticMemory, StaticMask


class Sm90(Backend):
    """The kernels of ``csrc/attention/sm90``, for fp16 and bf16 on GPUs of compute capability 9.0."""

    name: ClassVar[str] = "ffa"
    title: ClassVar[str] = "Hopper kernels"
    tables: ClassVar[HostTables | None] = host_tables
    programs: ClassVar[Programs | None] = _Programs()
    capture: ClassVar[Capture | None] = _Capture()
    sparse: ClassVar[Sparse | None] = sparse
    latent_part: ClassVar[LatentPart | None] = latent

    forward = staticmethod(attention.forward)
    backward = staticmethod(attention.backward)
    row_delta = staticmethod(attention.row_delta)
    sums_meet = staticmethod(attention.sums_meet)
    shared_sums = staticmethod(attention.SharedSums)

    def why_not(
        self, device: torch.device, dtype: torch.dtype, dims: tuple[int, int], instead: str = "'torch'"
    ) -> str | None:
        if support.kernels_exist(device, dtype, dims):
            return None
        return support.why_not(device, dtype, dims, instead)

    def takes(self, device: torch.device, dtype: torch.dtype, dims: tuple[int, int]) -> bool:
        return support.kernels_exist(device, dtype, dims)

    @staticmethod
    def kernels(model: ModelKind, *, fused: bool = False, captured: bool = False) -> Kernels:
        dtype, dims, group, deterministic = model
        return needed_kernels(dtype, dims, group, deterministic=deterministic, stream_kv=fused, captured=captured)

    @staticmethod
    def common_kernels() -> Kernels:
        return [variant.build_args for variant in sm90_kernels.common_kernels()]
