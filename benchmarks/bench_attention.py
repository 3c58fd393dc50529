"""Speed of attention implementations, side by side in one process.

Every figure is TFLOP/s of the mask's area (forward 4 * area * heads * head_dim, backward 2.5 times that) and
its ratio to cuDNN through torch, measured in the same run: to the same mask where cuDNN can do it,
else to its dense rate at the same length.

Usage: python benchmarks/bench_attention.py --masks full causal --lengths 8192 32768 --csv results.csv
"""

from __future__ import annotations

import argparse
import statistics
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


def time_together(calls: dict[str, Callable[[], object]], rounds: int = 9) -> dict[str, float]:
    """Median times in milliseconds, by device events over whole API calls, the L2 cache flushed before each.

    The calls take turns, so that clocks and temperature are the same for all.
    """
    flush = torch.empty(32 << 20, dtype=torch.int32, device="cuda")
    times: dict[str, list[float]] = {name: [] for name in calls}
    for round_ in range(rounds + 2):
        for name, call in calls.items():
            flush.zero_()
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            call()
            end.record()
            torch.cuda.synchronize()
            if round_ >= 2:
                times[name].append(start.elapsed_time(end))
    return {name: statistics.median(t) for name, t in times.items()}


class Problem:
    """Inputs of one mask and length, and the calls to time."""

    def __init__(self, name: str, length: int) -> None:
        self.name, self.length = name, length
        self.mask = MASKS[name](length)
        self.q, self.dout = (torch.randn(length, HEADS_Q, HEAD_DIM, device="cuda").bfloat16() for _ in range(2))
        self.k, self.v = (torch.randn(length, HEADS_KV, HEAD_DIM, device="cuda").bfloat16() for _ in range(2))
        self.flops = 4.0 * self.mask.area * HEADS_Q * HEAD_DIM

    def cudnn(self) -> dict[str, Callable[[], object]]:
        """Calls of torch's cuDNN attention; causal where the mask is, else full."""
        causal = self.name == "causal"
        leaves = [t.transpose(0, 1)[None].detach().requires_grad_() for t in (self.q, self.k, self.v)]
        dout = self.dout.transpose(0, 1)[None]

        def forward():
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                return torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=causal, enable_gqa=True)

        out = forward()

        def forward_only():
            with torch.no_grad():
                forward()

        return {
            "cudnn forward": forward_only,
            "cudnn backward": lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True),
        }

    def ffa(self) -> dict[str, Callable[[], object]]:
        """Calls of the kernels here, allocations included."""
        bands, options = self.mask.bands, make_options(self.q, None, 0.0, False, 0)

        def forward():
            out, lse = torch.empty_like(self.q), self.q.new_empty(self.q.shape[:2], dtype=torch.float32)
            hopper.forward(
                self.q, self.k, self.v, bands, options,
                out=out, lse=lse, accumulate=False, sink_lse=None, return_max_logits=False,
            )  # fmt: skip
            return out, lse

        out, lse = forward()

        def backward():
            delta = hopper.row_delta(self.dout, out)
            grads = tuple(torch.empty_like(t) for t in (self.q, self.k, self.v))
            hopper.backward(
                self.dout, self.q, self.k, self.v, lse, delta, bands, options, grads=grads, accumulate=False
            )

        return {"ffa forward": forward, "ffa backward": backward}


def measure(name: str, length: int) -> list[dict]:
    """One row for each provider: rates, and ratios to cuDNN's in the same turns."""
    problem = Problem(name, length)
    yardstick = problem if name in ("full", "causal") else Problem("full", length)
    times = time_together(problem.ffa() | yardstick.cudnn(), rounds=9 if length <= 8192 else 5)
    rows = []
    for provider, flops in (("cudnn", yardstick.flops), ("ffa", problem.flops)):
        row = {"mask": name, "length": length, "provider": provider}
        for which, factor in (("forward", 1.0), ("backward", 2.5)):
            rate = factor * flops / times[f"{provider} {which}"] / 1e9
            base = factor * yardstick.flops / times[f"cudnn {which}"] / 1e9
            row |= {f"{which}_ms": round(times[f"{provider} {which}"], 4), f"{which}_tflops": round(rate, 1)}
            row[f"{which}_ratio"] = round(rate / base, 3)
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--masks", nargs="+", choices=list(MASKS), default=list(MASKS))
    parser.add_argument("--lengths", nargs="+", type=int, default=[2048, 8192, 16384, 32768])
    parser.add_argument("--csv", help="where to write the table, with where it comes from in its first lines")
    args = parser.parse_args()
    torch.manual_seed(0)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}")
    print(f"{'mask':>14} {'length':>7}  {'forward':>7} {'ratio':>6}  {'backward':>8} {'ratio':>6}")
    rows = []
    for length in args.lengths:
        for name in args.masks:
            rows += measure(name, length)
            r = rows[-1]
            print(
                f"{name:>14} {length:>7}  {r['forward_tflops']:>7.0f} {r['forward_ratio']:>6.2f}  "
                f"{r['backward_tflops']:>8.0f} {r['backward_ratio']:>6.2f}",
                flush=True,
            )
    if args.csv:
        write_csv(args.csv, list(rows[0]), [list(row.values()) for row in rows])


if __name__ == "__main__":
    main()
