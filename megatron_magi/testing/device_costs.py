"""What calls cost besides time on a GPU: time of the host, and memory."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch


def host_us(call: Callable[[], object], calls: int = 300) -> float:
    """Median time of a call that is only queued, in microseconds; the device is idle before and has room for all."""
    for _ in range(20):
        call()
    torch.cuda.synchronize()
    times = []
    for _ in range(calls):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    torch.cuda.synchronize()
    return statistics.median(times) * 1e6


def peak_of[Result](call: Callable[[], Result]) -> tuple[Result, int]:
    """Result of ``call``, and bytes by which memory grew at its peak; ``call`` runs once before, to warm up."""
    call()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = call()
    torch.cuda.synchronize()
    return result, torch.cuda.max_memory_allocated() - before
