"""What the Hopper kernels cost besides their speed: options, the host, memory, the first use.

Each line is a quantity, its value and what it should stay below:
deterministic results and `sm_margin=8` as ratios to the default in the same slots, the host's time of a call with
a known mask and with a new one, memory besides results, and the time until an uncached and a cached kernel is ready.

Usage: python -m benchmarks.kernels.bench_attention_costs --lengths 8192 32768 --csv costs.csv
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch

from benchmarks._lib.cases import MASKS
from benchmarks._lib.provenance import write_csv
from benchmarks._lib.timing import time_together
from megatron_magi.attention import distributed_attention
from megatron_magi.backends.sm90 import kernels as hopper_kernels
from megatron_magi.config import MagiConfig
from megatron_magi.cuda import build as hopper_build
from megatron_magi.mask import builders
from megatron_magi.ops.flex_flash_attn import flex_flash_attn_func
from megatron_magi.ops.slice_attention import slice_attention
from megatron_magi.plan import make_plan
from megatron_magi.testing.device_costs import host_us, peak_of

Row = tuple[str, str, int, float, str, float]
HEADER = ("quantity", "mask", "length", "value", "unit", "limit")
HEADS_Q, HEADS_KV, HEAD_DIM = 64, 8, 128
MARGIN = 8
PARTS = ["first use", "host", "memory", "options"]


def tensors(length: int, heads: tuple[int, int] = (HEADS_Q, HEADS_KV)) -> list[torch.Tensor]:
    """q, k, v that require gradients."""
    num_heads, num_heads_kv = heads
    return [
        torch.randn(length, n, HEAD_DIM, device="cuda").bfloat16().requires_grad_()
        for n in (num_heads, num_heads_kv, num_heads_kv)
    ]


def option_ratios(name: str, length: int) -> Iterator[Row]:
    """Deterministic results, and SMs left to others, against the default."""
    mask, leaves = MASKS[name](length).mask, tensors(length)
    dout = torch.randn(length, HEADS_Q, HEAD_DIM, device="cuda").bfloat16()
    forwards: dict[str, Callable[[], object]] = {}  # next to each other, and then the backwards
    backwards: dict[str, Callable[[], object]] = {}
    variants = {"default": {}, "deterministic": {"deterministic": True}, "sm_margin": {"sm_margin": MARGIN}}
    for variant, options in variants.items():
        out, _ = slice_attention(*leaves, mask, impl="ffa", **options)
        frozen = [t.detach() for t in leaves]
        forwards[f"{variant} forward"] = lambda o=options, f=frozen: slice_attention(*f, mask, impl="ffa", **o)
        backwards[f"{variant} backward"] = lambda o=out: torch.autograd.grad(o, leaves, dout, retain_graph=True)
    times, _ = time_together(forwards | backwards, seconds=3)
    failed = [f"{call}: {error}" for call, error in times.items() if isinstance(error, str)]
    if failed:
        raise RuntimeError("; ".join(failed))
    share = MARGIN / torch.cuda.get_device_properties(0).multi_processor_count
    limits = {"deterministic forward": 1.0, "deterministic backward": 1.3}
    for variant in ("deterministic", "sm_margin"):
        for which in ("forward", "backward"):
            limit = limits.get(f"{variant} {which}", 1.02 + share)
            ratio = times[f"{variant} {which}"] / times[f"default {which}"]
            yield f"{variant} {which}", name, length, ratio, "x", limit


def host_times() -> Iterator[Row]:
    """A call whose mask is known: small tensors, so that the queue never fills."""
    length, mask = 256, builders.causal(256)
    leaves = tensors(length, (8, 2))
    frozen = [t.detach() for t in leaves]
    ranges, types = torch.tensor([[0, length]], device="cuda"), torch.tensor([1], device="cuda")
    compiled = torch.compile(lambda q, k, v: slice_attention(q, k, v, mask, impl="ffa")[0], backend="aot_eager")
    config = MagiConfig()
    plan = make_plan(mask, config, 1).for_rank(0)
    ways = {
        "": lambda q, k, v: slice_attention(q, k, v, mask, impl="ffa"),
        " with ranges on the GPU": lambda q, k, v: flex_flash_attn_func(q, k, v, ranges, ranges, types),
        " of one rank": lambda q, k, v: distributed_attention(q, k, v, plan, None, config=config),
    }
    outs = {name: way(*leaves)[0] for name, way in ways.items()}
    dout = torch.ones_like(outs[""])
    calls = {
        "host, forward": (lambda: slice_attention(*frozen, mask, impl="ffa"), 30.0),
        "host, forward with ranges on the GPU": (lambda: flex_flash_attn_func(*frozen, ranges, ranges, types), 30.0),
        "host, forward in a compiled function": (lambda: compiled(*frozen), float("nan")),
    }
    for name, way in ways.items():
        calls[f"host, forward{name} recorded for the backward"] = lambda way=way: way(*leaves), 30.0
        backward = partial(torch.autograd.grad, retain_graph=True)
        calls[f"host, backward{name}"] = partial(backward, outs[name], leaves, dout), float("nan")
    for what, (call, limit) in calls.items():
        yield what, "causal", length, host_us(call), "us", limit


def new_mask_time(length: int = 65536, num_slices: int = 1000) -> Row:
    """A call whose mask is new, validated before: what planning adds to the host's time."""
    frozen = [t.detach() for t in tensors(length, (8, 8))]
    times = []
    for i in range(12):
        each = length // num_slices
        lengths = [each + i] + [each] * (num_slices - 2)
        mask = builders.varlen(doc_lengths=[*lengths, length - sum(lengths)], causal=True)
        bands = mask.bands
        torch.cuda.synchronize()
        begin = time.perf_counter()
        slice_attention(*frozen, bands, impl="ffa")
        times.append(time.perf_counter() - begin)
    return "host, forward with a new mask", f"{num_slices} slices", length, statistics.median(times) * 1e3, "ms", 5.0


def memory(length: int) -> Iterator[Row]:
    """Peak in addition to the results, in units of the output's size (bf16)."""
    leaves, mask = tensors(length), builders.causal(length)
    frozen = [t.detach() for t in leaves]
    out, meta = slice_attention(*leaves, mask, impl="ffa")
    unit, dout = out.numel() * out.element_size(), torch.randn_like(out)

    results = unit + meta.lse.numel() * 4
    grads = sum(t.numel() * t.element_size() for t in leaves)
    forward = peak_of(lambda: slice_attention(*frozen, mask, impl="ffa"))[1] - results
    backward = peak_of(lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True))[1] - grads
    yield "memory, forward", "causal", length, forward / unit, "outputs", 0.02
    yield "memory, backward", "causal", length, backward / unit, "outputs", 2.1


def first_use() -> Iterator[Row]:
    """Until the largest kernel is in memory: compiled, and from the cache."""
    kernels = [variant.build_args for variant in hopper_kernels.common_kernels()]
    source, macros = max(reversed(kernels), key=lambda kernel: len(hopper_build.flatten_source(_path(kernel[0]))))
    with tempfile.TemporaryDirectory() as folder:
        for what, limit in (("first use, compiled", 60.0), ("first use, cached", 0.05)):
            hopper_build.flatten_source.cache_clear()
            begin = time.perf_counter()
            hopper_build.build(source, macros, Path(folder))
            yield what, Path(source).stem, 0, time.perf_counter() - begin, "s", limit


FIRST_STEP = """
import time
import torch
from megatron_magi.mask import builders
from megatron_magi.ops.slice_attention import slice_attention

q, k, v = (torch.randn(1024, heads, 128, device="cuda").bfloat16().requires_grad_() for heads in (8, 2, 2))
mask = builders.causal(1024)
torch.cuda.synchronize()
begin = time.perf_counter()
slice_attention(q, k, v, mask, impl="ffa")[0].sum().backward()
torch.cuda.synchronize()
print(time.perf_counter() - begin)
"""


def first_step() -> Iterator[Row]:
    """A forward and a backward, the first of a process: kernels are compiled or found, and loaded."""
    with tempfile.TemporaryDirectory() as folder:
        env = os.environ | {"MAGI_ATTENTION_WORKSPACE_BASE": folder}
        for what, limit in (("first step, compiled", 60.0), ("first step, cached", float("nan"))):
            said = subprocess.run([sys.executable, "-c", FIRST_STEP], env=env, check=True, capture_output=True).stdout
            yield what, "causal", 1024, float(said.split()[-1]), "s", limit


def _path(source: str) -> Path:
    return hopper_build.source_root() / source


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--masks", nargs="+", choices=list(MASKS), default=["full", "causal", "varlen_causal"])
    parser.add_argument("--lengths", nargs="+", type=int, default=[8192, 32768])
    parser.add_argument("--csv", help="where to write the table, with where it comes from in its first lines")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what to measure")
    args = parser.parse_args()
    torch.manual_seed(0)
    rows: list[Row] = []

    def add(found: Iterator[Row]) -> None:
        for row in found:
            rows.append(row)
            quantity, mask, length, value, unit, limit = row
            print(f"{quantity:<42} {mask:>14} {length:>7} {value:>9.3f} {unit:<8} limit {limit:.3f}", flush=True)

    if "first use" in args.parts:
        add(first_use())
        add(first_step())
    if "host" in args.parts:
        add(host_times())
        add(iter([new_mask_time()]))
    if "memory" in args.parts:
        add(memory(max(args.lengths)))
    if "options" in args.parts:
        for length, name in itertools.product(args.lengths, args.masks):
            add(option_ratios(name, length))
    write_csv(args.csv, HEADER, [(*r[:3], round(r[3], 4), r[4], round(r[5], 4)) for r in rows])


if __name__ == "__main__":
    main()
