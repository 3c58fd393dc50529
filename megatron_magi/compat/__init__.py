"""What users of MagiAttention know and nothing here needs; `megatron_magi.api` shows it, loaded when asked for.

`ranges` and `rectangles` are its value types, `algorithms` and `configs` its settings.
"""

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
from megatron_magi.compat.configs import (
    AttnOverlapMode,
    DispatchConfig,
    DistAttnConfig,
    GrpCollConfig,
    OverlapConfig,
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
from megatron_magi.compat.process_groups import clearup_dist_env, setup_dist_env
from megatron_magi.compat.range_lists import (
    apply_padding,
    infer_attn_mask_from_cu_seqlens,
    infer_attn_mask_from_sliding_window,
)
from megatron_magi.compat.ranges import AttnRanges, check_valid_cu_seqlens, is_valid_cu_seqlens
from megatron_magi.compat.rectangles import AttnRectangle, AttnRectangles
from megatron_magi.compat.sequences import (
    full_attention_to_varlen_attention,
    infer_varlen_mask_from_batch,
    squash_batch_dim,
)

__all__ = [
    "AttnOverlapMode",
    "AttnRanges",
    "AttnRectangle",
    "AttnRectangles",
    "BSDispatchAlg",
    "DPDispatchAlg",
    "DispatchAlg",
    "DispatchAlgType",
    "DispatchConfig",
    "DistAttnConfig",
    "GreedyOverlapAlg",
    "GrpCollConfig",
    "LBDispatchAlg",
    "MinHeapDispatchAlg",
    "OverlapAlg",
    "OverlapAlgType",
    "OverlapConfig",
    "SequentialDispatchAlg",
    "SortedSequentialSelectAlg",
    "ToppHeapDispatchAlg",
    "UniformOverlapAlg",
    "apply_padding",
    "check_valid_cu_seqlens",
    "clearup_dist_env",
    "comm",
    "correct_attn_lse",
    "correct_attn_lse_with_sink",
    "correct_attn_out",
    "correct_attn_out_lse",
    "correct_attn_out_lse_with_sink",
    "correct_attn_out_with_sink",
    "full_attention_to_varlen_attention",
    "get_a2a_corr_factor",
    "get_calc_cost_factor",
    "get_comm_cost_factor",
    "infer_attn_mask_from_cu_seqlens",
    "infer_attn_mask_from_sliding_window",
    "infer_varlen_mask_from_batch",
    "is_valid_cu_seqlens",
    "setup_dist_env",
    "squash_batch_dim",
]
