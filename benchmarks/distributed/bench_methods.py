"""Distributed attention on the GPUs of one machine, against other ways of context parallelism over the same kernels.

    python -m benchmarks.distributed.bench_methods [--csv FILE] [--chart FILE] [--traces FOLDER] [--max-seconds S]
        [--tokens N ...] [--masks NAME ...] [--ways NAME ...] [--ranks N]
    torchrun --nproc-per-node N -m benchmarks.distributed.bench_methods ...
    python -m benchmarks.distributed.bench_methods --plot FILE [FILE ...] [--csv FILE] [--chart FILE]    (needs no GPU)

Ways: ``magi``, the default; ``magi_stages`` and ``magi_one_launch``, the default stage by stage and in one launch;
``magi_zigzag`` and ``magi_zigzag_stages``, with Megatron's dispatch, ``magi_contiguous``, with one piece a rank, unless
that is the default's; ``magi_zigzag_travel`` and ``magi_contiguous_travel``, these with queries that travel, where the
planner lets any; ``magi_zigzag_groups`` and ``magi_contiguous_groups``, these by eight groups of heads, if named;
``two_levels`` and ``two_levels_native``, half of the ranks taken for a node, inside which rows travel through NCCL or
`native`; ``alone``, the attention of ``magi`` over keys that are all there, in one launch; the baselines of
`baselines`, those of FlexAttention and of Transformer Engine only by name. All take turns in one run, in another order
each round. A time is that
of the slowest rank, median over the rounds, of a pass of a whole call with the host ahead, from where the devices have
met; rates are of visible pairs for each GPU. ``hidden``: share of the time of communication kernels, which includes
their waiting for other ranks, in which others run at that time, of a forward and a backward under the profiler, over
all ranks. When ``--max-seconds`` are over what is there is written. ``--plot`` puts files together, of a row that is in
several the last. Figures that MagiAttention has published of its own are shown too, and named so.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from benchmarks._lib.baselines import BASELINES, Cluster, Unsupported
from benchmarks._lib.baselines.alone import Alone
from benchmarks._lib.baselines.base import num_tokens
from benchmarks._lib.batches import DISTRIBUTED, ONE_LAUNCH
from benchmarks._lib.cases import Case
from benchmarks._lib.charts.distributed import draw, read_rows, write_rows
from benchmarks._lib.dispatches import contiguous, zigzag
from benchmarks._lib.provenance import print_row, write_csv
from benchmarks._lib.trace import hidden_share
from megatron_magi.attention import distributed_attention
from megatron_magi.config import AttendConfig, CommConfig, CommImpl, CostModel, MagiConfig, OverlapConfig
from megatron_magi.plan import Dispatch, Plan, RankPlan, make_plan
from megatron_magi.plan.plan import hosts_of_groups
from megatron_magi.testing.spawn import run_ranks

HEADS_Q, HEADS_KV, HEAD_DIM = 64, 8, 128
HEADER = ["mask", "tokens_a_gpu", "ranks", "way", "forward_ms", "forward_tflops_a_gpu", "backward_ms",
          "backward_tflops_a_gpu", "comm_ms", "hidden", "note"]  # fmt: skip
TRAVEL = ("magi_zigzag_travel", "magi_contiguous_travel")
BY_GROUPS = ("magi_zigzag_groups", "magi_contiguous_groups")
BY_NAME = ("torch_flex", "torch_flex_head_tail", "torch_flex_blocks", "te_p2p", "te_all_gather")
"""Baselines measured only where they are asked for: those of FlexAttention, and those that need another package."""
WAYS = ("magi", "magi_zigzag", "magi_contiguous", *TRAVEL, *(name for name in BASELINES if name not in BY_NAME))
TWO_LEVELS: dict[str, CommImpl] = {"two_levels": "auto", "two_levels_native": "native"}
ALL_WAYS = (*WAYS, *BY_GROUPS, *BY_NAME, *ONE_LAUNCH, *TWO_LEVELS, "alone")
PUBLISHED = {"full": (665, 535), "causal": (644, 529), "documents_full": (535, 447), "documents_causal": (459, 360)}
"""TFLOP/s a GPU, forward and backward, that MagiAttention has published: its native kernels on 8 H100s, 8k tokens a
GPU, 64:8 heads of 128; the documents are those of its own benchmark."""
_AHEAD_MS = 3.0


DEFAULT_MASKS = tuple(DISTRIBUTED)[:7]


class Way(NamedTuple):
    """A way, ready for one mask on one rank: its tokens, attention of them, and keys where they are not its tokens.

    Attributes:
        note: next to its times.
    """

    num_rows: int
    attend: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    num_keys: int | None = None
    note: str = ""


def make_way(name: str, case: Case, cluster: Cluster, impl: str) -> Way:
    """A way by its name.

    Raises:
        Unsupported: it cannot do the mask, or not on so many ranks, or is the default by another name.
    """
    if name in BASELINES:
        ready = BASELINES[name](case, cluster, HEADS_KV, impl)
        return Way(num_tokens(ready.runs), ready.attend, note=ready.note)
    overlap = OverlapConfig(cost=CostModel(num_heads_q=HEADS_Q, num_heads_kv=HEADS_KV, head_dim=HEAD_DIM))
    if name in ONE_LAUNCH:
        overlap = replace(overlap, one_launch=ONE_LAUNCH[name])
    config, per_node = MagiConfig(overlap=overlap, attend=AttendConfig(impl=impl)), cluster.num_ranks // 2
    if name in TWO_LEVELS:
        if per_node < 2 or cluster.num_ranks % 2:
            raise Unsupported(f"{cluster.num_ranks} ranks are not two nodes of several")
        config = replace(config, comm=CommConfig(impl=TWO_LEVELS[name], ranks_per_node=per_node))
    given = zigzag if "zigzag" in name else contiguous if "contiguous" in name else None
    dispatch = None if given is None else given(case.length, cluster.num_ranks)
    if dispatch is not None and _ranges(make_plan(case.mask, config, cluster.num_ranks).dispatch) == _ranges(dispatch):
        raise Unsupported("the default dispatches likewise")
    all_ranks = _plan_of(name, case, config, dispatch, cluster.num_ranks)
    stats = all_ranks.stats()
    plan = all_ranks.for_rank(cluster.rank)
    if name == "alone":
        alone = Alone(plan, impl)
        return Way(plan.num_rows, alone.attend, alone.num_keys)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return distributed_attention(q, k, v, plan, dist.group.WORLD, config=config)[0]

    note = ""
    if any(stats.guest_rows):
        share = sum(stats.guest_rows) / case.length
        note = f"{share:.1%} of the queries travel, the largest area is {stats.balance:.2f} of the mean"
    if per_node > 1:
        rows = sum(rows_that_cross(all_ranks.for_rank(r), r, per_node) for r in range(cluster.num_ranks))
        num_bytes = rows * 2 * HEADS_KV * HEAD_DIM * 2 / cluster.num_ranks
        note = f"{num_bytes / 1e6:.1f} MB of keys and values a rank cross between two nodes"
    return Way(plan.num_rows // stats.head_groups, attend, note=note)


def _plan_of(name: str, case: Case, config: MagiConfig, dispatch: Dispatch | None, num_ranks: int) -> Plan:
    """The plan of a way of ours.

    Raises:
        Unsupported: its queries stay at home.
    """
    if name in BY_GROUPS:
        assert dispatch is not None
        hosts = hosts_of_groups(case.mask, dispatch, config, HEADS_KV)[1]
        if hosts is None:
            raise Unsupported("no query travels")
        return make_plan(case.mask, config, num_ranks, dispatch, hosts, HEADS_KV)
    plan = make_plan(case.mask, config, num_ranks, dispatch, "auto" if name in TRAVEL else "home")
    if name in TRAVEL and not any(plan.stats().guest_rows):
        raise Unsupported("no query travels")
    return plan


def rows_that_cross(plan: RankPlan, rank: int, per_node: int) -> int:
    """Rows that a rank sends to ranks of other nodes, if ``per_node`` neighbours are one."""
    splits = np.array([t.send_splits for t in plan.transfers if t.levels is None]).reshape(-1, plan.cp_size).sum(axis=0)
    far = np.arange(plan.cp_size) // per_node != rank // per_node
    return int(splits[far].sum()) + sum(t.levels.far.num_send for t in plan.transfers if t.levels is not None)


def _ranges(dispatch: Dispatch) -> list[list]:
    """Tokens of each rank, in ranges."""
    return [ranges.tolist() for ranges in dispatch.ranges]


class Turns:
    """The passes of one way over random tensors, and their times."""

    def __init__(self, way: Way, device: torch.device) -> None:
        generator = torch.Generator(device).manual_seed(dist.get_rank())
        q, kv = (way.num_rows, HEADS_Q, HEAD_DIM), (way.num_keys or way.num_rows, HEADS_KV, HEAD_DIM)
        *self._leaves, self._dout = (
            torch.randn(shape, device=device, dtype=torch.bfloat16, generator=generator).requires_grad_(i < 3)
            for i, shape in enumerate((q, kv, kv, q))
        )
        self._attend, self.times, self.note = way.attend, [], way.note

    def passes(self) -> None:
        """A forward and a backward."""
        torch.autograd.grad(self._attend(*self._leaves), self._leaves, self._dout)

    def take(self) -> tuple[float, float]:
        """Milliseconds of a forward and of a backward, on the slowest rank; noted too."""
        out = None

        def forward() -> None:
            nonlocal out
            out = self._attend(*self._leaves)

        device = self._dout.device
        times = [
            _time_ms(forward, device),
            _time_ms(lambda: torch.autograd.grad(out, self._leaves, self._dout), device),
        ]
        slowest = torch.tensor(times, device=device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        self.times.append(tuple(slowest.tolist()))
        return self.times[-1]


def _time_ms(run: Callable[[], object], device: torch.device) -> float:
    """Of this rank, from where the devices have met to where this one is done; the host queues the work before.

    Else a rank that begins sooner waits for the others within its time: some 10 us, by which hosts are apart.
    """
    if device.type == "cpu":
        dist.barrier()
        begin = time.perf_counter()
        run()
        return 1e3 * (time.perf_counter() - begin)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda._sleep(int(_AHEAD_MS * 2e6))
    dist.all_reduce(torch.zeros(1, device=device))
    start.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)


def measure(
    case: Case,
    cluster: Cluster,
    device: torch.device,
    ways: Iterable[str],
    impl: str = "auto",
    seconds: float = 0.0,
    traces: Path | None = None,
    profiled: Iterable[str] = ALL_WAYS,
    most_rounds: int = 9,
) -> list[list]:
    """Rows of the table for one mask, equal on all ranks; timed for about so many seconds.

    Args:
        profiled: ways that are run under the profiler too.
        most_rounds: of short ones.
    """
    ready, notes = {}, {}
    for name in ways:
        try:
            ready[name] = Turns(make_way(name, case, cluster, impl), device)
            ready[name].take()  # compiles kernels, makes communicators
            ready[name].times.clear()
        except Unsupported as reason:
            notes[name] = str(reason)
    once = sum(map(sum, (turns.take() for turns in ready.values())))
    shuffled = random.Random(0)
    for _ in range(int(np.clip(1e3 * seconds / once, 1, most_rounds)) - 1):
        for name in shuffled.sample(list(ready), len(ready)):
            ready[name].take()
    head, flops = [case.name, case.length // cluster.num_ranks, cluster.num_ranks], 4.0 * case.mask.area
    flops *= HEADS_Q * HEAD_DIM / cluster.num_ranks
    rows = []
    for name in ways:
        if name in notes:
            rows.append([*head, name, *[""] * 6, notes[name]])
            continue
        forward, backward = (statistics.median(times) for times in zip(*ready[name].times, strict=True))
        rows.append([
            *head, name, f"{forward:.3f}", f"{flops / forward / 1e9:.0f}", f"{backward:.3f}",
            f"{2.5 * flops / backward / 1e9:.0f}", "", "", ready[name].note,
        ])  # fmt: skip
        if name in profiled:
            trace = traces and traces / f"{case.name}_{head[1]}_{name}_{cluster.rank}.json"
            comm = torch.tensor(hidden_share(ready[name].passes, trace), device=device)
            dist.all_reduce(comm)
            comm_ms, hidden_ms = (comm / cluster.num_ranks).tolist()
            rows[-1][-3:-1] = f"{comm_ms:.3f}", f"{hidden_ms / comm_ms:.3f}" if comm_ms else ""
    return rows


def measure_all(rank: int, num_ranks: int, options: argparse.Namespace) -> None:
    """Measures until the time is over; rank 0 prints and writes."""
    begin, cluster, rows = time.monotonic(), Cluster(), []
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    for tokens in options.tokens:
        for name in options.masks:
            spent = torch.tensor([time.monotonic() - begin], device=device)
            dist.all_reduce(spent, op=dist.ReduceOp.MAX)
            if float(spent) > options.max_seconds:
                continue
            case = DISTRIBUTED[name](tokens * num_ranks)
            rows += measure(
                case, cluster, device, options.ways, options.impl, options.seconds, options.traces, options.profiled,
                options.rounds,
            )  # fmt: skip
            if device.type == "cuda":
                torch.cuda.empty_cache()
            if rank == 0:
                for row in rows[-len(options.ways) :]:
                    print_row(HEADER, row)
                write_csv(options.csv, HEADER, rows)


def main() -> None:
    """Measures on the GPUs of the machine, or draws."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", help="also write the rows to this file, after each mask")
    parser.add_argument("--chart", help="draw the rates to this PNG")
    parser.add_argument("--plot", nargs="+", help="put these results together; measure nothing")
    parser.add_argument("--traces", type=Path, help="folder for traces that chrome://tracing and Perfetto show")
    parser.add_argument("--max-seconds", type=float, default=600.0, help="start no other mask after so long")
    parser.add_argument("--seconds", type=float, default=1.5, help="to time one mask, about")
    parser.add_argument("--rounds", type=int, default=9, help="of a mask at most")
    parser.add_argument("--tokens", type=int, nargs="*", default=[8192, 32768, 65536], help="tokens a GPU")
    parser.add_argument("--masks", nargs="*", default=list(DEFAULT_MASKS), choices=DISTRIBUTED)
    parser.add_argument("--ways", nargs="*", default=list(WAYS), choices=ALL_WAYS)
    parser.add_argument("--profiled", nargs="*", default=list(ALL_WAYS), choices=ALL_WAYS, help="of these ways")
    parser.add_argument("--ranks", type=int, default=0, help="GPUs; all of the machine when not given")
    parser.add_argument("--impl", default="auto", help="implementation of slice_attention")
    options = parser.parse_args()
    if not options.plot:
        num_ranks, backend = options.ranks or torch.cuda.device_count(), "nccl" if torch.cuda.is_available() else "gloo"
        if "LOCAL_RANK" in os.environ:  # torchrun's
            num_ranks = int(os.environ["WORLD_SIZE"])
            if backend == "nccl":
                torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
            dist.init_process_group(backend)
        if options.traces:
            options.traces.mkdir(parents=True, exist_ok=True)
        run_ranks(measure_all, num_ranks, options, timeout_s=options.max_seconds + 300, backend=backend)
        if dist.is_initialized():
            dist.destroy_process_group()
            if os.environ["RANK"] != "0":
                return
        for name, rates in PUBLISHED.items():
            print(f"published by MagiAttention, 8 H100, 8k tokens a GPU: {name} {rates[0]} / {rates[1]} TFLOP/s a GPU")
    if options.plot or (options.chart and options.csv):
        notes, rows = read_rows(options.plot or [options.csv])
        if options.plot and options.csv:
            write_rows(options.csv, notes, rows)
        if options.chart:
            source = ", ".join(notes.get(name, "") for name in ("device", "commit", "date"))
            draw(options.chart, source, rows, {(8, 8192): PUBLISHED})


if __name__ == "__main__":
    main()
