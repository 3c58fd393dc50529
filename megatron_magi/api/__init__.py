"""The public functions, with the names, arguments and results that users of MagiAttention know.

A mask becomes a *key*; with it tensors are dispatched to ranks, attention is computed, and results are
brought back::

    key = magi_attn_flex_key(q_ranges, k_ranges, attn_mask_type, ...)
    local_x = dispatch(x, key)
    local_out, meta = calc_attn(local_q, local_k, local_v, key)
    out = undispatch(local_out, key)

Making a key is collective over its group and needs the same arguments on every rank. Ranks that
disagree find out when the key is first used to communicate.

The functions are in `functions`; `make_key` makes keys, `runtime` keeps what they stand for.

Under `torch.compile` these functions run as they are, between compiled graphs: planning and
communication are no tensor programs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron_magi.api.compat_names import compat_name
from megatron_magi.api.functions import (
    calc_attn,
    clear_cache,
    dispatch,
    get_most_recent_key,
    get_position_ids,
    magi_attn_flex_dispatch,
    magi_attn_flex_key,
    magi_attn_varlen_dispatch,
    magi_attn_varlen_key,
    make_flex_key_for_new_mask_after_dispatch,
    make_static_key,
    make_varlen_key_for_new_mask_after_dispatch,
    roll,
    roll_simple,
    undispatch,
)
from megatron_magi.api.key import DistAttnRuntimeKey
from megatron_magi.api.mask_types import AttnMaskType, GeneralAttnMaskType
from megatron_magi.api.padding import compute_pad_size, pad_at_dim, unpad_at_dim
from megatron_magi.api.sparse import calc_block_sparse_attn, calc_index_sparse_attn, selected_key_share
from megatron_magi.api.static_key import StaticKey
from megatron_magi.config import MagiConfig
from megatron_magi.mask import AttnRange, RangeError
from megatron_magi.operands.meta import AttnForwardMeta
from megatron_magi.ops.flex_flash_attn import flex_flash_attn_func

if TYPE_CHECKING:
    from megatron_magi.api.compat_names import (
        AttnOverlapMode,
        AttnRanges,
        AttnRectangle,
        AttnRectangles,
        BSDispatchAlg,
        DispatchAlg,
        DispatchAlgType,
        DispatchConfig,
        DistAttnConfig,
        DPDispatchAlg,
        GreedyOverlapAlg,
        GrpCollConfig,
        LBDispatchAlg,
        MinHeapDispatchAlg,
        OverlapAlg,
        OverlapAlgType,
        OverlapConfig,
        SequentialDispatchAlg,
        SortedSequentialSelectAlg,
        ToppHeapDispatchAlg,
        UniformOverlapAlg,
        apply_padding,
        check_valid_cu_seqlens,
        clearup_dist_env,
        comm,
        correct_attn_lse,
        correct_attn_lse_with_sink,
        correct_attn_out,
        correct_attn_out_lse,
        correct_attn_out_lse_with_sink,
        correct_attn_out_with_sink,
        full_attention_to_varlen_attention,
        get_a2a_corr_factor,
        get_calc_cost_factor,
        get_comm_cost_factor,
        infer_attn_mask_from_cu_seqlens,
        infer_attn_mask_from_sliding_window,
        infer_varlen_mask_from_batch,
        is_valid_cu_seqlens,
        setup_dist_env,
        squash_batch_dim,
    )

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
    "StaticKey",
    "ToppHeapDispatchAlg",
    "UniformOverlapAlg",
    "apply_padding",
    "calc_attn",
    "calc_block_sparse_attn",
    "calc_index_sparse_attn",
    "check_valid_cu_seqlens",
    "clear_cache",
    "clearup_dist_env",
    "comm",
    "compute_pad_size",
    "correct_attn_lse",
    "correct_attn_lse_with_sink",
    "correct_attn_out",
    "correct_attn_out_lse",
    "correct_attn_out_lse_with_sink",
    "correct_attn_out_with_sink",
    "dispatch",
    "flex_flash_attn_func",
    "full_attention_to_varlen_attention",
    "get_a2a_corr_factor",
    "get_calc_cost_factor",
    "get_comm_cost_factor",
    "get_most_recent_key",
    "get_position_ids",
    "infer_attn_mask_from_cu_seqlens",
    "infer_attn_mask_from_sliding_window",
    "infer_varlen_mask_from_batch",
    "is_valid_cu_seqlens",
    "magi_attn_flex_dispatch",
    "magi_attn_flex_key",
    "magi_attn_varlen_dispatch",
    "magi_attn_varlen_key",
    "make_flex_key_for_new_mask_after_dispatch",
    "make_static_key",
    "make_varlen_key_for_new_mask_after_dispatch",
    "pad_at_dim",
    "roll",
    "roll_simple",
    "selected_key_share",
    "setup_dist_env",
    "squash_batch_dim",
    "undispatch",
    "unpad_at_dim",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = compat_name(name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
