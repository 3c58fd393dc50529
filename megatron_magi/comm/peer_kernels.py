"""Launches of the kernels of ``csrc/group_collective`` that access the memory of other ranks of the host."""

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
from megatron_magi.cuda.driver import Kernel, LaunchConfig, load_kernel
from megatron_magi.cuda.launch_list import Place, Step
from megatron_magi.cuda.target import DEFAULT_TARGET, target_of

SUM_LOADS = 2
"""Loads in flight of a thread that adds rows: kSumLoads of put_receive.cuh."""
BULK_ROW_BYTES = 1024
"""Rows of at least this length are sent by TMA."""


class Shape(NamedTuple):
    """Launch configuration of a kernel: few SMs for kernels that run concurrently with attention.

    Attributes:
        threads, num_blocks, shared_bytes: of the launch.
        rest: `struct` format of its parameters after the rows.
        loads: loads of a thread before its first store.
        num_lists: number of `SlotRows` among its parameters.
    """

    threads: int
    num_blocks: int
    rest: str
    loads: int = 8
    shared_bytes: int = 0
    num_lists: int = 1


_PUT = Shape(768, 24, "5Q2q", loads=4, shared_bytes=4 * 6 * 8192, num_lists=2)
SHAPES = {
    **dict.fromkeys(("put_rows", "put_rows_bulk", "put_sums", "put_sums_bulk"), _PUT),
    "get_rows": Shape(512, 64, "5QqQ3q", shared_bytes=4 * 12 * 4096, num_lists=2),
}
"""24 blocks that put: 16 reach 0.94 of the bandwidth of 128; sums need more."""
_MOST_PULLING = 16


def blocks_of(name: str, share: int) -> int:
    """Thread blocks of a kernel, each on an SM; those that put if they both send and receive, next to other kernels.

    Args:
        share: SMs of the group, see `megatron_magi.comm.sm_budget`.
    """
    return min(SHAPES[name].num_blocks, share)


def blocks_that_pull(num_blocks: int) -> int:
    """Thread blocks of ``get_rows`` that pull; the others publish."""
    return min(_MOST_PULLING, max(num_blocks // 4, 1))


def blocks_apart(share: int, sums: bool) -> tuple[int, int]:
    """Thread blocks of a kernel that puts, as two launches, to send and to receive; sums are limited by the latter."""
    sending = max(share * 3 // 8, 1) if sums else share // 2
    return sending, share - sending


class PeerKernel(NamedTuple):
    """A kernel on one device."""

    kernel: Kernel
    params: struct.Struct
    loads: int
    num_lists: int


def needed_kernels(partial: torch.dtype, wide: torch.dtype) -> list[tuple[str, tuple[str, ...]]]:
    """Source and macros of the kernels that attention uses.

    Args:
        partial, wide: dtypes of the rows that are summed, and of their sums. Rows are multiples of 16 bytes.
    """
    vector, needed = WIDEST // partial.itemsize, [("get_rows", (f"UNIT={WIDEST}",))]
    for row_bytes in (1, BULK_ROW_BYTES):
        needed.append(put_kernel(WIDEST, row_bytes))
        needed.append(put_kernel(WIDEST, row_bytes, (partial, wide), vector))
    return [(_source(name), macros) for name, macros in needed]


def put_kernel(
    unit: int, row_bytes: int, types: tuple[torch.dtype, ...] = (), vector: int = 0
) -> tuple[str, tuple[str, ...]]:
    """Name and macros of a kernel that puts rows into the memory of other ranks.

    Args:
        unit: bytes of an access to rows that are sent or copied.
        row_bytes: of a row in a slot.
        types: dtypes of the addends and of the results; empty if rows are copied.
        vector: elements of an access if rows are added.
    """
    is_bulk = unit == WIDEST and row_bytes >= BULK_ROW_BYTES
    name = ("put_sums" if types else "put_rows") + ("_bulk" if is_bulk else "")
    sent = () if is_bulk and types else (f"UNIT={unit}",)
    return name, (
        *sent,
        f"FROM={ELEMENTS[types[0]]}",
        f"INTO={ELEMENTS[types[1]]}",
        f"VECTOR={vector}",
    ) if types else sent


def _source(name: str) -> str:
    return f"group_collective/{name}.cu"


@cache
def kernel_of(name: str, defines: tuple[str, ...], device: torch.device) -> PeerKernel:
    """One of `SHAPES` with its macros."""
    shape = SHAPES[name]
    image = build(_source(name), defines, target=target_of(device) or DEFAULT_TARGET)
    kernel = load_kernel(image, f"magi_{name}", shape.threads, shape.shared_bytes, device)
    lists = f"{SLOT_ROWS.size}s" * shape.num_lists
    return PeerKernel(kernel, struct.Struct(f"{PEERS.size}s{lists}{shape.rest}"), shape.loads, shape.num_lists)


class Launch:
    """A kernel with its parameters in memory; a call fills in the addresses of rows.

    Args:
        kernel: the kernel.
        num_blocks: its grid.
        params: its parameters.
        started: see `LaunchConfig`; for kernels that run concurrently with others.
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
        """The launch as a step, with a copy of the parameters.

        Args:
            lists: addresses of the tensors of `fire`.
            overlaps: launch as a programmatic dependent of the preceding kernel.
            num_blocks: another grid.
        """
        fields = {
            PEERS.size + i * SLOT_ROWS.size + 8 * j: place
            for i, places in enumerate(lists)
            for j, place in enumerate(places)
        }
        params = ctypes.create_string_buffer(self._params.raw, len(self._params))
        return Step(self._kernel, num_blocks or self._config.grid[0], params, fields=fields, overlaps=overlaps)

    def fire(self, stream: int, *lists: list[Rows]) -> None:
        """Launches the kernel on a stream for rows at these addresses; the driver copies the parameters."""
        for addresses, rows in zip(self._lists, lists, strict=True):
            for i, row in enumerate(rows):
                addresses[i] = row[0]
        self._config.stream = stream
        self._kernel.launch(ctypes.addressof(self._config), self._pointers)
