"""Torch's current stream, as a raw handle."""

from __future__ import annotations

import threading
from functools import cache

import torch


def current_stream(device: torch.device) -> int:
    """Raw handle of torch's current stream; faster than `torch.cuda.current_stream`."""
    return torch._C._cuda_getCurrentRawStream(device.index)


@cache
def stream_lock(device: torch.device, stream: int) -> threading.Lock:
    """Held while kernels are launched of which one depends on being right after the other on the stream."""
    return threading.Lock()
