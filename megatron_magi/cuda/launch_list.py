"""Lists of kernel launches whose parameters are complete but for the addresses of tensors, which each call gives.

A list is executed in Python, or in C++ (csrc/calls) if that is built, which takes less time of the host. All data of a
list lies in one block of memory, so a list for another mask is a copy of the block in which that mask's numbers are
set.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from megatron_magi.cuda import driver
from megatron_magi.cuda.driver import MAP_BYTES, Kernel, LaunchConfig
from megatron_magi.cuda.layout import Layout, Like
from megatron_magi.runtime import cpp_library

_VERSION = 2
"""Raised with that of csrc/calls/calls.cpp: a library that was built from other sources is not used."""
_Int, _Address = ctypes.c_int64, ctypes.c_uint64
_ALIGNMENT = 64  # of tensor maps
_GRID = LaunchConfig.grid.offset


Place = tuple[str, int | str]
"""An address: the name of one that a call gives, and an offset from it, in bytes or as the name of a mask's number."""


class Map(NamedTuple):
    """A tensor map of a kernel.

    Attributes:
        like: tensor of the layout, or the layout; its address does not matter.
        box: rows of a box, and its heads if not one.
        place: where the tensor is.
        rows: name of the mask's number of rows; None if they are those of ``like``.
    """

    like: Like
    box: tuple[int, ...]
    place: Place
    rows: str | None = None


class Step(NamedTuple):
    """One launch of a list.

    A parameter is named by its field: FIELD.FIELD in a struct that is a parameter, FIELD.INDEX in an array.

    Attributes:
        kernel: what runs.
        num_blocks: grid, or the name of the mask's number of blocks.
        params: a struct with the parameters that depend neither on the mask nor on addresses; it begins with the
            tensor maps.
        maps: these, in their order.
        fields: parameters that are addresses.
        numbers: parameters that are numbers of the mask, with the names of these.
        overlaps: blocks may take SMs that the kernel before it on the stream has left or never took.
        brings: numbers of the mask that come with the step.
    """

    kernel: Kernel
    num_blocks: int | str
    params: ctypes.Structure
    maps: Sequence[Map] = ()
    fields: Mapping[str, Place] = MappingProxyType({})
    numbers: Mapping[str, str] = MappingProxyType({})
    overlaps: bool = False
    brings: Mapping[str, int] = MappingProxyType({})


@cache
def _where(kind: type, name: str) -> tuple[int, int]:
    """Offset and size in bytes of a parameter."""
    at = 0
    for part in name.split("."):
        if issubclass(kind, ctypes.Array):
            kind = kind._type_
            at += int(part) * ctypes.sizeof(kind)
        else:
            at += getattr(kind, part).offset
            kind = dict(kind._fields_)[part]
    return at, ctypes.sizeof(kind)


class _Patch(ctypes.Structure):
    _fields_ = [
        ("at", _Address), ("last", _Address), ("add", _Int), ("slot", ctypes.c_int32), ("is_map", ctypes.c_int32),
    ]  # fmt: skip


class _Step(ctypes.Structure):
    _fields_ = [(name, _Address) for name in ("config", "function", "params")]


class _Calls(ctypes.Structure):
    _fields_ = [
        *((name, _Address) for name in ("launch", "move", "memory", "patches", "steps", "slots")),
        *((name, _Int) for name in ("num_patches", "num_steps", "next", "status")),
    ]  # fmt: skip


class _MapRows(NamedTuple):
    """A tensor map whose number of rows is a number of the mask: its place in the memory, the map, and its layout."""

    at: int
    map: Map
    layout: Layout

    def encode(self, numbers: Mapping[str, int]) -> np.ndarray:
        """The map with this number of rows; its address is set later."""
        encoded = driver.tensor_map(self.layout.with_rows(numbers[self.map.rows]), *self.map.box)
        return np.frombuffer(encoded, dtype=np.uint8)


class _Form:
    """The memory layout of lists that differ in the numbers of their masks only.

    Attributes:
        kernels: one a step.
        params, configs: offsets of the parameters and of the `LaunchConfig` of each step in the memory.
        steps, patches, slots: offsets of these tables.
        num_bytes: size of the memory.
        addresses: the entries of ``patches``.
        names: names of the mask's numbers.
        wide, narrow: numbers of 8 and of 4 bytes: their places, in such words, and indices of their names.
        maps: tensor maps whose number of rows depends on the mask.
        lock: held while kernels are queued.
        library: the C++ library, if it executes the list.
    """

    def __init__(self, steps: Sequence[Step], slots: Sequence[str], lock: threading.Lock) -> None:
        self.kernels, self.lock = [step.kernel for step in steps], lock
        self.params, self.configs, end = [], [], 0
        for step in steps:
            self.params.append(end)
            end = _aligned(end + ctypes.sizeof(step.params))
        for _ in steps:
            self.configs.append(end)
            end += ctypes.sizeof(LaunchConfig)
        self.steps = _aligned(end)
        self.patches = self.steps + len(steps) * ctypes.sizeof(_Step)
        self.num_patches = sum(len(step.maps) + len(step.fields) for step in steps)
        self.slots = self.patches + self.num_patches * ctypes.sizeof(_Patch)
        self.num_bytes = self.slots + len(slots) * ctypes.sizeof(_Address)
        self.pack = struct.Struct(f"{len(slots)}Q").pack_into
        self.num_slots = len(slots)
        # A kernel that is timed is launched by Python.
        self.library = _library() if all(type(kernel) is Kernel for kernel in self.kernels) else None
        self._place(steps, {name: i for i, name in enumerate(slots)})

    def _place(self, steps: Sequence[Step], slot: Mapping[str, int]) -> None:
        """Collects the places of addresses and of the mask's numbers."""
        self.maps, places, addresses = [], [], []
        for step, params, config in zip(steps, self.params, self.configs, strict=True):
            kind = type(step.params)
            found = [(params + i * MAP_BYTES, one.place, True) for i, one in enumerate(step.maps)]
            self.maps += [
                _MapRows(at, one, Layout.of(one.like))
                for (at, *_), one in zip(found, step.maps, strict=True) if one.rows is not None
            ]  # fmt: skip
            found += [(params + _where(kind, name)[0], place, False) for name, place in step.fields.items()]
            for at, (name, add), is_map in found:
                if isinstance(add, str):
                    patch = self.patches + len(addresses) * ctypes.sizeof(_Patch)
                    places.append((patch + _Patch.add.offset, ctypes.sizeof(_Int), add))
                addresses.append(_Patch(at, 0, 0 if isinstance(add, str) else add, slot[name], is_map))
            for field, name in step.numbers.items():
                at, size = _where(kind, field)
                places.append((params + at, size, name))
            if isinstance(step.num_blocks, str):
                places.append((config + _GRID, 4, step.num_blocks))
        self.addresses = (_Patch * len(addresses))(*addresses)
        assert all(size in (4, 8) for _, size, _ in places), "numbers of the mask have 32 or 64 bits"
        self.names = tuple(dict.fromkeys(name for *_, name in places))
        number = {name: i for i, name in enumerate(self.names)}
        self.wide, self.narrow = (
            np.array([(at // size, number[name]) for at, n, name in places if n == size], dtype=np.int64)
            .reshape(-1, 2).T for size in (8, 4)
        )  # fmt: skip

    def memory(self) -> np.ndarray:
        """New zeroed memory for a list, aligned, uint8 ``[num_bytes]``."""
        memory = np.zeros(self.num_bytes + _ALIGNMENT, dtype=np.uint8)
        begin = -memory.ctypes.data % _ALIGNMENT
        return memory[begin : begin + self.num_bytes]


class LaunchList:
    """Kernel launches in their order, on one stream. A list whose steps have numbers of a mask is queued only after
    `with_numbers` has set them.

    Args:
        steps: the launches.
        slots: names of the addresses that `queue` takes, in their order.
        stream: raw handle.
        lock: held while the launches are queued, so that nothing else comes between them on the stream.
    """

    def __init__(self, steps: Sequence[Step], slots: Sequence[str], stream: int, lock: threading.Lock) -> None:
        form = _Form(steps, slots, lock)
        memory = form.memory()

        def write(at: int, data: Any) -> None:
            content = np.frombuffer(data, dtype=np.uint8)
            memory[at : at + len(content)] = content

        for step, params, config in zip(steps, form.params, form.configs, strict=True):
            write(params, step.params)
            for i, one in enumerate(step.maps):
                if one.rows is None:
                    write(params + i * MAP_BYTES, driver.tensor_map(Layout.of(one.like), *one.box))
            launch = LaunchConfig(step.kernel, 1 if isinstance(step.num_blocks, str) else step.num_blocks)
            launch.stream, launch.num_attributes = stream, step.overlaps
            write(config, launch)
        write(form.patches, form.addresses)
        if form.library is not None:
            rows = zip(form.configs, form.kernels, form.params, strict=True)
            write(form.steps, (_Step * len(steps))(*((at, kernel.handle.value, params) for at, kernel, params in rows)))
        self._begin(form, memory, (None,) * len(form.maps))

    def _begin(self, form: _Form, memory: np.ndarray, rows: tuple[int | None, ...]) -> None:
        self._form, self._memory, self._rows = form, memory, rows
        self._base = base = memory.ctypes.data
        self._native = None
        if form.library is not None:
            self._native = _Calls(
                *driver.entry_points(), base, base + form.patches, base + form.steps, base + form.slots,
                form.num_patches, len(form.kernels),
            )  # fmt: skip

    def with_numbers(self, numbers: Mapping[str, int]) -> LaunchList:
        """A copy of the list for another mask; ``numbers``: its numbers by name, at least those that the steps name."""
        form, memory = self._form, self._form.memory()
        with form.lock:
            memory[:] = self._memory
        values = np.array([numbers[name] for name in form.names], dtype=np.int64)
        for (at, number), dtype in ((form.wide, np.int64), (form.narrow, np.int32)):
            memory.view(dtype)[at] = values[number]
        rows = tuple(numbers[one.map.rows] for one in form.maps)
        patches = memory[form.patches : form.slots].view(np.int64).reshape(-1, 4)
        for one, count, before in zip(form.maps, rows, self._rows, strict=True):
            if count != before:
                memory[one.at : one.at + MAP_BYTES] = one.encode(numbers)
                patches[patches[:, 0] == one.at, 1] = 0  # it lies nowhere: the next call sets its address
        made = object.__new__(LaunchList)
        made._begin(form, memory, rows)
        return made

    def queue(self, *addresses: int) -> None:
        """Queues all kernels; parameters are copied. ``addresses``: one for each slot.

        Raises:
            RuntimeError: CUDA refuses.
        """
        form = self._form
        with form.lock:
            form.pack(self._memory, form.slots, *addresses)
            if self._native is None:
                self._walk()
            elif form.library.magi_calls_queue(self._native):
                self._go_on(self._native)

    def _go_on(self, native: _Calls) -> None:
        """Queues the rest of a list after a launch that was refused, in the CUDA context of its kernel."""
        try:
            with self._form.kernels[native.next].where_it_runs(native.status):
                driver.check(self._form.library.magi_calls_queue(native), "kernel launch")
        finally:
            native.next = 0

    def _walk(self) -> None:
        """Does in Python what csrc/calls does in C++."""
        form, base = self._form, self._base
        slots = (_Address * form.num_slots).from_address(base + form.slots)
        for patch in (_Patch * form.num_patches).from_address(base + form.patches):
            address = slots[patch.slot] + patch.add
            if not patch.is_map:
                _Address.from_address(base + patch.at).value = address
            elif address != patch.last:
                driver.move_tensor_map(base + patch.at, address)
                patch.last = address
        for kernel, config, params in zip(form.kernels, form.configs, form.params, strict=True):
            kernel.launch(base + config, (ctypes.c_void_p * 1)(base + params))


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


@cache
def _library() -> ctypes.CDLL | None:
    """The library next to this file; None where it was not built, or from other sources than these."""
    library = cpp_library.load(Path(__file__).parent, "calls", _VERSION)
    if library is not None:
        library.magi_calls_queue.restype = _Int
        library.magi_calls_queue.argtypes = [ctypes.POINTER(_Calls)]
    return library


def available() -> bool:
    """Whether the C++ library was built from the sources that belong to this package."""
    return _library() is not None
