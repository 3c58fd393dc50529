"""Sparse attention over several ranks: the keys of all ranks gathered, and those fetched that lists name.

    torchrun --nproc-per-node N -m benchmarks.distributed.bench_sparse [--csv FILE] [--keys N ...] [--densities P ...]
        [--patterns NAME ...] [--turns N] [--cpu]

Whole calls of `calc_block_sparse_attn` and `calc_index_sparse_attn`, forward and backward, with the ways in turns;
medians over the turns of the slowest rank's time. bf16, head_dim 128, zigzag. Patterns: those of
`benchmarks._lib.sparse_ways`, blocks with 64:8 heads, single keys with 128:1.

``share``: the largest share of a rank's keys that lists of another name, which is the capacity of ``selected``;
``bounded``: with half more capacity. ``all``: gathered. ``row_mb``: rows of keys and values that a rank receives in the
forward; ``predicted_us``: what the rates say that keys take in both passes; the default takes the least.

With ``--cpu`` over gloo, in fp32 with head_dim 16 and few heads: only to see that it runs.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks._lib.provenance import print_row, write_csv
from benchmarks._lib.ranks import join_ranks
from benchmarks._lib.sparse_ways import BLOCK, DENSITIES, KEYS, PATTERNS, Case, lists_of, shape_of
from megatron_magi import api
from megatron_magi.calibration import present_rates
from megatron_magi.plan.sparse_ways import ways_us

HEADER = (
    "pattern", "keys", "ranks", "density", "share", "way", "forward_ms", "backward_ms", "row_mb", "predicted_us",
)  # fmt: skip


class Setting(NamedTuple):
    """What a machine is measured with: device, dtype, head dim, query and key heads of blocks and of single keys."""

    device: torch.device
    dtype: torch.dtype
    dim: int
    block_heads: tuple[int, int]
    key_heads: tuple[int, int]

    @classmethod
    def of(cls, on_cpu: bool) -> Setting:
        """On CPUs small."""
        if on_cpu:
            return cls(torch.device("cpu"), torch.float32, 16, (2, 1), (2, 1))
        return cls(torch.device("cuda", torch.cuda.current_device()), torch.bfloat16, 128, (64, 8), (128, 1))


class Calls:
    """The calls of a case on this rank."""

    def __init__(self, case: Case, setting: Setting) -> None:
        bounds = [0, case.num_keys]
        self.key = api.magi_attn_varlen_key(bounds, bounds, cp_group_or_mesh=dist.group.WORLD, layout="zigzag")
        self.case, self.is_single = case, case.pattern == "keys"
        self.heads = setting.key_heads if self.is_single else setting.block_heads
        positions = api.get_position_ids(self.key)
        self.lists = lists_of(case, positions.to(setting.device), self.heads[1])
        generator = torch.Generator(setting.device).manual_seed(dist.get_rank())
        rows = len(positions)
        shape = {"device": setting.device, "dtype": setting.dtype, "generator": generator}
        self.qkv = [
            torch.randn((rows, heads, setting.dim), **shape).requires_grad_()
            for heads in (self.heads[0], self.heads[1], self.heads[1])
        ]
        self.sizes = {} if self.is_single else {"q_block_size": BLOCK, "k_block_size": BLOCK}
        self.share = api.selected_key_share(self.lists, self.key, num_heads_kv=self.heads[1], **self.sizes)

    def ways(self) -> dict[str, dict]:
        """Options of the ways that are compared."""
        capacity = max(self.share, 1e-6)
        bounded = {"fetch": "selected", "capacity": min(1.0, 1.5 * capacity)}
        return {"all": {"fetch": "all"}, "selected": {"fetch": "selected", "capacity": capacity}, "bounded": bounded}

    def attend(self, options: dict) -> Tensor:
        """The output of one way."""
        attend = api.calc_index_sparse_attn if self.is_single else api.calc_block_sparse_attn
        return attend(*self.qkv, self.lists, self.key, **self.sizes, **options)[0]

    def rows(self, options: dict) -> int:
        """Rows of keys that a rank receives."""
        num_ranks = dist.get_world_size()
        own = self.case.num_keys // num_ranks
        return (num_ranks - 1) * (own if options["fetch"] == "all" else max(1, math.ceil(options["capacity"] * own)))

    def predicted_us(self, options: dict) -> float:
        """Of both passes, by the rates of the GPU that is there."""
        num_ranks, k = dist.get_world_size(), self.qkv[1]
        rows, row_bytes = self.rows(options) // (num_ranks - 1), 2 * k.shape[1] * k.shape[2] * k.element_size()
        found = ways_us(shape_of(self.case, num_ranks, rows, row_bytes, self.lists), present_rates())
        return found.all_keys if options["fetch"] == "all" else found.selected


def timed_ms(call: Callable[[], object], device: torch.device) -> float:
    """Milliseconds on an idle device, all ranks beginning together."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    wait()
    dist.barrier()
    wait()
    begin = time.perf_counter()
    call()
    wait()
    return 1e3 * (time.perf_counter() - begin)


def measure(case: Case, setting: Setting, turns: int) -> list[list]:
    """Rows of the table, the same on all ranks."""
    calls = Calls(case, setting)
    ways = calls.ways()
    outs = {name: calls.attend(options) for name, options in ways.items()}
    for name, out in outs.items():  # and what is made in the first call is made
        torch.testing.assert_close(out, outs["all"], msg=lambda text, name=name: f"{name}: {text}")
    dout = torch.randn_like(outs["all"])
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for turn in range(turns + 1):
        for name in [*ways][:: 1 if turn % 2 else -1]:
            kept: list[Tensor] = []
            forward = timed_ms(lambda name=name, kept=kept: kept.append(calls.attend(ways[name])), setting.device)
            backward = timed_ms(lambda kept=kept: torch.autograd.grad(kept[0], calls.qkv, dout), setting.device)
            if turn:  # the first backwards compile
                found[name].append((forward, backward))
    table = torch.tensor(list(found.values()), dtype=torch.float64, device=setting.device)
    dist.all_reduce(table, op=dist.ReduceOp.MAX)
    row_bytes = sum(x.shape[1] * x.shape[2] * x.element_size() for x in calls.qkv[1:])
    return [
        [case.pattern, case.num_keys, dist.get_world_size(), f"{case.density:g}", f"{calls.share:.4f}", name]
        + [f"{statistics.median(times):.3f}" for times in zip(*of_way, strict=True)]
        + [f"{calls.rows(ways[name]) * row_bytes / 1e6:.3f}", f"{calls.predicted_us(ways[name]):.0f}"]
        for name, of_way in zip(ways, table.tolist(), strict=True)
    ]


def main() -> None:
    """Measures on all ranks, and prints on the first."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", help="also write the rows to this file, anew after each case")
    parser.add_argument("--keys", nargs="*", type=int, default=KEYS, help="of the sequence")
    parser.add_argument("--densities", nargs="*", type=float, default=DENSITIES, help="percent")
    parser.add_argument("--patterns", nargs="*", default=PATTERNS, choices=PATTERNS)
    parser.add_argument("--turns", type=int, default=10, help="that count")
    parser.add_argument("--cpu", action="store_true", help="over gloo, small")
    options = parser.parse_args()
    join_ranks(options.cpu)
    setting, rows = Setting.of(options.cpu), []
    for num_keys in options.keys:
        for pattern in options.patterns:
            for density in options.densities:
                made = measure(Case(pattern, num_keys, density), setting, options.turns)
                rows += made
                api.clear_cache()
                if dist.get_rank() == 0:
                    for row in made:
                        print_row(HEADER, row)
                    write_csv(options.csv, HEADER, rows)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
