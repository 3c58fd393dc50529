"""Launches of the kernels of ``csrc/group_collective`` that access the memory of other ranks of the host."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch

from megatron_magi.comm.row_memory import ELEMENTS, WIDEST, Rows
from megatron_magi.cuda.build import build
from megatron_magi.cuda.driver import Kernel, LaunchConfig, load_kernel
from megatron_magi.cuda.launch_list import Place, Step
from megatron_magi.cuda.params import kernel_params
from megatron_magi.cuda.target import DEFAULT_TARGET, target_of

SUM_LOADS = 2
"""Loads in flight of a thread that adds rows: kSumLoads of put_receive.cuh."""
BULK_ROW_BYTES = 1024
"""Rows of at least this length are sent by TMA."""


class Shape(NamedTuple):
    """Launch configuration of a kernel: few SMs for kernels that run concurrently with attention.

    Attributes:
        threads, num_blocks: of the launch.
        loads: loads of a thread before its first store.
        shared_bytes: dynamic shared memory of a block.
    """

    threads: int
    num_blocks: int
    loads: int
    shared_bytes: int


_PUT = Shape(768, 24, loads=4, shared_bytes=4 * 6 * 8192)
SHAPES = {
    **dict.fromkeys(("put_rows", "put_rows_bulk", "put_sums", "put_sums_bulk"), _PUT),
    "get_rows": Shape(512, 64, loads=8, shared_bytes=4 * 12 * 4096),
}
"""24 blocks that put: 16 reach 0.94 of the bandwidth of 128; sums need more."""
_MOST_PULLING = 16
_SIDES = "from", "to"  # members of the parameters, of type SlotRows


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
def params_of(name: str) -> type[ctypes.Structure]:
    """The parameters of a kernel."""
    return kernel_params(_source(name))


@cache
def kernel_of(name: str, defines: tuple[str, ...], device: torch.device) -> Kernel:
    """One of `SHAPES` with its macros."""
    shape = SHAPES[name]
    image = build(_source(name), defines, target=target_of(device) or DEFAULT_TARGET)
    return load_kernel(image, f"magi_{name}", shape.threads, shape.shared_bytes, device)


class PeerLaunch:
    """A kernel with its parameters in memory; a call fills in the addresses of rows.

    Args:
        kernel: the kernel.
        num_blocks: its grid.
        params: its parameters, of which a copy is kept.
        started: see `LaunchConfig`; for kernels that run concurrently with others.
    """

    def __init__(self, kernel: Kernel, num_blocks: int, params: ctypes.Structure, started: int = 0) -> None:
        self._kernel, self._params = kernel, type(params).from_buffer_copy(params)
        self._addresses = [getattr(self._params, side).rows for side in _SIDES]
        self._pointers = (ctypes.c_void_p * 1)(ctypes.addressof(self._params))
        self._config = LaunchConfig(kernel, num_blocks, started)

    def step(self, sources: Sequence[Place], results: Sequence[Place], num_blocks: int | None = None) -> Step:
        """The launch as a step, with a copy of the parameters.

        Args:
            sources, results: addresses of the tensors of `fire`.
            num_blocks: another grid.
        """
        fields = {
            f"{side}.rows.{i}": place
            for side, places in zip(_SIDES, (sources, results), strict=True)
            for i, place in enumerate(places)
        }
        params = type(self._params).from_buffer_copy(self._params)
        return Step(self._kernel, num_blocks or self._config.grid[0], params, fields=fields)

    def fire(self, stream: int, sources: list[Rows], results: list[Rows]) -> None:
        """Launches the kernel on a stream for rows at these addresses; the driver copies the parameters."""
        for addresses, rows in zip(self._addresses, (sources, results), strict=True):
            for i, (address, _, _) in enumerate(rows):
                addresses[i] = address
        self._config.stream = stream
        self._kernel.launch(ctypes.addressof(self._config), self._pointers)
