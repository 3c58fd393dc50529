"""Makes ``attn_implementation="magi"`` known to transformers."""

from __future__ import annotations

from transformers import AttentionInterface, AttentionMaskInterface

from megatron_magi.hf.attention import NAME, OWN_NAME, attention, layer_mask


def register() -> None:
    """Makes ``attn_implementation="magi"`` known to transformers. Importing `megatron_magi.hf` does it."""
    for name in (NAME, OWN_NAME):
        AttentionInterface.register(name, attention)
        AttentionMaskInterface.register(name, layer_mask)
