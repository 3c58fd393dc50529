"""The soak itself, in short and without a GPU."""

from __future__ import annotations

import gc

import pytest
import torch

from benchmarks.soak import steps
from megatron_magi.config import MagiConfig, OverlapConfig
from megatron_magi.plan import RankPlan


def _soak(rank: int, num_ranks: int, overlap: OverlapConfig) -> tuple[list[list], int]:
    rows = list(steps.soak(torch.device("cpu"), 60, 32, num_workers=0, config=MagiConfig(overlap=overlap)))
    gc.collect()
    return rows, sum(type(x) is RankPlan for x in gc.get_objects())


@pytest.mark.parametrize("overlap", [OverlapConfig(), OverlapConfig(degree=2, one_launch=False)])
def test_of_all_masks_the_last_plans_alone_are_kept(ranks, overlap) -> None:
    for rank, (rows, num_plans) in enumerate(ranks(2, _soak, overlap)):
        assert [row[:2] for row in rows] == [[rank, step] for step in (1, *range(6, 61, 6))]
        assert num_plans <= 2


def test_growth_after_the_first_look_is_told() -> None:
    flat = [[0, step, "5.0", "8.0", "100.0", "70.0", "1"] for step in (100, 5000, 10000)]
    assert steps.growth(flat) == []
    leaks = [[1, step, "5.0", "8.0", f"{100 + step / 200:.1f}", "0.0", "1"] for step in (100, 5000, 10000)]
    assert steps.growth([*flat, *leaks]) == ["rank 1: host_mib grew by 49.5"]
