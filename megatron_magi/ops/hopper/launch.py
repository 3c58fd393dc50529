"""Launches that are prepared once: a call only fills in addresses.

Everything else about a launch (kernel, grid, shapes, strides, options, tensor maps but for their addresses) depends on
the key that it is kept under.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from megatron_magi.ops.hopper import driver as hopper_driver
from megatron_magi.ops.hopper.driver import Kernel

_MAP_BYTES = 128
_MAX_LAUNCHES = 1024
_launches: OrderedDict[tuple, Launch] = OrderedDict()


class Plan(Protocol):
    """What parameters of a launch point to."""

    def hold_for_stream(self) -> None:
        """Once dropped, its memory is not used for anything else before what the current stream has queued is done."""


class Launch:
    """A kernel with its parameters in memory.

    Args:
        kernel: what runs.
        num_blocks: grid.
        params: parameter struct, which begins with its tensor maps.
        maps: for each tensor map a tensor of the right shape, the rows of its box, and its heads if not one.
        plan: whose memory the parameters point to, if one's. It is not kept alive.

    Attributes:
        params: the struct; set addresses in it while holding `lock`, then `fire`.
    """

    def __init__(
        self,
        kernel: Kernel,
        num_blocks: int,
        params: ctypes.Structure,
        maps: tuple[tuple[Tensor, int] | tuple[Tensor, int, int], ...] = (),
        plan: Plan | None = None,
    ) -> None:
        size = ctypes.sizeof(params)
        self._memory = ctypes.create_string_buffer(size + 64)  # tensor maps are aligned to 64 bytes
        self._address = (ctypes.addressof(self._memory) + 63) // 64 * 64
        ctypes.memmove(self._address, ctypes.addressof(params), size)
        self.params = type(params).from_address(self._address)
        for i, described in enumerate(maps):
            ctypes.memmove(self._address + i * _MAP_BYTES, hopper_driver.tensor_map(*described), _MAP_BYTES)
        self._map_addresses = [tensor.data_ptr() for tensor, *_ in maps]
        self._kernel, self._num_blocks = kernel, num_blocks
        self._plan = None if plan is None else weakref.ref(plan)
        if plan is not None:
            plan.hold_for_stream()
        self._pointers = (ctypes.c_void_p * 1)(self._address)
        self.lock = threading.Lock()

    @property
    def is_alive(self) -> bool:
        """Whether the memory of its plan is still there."""
        return self._plan is None or self._plan() is not None

    def point_maps(self, *addresses: int) -> None:
        """Sets the addresses of the tensor maps, in their order."""
        for i, address in enumerate(addresses):
            if address != self._map_addresses[i]:
                hopper_driver.move_tensor_map(self._address + i * _MAP_BYTES, address)
                self._map_addresses[i] = address

    def fire(self, stream: int) -> None:
        """Queues the kernel; the parameters are copied, and free to change after it."""
        self._kernel.launch(self._num_blocks, stream, self._pointers)


def known(key: tuple) -> Launch | None:
    """The launch kept under a key, None if there is none."""
    found = _launches.get(key)
    return found if found is not None and found.is_alive else None


def prepared(key: tuple, make: Callable[[], Launch]) -> Launch:
    """The launch kept under a key, made when it is first asked for, and when its plan is gone."""
    found = known(key)
    if found is None:
        found = _launches[key] = make()
        if len(_launches) > _MAX_LAUNCHES:
            _launches.popitem(last=False)
    return found
