"""Checksums of tensors, by which ranks compare what they must hold alike."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_magi.comm.row_layout import resolved

_BLOCK = 1 << 20
"""Elements that are read at once: 8 MiB of weights."""
_ODD = (-0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)
"""Odd numbers of 64 bits, those of splitmix64."""
_INTS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
"""As which floating-point numbers are read, by bytes; 8 bytes as two, as a sum of 64 bits has little room for signs."""


def checksums(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """One checksum of 63 bits for each tensor, int64 ``[len(tensors)]`` on ``device``.

    The host waits for none, except for those of a GPU if ``device`` is a CPU. A checksum depends on values, their order
    and the shape. Equal values of different integer dtypes have the same one; floating-point and complex numbers are
    compared bit by bit.
    """
    flat, weights = [_integers(x.detach()) for x in tensors], {}
    for of in {x.device for x in flat}:
        weights[of] = _weights(max(min(x.numel(), _BLOCK) for x in flat if x.device == of), of)
    # A copy from a GPU that the host does not wait for can be read before it is there.
    found = [
        _sum(numbers, x.shape, weights[x.device]).to(device, non_blocking=device.type != "cpu")
        for numbers, x in zip(flat, tensors, strict=True)
    ]
    return torch.stack(found) if found else torch.empty(0, dtype=torch.int64, device=device)


def checksum(x: Tensor) -> int:
    """That of one tensor, once it is computed."""
    return int(checksums([x], x.device))


def _integers(x: Tensor) -> Tensor:
    """The numbers, or the bits of floating-point and complex ones, one after another."""
    flat = resolved(x).reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    return flat.contiguous().view(_INTS[flat.element_size()]) if flat.dtype.is_floating_point else flat


def _sum(numbers: Tensor, shape: Sequence[int], weights: Tensor) -> Tensor:
    of_shape = 1
    for size in shape:
        of_shape = (of_shape * 1_000_003 + int(size) + 1) % (1 << 62)
    total = torch.full((), of_shape, dtype=torch.int64, device=numbers.device)
    for block in numbers.split(_BLOCK):
        total = total * _ODD[2] + (block.to(torch.int64) * weights[: len(block)]).sum()
    return (total ^ (total >> 32)) & ((1 << 63) - 1)


def _weights(count: int, device: torch.device) -> Tensor:
    """Odd numbers of 64 bits in no order, so that no change of single elements leaves the sum, nor one of two that is
    not made for it."""
    w = torch.arange(1, count + 1, dtype=torch.int64, device=device) * _ODD[0]
    w = (w ^ (w >> 30)) * _ODD[1]
    w = (w ^ (w >> 27)) * _ODD[2]
    return w ^ (w >> 31) | 1
