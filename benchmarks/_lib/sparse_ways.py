"""Patterns of lists over ranks, whose keys are gathered or fetched as far as lists name them.

A list names ``density`` percent of the keys:

- ``near``: blocks of 128 queries, the blocks of 128 keys around their own;
- ``shared``: the same, each query the same blocks, at random;
- ``random``: blocks at random for each block of queries and key head: together nearly all;
- ``keys``: up to 2,048 single keys for each query, of ``density`` percent that are the same for all.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megatron_magi.plan.sparse_ways import SparseShape

PATTERNS = ("near", "shared", "random", "keys")
KEYS = (32768, 131072, 524288)
DENSITIES = (1, 2, 5, 10, 25, 50)
BLOCK, MOST_KEYS = 128, 2048


class Case(NamedTuple):
    """A pattern over keys that all ranks hold equal numbers of."""

    pattern: str
    num_keys: int
    density: float

    @property
    def is_single(self) -> bool:
        """Lists are of single keys."""
        return self.pattern == "keys"


def lists_of(case: Case, positions: Tensor, heads_kv: int) -> Tensor:
    """Lists of the queries at ``positions``, ascending; random ones from the same seed on all ranks."""
    device = positions.device
    generator = torch.Generator(device).manual_seed(0)
    if case.is_single:
        chosen = torch.randperm(case.num_keys, generator=generator, device=device)
        chosen = chosen[: max(1, round(case.num_keys * case.density / 100))].sort().values.int()
        at = torch.arange(min(MOST_KEYS, len(chosen)), device=device) + positions[:, None] * MOST_KEYS
        return chosen[at % len(chosen)][:, None]
    blocks, own = case.num_keys // BLOCK, positions[::BLOCK] // BLOCK
    width = max(1, round(blocks * case.density / 100))
    if case.pattern == "near":
        first = (own - width // 2).clamp(0, blocks - width)
        return (first[:, None] + torch.arange(width, device=device))[None].int()
    if case.pattern == "shared":
        chosen = torch.randperm(blocks, generator=generator, device=device)[:width].sort().values
        return chosen.expand(1, len(own), -1).int().contiguous()
    scores = torch.rand((heads_kv, len(own), blocks), generator=generator, device=device)
    return scores.topk(width).indices.sort(-1).values.int()


def shape_of(case: Case, num_ranks: int, capacity: int, row_bytes: int, lists: Tensor) -> SparseShape:
    """What a prediction needs: ``capacity`` rows from each other rank, of ``row_bytes``; ``lists``: of one rank."""
    own = case.num_keys // num_ranks
    return SparseShape(
        num_ranks, case.num_keys, own, capacity, row_bytes, lists.shape[1 if case.is_single else 0], lists.nbytes,
        not case.is_single,
    )  # fmt: skip
