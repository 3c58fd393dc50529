"""Many calls of distributed attention with changing plans, sizes and schedules, on the GPUs of one machine.

    python -m benchmarks.soak.attention [--calls 10000] [--ways NAME ...] [--cached 64] [--csv FILE]

A call is a forward and a backward pass: ``staged``, in one to three remote stages; ``one_launch``, which waits for
fetched keys inside the kernels; ``captured``, a CUDA graph of the same, into which another plan is loaded. Way, size
and plan change at random from call to call, so the ways also follow each other.
Every tenth call is compared with attention of the whole sequence on one GPU, row by row; of the others no number may
be NaN. Memory of device and host is read twenty times. Caches of passes and plans hold ``--cached`` items each, which
are there after a few hundred calls: what memory grows by after the first fifth is a leak. `check` with fewer calls is
also a test.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from benchmarks._lib.memory import all_caches, growth, memory_mb
from benchmarks._lib.provenance import write_csv
from megatron_magi.attention import AttnShape, PreparedBatch, StaticPlans, distributed_attention, prepare_batch
from megatron_magi.config import CommConfig, MagiConfig, OverlapConfig
from megatron_magi.mask import AttnMask, builders
from megatron_magi.ops.slice_attention import slice_attention
from megatron_magi.plan import RankPlan, make_plan
from megatron_magi.testing.spawn import run_ranks

HEADS_Q, HEADS_KV, HEAD_DIM = 8, 2, 128
SIZES = (2048, 1024, 512)
"""Tokens a rank; the largest first, as captured graphs keep collectives from getting more memory."""
WAYS = ("staged", "one_launch", "captured")
MADE = (*WAYS, "eager")
"""What calls are counted as: those of ``captured`` whose plan does not fit are made in eager mode."""
HEADER = ["ranks", "calls", *MADE, "device_mb", "torch_mb", "host_mb", "seconds"]
SAMPLES, EVERY = 20, 10
"""How often memory is read; of how many calls one is compared."""
KEPT_PLANS, CALLS_A_PLAN = 6, 10
"""Plans of a way and a size that take turns; of how many calls one brings a new plan."""
RELATIVE, FLOORS = 2**-5, (2**-10, 2**-7, 2**-7, 2**-10)
"""A row of out, dq, dk, dv is right if its error is below this share of its norm and that share of the largest norm of
a row: where a row sees few keys, the terms of dq and dk cancel."""
GROWN_MB = {"device": 64, "torch": 8, "host": 64}
"""What memory may grow by: of the device, of torch's tensors there, of the process."""
_GIVEN = "all"


class Shard(NamedTuple):
    """A plan, ready to be called, and the whole problem.

    Attributes:
        plan: of this rank.
        batch: as it was prepared.
        config: the schedule.
        mask: of the whole sequence.
        index: tokens of this rank.
    """

    plan: RankPlan
    batch: PreparedBatch
    config: MagiConfig
    mask: AttnMask
    index: torch.Tensor


def random_mask(total: int, rng: np.random.Generator) -> AttnMask:
    """Documents, causal or not, or a window."""
    if rng.random() < 0.2:
        return builders.sliding_window(total, int(rng.integers(1, 400)), 0)
    cuts = np.sort(rng.choice(np.arange(1, total), int(rng.integers(0, 8)), replace=False))
    lengths = np.diff(cuts, prepend=0, append=total).tolist()
    return builders.varlen(doc_lengths=lengths, causal=bool(rng.random() < 0.7))


def wrong_rows(found: list[torch.Tensor], expected: list[torch.Tensor]) -> torch.Tensor:
    """How many rows of out, dq, dk and dv are not those expected."""
    wrong = torch.zeros((), dtype=torch.int64, device=found[0].device)
    for a, b, floor in zip(found, expected, FLOORS, strict=True):
        a, b = a.detach().double().flatten(1), b.detach().double().flatten(1)
        size = b.norm(dim=1)
        wrong += (~((a - b).norm(dim=1) <= RELATIVE * size + floor * size.max())).sum()  # NaN is wrong
    return wrong


def attend(leaves: list[torch.Tensor], dout: torch.Tensor, plan: RankPlan, config: MagiConfig) -> list[torch.Tensor]:
    """out, dq, dk and dv."""
    out, _ = distributed_attention(*leaves, plan, dist.group.WORLD, config=config)
    return [out, *torch.autograd.grad(out, leaves, dout)]


@dataclass
class Soak:
    """Calls of one rank; equal arguments and the same calls on all ranks.

    Attributes:
        rank, num_ranks, device: this rank.
        ways: of `WAYS`.
    """

    rank: int
    num_ranks: int
    device: torch.device
    ways: tuple[str, ...]
    _plans: dict[tuple[str, int], deque[Shard]] = field(default_factory=dict)
    _graphs: dict[int, tuple] = field(default_factory=dict)
    _last: dict[tuple[int, int], dict] = field(default_factory=dict)

    def __post_init__(self) -> None:
        on_gpu = self.device.type == "cuda"
        dtype = torch.bfloat16 if on_gpu else torch.float32
        self._shape = AttnShape(HEADS_Q, HEADS_KV, HEAD_DIM, HEAD_DIM, dtype).kernels_for(self.device)
        comm = CommConfig(impl="native" if on_gpu else "auto")
        self._configs = {
            way: [MagiConfig(comm=comm, overlap=OverlapConfig(degree=degree, one_launch=way == "one_launch"))
                  for degree in ((1,) if way == "captured" else (1, 2, 3))]
            for way in self.ways
        }  # fmt: skip
        self._rng = np.random.default_rng(0)
        if "captured" in self.ways:
            for size in SIZES:
                self._graphs[size] = self._capture(size)

    def call(self, number: int) -> tuple[str, torch.Tensor]:
        """Its way, and how many of its rows are wrong, or are NaN where it is not compared."""
        rng = self._rng
        way, size = self.ways[rng.integers(len(self.ways))], int(rng.choice(SIZES))
        shard = self._shard(way, size)
        whole = self._tensors(size, number)
        mine = [x[shard.index] for x in whole]
        found = self._replay(size, shard, mine) if way == "captured" else None
        if found is None:
            way = "eager" if way == "captured" else way
            leaves = [x.requires_grad_() for x in mine[:3]]
            found = attend(leaves, mine[3], shard.plan, shard.config)
        if number % EVERY:
            return way, torch.stack([(~x.isfinite()).sum() for x in found]).sum()
        leaves = [x.requires_grad_() for x in whole[:3]]
        out, _ = slice_attention(*leaves, shard.mask)
        expected = [out, *torch.autograd.grad(out, leaves, whole[3])]
        return way, wrong_rows(found, [x[shard.index] for x in expected])

    def _tensors(self, size: int, seed: int) -> list[torch.Tensor]:
        """q, k, v and the gradient of the output, of all ranks."""
        generator = torch.Generator(self.device).manual_seed(seed)
        heads = HEADS_Q, HEADS_KV, HEADS_KV, HEADS_Q
        rows = size * self.num_ranks
        return [
            torch.randn(rows, n, HEAD_DIM, generator=generator, device=self.device, dtype=self._shape.dtype)
            for n in heads
        ]

    def _shard(self, way: str, size: int) -> Shard:
        """One of the last plans, or a new one."""
        rng, plans = self._rng, self._plans.setdefault((way, size), deque(maxlen=KEPT_PLANS))
        if not plans or rng.integers(CALLS_A_PLAN) == 0:
            plans.append(self._new_shard(way, random_mask(size * self.num_ranks, rng), size))
        return plans[rng.integers(len(plans))]

    def _new_shard(self, way: str, mask: AttnMask, size: int) -> Shard:
        config = self._configs[way][self._rng.integers(len(self._configs[way]))]
        plan = make_plan(mask, config, self.num_ranks)
        index = torch.from_numpy(plan.dispatch.global_index(self.rank))
        assert len(index) == size and int(index.max()) < size * self.num_ranks  # nothing is padded
        facts = self._graphs[size][0].facts if way == "captured" and size in self._graphs else None
        batch = prepare_batch({_GIVEN: plan.for_rank(self.rank)}, self._shape, config, like=facts)
        # The first batch of a kind has none before it; static plans are not called as they are.
        batch.to(self.device, like=None if way == "captured" else self._last.get((id(config), size)))
        self._last[id(config), size] = batch.plans
        return Shard(batch.plans[_GIVEN], batch, config, mask, index.to(self.device))

    def _capture(self, size: int) -> tuple:
        """Static plans, what the graph reads, the graph, and what it writes."""
        total = size * self.num_ranks
        masks = [builders.causal(total), *(random_mask(total, np.random.default_rng(seed)) for seed in range(8))]
        first, *samples = [{_GIVEN: self._new_shard("captured", mask, size).plan} for mask in masks]
        static = StaticPlans(first, self.device, dist.group.WORLD, headroom=4.0, samples=samples)
        inputs = [x[:size].clone().requires_grad_(i < 3) for i, x in enumerate(self._tensors(size, 0))]
        (config,) = self._configs["captured"]

        def run() -> list[torch.Tensor]:
            return attend(inputs[:3], inputs[3], static.plans[_GIVEN], config)

        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = run()
        return static, inputs, graph, results

    def _replay(self, size: int, shard: Shard, tensors: list[torch.Tensor]) -> list[torch.Tensor] | None:
        """None, on all ranks, where there is no room for the plan."""
        static, inputs, graph, results = self._graphs[size]
        if static.load({_GIVEN: shard.plan}) is not None:
            return None
        with torch.no_grad():
            for x, y in zip(inputs, tensors, strict=True):
                x.copy_(y)
        graph.replay()
        return results


def check(
    rank: int,
    num_ranks: int,
    num_calls: int,
    ways: tuple[str, ...] = WAYS,
    device: str = "cuda",
    cached: int | None = None,
) -> dict:
    """Makes calls in ``ways`` by turns; wrong numbers, calls compared, calls made of each way, and what memory was.

    Args:
        cached: items that each cache may hold; as many as always when None.
    """
    if cached is not None:
        for cache in all_caches():
            cache.max_items = cached
    where = torch.device(device, rank) if device == "cuda" else torch.device(device)
    soak = Soak(rank, num_ranks, where, ways)
    wrong, compared, made = torch.zeros((), dtype=torch.int64, device=where), 0, Counter[str]()
    memory, began = [], time.monotonic()
    for number in range(num_calls):
        if number % max(num_calls // SAMPLES, 1) == 0:
            memory.append((number, *(made[way] for way in MADE), *memory_mb(device), time.monotonic() - began))
            if rank == 0:
                print("  ".join(f"{h}={x:.0f}" for h, x in zip(HEADER[1:], memory[-1], strict=True)), flush=True)
        way, bad = soak.call(number)
        wrong += bad
        compared += number % EVERY == 0
        made[way] += 1
    memory.append((num_calls, *(made[way] for way in MADE), *memory_mb(device), time.monotonic() - began))
    return {"wrong": int(wrong), "compared": compared, "made": dict(made), "memory": memory}


def main() -> None:
    """Runs on all GPUs of the machine; ends with an error if a number is wrong or memory grows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=10_000, help="forward and backward passes, of all ways")
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--cached", type=int, default=64, help="items that each cache may hold")
    parser.add_argument("--csv", help="also write memory over calls, of rank 0, to this file")
    options = parser.parse_args()
    num_ranks = torch.cuda.device_count()
    found = run_ranks(
        check, num_ranks, options.calls, tuple(options.ways), "cuda", options.cached, timeout_s=600.0, backend="nccl"
    )
    rows = [[num_ranks, *counts, *(f"{x:.1f}" for x in rest)]
            for *counts, a, b, c, d in found[0]["memory"] for rest in [(a, b, c, d)]]  # fmt: skip
    write_csv(options.csv, HEADER, rows)
    wrong, at = sum(r["wrong"] for r in found), 1 + len(MADE)
    grown = {name: max(growth(r["memory"], at + i) for r in found) for i, name in enumerate(GROWN_MB)}
    print(f"{wrong} wrong in {found[0]['compared']} compared calls of {found[0]['made']} on {num_ranks} ranks; "
          f"MB grown: {grown}")  # fmt: skip
    if wrong or any(grown[name] > most for name, most in GROWN_MB.items()):
        raise SystemExit("FAILED")


if __name__ == "__main__":
    main()
