"""Masks of a user's, for `--magi-mask` and `--magi-layer-masks`."""

from __future__ import annotations

import os

import numpy as np

from megatron_magi.mask import AttnMask
from megatron_magi.mask.builders import prefix_lm
from megatron_magi.mask.microbatch import Microbatch


def prefix_of_first_byte(batch: Microbatch, most: int) -> AttnMask:
    """Each document's first token says how long its prefix is."""
    lengths = np.diff(batch.cu_seqlens)
    first = batch.tokens.reshape(-1).numpy()[batch.cu_seqlens[:-1]]
    return prefix_lm(np.minimum(first % most, lengths), lengths)


def windows_on_even_layers(layer_number: int) -> str | None:
    """Every second layer sees 12 tokens back, the others have the mask of the model."""
    return None if layer_number % 2 else "sliding_window:left=12,global_tokens=1"


def fails_on_the_last_rank(batch: Microbatch) -> AttnMask:
    """As a function does that reads a file which only some machines have."""
    if os.environ["RANK"] == str(int(os.environ["WORLD_SIZE"]) - 1):
        raise KeyError("frames")
    return prefix_lm([0], [batch.total_seqlen])


def window_on_the_third_layer(layer_number: int) -> str | None:
    """The third layer sees 12 tokens back, the others have the mask of the model."""
    return "sliding_window:left=12,global_tokens=1" if layer_number == 3 else None
