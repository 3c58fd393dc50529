"""A kernel that takes SMs away from others, for as long as a test wants."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from megatron_magi.cuda import build, driver
from megatron_magi.cuda.launch import Launch

_WHOLE_SM_BYTES = 200 << 10  # of shared memory: no second block of a kernel that needs much fits beside one
_MOST_SECONDS = 30.0


class _Params(ctypes.Structure):
    _fields_ = [("held", ctypes.c_void_p), ("let", ctypes.c_void_p), ("most_ns", ctypes.c_int64)]


@contextmanager
def sms_taken(count: int) -> Iterator[None]:
    """Keeps so many SMs of the current device, at the highest priority, until the block is left.

    What runs inside must have run before: loading a kernel or taking memory from the driver may wait for the device.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    image, _ = build.compile_kernel(str(Path(__file__).with_suffix(".cu")), ())
    kernel = driver.load_kernel(image, "hold_sms", 32, _WHOLE_SM_BYTES, device)
    flags = torch.zeros(count + 1, dtype=torch.int32).pin_memory()
    stream = torch.cuda.Stream(priority=-5)  # the highest that there is
    at = flags.data_ptr()
    torch.cuda.synchronize()
    Launch(kernel, count, _Params(at, at + 4 * count, int(_MOST_SECONDS * 1e9))).fire(stream.cuda_stream)
    try:
        until = time.monotonic() + 5
        while int(flags[:count].sum()) < count:
            assert time.monotonic() < until, "the SMs are not taken"
        yield
    finally:
        flags[count] = 1
        stream.synchronize()
