"""What capturing attention in CUDA graphs gains where the mask stays the same: eager steps, one graph of all, graphs of
a layer.

    python -m benchmarks.kernels.bench_captured_layers [--cases NAME:TOKENS ...] [--layers N] [--steps N] [--csv FILE]

A step is a forward and a backward pass of some layers by `calc_attn`, of packed documents, on one GPU. Ways:

- ``eager``;
- ``step captured``: all of it is one graph;
- ``layer captured``: a graph of a layer's forward and one of its backward, replayed for each layer;
- ``layer captured, copied``: likewise, with inputs copied to where the graphs read them and results copied from where
  they write them, as is needed where tensors are a caller's own.

Milliseconds, medians of the steps: ``alone`` if the host waits for the device after each step, so that the device is
idle when one begins; ``ahead`` a step of many that are queued one behind the other, on the device; ``host``, what the
host takes to queue it then. ``kernels_ms`` is the time of the kernels of an eager step alone, by torch's profiler.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks._lib.batches import make_mask
from benchmarks._lib.provenance import write_csv
from megatron_magi.api import DistAttnRuntimeKey as Key
from megatron_magi.api import calc_attn, magi_attn_varlen_key, make_static_key
from megatron_magi.api.static_key import StaticKey

HEADS_Q, HEADS_KV, HEAD_DIM = 32, 8, 128
HEADER = ["documents", "tokens", "layers", "way", "alone_ms", "ahead_ms", "host_ms", "kernels_ms"]
Tensors = list[torch.Tensor]


def make_key(name: str, tokens: int) -> Key:
    """The key of a mask of documents."""
    starts = make_mask(name, tokens, 1).table[:, 0]
    lengths = torch.tensor(np.unique(np.append(starts, tokens)), device="cpu")
    return magi_attn_varlen_key(lengths, lengths, HEADS_Q, HEADS_KV, HEAD_DIM, causal=True)


def attend(layers: list[Tensors], dout: torch.Tensor, key: Key | StaticKey) -> None:
    """One step."""
    outs = [calc_attn(*qkv, key)[0] for qkv in layers]
    torch.autograd.grad(outs, [t for qkv in layers for t in qkv], [dout] * len(outs))


def captured(run: Callable[[], object]) -> tuple[torch.cuda.CUDAGraph, object]:
    """A graph of ``run``, and what that returns."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    return graph, found


class LayerGraphs:
    """A layer's passes as graphs."""

    def __init__(self, layers: list[Tensors], dout: torch.Tensor, key: StaticKey) -> None:
        self._layers, self._dout = layers, dout
        self._inputs = [t.detach().clone().requires_grad_() for t in layers[0]]
        self._given = dout.clone()
        self._forward, self._out = captured(lambda: calc_attn(*self._inputs, key)[0])
        self._backward, self._grads = captured(
            lambda: torch.autograd.grad(self._out, self._inputs, self._given, retain_graph=True)
        )

    def run(self, copies: bool) -> None:
        """One step."""
        with torch.no_grad():
            for qkv in self._layers:
                if copies:
                    torch._foreach_copy_(self._inputs, qkv)
                self._forward.replay()
                if copies:
                    self._out.clone()
            for _ in self._layers:
                if copies:
                    self._given.copy_(self._dout)
                self._backward.replay()
                if copies:
                    [t.clone() for t in self._grads]


def times_ms(run: Callable[[], object], steps: int) -> list[float]:
    """``alone``, ``ahead`` and ``host`` of `HEADER`."""
    alone = []
    for _ in range(3 + steps):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        run()
        torch.cuda.synchronize()
        alone.append(1e3 * (time.perf_counter() - begin))
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    begin = time.perf_counter()
    for _ in range(steps):
        run()
    host = 1e3 * (time.perf_counter() - begin) / steps
    last.record()
    torch.cuda.synchronize()
    return [statistics.median(alone[3:]), first.elapsed_time(last) / steps, host]


def kernels_ms(run: Callable[[], object], steps: int = 4) -> float:
    """Time of the kernels of a step."""
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(steps):
            run()
        torch.cuda.synchronize()
    return sum(event.self_device_time_total for event in seen.key_averages()) / steps / 1e3


def measure(name: str, tokens: int, num_layers: int, steps: int) -> list[list]:
    """Rows of the table for one kind of mask."""
    generator = torch.Generator("cuda").manual_seed(0)
    *qkv, dout = (
        torch.randn(tokens, n, HEAD_DIM, device="cuda", dtype=torch.bfloat16, generator=generator)
        for n in (HEADS_Q, HEADS_KV, HEADS_KV, HEADS_Q)
    )
    layers = [[t.detach().requires_grad_() for t in qkv] for _ in range(num_layers)]
    key = make_key(name, tokens)
    attend(layers, dout, key)
    static = make_static_key(key)
    whole, _ = captured(lambda: attend(layers, dout, static))
    graphs = LayerGraphs(layers, dout, make_static_key(key))
    ways = {
        "eager": lambda: attend(layers, dout, key),
        "step captured": whole.replay,
        "layer captured": lambda: graphs.run(False),
        "layer captured, copied": lambda: graphs.run(True),
    }
    rows = [[name, tokens, num_layers, way, *(f"{ms:.2f}" for ms in times_ms(run, steps)), ""]
            for way, run in ways.items()]  # fmt: skip
    rows[0][-1] = f"{kernels_ms(ways['eager']):.2f}"
    return rows


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="*", default=["64:8192", "short:8192", "8:8192"], help="documents:tokens")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--csv", help="also write the rows to this file")
    options = parser.parse_args()
    rows = []
    for case in options.cases:
        name, tokens = case.split(":")
        for row in measure(name, int(tokens), options.layers, options.steps):
            rows.append(row)
            print("  ".join(f"{h}={c}" for h, c in zip(HEADER, row, strict=True)), flush=True)
        if options.csv:
            write_csv(options.csv, HEADER, rows)


if __name__ == "__main__":
    main()
