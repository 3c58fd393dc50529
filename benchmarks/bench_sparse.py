"""Sparse attention on one Hopper GPU: rates of the visible pairs, forward and backward, beside dense attention.

    python benchmarks/bench_sparse.py [--csv FILE] [--only PREFIX ...] [--max-tokens N] [--seconds S]

bf16, head_dim 128. A backward counts 2.5 times the products of its forward. Times are of whole calls, on a device whose
L2 cache was flushed, making lists of a mask included. ``uniform``: random masks of 128 x 128 (or 64) blocks, one a key
head, 64:8 heads. ``blocks`` and ``index``: one query of 128 heads and one key head for each 64 keys, which sees an
eighth of all keys (or ``top`` so many) at random, listed in rising order. ``dense``: `slice_attention` of everything,
64:8 heads.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from attention_timing import time_together
from provenance import write_csv
from torch import Tensor

from megatron_magi import slice_attention
from megatron_magi.mask import builders
from megatron_magi.ops.hopper.sparse_lists import lists_of_mask
from megatron_magi.ops.sparse_attention import block_sparse_attention, index_sparse_attention

HEADER = (
    "case", "queries", "keys", "heads", "q_block", "k_block", "keys_seen", "forward_ms", "forward_tflops",
    "backward_ms", "backward_tflops", "lists_us",
)  # fmt: skip
DENSITIES = (0.05, 0.1, 0.25, 0.5)
DIM = 128


@dataclass(frozen=True)
class Case:
    """What is timed: ``attend(q, k, v)`` returns ``(out, meta)``.

    Attributes:
        keys_seen: by a query, on average.
        mask: of blocks, where there is one.
    """

    name: str
    shape: tuple[int, int]
    heads: tuple[int, int]
    blocks: tuple[int, int]
    keys_seen: float
    attend: Callable
    mask: Tensor | None = None


def uniform(tokens: int, density: float, k_block: int) -> Case:
    shape = (8, tokens // 128, tokens // k_block)
    mask = torch.rand(shape, device="cuda") < density

    def attend(q, k, v):
        return block_sparse_attention(q, k, v, mask, q_block_size=128, k_block_size=k_block)

    seen = float(mask.float().mean()) * tokens
    return Case(f"uniform {density:.0%}", (tokens, tokens), (64, 8), (128, k_block), seen, attend, mask)


def listed_blocks(keys: int, k_block: int) -> Case:
    rows, topk = keys // 64, keys // 8 // k_block
    lists = torch.rand((1, rows, keys // k_block), device="cuda").argsort(-1)[..., :topk]
    lists = lists.sort(-1).values.int()

    def attend(q, k, v):
        return block_sparse_attention(q, k, v, lists, q_block_size=1, k_block_size=k_block)

    return Case("blocks", (rows, keys), (128, 1), (1, k_block), topk * k_block, attend)


def listed_keys(keys: int, topk: int | None) -> Case:
    rows, topk, name = keys // 64, topk or keys // 8, f"index top {topk}" if topk else "index"
    stretch = keys // topk  # one key of each
    first = stretch * torch.arange(topk, device="cuda", dtype=torch.int32)
    indices = first + torch.randint(0, stretch, (rows, 1, topk), device="cuda", dtype=torch.int32)

    def attend(q, k, v):
        return index_sparse_attention(q, k, v, indices)

    return Case(name, (rows, keys), (128, 1), (1, 1), topk, attend)


def dense(tokens: int) -> Case:
    mask = builders.full(tokens)

    def attend(q, k, v):
        return slice_attention(q, k, v, mask)

    return Case("dense", (tokens, tokens), (64, 8), (0, 0), tokens, attend)


def cases(only: list[str], most: int) -> Iterator[Case]:
    """Cases whose name begins with one of ``only``, of at most so many keys, each made when it is its turn."""
    makers: list[tuple[str, int, Callable[[], Case]]] = []
    for tokens in (8192, 32768, 131072):
        makers.append(("dense", tokens, partial(dense, tokens)))
        makers += [
            (f"uniform {density:.0%} {k_block}", tokens, partial(uniform, tokens, density, k_block))
            for density, k_block in itertools.product(DENSITIES, (128, 64))
        ]
    for keys in (32768, 65536, 131072, 262144, 524288):
        makers += [(f"blocks {k_block}", keys, partial(listed_blocks, keys, k_block)) for k_block in (128, 64)]
        makers += [(f"index top {topk}", keys, partial(listed_keys, keys, topk)) for topk in (512, 2048)]
        makers.append(("index eighth", keys, partial(listed_keys, keys, None)))
    for name, keys, make in makers:
        if keys <= most and (not only or any(name.startswith(prefix) for prefix in only)):
            yield make()


def measure(case: Case, seconds: float) -> list:
    """A row of the table; what failed is its error."""

    def draw(tokens: int, heads: int) -> Tensor:
        return torch.randn((tokens, heads, DIM), device="cuda", dtype=torch.bfloat16).requires_grad_()

    q, k, v = draw(case.shape[0], case.heads[0]), *(draw(case.shape[1], case.heads[1]) for _ in range(2))
    frozen = [t.detach() for t in (q, k, v)]
    calls: dict[str, Callable[[], object]] = {"forward": lambda: case.attend(*frozen)}
    out, _ = case.attend(q, k, v)
    dout = torch.randn_like(out)
    calls["backward"] = lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
    if case.mask is not None:
        calls["lists"] = lambda: lists_of_mask(case.mask)
    times, _ = time_together(calls, seconds)
    flops = 4 * case.shape[0] * case.keys_seen * case.heads[0] * DIM
    row: list = [case.name, *case.shape, "{}:{}".format(*case.heads), *case.blocks, round(case.keys_seen, 1)]
    for name, factor in (("forward", 1.0), ("backward", 2.5)):
        ms = times.get(name, "")
        row += [f"{ms:.4f}", round(factor * flops / ms / 1e9)] if isinstance(ms, float) else [ms, ""]
    lists = times.get("lists", "")
    return [*row, f"{1e3 * lists:.1f}" if isinstance(lists, float) else lists]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", help="file to write; it is written anew after each case")
    parser.add_argument("--only", nargs="*", default=[], help="beginnings of names, as 'uniform 25%% 128', 'blocks 64'")
    parser.add_argument("--max-tokens", type=int, default=524288)
    parser.add_argument("--seconds", type=float, default=0.3, help="of a case")
    args = parser.parse_args()
    torch.manual_seed(0)
    rows = []
    print(*HEADER, sep=",")
    for case in cases(args.only, args.max_tokens):
        rows.append(measure(case, args.seconds))
        print(*rows[-1], sep=",", flush=True)
        if args.csv:
            write_csv(args.csv, HEADER, rows)


if __name__ == "__main__":
    main()
