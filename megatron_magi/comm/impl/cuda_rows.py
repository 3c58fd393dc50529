"""Row operations as CUDA kernels (``csrc/group_collective``): all tensors in one launch.

`pack_rows`, `unpack_rows` and `add_rows` of `megatron_magi.comm.rows`, the last for some dtypes (`can_add`).
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Sequence
from functools import cache, reduce
from operator import or_
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_magi.comm.row_layout import RowLayout
from megatron_magi.comm.row_memory import (
    ELEMENTS,
    MOST_TENSORS,
    WIDEST,
    Rows,
    can_add,
    rows_in,
    rows_of,
    widest,
    with_rows,
)
from megatron_magi.comm.rows import Arrivals
from megatron_magi.cuda.build import build
from megatron_magi.cuda.driver import LaunchConfig, load_kernel
from megatron_magi.cuda.target import DEFAULT_TARGET, target_of

_THREADS = 256
_MAX_BLOCKS = 132 * 8
_IN_FLIGHT = 4  # units that a thread copies at a time
__all__ = ["add_rows", "can_add", "gather_source", "pack_rows", "runs_on", "sum_source", "unpack_rows"]

_ROWS = "8Q8q4i2i"  # RowTensors of rows.cuh: addresses, and what is fixed
_ADDRESSES, _FIXED = struct.Struct(_ROWS[:2]), struct.Struct(_ROWS[2:])


@cache
def runs_on(device: torch.device) -> bool:
    """Whether the kernels run on a device."""
    return target_of(device) is not None


def pack_rows(tensors: Sequence[Tensor], index: Tensor | None, layout: RowLayout, buffer: Tensor) -> None:
    """See `megatron_magi.comm.rows.pack_rows`."""
    addresses, base = [x.data_ptr() for x in tensors], buffer.data_ptr()
    key = "pack", buffer.device.index, _low_bits(base, *addresses), *[x.stride() for x in tensors]
    way = layout.ways.get(key)
    if way is None:
        tensors = [with_rows(x) for x in tensors]
        rows = rows_of(tensors, layout.sizes)
        way = _gather_way(rows, rows_in(buffer, layout), buffer.device)
        if [address for address, _, _ in rows] == addresses:
            layout.ways[key] = way
        addresses = [address for address, _, _ in rows]
    parts = [base + offset for offset in layout.offsets]
    way.fire(addresses, parts, buffer.shape[0], 0 if index is None else index.data_ptr())


def unpack_rows(buffer: Tensor, index: Tensor | None, layout: RowLayout) -> list[Tensor]:
    """See `megatron_magi.comm.rows.unpack_rows`."""
    if index is None:
        return layout.views(buffer)
    num_rows, base = buffer.shape[0], buffer.data_ptr()
    out = [buffer.new_empty((num_rows, *s), dtype=t) for s, t in zip(layout.shapes, layout.dtypes, strict=True)]
    addresses = [x.data_ptr() for x in out]
    key = "unpack", buffer.device.index, _low_bits(base, *addresses)
    way = layout.ways.get(key)
    if way is None:
        way = layout.ways[key] = _gather_way(rows_in(buffer, layout), rows_of(out, layout.sizes), buffer.device)
    way.fire([base + offset for offset in layout.offsets], addresses, num_rows, index.data_ptr())
    return out


def add_rows(buffer: Tensor, layout: RowLayout, arrivals: Arrivals, into: Sequence[Tensor]) -> None:
    """See `megatron_magi.comm.rows.add_rows`."""
    num_rows, from_dtype, to_dtype = arrivals.rows.shape[0], layout.dtypes[0], into[0].dtype
    if not buffer.shape[0] or not layout.sizes[0]:
        return
    addresses, base = [x.data_ptr() for x in into], buffer.data_ptr()
    key = "add", buffer.device.index, to_dtype, _low_bits(base, *addresses), *[x.stride() for x in into]
    way = layout.ways.get(key)
    if way is None:
        sources, results = rows_in(buffer, layout), rows_of(into, layout.sizes_in(to_dtype))
        vector = min(
            widest(sources) // from_dtype.itemsize,
            widest(results) // to_dtype.itemsize,
            WIDEST // max(from_dtype.itemsize, to_dtype.itemsize),
        )
        units = [size // (vector * from_dtype.itemsize) for _, _, size in sources]
        kernel = _sum_kernel(buffer.device, from_dtype, to_dtype, vector)
        way = layout.ways[key] = _Way([kernel.part(sources, results, units, max(units), range(len(units)))])
    parts = [base + offset for offset in layout.offsets]
    tables = arrivals.rows.data_ptr(), arrivals.starts.data_ptr(), arrivals.sources.data_ptr()
    way.fire(parts, addresses, num_rows, *tables)


def gather_source(unit: int) -> tuple[str, tuple[str, ...]]:
    """Source and macros of the kernel that copies rows by ``unit`` bytes at a time."""
    return "group_collective/gather_rows.cu", (f"UNIT={unit}",)


def sum_source(partial: torch.dtype, into: torch.dtype, vector: int) -> tuple[str, tuple[str, ...]]:
    """Source and macros of the kernel that adds rows by ``vector`` elements at a time."""
    macros = (f"FROM={ELEMENTS[partial]}", f"INTO={ELEMENTS[into]}", f"VECTOR={vector}")
    return "group_collective/sum_rows.cu", macros


def _gather_way(sources: list[Rows], results: list[Rows], device: torch.device) -> _Way:
    """The launches that copy rows of these layouts."""
    some = [i for i, (_, _, size) in enumerate(sources) if size]
    parts = []
    for at in range(0, len(some), MOST_TENSORS):
        which = some[at : at + MOST_TENSORS]
        of_sources, of_results = [sources[i] for i in which], [results[i] for i in which]
        unit = min(widest(of_sources), widest(of_results))
        units = [size // unit for _, _, size in of_sources]
        parts.append(
            _gather_kernel(device, unit).part(of_sources, of_results, units, -(-max(units) // _IN_FLIGHT), which)
        )
    return _Way(parts)


def _low_bits(*addresses: int) -> int:
    """Low bits of the addresses, which limit the width of an access."""
    return reduce(or_, addresses) % WIDEST


class _Part(NamedTuple):
    """A launch over some of the tensors of a call; addresses and the number of rows are set by the call."""

    kernel: _RowKernel
    fixed: bytes
    log2_lanes: int
    which: Sequence[int]


class _Way(NamedTuple):
    """The launches of a row operation on tensors of one layout."""

    parts: list[_Part]

    def fire(self, sources: Sequence[int], results: Sequence[int], num_rows: int, *tables: int) -> None:
        """Launches the kernels on the current stream; ``sources``, ``results``: addresses of the tensors' rows."""
        if num_rows:
            for part in self.parts:
                part.kernel.fire(part, sources, results, num_rows, tables)


class _RowKernel:
    """A kernel on one device, with memory for its parameters."""

    def __init__(self, device: torch.device, name: str, source: tuple[str, tuple[str, ...]], tail: str) -> None:
        image = build(*source, target=target_of(device) or DEFAULT_TARGET)
        self._kernel = load_kernel(image, name, _THREADS, 0, device)
        self._tail, self._tail_at = struct.Struct(tail), struct.calcsize(_ROWS)
        self._params = ctypes.create_string_buffer(struct.calcsize(_ROWS + tail))
        self._pointers = (ctypes.c_void_p * 1)(ctypes.addressof(self._params))
        self._config = LaunchConfig(self._kernel, 1)
        self._config_address = ctypes.addressof(self._config)
        self._lock = threading.Lock()
        self._device = device

    def part(
        self, sources: Sequence[Rows], results: Sequence[Rows], units: Sequence[int], lanes: int, which: Sequence[int]
    ) -> _Part:
        """A launch over tensors of these layouts; ``lanes``: threads that share a row."""
        rest = (0,) * (MOST_TENSORS - len(units))
        log2_lanes = min(lanes - 1, _THREADS - 1).bit_length()
        fixed = _FIXED.pack(
            *(stride for _, stride, _ in sources), *rest, *(stride for _, stride, _ in results), *rest,
            *units, *rest, len(units), log2_lanes,
        )  # fmt: skip
        return _Part(self, fixed, log2_lanes, which)

    def fire(
        self, part: _Part, sources: Sequence[int], results: Sequence[int], num_rows: int, tables: tuple[int, ...]
    ) -> None:
        """Launches on the current stream."""
        rest = (0,) * (MOST_TENSORS - len(part.which))
        addresses = *[sources[i] for i in part.which], *rest, *[results[i] for i in part.which], *rest
        config, params = self._config, self._params
        with self._lock:
            _ADDRESSES.pack_into(params, 0, *addresses)
            ctypes.memmove(ctypes.byref(params, _ADDRESSES.size), part.fixed, _FIXED.size)
            self._tail.pack_into(params, self._tail_at, *tables, num_rows)
            config.stream = torch._C._cuda_getCurrentRawStream(self._device.index)
            config.grid[0] = min(-(-(num_rows << part.log2_lanes) // _THREADS), _MAX_BLOCKS)
            self._kernel.launch(self._config_address, self._pointers)


@cache
def _gather_kernel(device: torch.device, unit: int) -> _RowKernel:
    return _RowKernel(device, "magi_gather_rows", gather_source(unit), "Qq")


@cache
def _sum_kernel(device: torch.device, partial: torch.dtype, into: torch.dtype, vector: int) -> _RowKernel:
    return _RowKernel(device, "magi_sum_rows", sum_source(partial, into, vector), "QQQq")
