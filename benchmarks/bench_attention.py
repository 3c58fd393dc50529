"""Speed of attention implementations, side by side in one process.

Every figure is TFLOP/s of the mask's area (forward 4 * area * heads * head_dim, backward 2.5 times that) and
its ratio to cuDNN through torch, measured in the same run: to the same mask where cuDNN can do it,
else to its dense rate at the same length.

Usage: python benchmarks/bench_attention.py --masks full causal --lengths 8192 32768 --csv results.csv
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable

import numpy as np
import torch
from provenance import write_csv
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron_magi.mask import builders
from megatron_magi.mask.slices import AttnMask
from megatron_magi.ops.impl import hopper
from megatron_magi.ops.options import make_options

HEADS_Q, HEADS_KV, HEAD_DIM = 64, 8, 128


def log_uniform_lengths(total: int, low: int, high: int, seed: int = 0) -> list[int]:
    """Document lengths that add up to ``total``, log-uniform in [low, high]."""
    rng, lengths = np.random.default_rng(seed), []
    while sum(lengths) < total:
        lengths.append(int(np.exp(rng.uniform(np.log(low), np.log(high)))))
    lengths[-1] -= sum(lengths) - total
    return [n for n in lengths if n]


def documents(n: int) -> list[int]:
    return log_uniform_lengths(n, max(1, n // 64), n // 4)


def short_documents(n: int) -> list[int]:
    return log_uniform_lengths(n, 64, 640)


MASKS: dict[str, Callable[[int], AttnMask]] = {
    "full": builders.full,
    "causal": builders.causal,
    "varlen_full": lambda n: builders.varlen(doc_lengths=documents(n), causal=False),
    "varlen_causal": lambda n: builders.varlen(doc_lengths=documents(n), causal=True),
    "window": lambda n: builders.sliding_window(n, 1023, 0),
    "block_causal": lambda n: builders.block_causal(block_size=1024, doc_lengths=documents(n)),
    "short_causal": lambda n: builders.varlen(doc_lengths=short_documents(n), causal=True),
    "short_full": lambda n: builders.varlen(doc_lengths=short_documents(n), causal=False),
    "many_ranges": lambda n: builders.varlen(doc_lengths=[n // 1000] * 999 + [n - 999 * (n // 1000)], causal=True),
}


def time_ms(call: Callable[[], object], min_ms: float = 60.0) -> float:
    """Median time of a call by device events, the L2 cache flushed before each."""
    flush = torch.empty(32 << 20, dtype=torch.int32, device="cuda")
    call()
    torch.cuda.synchronize()
    times: list[float] = []
    while len(times) < 5 or (sum(times) < min_ms and len(times) < 30):
        flush.zero_()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


class Problem:
    """Inputs of one mask and length, and the calls to time."""

    def __init__(self, name: str, length: int) -> None:
        self.name, self.length = name, length
        self.mask = MASKS[name](length)
        make = lambda heads: torch.randn(length, heads, HEAD_DIM, device="cuda").to(torch.bfloat16)  # noqa: E731
        self.q, self.k, self.v, self.dout = make(HEADS_Q), make(HEADS_KV), make(HEADS_KV), make(HEADS_Q)
        self.flops = 4.0 * self.mask.area * HEADS_Q * HEAD_DIM

    def cudnn(self) -> dict[str, float]:
        """TFLOP/s of torch's cuDNN attention; full and causal only."""
        q, k, v, dout = (t.transpose(0, 1)[None].detach() for t in (self.q, self.k, self.v, self.dout))
        causal = self.name == "causal"
        leaves = [t.requires_grad_() for t in (q, k, v)]
        call = torch.nn.functional.scaled_dot_product_attention
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            with torch.no_grad():
                forward = time_ms(lambda: call(q, k, v, is_causal=causal, enable_gqa=True))
            out = call(*leaves, is_causal=causal, enable_gqa=True)
            backward = time_ms(lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True))
        return {"forward": self.flops / forward / 1e9, "backward": 2.5 * self.flops / backward / 1e9}

    def ffa(self, backward: bool) -> dict[str, float]:
        bands = self.mask.bands
        options = make_options(self.q, None, 0.0, False, 0)

        def forward():
            out, lse = torch.empty_like(self.q), self.q.new_empty(self.q.shape[:2], dtype=torch.float32)
            hopper.forward(
                self.q, self.k, self.v, bands, options,
                out=out, lse=lse, accumulate=False, sink_lse=None, return_max_logits=False,
            )  # fmt: skip
            return out, lse

        rates = {"forward": self.flops / time_ms(forward) / 1e9}
        if backward:
            out, lse = forward()

            def run():
                delta = hopper.row_delta(self.dout, out)
                grads = tuple(torch.empty_like(t) for t in (self.q, self.k, self.v))
                hopper.backward(
                    self.dout, self.q, self.k, self.v, lse, delta, bands, options, grads=grads, accumulate=False
                )
                return grads

            rates["backward"] = 2.5 * self.flops / time_ms(run) / 1e9
        return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--masks", nargs="+", default=list(MASKS))
    parser.add_argument("--lengths", nargs="+", type=int, default=[2048, 8192, 16384, 32768])
    parser.add_argument("--forward-only", action="store_true")
    parser.add_argument("--csv")
    args = parser.parse_args()
    torch.manual_seed(0)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}")
    rows, dense = [], {}
    for length in args.lengths:
        for name in ["full"] + [m for m in args.masks if m != "full"]:
            problem = Problem(name, length)
            yardstick = dense.get(length)
            if name in ("full", "causal"):
                yardstick = problem.cudnn()
                rows.append([name, length, "cudnn", *rate_columns(yardstick, yardstick)])
                if name == "full":
                    dense[length] = yardstick
            if name in args.masks:
                rates = problem.ffa(not args.forward_only)
                rows.append([name, length, "ffa", *rate_columns(rates, yardstick)])
                print(" ".join(f"{x:>14}" for x in rows[-1]), flush=True)
    if args.csv:
        write_csv(args.csv, ["mask", "length", "provider", "forward", "ratio", "backward", "ratio"], rows)


def rate_columns(rates: dict[str, float], yardstick: dict[str, float]) -> list[str]:
    out = []
    for which in ("forward", "backward"):
        out += [f"{rates[which]:.0f}", f"{rates[which] / yardstick[which]:.3f}"] if which in rates else ["-", "-"]
    return out


if __name__ == "__main__":
    sys.exit(main())
