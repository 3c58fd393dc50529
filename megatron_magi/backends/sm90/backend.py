"""The backend ``ffa``: kernels for Hopper GPUs, and what they offer beside the two passes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from megatron_magi.backends.base import (
    Backend,
    Capture,
    ChangingMemory,
    HostTables,
    Kernels,
    KeyTransfer,
    ModelKind,
    Programs,
    Sparse,
    StageMasks,
    StageTables,
    TableUse,
)
from megatron_magi.backends.sm90 import attention, mask_numbers, program, sparse, support
from megatron_magi.backends.sm90 import kernels as sm90_kernels
from megatron_magi.backends.sm90.changing_mask import StaticMask, StaticMemory
from megatron_magi.backends.sm90.host_tables import make_stage_tables
from megatron_magi.backends.sm90.kernel_list import needed_kernels
from megatron_magi.backends.sm90.program import LaunchProgram, Maker
from megatron_magi.operands.options import AttnOptions
from megatron_magi.runtime.lru import LruCache


class _Tables:
    """See `HostTables`."""

    def sm_count(self, device: torch.device) -> int:
        return support.sm_count(device)

    def kind(self, device: torch.device) -> None:
        """Nothing else of it."""

    def make(self, masks: StageMasks, use: TableUse) -> StageTables:
        return make_stage_tables(masks, use)


class _Programs:
    """See `Programs`."""

    def reads_in_place(self, dims: tuple[int, int]) -> bool:
        return sm90_kernels.kernel_dims(dims) == dims

    def fuses_backward(self, dims: tuple[int, int]) -> bool:
        return program.backward_pays(dims)

    def first_fetched(self, num_keys: int) -> int:
        return mask_numbers.first_arriving(num_keys)

    def new_makers(self) -> LruCache[tuple, Maker]:
        return program.new_makers()

    def of_tensors(
        self, q: Tensor, k: Tensor, v: Tensor, bands: np.ndarray, options: AttnOptions
    ) -> LaunchProgram | None:
        return attention.one_launch(q, k, v, bands, options)

    def of_plan(
        self,
        bands: np.ndarray,
        num_keys: int,
        makers: LruCache[tuple, Maker],
        transfer: KeyTransfer | None,
        is_prepared: bool,
        numbers: Any,
    ) -> LaunchProgram:
        return LaunchProgram(
            bands, num_keys, makers, transfer, is_prepared, (None, None) if numbers is None else numbers
        )


class _Capture:
    """See `Capture`."""

    def memory(self, device: torch.device) -> StaticMemory:
        return StaticMemory(device)

    def mask(
        self,
        samples: Sequence[tuple[np.ndarray, int]],
        num_rows: int,
        most_keys: int,
        device: torch.device,
        memory: ChangingMemory,
        headroom: float,
    ) -> StaticMask:
        assert isinstance(memory, StaticMemory)
        return StaticMask(samples, num_rows, most_keys, device, memory, headroom)


class Sm90(Backend):
    """The kernels of ``csrc/attention/sm90``, for fp16 and bf16 on GPUs of compute capability 9.0."""

    name: ClassVar[str] = "ffa"
    title: ClassVar[str] = "Hopper kernels"
    tables: ClassVar[HostTables | None] = _Tables()
    programs: ClassVar[Programs | None] = _Programs()
    capture: ClassVar[Capture | None] = _Capture()
    sparse: ClassVar[Sparse | None] = sparse

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
        return [(sm90_kernels.source_of(name), macros) for name, macros in sm90_kernels.common_kernels()]
