"""Many steps through the public functions with a new mask each: does memory stay flat?

    torchrun --nproc-per-node N -m benchmarks.soak.keys [--ways NAME ...] [--steps 10000] [--tokens 256] [--csv FILE]

A step makes the key of packed documents, of new lengths, and runs `calc_attn` forward and backward. Ways, one after the
other, each over as many steps:

- ``eager``: as plain callers do;
- ``stages``: likewise, with two remote stages instead of one launch;
- ``groups``: two keys over a group of all ranks that is made for the step and destroyed after it;
- ``groups_alone``: such a group without keys, by torch alone, which keeps an empty list for each;
- ``captured``: both passes are one CUDA graph, captured once with a static key (`make_static_key`) and replayed for
  each key; on GPUs.

Memory of the device (in use, and of torch's tensors) and of the process (without mapped files, whose pages come and
go) is read twenty times. What it grows by after the first fifth is a leak: caches hold `CACHED` items each, and are
full by then. Exits non-zero where any grows by more than `GROWN_MB`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

from benchmarks._lib.memory import all_caches, anonymous_mb, growth, memory_mb
from benchmarks._lib.provenance import print_row, table_parser, write_csv
from benchmarks._lib.ranks import join_ranks
from megatron_magi.api import DistAttnRuntimeKey as Key
from megatron_magi.api import calc_attn, magi_attn_varlen_key, make_static_key
from megatron_magi.api.static_key import StaticKey
from megatron_magi.config import MagiConfig, OverlapConfig

HEADS_Q, HEADS_KV, HEAD_DIM, DOCUMENTS = 4, 2, 64, 6
WAYS = ("eager", "stages", "groups", "groups_alone", "captured")
HEADER = ["way", "ranks", "rank", "step", "device_mb", "torch_mb", "host_mb", "seconds"]
SAMPLES, CACHED = 20, 32
GROWN_MB = {"device": 64, "torch": 4, "host": 8}
"""What memory may grow by: of the device, of torch's tensors there, of the process."""


class Soak:
    """Steps of one rank; equal arguments on all ranks.

    Args:
        device: of this rank.
        tokens: a rank.
    """

    def __init__(self, device: torch.device, tokens: int) -> None:
        self._total, self._rng = tokens * dist.get_world_size(), np.random.default_rng(0)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        heads = HEADS_Q, HEADS_KV, HEADS_KV, HEADS_Q
        *qkv, self._dout = (torch.randn(tokens, n, HEAD_DIM, device=device, dtype=dtype) for n in heads)
        self._leaves = [t.requires_grad_() for t in qkv]
        self._configs = {
            way: MagiConfig(overlap=OverlapConfig(degree=2 if way == "stages" else 1, one_launch=way != "stages"))
            for way in WAYS
        }
        self._static: tuple[StaticKey, torch.cuda.CUDAGraph] | None = None

    def step(self, way: str) -> None:
        """One step of a way."""
        if way.startswith("groups"):
            group = dist.new_group(timeout=timedelta(seconds=60))
            for _ in range(0 if way == "groups_alone" else 2):
                self._attend(self._key(way, group))
            dist.all_reduce(self._dout[0, 0], group=group)
            dist.destroy_process_group(group)
        elif way == "captured":
            self._replay(self._key(way, dist.group.WORLD))
        else:
            self._attend(self._key(way, dist.group.WORLD))

    def _key(self, way: str, group: dist.ProcessGroup | None) -> Key:
        cuts = self._rng.choice(np.arange(1, self._total), DOCUMENTS - 1, replace=False)
        lengths = torch.tensor([0, *np.sort(cuts).tolist(), self._total], device="cpu")
        return magi_attn_varlen_key(
            lengths, lengths, HEADS_Q, HEADS_KV, HEAD_DIM, causal=bool(self._rng.integers(2)), cp_group_or_mesh=group,
            dist_attn_config=self._configs[way],
        )  # fmt: skip

    def _attend(self, key: Key | StaticKey) -> None:
        torch.autograd.grad(calc_attn(*self._leaves, key)[0], self._leaves, self._dout)

    def _replay(self, key: Key) -> None:
        if self._static is None:
            static, stream = make_static_key(key, headroom=8.0), torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self._attend(static)
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self._attend(static)
            self._static = static, graph
        static, graph = self._static
        why = static.load(key)
        assert why is None, why
        graph.replay()


def samples(soak: Soak, way: str, num_steps: int, device: str) -> Iterator[tuple[int, float, float, float, float]]:
    """Steps done, MB of the device, of tensors and of the process, and seconds, `SAMPLES` times."""
    began = time.monotonic()
    for step in range(1, num_steps + 1):
        soak.step(way)
        if step % max(num_steps // SAMPLES, 1) == 0:
            of_device = memory_mb(device)[:2]
            yield step, *of_device, anonymous_mb(), time.monotonic() - began


def grown(rows: Sequence[tuple]) -> dict[str, float]:
    """MB by which memory of `samples` has grown, by the names of `GROWN_MB`."""
    return {name: growth(list(rows), 1 + i) for i, name in enumerate(GROWN_MB)}


def main() -> None:
    """In every rank."""
    parser = table_parser(__doc__)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS[:3]))
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--tokens", type=int, default=256, help="a rank")
    options = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    join_ranks(on_cpu=not on_gpu)
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    rank, num_ranks, rows, failed = dist.get_rank(), dist.get_world_size(), [], []
    for cache in all_caches():
        cache.max_items = min(CACHED, cache.max_items or CACHED)
    for way in options.ways:
        found = []
        for row in samples(Soak(device, options.tokens), way, options.steps, device.type):
            found.append(row)
            rows.append([way, num_ranks, rank, row[0], *(f"{x:.1f}" for x in row[1:])])
            if rank == 0:
                print_row(HEADER, rows[-1])
                write_csv(options.csv, HEADER, rows)
        failed += [f"{way}: {name} grew by {mb:.1f} MB" for name, mb in grown(found).items() if mb > GROWN_MB[name]]
    dist.destroy_process_group()
    sys.exit("\n".join(failed) or 0)


if __name__ == "__main__":
    main()
