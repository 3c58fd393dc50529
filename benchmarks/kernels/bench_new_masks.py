"""Time that a new mask in every step adds to the step, if its batch is prepared ahead.

    python -m benchmarks.kernels.bench_new_masks [--impls ffa cudnn ...] [--lengths ...] [--layers N] [--steps N]
        [--rounds N] [--csv FILE]

A step is the forward and backward of attention of some layers, on one GPU. Its batch, of documents, was prepared on
the CPU; it is copied to the GPU while the step before runs, as loops with look-ahead do. Then steps with the same
masks, whose batches are all there before, are measured. Each round has masks of its own, so that no cache of whatever
kind has seen them before; the first, in which kernels are compiled, is dropped. Times are the device's from the end of
one step to that of the last, with what it waits for the host.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence

import numpy as np
import torch

from benchmarks._lib.provenance import write_csv
from megatron_magi.attention import AttnShape, distributed_attention, prepare_batch
from megatron_magi.attention.prepared_batch import PreparedBatch
from megatron_magi.config import AttendConfig, MagiConfig
from megatron_magi.mask import builders
from megatron_magi.plan import make_plan

HEADS, HEADS_KV, DIM = 64, 8, 128
HEADER = ["impl", "length", "round", "known_masks_ms", "new_masks_ms", "added_ms"]


def prepare(length: int, config: MagiConfig, seed: int) -> PreparedBatch:
    """A batch of documents of random lengths."""
    cuts = np.unique(np.random.default_rng(seed).integers(1, length, 12))
    lengths = np.diff(np.concatenate([[0], cuts, [length]]))
    plan = make_plan(builders.varlen(doc_lengths=lengths, causal=True), config, 1)
    shape = AttnShape(HEADS, HEADS_KV, DIM, DIM, torch.bfloat16).kernels_for("cuda", config.attend.impl)
    return prepare_batch({"mask": plan.for_rank(0)}, shape, config)


def run(batches: Sequence[PreparedBatch], config: MagiConfig, layers: int, length: int, is_new: bool) -> float:
    """Milliseconds of a step; batches are copied in the step before where ``is_new``, else before all steps."""
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(heads: int) -> torch.Tensor:
        tensor = torch.randn(length, heads, DIM, generator=generator, device="cuda", dtype=torch.bfloat16)
        return tensor.requires_grad_()

    q, k, v = draw(HEADS), draw(HEADS_KV), draw(HEADS_KV)
    for batch in batches[:1] if is_new else batches:
        batch.to("cuda")
    for _ in range(1 if is_new else 2):  # in the first round calls with masks that are there are made for them
        torch.cuda.synchronize()
        ends = []
        for batch, after in zip(batches, [*batches[1:], None], strict=True):
            plan = batch.plans["mask"]
            out = [distributed_attention(q, k, v, plan, None, config=config)[0] for _ in range(layers)]
            torch.autograd.backward(out, [q.detach()] * layers)
            if is_new and after is not None:
                after.to("cuda", like=batch.plans)
            q.grad = k.grad = v.grad = None
            ends.append(torch.cuda.Event(enable_timing=True))
            ends[-1].record()
    torch.cuda.synchronize()
    warm = len(ends) // 3
    return ends[warm].elapsed_time(ends[-1]) / (len(ends) - 1 - warm)


def measure(impl: str, length: int, layers: int, steps: int, rounds: int) -> list[list]:
    """Rows of the table: of each round, and of the medians of all."""
    config = MagiConfig(attend=AttendConfig(impl=impl))
    found = []
    for index in range(rounds + 1):
        seeds = range(index * steps, (index + 1) * steps)
        new, known = (
            run([prepare(length, config, seed) for seed in seeds], config, layers, length, is_new)
            for is_new in (True, False)  # in this order: masks are new once
        )
        if index:
            found.append((known, new, new - known))
    rows = [[impl, length, i, *(f"{ms:.3f}" for ms in times)] for i, times in enumerate(found)]
    return [*rows, [impl, length, "median", *(f"{statistics.median(ms):.3f}" for ms in zip(*found, strict=True))]]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--impls", nargs="+", default=["ffa", "cudnn"])
    parser.add_argument("--lengths", nargs="+", type=int, default=[8192, 32768])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=45, help="of a round; a third of them are not timed")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--csv", help="also write the rows to this file")
    args = parser.parse_args(argv)
    print(f"{torch.cuda.get_device_name()}, {HEADS}:{HEADS_KV} heads of {DIM}, bf16, {args.layers} layers")
    print(*HEADER, sep=",")
    rows: list[list] = []
    for length in args.lengths:
        for impl in args.impls:
            rows += measure(impl, length, args.layers, args.steps, args.rounds)
            print(",".join(map(str, rows[-1])), flush=True)
            write_csv(args.csv, HEADER, rows)


if __name__ == "__main__":
    main()
