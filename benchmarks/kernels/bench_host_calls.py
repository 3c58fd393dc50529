"""Time of the host for one call of attention, and for its backward, in eager mode and under torch.compile.

    python -m benchmarks.kernels.bench_host_calls [--calls NAME ...] [--steps N] [--csv FILE]

Layers of few tokens (three causal documents), forward one behind the other and one backward over all of them, the
device being idle at the begin of each pass: microseconds a layer, median and shortest of the steps. ``one rank`` is
distributed attention of a rank that fetches nothing, ``autograd alone`` a function that only allocates its results,
``compiled`` is `slice_attention` under ``torch.compile(backend="aot_eager")``, ``two stages`` is
attention as ranks compute it that merge results over the keys of several stages, its launches found by mask each time.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks._lib.provenance import print_row, write_csv
from megatron_magi.attention import distributed_attention
from megatron_magi.mask.builders import varlen
from megatron_magi.ops.flex_flash_attn import flex_flash_attn_func
from megatron_magi.ops.slice_attention import slice_attention
from megatron_magi.ops.slice_passes import slice_attention_backward, slice_attention_forward
from megatron_magi.plan import make_plan

LAYERS, TOKENS, HEADS_Q, HEADS_KV, HEAD_DIM = 16, 512, 32, 8, 128
DOCUMENTS = (200, 180, 132)
WARM_UP = 5
HEADER = ["call", "forward_us", "backward_us", "shortest_forward_us", "shortest_backward_us"]
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class _Allocates(torch.autograd.Function):
    """Results as attention has them, of nothing."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, v)
        return torch.empty_like(q)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(t) for t in ctx.saved_tensors)


class _Stages(torch.autograd.Function):
    """Attention in two stages, over the same keys: the second is merged into the first, and adds to its gradients."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bands: np.ndarray) -> Tensor:
        out, lse, _ = slice_attention_forward(q, k, v, bands, out_dtype=torch.float32)
        out, lse, _ = slice_attention_forward(q, k, v, bands, out=out, lse=lse)
        ctx.save_for_backward(q, k, v, lse, torch.zeros_like(lse))
        ctx.bands = bands
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, lse, delta = ctx.saved_tensors
        grads = slice_attention_backward(dout, q, k, v, lse, delta, ctx.bands)
        dq, dk, dv = slice_attention_backward(dout, q, k, v, lse, delta, ctx.bands, dq=grads[0])
        return dq, dk, dv, None


def attend_by_name(device: str) -> dict[str, Attend]:
    """What is timed."""
    mask = varlen(doc_lengths=DOCUMENTS, causal=True)
    plan = make_plan(mask, cp_size=1).for_rank(0)
    ranges_q, ranges_k, types = (torch.as_tensor(x, device=device) for x in _slices())
    compiled = torch.compile(lambda q, k, v: slice_attention(q, k, v, mask.bands)[0], backend="aot_eager")
    return {
        "autograd alone": _Allocates.apply,
        "one rank": lambda q, k, v: distributed_attention(q, k, v, plan, dist.group.WORLD)[0],
        "slice_attention": lambda q, k, v: slice_attention(q, k, v, mask.bands)[0],
        "compiled": compiled,
        "two stages": lambda q, k, v: _Stages.apply(q, k, v, mask.bands),
        "flex_flash_attn_func": lambda q, k, v: flex_flash_attn_func(q, k, v, ranges_q, ranges_k, types)[0],
    }


def _slices() -> tuple[list, list, list]:
    ends = [sum(DOCUMENTS[: i + 1]) for i in range(len(DOCUMENTS))]
    ranges = [[end - length, end] for end, length in zip(ends, DOCUMENTS, strict=True)]
    return ranges, ranges, [1] * len(ranges)  # causal


def measure(attend: Attend, steps: int, device: str) -> list[tuple[float, float]]:
    """Microseconds a layer of each step, forward and backward."""
    heads = (HEADS_Q, HEADS_KV, HEADS_KV)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    layers = [
        [torch.randn(TOKENS, n, HEAD_DIM, device=device, dtype=dtype, requires_grad=True) for n in heads]
        for _ in range(LAYERS)
    ]
    dout = torch.randn(TOKENS, HEADS_Q, HEAD_DIM, device=device, dtype=dtype)
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    found = []
    for _ in range(WARM_UP + steps):
        wait()
        begin = time.perf_counter()
        outs = [attend(*qkv) for qkv in layers]
        issued = time.perf_counter()
        wait()
        again = time.perf_counter()
        torch.autograd.grad(outs, [t for qkv in layers for t in qkv], [dout] * LAYERS)
        found.append((1e6 * (issued - begin) / LAYERS, 1e6 * (time.perf_counter() - again) / LAYERS))
    return found[WARM_UP:]


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ("autograd alone", "one rank", "slice_attention", "compiled", "two stages", "flex_flash_attn_func")
    parser.add_argument("--calls", nargs="+", choices=names, default=list(names))
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--csv", help="also write the rows to this file")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(os.path.join(folder, "store"), 1)
        dist.init_process_group("nccl" if device == "cuda" else "gloo", store=store, rank=0, world_size=1)
        attend, rows = attend_by_name(device), []
        for name in args.calls:
            passes = list(zip(*measure(attend[name], args.steps, device), strict=True))
            figures = [*map(statistics.median, passes), *map(min, passes)]
            rows.append([name, *(f"{us:.1f}" for us in figures)])
            print_row(HEADER, rows[-1])
        dist.destroy_process_group()
    write_csv(args.csv, HEADER, rows)


if __name__ == "__main__":
    main()
