"""Masks of packed documents, composed of transformers' functions as its versions compose them."""

from collections.abc import Callable

from torch import Tensor
from transformers import masking_utils as masks


def until_5_23(function: Callable, position_ids: Tensor, numbers: Tensor, *blocks: Callable) -> Callable:
    """Documents first; blocks of tokens reach from one into another."""
    remapped = masks.remap_positions_for_packed_sequence(function, position_ids)
    packed = masks.and_masks(masks.packed_sequence_mask_function(numbers), remapped)
    return masks.or_masks(packed, *blocks) if blocks else packed


def since_5_24(function: Callable, position_ids: Tensor, numbers: Tensor, *blocks: Callable) -> Callable:
    """Documents last; blocks of tokens end with them."""
    remapped = masks.remap_positions_for_packed_sequence(function, position_ids)
    seen = masks.or_masks(remapped, *blocks) if blocks else remapped
    return masks.and_masks(seen, masks.packed_sequence_mask_function(numbers))
