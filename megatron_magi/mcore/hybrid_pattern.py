"""Patterns of hybrid models: which layers have attention, and which are refused. Imports no layers."""

from __future__ import annotations

from argparse import Namespace

_ATTENTION = "*+"
_REFUSED = {"M": "Mamba", "G": "gated delta net", "D": "sparse attention of DeepSeek"}


def check(pattern: str | None, name: str = "hybrid_layer_pattern") -> None:
    """Refuses patterns with layers that `--attention-backend magi` does not know.

    Args:
        pattern: as ``--hybrid-layer-pattern`` takes it; None has no layers.
        name: of the argument, for the message.

    Raises:
        ValueError: there are such layers; names them.
    """
    found = [f"{letter} ({kind})" for letter, kind in _REFUSED.items() if letter in (pattern or "")]
    if found:
        raise ValueError(
            f"{name}: {pattern!r} has the layers {', '.join(found)}, which do not work with "
            "--attention-backend magi, as it dispatches tokens in another order; *, +, - and E do"
        )


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
        return list(range(1, args.num_layers + 1))
    stacks = pattern.replace("|", "").split("/")
    return sorted({n for stack in stacks for n, letter in enumerate(stack, 1) if letter in _ATTENTION})
