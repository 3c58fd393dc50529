"""``attend.sanity_check`` where attention runs over keys that were gathered before: each rank looks at its own rows.

What a rank finds is told to the others, which wait for its keys, or for their gradients.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_magi.api.runtime import KeyRuntime
from megatron_magi.attention.call_signature import verifies
from megatron_magi.comm.agreement import told
from megatron_magi.config import MagiConfig
from megatron_magi.operands.finite import require_finite
from megatron_magi.ops.sparse_attention import describe_row


def check_finite(runtime: KeyRuntime, config: MagiConfig, **tensors: Tensor | None) -> None:
    """Raises ValueError for the first row of this rank's tensors, by name, that is not finite, if that is asked for."""
    if not config.attend.sanity_check:
        return
    dispatch, where = runtime.shard.dispatch, f"on rank {runtime.cp_rank} of the group"

    def describe(name: str, row: int) -> str:
        if name == "sink":
            return where
        is_padding = dispatch.global_index(runtime.cp_rank)[row] >= dispatch.total_seqlen
        return f"{'it is padding' if is_padding else describe_row(name, row)}, {where}"

    require_finite(tensors, describe)


def with_finite_gradient(out: Tensor, runtime: KeyRuntime, config: MagiConfig) -> Tensor:
    """``out``, whose gradient is checked likewise in the backward."""
    return _Checked.apply(out, runtime, config) if config.attend.sanity_check else out


class _Checked(torch.autograd.Function):
    """`with_finite_gradient`; a copy, as a view could not be changed in place."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, runtime: KeyRuntime, config: MagiConfig) -> Tensor:
        ctx.runtime, ctx.config = runtime, config
        return out.clone()

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, None, None]:
        with told(ctx.runtime.group, verifies(ctx.config)):
            check_finite(ctx.runtime, ctx.config, dout=dout)
        return dout, None, None
