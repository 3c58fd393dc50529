"""Kernels that are queued one after the other, prepared to the addresses of the tensors that they take.

The walk over them is here, and in C++ (csrc/calls), which is taken where it is built and needs less of the host's time.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from megatron_magi import compiled
from megatron_magi.cuda import driver
from megatron_magi.cuda.driver import Kernel, LaunchConfig

_VERSION = 1
"""Raised with that of csrc/calls/calls.cpp: a library that was built from other sources is not used."""
_Int, _Address = ctypes.c_int64, ctypes.c_uint64


Place = tuple[str, int]
"""An address: the name of one that a call gives, and bytes behind it."""


class Patch(NamedTuple):
    """What of a kernel's parameters is an address.

    Attributes:
        at: offset in the parameters, bytes.
        slot, add: the `Place`.
        is_map: a tensor map begins there, and the address is that of its tensor.
    """

    at: int
    slot: str
    add: int
    is_map: bool = False


class Step(NamedTuple):
    """A kernel with parameters of its own.

    Attributes:
        kernel: what runs.
        config: how it is launched.
        params: address of its parameters.
        memory: what holds them.
        patches: of them.
    """

    kernel: Kernel
    config: LaunchConfig
    params: int
    memory: Any
    patches: tuple[Patch, ...]


class _Patch(ctypes.Structure):
    _fields_ = [
        ("at", _Address), ("last", _Address), ("add", _Int), ("slot", ctypes.c_int32), ("is_map", ctypes.c_int32),
    ]  # fmt: skip


class _Step(ctypes.Structure):
    _fields_ = [(name, _Address) for name in ("config", "function", "pointers")]


class _Calls(ctypes.Structure):
    _fields_ = [
        ("launch", _Address), ("move", _Address), ("patches", _Address), ("steps", _Address), ("slots", _Address),
        *((name, _Int) for name in ("num_patches", "num_steps", "next", "status")),
    ]  # fmt: skip


class CallList:
    """Steps in their order, on one stream.

    Args:
        steps: what is queued.
        slots: names of the addresses that `queue` takes, in their order.
        stream: raw handle.
        lock: held while they are queued, and nothing else is on the stream.
    """

    def __init__(self, steps: Sequence[Step], slots: Sequence[str], stream: int, lock: threading.Lock) -> None:
        number, words = {name: i for i, name in enumerate(slots)}, []
        for step in steps:  # words of patches: far quicker than one structure after the other
            for at, slot, add, is_map in step.patches:
                words += step.params + at, 0, add, number[slot] | is_map << 32
        count = len(words) // 4
        self._steps, self._patches = tuple(steps), (_Patch * count).from_buffer((_Int * len(words))(*words))
        self._pointers = [(ctypes.c_void_p * 1)(step.params) for step in steps]
        self._slots, self._lock = (_Address * len(slots))(), lock
        self._pack = struct.Struct(f"{len(slots)}Q").pack_into
        for step in steps:
            step.config.stream = stream
        # A kernel that is timed is launched by Python.
        self._library = _library() if all(type(step.kernel) is Kernel for step in steps) else None
        self._native = None if self._library is None else self._for_library()

    def _for_library(self) -> _Calls:
        rows = [
            (ctypes.addressof(step.config), step.kernel.handle.value, ctypes.addressof(pointers))
            for step, pointers in zip(self._steps, self._pointers, strict=True)
        ]
        self._rows = (_Step * len(rows))(*rows)
        return _Calls(
            *driver.entry_points(),
            *(ctypes.addressof(array) for array in (self._patches, self._rows, self._slots)),
            len(self._patches), len(rows),
        )  # fmt: skip

    def queue(self, *addresses: int) -> None:
        """Queues all kernels; parameters are copied. ``addresses``: one for each slot.

        Raises:
            RuntimeError: CUDA refuses.
        """
        with self._lock:
            self._pack(self._slots, 0, *addresses)
            if self._native is None:
                self._walk()
            elif self._library.magi_calls_queue(self._native):
                self._go_on(self._native)

    def _go_on(self, native: _Calls) -> None:
        """After a step that was not queued: from there on, in the context that its kernel is loaded into."""
        try:
            with self._steps[native.next].kernel.where_it_runs(native.status):
                driver.check(self._library.magi_calls_queue(native), "kernel launch")
        finally:
            native.next = 0

    def _walk(self) -> None:
        """What csrc/calls does."""
        for patch in self._patches:
            address = self._slots[patch.slot] + patch.add
            if not patch.is_map:
                _Address.from_address(patch.at).value = address
            elif address != patch.last:
                driver.move_tensor_map(patch.at, address)
                patch.last = address
        for step, pointers in zip(self._steps, self._pointers, strict=True):
            step.kernel.launch(ctypes.addressof(step.config), pointers)


@cache
def _library() -> ctypes.CDLL | None:
    """The library next to this file; None where it was not built, or from other sources than these."""
    library = compiled.load(Path(__file__).parent, "calls", _VERSION)
    if library is not None:
        library.magi_calls_queue.restype = _Int
        library.magi_calls_queue.argtypes = [ctypes.POINTER(_Calls)]
    return library


def available() -> bool:
    """Whether the walk in C++ was built, from the sources that belong to this package."""
    return _library() is not None
