"""Many steps of attention with a new mask each, prepared ahead by workers: does memory stay flat?

    torchrun --nproc-per-node 2 -m benchmarks.soak.steps [--steps 10000] [--tokens 1024] [--stages N] [--csv FILE]

A step is a forward and a backward pass of two layers over packed documents, with new lengths. Memory of the
device (what tensors have, and what the allocator has taken), of the training process and of its workers is looked at
after 1 % of the steps, and then ten times more. Exits non-zero where any of them grows by more than `ALLOWED_MIB` after
that. Runs on CPUs too.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

import psutil
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from benchmarks._lib.batches import PackedCase
from benchmarks._lib.provenance import print_row, table_parser, write_csv
from megatron_magi.attention import AttnShape, PreparedBatch, distributed_attention, prepare_batch
from megatron_magi.config import MagiConfig, OverlapConfig
from megatron_magi.plan import make_plan

HEADS_Q, HEADS_KV, HEAD_DIM, NUM_LAYERS = 8, 2, 64, 2
HEADER = ["rank", "step", "device_mib", "device_reserved_mib", "host_mib", "workers_mib", "seconds"]
ALLOWED_MIB = (1.0, 32.0, 32.0, 64.0)
"""Growth that is none: of the device by masks that differ, of the rest by what allocators of C and torch round up."""


@dataclass(frozen=True)
class Masks(Dataset):
    """Prepared batches by step.

    Attributes:
        rank, num_ranks, tokens: this one, how many there are, and tokens a rank.
        shape: of the attention.
        num_steps: batches.
        config: of the attention.
    """

    rank: int
    num_ranks: int
    tokens: int
    shape: AttnShape
    num_steps: int
    config: MagiConfig

    def __len__(self) -> int:
        return self.num_steps

    def __getitem__(self, step: int) -> PreparedBatch:
        mask = PackedCase(self.tokens * self.num_ranks, 8, self.num_ranks).mask(step)
        plan = make_plan(mask, self.config, self.num_ranks).for_rank(self.rank)
        return prepare_batch({"all": plan}, self.shape, self.config)


def memory_mib(device: torch.device) -> list[float]:
    """As `HEADER` says, between rank and step and the seconds."""
    on_gpu = device.type == "cuda"
    process = psutil.Process()
    of_device = (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) if on_gpu else (0, 0)
    workers = sum(worker.memory_info().rss for worker in process.children(recursive=True))
    return [n / 2**20 for n in (*of_device, process.memory_info().rss, workers)]


def soak(device: torch.device, num_steps: int, tokens: int, num_workers: int, config: MagiConfig) -> Iterator[list]:
    """Rows of the table, of this rank."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    shape = AttnShape(HEADS_Q, HEADS_KV, HEAD_DIM, HEAD_DIM, dtype).kernels_for(device)
    loader = DataLoader(
        Masks(rank, num_ranks, tokens, shape, num_steps, config), batch_size=None, num_workers=num_workers,
        pin_memory=device.type == "cuda", multiprocessing_context="fork" if num_workers else None,
    )  # fmt: skip
    looks = {max(1, num_steps // 100), *(num_steps * i // 10 for i in range(1, 11))}
    begin = time.perf_counter()
    x = torch.randn(tokens, HEADS_Q, HEAD_DIM, dtype=dtype, device=device, requires_grad=True)
    last = None
    for step, batch in enumerate(loader, start=1):
        batch.to(device, like=last)
        last = batch.plans
        y = x
        for _ in range(NUM_LAYERS):
            kv = y[:, :HEADS_KV]
            y = distributed_attention(y, kv, kv, batch.plans["all"], dist.group.WORLD, config=config)[0]
        torch.autograd.grad(y.float().square().sum(), x)
        if step in looks:
            gc.collect()
            figures = [f"{mib:.1f}" for mib in memory_mib(device)]
            yield [rank, step, *figures, f"{time.perf_counter() - begin:.0f}"]


def growth(rows: list[list]) -> list[str]:
    """What has grown since the first row of a rank, as messages; at the end workers have ended."""
    problems = []
    for rank in {row[0] for row in rows}:
        first, *later = [row for row in rows if row[0] == rank]
        for name, place, allowed in zip(HEADER[2:], range(2, 6), ALLOWED_MIB, strict=False):
            most = max(float(row[place]) for row in later) - float(first[place])
            if most > allowed:
                problems.append(f"rank {rank}: {name} grew by {most:.1f}")
    return problems


def main() -> None:
    """In every rank."""
    parser = table_parser(__doc__)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--tokens", type=int, default=1024, help="a rank")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--stages", type=int, help="remote stages, instead of one launch")
    options = parser.parse_args()
    config = MagiConfig(overlap=OverlapConfig(degree=options.stages, one_launch=options.stages is None))
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    rows: list[list] = []
    dist.all_gather_object([None] * dist.get_world_size(), 0)  # what looks need is there before the first
    for row in soak(device, options.steps, options.tokens, options.workers, config):
        found: list[list] = [[]] * dist.get_world_size()
        dist.all_gather_object(found, row)
        rows += found
        if dist.get_rank() == 0:
            for seen in found:
                print_row(HEADER, seen)
            write_csv(options.csv, HEADER, rows)
    dist.destroy_process_group()
    sys.exit("\n".join(growth(rows)) or 0)


if __name__ == "__main__":
    main()
