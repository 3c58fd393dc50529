"""Lists of kernel launches whose parameters are complete but for the addresses of tensors, which each call gives.

A list is executed in Python, or in C++ (csrc/calls) if that is built, which takes less time of the host. All data of a
list lies in one block of memory, so a list for another mask is a copy of the block in which that mask's numbers are
set.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
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


class Patch(NamedTuple):
    """A parameter of a kernel that is an address.

    Attributes:
        at: offset in the parameters, bytes.
        slot, add: the `Place`.
        is_map: a tensor map begins there, and the address is that of its tensor.
    """

    at: int
    slot: str
    add: int | str
    is_map: bool = False


class Field(NamedTuple):
    """A parameter of a kernel that is a number of the mask.

    Attributes:
        at: offset in the parameters, bytes.
        num_bytes: size, 4 or 8; the parameter is aligned to it.
        name: of the number.
    """

    at: int
    num_bytes: int
    name: str


class MapRows(NamedTuple):
    """A tensor map whose number of rows is a number of the mask.

    Attributes:
        at: offset in the parameters, bytes.
        name: of the number.
        encode: makes the map for a number of rows; its address is set later.
    """

    at: int
    name: str
    encode: Callable[[int], bytes]


class Step(NamedTuple):
    """One launch of a list.

    Attributes:
        kernel: what runs.
        config: grid, block and stream.
        params: address of the parameters.
        memory: the buffer that holds them; they extend to its end.
        patches: parameters that are addresses.
        fields, maps: parameters that depend on the mask.
        grid: name of the number of blocks, if that depends on the mask.
        numbers: the mask's numbers by these names, for steps that bring their own.
    """

    kernel: Kernel
    config: LaunchConfig
    params: int
    memory: Any
    patches: tuple[Patch, ...]
    fields: tuple[Field, ...] = ()
    maps: tuple[MapRows, ...] = ()
    grid: str | None = None
    numbers: Mapping[str, int] = MappingProxyType({})

    def overlapping(self) -> Step:
        """The same step, allowed to start while the kernel before it ends."""
        return self._replace(config=self.config.copy(self.config.grid[0], overlaps=True))


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


def make_step(
    kernel: Kernel,
    num_blocks: int | str,
    params: ctypes.Structure,
    *,
    maps: Sequence[Map] = (),
    fields: Mapping[str, Place],
    numbers: Mapping[str, str] = MappingProxyType({}),
    overlaps: bool = False,
) -> Step:
    """A launch of a list.

    Args:
        kernel: what runs.
        num_blocks: grid, or the name of the mask's number of blocks.
        params: the parameters that depend neither on the mask nor on addresses; they begin with the tensor maps.
        maps: these, in their order.
        fields: parameters that are addresses.
        numbers: parameters that depend on the mask, with the names of the numbers. Those inside a struct that is a
            parameter are named FIELD.FIELD, here and in ``fields``.
        overlaps: blocks may take SMs that the kernel before it on the stream has left or never took.
    """
    kind, size = type(params), ctypes.sizeof(params)
    memory = ctypes.create_string_buffer(size + _ALIGNMENT)
    address = _aligned(ctypes.addressof(memory))
    ctypes.memmove(address, ctypes.addressof(params), size)
    layouts = [Layout.of(one.like) for one in maps]
    for i, (one, layout) in enumerate(zip(maps, layouts, strict=True)):
        if one.rows is None:
            ctypes.memmove(address + i * MAP_BYTES, driver.tensor_map(layout, *one.box), MAP_BYTES)
    patches = [Patch(i * MAP_BYTES, *one.place, True) for i, one in enumerate(maps)]
    patches += [Patch(_where(kind, name)[0], *place) for name, place in fields.items()]
    config = LaunchConfig(kernel, num_blocks if isinstance(num_blocks, int) else 1)
    config.num_attributes = overlaps
    return Step(
        kernel, config, address, kind.from_buffer(memory, address - ctypes.addressof(memory)), tuple(patches),
        tuple(Field(*_where(kind, field), name) for field, name in numbers.items()),
        tuple(
            MapRows(i * MAP_BYTES, one.rows, partial(_encode, layout, one.box))
            for i, (one, layout) in enumerate(zip(maps, layouts, strict=True)) if one.rows is not None
        ),
        num_blocks if isinstance(num_blocks, str) else None,
    )  # fmt: skip


@cache
def _where(kind: type[ctypes.Structure], field: str) -> tuple[int, int]:
    """Offset and size in bytes of a field, or of FIELD.FIELD inside a struct."""
    at = 0
    *outer, last = field.split(".")
    for name in outer:
        at += getattr(kind, name).offset
        kind = dict(kind._fields_)[name]
    found = getattr(kind, last)
    return at + found.offset, found.size


def _encode(layout: Layout, box: tuple[int, ...], rows: int) -> bytes:
    """Makes a tensor map of a layout with another number of rows: a `MapRows.encode`."""
    return driver.tensor_map(layout.with_rows(rows), *box)


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


class _Form:
    """The memory layout of lists that differ in the numbers of their masks only.

    Attributes:
        kernels: one a step.
        names: names of the mask's numbers, in their order.
        maps: tensor maps whose number of rows depends on the mask.
        patches, steps, slots: offsets of these tables in the memory.
        num_patches: number of patches.
        num_bytes: size of the memory.
        lock: held while kernels are queued.
        library: the C++ library, if it executes the list.
    """

    def __init__(self, steps: Sequence[Step], slots: Sequence[str], lock: threading.Lock) -> None:
        self.kernels, self.lock = [step.kernel for step in steps], lock
        self.params, self.configs, end = [], [], 0
        for step in steps:
            self.params.append(end)
            end = _aligned(end + _num_bytes(step))
        for _ in steps:
            self.configs.append(end)
            end += ctypes.sizeof(LaunchConfig)
        self.steps = _aligned(end)
        self.patches = self.steps + len(steps) * ctypes.sizeof(_Step)
        self.num_patches = sum(len(step.patches) for step in steps)
        self.slots = self.patches + self.num_patches * ctypes.sizeof(_Patch)
        self.num_bytes = self.slots + len(slots) * ctypes.sizeof(_Address)
        self.pack = struct.Struct(f"{len(slots)}Q").pack_into
        self.num_slots = len(slots)
        # A kernel that is timed is launched by Python.
        self.library = _library() if all(type(kernel) is Kernel for kernel in self.kernels) else None
        self._place_numbers(steps)

    def _place_numbers(self, steps: Sequence[Step]) -> None:
        """Collects the offsets of the mask's numbers."""
        places, self.maps, patch = [], [], self.patches
        for step, params, config in zip(steps, self.params, self.configs, strict=True):
            places += [(params + field.at, field.num_bytes, field.name) for field in step.fields]
            self.maps += [row._replace(at=params + row.at) for row in step.maps]
            if step.grid is not None:
                places.append((config + _GRID, 4, step.grid))
            for one in step.patches:
                if isinstance(one.add, str):
                    places.append((patch + _Patch.add.offset, 8, one.add))
                patch += ctypes.sizeof(_Patch)
        assert all(size in (4, 8) for _, size, _ in places), "numbers of the mask have 32 or 64 bits"
        self.names = tuple(dict.fromkeys(name for *_, name in places))
        number = {name: i for i, name in enumerate(self.names)}
        self.wide, self.narrow = (
            (np.array([at // size for at, n, _ in places if n == size], dtype=np.int64),
             np.array([number[name] for _, n, name in places if n == size], dtype=np.int64))
            for size in (8, 4)
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
        base, number, words = memory.ctypes.data, {name: i for i, name in enumerate(slots)}, []
        for step, params, config in zip(steps, form.params, form.configs, strict=True):
            ctypes.memmove(base + params, step.params, _num_bytes(step))
            ctypes.memmove(base + config, ctypes.addressof(step.config), ctypes.sizeof(LaunchConfig))
            LaunchConfig.from_address(base + config).stream = stream
            for at, slot, add, is_map in step.patches:
                words += params + at, 0, 0 if isinstance(add, str) else add, number[slot] | is_map << 32
        memory[form.patches : form.slots] = np.array(words, dtype=np.int64).view(np.uint8)
        if form.library is not None:
            rows = zip(form.configs, form.kernels, form.params, strict=True)
            words = [word for config, kernel, params in rows for word in (config, kernel.handle.value, params)]
            memory[form.steps : form.patches] = np.array(words, dtype=np.int64).view(np.uint8)
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
        rows = tuple(numbers[one.name] for one in form.maps)
        for one, count, before in zip(form.maps, rows, self._rows, strict=True):
            if count != before:
                memory[one.at : one.at + driver.MAP_BYTES] = np.frombuffer(one.encode(count), dtype=np.uint8)
                self._forget_place(memory, one.at)
        made = object.__new__(LaunchList)
        made._begin(form, memory, rows)
        return made

    def _forget_place(self, memory: np.ndarray, at: int) -> None:
        """Clears the address that the map at an offset had last, so that the next call sets it."""
        patches = memory[self._form.patches : self._form.slots].view(np.int64).reshape(-1, 4)
        patches[patches[:, 0] == at, 1] = 0

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


def _num_bytes(step: Step) -> int:
    """Bytes from the begin of the parameters to the end of the buffer that holds them."""
    if step.memory is None:
        return 0
    return ctypes.addressof(step.memory) + ctypes.sizeof(step.memory) - step.params


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
