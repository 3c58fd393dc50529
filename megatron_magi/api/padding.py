"""Padding of tensors, for code that pads by itself. Keys need none of it: they pad what they dispatch."""

from __future__ import annotations

import torch

from megatron_magi.api.arguments import fill_number, tensor
from megatron_magi.checks import int_at_least, integer
from megatron_magi.comm.dispatch import as_filled, value_as_filled


def compute_pad_size(total_seqlen_q: int, cp_size: int, chunk_size: int) -> int:
    """Tokens that fill a sequence up to a multiple of ``chunk_size * cp_size``.

    A key computes its own padding (``key.pad_size``); this is for code that wants to know it before.

    Raises:
        ValueError: ``cp_size`` or ``chunk_size`` is not positive, or a number is no integer.
    """
    cp_size, chunk_size = int_at_least(cp_size, "cp_size", 1), int_at_least(chunk_size, "chunk_size", 1)
    return -int_at_least(total_seqlen_q, "total_seqlen_q", 0) % (cp_size * chunk_size)


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


def _dimension(x: torch.Tensor, dim: int) -> int:
    if not -x.ndim <= integer(dim, "dim") < x.ndim:
        raise ValueError(f"dim: {dim}, but x has {x.ndim} dimensions")
    return dim % x.ndim
