"""From Megatron's arguments to a `MagiConfig`, and the sequence length that both sides use."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace

from megatron_magi.config import DispatchConfig, MagiConfig
from megatron_magi.mask.builders import causal
from megatron_magi.mcore.carrier import Window
from megatron_magi.mcore.core_attention import layer_window
from megatron_magi.plan import make_dispatch


def magi_config(args: Namespace, default: MagiConfig) -> MagiConfig:
    """How to plan and execute attention.

    Args:
        args: a validated command line.
        default: what holds where the command line says nothing.

    Raises:
        ValueError: ``default`` asks for uneven shards.
    """
    tp_size = args.tensor_model_parallel_size
    is_mla = args.multi_latent_attention
    num_kv = args.num_attention_heads if is_mla or not args.group_query_attention else args.num_query_groups
    cost = replace(
        default.overlap.cost,
        num_heads_q=args.num_attention_heads // tp_size,
        num_heads_kv=max(1, num_kv // tp_size),
        head_dim=args.qk_head_dim + args.qk_pos_emb_head_dim if is_mla else args.kv_channels,
        head_dim_v=args.v_head_dim if is_mla else None,
        element_bytes=args.params_dtype.itemsize,
    )
    degree = default.overlap.degree if args.magi_overlap_degree is None else args.magi_overlap_degree
    deterministic = default.attend.deterministic or bool(args.deterministic_mode)
    return replace(
        default,
        dispatch=_dispatch_config(args, default.dispatch),
        overlap=replace(default.overlap, degree=degree, cost=cost),
        attend=replace(default.attend, deterministic=deterministic),
    )


def _dispatch_config(args: Namespace, default: DispatchConfig) -> DispatchConfig:
    """A shard splits evenly over the sequences of a microbatch, and each of these over tensor-parallel ranks.

    Matrix products in FP8 take numbers of tokens that are multiples of 16 or 32, on each of these ranks too.
    """
    if default.uneven_shard:
        raise ValueError("uneven_shard: Megatron's pipeline stages exchange tensors of one shape; drop it")
    per_sequence = args.tensor_model_parallel_size if args.sequence_parallel else 1
    if args.fp8 is not None:
        per_sequence *= 32 if args.fp8_recipe == "mxfp8" else 16
    chunk_size = default.chunk_size if args.magi_chunk_size is None else args.magi_chunk_size
    return replace(default, alignment=args.micro_batch_size * per_sequence, chunk_size=chunk_size)


def padded_seq_length(args: Namespace, config: DispatchConfig) -> int:
    """Tokens a sequence in Megatron's tensors, all context-parallel ranks together.

    The padding depends on the number of tokens alone, so one mask speaks for all.
    """
    total = args.seq_length * args.micro_batch_size
    dispatch = make_dispatch(causal(total), config, args.context_parallel_size)
    return dispatch.padded_seqlen // args.micro_batch_size


def primary_window(config: object, num_layers: int) -> Window:
    """Window of the layers that cost most, for which tokens are balanced: full attention if any layer has it.

    Args:
        config: Megatron's transformer configuration, or arguments with the same names.
        num_layers: layers of the model.
    """
    windows = [layer_window(config, number + 1) for number in range(num_layers)]
    return None if None in windows else windows[0]
