"""What predictions of dispatches have in common: shapes, candidates, and results by case."""

from __future__ import annotations

import numpy as np

from benchmarks._lib.results import Row
from megatron_magi.config import CostModel, DispatchConfig, OverlapConfig
from megatron_magi.cost_model import Rates
from megatron_magi.mask import AttnMask
from megatron_magi.plan.chunks import ChunkedMask, chunk_bounds
from megatron_magi.plan.dispatch import candidates, predictions
from megatron_magi.plan.predict import Prediction

STAGED = {"46e085b", "47e72fa", "fabaca568645", "24fde2a13897"}
"""Commits of results in which stages were the default, not one launch."""


def overlap_of(num_heads_q: int, num_heads_kv: int, head_dim: int, commit: str = "") -> OverlapConfig:
    """The default choices, for attention of a shape; those of an earlier version."""
    cost = CostModel(num_heads_q=num_heads_q, num_heads_kv=num_heads_kv, head_dim=head_dim)
    return OverlapConfig(cost=cost, one_launch=commit not in STAGED)


OVERLAP = overlap_of(64, 8, 128)
HEADS_Q, HEADS_KV, HEAD_DIM = 32, 8, 128
COST = CostModel(num_heads_q=HEADS_Q, num_heads_kv=HEADS_KV, head_dim=HEAD_DIM)
OVERLAPS = {str(int(one)): OverlapConfig(cost=COST, one_launch=one) for one in (False, True)}
"""Of dispatches that are measured, by the column ``one_launch``."""
CASE = ("mask", "tokens_a_gpu", "ranks", "one_launch")


def predicted(
    mask: AttnMask, num_ranks: int, rates: Rates, overlap: OverlapConfig
) -> tuple[dict[str, np.ndarray], dict[str, Prediction]]:
    """Candidates and their predictions."""
    config = DispatchConfig(rates=rates)
    chunked = ChunkedMask(mask, chunk_bounds(mask.total_seqlen_q, num_ranks, config), num_ranks)
    found = candidates(chunked, config)
    return found, predictions(found, chunked, config, overlap)


def by_case(rows: list[Row]) -> dict[tuple[str, ...], list[Row]]:
    """Rows by what is the same for all dispatches, see `CASE`."""
    found: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(row[field] for field in CASE), []).append(row)
    return found
