"""Kinds of layers, as configurations of transformers name them: which look at other tokens by attention alone."""

from __future__ import annotations

from typing import Any

from megatron_magi.hf import indexed

KINDS = {"full_attention", "sliding_attention", "chunked_attention"}
"""Kinds of layers whose only look at other tokens is attention that takes a mask."""


def other_kinds(model_config: Any) -> list[str]:
    """Kinds of a model's layers that look at other tokens in another way (linear attention, convolutions)."""
    text = model_config.get_text_config()
    known = KINDS | {indexed.LAYER} if indexed.is_known_config(text) else KINDS
    return sorted(set(getattr(text, "layer_types", None) or ()) - known)


def check_kinds(model_config: Any, model: Any = None) -> None:
    """Raises ValueError for a model that needs to have all tokens of a sequence, in their order."""
    if getattr(model_config.get_text_config(), "token_dropout", False):
        raise ValueError(
            "token_dropout: embeddings (ESM's) are scaled by the number of masks in their sequence, of which a rank has"
            " its rows; use the model on one rank"
        )
    others = other_kinds(model_config)
    if others or getattr(model, "_is_stateful", False):
        raise ValueError(
            "model: layers that look at other tokens in another way than full, sliding or chunked attention cannot be "
            f"sharded: {others or type(model).__name__}"
        )


def check_kinds_of_mask(model_config: Any, name: str) -> None:
    """Raises ValueError that names what gives a mask of one's own, for a model with layers that take none."""
    others = other_kinds(model_config)
    if others:
        raise ValueError(f"{name}: the model has layers that take no mask: {others}")
