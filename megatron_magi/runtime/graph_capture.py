"""Whether a CUDA graph is being captured."""

from __future__ import annotations

import torch


def is_capturing(device: torch.device) -> bool:
    """Whether a graph captures the current stream of a device, which need not be the current one."""
    if device.type != "cuda":
        return False
    if device.index == torch.cuda.current_device():
        return torch.cuda.is_current_stream_capturing()
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()
