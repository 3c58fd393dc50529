"""Objects with large tensors that go from one process to another as one block, and are taken apart when needed.

The thread of a data loader that receives what workers have made competes with the training for the interpreter. So it
gets a `Parcel`: some bytes, and one block of memory for all tensors. Processes that multiprocessing has started share
the block: the receiver opens the sender's anonymous file by its number, which takes a quarter of the time of torch's
exchange of file descriptors. As there, the sender has to live until the parcel has arrived, and it arrives once.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
from collections import deque
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple, Self

import numpy as np
import torch

from megatron_magi.runtime.upload import PackedArrays, pack

_DTYPES = {
    torch.int64: np.int64, torch.int32: np.int32, torch.uint8: np.uint8, torch.float32: np.float32, torch.bool: np.bool_
}  # fmt: skip
_ARRAYS = {np.dtype(dtype) for dtype in _DTYPES.values()}


class _Pickler(pickle.Pickler):
    """Pickles an object without its tensors and arrays, which it collects."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.aside: list[np.ndarray] = []

    def persistent_id(self, obj: Any) -> tuple[int, bool] | None:
        is_array = type(obj) is np.ndarray and obj.dtype in _ARRAYS
        if not is_array and not (type(obj) is torch.Tensor and obj.dtype in _DTYPES and obj.device.type == "cpu"):
            return None
        self.aside.append(obj if is_array else obj.detach().numpy())
        return len(self.aside) - 1, is_array


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, packed: PackedArrays) -> None:
        super().__init__(io.BytesIO(data))
        self._packed, self._memory = packed, packed.buffer.numpy()

    def persistent_load(self, pid: tuple[int, bool]) -> np.ndarray | torch.Tensor:
        index, is_array = pid
        if not is_array:
            return self._packed.tensor(index)
        offset, dtype, shape = self._packed.places[index]
        return np.ndarray(shape, _DTYPES[dtype], self._memory, offset)


class _Sent(NamedTuple):
    """A block that this process has sent; its first byte is set when it has arrived."""

    file: int
    memory: mmap.mmap


_sent: deque[_Sent] = deque()  # kept open until they have arrived


def _send(parcel: Parcel) -> tuple:
    """How multiprocessing sends a parcel."""
    _close_arrived()
    block = parcel._tensors.buffer.numpy()
    file, size = os.memfd_create("megatron_magi"), mmap.PAGESIZE + block.nbytes
    os.ftruncate(file, size)
    memory = mmap.mmap(file, size)
    memory[mmap.PAGESIZE :] = block
    _sent.append(_Sent(file, memory))
    return _receive, (type(parcel), parcel._data, parcel._tensors.places, os.getpid(), file, size)


def _close_arrived() -> None:
    for _ in range(len(_sent)):
        try:
            sent = _sent.popleft()
        except IndexError:  # another thread looks through them too
            return
        if sent.memory[0]:
            sent.memory.close()
            os.close(sent.file)
        else:
            _sent.append(sent)


def _receive(kind: type[Parcel], data: bytes, places: tuple, process: int, file: int, size: int) -> Parcel:
    try:
        own = os.open(f"/proc/{process}/fd/{file}", os.O_RDWR)
    except OSError as error:
        raise RuntimeError(f"a parcel from process {process} did not arrive: it has ended, or /proc is shut") from error
    try:
        memory = mmap.mmap(own, size)
    finally:
        os.close(own)
    memory[0] = 1
    block = torch.frombuffer(memory, dtype=torch.uint8, offset=mmap.PAGESIZE)  # keeps the memory
    return kind(data, PackedArrays(block, places))


class Sendable[Parts]:
    """Base of what is made in one process for another: its parts go in a `Parcel`, opened when they are asked for."""

    def __init__(self, parts: Parts | Parcel) -> None:
        self._parts = parts

    @property
    def parts(self) -> Parts:
        """The parts, unpacked on first use if they came from another process."""
        if isinstance(self._parts, Parcel):
            self._parts = self._parts.open()
        return self._parts

    @property
    def is_closed(self) -> bool:
        """Whether it comes from another process, and its parts have not been asked for."""
        return isinstance(self._parts, Parcel)

    def pin_memory(self) -> Self:
        """A copy in which what goes to the device is page-locked; the name is the one that data loaders call."""
        made = object.__new__(type(self))
        made._parts = self._parts.pin_memory() if isinstance(self._parts, Parcel) else self._pinned(self._parts)
        return made

    def _pinned(self, parts: Parts) -> Parts:
        raise NotImplementedError

    def __reduce__(self) -> tuple:
        parts = self._parts
        return _arrived, (type(self), parts if isinstance(parts, Parcel) else Parcel.of(parts))


def _arrived[S: Sendable](kind: type[S], parcel: Parcel) -> S:
    made = object.__new__(kind)
    made._parts = parcel
    return made


class Parcel:
    """An object on its way; made by `of`."""

    def __init__(self, data: bytes, tensors: PackedArrays) -> None:
        self._data, self._tensors = data, tensors

    @classmethod
    def of(cls, value: Any) -> Self:
        """Packs whatever can be pickled."""
        file = io.BytesIO()
        pickler = _Pickler(file)
        pickler.dump(value)
        return cls(file.getvalue(), pack(pickler.aside))

    def pin_memory(self) -> Self:
        """A copy in page-locked memory; tensors opened from it are too."""
        return type(self)(self._data, self._tensors.pin_memory())

    def open(self) -> Any:
        """What is in it. Tensors and arrays are views of one block of memory."""
        return _Unpickler(self._data, self._tensors).load()


ForkingPickler.register(Parcel, _send)
