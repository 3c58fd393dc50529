"""How rows of several tensors share one byte buffer, so that they travel as one message."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod

import torch


def resolved(x: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy in which the conjugate or the sign that torch only notes is in the memory that is read."""
    return x.resolve_conj().resolve_neg() if x.is_conj() or x.is_neg() else x


@dataclass(frozen=True)
class RowLayout:
    """Byte layout of a row: the rows of all tensors side by side.

    Row i of the buffer holds row i of every tensor, so a split by ranks is a split of whole
    buffer rows, whatever the tensors' widths, and a received tensor is a view of the buffer.

    Attributes:
        shapes: trailing shape of each tensor.
        dtypes: dtype of each tensor.
        offsets: where each tensor starts in a row, bytes, a multiple of its element size.
        row_bytes: bytes of a row, a multiple of every element size. There is padding only
            between tensors of different dtypes whose widths do not fit.
    """

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    offsets: tuple[int, ...]
    row_bytes: int

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor]) -> RowLayout:
        """The layout for tensors ``[n, ...]``."""
        return cls.make(tuple(x.shape[1:] for x in tensors), tuple(x.dtype for x in tensors))

    @classmethod
    @lru_cache(maxsize=64)
    def make(cls, shapes: tuple[tuple[int, ...], ...], dtypes: tuple[torch.dtype, ...]) -> RowLayout:
        """The layout for tensors of trailing shapes and dtypes; equal ones are one object."""
        offsets, end, largest = [], 0, 1
        for shape, dtype in zip(shapes, dtypes, strict=True):
            start = _round_up(end, dtype.itemsize)
            offsets.append(start)
            end = start + prod(shape) * dtype.itemsize
            largest = max(largest, dtype.itemsize)
        # At least one element: a stride of zero bytes cannot be viewed as another dtype.
        return cls(tuple(map(tuple, shapes)), dtypes, tuple(offsets), max(_round_up(end, largest), largest))

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of a row of each tensor."""
        return tuple(prod(shape) * dtype.itemsize for shape, dtype in zip(self.shapes, self.dtypes, strict=True))

    def sizes_in(self, dtype: torch.dtype) -> list[int]:
        """Bytes of a row of each tensor, if all were of another dtype."""
        return [prod(shape) * dtype.itemsize for shape in self.shapes]

    @cached_property
    def ways(self) -> dict:
        """What row operations cache for this layout, by names of their own."""
        return {}

    def new_buffer(self, num_rows: int, device: torch.device) -> torch.Tensor:
        """An uninitialised buffer, uint8 ``[num_rows, row_bytes]``."""
        return torch.empty(num_rows, self.row_bytes, dtype=torch.uint8, device=device)

    def new_tensors(self, num_rows: int, device: torch.device) -> list[torch.Tensor]:
        """Uninitialised tensors ``[num_rows, ...]``, each by itself."""
        parts = zip(self.shapes, self.dtypes, strict=True)
        return [torch.empty(num_rows, *shape, dtype=dtype, device=device) for shape, dtype in parts]

    def views(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """The tensors in a buffer, ``[num_rows, ...]`` each; rows are contiguous, ``row_bytes`` apart."""
        num_rows, typed = buffer.shape[0], {dtype: buffer.view(dtype) for dtype in dict.fromkeys(self.dtypes)}
        return [
            typed[dtype].as_strided((num_rows, *shape), strides, typed[dtype].storage_offset() + first)
            for shape, dtype, (first, strides) in zip(self.shapes, self.dtypes, self._places, strict=True)
        ]

    @cached_property
    def _places(self) -> list[tuple[int, tuple[int, ...]]]:
        """Offset and strides of each tensor in a buffer, in elements of the tensor."""
        places = []
        for shape, dtype, offset in zip(self.shapes, self.dtypes, self.offsets, strict=True):
            strides = [prod(shape[i + 1 :]) for i in range(len(shape))]
            places.append((offset // dtype.itemsize, (self.row_bytes // dtype.itemsize, *strides)))
        return places


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
