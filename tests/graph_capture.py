"""CUDA graphs in tests on a GPU."""

from __future__ import annotations

from collections.abc import Callable

import torch


def capture[T](step: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
    """A graph of what ``step`` queues, after two rounds of warm-up on another stream, and what it returned."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    return graph, captured
