"""From Megatron's arguments to a `MagiConfig`, and the sequence length that both sides use."""

from __future__ import annotations

from argparse import Namespace

from megatron_magi.config import AttendConfig, CostModel, DispatchConfig, MagiConfig, OverlapConfig
from megatron_magi.mask.builders import causal
from megatron_magi.mcore.carrier import Window
from megatron_magi.mcore.core_attention import layer_window
from megatron_magi.plan import make_dispatch


def magi_config(args: Namespace) -> MagiConfig:
    """How to plan and execute attention for a validated command line."""
    tp_size = args.tensor_model_parallel_size
    is_mla = args.multi_latent_attention
    num_kv = args.num_attention_heads if is_mla or not args.group_query_attention else args.num_query_groups
    cost = CostModel(
        num_heads_q=args.num_attention_heads // tp_size,
        num_heads_kv=max(1, num_kv // tp_size),
        head_dim=args.qk_head_dim + args.qk_pos_emb_head_dim if is_mla else args.kv_channels,
        head_dim_v=args.v_head_dim if is_mla else None,
        element_bytes=args.params_dtype.itemsize,
    )
    return MagiConfig(
        dispatch=dispatch_config(args),
        overlap=OverlapConfig(degree=args.magi_overlap_degree, cost=cost),
        attend=AttendConfig(deterministic=bool(args.deterministic_mode)),
    )


def dispatch_config(args: Namespace) -> DispatchConfig:
    """Even shards: pipeline stages exchange tensors of one shape. A shard must split evenly over the
    sequences of a microbatch, and each of these over tensor-parallel ranks."""
    per_sequence = args.tensor_model_parallel_size if args.sequence_parallel else 1
    return DispatchConfig(alignment=args.micro_batch_size * per_sequence, chunk_size=args.magi_chunk_size)


def padded_seq_length(args: Namespace) -> int:
    """Tokens a sequence in Megatron's tensors, all context-parallel ranks together."""
    total = args.seq_length * args.micro_batch_size
    dispatch = make_dispatch(causal(total), dispatch_config(args), args.context_parallel_size)
    return dispatch.padded_seqlen // args.micro_batch_size


def primary_window(config: object, num_layers: int) -> Window:
    """Window of the layers that cost most, for which tokens are balanced: full attention if any layer has it.

    Args:
        config: Megatron's transformer configuration, or arguments with the same names.
        num_layers: layers of the model.
    """
    windows = [layer_window(config, number + 1) for number in range(num_layers)]
    return None if None in windows else windows[0]
