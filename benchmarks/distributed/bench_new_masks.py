"""Training steps of attention alone, with a new mask in each: what planning, copies and the host cost.

    python -m benchmarks.distributed.bench_new_masks [--csv FILE] [--cases NAME ...] [--ways NAME ...]
        [--layers N] [--steps N] [--turns N] [--comm IMPL ...]

A step is a forward and a backward pass of some layers over the GPUs of one machine, of packed documents. Ways:

- ``prepared``: a new mask each step, prepared ahead by worker processes of a data loader (`prepare_batch`), and
  brought to the device while it is busy with the step before (`PreparedBatch.to` with ``like``);
- ``at_begin``: likewise, but brought to the device when the step begins, and its launches prepared by the first layer;
- ``due``: a new mask each step, planned when the step begins;
- ``same``: a mask that was used in the steps before, with its plan;
- ``captured``: as ``prepared`` without ``like``, and all passes of the step are one CUDA graph, captured once and
  replayed for each mask (`StaticPlans`; on several GPUs with native collectives, and as elsewhere in one launch);
- ``captured_stages``: likewise, on several GPUs with a stage for the fetched keys. Not by default.

All ways take the same masks in the same order, and nothing is known of them when a way begins. They run in turns, each
over some masks, so that a machine whose speed drifts favors none. Reported is the median over the masks of the slowest
rank's step, of its rate to the first way's with the same mask, and of the host of the first rank: how long it takes to
issue the forward of a layer and its part of the one backward over all layers, all of the step, to get the next batch
from the loader and to bring it to the device, and how long it then waits for the device. Where it does not wait, it
sets the pace. The first batches of a turn, which the workers make while they start, do not count.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from benchmarks._lib.batches import WARM_UP, make_mask
from benchmarks._lib.provenance import print_row, table_parser, write_csv
from megatron_magi.attention import AttnShape, PreparedBatch, StaticPlans, distributed_attention, prepare_batch
from megatron_magi.backends.sm90 import plan as hopper_plan
from megatron_magi.backends.sm90 import program as hopper_program
from megatron_magi.config import CommConfig, CostModel, MagiConfig, OverlapConfig
from megatron_magi.plan import RankPlan, make_plan
from megatron_magi.testing.ports import held_port

HEADS_Q, HEADS_KV, HEAD_DIM = 32, 8, 128
HEADER = ["documents", "tokens_a_gpu", "ranks", "comm", "way", "step_ms", "tflops_a_gpu", "rate_to_same",
          "host_forward_us", "host_backward_us", "host_step_us",
          "host_loader_us", "host_bring_us", "host_waits_us"]  # fmt: skip
WORKERS = 4
WAYS = ("same", "prepared", "at_begin", "due", "captured")


class Masks(Dataset):
    """Prepared batches by step."""

    def __init__(
        self, make: Callable[[int], RankPlan], shape: AttnShape, config: MagiConfig, num_steps: int, like: dict | None
    ) -> None:
        self._make, self._num_steps = make, num_steps
        self._prepare = partial(prepare_batch, shape=shape, config=config, like=like)

    def __len__(self) -> int:
        return self._num_steps

    def __getitem__(self, step: int) -> PreparedBatch:
        return self._prepare({"full": self._make(step)})


class Steps:
    """Passes of all layers over one rank's rows."""

    def __init__(self, rank: int, num_rows: int, num_layers: int, config: MagiConfig) -> None:
        generator = torch.Generator("cuda").manual_seed(rank)
        *qkv, self._dout = (
            torch.randn(num_rows, n, HEAD_DIM, device="cuda", dtype=torch.bfloat16, generator=generator)
            for n in (HEADS_Q, HEADS_KV, HEADS_KV, HEADS_Q)
        )
        # Gradients of layers are not added up, as those of a model's layers are not.
        self._layers = [[t.detach().requires_grad_() for t in qkv] for _ in range(num_layers)]
        self._config = config
        self.host_us: list[tuple[float, float, float]] = []

    def run(self, plan: RankPlan) -> None:
        """One step; notes how long the host takes for the forward and the backward of a layer, and for all."""
        start = time.perf_counter()
        outs = [distributed_attention(*qkv, plan, dist.group.WORLD, config=self._config)[0] for qkv in self._layers]
        middle = time.perf_counter()
        torch.autograd.grad(outs, [t for qkv in self._layers for t in qkv], [self._dout] * len(outs))
        end = time.perf_counter()
        count = len(self._layers)
        self.host_us.append(tuple(1e6 * t for t in ((middle - start) / count, (end - middle) / count, end - start)))

    def captured(self, static: StaticPlans) -> Callable[[RankPlan], None]:
        """The step as a CUDA graph over static plans; returns what loads a mask and replays it."""
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(2):
                self.run(static.plans["full"])
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.run(static.plans["full"])

        def run(plan: RankPlan) -> None:
            start = time.perf_counter()
            reason = static.load({"full": plan})
            assert reason is None, reason
            graph.replay()
            self.host_us.append((np.nan, np.nan, 1e6 * (time.perf_counter() - start)))

        return run


def with_one_stage(config: MagiConfig, num_ranks: int, one_launch: bool) -> MagiConfig:
    """Captured collectives are those of one stage."""
    overlap = config.overlap if num_ranks == 1 else replace(config.overlap, degree=1, one_launch=one_launch)
    return replace(config, overlap=overlap)


def capture(
    rank: int, plan: RankPlan, num_layers: int, config: MagiConfig
) -> tuple[Steps, Callable[[RankPlan], None], dict]:
    """Steps of their own, what loads a mask and replays them, and what batches are to be prepared like."""
    static = StaticPlans({"full": plan}, torch.device("cuda", rank), dist.group.WORLD, headroom=4)
    steps = Steps(rank, plan.num_rows, num_layers, config)
    return steps, steps.captured(static), static.facts


def time_steps(
    run: Callable[[RankPlan], None], plans: Iterator[tuple[RankPlan, bool]], ahead: bool
) -> tuple[list[float], list[float]]:
    """The steps that count: milliseconds of the slowest rank, and microseconds that this host waits in each.

    What ``plans`` takes to make one counts.

    Args:
        run: one step.
        plans: the plan of each step, and whether the step counts.
        ahead: a plan is asked for once the step before is issued, not when that is over.
    """
    torch.cuda.synchronize()
    dist.barrier()
    times, waits, begin = [], [], time.perf_counter()
    plan, counts = next(plans)
    while plan is not None:
        run(plan)
        del plan  # as a trainer's step ends: what goes with it goes while the device is busy
        following = next(plans, (None, False)) if ahead else None
        queued = time.perf_counter()
        torch.cuda.synchronize()
        now = time.perf_counter()
        if counts:
            times.append(1e3 * (now - begin))
            waits.append(1e6 * (now - queued))
        dist.barrier()  # with another mask another rank ends first
        begin = time.perf_counter()
        plan, counts = following or next(plans, (None, False))
    slowest = torch.tensor(times[WARM_UP:], device="cuda")
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return slowest.tolist(), waits[WARM_UP:]


def bring(
    masks: Masks, device: torch.device, ahead: bool, brought: list[tuple[float, float]]
) -> Iterator[tuple[RankPlan, bool]]:
    """Plans of batches that workers prepare; notes how long the host takes to get one, and to bring it to the device.

    The last does not count: with it the loader ends. ``ahead``: their launches are prepared, too.
    """
    loader = iter(DataLoader(
        masks, batch_size=None, num_workers=WORKERS, prefetch_factor=2, pin_memory=True, multiprocessing_context="fork"
    ))  # fmt: skip
    last = None
    for left in reversed(range(len(masks))):
        begin = time.perf_counter()
        batch = next(loader)
        came = time.perf_counter()
        batch.to(device, like=last)
        brought.append((1e6 * (came - begin), 1e6 * (time.perf_counter() - came)))
        last = batch.plans if ahead else None
        yield batch.plans["full"], left > 0


def forget() -> None:
    """Empties what is kept of masks on the device."""
    for kept in (hopper_plan._plans, hopper_program._bound):
        kept.drop(lambda _key: True)


def measure(
    rank: int, num_ranks: int, name: str, tokens: int, num_layers: int, num_steps: int, num_turns: int, comm: str,
    ways: list[str],
) -> list[list]:  # fmt: skip
    """Rows of the table for one kind of mask, equal on all ranks."""
    torch.cuda.set_device(rank)
    total, in_turn = tokens * num_ranks, num_steps + WARM_UP
    cost = CostModel(num_heads_q=HEADS_Q, num_heads_kv=HEADS_KV, head_dim=HEAD_DIM)
    config = MagiConfig(overlap=OverlapConfig(cost=cost), comm=CommConfig(impl=comm))
    shape = AttnShape(HEADS_Q, HEADS_KV, HEAD_DIM, HEAD_DIM, torch.bfloat16).kernels_for(torch.device("cuda", rank))

    def plan_of(seed: int, config: MagiConfig = config) -> RankPlan:
        return make_plan(make_mask(name, total, num_ranks, seed), config, num_ranks).for_rank(rank)

    def prepared(
        first: int, config: MagiConfig = config, facts: dict | None = None, ahead: bool = True
    ) -> Iterator[tuple[RankPlan, bool]]:
        masks = Masks(lambda step: plan_of(first + step, config), shape, config, in_turn + 1, facts)
        return bring(masks, torch.device("cuda", rank), ahead, brought)

    def due(first: int, times: int = 1) -> Iterator[tuple[RankPlan, bool]]:
        for seed in range(first, first + in_turn):
            plan = plan_of(seed)
            yield from ((plan, left == 0) for left in reversed(range(times)))

    steps = Steps(rank, plan_of(0).num_rows, num_layers, config)
    same, at_begin = partial(due, times=3), partial(prepared, ahead=False)
    makers = {"same": same, "prepared": prepared, "at_begin": at_begin, "due": due}
    run_of, steps_of = dict.fromkeys(ways, steps.run), dict.fromkeys(ways, steps)
    for seed in range(in_turn):  # compiles kernels
        steps.run(plan_of(1_000_000 + seed))
    brought: list[tuple[float, float]] = []
    found: dict[str, tuple[list, list, list, list]] = {way: ([], [], [], []) for way in ways}
    for turn in range(num_turns):
        for way in ways if turn % 2 == 0 else reversed(ways):
            if way not in makers:  # after ways that let the memory of collectives grow
                one_stage = with_one_stage(config, num_ranks, way == "captured")
                steps_of[way], run_of[way], facts = capture(rank, plan_of(0, one_stage), num_layers, one_stage)
                makers[way] = partial(prepared, config=one_stage, facts=facts, ahead=False)
            forget()
            steps_of[way].host_us.clear()
            brought.clear()
            ahead = way == "prepared" or way.startswith("captured")
            times, waits = time_steps(run_of[way], makers[way](turn * in_turn), ahead)
            host_us = steps_of[way].host_us
            each = len(host_us) // in_turn  # steps of a mask, of which the last counts
            of_turn = times, host_us[each - 1 :: each][WARM_UP:], brought[WARM_UP:], waits
            for all_turns, this_one in zip(found[way], of_turn, strict=True):
                all_turns += this_one
    seeds = np.arange(num_turns * in_turn).reshape(num_turns, in_turn)[:, WARM_UP:]
    areas = [make_mask(name, total, num_ranks, seed).area for seed in seeds.flat]
    flops = 14.0 * float(np.mean(areas)) * HEADS_Q * HEAD_DIM * num_layers / num_ranks
    return [[name, tokens, num_ranks, comm, way, *row] for way, row in zip(ways, rows_of(found, flops), strict=True)]


def rows_of(found: dict[str, tuple[list, list, list, list]], flops: float) -> Iterator[list[str]]:
    """The figures of `HEADER` for each way.

    Args:
        found: of each way and step: milliseconds, and what `Steps`, `bring` and `time_steps` say of the host.
        flops: of a rank in a step.
    """
    base = np.array(next(iter(found.values()))[0])
    for times, host_us, bringing, waits in found.values():
        step_ms = np.median(times)
        bring_us = np.median(bringing, axis=0) if bringing else (np.nan, np.nan)
        host = (*np.median(host_us, axis=0), *bring_us, np.median(waits))
        yield [
            f"{step_ms:.2f}", f"{flops / step_ms / 1e9:.0f}", f"{np.median(base / np.array(times)):.3f}",
            *("" if np.isnan(us) else f"{us:.0f}" for us in host),
        ]  # fmt: skip


def measure_all(rank: int, num_ranks: int, port: int, options: argparse.Namespace) -> None:
    """Prints all rows, and writes them."""
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=num_ranks)
    rows = []
    for case, comm in itertools.product(options.cases, options.comm):
        name, tokens = case.split(":")
        rows += measure(
            rank, num_ranks, name, int(tokens), options.layers, options.steps, options.turns, comm, options.ways
        )
        if rank == 0:
            for row in rows[-len(options.ways) :]:
                print_row(HEADER, row)
            write_csv(options.csv, HEADER, rows)
    dist.destroy_process_group()


def main() -> None:
    """Measures on all GPUs of the machine."""
    parser = table_parser(__doc__)
    cases = [f"{name}:{tokens}" for tokens in (8192, 32768) for name in ("64", "short", "8", "causal")]
    parser.add_argument("--cases", nargs="*", default=cases, help="documents (a number, short, causal):tokens a GPU")
    parser.add_argument(
        "--ways",
        nargs="+",
        default=list(WAYS),
        choices=[*WAYS, "captured_stages"],
        help="rates are to those of the first",
    )
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--steps", type=int, default=16, help="that count, in a turn of a way")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--comm", nargs="*", default=["auto"], help="implementations of group_cast and group_reduce")
    options = parser.parse_args()
    num_ranks = torch.cuda.device_count()
    with held_port() as port:
        # Not daemons, which could not start the workers of a data loader.
        torch.multiprocessing.spawn(measure_all, (num_ranks, port, options), nprocs=num_ranks, daemon=False)


if __name__ == "__main__":
    main()
