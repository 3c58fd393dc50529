"""Shape, strides, dtype and alignment of a tensor without its memory: launches are prepared from these."""

from __future__ import annotations

from math import prod
from typing import Any, Self

import torch
from torch import Tensor

_ALIGNMENT = 256
_SOMEWHERE = 1 << 32
"""Stands for the address of a tensor, which calls give later; a multiple of `_ALIGNMENT`."""


class Layout:
    """How a tensor lies in memory, with the methods of a tensor that preparing a launch needs.

    Attributes:
        shape, dtype, device: of the tensor.
    """

    __slots__ = ("_at", "_strides", "device", "dtype", "shape")

    def __init__(
        self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, device: torch.device, at: int = 0
    ) -> None:
        self.shape, self._strides, self.dtype, self.device, self._at = shape, strides, dtype, device, at

    @classmethod
    def of(cls, t: Any) -> Self:
        """The layout of a tensor; also takes a layout."""
        return cls(tuple(t.shape), t.stride(), t.dtype, t.device, t.data_ptr() % _ALIGNMENT)

    @classmethod
    def new(cls, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Self:
        """The layout of a contiguous tensor at the begin of an allocation."""
        return cls(tuple(shape), tuple(prod(shape[i + 1 :]) for i in range(len(shape))), dtype, device)

    def new_empty(self, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Layout:
        """See `torch.Tensor.new_empty`."""
        return Layout.new(shape, dtype or self.dtype, self.device)

    def with_rows(self, count: int) -> Layout:
        """The same layout with another number of rows."""
        return Layout((count, *self.shape[1:]), self._strides, self.dtype, self.device, self._at)

    def __getitem__(self, rows: slice) -> Layout:
        assert rows.start is None and rows.step is None
        return self.with_rows(min(rows.stop, self.shape[0]))

    def __len__(self) -> int:
        return self.shape[0]

    def dim(self) -> int:
        """See `torch.Tensor.dim`."""
        return len(self.shape)

    def stride(self, dim: int | None = None) -> Any:
        """See `torch.Tensor.stride`."""
        return self._strides if dim is None else self._strides[dim]

    def numel(self) -> int:
        """See `torch.Tensor.numel`."""
        return prod(self.shape)

    def element_size(self) -> int:
        """See `torch.Tensor.element_size`."""
        return self.dtype.itemsize

    def is_contiguous(self) -> bool:
        """See `torch.Tensor.is_contiguous`."""
        wanted = 1
        for size, stride in zip(reversed(self.shape), reversed(self._strides), strict=True):
            if size != 1 and stride != wanted:
                return not self.numel()
            wanted *= size
        return True

    def data_ptr(self) -> int:
        """A made-up address with the alignment of the tensor's."""
        return _SOMEWHERE + self._at


Like = Tensor | Layout
"""A tensor, or the layout of one."""
