"""Distributed attention on the GPUs of one machine: what overlap hides, and what balance gains.

    python benchmarks/bench_distributed.py [--csv FILE] [--tokens N] [--impl IMPL]

For each mask and each way to spread its tokens: time of a forward and of a backward pass (the
slowest rank, median), the same with the communication not overlapped, the communication alone,
and the rate over all ranks. `zigzag` is the dispatch of Megatron and TransformerEngine, run
through the same kernels and collectives, so the difference is what dispatch is worth.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist
from bench_dispatch import Case, zigzag
from provenance import write_csv

from megatron_magi.attention import distributed_attention
from megatron_magi.attention.runtime import plan_casts
from megatron_magi.comm.group_collective import group_cast
from megatron_magi.config import AttendConfig, CostModel, MagiConfig, OverlapConfig
from megatron_magi.mask import AttnMask
from megatron_magi.mask.builders import causal
from megatron_magi.plan import Plan, make_plan
from megatron_magi.testing.spawn import run_ranks

HEADS_Q, HEADS_KV, HEAD_DIM = 64, 8, 128
HEADER = ["mask", "tokens", "ranks", "dispatch", "degree", "balance", "max_fetch", "forward_ms", "forward_serial_ms",
          "fetch_ms", "forward_tflops", "backward_ms", "backward_serial_ms", "backward_tflops"]  # fmt: skip
REPEATS = 10


def plans(mask: AttnMask, num_ranks: int, config: MagiConfig) -> dict[str, Plan]:
    """The plans that are compared, by the name of their dispatch."""
    fixed = zigzag(mask.total_seqlen_q, num_ranks)

    def named(algorithm: str) -> MagiConfig:
        return dataclasses.replace(config, dispatch=dataclasses.replace(config.dispatch, algorithm=algorithm))

    return {
        "zigzag": make_plan(mask, config, num_ranks, fixed),
        **{name: make_plan(mask, named(name), num_ranks) for name in ("min_heap", "affinity", "auto")},
    }


def median_ms(run: Callable[[], object]) -> float:
    """Median time of the slowest rank; ranks start together."""
    times = []
    for i in range(REPEATS + 2):
        torch.cuda.synchronize()
        dist.barrier()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        slowest = torch.tensor([start.elapsed_time(end)], device="cuda")
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        if i >= 2:
            times.append(float(slowest))
    return float(np.median(times))


def measure(rank: int, num_ranks: int, name: str, mask: AttnMask, config: MagiConfig) -> list[list]:
    """Rows of the table for one mask, equal on all ranks."""
    rows = []
    serial = dataclasses.replace(config, overlap=dataclasses.replace(config.overlap, degree=0))
    serial_plans = plans(mask, num_ranks, serial)
    for dispatch, plan in plans(mask, num_ranks, config).items():
        generator = torch.Generator("cuda").manual_seed(rank)
        n = plan.dispatch.shard_lengths[rank]
        shapes = [(n, HEADS_Q, HEAD_DIM), (n, HEADS_KV, HEAD_DIM), (n, HEADS_KV, HEAD_DIM), (n, HEADS_Q, HEAD_DIM)]
        q, k, v, dout = (
            torch.randn(s, device="cuda", dtype=torch.bfloat16, generator=generator).requires_grad_(i < 3)
            for i, s in enumerate(shapes)
        )
        forward, backward = [], []
        for p, c in ((plan, config), (serial_plans[dispatch], serial)):
            rank_plan = p.for_rank(rank)

            def run(rank_plan=rank_plan, c=c, q=q, k=k, v=v) -> torch.Tensor:
                return distributed_attention(q, k, v, rank_plan, dist.group.WORLD, config=c)[0]

            forward.append(median_ms(run))
            out = run()

            def run_backward(out=out, dout=dout, q=q, k=k, v=v) -> None:
                torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)

            backward.append(median_ms(run_backward))
        casts = plan_casts(plan.for_rank(rank), q.device)

        def fetch(casts=casts, k=k, v=v) -> None:
            for cast in casts:
                group_cast([k, v], cast, dist.group.WORLD).wait()

        stats = plan.stats()
        flops = 4.0 * mask.area * HEADS_Q * HEAD_DIM
        rows.append([
            name, mask.total_seqlen_q, num_ranks, dispatch, stats.degree, f"{stats.balance:.3f}",
            f"{max(stats.received_rows) / mask.total_seqlen_q:.3f}", f"{forward[0]:.2f}", f"{forward[1]:.2f}",
            f"{median_ms(fetch):.2f}", f"{flops / forward[0] / 1e9:.0f}", f"{backward[0]:.2f}", f"{backward[1]:.2f}",
            f"{2.5 * flops / backward[0] / 1e9:.0f}",
        ])  # fmt: skip
    return rows


def measure_all(rank: int, num_ranks: int, masks: dict[str, AttnMask], impl: str) -> list[list]:
    """All rows."""
    cost = CostModel(num_heads_q=HEADS_Q, num_heads_kv=HEADS_KV, head_dim=HEAD_DIM)
    config = MagiConfig(overlap=OverlapConfig(cost=cost), attend=AttendConfig(impl=impl))
    rows = []
    for name, mask in masks.items():
        rows += measure(rank, num_ranks, name, mask, config)
        if rank == 0:
            for row in rows[-4:]:
                print("  ".join(f"{h}={c}" for h, c in zip(HEADER, row, strict=True)), flush=True)
    return rows


def main() -> None:
    """Measures on all GPUs of the machine."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", help="also write the rows to this file")
    parser.add_argument("--tokens", type=int, default=16384, help="tokens a rank")
    parser.add_argument("--impl", default="auto", help="implementation of slice_attention")
    options = parser.parse_args()
    num_ranks = torch.cuda.device_count()
    total = options.tokens * num_ranks
    masks = {
        "causal": causal(total),
        "documents_8": Case(total, 8, num_ranks).mask(0),
        "documents_64": Case(total, 64, num_ranks).mask(0),
    }
    rows = run_ranks(measure_all, num_ranks, masks, options.impl, timeout_s=300.0, backend="nccl")[0]
    if options.csv:
        write_csv(options.csv, HEADER, rows)


if __name__ == "__main__":
    main()
