"""Kernel launches that are prepared once, so that a call only fills in addresses.

A `Launch` holds kernel, strides, options and tensor maps for tensors of one layout. A few more parameters depend on the
mask; these `Numbers` are kept with the mask, and set in the launch when it was used for another mask before.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any, Protocol

from torch import Tensor

from megatron_magi.cuda import driver as hopper_driver
from megatron_magi.cuda.driver import MAP_BYTES, Kernel
from megatron_magi.cuda.launch_list import Field, MapRows, Patch, Place, Step
from megatron_magi.cuda.layout import Layout
from megatron_magi.runtime.lru import LruCache

MAX_LAUNCHES = 1024
MAX_BYTES = 512 << 20  # of device memory, of the plans that numbers keep
_launches: LruCache[tuple, Launch] = LruCache(0, MAX_LAUNCHES)


class Tables(Protocol):
    """Tables in device memory that a launch points to."""

    @property
    def num_bytes(self) -> int:
        """Bytes of device memory."""

    def hold_for_stream(self) -> None:
        """Makes the current stream wait for the tables, and keeps their memory until it has used them."""


class Numbers:
    """The parameters of a launch that depend on the mask.

    Args:
        plan: the tables that the numbers point to; kept alive.
        num_blocks: grid.
        rows: number of rows of each tensor map, in their order; rows behind them are read as zeros.
        fields: other parameters by name.

    Attributes:
        plan, num_blocks, rows, fields: as given.
        token: an identity of these numbers that keeps nothing alive.
    """

    def __init__(self, plan: Tables, num_blocks: int, rows: tuple[int, ...], **fields: int) -> None:
        self.plan, self.num_blocks, self.rows, self.fields, self.token = plan, num_blocks, rows, fields, object()
        plan.hold_for_stream()


class Launch:
    """A kernel with its parameters in host memory.

    Args:
        kernel: what runs.
        num_blocks: grid.
        params: parameter struct, which begins with its tensor maps.
        maps: for each tensor map a tensor of the layout, the rows of a box, and the heads of a box if not one.

    Attributes:
        params: the struct; set addresses in it while holding `lock`, then `fire`.
    """

    def __init__(
        self,
        kernel: Kernel,
        num_blocks: int,
        params: ctypes.Structure,
        maps: tuple[tuple[Tensor, int] | tuple[Tensor, int, int], ...] = (),
    ) -> None:
        size = ctypes.sizeof(params)
        self._memory, self._address = _aligned(size)
        ctypes.memmove(self._address, ctypes.addressof(params), size)
        self.params = type(params).from_address(self._address)
        self._boxes = [box for _, *box in maps]
        self._map_rows, self._map_addresses = [0] * len(maps), [0] * len(maps)
        for i, (tensor, *_) in enumerate(maps):
            self._describe(i, tensor)
        self._kernel, self._token = kernel, None
        self._config = hopper_driver.LaunchConfig(kernel, num_blocks)
        self._config_address = ctypes.addressof(self._config)
        self._pointers = (ctypes.c_void_p * 1)(self._address)
        self.lock = threading.Lock()

    def _describe(self, i: int, tensor: Tensor) -> None:
        encoded = hopper_driver.tensor_map(tensor, *self._boxes[i])
        ctypes.memmove(self._address + i * MAP_BYTES, encoded, MAP_BYTES)
        self._map_rows[i], self._map_addresses[i] = tensor.shape[0], tensor.data_ptr()

    def take(self, numbers: Numbers, *mapped: Tensor) -> None:
        """Sets a mask's numbers, among them the rows of the first tensor maps, which are of the tensors ``mapped``."""
        if self._token is numbers.token:
            return
        for name, value in numbers.fields.items():
            setattr(self.params, name, value)
        self._config.grid[0] = numbers.num_blocks
        for i, (tensor, rows) in enumerate(zip(mapped, numbers.rows, strict=True)):
            if rows != self._map_rows[i]:
                self._describe(i, tensor[:rows])
        self._token = numbers.token

    def point_maps(self, *addresses: int) -> None:
        """Sets the addresses of the tensor maps, in their order."""
        for i, address in enumerate(addresses):
            if address != self._map_addresses[i]:
                hopper_driver.move_tensor_map(self._address + i * MAP_BYTES, address)
                self._map_addresses[i] = address

    def fire(self, stream: int, overlaps: bool = False, num_blocks: int | None = None) -> None:
        """Queues the kernel. Parameters are copied, so they may change afterwards. ``num_blocks``: another grid.

        With ``overlaps`` its blocks may take SMs that the kernel before it on the stream has left or never took.
        """
        self._config.stream, self._config.num_attributes = stream, overlaps
        if num_blocks is not None:
            self._config.grid[0] = num_blocks
        self._kernel.launch(self._config_address, self._pointers)

    def step(
        self,
        fields: Mapping[str, Place],
        maps: Sequence[Place] = (),
        *,
        mapped: Sequence[tuple[Layout, str]] = (),
        values: Mapping[str, Any] | None = None,
        numbers: Mapping[str, str] | None = None,
        num_blocks: int | str | None = None,
        overlaps: bool = False,
    ) -> Step:
        """A copy of the launch as a step of a `LaunchList`.

        Args:
            fields: parameters that are addresses.
            maps: addresses of the tensor maps, in their order.
            mapped: for the first tensor maps the layout of the tensor, and the name of the mask's number of rows.
            values: parameters that are the same for all masks.
            numbers: parameters that depend on the mask, with the names of the numbers; FIELD.FIELD inside a struct.
            num_blocks: another grid, or the name of the mask's number of blocks.
            overlaps: as in `fire`.
        """
        kind, size = type(self.params), ctypes.sizeof(self.params)
        memory, address = _aligned(size)
        grid = num_blocks if isinstance(num_blocks, int) else self._config.grid[0]
        with self.lock:
            ctypes.memmove(address, self._address, size)
            config = self._config.copy(grid, overlaps)
        params = kind.from_buffer(memory, address - ctypes.addressof(memory))
        for name, value in (values or {}).items():
            setattr(params, name, value)
        patches = [Patch(i * MAP_BYTES, *place, True) for i, place in enumerate(maps)]
        patches += [Patch(getattr(kind, name).offset, *place) for name, place in fields.items()]
        return Step(
            self._kernel, config, address, params, tuple(patches),
            tuple(Field(*_where(kind, field), name) for field, name in (numbers or {}).items()),
            tuple(
                MapRows(i * MAP_BYTES, name, partial(_encode, layout, tuple(self._boxes[i])))
                for i, (layout, name) in enumerate(mapped)
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
    return hopper_driver.tensor_map(layout.with_rows(rows), *box)


def _aligned(size: int) -> tuple[ctypes.Array, int]:
    """A buffer, and an address in it from which ``size`` bytes follow, aligned to 64 bytes as tensor maps need."""
    memory = ctypes.create_string_buffer(size + 64)
    return memory, (ctypes.addressof(memory) + 63) // 64 * 64


def prepared(key: tuple, make: Callable[[], Launch]) -> Launch:
    """The launch kept under a key, made when it is first asked for."""
    found = _launches.get(key)
    if found is None:
        found = make()
        _launches.put(key, found, 0)
    return found
