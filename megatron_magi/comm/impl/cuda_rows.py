"""Row operations as kernels of our own (``csrc/group_collective``), for Hopper GPUs: all tensors in one launch.

`pack_rows`, `unpack_rows` and `add_rows` of `megatron_magi.comm.rows`, the last for some dtypes (`can_add`).
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Sequence
from functools import cache
from math import prod

import torch
from torch import Tensor

from megatron_magi.comm.row_layout import RowLayout
from megatron_magi.comm.rows import Arrivals
from megatron_magi.cuda.build import build
from megatron_magi.cuda.driver import LaunchConfig, load_kernel

_MAX_TENSORS = 4
_THREADS = 256
_MAX_BLOCKS = 132 * 8
_IN_FLIGHT = 4  # units that a thread copies at a time
_WIDEST = 16  # bytes of an access
_ROWS = "8Q8q4i2i"  # RowTensors of rows.cuh
_ELEMENTS = {torch.bfloat16: "BFloat", torch.float16: "Half", torch.float32: "float", torch.float64: "double"}

_Rows = tuple[int, int, int]
"""Rows in memory: address, bytes from one to the next, bytes of one."""


@cache
def runs_on(device: torch.device) -> bool:
    """Whether the kernels run on a device."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


def pack_rows(tensors: Sequence[Tensor], index: Tensor | None, layout: RowLayout, buffer: Tensor) -> None:
    """See `megatron_magi.comm.rows.pack_rows`."""
    tensors = [_with_rows(x) for x in tensors]
    _gather([_rows_of(x) for x in tensors], _parts(buffer, layout), index, buffer)


def unpack_rows(buffer: Tensor, index: Tensor | None, layout: RowLayout) -> list[Tensor]:
    """See `megatron_magi.comm.rows.unpack_rows`."""
    if index is None:
        return layout.views(buffer)
    out = [buffer.new_empty((buffer.shape[0], *s), dtype=t) for s, t in zip(layout.shapes, layout.dtypes, strict=True)]
    _gather(_parts(buffer, layout), [_rows_of(x) for x in out], index, buffer)
    return out


def add_rows(buffer: Tensor, layout: RowLayout, arrivals: Arrivals, into: Sequence[Tensor]) -> None:
    """See `megatron_magi.comm.rows.add_rows`."""
    num_rows, from_dtype, to_dtype = arrivals.rows.shape[0], layout.dtypes[0], into[0].dtype
    if not num_rows or not buffer.shape[0] or not layout.sizes[0]:
        return
    sources, results = _parts(buffer, layout), [_rows_of(x) for x in into]
    vector = min(
        _divisor(sources) // from_dtype.itemsize,
        _divisor(results) // to_dtype.itemsize,
        _WIDEST // max(from_dtype.itemsize, to_dtype.itemsize),
    )
    units = [size // (vector * from_dtype.itemsize) for _, _, size in sources]
    tables = arrivals.rows.data_ptr(), arrivals.starts.data_ptr(), arrivals.sources.data_ptr()
    kernel = _sum_kernel(buffer.device, from_dtype, to_dtype, vector)
    kernel.fire(sources, results, units, max(units), num_rows, tables)


def can_add(layout: RowLayout, into: Sequence[Tensor]) -> bool:
    """Whether `add_rows` takes these: tensors of equal dtypes and widths, of 16 or 32 bits, or all of 64."""
    partial, wide = layout.dtypes[0], into[0].dtype
    if len(into) > _MAX_TENSORS or not {partial, wide} <= _ELEMENTS.keys():
        return False
    equal = all(t == partial for t in layout.dtypes) and all(x.dtype == wide for x in into)
    return equal and (partial == torch.float64) == (wide == torch.float64)


def gather_source(unit: int) -> tuple[str, tuple[str, ...]]:
    """Source and macros of the kernel that copies rows by ``unit`` bytes at a time."""
    return "group_collective/gather_rows.cu", (f"UNIT={unit}",)


def sum_source(partial: torch.dtype, into: torch.dtype, vector: int) -> tuple[str, tuple[str, ...]]:
    """Source and macros of the kernel that adds rows by ``vector`` elements at a time."""
    macros = (f"FROM={_ELEMENTS[partial]}", f"INTO={_ELEMENTS[into]}", f"VECTOR={vector}")
    return "group_collective/sum_rows.cu", macros


def _gather(sources: list[_Rows], results: list[_Rows], index: Tensor | None, buffer: Tensor) -> None:
    num_rows = buffer.shape[0]
    pairs = [pair for pair in zip(sources, results, strict=True) if pair[0][2]]
    if not num_rows or not pairs:
        return
    for i in range(0, len(pairs), _MAX_TENSORS):
        some_sources, some_results = zip(*pairs[i : i + _MAX_TENSORS], strict=True)
        unit = min(_divisor(some_sources), _divisor(some_results), _WIDEST)
        units = [size // unit for _, _, size in some_sources]
        kernel = _gather_kernel(buffer.device, unit)
        address = 0 if index is None else index.data_ptr()
        kernel.fire(some_sources, some_results, units, -(-max(units) // _IN_FLIGHT), num_rows, (address,))


def _with_rows(x: Tensor) -> Tensor:
    """The tensor, or a copy, with contiguous rows."""
    expected = 1
    for size, stride in zip(reversed(x.shape[1:]), reversed(x.stride()[1:]), strict=True):
        if size != 1 and stride != expected:
            return x.contiguous()
        expected *= size
    return x


def _rows_of(x: Tensor) -> _Rows:
    size = x.element_size()
    return x.data_ptr(), x.stride(0) * size, prod(x.shape[1:]) * size


def _parts(buffer: Tensor, layout: RowLayout) -> list[_Rows]:
    """The rows of each tensor in a buffer."""
    address = buffer.data_ptr()
    return [
        (address + offset, layout.row_bytes, size) for offset, size in zip(layout.offsets, layout.sizes, strict=True)
    ]


def _divisor(rows: Sequence[_Rows]) -> int:
    """The largest power of two that divides all addresses, strides and lengths."""
    bits = 0
    for address, stride, size in rows:
        bits |= address | stride | size
    return bits & -bits


class _RowKernel:
    """A kernel with room for its parameters, on one device."""

    def __init__(self, device: torch.device, name: str, source: tuple[str, tuple[str, ...]], tail: str) -> None:
        self._kernel = load_kernel(build(*source), name, _THREADS, 0, device)
        self._layout = struct.Struct(_ROWS + tail)
        self._params = ctypes.create_string_buffer(self._layout.size)
        self._pointers = (ctypes.c_void_p * 1)(ctypes.addressof(self._params))
        self._config = LaunchConfig(self._kernel, 1)
        self._lock = threading.Lock()
        self._device = device

    def fire(
        self,
        sources: Sequence[_Rows],
        results: Sequence[_Rows],
        units: Sequence[int],
        lanes: int,
        num_rows: int,
        tables: tuple[int, ...],
    ) -> None:
        """Queues the kernel on the current stream; ``lanes``: threads that a row is worth."""
        rest = (0,) * (_MAX_TENSORS - len(units))
        log2_lanes = min(lanes - 1, _THREADS - 1).bit_length()
        values = (
            *(address for address, _, _ in sources), *rest, *(address for address, _, _ in results), *rest,
            *(stride for _, stride, _ in sources), *rest, *(stride for _, stride, _ in results), *rest,
            *units, *rest, len(units), log2_lanes, *tables, num_rows,
        )  # fmt: skip
        config = self._config
        with self._lock:
            self._layout.pack_into(self._params, 0, *values)
            config.stream = torch._C._cuda_getCurrentRawStream(self._device.index)
            config.grid[0] = min(-(-(num_rows << log2_lanes) // _THREADS), _MAX_BLOCKS)
            self._kernel.launch(ctypes.addressof(config), self._pointers)


@cache
def _gather_kernel(device: torch.device, unit: int) -> _RowKernel:
    return _RowKernel(device, "magi_gather_rows", gather_source(unit), "Qq")


@cache
def _sum_kernel(device: torch.device, partial: torch.dtype, into: torch.dtype, vector: int) -> _RowKernel:
    return _RowKernel(device, "magi_sum_rows", sum_source(partial, into, vector), "QQQq")
