"""The backend ``cudnn``."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import torch

from megatron_magi.backends.base import Backend, HostTables, StageMasks, StageTables, TableUse
from megatron_magi.backends.cudnn import passes, plans, support
from megatron_magi.operands.options import AttnOptions


class _Tables:
    """See `HostTables`."""

    def sm_count(self, device: torch.device) -> int:
        return torch.cuda.get_device_properties(device).multi_processor_count

    def kind(self, device: torch.device) -> None:
        """Nothing: plans are made on the device."""

    def make(self, masks: StageMasks, use: TableUse) -> StageTables:
        return plans.make_stage_tables(masks, use)


class Cudnn(Backend):
    """Flexible attention of the cuDNN frontend, for fp16 and bf16 on Hopper and Blackwell GPUs of data centers."""

    name: ClassVar[str] = "cudnn"
    title: ClassVar[str] = "kernels of the cuDNN frontend"
    takes_out: ClassVar[bool] = True
    tables: ClassVar[HostTables | None] = _Tables()

    forward = staticmethod(passes.forward)
    backward = staticmethod(passes.backward)

    def why_not(
        self, device: torch.device, dtype: torch.dtype, dims: tuple[int, int], instead: str = "'torch'"
    ) -> str | None:
        return support.why_not(device, dtype, dims, instead)

    def why_not_call(
        self, options: AttnOptions, bands: np.ndarray | None = None, instead: str = "'torch'"
    ) -> str | None:
        return support.why_not_call(options, bands, instead)
