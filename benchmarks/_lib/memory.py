"""Memory of this process, and by how much it grows."""

from __future__ import annotations

import ctypes
import gc
import resource
from pathlib import Path

import torch

from megatron_magi.runtime.lru import LruCache


def memory_mb(device: str) -> tuple[float, float, float]:
    """MB of the device in use, of torch's tensors there, and of this process, without what `malloc` keeps free."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    host = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    if device == "cpu":
        return 0.0, 0.0, host / 1e6
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 1e6, torch.cuda.memory_allocated() / 1e6, host / 1e6


def all_caches() -> list[LruCache]:
    """All bounded caches of this process."""
    return [x for x in gc.get_objects() if type(x) is LruCache]


def growth(memory: list[tuple], column: int) -> float:
    """MB that a column of ``memory`` has grown by since the first fifth of the calls."""
    at = len(memory) // 5 + 1
    return memory[-1][column] - max(row[column] for row in memory[:at])


def resident_mib() -> float:
    """MiB of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


def anonymous_mb() -> float:
    """MB of this process in memory that are no pages of files; of these the system takes some back."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024 / 1e6
