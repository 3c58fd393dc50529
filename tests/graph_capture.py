"""CUDA graphs in tests on a GPU."""

from __future__ import annotations

from collections.abc import Callable

import torch


def capture[T](step: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
    """A graph of ``step`` and what it returned while captured; before, it runs on the current stream and on another."""
    step()  # compiles
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    return graph, captured
