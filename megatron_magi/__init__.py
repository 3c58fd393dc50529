"""Context-parallel attention for Megatron: balanced, zero-redundancy, any mask.

Names are imported when they are first used: importing the package takes no torch, CUDA or Megatron. They are for users:
nothing inside the package imports them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_magi.api import (
        calc_attn,
        dispatch,
        get_position_ids,
        magi_attn_flex_key,
        magi_attn_varlen_key,
        roll,
        undispatch,
    )
    from megatron_magi.attention import distributed_attention
    from megatron_magi.compat.package import as_magi_attention
    from megatron_magi.config import AttendConfig, CommConfig, CostModel, DispatchConfig, MagiConfig, OverlapConfig
    from megatron_magi.mask import AttnMask, AttnRange, AttnRanges, AttnSlice, MaskType
    from megatron_magi.ops.latent_attention import latent_sparse_attention
    from megatron_magi.ops.slice_attention import slice_attention
    from megatron_magi.ops.sparse_attention import block_sparse_attention, index_sparse_attention
    from megatron_magi.plan import make_plan

__version__ = "0.1.0"

__all__ = [
    "AttendConfig",
    "AttnMask",
    "AttnRange",
    "AttnRanges",
    "AttnSlice",
    "CommConfig",
    "CostModel",
    "DispatchConfig",
    "MagiConfig",
    "MaskType",
    "OverlapConfig",
    "as_magi_attention",
    "block_sparse_attention",
    "calc_attn",
    "dispatch",
    "distributed_attention",
    "get_position_ids",
    "index_sparse_attention",
    "latent_sparse_attention",
    "magi_attn_flex_key",
    "magi_attn_varlen_key",
    "make_plan",
    "roll",
    "slice_attention",
    "undispatch",
]

_HOME = {
    **dict.fromkeys(
        (
            "calc_attn",
            "dispatch",
            "get_position_ids",
            "magi_attn_flex_key",
            "magi_attn_varlen_key",
            "roll",
            "undispatch",
        ),
        "api",
    ),
    "as_magi_attention": "compat.package",
    "distributed_attention": "attention",
    "latent_sparse_attention": "ops.latent_attention",
    "make_plan": "plan",
    "slice_attention": "ops.slice_attention",
    **dict.fromkeys(("block_sparse_attention", "index_sparse_attention"), "ops.sparse_attention"),
    **dict.fromkeys(("AttnMask", "AttnRange", "AttnRanges", "AttnSlice", "MaskType"), "mask"),
    **dict.fromkeys(
        ("AttendConfig", "CommConfig", "CostModel", "DispatchConfig", "MagiConfig", "OverlapConfig"), "config"
    ),
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
