"""The kernels of ``csrc/group_collective`` by which ranks of one host reach each other's memory, and their launches."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch

from megatron_magi.comm.peers import PEERS
from megatron_magi.comm.row_memory import ELEMENTS, MOST_TENSORS, SLOT_ROWS, WIDEST, Rows
from megatron_magi.cuda.build import build
from megatron_magi.cuda.call_list import Patch, Place, Step
from megatron_magi.cuda.driver import Kernel, LaunchConfig, load_kernel

SUM_LOADS = 2
"""Accesses of a thread to a row that is added to: kSumLoads of exchange.cu."""
BULK_ROW_BYTES = 1024
"""Rows at least as long are sent by TMA."""


class Shape(NamedTuple):
    """How a kernel is launched: few SMs for what runs beside attention.

    Attributes:
        threads, num_blocks, shared_bytes: of the launch.
        rest: its parameters after the rows, as `struct` names them.
        loads: of a thread before its first store.
        num_lists: of rows among its parameters.
    """

    threads: int
    num_blocks: int
    rest: str
    loads: int = 8
    shared_bytes: int = 0
    num_lists: int = 1


SHAPES = {
    "exchange": Shape(768, 24, "5Q2q", loads=4, shared_bytes=4 * 6 * 8192, num_lists=2),
    "announce_rows": Shape(512, 64, "5QqQ2q", shared_bytes=4 * 12 * 4096, num_lists=2),
}
"""24 blocks of ``exchange``: 16 fill the links to 0.94 of what 128 do; sums take more."""
_MOST_PULLING = 16


def blocks_of(name: str, share: int) -> int:
    """Blocks of a kernel, each on an SM; ``exchange`` sends and takes in one, beside other work.

    Args:
        share: SMs of the group, see `megatron_magi.comm.sm_budget`.
    """
    return min(SHAPES[name].num_blocks, share)


def blocks_that_pull(num_blocks: int) -> int:
    """Of those of ``announce_rows``; the others publish."""
    return min(_MOST_PULLING, max(num_blocks // 4, 1))


def blocks_apart(share: int, sums: bool) -> tuple[int, int]:
    """The same of ``exchange`` where one kernel sends and another takes: sums wait for those that take."""
    sending = max(share * 3 // 8, 1) if sums else share // 2
    return sending, share - sending


class PeerKernel(NamedTuple):
    """A kernel on one device."""

    kernel: Kernel
    params: struct.Struct
    loads: int
    num_lists: int


def needed_kernels(partial: torch.dtype, wide: torch.dtype) -> list[tuple[str, tuple[str, ...]]]:
    """Source and macros of the kernels that calls of attention take.

    Args:
        partial, wide: of the rows that are summed, and of their sums. Rows of heads are multiples of 16 bytes.
    """
    vector, needed = WIDEST // partial.itemsize, [("announce_rows", (f"UNIT={WIDEST}",))]
    for row_bytes in (1, BULK_ROW_BYTES):
        needed.append(("exchange", exchange_defines(WIDEST, row_bytes)))
        needed.append(("exchange", exchange_defines(WIDEST, row_bytes, (partial, wide), vector)))
    return [(_source(name), macros) for name, macros in needed]


def exchange_defines(
    unit: int, row_bytes: int, types: tuple[torch.dtype, ...] = (), vector: int = 0
) -> tuple[str, ...]:
    """Macros of exchange.cu.

    Args:
        unit: bytes of an access to what is sent, or copied.
        row_bytes: of a row in a slot.
        types: of what is added, and of what it is added to; empty where rows are copied.
        vector: elements of an access where rows are added.
    """
    is_bulk = unit == WIDEST and row_bytes >= BULK_ROW_BYTES
    defines = f"UNIT={unit}", f"BULK={int(is_bulk)}", f"SUMS={int(bool(types))}"
    if not types:
        return defines
    return (*defines, f"FROM={ELEMENTS[types[0]]}", f"INTO={ELEMENTS[types[1]]}", f"VECTOR={vector}")


def _source(name: str) -> str:
    return f"group_collective/{name}.cu"


@cache
def kernel_of(name: str, defines: tuple[str, ...], device: torch.device) -> PeerKernel:
    """One of `SHAPES` with its macros."""
    shape = SHAPES[name]
    image = build(_source(name), defines)
    kernel = load_kernel(image, f"magi_{name}", shape.threads, shape.shared_bytes, device)
    lists = f"{SLOT_ROWS.size}s" * shape.num_lists
    return PeerKernel(kernel, struct.Struct(f"{PEERS.size}s{lists}{shape.rest}"), shape.loads, shape.num_lists)


class Launch:
    """A kernel with its parameters in memory; a call fills in the addresses of rows.

    Args:
        kernel: what is launched.
        num_blocks: its grid.
        params: of the kernel.
        started: see `LaunchConfig`; for what runs beside other work.
    """

    def __init__(self, kernel: PeerKernel, num_blocks: int, *params: bytes | int, started: int = 0) -> None:
        self._kernel = kernel.kernel
        self._params = ctypes.create_string_buffer(kernel.params.pack(*params))
        self._pointers = (ctypes.c_void_p * 1)(ctypes.addressof(self._params))
        self._lists = [
            (ctypes.c_uint64 * MOST_TENSORS).from_buffer(self._params, PEERS.size + i * SLOT_ROWS.size)
            for i in range(kernel.num_lists)
        ]
        self._config = LaunchConfig(self._kernel, num_blocks, started)

    def step(self, *lists: Sequence[Place], overlaps: bool = False, num_blocks: int | None = None) -> Step:
        """The launch with parameters of its own.

        Args:
            lists: where the tensors of `fire` will be.
            overlaps: it may start when all blocks of the kernel before it have let it.
            num_blocks: another grid.
        """
        memory = ctypes.create_string_buffer(self._params.raw, len(self._params))
        patches = tuple(
            Patch(PEERS.size + i * SLOT_ROWS.size + 8 * j, *place)
            for i, places in enumerate(lists)
            for j, place in enumerate(places)
        )
        config = self._config.copy(num_blocks or self._config.grid[0], overlaps)
        return Step(self._kernel, config, ctypes.addressof(memory), memory, patches)

    def fire(self, stream: int, *lists: list[Rows]) -> None:
        """Queues the kernel on a stream, for rows that lie elsewhere than before; the parameters are copied."""
        for addresses, rows in zip(self._lists, lists, strict=True):
            for i, row in enumerate(rows):
                addresses[i] = row[0]
        self._config.stream = stream
        self._kernel.launch(ctypes.addressof(self._config), self._pointers)
