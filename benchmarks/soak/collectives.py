"""Many calls of group_cast and group_reduce with changing tables, sizes, dtypes and ways, on the GPUs of one machine.

    python -m benchmarks.soak.collectives [--calls 10000] [--impls NAME ...] [--csv FILE]

Every tenth of the calls is checked, row by row; the others are only waited for. Tables change every few calls, so do
numbers of rows, widths, dtypes, implementations and whether sums are formed at once; two calls are in flight at a time,
and from four ranks on some tables are in two levels. Memory of device and host is read twenty times; what it grows by
after the first fifth is a leak. `check` with fewer calls is also a test.
"""

from __future__ import annotations

import argparse
import time
from typing import NamedTuple

import numpy as np
import torch

from benchmarks._lib.level_args import level_args
from benchmarks._lib.memory import growth, memory_mb
from benchmarks._lib.provenance import write_csv
from megatron_magi.comm.group_collective import Args, GroupCastArgs, group_cast, group_reduce
from megatron_magi.comm.peer_tables import PeerRows
from megatron_magi.plan.partition import Ranges, Runs
from megatron_magi.testing.spawn import run_ranks

HEADER = ["ranks", "calls", "device_mb", "torch_mb", "host_mb", "seconds"]
SAMPLES = 20
CALLS_A_TABLE = 8
EVERY = 10
"""Calls of which one is checked."""
MOST_ROWS = (30, 500, 4000)


class Table(NamedTuple):
    """Rows that travel: arguments, what to expect of a cast, and how often each row comes back."""

    args: Args
    num_rows: int
    owner: torch.Tensor
    row: torch.Tensor
    count: torch.Tensor


def make_table(rank: int, num_ranks: int, seed: int, device: str) -> Table:
    """Random rows of each rank to each other, some pairs exchanging nothing, others everything; equal on all ranks."""
    rng = np.random.default_rng(seed)
    most = int(rng.choice(MOST_ROWS))
    num_rows = rng.integers(1, most, num_ranks)
    share = rng.choice([0.0, 0.1, 1.0], (num_ranks, num_ranks))
    src, dst, row, place = [], [], [], []
    for j in range(num_ranks):
        rows = [np.flatnonzero(rng.random(num_rows[i]) < share[i, j] * (i != j)) for i in range(num_ranks)]
        src += [np.full(len(some), i) for i, some in enumerate(rows)]
        row += rows
        total = sum(map(len, rows))
        dst.append(np.full(total, j))
        place.append(rng.permutation(total))
    parts = (np.concatenate(part).astype(np.int64) for part in (src, dst, row, place))
    src, dst, row, place = parts
    ends = np.cumsum(num_rows)
    runs = Runs(ends - num_rows, ends, np.arange(num_ranks), np.zeros_like(ends))
    token = runs.start[src] + row  # rising for each ``dst``
    received, sent = dst == rank, src == rank
    args: Args
    if num_ranks >= 4 and seed % 3 == 0:
        args = level_args((Ranges(dst, token, token + 1, place), runs), rank, num_ranks, num_ranks // 2, device)
    else:
        counts = np.zeros((num_ranks, num_ranks), dtype=np.int64)
        np.add.at(counts, (src, dst), 1)
        first_there, first_back = counts[:rank].sum(axis=0).tolist(), counts[:, :rank].sum(axis=1).tolist()
        most = int(row.max(initial=-1)) + 1, int(counts.sum(axis=0).max()), int(counts.sum(axis=1).max())
        args = GroupCastArgs.build(
            row[sent], counts[rank], counts[:, rank], np.argsort(place[received]), device,
            PeerRows(row[received], first_there, first_back, *most),
        )  # fmt: skip
    order = np.argsort(place[received])
    count = np.bincount(row[sent], minlength=num_rows[rank])
    tensors = (torch.from_numpy(x).to(device) for x in (src[received][order], row[received][order], count))
    return Table(args, int(num_rows[rank]), *tensors)


def check(rank: int, num_ranks: int, num_calls: int, device: str = "cuda", impls: tuple = ("native", "auto")) -> dict:
    """Makes the calls; the number of wrong values, of those looked at, and what memory was."""
    wrong, looked_at = torch.zeros((), dtype=torch.int64, device=device), 0
    memory, began, before = [], time.monotonic(), None
    for call in range(num_calls):
        if call % CALLS_A_TABLE == 0:
            table = make_table(rank, num_ranks, call, device)
        rng = np.random.default_rng(call)
        width, impl = int(rng.choice([1, 5, 64, 1024])), impls[int(rng.integers(len(impls)))]
        value = float(call % 100)
        own = torch.arange(table.num_rows, device=device, dtype=torch.float32) + 65536.0 * rank + value
        x = own.unsqueeze(1).expand(-1, width).contiguous()
        handle = group_cast([x, own], table.args, impl=impl)
        x.fill_(-1)  # what was sent may be overwritten at once
        if before is not None:
            before.wait()
        partial_dtype = torch.bfloat16 if call % 2 else torch.float32
        partial = torch.full((table.args.num_recv, width), 2.0, dtype=partial_dtype, device=device)
        into = torch.ones(table.num_rows, width, device=device)
        wide, narrow = handle.wait()
        back = group_reduce([partial], table.args, into=[into], impl=impl, at_once=call % 3 == 0)
        del partial
        before = back
        if call % EVERY == 0:
            expected = table.owner * 65536.0 + table.row + value
            (total,), before = back.wait(), None
            wrong += (wide != expected.unsqueeze(1)).sum() + (narrow != expected).sum()
            wrong += (total != (1 + 2 * table.count).unsqueeze(1)).sum()
            looked_at += 1
        if call % max(num_calls // SAMPLES, 1) == 0:
            memory.append((call, *memory_mb(device), time.monotonic() - began))
            if rank == 0:
                print("  ".join(f"{h}={x:.0f}" for h, x in zip(HEADER[1:], memory[-1], strict=True)), flush=True)
    if before is not None:
        before.wait()
    memory.append((num_calls, *memory_mb(device), time.monotonic() - began))
    return {"wrong": int(wrong), "checked": looked_at, "memory": memory}


def main() -> None:
    """Runs on all GPUs of the machine; ends with an error if a value is wrong or memory grows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=10_000, help="pairs of a cast and a reduction")
    parser.add_argument("--impls", nargs="+", default=["native", "auto"], help="of the calls, taken at random")
    parser.add_argument("--csv", help="also write memory over calls, of rank 0, to this file")
    options = parser.parse_args()
    num_ranks = torch.cuda.device_count()
    found = run_ranks(check, num_ranks, options.calls, "cuda", tuple(options.impls), timeout_s=600.0, backend="nccl")
    rows = [[num_ranks, call, *(f"{x:.1f}" for x in rest)] for call, *rest in found[0]["memory"]]
    write_csv(options.csv, HEADER, rows)
    wrong, checked = sum(r["wrong"] for r in found), found[0]["checked"]
    grown = {name: max(growth(r["memory"], i) for r in found) for i, name in ((1, "device"), (2, "torch"), (3, "host"))}
    print(f"{wrong} wrong values in {checked} checked pairs of calls on {num_ranks} ranks; MB grown: {grown}")
    if wrong or grown["torch"] > 8 or grown["device"] > 64 or grown["host"] > 64:
        raise SystemExit("FAILED")


if __name__ == "__main__":
    main()
