"""Launches of single kernels that are prepared once for tensors of one layout, so that a call only fills in addresses.

Kernels that depend on a mask, or follow each other, are lists of launches (`megatron_magi.cuda.launch_list`).
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable

from torch import Tensor

from megatron_magi.cuda import driver as hopper_driver
from megatron_magi.cuda.driver import MAP_BYTES, Kernel
from megatron_magi.runtime.lru import LruCache

MAX_LAUNCHES = 1024
_launches: LruCache[tuple, Launch] = LruCache(0, MAX_LAUNCHES)


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
        self._map_addresses = [tensor.data_ptr() for tensor, *_ in maps]
        for i, (tensor, *box) in enumerate(maps):
            ctypes.memmove(self._address + i * MAP_BYTES, hopper_driver.tensor_map(tensor, *box), MAP_BYTES)
        self._kernel = kernel
        self._config = hopper_driver.LaunchConfig(kernel, num_blocks)
        self._config_address = ctypes.addressof(self._config)
        self._pointers = (ctypes.c_void_p * 1)(self._address)
        self.lock = threading.Lock()

    def point_maps(self, *addresses: int) -> None:
        """Sets the addresses of the tensor maps, in their order."""
        for i, address in enumerate(addresses):
            if address != self._map_addresses[i]:
                hopper_driver.move_tensor_map(self._address + i * MAP_BYTES, address)
                self._map_addresses[i] = address

    def fire(self, stream: int, overlaps: bool = False) -> None:
        """Queues the kernel. Parameters are copied, so they may change afterwards.

        With ``overlaps`` its blocks may take SMs that the kernel before it on the stream has left or never took.
        """
        self._config.stream, self._config.num_attributes = stream, overlaps
        self._kernel.launch(self._config_address, self._pointers)


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
