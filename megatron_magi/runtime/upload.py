"""Arrays that go to a device together: one buffer, one copy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch

_ALIGNMENT = 16  # bytes; what kernels read tables with


class _Place(NamedTuple):
    """Offset, dtype and shape of an array in the buffer."""

    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class PackedArrays:
    """Arrays side by side in one buffer; made by `pack`. It can be sent from a worker process of a data loader.

    Attributes:
        buffer: uint8 ``[num_bytes]`` on the CPU.
        places: of the arrays, in their order.
    """

    buffer: torch.Tensor
    places: tuple[_Place, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of all arrays."""
        return self.buffer.numel()

    def pin_memory(self) -> PackedArrays:
        """A copy in page-locked memory; the name is the one that data loaders call."""
        return PackedArrays(self.buffer.pin_memory(), self.places)

    def tensor(self, index: int) -> torch.Tensor:
        """One of the arrays, on the CPU: a view of the buffer."""
        offset, dtype, shape = self.places[index]
        return self.buffer[offset : offset + prod(shape) * dtype.itemsize].view(dtype).view(shape)

    def to(self, device: torch.device | str) -> Views:
        """The arrays as tensors on ``device``: views of one block of memory, made when they are asked for.

        To a GPU it is one copy from page-locked memory, queued on the current stream. The host does not wait for it.
        """
        device = torch.device(device)
        memory = self.buffer
        if device.type == "cuda" and type(memory) is torch.Tensor:  # not a fake one, which lies nowhere
            # The allocator of page-locked memory hands a block out again only once copies from it are done.
            memory = (memory if memory.is_pinned() else memory.pin_memory()).to(device, non_blocking=True)
        elif device.type != "cpu":
            memory = memory.to(device)
        return Views({dtype: memory.view(dtype) for dtype in {place.dtype for place in self.places}}, self.places)


class Views(Sequence[torch.Tensor]):
    """Tensors in one block of memory; a slice is likewise."""

    def __init__(self, memory: Mapping[torch.dtype, torch.Tensor], places: Sequence[_Place]) -> None:
        self._memory, self._places = memory, places

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return Views(self._memory, self._places[index])
        offset, dtype, shape = self._places[index]
        memory = self._memory[dtype]  # one call a tensor: layers wait for this
        return memory.as_strided(shape, _strides(shape), memory.storage_offset() + offset // dtype.itemsize)


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a contiguous array, in elements."""
    return (1,) if len(shape) == 1 else tuple(prod(shape[i + 1 :]) for i in range(len(shape)))


def pack(arrays: Sequence[np.ndarray]) -> PackedArrays:
    """Copies arrays of numbers or bools into one buffer.

    Args:
        arrays: of any shapes and of dtypes that torch has.
    """
    places, end = [], 0
    for array in arrays:
        places.append(_Place(end, torch.from_numpy(np.empty(0, dtype=array.dtype)).dtype, array.shape))
        end += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
    buffer = np.zeros(max(end, _ALIGNMENT), dtype=np.uint8)  # an empty one has no strides to view it by
    for array, place in zip(arrays, places, strict=True):
        buffer[place.offset : place.offset + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return PackedArrays(torch.from_numpy(buffer), tuple(places))


def current_device() -> torch.device:
    """The current GPU, or the CPU where there is none."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def upload(arrays: Sequence[np.ndarray], device: torch.device | str) -> Sequence[torch.Tensor]:
    """Copies of the arrays on ``device``, there when this returns: whatever stream uses them first.

    The host waits for the copy, which is on a stream of its own, and not for what is queued on the current one. The
    memory is used again once the stream that is current now is done with what was queued when the tensors went.

    Raises:
        RuntimeError: a CUDA graph is being captured, which would refer to memory that may go.
    """
    packed, device = pack(arrays), torch.device(device)
    if device.type != "cuda" or type(packed.buffer) is not torch.Tensor:
        return packed.to(device)
    with torch.cuda.device(device):
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "tables are not copied to a GPU while a CUDA graph is captured: run the same calls before"
            )
        current = torch.cuda.current_stream()
        copies = _copies_to(current.device_index)
        with torch.cuda.stream(copies):
            tensors = packed.to(current.device)
            copies.synchronize()
        if tensors:
            tensors[0].record_stream(current)  # of all: they lie in one block
    return tensors


@cache
def _copies_to(device: int) -> torch.cuda.Stream:
    """One for each device: the allocator has separate memory for each stream."""
    return torch.cuda.Stream(device)
