"""Device memory that other processes of this machine map: CUDA's inter-process handles, no multicast."""

from __future__ import annotations

import ctypes
from functools import cache

import torch

from megatron_magi.cuda.driver import _in_context, _libcuda, _primary_context, check

_BLOCK_BYTES = 2 << 20  # smaller pieces would share a block, and its handle, with other allocations
_LAZY_PEER_ACCESS = 1
_ACCESS_SUPPORTED, _NATIVE_ATOMICS = 2, 3  # CUdevice_P2PAttribute


class _Handle(ctypes.Structure):
    """CUipcMemHandle."""

    _fields_ = [("bytes", ctypes.c_byte * 64)]


@cache
def _driver() -> ctypes.CDLL:
    cuda, address = _libcuda(), ctypes.c_uint64
    cuda.cuMemAlloc_v2.argtypes = [ctypes.POINTER(address), ctypes.c_size_t]
    cuda.cuMemFree_v2.argtypes = cuda.cuIpcCloseMemHandle.argtypes = [address]
    cuda.cuMemsetD8_v2.argtypes = [address, ctypes.c_ubyte, ctypes.c_size_t]
    cuda.cuMemsetD32_v2.argtypes = [address, ctypes.c_uint, ctypes.c_size_t]
    cuda.cuMemcpyDtoH_v2.argtypes = [ctypes.c_void_p, address, ctypes.c_size_t]
    cuda.cuIpcGetMemHandle.argtypes = [ctypes.POINTER(_Handle), address]
    cuda.cuIpcOpenMemHandle_v2.argtypes = [ctypes.POINTER(address), _Handle, ctypes.c_uint]
    return cuda


class SharedMemory:
    """Memory of one device that other processes can `open_memory` by its `handle`; zeros at first.

    Args:
        num_bytes: rounded up to whole blocks of the driver.
        device: where.

    Raises:
        RuntimeError: there is not as much, or it cannot be shared.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._context = _primary_context(device.index)
        num_bytes = -(-num_bytes // _BLOCK_BYTES) * _BLOCK_BYTES
        address, handle = ctypes.c_uint64(), _Handle()
        with _in_context(self._context):
            check(_driver().cuMemAlloc_v2(ctypes.byref(address), num_bytes), f"{num_bytes} bytes to share")
            self.address = address.value
            try:
                check(_driver().cuMemsetD8_v2(address, 0, num_bytes), "zeroing shared memory")
                check(_driver().cuCtxSynchronize(), "zeroing shared memory")
                check(_driver().cuIpcGetMemHandle(ctypes.byref(handle), address), "sharing memory")
            except RuntimeError:
                self.free()
                raise
        self.handle = bytes(handle)

    def free(self) -> None:
        """Gives the memory back; who has opened it must not use it any more."""
        with _in_context(self._context):
            _driver().cuMemFree_v2(self.address)


def open_memory(handle: bytes, device: torch.device) -> int:
    """Maps another process's `SharedMemory` for a device of this one; its address.

    Raises:
        RuntimeError: it cannot be mapped.
    """
    address = ctypes.c_uint64()
    with _in_context(_primary_context(device.index)):
        status = _driver().cuIpcOpenMemHandle_v2(
            ctypes.byref(address), _Handle.from_buffer_copy(handle), _LAZY_PEER_ACCESS
        )
        check(status, "mapping another rank's memory")
    return address.value


def close_memory(address: int, device: torch.device) -> None:
    """Undoes `open_memory`."""
    with _in_context(_primary_context(device.index)):
        _driver().cuIpcCloseMemHandle(ctypes.c_uint64(address))


def write_word(address: int, value: int, device: torch.device) -> None:
    """Writes 4 bytes of memory of a device or of one that it has mapped; there when this returns."""
    with _in_context(_primary_context(device.index)):
        check(_driver().cuMemsetD32_v2(address, value, 1), "writing shared memory")
        check(_driver().cuCtxSynchronize(), "writing shared memory")


def read_words(address: int, count: int, device: torch.device) -> list[int]:
    """Some 4-byte words of a device's memory."""
    words = (ctypes.c_uint * count)()
    with _in_context(_primary_context(device.index)):
        check(_driver().cuMemcpyDtoH_v2(words, address, ctypes.sizeof(words)), "reading shared memory")
    return list(words)


def are_linked(device: int, other: int) -> bool:
    """Whether one device reads the other's memory, over a link as fast as NVLink: one with atomics, unlike PCIe.

    Args:
        device, other: different indices of devices that this process sees.
    """
    cuda, value, handles = _driver(), ctypes.c_int(), (ctypes.c_int(), ctypes.c_int())
    for handle, index in zip(handles, (device, other), strict=True):
        check(cuda.cuDeviceGet(ctypes.byref(handle), index), "finding the device")
    for attribute in (_ACCESS_SUPPORTED, _NATIVE_ATOMICS):
        check(cuda.cuDeviceGetP2PAttribute(ctypes.byref(value), attribute, *handles), "asking for peer access")
        if not value.value:
            return False
    return True
