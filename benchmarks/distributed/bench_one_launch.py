"""Distributed attention in one launch over all stages, and stage by stage: time, launches, host time.

    python -m benchmarks.distributed.bench_one_launch [--csv FILE] [--cases NAME:TOKENS ...] [--ways NAME ...]
        [--traces FOLDER]

For each mask, on the GPUs of one machine through native collectives: microseconds a call of the slowest rank, for calls
that follow each other without a pause; of attention alone, over the same keys in one place (`alone`); what a call takes
on top; the time that the host needs to issue a call; and kernels and copies on the GPU, counted by a profiler.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

from benchmarks._lib.batches import make_mask
from benchmarks._lib.provenance import print_row, table_parser, write_csv
from megatron_magi.attention import distributed, distributed_attention
from megatron_magi.attention.fused_comm import joined_bands
from megatron_magi.backends.registry import backend_that
from megatron_magi.backends.tiles.tiles import GAP
from megatron_magi.config import CommConfig, CostModel, MagiConfig, OverlapConfig
from megatron_magi.ops.slice_attention import slice_attention
from megatron_magi.plan import RankPlan, make_plan
from megatron_magi.testing.spawn import run_ranks

HEADS_Q, HEADS_KV, HEAD_DIM = 32, 8, 128
HEADER = ["mask", "tokens_a_gpu", "ranks", "degree", "fetched_mb", "way", "pass", "us", "alone_us", "beside_us",
          "host_us", "launches"]  # fmt: skip
CASES = ["64:8192", "64:32768", "short:8192", "short:32768", "causal:8192", "causal:32768", "window:8192",
         "window:32768"]  # fmt: skip
WAYS = ("stages", "one launch")
BLOCK_US, BLOCKS = 30_000, 5


def time_us(run: Callable[[], object]) -> float:
    """Of a call among calls that follow each other: the median of blocks of them, each that of the slowest rank."""
    times, repeats = [], 2
    for _ in range(BLOCKS + 1):
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(repeats):
            run()
        end.record()
        torch.cuda.synchronize()
        slowest = torch.tensor([1e3 * start.elapsed_time(end) / repeats], device="cuda")
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        times.append(float(slowest))
        repeats = max(2, min(50, int(BLOCK_US / times[-1])))
    return sorted(times[1:])[BLOCKS // 2]


def host_us(run: Callable[[], object]) -> float:
    """Time to issue a call, the median; no kernel is waited for."""
    times = []
    for _ in range(20):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return 1e6 * sorted(times)[10]


def count_launches(run: Callable[[], object], trace: Path | None) -> int:
    """Kernels, copies and fills on the GPU of one call."""
    run()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    if trace is not None:
        profile.export_chrome_trace(str(trace))
    return sum(e.device_type == torch.autograd.DeviceType.CUDA for e in profile.events())


def alone(rank_plan: RankPlan, tensors: list[torch.Tensor]) -> list[float]:
    """Microseconds of a forward and of a backward pass over all keys of this rank in one place, in one launch each."""
    q, k, v, dout = tensors
    more = GAP + sum(t.num_recv for t in rank_plan.transfers)
    # Not zeros: a GPU that multiplies them needs less power, and is faster.
    k, v = (torch.cat([t.detach(), t.new_empty(more, *t.shape[1:]).normal_()]).requires_grad_() for t in (k, v))
    bands = joined_bands(rank_plan, backend_that("programs", "ffa").programs)
    forward = time_us(lambda: slice_attention(q, k, v, bands, impl="ffa"))
    out = slice_attention(q, k, v, bands, impl="ffa")[0]
    return [forward, time_us(lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True))]


def measure(rank: int, num_ranks: int, name: str, tokens: int, ways: list[str], traces: str | None) -> list[list]:
    """Rows of the table for one mask, equal on all ranks."""
    cost = CostModel(num_heads_q=HEADS_Q, num_heads_kv=HEADS_KV, head_dim=HEAD_DIM)
    config = MagiConfig(overlap=OverlapConfig(cost=cost, one_launch=True), comm=CommConfig(impl="native"))
    plan = make_plan(make_mask(name, tokens * num_ranks, num_ranks), config, num_ranks)
    generator = torch.Generator("cuda").manual_seed(rank)
    shapes = [(plan.for_rank(rank).num_rows, heads, HEAD_DIM) for heads in (HEADS_Q, HEADS_KV, HEADS_KV, HEADS_Q)]
    tensors = [
        torch.randn(s, device="cuda", dtype=torch.bfloat16, generator=generator).requires_grad_(i < 3)
        for i, s in enumerate(shapes)
    ]
    q, k, v, dout = tensors
    fetched = max(plan.stats().received_rows) * 4 * HEADS_KV * HEAD_DIM / 1e6
    alone_us = alone(plan.for_rank(rank), tensors)
    rows = []
    for way in ways:
        rank_plan = make_plan(plan.mask, config, num_ranks, plan.dispatch).for_rank(rank)
        staged = mock.patch.object(distributed, "pays", return_value=False)
        if way == "stages":
            staged.start()

        def forward(rank_plan: RankPlan = rank_plan) -> torch.Tensor:
            return distributed_attention(q, k, v, rank_plan, dist.group.WORLD, config=config)[0]

        out = forward()

        def backward(out: torch.Tensor = out) -> None:
            torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)

        for i, (which, run) in enumerate((("forward", forward), ("backward", backward))):
            us, host = time_us(run), host_us(run)
            trace = Path(traces) / f"{name}_{tokens}_{way}_{which}_{rank}.json" if traces else None
            launches = count_launches(run, trace)
            rows.append([
                name, tokens, num_ranks, plan.degree, f"{fetched:.1f}", way, which, f"{us:.0f}", f"{alone_us[i]:.0f}",
                f"{us - alone_us[i]:.0f}", f"{host:.0f}", launches,
            ])  # fmt: skip
        mock.patch.stopall()
    return rows


def measure_all(
    rank: int, num_ranks: int, cases: list[str], ways: list[str], traces: str | None, csv: str | None
) -> None:
    """All rows; rank 0 prints and writes them as they come."""
    torch.cuda.set_device(rank)
    rows = []
    for case in cases:
        name, tokens = case.split(":")
        new = measure(rank, num_ranks, name, int(tokens), ways, traces)
        rows += new
        if rank == 0:
            for row in new:
                print_row(HEADER, row)
            if csv:
                write_csv(csv, HEADER, rows)


def main() -> None:
    """Measures on all GPUs of the machine."""
    parser = table_parser(__doc__)
    parser.add_argument("--cases", nargs="+", default=CASES, help="kinds of masks and tokens a GPU")
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--traces", help="folder for a trace of one call of each row and rank")
    options = parser.parse_args()
    num_ranks = torch.cuda.device_count()
    run_ranks(
        measure_all,
        num_ranks,
        options.cases,
        options.ways,
        options.traces,
        options.csv,
        timeout_s=300.0,
        backend="nccl",
    )


if __name__ == "__main__":
    main()
