"""The CUDA driver as far as the Hopper kernels need it: modules, launches, tensor maps.

Talks to ``libcuda`` directly, so that no compiled extension stands between Python and a kernel.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from megatron_magi.profiling import profiled_kernel
from megatron_magi.runtime.graph_capture import is_capturing

_MAX_SHARED_BYTES = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_MAP_DTYPES = {torch.float16: 6, torch.bfloat16: 9, torch.float32: 7}
_SWIZZLE_128B = 3
_MAY_OVERLAP = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
_STARTED = 12  # CU_LAUNCH_ATTRIBUTE_LAUNCH_COMPLETION_EVENT
_WRONG_CONTEXT = (201, 400)  # CUDA_ERROR_INVALID_CONTEXT, CUDA_ERROR_INVALID_HANDLE
_PROMOTE_256B = 3
MAP_BYTES = 128
"""Size of a tensor map, bytes."""
PANEL = 64
"""Columns of a swizzled shared-memory panel of two-byte elements."""


@cache
def _libcuda() -> ctypes.CDLL:
    library = ctypes.CDLL("libcuda.so.1")
    pointer = ctypes.c_void_p
    library.cuLaunchKernelEx.argtypes = [pointer] * 4
    library.cuTensorMapReplaceAddress.argtypes = [pointer, pointer]
    library.cuStreamGetCaptureInfo_v2.argtypes = [pointer] * 6
    library.cuCtxPushCurrent_v2.argtypes = library.cuCtxSetCurrent.argtypes = [pointer]
    return library


@cache
def entry_points() -> tuple[int, int]:
    """Addresses of the functions of the driver that launch a kernel and that move a tensor map."""
    functions = _libcuda().cuLaunchKernelEx, _libcuda().cuTensorMapReplaceAddress
    first, second = (ctypes.cast(function, ctypes.c_void_p).value or 0 for function in functions)
    return first, second


@cache
def _primary_context(device_index: int) -> int:
    """Handle of the context that torch uses on a device."""
    device, context = ctypes.c_int(), ctypes.c_void_p()
    check(_libcuda().cuDeviceGet(ctypes.byref(device), device_index), "finding the device")
    check(_libcuda().cuDevicePrimaryCtxRetain(ctypes.byref(context), device), "finding the context")
    assert context.value is not None
    return context.value


@contextmanager
def _in_context(context: int) -> Iterator[None]:
    """Makes a context current: for good where the thread has none, as in autograd's threads, else for a while."""
    cuda, before = _libcuda(), ctypes.c_void_p()
    check(cuda.cuCtxGetCurrent(ctypes.byref(before)), "asking for the context")
    if before.value is None:
        check(cuda.cuCtxSetCurrent(context), "setting the context")
        yield
        return
    check(cuda.cuCtxPushCurrent_v2(context), "setting the context")
    try:
        yield
    finally:
        cuda.cuCtxPopCurrent_v2(ctypes.byref(before))


def check(status: int, what: str) -> None:
    """Raises RuntimeError for a code of CUDA that is not 0."""
    if status:
        text = ctypes.c_char_p()
        _libcuda().cuGetErrorString(status, ctypes.byref(text))
        raise RuntimeError(f"{what}: CUDA error {status}, {(text.value or b'unknown').decode()}")


def capture_of(device: torch.device) -> int:
    """Number of the CUDA graph that captures the current stream of a device; 0 if none does."""
    if not is_capturing(device):
        return 0
    status, number = ctypes.c_int(), ctypes.c_uint64()
    stream = torch.cuda.current_stream(device).cuda_stream
    found = ctypes.byref(status), ctypes.byref(number), None, None, None
    check(_libcuda().cuStreamGetCaptureInfo_v2(stream, *found), "asking for the graph that is captured")
    return number.value


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute, of those whose value is an int."""

    _fields_ = [("id", ctypes.c_uint), ("pad", ctypes.c_uint), ("value", ctypes.c_int), ("rest", ctypes.c_char * 60)]


_OVERLAP = (_Attribute * 1)(_Attribute(id=_MAY_OVERLAP, value=1))


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig. Set ``stream``, a raw handle, before a launch.

    With ``num_attributes`` set from 0 to 1 blocks may start while the kernel before it on the stream ends, if that
    allows; the kernel itself waits for what it needs (csrc/common/ptx.cuh).

    Args:
        kernel: what is launched.
        num_blocks: grid.
        started: raw handle of an event without timing that each launch records once all its blocks run; 0 for none. It
            takes the place of the attribute above.
    """

    _fields_ = [
        ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p), ("attributes", ctypes.POINTER(_Attribute)), ("num_attributes", ctypes.c_uint),
    ]  # fmt: skip

    def __init__(self, kernel: Kernel, num_blocks: int, started: int = 0) -> None:
        attributes = _OVERLAP
        if started:
            attributes = (_Attribute * 1)(_Attribute(id=_STARTED))
            ctypes.c_uint64.from_buffer(attributes, _Attribute.value.offset).value = started
        threads = (kernel.threads, 1, 1)
        super().__init__((num_blocks, 1, 1), threads, kernel.shared_bytes, None, attributes, bool(started))


@dataclass(frozen=True)
class Kernel:
    """A loaded kernel of one device.

    Attributes:
        handle: CUfunction.
        threads: threads a block.
        shared_bytes: dynamic shared memory a block.
        context: CUcontext that it is loaded into.
    """

    handle: ctypes.c_void_p
    threads: int
    shared_bytes: int
    context: int = 0

    def launch(self, config: int, pointers: ctypes.Array) -> None:
        """Queues the kernel; ``config``: address of a `LaunchConfig`, ``pointers``: holds that of the parameters."""
        status = _libcuda().cuLaunchKernelEx(config, self.handle, pointers, None)
        if status:
            with self.where_it_runs(status):
                check(_libcuda().cuLaunchKernelEx(config, self.handle, pointers, None), "kernel launch")

    def where_it_runs(self, status: int) -> AbstractContextManager[None]:
        """The context in which to try again a launch that was refused.

        Raises:
            RuntimeError: the refusal, if another context is no help.
        """
        if status not in _WRONG_CONTEXT:
            check(status, "kernel launch")
        return _in_context(self.context)


def load_kernel(image: bytes, name: str, threads: int, shared_bytes: int, device: torch.device) -> Kernel:
    """Loads a cubin on a device and makes its kernel ready to launch.

    Raises:
        RuntimeError: the driver refuses the image.
    """
    torch.cuda.init()
    index = torch.cuda.current_device() if device.index is None else device.index
    context = _primary_context(index)
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    cuda = _libcuda()
    with _in_context(context):
        check(cuda.cuModuleLoadData(ctypes.byref(module), image), f"loading {name}")
        check(cuda.cuModuleGetFunction(ctypes.byref(function), module, name.encode()), f"finding {name}")
        check(cuda.cuFuncSetAttribute(function, _MAX_SHARED_BYTES, shared_bytes), f"shared memory of {name}")
    kernel = Kernel(function, threads, shared_bytes, context)
    return profiled_kernel(name, kernel, torch.device("cuda", index), _stream_of)


def _stream_of(config: int) -> int | None:
    return LaunchConfig.from_address(config).stream


_Sizes, _Strides, _Box = ctypes.c_uint64 * 3, ctypes.c_uint64 * 2, ctypes.c_uint32 * 3
_ALL = _Box(1, 1, 1)  # elements


def tensor_map(t: Tensor, box_rows: int, box_heads: int = 1) -> bytes:
    """A tensor map of ``[rows, heads, columns]``, boxes of so many rows and heads, and `PANEL` columns.

    Args:
        t: last dimension contiguous, other strides multiples of 16 bytes, 16-byte aligned.
        box_rows, box_heads: at most 256; heads of a row follow each other in a box.
    """
    rows, heads, columns = t.shape
    row_stride, head_stride, _ = t.stride()
    size = t.element_size()
    memory = ctypes.create_string_buffer(MAP_BYTES + 64)
    at = (ctypes.addressof(memory) + 63) // 64 * 64
    status = _libcuda().cuTensorMapEncodeTiled(
        ctypes.c_void_p(at),
        _MAP_DTYPES[t.dtype],
        3,
        ctypes.c_void_p(t.data_ptr()),
        _Sizes(columns, heads, rows),
        _Strides((head_stride if heads > 1 else columns) * size, (row_stride if rows > 1 else heads * columns) * size),
        _Box(PANEL, box_heads, box_rows),
        _ALL,
        0,
        _SWIZZLE_128B,
        _PROMOTE_256B,
        0,
    )
    if status:
        check(status, f"tensor map of a {rows} x {heads} x {columns} tensor, strides {row_stride}, {head_stride}")
    return ctypes.string_at(at, MAP_BYTES)


def move_tensor_map(at: int, address: int) -> None:
    """Changes the address of the tensor that the tensor map at an address of host memory describes."""
    status = _libcuda().cuTensorMapReplaceAddress(at, address)
    if status:
        check(status, "moving a tensor map")


def fits_tensor_map(t: Tensor) -> bool:
    """Whether `tensor_map` takes the tensor as it is."""
    rows, heads, columns = t.shape
    if t.data_ptr() % 16:
        return False
    unit = 16 // t.element_size()
    if t.is_contiguous() and columns % unit == 0:  # as below, and faster
        return True
    row_stride, head_stride, column_stride = t.stride()
    if column_stride != 1:
        return False
    return (rows == 1 or (row_stride > 0 and row_stride % unit == 0)) and (
        heads == 1 or (head_stride > 0 and head_stride % unit == 0)
    )
