"""What the profiler's trace says of communication: how long its kernels run, and how much of it others run beside."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import torch

COMMUNICATION = ("nccl", "magi_", "Memcpy PtoP")
"""How the names of kernels and copies begin that bring rows from other ranks, wait for them, pack or add them."""


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

    Nothing where there is no GPU.

    Args:
        trace: where to write the trace.
    """
    from torch.autograd.profiler import DeviceType
    from torch.profiler import ProfilerActivity, profile

    if not torch.cuda.is_available():
        run()
        return 0.0, 0.0
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    spans: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    for event in profiler.events():
        if event.device_type == DeviceType.CUDA:
            spans[is_communication(event.name)].append((event.time_range.start, event.time_range.end))
    if trace:
        profiler.export_chrome_trace(str(trace))
    comm, others = union(spans[True]), union(spans[False])
    return float((comm[:, 1] - comm[:, 0]).sum()) / 1e3, overlap(comm, others) / 1e3
