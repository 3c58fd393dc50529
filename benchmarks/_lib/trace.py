"""What the profiler's trace says of communication: how long its kernels run, and for how much of it others do."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

COMMUNICATION = ("nccl", "magi_", "Memcpy PtoP")
"""How the names of kernels and copies begin that bring rows from other ranks, wait for them, pack or add them."""

_AHEAD_CYCLES = 6_000_000
"""Of the clock: some milliseconds, in which the host queues what is traced."""

_MARK_CYCLES = 1000
"""Of the kernel behind which it begins."""


def is_communication(name: str) -> bool:
    """Whether a kernel of that name moves rows between ranks."""
    return name.startswith(COMMUNICATION)


def union(spans: Iterable[tuple[float, float]]) -> np.ndarray:
    """Disjoint spans that cover the same, sorted, ``[n, 2]``."""
    merged: list[list[float]] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        elif end > start:
            merged.append([start, end])
    return np.array(merged).reshape(-1, 2)


def overlap(a: np.ndarray, b: np.ndarray) -> float:
    """Length of what two sets of disjoint spans have in common."""
    low, high = np.maximum(a[:, None, 0], b[None, :, 0]), np.minimum(a[:, None, 1], b[None, :, 1])
    return float(np.maximum(high - low, 0).sum())


def hidden_share(run: Callable[[], object], trace: Path | None = None) -> tuple[float, float]:
    """Milliseconds in which communication runs while ``run`` does, and in how many of them other kernels run too.

    Called by all ranks.

    Nothing where there is no GPU.

    Args:
        trace: where to write the trace.
    """
    from torch.autograd.profiler import DeviceType
    from torch.profiler import ProfilerActivity, profile

    if not torch.cuda.is_available():
        run()
        return 0.0, 0.0
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        # Ranks begin to profile one after the other: what counts is what comes after their devices have met.
        dist.barrier()
        torch.cuda.synchronize()
        torch.cuda._sleep(_AHEAD_CYCLES)
        dist.all_reduce(torch.zeros(1, device="cuda"))
        torch.cuda._sleep(_MARK_CYCLES)
        run()
        torch.cuda.synchronize()
    events = [(e.name, e.time_range) for e in profiler.events() if e.device_type == DeviceType.CUDA]
    begin = max(span.end for name, span in events if "spin_kernel" in name)
    spans: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    for name, span in events:
        if span.start >= begin:
            spans[is_communication(name)].append((span.start, span.end))
    if trace:
        profiler.export_chrome_trace(str(trace))
    comm, others = union(spans[True]), union(spans[False])
    return float((comm[:, 1] - comm[:, 0]).sum()) / 1e3, overlap(comm, others) / 1e3
