"""group_cast and group_reduce on the GPUs of one machine: rows of keys and values that every rank needs of every other.

    python -m benchmarks.collectives.bench_group_collective [--csv FILE] [--sizes BYTES ...] [--ranks-per-node N ...]
    python -m benchmarks.collectives.bench_group_collective --csv FILE --chart FILE    (draws; needs no GPU)

Ways: ``native`` and ``all_to_all`` of `megatron_magi.comm.group_collective`, with all that they do; ``native_beside``
with tensors that are kept, as attention calls it, on the few SMs that it takes while other work runs; and NCCL's
``nccl_all_to_all`` and ``nccl_all_gather`` on bytes that lie packed already, and where a reduction is meant without it.
Bytes are those that a rank receives of the others, or gets back. Times are of the slowest rank: on the device, the host
being ahead (median of some, each the mean of a few calls), and of a call that the host waits for. With N neighbours
taken for a node the same exchange in two levels is measured too, when the group of the other ways is gone and has left
its SMs, as ``two_levels_N``, and as ``two_levels_native_N`` with `native` inside nodes; ``far_bytes`` are those that a
rank sends to other nodes of the first N, checked to be those of each row once to each node. On one machine these go
over the same links as the others.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from benchmarks._lib.charts.collectives import draw
from benchmarks._lib.level_args import level_args
from benchmarks._lib.provenance import print_row, table_parser, write_csv
from benchmarks._lib.results import read_results
from megatron_magi.comm.group_collective import GroupCastArgs, group_cast, group_reduce
from megatron_magi.comm.groups import all_gather_single
from megatron_magi.comm.peer_tables import PeerRows
from megatron_magi.plan.partition import Ranges, Runs
from megatron_magi.testing.spawn import run_ranks

HEADS_KV, HEAD_DIM = 8, 128
ROW_BYTES = 2 * HEADS_KV * HEAD_DIM * 2  # a key and a value in bf16
SIZES = [64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20, 256 << 20, 1 << 30]
HEADER = ["operation", "way", "ranks", "bytes", "device_us", "gb_a_s", "call_us", "host_us", "far_bytes"]
WAYS = (("native", "native", False), ("native_beside", "native", True), ("all_to_all", "all_to_all", False))
"""Of ours: name, implementation, whether tensors are kept."""
AHEAD_CYCLES = 8_000_000
"""Of the clock: some milliseconds, in which the host queues what is measured."""


def exchange_args(rank: int, num_ranks: int, num_rows: int) -> GroupCastArgs:
    """All ``num_rows`` rows of each rank to every other, in the order of ranks."""
    splits = [num_rows if r != rank else 0 for r in range(num_ranks)]
    rows = np.tile(np.arange(num_rows), num_ranks - 1)
    # This rank's rows come after those of the ranks before it, of which the destination may be one; so do they go back.
    first = [(rank - (r < rank)) * num_rows for r in range(num_ranks)]
    peers = PeerRows(rows, first, first, num_rows, len(rows), len(rows))
    return GroupCastArgs.build(rows, splits, splits, None, "cuda", peers)


def exchange_rows(num_ranks: int, num_rows: int) -> tuple[Ranges, Runs]:
    """`exchange_args` of all ranks: what they fetch, and where it is."""
    dst, src = (x.reshape(-1) for x in np.indices((num_ranks, num_ranks)))
    src, dst = src[src != dst], dst[src != dst]
    place, ranks = (src - (src > dst)) * num_rows, np.arange(num_ranks)
    runs = Runs(ranks * num_rows, (ranks + 1) * num_rows, ranks, np.zeros_like(ranks))
    return Ranges(dst, src * num_rows, (src + 1) * num_rows, place), runs


def slowest(value: float) -> float:
    """The largest of all ranks."""
    largest = torch.tensor([value], device="cuda")
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return float(largest)


def measure(run: Callable[[], object], num_bytes: int) -> tuple[float, float, float]:
    """Device, call and host time, microseconds."""
    calls = 10 if num_bytes <= 4 << 20 else 4 if num_bytes <= 64 << 20 else 2
    device, alone, host = [], [], []
    for i in range(7):
        dist.barrier()
        torch.cuda.synchronize()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(AHEAD_CYCLES)
        start.record()
        begin = time.perf_counter()
        for _ in range(calls):
            run()
        host.append((time.perf_counter() - begin) / calls * 1e6)
        end.record()
        torch.cuda.synchronize()
        device.append(slowest(start.elapsed_time(end) / calls * 1e3))
        begin = time.perf_counter()
        run()
        torch.cuda.synchronize()
        alone.append(slowest((time.perf_counter() - begin) * 1e6))
        if i == 1:
            for times in (device, alone, host):
                times.clear()
    return float(np.median(device)), float(np.median(alone)), float(np.median(host))


def ways(
    rank: int, num_ranks: int, num_bytes: int, group: dist.ProcessGroup | None, per_node: int = 0
) -> dict[tuple[str, str], Callable[[], object]]:
    """What is measured, by operation and way; in two levels with ``per_node``."""
    num_rows = num_bytes // ROW_BYTES // (num_ranks - 1)
    args = exchange_args(rank, num_ranks, num_rows)
    generator = torch.Generator("cuda").manual_seed(rank)
    shape = (num_rows, HEADS_KV, HEAD_DIM)
    k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16, generator=generator) for _ in range(2))
    dk, dv = (torch.randn(args.num_recv, *shape[1:], device="cuda", dtype=torch.bfloat16) for _ in range(2))
    into = [torch.zeros(shape, device="cuda") for _ in range(2)]
    sent = torch.empty(num_rows * ROW_BYTES, dtype=torch.uint8, device="cuda")
    everything = torch.empty(num_ranks * len(sent), dtype=torch.uint8, device="cuda")
    packed, received = (torch.empty(args.num_recv * ROW_BYTES, dtype=torch.uint8, device="cuda") for _ in range(2))
    splits = [n * ROW_BYTES for n in args.recv_splits]
    result: dict[tuple[str, str], Callable[[], object]] = {}
    if per_node:
        levels = level_args(exchange_rows(num_ranks, num_rows), rank, num_ranks, per_node)
        for way, impl in ((f"two_levels_{per_node}", "auto"), (f"two_levels_native_{per_node}", "native")):
            how = {"args": levels, "impl": impl, "kept": True}
            result["cast", way] = lambda how=how: group_cast([k, v], **how).wait()
            result["reduce", way] = lambda how=how: group_reduce([dk, dv], into=into, **how).wait()
            handle = group_cast([k, v], **how)
            assert handle.far_sent_bytes == far_bytes(way, len(sent) * (num_ranks - 1), num_ranks, per_node)
            handle.wait()
        return result
    for way, impl, kept in WAYS:
        how = {"impl": impl, "kept": kept, "group": group}
        result["cast", way] = lambda how=how: group_cast([k, v], args, **how).wait()
        result["reduce", way] = lambda how=how: group_reduce([dk, dv], args, into=into, at_once=True, **how).wait()
    result["reduce", "native_at_the_end"] = lambda: group_reduce([dk, dv], args, group, into=into, impl="native").wait()
    result["cast", "nccl_all_to_all"] = lambda: dist.all_to_all_single(received, packed, splits, splits)
    result["cast", "nccl_all_gather"] = lambda: all_gather_single(everything, sent)
    return result


def far_bytes(way: str, num_bytes: int, num_ranks: int, ranks_per_node: int) -> int:
    """Bytes that a rank sends to other nodes: in two levels each row once to each node."""
    others = num_ranks // ranks_per_node - 1 if "levels" in way else num_ranks - ranks_per_node
    return num_bytes // (num_ranks - 1) * others


def measure_all(rank: int, num_ranks: int, sizes: list[int], ranks_per_node: list[int], path: str | None) -> None:
    """Rows of the table; rank 0 prints them and writes them to a file as they come."""
    rows, group = [], dist.new_group()
    for per_node in (0, *ranks_per_node):
        for num_bytes in sizes:
            for (operation, way), run in ways(rank, num_ranks, num_bytes, group, per_node).items():
                device, call, host = measure(run, num_bytes)
                times = [f"{x:.1f}" for x in (device, num_bytes / device / 1e3, call, host)]
                far = far_bytes(way, num_bytes, num_ranks, per_node or [*ranks_per_node, num_ranks][0])
                rows.append([operation, way, num_ranks, num_bytes, *times, far])
                if rank == 0:
                    print_row(HEADER, rows[-1])
            if rank == 0 and path:
                write_csv(path, HEADER, rows)
            del run
        if group is not None:
            dist.destroy_process_group(group)
            group = None
            gc.collect()


def main() -> None:
    """Measures on all GPUs of the machine."""
    parser = table_parser(__doc__)
    parser.add_argument("--sizes", type=int, nargs="*", default=SIZES, help="bytes that a rank receives")
    parser.add_argument(
        "--ranks-per-node", type=int, nargs="*", default=[], help="also in two levels, with so many GPUs for a node"
    )
    parser.add_argument("--chart", help="draw the file of --csv to this PNG; measure nothing")
    options = parser.parse_args()
    if options.chart:
        notes, rows = read_results(options.csv)
        draw(options.chart, ", ".join(notes.get(name, "") for name in ("device", "commit", "date")), rows)
        return
    num_ranks = torch.cuda.device_count()
    arguments = options.sizes, options.ranks_per_node, options.csv and str(Path(options.csv).resolve())
    run_ranks(measure_all, num_ranks, *arguments, timeout_s=300.0, backend="nccl")


if __name__ == "__main__":
    main()
