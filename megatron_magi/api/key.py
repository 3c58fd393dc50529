"""Keys: values that stand for a planned mask."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch.distributed as dist

from megatron_magi.api.compat_names import compat_name
from megatron_magi.api.mask_types import AttnMaskType
from megatron_magi.config import MagiConfig
from megatron_magi.mask import AttnMask, MaskType
from megatron_magi.plan import Dispatch

if TYPE_CHECKING:
    from megatron_magi.api.compat_names import AttnRanges, DistAttnConfig


@dataclass(frozen=True)
class DistAttnRuntimeKey:
    """A mask over a context-parallel group, as a hashable value: equal content, equal key.

    Attributes:
        mask: over the sequence without padding.
        num_heads_q, num_heads_kv, head_dim: of the attention; None when not told.
        cp_group: the ranks; None is one rank.
        config: everything that decides the plan and how it runs.
        key_for_dispatch: the key whose distribution of tokens this one shares.
        layout: the distribution of tokens that was given (`plan.given_dispatch`); None leaves it to the planner.
        total_seqlen: tokens, padding included.
        pad_size: tokens that pad the sequence at its end.
    """

    mask: AttnMask
    num_heads_q: int | None
    num_heads_kv: int | None
    head_dim: int | None
    cp_group: dist.ProcessGroup | None
    config: MagiConfig = field(hash=False)  # it is compared; masks differ more often
    key_for_dispatch: DistAttnRuntimeKey | None = None
    layout: Dispatch | None = None
    total_seqlen: int = field(default=0, compare=False)
    pad_size: int = field(default=0, compare=False)

    def __deepcopy__(self, _memo: dict) -> DistAttnRuntimeKey:
        """The key itself: it never changes, and its group, which nothing can copy, is the same to copies of a model."""
        return self

    @property
    def q_ranges(self) -> AttnRanges:
        """Queries of each slice; padding, if there is any, is the last slice and sees no key."""
        return compat_name("AttnRanges").from_ranges(self._slices()[:, :2])

    @property
    def k_ranges(self) -> AttnRanges:
        """Keys of each slice."""
        return compat_name("AttnRanges").from_ranges(self._slices()[:, 2:4])

    @property
    def attn_mask_type(self) -> tuple[AttnMaskType, ...]:
        """Type of each slice."""
        return tuple(AttnMaskType.from_int_type(number) for number in self._slices()[:, 4].tolist())

    def _slices(self) -> np.ndarray:
        if not self.pad_size:
            return self.mask.table
        start = self.mask.total_seqlen_q
        return np.vstack([self.mask.table, (start, start + self.pad_size, 0, 0, MaskType.FULL)])

    @property
    def dist_attn_config(self) -> DistAttnConfig:
        """The part of ``config`` that a `DistAttnConfig` can express."""
        return compat_name("DistAttnConfig").from_magi_config(self.config)

    @property
    def uneven_shard(self) -> bool:
        """Whether shards may differ in length."""
        return self.config.dispatch.uneven_shard

    @property
    def is_deterministic_mode_enable(self) -> bool:
        """Whether results repeat bit by bit."""
        return self.config.attend.deterministic

    @property
    def total_seqlen_q(self) -> int:
        """Tokens, padding included."""
        return self.total_seqlen

    @property
    def total_seqlen_k(self) -> int:
        """Tokens, padding included."""
        return self.total_seqlen

    @property
    def chunk_size(self) -> int | None:
        """Tokens a chunk, None where it was left to the planner."""
        return self.config.dispatch.chunk_size
