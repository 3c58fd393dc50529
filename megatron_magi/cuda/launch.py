"""Launches that are prepared once: a call only fills in addresses.

Everything else about a launch (kernel, grid, shapes, strides, options, tensor maps but for their addresses) depends on
the key that it is kept under.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from megatron_magi.cuda import driver as hopper_driver
from megatron_magi.cuda.driver import Kernel
from megatron_magi.lru import LruCache

_MAP_BYTES = 128
MAX_LAUNCHES = 1024
MAX_BYTES = 512 << 20  # of device memory, of the plans that launches keep
_launches: LruCache[tuple, Launch] = LruCache(MAX_BYTES, MAX_LAUNCHES)


class Tables(Protocol):
    """Tables in device memory that a launch points to."""

    @property
    def num_bytes(self) -> int:
        """Of device memory."""

    def hold_for_stream(self) -> None:
        """What the current stream queues from now on finds the tables there, and keeps their memory as long."""


class Launch:
    """A kernel with its parameters in memory.

    Args:
        kernel: what runs.
        num_blocks: grid.
        params: parameter struct, which begins with its tensor maps.
        maps: for each tensor map a tensor of the right shape, the rows of its box, and its heads if not one.
        plan: whose memory the parameters point to, if one's; it is kept.

    Attributes:
        params: the struct; set addresses in it while holding `lock`, then `fire`.
        plan: as given.
    """

    def __init__(
        self,
        kernel: Kernel,
        num_blocks: int,
        params: ctypes.Structure,
        maps: tuple[tuple[Tensor, int] | tuple[Tensor, int, int], ...] = (),
        plan: Tables | None = None,
    ) -> None:
        size = ctypes.sizeof(params)
        self._memory = ctypes.create_string_buffer(size + 64)  # tensor maps are aligned to 64 bytes
        self._address = (ctypes.addressof(self._memory) + 63) // 64 * 64
        ctypes.memmove(self._address, ctypes.addressof(params), size)
        self.params = type(params).from_address(self._address)
        for i, described in enumerate(maps):
            ctypes.memmove(self._address + i * _MAP_BYTES, hopper_driver.tensor_map(*described), _MAP_BYTES)
        self._map_addresses = [tensor.data_ptr() for tensor, *_ in maps]
        self._kernel, self.plan = kernel, plan
        self._config = hopper_driver.LaunchConfig(kernel, num_blocks)
        self._config_address = ctypes.addressof(self._config)
        if plan is not None:
            plan.hold_for_stream()
        self._pointers = (ctypes.c_void_p * 1)(self._address)
        self.lock = threading.Lock()

    def point_maps(self, *addresses: int) -> None:
        """Sets the addresses of the tensor maps, in their order."""
        for i, address in enumerate(addresses):
            if address != self._map_addresses[i]:
                hopper_driver.move_tensor_map(self._address + i * _MAP_BYTES, address)
                self._map_addresses[i] = address

    def fire(self, stream: int, overlaps: bool = False, num_blocks: int | None = None) -> None:
        """Queues the kernel; the parameters are copied, and free to change after it. ``num_blocks``: another grid.

        With ``overlaps`` its blocks may take processors that the kernel before it on the stream has left or never took.
        """
        self._config.stream, self._config.num_attributes = stream, overlaps
        if num_blocks is not None:
            self._config.grid[0] = num_blocks
        self._kernel.launch(self._config_address, self._pointers)


def known(key: tuple) -> Launch | None:
    """The launch kept under a key, None if there is none."""
    return _launches.get(key)


def prepared(key: tuple, make: Callable[[], Launch]) -> Launch:
    """The launch kept under a key, made when it is first asked for."""
    found = known(key)
    if found is None:
        found = make()
        _launches.put(key, found, 0 if found.plan is None else found.plan.num_bytes)
    return found
