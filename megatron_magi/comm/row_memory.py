"""Memory layouts of rows for the kernels of ``csrc/group_collective``, and which dtypes can be added."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from megatron_magi.comm.row_layout import RowLayout
from megatron_magi.cuda.params import struct

MOST_TENSORS = 4
"""Most tensors of one launch."""
WIDEST = 16
"""Bytes of the widest access."""
ELEMENTS = {torch.bfloat16: "BFloat", torch.float16: "Half", torch.float32: "float", torch.float64: "double"}
"""C++ names of the element types of rows that are added."""

Rows = tuple[int, int, int]
"""Rows in memory: address, stride in bytes, bytes of a row."""


def with_rows(x: Tensor) -> Tensor:
    """The tensor, or a copy, with contiguous rows."""
    return x if x.is_contiguous() or x[0].is_contiguous() else x.contiguous()


def can_add(layout: RowLayout, into: Sequence[Tensor]) -> bool:
    """Whether the kernels can add rows of ``layout`` to ``into``: equal dtypes and widths, 16 or 32 bits, or all 64."""
    partial, wide = layout.dtypes[0], into[0].dtype
    if len(into) > MOST_TENSORS or not {partial, wide} <= ELEMENTS.keys():
        return False
    equal = all(t == partial for t in layout.dtypes) and all(x.dtype == wide for x in into)
    return equal and (partial == torch.float64) == (wide == torch.float64)


def rows_of(tensors: Sequence[Tensor], sizes: Sequence[int]) -> list[Rows]:
    """The rows of tensors; ``sizes``: bytes of a row of each."""
    return [(x.data_ptr(), x.stride(0) * x.element_size(), size) for x, size in zip(tensors, sizes, strict=True)]


def rows_in(buffer: Tensor, layout: RowLayout) -> list[Rows]:
    """The rows of each tensor in a buffer of a layout."""
    address = buffer.data_ptr()
    return [(address + at, layout.row_bytes, size) for at, size in zip(layout.offsets, layout.sizes, strict=True)]


def widest(rows: list[Rows]) -> int:
    """Bytes of the widest access that all addresses, strides and lengths allow."""
    bits = WIDEST
    for row in rows:
        for number in row:
            bits |= number
    return bits & -bits


def vector_of(rows: list[Rows], partial: torch.dtype, wide: torch.dtype) -> int:
    """Elements of an access if rows of dtype ``partial`` are added to ``rows`` of dtype ``wide``."""
    bits = WIDEST * max(wide.itemsize // partial.itemsize, 1)
    for address, stride, size in rows:
        bits |= stride | size | (address if address % WIDEST else 0)
    return min((bits & -bits) // wide.itemsize, WIDEST // partial.itemsize)


def slot_rows(rows: list[Rows], row_bytes: int, unit: int, loads: int) -> ctypes.Structure:
    """``SlotRows`` of peers.cuh.

    Args:
        rows: of each tensor, in their order in a slot.
        row_bytes: of a row in a slot.
        unit: bytes of an access to ``rows``.
        loads: loads that a thread issues before its first store.
    """
    addresses, strides, sizes = zip(*rows, strict=True)
    *begin, units = accumulate([size // unit for size in sizes], initial=0)
    return struct("group_collective/peers.cuh", "SlotRows")(
        rows=addresses, stride=strides, begin=(*begin, *[units] * (MOST_TENSORS - len(rows))), units=units,
        log2_lanes=min(max(-(-units // loads), 1) - 1, 31).bit_length(), row_bytes=row_bytes,
    )  # fmt: skip
