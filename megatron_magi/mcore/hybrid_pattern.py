"""Patterns of layers: which have attention or run through tokens, in hybrid models and GPTs, and which are refused.

Imports no layers.
"""

from __future__ import annotations

from argparse import Namespace

from megatron_magi.mcore.versions import found_version, release

_ATTENTION = "*+"
_LINEAR = "MG"
_REFUSED = {"D": "sparse attention of DeepSeek"}
_VARIANT = "gated_delta_net"
_MAMBA_EXPANSION = 2
"""Channels of a Mamba layer over the hidden size, where the number of its heads is not given."""


def check(pattern: str | None, name: str = "hybrid_layer_pattern") -> None:
    """Refuses patterns with layers that `--attention-backend magi` does not know.

    Args:
        pattern: as ``--hybrid-layer-pattern`` takes it; None has no layers.
        name: of the argument, for the message.

    Raises:
        ValueError: there are such layers; names them.
    """
    letters = pattern or ""
    found = [f"{letter} ({kind})" for letter, kind in _REFUSED.items() if letter in letters]
    if found:
        raise ValueError(
            f"{name}: {pattern!r} has the layers {', '.join(found)}, which do not work with "
            "--attention-backend magi, as they choose their keys themselves; *, +, -, E, M and G do"
        )
    if "G" in letters:
        _check_version(f"{name}: {pattern!r} has the layers G (gated delta net), which")


def check_variant(variant: str | None) -> None:
    """Refuses GPTs with another ``experimental_attention_variant`` than gated delta nets.

    Raises:
        ValueError: it is another one.
    """
    if variant == _VARIANT:
        _check_version(f"experimental_attention_variant: {variant!r} layers")
    elif variant is not None:
        raise ValueError(f"experimental_attention_variant: {variant!r} does not work with --attention-backend magi")


def _check_version(what: str) -> None:
    if release(found_version()) < (0, 19):
        raise ValueError(f"{what} need megatron-core 0.19 with --attention-backend magi, found {found_version()}")


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


def check_linear_layers(args: Namespace) -> None:
    """Refuses options that do not go with linear layers, if the model has some.

    Args:
        args: a parsed command line.

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
    if args.context_parallel_size == 1 and not has_documents:
        return  # they run as they do in Megatron
    if "M" in letters:
        _check_mamba(args)
    if "G" in letters:
        _check_gated_delta_net(args)


def _check_mamba(args: Namespace) -> None:
    if not args.use_mamba_mem_eff_path:
        raise ValueError(
            "disable_mamba_mem_eff_path: Mamba's other path knows no documents and no order of tokens; drop it"
        )
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
    if args.deterministic_mode:
        raise ValueError(
            "deterministic_mode: Megatron's deterministic gated delta net knows no documents and no order of tokens; "
            "drop it, or train without documents and context parallelism"
        )
    for name in ("linear_num_key_heads", "linear_num_value_heads"):
        _check_heads(name, getattr(args, name), args)


def _check_heads(name: str, heads: int, args: Namespace) -> None:
    tp_size, cp_size = args.tensor_model_parallel_size, args.context_parallel_size
    if heads % (tp_size * cp_size):
        raise ValueError(
            f"{name}: {heads} heads cannot be split evenly between {tp_size} tensor- times {cp_size} context-parallel "
            "ranks, as which these layers exchange tokens for heads"
        )
