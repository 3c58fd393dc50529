"""Training steps of attention through the public functions, with a key made in each: what a new mask costs.

    torchrun --nproc-per-node N -m benchmarks.distributed.bench_new_keys [--csv FILE] [--cases NAME ...]
        [--layers N] [--steps N] [--turns N] [--cpu]

A step is a forward and a backward pass of some layers over all ranks, by `calc_attn`. Two ways, in turns, over the same
masks of packed documents: ``same`` makes the key before (and runs a step with it, which does not count), ``new`` makes
it with `magi_attn_varlen_key` in the step. Reported is the median over the masks of the slowest rank's step, of its
ratio, and of the first rank's host: how long it takes to make a key, until the first call of `calc_attn` returns, which
waits for the key to be compared with the other ranks' and queues attention, and for the whole step to be queued. For
``new`` the device is idle when the key is made: each step is waited for.

With ``--cpu`` there is no GPU and no attention: only keys are made, and compared (`dispatch` waits for that).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist

from benchmarks._lib.batches import WARM_UP, make_mask
from benchmarks._lib.provenance import print_row, table_parser, write_csv
from benchmarks._lib.ranks import join_ranks
from megatron_magi.api import DistAttnRuntimeKey as Key
from megatron_magi.api import calc_attn, clear_cache, dispatch, get_position_ids, magi_attn_varlen_key

HEADS_Q, HEADS_KV, HEAD_DIM = 32, 8, 128
HEADER = ["documents", "tokens_a_gpu", "ranks", "way", "step_ms", "rate_to_same", "key_us", "first_call_us", "host_us"]


def cu_seqlens(name: str, total: int, num_ranks: int, seed: int) -> torch.Tensor:
    """Cumulative lengths of the documents of `make_mask`, on the CPU."""
    starts = make_mask(name, total, num_ranks, seed).table[:, 0]
    return torch.tensor(np.unique(np.append(starts, total)), device="cpu")


def key_of(lengths: torch.Tensor) -> Key:
    """The key of a batch."""
    return magi_attn_varlen_key(
        lengths, lengths, HEADS_Q, HEADS_KV, HEAD_DIM, causal=True, cp_group_or_mesh=dist.group.WORLD
    )


class Steps:
    """Passes of all layers over one rank's rows; ``host_us``: of the last step, as in `HEADER`."""

    def __init__(self, rank: int, num_rows: int, num_layers: int) -> None:
        generator = torch.Generator("cuda").manual_seed(rank)
        *qkv, self._dout = (
            torch.randn(num_rows, n, HEAD_DIM, device="cuda", dtype=torch.bfloat16, generator=generator)
            for n in (HEADS_Q, HEADS_KV, HEADS_KV, HEADS_Q)
        )
        self._layers = [[t.detach().requires_grad_() for t in qkv] for _ in range(num_layers)]
        self.host_us: tuple[float, float, float] = (0.0, 0.0, 0.0)

    def run(self, make: Callable[[], Key]) -> float:
        """Milliseconds of one step on an idle device."""
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        key = make()
        made = time.perf_counter()
        outs = [calc_attn(*self._layers[0], key)[0]]
        first = time.perf_counter()
        outs += [calc_attn(*qkv, key)[0] for qkv in self._layers[1:]]
        torch.autograd.grad(outs, [t for qkv in self._layers for t in qkv], [self._dout] * len(outs))
        queued = time.perf_counter()
        torch.cuda.synchronize()
        self.host_us = tuple(1e6 * (at - begin) for at in (made, first, queued))
        return 1e3 * (time.perf_counter() - begin)


def measure(name: str, tokens: int, options: argparse.Namespace) -> list[list]:
    """Rows of the table for one kind of mask."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    total, found = tokens * num_ranks, {"same": [], "new": []}
    steps = Steps(rank, len(get_position_ids(key_of(cu_seqlens(name, total, num_ranks, 0)))), options.layers)
    for seed in range(4):  # compiles kernels
        steps.run(lambda seed=seed: key_of(cu_seqlens(name, total, num_ranks, 1_000_000 + seed)))
    for turn in range(options.turns):
        for way in ("same", "new") if turn % 2 == 0 else ("new", "same"):
            clear_cache()
            for at in range(options.steps + WARM_UP):
                lengths = cu_seqlens(name, total, num_ranks, turn * 1000 + at)
                if way == "same":
                    key = key_of(lengths)
                    steps.run(lambda key=key: key)
                    step_ms = steps.run(lambda key=key: key)
                else:
                    step_ms = steps.run(lambda lengths=lengths: key_of(lengths))
                if at >= WARM_UP:
                    found[way].append((step_ms, *steps.host_us))
    table = torch.tensor([found["same"], found["new"]], dtype=torch.float64, device="cuda")
    slowest = table[:, :, 0].contiguous()
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    rates = (slowest[0] / slowest).median(1).values.tolist()
    host = table[:, :, 1:].median(1).values.tolist()
    return [
        [name, tokens, num_ranks, way, f"{ms:.2f}", f"{rate:.3f}", *(f"{us:.0f}" for us in of_host)]
        for way, ms, rate, of_host in zip(found, slowest.median(1).values.tolist(), rates, host, strict=True)
    ]


def measure_keys(name: str, tokens: int, options: argparse.Namespace) -> list[list]:
    """The row of one kind of mask, of keys alone."""
    num_ranks, found = dist.get_world_size(), []
    x = torch.empty(tokens * num_ranks, 0)
    for seed in range(options.turns * options.steps + WARM_UP):
        lengths = cu_seqlens(name, tokens * num_ranks, num_ranks, seed)
        dist.barrier()
        begin = time.perf_counter()
        key = key_of(lengths)
        made = time.perf_counter()
        dispatch(x.requires_grad_(), key)
        found.append([1e6 * (at - begin) for at in (made, time.perf_counter())])
    return [[name, tokens, num_ranks, "keys", "", "", *(f"{us:.0f}" for us in np.median(found[WARM_UP:], axis=0)), ""]]


def main() -> None:
    """Measures on all ranks, and prints on the first."""
    parser = table_parser(__doc__)
    cases = [f"{name}:{tokens}" for tokens in (8192, 32768) for name in ("8", "64", "short")]
    parser.add_argument("--cases", nargs="*", default=cases, help="documents (a number, short):tokens a GPU")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--steps", type=int, default=16, help="that count, in a turn of a way")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--cpu", action="store_true", help="keys alone, without a GPU")
    options = parser.parse_args()
    join_ranks(options.cpu)
    rows = []
    for case in options.cases:
        name, tokens = case.split(":")
        rows += (measure_keys if options.cpu else measure)(name, int(tokens), options)
        if dist.get_rank() == 0:
            for row in rows[-1 if options.cpu else -2 :]:
                print_row(HEADER, row)
            write_csv(options.csv, HEADER, rows)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
