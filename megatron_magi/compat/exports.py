"""What `megatron_magi.api` exports besides the functions that it defines: types, algorithms, helpers."""

from __future__ import annotations

from megatron_magi.compat.algorithms import (
    BSDispatchAlg,
    DispatchAlg,
    DispatchAlgType,
    DPDispatchAlg,
    GreedyOverlapAlg,
    LBDispatchAlg,
    MinHeapDispatchAlg,
    OverlapAlg,
    OverlapAlgType,
    SequentialDispatchAlg,
    SortedSequentialSelectAlg,
    ToppHeapDispatchAlg,
    UniformOverlapAlg,
)
from megatron_magi.compat.corrections import (
    correct_attn_lse,
    correct_attn_lse_with_sink,
    correct_attn_out,
    correct_attn_out_lse,
    correct_attn_out_lse_with_sink,
    correct_attn_out_with_sink,
)
from megatron_magi.compat.cost_factors import get_a2a_corr_factor, get_calc_cost_factor, get_comm_cost_factor
from megatron_magi.compat.environment import comm
from megatron_magi.compat.masks import (
    infer_attn_mask_from_cu_seqlens,
    infer_attn_mask_from_sliding_window,
)
from megatron_magi.compat.padding import apply_padding, pad_at_dim, unpad_at_dim
from megatron_magi.compat.process_groups import clearup_dist_env, setup_dist_env
from megatron_magi.compat.ranges import AttnRanges, check_valid_cu_seqlens, is_valid_cu_seqlens
from megatron_magi.compat.rectangles import AttnRectangle, AttnRectangles
from megatron_magi.compat.runtime import DistAttnRuntimeKey
from megatron_magi.compat.sequences import (
    compute_pad_size,
    full_attention_to_varlen_attention,
    infer_varlen_mask_from_batch,
    squash_batch_dim,
)
from megatron_magi.compat.types import (
    AttnMaskType,
    AttnOverlapMode,
    DispatchConfig,
    DistAttnConfig,
    GeneralAttnMaskType,
    GrpCollConfig,
    OverlapConfig,
)
from megatron_magi.config import MagiConfig
from megatron_magi.mask import AttnRange, RangeError
from megatron_magi.operands.meta import AttnForwardMeta
from megatron_magi.ops.flex_flash_attn import flex_flash_attn_func

__all__ = [
    "AttnForwardMeta",
    "AttnMaskType",
    "AttnOverlapMode",
    "AttnRange",
    "AttnRanges",
    "AttnRectangle",
    "AttnRectangles",
    "BSDispatchAlg",
    "DPDispatchAlg",
    "DispatchAlg",
    "DispatchAlgType",
    "DispatchConfig",
    "DistAttnConfig",
    "DistAttnRuntimeKey",
    "GeneralAttnMaskType",
    "GreedyOverlapAlg",
    "GrpCollConfig",
    "LBDispatchAlg",
    "MagiConfig",
    "MinHeapDispatchAlg",
    "OverlapAlg",
    "OverlapAlgType",
    "OverlapConfig",
    "RangeError",
    "SequentialDispatchAlg",
    "SortedSequentialSelectAlg",
    "ToppHeapDispatchAlg",
    "UniformOverlapAlg",
    "apply_padding",
    "check_valid_cu_seqlens",
    "clearup_dist_env",
    "comm",
    "compute_pad_size",
    "correct_attn_lse",
    "correct_attn_lse_with_sink",
    "correct_attn_out",
    "correct_attn_out_lse",
    "correct_attn_out_lse_with_sink",
    "correct_attn_out_with_sink",
    "flex_flash_attn_func",
    "full_attention_to_varlen_attention",
    "get_a2a_corr_factor",
    "get_calc_cost_factor",
    "get_comm_cost_factor",
    "infer_attn_mask_from_cu_seqlens",
    "infer_attn_mask_from_sliding_window",
    "infer_varlen_mask_from_batch",
    "is_valid_cu_seqlens",
    "pad_at_dim",
    "setup_dist_env",
    "squash_batch_dim",
    "unpad_at_dim",
]
