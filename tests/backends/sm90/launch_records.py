"""What the host side of the Hopper kernels launches, written down so that two versions of it can be compared."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import pytest
from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_magi.backends.sm90 import kernels, plan, support
from megatron_magi.cuda import driver
from megatron_magi.runtime import upload
from megatron_magi.runtime.lru import LruCache
from tests.backends.sm90.fake_driver import fake_driver, kinds_of_params

_MAP_ADDRESS = 64  # in a tensor map of `_tensor_map`; before it a digest of the layout


class _Name(str):
    """Name of a kernel's source, with the macros that it is compiled with."""

    macros: tuple[str, ...] = ()


class Record(NamedTuple):
    """One launch: grid, threads a block, dynamic shared bytes, whether it may overlap, parameters by name."""

    kernel: str
    macros: tuple[str, ...]
    grid: int
    threads: int
    shared_bytes: int
    overlaps: bool
    params: tuple[tuple[str, object], ...]


class _NoRoom(dict):
    """Uploads go by themselves, as to GPUs: a block that they share is as large as those before it were."""

    def get(self, device: object, default: object = None) -> int:
        return 0

    def __setitem__(self, device: object, room: int) -> None:
        pass


class Memory(TorchDispatchMode):
    """Storages made meanwhile, by their size; kept alive so that no address is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, tuple[str, UntypedStorage]] = {}
        self.named: dict[int, tuple[str, UntypedStorage]] = {}

    def name(self, tensors: Mapping[str, Tensor]) -> None:
        """Names the tensors of the next call; those named before are "elsewhere" from now on."""
        for begin in self.named:
            self.made.pop(begin, None)
        self.named = {t.untyped_storage().data_ptr(): (name, t.untyped_storage()) for name, t in tensors.items()}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, Tensor) and t.untyped_storage().nbytes():
                storage = t.untyped_storage()
                self.made.setdefault(storage.data_ptr(), (f"{storage.nbytes()} bytes", storage))
        return out

    def place(self, address: int) -> object:
        """Name and offset of an address; "elsewhere" if its memory was not seen being made.

        The end of a storage, where empty parts of it begin, belongs to it if nothing else begins there.
        """
        for is_end in (False, True):
            for begin, (name, storage) in {**self.made, **self.named}.items():
                if begin <= address < begin + storage.nbytes() + is_end:
                    return name, address - begin
        return "elsewhere" if address else None


def kernel_named(name: str, macros: Sequence[str], threads: int, shared_bytes: int) -> driver.Kernel:
    """A kernel that is not loaded."""
    handle = _Name(name)
    handle.macros = tuple(macros)
    return driver.Kernel(handle, threads, shared_bytes)


@contextmanager
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[list[Record], Memory]]:
    """Yields the launches that are queued meanwhile, none of them run, and what names their addresses."""
    records: list[Record] = []
    memory = Memory()

    def load(_device, name, macros, threads, size) -> driver.Kernel:
        return kernel_named(name, macros, threads, size)

    def note(kernel, config, pointers) -> None:
        shape, params = driver.LaunchConfig.from_address(config), kinds[id(kernel)].from_address(pointers[0])
        handle = kernel.handle
        assert tuple(shape.grid)[1:] == (1, 1) and tuple(shape.block) == (kernel.threads, 1, 1)
        fields = tuple(_fields(params, memory))
        overlaps = bool(shape.num_attributes)
        records.append(
            Record(str(handle), handle.macros, shape.grid[0], shape.block[0], shape.shared_bytes, overlaps, fields)
        )

    with monkeypatch.context() as patch, fake_driver(patch):
        patch.setattr(kernels, "_load", load)
        kinds = kinds_of_params(patch)
        patch.setattr(driver.Kernel, "launch", note)
        patch.setattr(plan, "_plans", LruCache(1 << 30))
        patch.setattr(upload, "_rooms", _NoRoom())
        support.work_counter.cache_clear()
        patch.setattr(driver, "tensor_map", _tensor_map)
        patch.setattr(driver, "move_tensor_map", _move_tensor_map)
        with memory:
            yield records, memory
        support.work_counter.cache_clear()


def _fields(params: ctypes.Structure, memory: Memory, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Fields of a struct and of structs in it; addresses as names and offsets."""
    for name, kind in params._fields_:
        if name == "pad":
            continue
        if issubclass(kind, ctypes.Structure):
            yield from _fields(getattr(params, name), memory, f"{prefix}{name}.")
        elif issubclass(kind, ctypes.Array) and kind._type_ is ctypes.c_void_p:
            yield prefix + name, tuple(memory.place(address or 0) for address in getattr(params, name))
        elif issubclass(kind, ctypes.Array) and kind._type_ is not ctypes.c_char:
            # Of 64 bits these may be addresses too.
            places = [(number, memory.place(number)) for number in getattr(params, name)]
            yield prefix + name, tuple(place if isinstance(place, tuple) else number for number, place in places)
        elif issubclass(kind, ctypes.Array):
            field = getattr(type(params), name)
            encoded = ctypes.string_at(ctypes.addressof(params) + field.offset, field.size)
            address = int.from_bytes(encoded[_MAP_ADDRESS : _MAP_ADDRESS + 8], "little")
            yield prefix + name, (encoded[:_MAP_ADDRESS].hex(), memory.place(address))
        else:
            value = getattr(params, name)
            yield prefix + name, memory.place(value or 0) if kind is ctypes.c_void_p else value


def _tensor_map(t: Tensor, *box: int) -> bytes:
    layout = hashlib.sha512(repr((tuple(t.shape), t.stride(), t.dtype, box)).encode()).digest()
    return layout + t.data_ptr().to_bytes(8, "little") + bytes(driver.MAP_BYTES - _MAP_ADDRESS - 8)


def _move_tensor_map(at: int, address: int) -> None:
    ctypes.c_uint64.from_address(at + _MAP_ADDRESS).value = address
