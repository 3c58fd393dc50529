"""Patterns of layers: which have attention or run through tokens, in hybrid models and GPTs, and which are refused.

Imports no layers.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from megatron_magi.mcore.sample_packing import is_asked_for
from megatron_magi.mcore.versions import found_version, release

_ATTENTION = "*+D"
_LINEAR = "MG"
_VARIANT, _SPARSE_VARIANT = "gated_delta_net", "dsa"
_UNFIT_FOR_SPARSE = {
    "softmax_type": ("vanilla", "Megatron's sparse attention has no sinks; leave it vanilla"),
    "window_size": (None, "Megatron's sparse attention has no windows; drop it"),
    "dsa_kernel_backend": ("none", "these kernels take the place of this package's; leave it none"),
    "qk_clip": (False, "Megatron's absorbed latent attention does not clip; drop it"),
    "log_max_attention_logit": (False, "Megatron's sparse attention reports no logits; drop it"),
}
"""Options that do not go with sparse attention: the value that does, and what to do."""
_MAMBA_EXPANSION = 2
"""Channels of a Mamba layer over the hidden size, where the number of its heads is not given."""


def check(pattern: str | None, name: str = "hybrid_layer_pattern") -> None:
    """Refuses patterns with layers that need megatron-core 0.19 or later, where an older one is installed.

    Args:
        pattern: as ``--hybrid-layer-pattern`` takes it; None has no layers.
        name: of the argument, for the message.

    Raises:
        ValueError: there are such layers; names them.
    """
    for letter, kind in (("G", "gated delta net"), ("D", "sparse attention of DeepSeek")):
        if letter in (pattern or ""):
            _check_version(f"{name}: {pattern!r} has the layers {letter} ({kind}), which")


def check_variant(variant: str | None) -> None:
    """Refuses GPTs with another ``experimental_attention_variant`` than gated delta nets and sparse attention.

    Raises:
        ValueError: it is another one.
    """
    if variant in (_VARIANT, _SPARSE_VARIANT):
        _check_version(f"experimental_attention_variant: {variant!r} layers")
    elif variant is not None:
        raise ValueError(f"experimental_attention_variant: {variant!r} does not work with --attention-backend magi")


def _check_version(what: str) -> None:
    if release(found_version()) < (0, 19):
        raise ValueError(f"{what} need megatron-core 0.19 with --attention-backend magi, found {found_version()}")


def has_sparse_layers(args: Namespace) -> bool:
    """Has a model layers whose attention chooses keys by an indexer?"""
    patterns = (getattr(args, name, None) or "" for name in ("hybrid_layer_pattern", "hybrid_override_pattern"))
    variant = getattr(args, "experimental_attention_variant", None)
    return variant == _SPARSE_VARIANT or any("D" in pattern for pattern in patterns)


def check_sparse_options(options: Any) -> None:
    """Refuses options of a command line or a ``TransformerConfig`` that do not go with sparse attention.

    Raises:
        ValueError: there is one; names it.
    """
    for name, (allowed, advice) in _UNFIT_FOR_SPARSE.items():
        value = getattr(options, name, allowed)
        if getattr(value, "name", value) != allowed:
            raise ValueError(f"{name}: got {value}, but {advice}")
    every, num_predicting = (getattr(options, name, 0) or 0 for name in ("dsa_indexer_topk_freq", "mtp_num_layers"))
    if every > 1 and num_predicting:  # whose layers are numbered from 1 again: lists of others would be taken
        raise ValueError(
            f"dsa_indexer_topk_freq: got {every}, but layers of multi-token prediction choose keys anew; give 1"
        )


def check_sparse_layers(args: Namespace) -> None:
    """Refuses options that do not go with sparse attention, if the model has some.

    Args:
        args: a parsed command line.

    Raises:
        ValueError: there is one; names it.
    """
    if not has_sparse_layers(args):
        return
    check_sparse_options(args)
    if (args.micro_batch_size or 1) > 1:
        raise ValueError(
            f"micro_batch_size: Megatron's absorbed latent attention, of which sparse attention is made, takes one "
            f"sequence of a packed microbatch, got {args.micro_batch_size}; give --micro-batch-size 1"
        )
    if args.cuda_graph_impl == "full_iteration":
        raise ValueError(
            "cuda_graph_impl: full_iteration with --attention-backend magi does not work with sparse attention, which "
            "takes the bounds of documents from outside of the graph"
        )
    if args.tensor_model_parallel_size > 1 and not args.sequence_parallel:
        raise ValueError("sequence_parallel: absorbed latent attention needs it with tensor parallelism; give it")


def linear_layers(args: Namespace) -> str:
    """The kinds of linear layers that a model has: ``M``, ``G``, both or none."""
    pattern = getattr(args, "hybrid_layer_pattern", None) or ""
    if getattr(args, "experimental_attention_variant", None) == _VARIANT:
        pattern += "G"
    return "".join(letter for letter in _LINEAR if letter in pattern)


def is_hybrid(args: Namespace) -> bool:
    """Does a command line, which Megatron may not have validated yet, name the layers of a hybrid model?"""
    return any(getattr(args, name, None) is not None for name in ("hybrid_layer_pattern", "hybrid_override_pattern"))


def predicts(args: Namespace) -> bool:
    """Has the pattern of a command line multi-token prediction?

    Megatron derives ``args.mtp_num_layers`` from it when it validates.
    """
    return "/" in (getattr(args, "hybrid_layer_pattern", None) or "") or bool(
        getattr(args, "mtp_hybrid_override_pattern", None)
    )


def attention_layers(args: Namespace) -> list[int]:
    """Numbers of the layers with attention, from 1, as Megatron numbers them.

    Layers of multi-token prediction in a hybrid model are numbered from 1 again.
    """
    pattern = getattr(args, "hybrid_layer_pattern", None)
    if pattern is None:
        layers = range(1, args.num_layers + 1)
        is_linear = _gated_delta_nets(args)
        return [number for number in layers if not is_linear[number - 1]]
    stacks = pattern.replace("|", "").split("/")
    return sorted({n for stack in stacks for n, letter in enumerate(stack, 1) if letter in _ATTENTION})


def _gated_delta_nets(args: Namespace) -> list[bool]:
    """Of the layers of a GPT, as Megatron reads ``--linear-attention-freq``."""
    every = getattr(args, "linear_attention_freq", None)
    if getattr(args, "experimental_attention_variant", None) != _VARIANT or every is None:
        return [False] * args.num_layers
    if isinstance(every, int):
        return [number % every != 0 for number in range(1, args.num_layers + 1)]
    if len(every) != args.num_layers:
        raise ValueError(f"linear_attention_freq: names {len(every)} layers of {args.num_layers}")
    return [bool(is_linear) for is_linear in every]


def check_linear_layers(args: Namespace, *, is_padded: bool = False) -> None:
    """Refuses options that do not go with linear layers, if the model has some.

    Args:
        args: a parsed command line.
        is_padded: whether microbatches are.

    Raises:
        ValueError: there is one; names it.
    """
    letters = linear_layers(args)
    if letters and args.cuda_graph_impl == "full_iteration":
        raise ValueError(
            "cuda_graph_impl: full_iteration with --attention-backend magi does not work with linear layers "
            f"({', '.join(letters)}), which take the order of tokens and bounds of documents from outside of the graph"
        )
    has_documents = args.reset_attention_mask or args.sft or args.dataloader_inter_document_masking
    has_documents = has_documents or is_asked_for(args)
    has_parts = is_padded and args.micro_batch_size > 1  # of several sequences, in a column of Megatron's batch
    if args.context_parallel_size > 1 or has_documents or has_parts:  # else they run as they do in Megatron
        if "M" in letters:
            _check_mamba(args)
        if "G" in letters:
            _check_gated_delta_net(args)
    if "G" in letters:
        check_shared_norm(args.tensor_model_parallel_size, is_split=args.sequence_parallel)


def check_shared_norm(tp_size: int, *, is_split: bool) -> None:
    """Refuses gated delta nets whose norm would have the gradient of one tensor-parallel rank's heads alone.

    All heads share it (gated_delta_net/common.py:256), and Megatron adds up gradients of norms under sequence
    parallelism, or by names that are not this one's.

    Args:
        tp_size: number of tensor-parallel ranks.
        is_split: sequence parallelism.

    Raises:
        ValueError: the model is such.
    """
    if tp_size > 1 and not is_split:
        raise ValueError(
            "sequence_parallel: without it Megatron does not add up the gradients of the norm that a gated delta net's "
            f"heads share over tensor_model_parallel_size={tp_size} ranks; give it"
        )


def check_mamba_path(*, is_efficient: bool) -> None:
    """Refuses Mamba's path that saves no memory, for layers that are given an order of tokens, by ValueError."""
    if not is_efficient:
        raise ValueError(
            "disable_mamba_mem_eff_path: Mamba's other path knows no documents and no order of tokens; drop it"
        )


def check_delta_rule(*, is_deterministic: bool) -> None:
    """Refuses Megatron's deterministic gated delta net, for layers that are given an order of tokens, by ValueError."""
    if is_deterministic:
        raise ValueError(
            "deterministic_mode: Megatron's deterministic gated delta net knows no documents and no order of tokens; "
            "drop it, or train without documents, context parallelism and several padded sequences a microbatch"
        )


def _check_mamba(args: Namespace) -> None:
    check_mamba_path(is_efficient=args.use_mamba_mem_eff_path)
    tp_size, cp_size = args.tensor_model_parallel_size, args.context_parallel_size
    heads = args.mamba_num_heads or args.hidden_size * _MAMBA_EXPANSION // args.mamba_head_dim
    _check_heads("mamba_num_heads", heads, args)
    groups = args.mamba_num_groups // tp_size
    if args.mamba_num_groups % tp_size or (groups % cp_size and cp_size % groups):
        raise ValueError(
            f"mamba_num_groups: {args.mamba_num_groups} groups cannot be split evenly, nor each be shared evenly, "
            f"between {tp_size} tensor- times {cp_size} context-parallel ranks"
        )


def _check_gated_delta_net(args: Namespace) -> None:
    check_delta_rule(is_deterministic=args.deterministic_mode)
    for name in ("linear_num_key_heads", "linear_num_value_heads"):
        _check_heads(name, getattr(args, name), args)


def _check_heads(name: str, heads: int, args: Namespace) -> None:
    tp_size, cp_size = args.tensor_model_parallel_size, args.context_parallel_size
    if heads % (tp_size * cp_size):
        raise ValueError(
            f"{name}: {heads} heads cannot be split evenly between {tp_size} tensor- times {cp_size} context-parallel "
            "ranks, as which these layers exchange tokens for heads"
        )
