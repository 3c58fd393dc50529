"""Tensors without their memory: what launches are prepared by, before there are tensors."""

from __future__ import annotations

from math import prod
from typing import Any, Self

import torch
from torch import Tensor

_ALIGNMENT = 256
_SOMEWHERE = 1 << 32
"""Address of tensors that have none; a multiple of `_ALIGNMENT`. Calls give the real ones."""


class Layout:
    """How a tensor lies in memory; has those of a tensor's methods that launches are prepared with.

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
        """That of a tensor, or of a layout."""
        return cls(tuple(t.shape), t.stride(), t.dtype, t.device, t.data_ptr() % _ALIGNMENT)

    @classmethod
    def new(cls, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Self:
        """Of a contiguous tensor, where memory begins."""
        return cls(tuple(shape), tuple(prod(shape[i + 1 :]) for i in range(len(shape))), dtype, device)

    def new_empty(self, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Layout:
        """As of a tensor."""
        return Layout.new(shape, dtype or self.dtype, self.device)

    def with_rows(self, count: int) -> Layout:
        """With another number of rows."""
        return Layout((count, *self.shape[1:]), self._strides, self.dtype, self.device, self._at)

    def __getitem__(self, rows: slice) -> Layout:
        assert rows.start is None and rows.step is None
        return self.with_rows(min(rows.stop, self.shape[0]))

    def __len__(self) -> int:
        return self.shape[0]

    def dim(self) -> int:
        """As of a tensor."""
        return len(self.shape)

    def stride(self, dim: int | None = None) -> Any:
        """As of a tensor."""
        return self._strides if dim is None else self._strides[dim]

    def numel(self) -> int:
        """As of a tensor."""
        return prod(self.shape)

    def element_size(self) -> int:
        """As of a tensor."""
        return self.dtype.itemsize

    def is_contiguous(self) -> bool:
        """As of a tensor."""
        wanted = 1
        for size, stride in zip(reversed(self.shape), reversed(self._strides), strict=True):
            if size != 1 and stride != wanted:
                return not self.numel()
            wanted *= size
        return True

    def data_ptr(self) -> int:
        """An address that is aligned as that of the tensor."""
        return _SOMEWHERE + self._at


Like = Tensor | Layout
"""A tensor, or how one lies."""
