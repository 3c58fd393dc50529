"""From Megatron's arguments to a `MagiConfig`, and the sequence length that both sides use."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from math import prod

from megatron_magi import envs
from megatron_magi.checks import renamed
from megatron_magi.config import DispatchConfig, MagiConfig
from megatron_magi.envs import Environment
from megatron_magi.mask.builders import causal
from megatron_magi.mask.source import LayerMasks, MaskSource, load_function
from megatron_magi.mcore.core_attention import layer_window
from megatron_magi.mcore.hybrid_pattern import attention_layers, linear_layers
from megatron_magi.mcore.layout import dispatch_in, layout_of
from megatron_magi.mcore.validate import check_config, check_masks
from megatron_magi.plan import make_dispatch


def is_magi() -> bool:
    """Whether the command line asks for magi; there may be none, for models and data sets are built without, too."""
    from megatron.training import global_vars

    args = global_vars._GLOBAL_ARGS
    return bool(args is not None and getattr(args, "magi_attention", False))


def magi_config(args: Namespace, default: MagiConfig) -> MagiConfig:
    """How to plan and execute attention.

    Args:
        args: a validated command line.
        default: what holds where the command line says nothing.

    Raises:
        ValueError: ``default`` asks for uneven shards, for sums of gradients that are summed already, or for queries
            that travel in captured graphs.
    """
    check_config(args, default)
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
    if captures(args) and args.context_parallel_size > 1:
        degree = 1
    deterministic = default.attend.deterministic or bool(args.deterministic_mode)
    return replace(
        default,
        dispatch=_dispatch_config(args, default.dispatch),
        overlap=replace(default.overlap, degree=degree, cost=cost),
        attend=replace(default.attend, deterministic=deterministic),
    )


def captures(args: Namespace) -> bool:
    """Whether attention is captured in CUDA graphs."""
    return getattr(args, "cuda_graph_impl", "none") == "full_iteration"


def with_nodes(args: Namespace, config: MagiConfig, environment: Environment) -> MagiConfig:
    """``config`` with the nodes of ``--hierarchical-context-parallel-sizes``, of which the last size counts them.

    Raises:
        ValueError: the environment asks for two levels, and the command line does not tell the nodes.
    """
    if args.context_parallel_size == 1:
        return config
    sizes = args.hierarchical_context_parallel_sizes
    told = prod(sizes[:-1]) if sizes else None
    nodes = environment.ranks_per_node(told, "--hierarchical-context-parallel-sizes")
    return replace(config, comm=replace(config.comm, ranks_per_node=nodes))


def _dispatch_config(args: Namespace, default: DispatchConfig) -> DispatchConfig:
    """A shard splits evenly over the sequences of a microbatch, and each of these over tensor-parallel ranks.

    Matrix products in FP8 take numbers of tokens that are multiples of 16 or 32, on each of these ranks too.
    """
    per_sequence = args.tensor_model_parallel_size if args.sequence_parallel else 1
    if args.fp8 is not None:
        per_sequence *= 32 if args.fp8_recipe == "mxfp8" else 16
    chunk_size = default.chunk_size if args.magi_chunk_size is None else args.magi_chunk_size
    # Captured queries do not travel.
    queries = "home" if captures(args) and default.queries == "auto" else default.queries
    return replace(default, alignment=args.micro_batch_size * per_sequence, chunk_size=chunk_size, queries=queries)


def buffer_length(args: Namespace, num_sequences: int | None = None) -> int:
    """Tokens a sequence in Megatron's tensors, all context-parallel ranks together; data has ``args.seq_length``.

    Args:
        args: a validated command line.
        num_sequences: of a microbatch; ``args.micro_batch_size`` when None.
    """
    return padded_seq_length(args, magi_config(args, envs.load().default_config()).dispatch, num_sequences)


def padded_seq_length(args: Namespace, config: DispatchConfig, num_sequences: int | None = None) -> int:
    """Tokens a sequence in Megatron's tensors, all context-parallel ranks together.

    The padding depends on the number of tokens alone, so one mask speaks for all.

    Args:
        args: a validated command line.
        config: made of it.
        num_sequences: of a microbatch; ``args.micro_batch_size`` when None.
    """
    num_sequences = args.micro_batch_size if num_sequences is None else num_sequences
    chunk_size = "chunk_size" if args.magi_chunk_size is None else "magi_chunk_size"
    with renamed("chunk_size", chunk_size):
        total, cp_size = args.seq_length * num_sequences, args.context_parallel_size
        return _padded_length(total, config, cp_size, layout_of(args)) // num_sequences


@lru_cache(maxsize=8)
def _padded_length(total: int, config: DispatchConfig, cp_size: int, layout: str | None) -> int:
    """The padded length of so many tokens; cached, as every step asks for it."""
    if layout is not None:
        return dispatch_in(layout, total, cp_size, config).padded_seqlen
    return make_dispatch(causal(total), replace(config, algorithm="sequential"), cp_size).padded_seqlen


def summary(args: Namespace, *, by: str | None) -> str:
    """A line for the log: what computes attention, the mask of layers that have none of their own, and which have.

    ``by``: the kernels in words; None if it is torch.
    """
    if args.magi_mask is not None:
        mask = args.magi_mask
    elif args.reset_attention_mask:
        mask = "causal inside documents, which end at EOD tokens"
    else:
        mask = "causal inside sequences, or documents where the data set gives their bounds"
    attention = attention_layers(args)
    windows = sum(layer_window(args, number) is not None for number in attention)
    if windows:
        mask += f"; in {windows} of {len(attention)} layers the window {args.window_size[0]},0"
    if args.magi_layer_masks is not None:
        mask += f"; layers as {args.magi_layer_masks} says"
    by = by or "torch (correct, but slow)"
    if linear_layers(args):
        mask += "; linear layers run through documents"
    lie = "" if layout_of(args) is None else f", layout {layout_of(args)}"
    return f"> attention by megatron_magi: {by}, context parallelism {args.context_parallel_size}{lie}, mask: {mask}"


def layer_masks(args: Namespace) -> LayerMasks:
    """Which layer attends by which mask.

    Args:
        args: a validated command line.

    Raises:
        ValueError: a mask that is asked for does not exist or does not fit the other arguments.
    """
    attention = attention_layers(args)
    num_layers = max([args.num_layers, *attention])
    windows = [layer_window(args, n) if n in attention else None for n in range(1, num_layers + 1)]
    default = MaskSource.parse("documents" if args.magi_mask is None else args.magi_mask, "magi_mask")
    layers: list[MaskSource | None] = [None] * num_layers
    if args.magi_layer_masks is not None:
        choose = load_function(args.magi_layer_masks, "magi_layer_masks")
        for number in attention:
            layers[number - 1] = _mask_of_layer(choose, number, args.magi_layer_masks)
    check_masks(args, default, [own for own in layers if own is not None], windows)
    return LayerMasks(default, layers, windows)


def _mask_of_layer(choose: Callable, number: int, text: str) -> MaskSource | None:
    try:
        found = choose(number)
    except Exception as error:
        raise ValueError(
            f"magi_layer_masks: {text!r} raised {type(error).__name__} for layer {number}: {error}"
        ) from error
    if found is None:
        return None
    if not isinstance(found, str):
        raise ValueError(
            f"magi_layer_masks: {text!r} returned a {type(found).__name__} for layer {number}, expected a text as "
            "--magi-mask takes it, or None"
        )
    return MaskSource.parse(found, "magi_layer_masks")
