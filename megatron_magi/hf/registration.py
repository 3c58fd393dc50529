"""Makes ``attn_implementation="magi"`` known to transformers."""

from __future__ import annotations

from transformers import AttentionInterface, AttentionMaskInterface

from megatron_magi.hf.attention import NAME, attention, layer_mask


def register() -> None:
    """Makes ``attn_implementation="magi"`` known to transformers. Importing `megatron_magi.hf` does it."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, layer_mask)
