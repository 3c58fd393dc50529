"""Checksums of tensors, by which ranks compare what they must hold alike."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_BLOCK = 1 << 20
"""Elements that are read at once: 8 MiB of weights."""
_ODD = (-0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)
"""Odd numbers of 64 bits, those of splitmix64."""
_INTS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksums(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """One checksum of 63 bits for each tensor, int64 ``[len(tensors)]`` on ``device``; the host waits for none.

    It depends on values, their order and the shape. Equal values of different integer dtypes have the same one;
    floating-point numbers are compared bit by bit.
    """
    weights: dict[torch.device, Tensor] = {}
    found = []
    for x in tensors:
        if x.device not in weights:
            longest = max(min(y.numel(), _BLOCK) for y in tensors if y.device == x.device)
            weights[x.device] = _weights(longest, x.device)
        found.append(_of(x.detach(), weights[x.device]).to(device, non_blocking=True))
    return torch.stack(found) if found else torch.empty(0, dtype=torch.int64, device=device)


def checksum(x: Tensor) -> int:
    """That of one tensor, once it is computed."""
    return int(checksums([x], x.device))


def _of(x: Tensor, weights: Tensor) -> Tensor:
    flat = x.reshape(-1)
    if x.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    if flat.dtype.is_floating_point:
        flat = flat.contiguous().view(_INTS[flat.element_size()])
    shape = 1
    for size in x.shape:
        shape = (shape * 1_000_003 + int(size) + 1) % (1 << 62)
    total = torch.full((), shape, dtype=torch.int64, device=x.device)
    for block in flat.split(_BLOCK):
        total = total * _ODD[2] + (block.to(torch.int64) * weights[: len(block)]).sum()
    return total & ((1 << 63) - 1)


def _weights(count: int, device: torch.device) -> Tensor:
    """Odd numbers of 64 bits in no order, so that no change of single elements, nor of two of them, leaves the sum."""
    w = torch.arange(1, count + 1, dtype=torch.int64, device=device) * _ODD[0]
    w = (w ^ (w >> 30)) * _ODD[1]
    w = (w ^ (w >> 27)) * _ODD[2]
    return w ^ (w >> 31) | 1
