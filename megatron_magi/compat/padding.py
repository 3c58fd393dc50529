"""Padding of tensors and of masks, for code that pads by itself. Keys need none of it: they pad what they dispatch."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from megatron_magi.checks import int_at_least, integer
from megatron_magi.comm.dispatch import as_filled, value_as_filled
from megatron_magi.compat.arguments import fill_number, tensor
from megatron_magi.compat.ranges import AttnRanges
from megatron_magi.compat.types import AttnMaskType, GeneralAttnMaskType, as_ranges, mask_types
from megatron_magi.mask import AttnRange


def pad_at_dim(x: torch.Tensor, dim: int, pad_size: int, value: float = 0.0, side: str = "right") -> torch.Tensor:
    """``x`` made longer. Differentiable.

    Args:
        x: any shape and dtype.
        dim: the dimension that grows; negative counts from the last.
        pad_size: by how much.
        value: what is filled in, a number that the dtype holds.
        side: ``"right"``, after what is there, or ``"left"``, before it.

    Returns:
        A new tensor like ``x``, with ``x.shape[dim] + pad_size`` entries along ``dim``.

    Raises:
        ValueError: ``x`` has no such dimension, ``pad_size`` is negative, the dtype cannot hold ``value``, or ``side``
            is another word.
    """
    if side not in ("left", "right"):
        raise ValueError(f"side: expected 'left' or 'right', got {side!r}")
    tensor(x, "x", "with a dimension that can grow")
    shape = list(x.shape)
    shape[_dimension(x, dim)] += int_at_least(pad_size, "pad_size", 0)
    number, given = fill_number(value, x.dtype, "value"), x
    if not x.requires_grad:  # a view in another dtype has no gradient
        number, x = value_as_filled(number, x.dtype), as_filled(x)
    # Not by torch.cat, which under autocast raises an error for its other 16-bit dtype.
    out = x.new_full(shape, number)
    out.narrow(dim, pad_size if side == "left" else 0, x.shape[dim]).copy_(x)
    return out if out.dtype == given.dtype else out.view(given.dtype)


def unpad_at_dim(x: torch.Tensor, dim: int, pad_size: int) -> torch.Tensor:
    """``x`` without its last ``pad_size`` entries along ``dim``, as a view.

    Raises:
        ValueError: ``x`` has no such dimension, or fewer entries than ``pad_size``.
    """
    tensor(x, "x", "with a dimension that can shrink")
    length = x.shape[_dimension(x, dim)] - int_at_least(pad_size, "pad_size", 0)
    if length < 0:
        raise ValueError(f"pad_size: {pad_size}, but x has {x.shape[dim]} entries along dimension {dim}")
    return x.narrow(dim, 0, length)


def apply_padding(
    q_ranges: Iterable,
    k_ranges: Iterable,
    attn_mask_type: GeneralAttnMaskType,
    total_seqlen: int,
    pad_size: int,
) -> tuple[AttnRanges, AttnRanges, list[AttnMaskType]]:
    """The slices of a mask and one more: of the padding at the end, which sees no key.

    Args:
        q_ranges, k_ranges, attn_mask_type: the mask, see `megatron_magi.api.magi_attn_flex_key`.
        total_seqlen: tokens before the padding.
        pad_size: tokens of padding.

    Returns:
        New ``(q_ranges, k_ranges, attn_mask_type)`` with ``[total_seqlen, total_seqlen + pad_size)``, ``[0, 0)`` and
        `AttnMaskType.FULL` at their ends.

    Raises:
        ValueError: an argument is wrong.
    """
    start, pad_size = int_at_least(total_seqlen, "total_seqlen", 0), int_at_least(pad_size, "pad_size", 0)
    queries, keys = (AttnRanges(as_ranges(r, name)) for r, name in ((q_ranges, "q_ranges"), (k_ranges, "k_ranges")))
    types = [AttnMaskType.from_int_type(number) for number in mask_types(attn_mask_type, len(queries))]
    queries.append(AttnRange(start, start + pad_size))
    keys.append(AttnRange(0, 0))
    return queries, keys, [*types, AttnMaskType.FULL]


def _dimension(x: torch.Tensor, dim: int) -> int:
    if not -x.ndim <= integer(dim, "dim") < x.ndim:
        raise ValueError(f"dim: {dim}, but x has {x.ndim} dimensions")
    return dim % x.ndim
