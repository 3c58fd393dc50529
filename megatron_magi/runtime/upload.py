"""Arrays that go to a device together: one buffer, one copy."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch

from megatron_magi.runtime.lasting import lasting

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

    @lasting()
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


@lasting()
def pack(arrays: Sequence[np.ndarray]) -> PackedArrays:
    """Copies arrays of numbers or bools into one buffer.

    Args:
        arrays: of any shapes and of dtypes that torch has.
    """
    places, end = _places_of(arrays, 0)
    buffer = np.zeros(max(end, _ALIGNMENT), dtype=np.uint8)  # an empty one has no strides to view it by
    _fill(buffer, arrays, places)
    return PackedArrays(torch.from_numpy(buffer), places)


def _places_of(arrays: Sequence[np.ndarray], start: int) -> tuple[tuple[_Place, ...], int]:
    """Places from byte ``start`` on, and where they end."""
    places, end = [], start
    for array in arrays:
        places.append(_Place(end, _torch_dtype(array.dtype), array.shape))
        end += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
    return tuple(places), end


@cache
def _torch_dtype(dtype: np.dtype) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype=dtype)).dtype


def _fill(buffer: np.ndarray, arrays: Sequence[np.ndarray], places: Sequence[_Place]) -> None:
    """Copies the arrays to their places."""
    for array, place in zip(arrays, places, strict=True):
        buffer[place.offset : place.offset + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def current_device() -> torch.device:
    """The current GPU, or the CPU where there is none."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def upload(arrays: Sequence[np.ndarray], device: torch.device | str) -> Sequence[torch.Tensor]:
    """Copies of the arrays on ``device``, there when this returns: whatever stream uses them first. Inside of
    `together`, when that ends.

    The host waits for the copy, which is on a stream of its own, and not for what is queued on the current one. The
    memory is used again once the stream that is current now is done with what was queued when the tensors went.

    Raises:
        RuntimeError: a CUDA graph is being captured, which would refer to memory that may go.
    """
    device, block = torch.device(device), _gathering.block
    if block is not None and _with_index(device) == block.device:
        tensors = block.take(arrays)
        if tensors is not None:
            return tensors
    packed = pack(arrays)
    if device.type != "cuda" or type(packed.buffer) is not torch.Tensor:
        return packed.to(device)
    with _copying(device) as (current, copies):
        tensors = packed.to(device)
        copies.synchronize()
    if tensors and current is not None:
        tensors[0].record_stream(current)  # of all: they lie in one block
    return tensors


@contextmanager
def together(device: torch.device) -> Iterator[None]:
    """Uploads to ``device`` inside of it, by this thread, are one copy, which is there when it ends; nothing may read
    them before. Inside of another it is a part of that. Large ones go by themselves at once.
    """
    if _gathering.block is not None:
        yield
        return
    device = _with_index(device)
    block = _gathering.block = _Block(device, _rooms.get(device, _LEAST_TOGETHER))
    try:
        yield
    except BaseException:
        block.later.clear()
        raise
    finally:
        _gathering.block = None
        block.send()
        if block.wanted:
            room = max(block.wanted * 5 // 4, block.room * 7 // 8, _LEAST_TOGETHER)
            _rooms[device] = min(room, _MOST_TOGETHER) // _ALIGNMENT * _ALIGNMENT


def when_there(do: Callable[[], object]) -> None:
    """Runs ``do`` once what was uploaded is there: now, or when `together` ends. For caches that other threads read."""
    block = _gathering.block
    if block is None:
        do()
    else:
        block.later.append(do)


def made_once[T](key: Hashable, make: Callable[[], T], keep: Callable[[T], object]) -> T:
    """What ``make`` uploads: made once in a `together`, and given to ``keep`` once it is there.

    Args:
        key: what it is, for this thread and as long as ``keep`` is still to be called.
        make: makes it.
        keep: puts it where other threads find it; what it refers to stays until then.
    """
    block = _gathering.block
    made = {} if block is None else block.made
    if key not in made:
        made[key] = found = make()
        when_there(lambda: keep(found))
    return made[key]


class _Block:
    """Memory on a device that uploads share, and where they wait for their copy.

    Args:
        device: with its index.
        room: bytes.

    Attributes:
        room: as given.
        wanted: bytes of all uploads, those for which there was no room too.
        later: what is to be done once they are there.
        made: see `made_once`.
    """

    def __init__(self, device: torch.device, room: int) -> None:
        self.device, self.room, self.later, self.wanted = device, room, list[Callable[[], object]](), 0
        self.made: dict[Hashable, Any] = {}
        self._staging = self._memory = torch.empty(0, device="cpu")
        self._views: dict[torch.dtype, torch.Tensor] = {}
        self._end = 0

    @lasting()
    def take(self, arrays: Sequence[np.ndarray]) -> Sequence[torch.Tensor] | None:
        """Tensors at which the arrays will be; None if there is no room for them."""
        places, end = _places_of(arrays, self._end)
        self.wanted += end - self._end
        is_fake = type(torch.empty(0, device="meta")) is not torch.Tensor  # these lie nowhere
        if end > self.room or is_fake:
            return None
        if not self._memory.numel():
            self._begin()
        _fill(self._staging.numpy(), arrays, places)
        self._end = end
        for dtype in {place.dtype for place in places} - self._views.keys():
            self._views[dtype] = self._memory.view(dtype)
        return Views(self._views, places)

    def _begin(self) -> None:
        of_gpu = self.device.type == "cuda"
        with _copying(self.device):
            self._memory = torch.empty(self.room, dtype=torch.uint8, device=self.device)
        # The allocator of page-locked memory hands a block out again only once copies from it are done.
        on_host = self._memory.device.type == "cpu"
        self._staging = (
            self._memory if on_host else torch.empty(self.room, dtype=torch.uint8, device="cpu", pin_memory=of_gpu)
        )

    def send(self) -> None:
        """Copies all of it, and waits for that."""
        if self._end and self._staging is not self._memory:
            with _copying(self.device) as (current, copies):
                self._memory[: self._end].copy_(self._staging[: self._end], non_blocking=True)
                if current is not None:
                    copies.synchronize()
            if current is not None:
                self._memory.record_stream(current)
        for do in self.later:
            do()


class _Gathering(threading.local):
    """The block of the `together` in which this thread is."""

    block: _Block | None = None


_gathering = _Gathering()
_LEAST_TOGETHER, _MOST_TOGETHER = 1 << 16, 1 << 20
"""Bytes of a block. It lives as long as any of the tensors in it."""
_rooms: dict[torch.device, int] = {}
"""Bytes of the next block, from what the last ones held."""


@contextmanager
def _copying(device: torch.device) -> Iterator[tuple[torch.cuda.Stream | None, Any]]:
    """The stream of copies to ``device`` is current meanwhile; yields that which was before, and it. Both are None
    where there are no streams.

    Raises:
        RuntimeError: a CUDA graph is being captured.
    """
    if device.type != "cuda":
        yield None, None
        return
    with torch.cuda.device(device):
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "tables are not copied to a GPU while a CUDA graph is captured: run the same calls before"
            )
        current, copies = torch.cuda.current_stream(), _copies_to(torch.cuda.current_device())
        with torch.cuda.stream(copies):
            yield current, copies


def _with_index(device: torch.device) -> torch.device:
    if device.type != "cuda" or device.index is not None or not torch.cuda.is_available():
        return device
    return torch.device("cuda", torch.cuda.current_device())


@cache
def _copies_to(device: int) -> torch.cuda.Stream:
    """One for each device: the allocator has separate memory for each stream."""
    return torch.cuda.Stream(device)
