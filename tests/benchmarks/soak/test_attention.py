"""Many calls of attention with changing plans, sizes and schedules: every compared one is right, and memory is flat."""

from __future__ import annotations

import pytest
import torch

from benchmarks.soak import attention
from megatron_magi.testing.spawn import run_ranks


def few_calls(rank, num_ranks):
    attention.SIZES, attention.SAMPLES = (64, 32), 4
    return attention.check(rank, num_ranks, 40, ("staged", "one_launch"), "cpu")


def test_every_tenth_call_is_compared_and_memory_is_read():
    for found in run_ranks(few_calls, 2):
        assert found["wrong"] == 0 and found["compared"] == 4 and sum(found["made"].values()) == 40
        assert [number for number, *_ in found["memory"]] == list(range(0, 41, 10))


@pytest.mark.parametrize("which", range(4))
def test_a_row_that_is_another_calls_is_wrong(which):
    generator = torch.Generator().manual_seed(0)
    expected = [torch.randn(200, 2, 128, generator=generator) for _ in range(4)]
    found = [x.to(torch.bfloat16) for x in expected]
    assert not attention.wrong_rows(found, expected)
    found[which][7] = found[which][8]
    found[which][9, 0, 0] = float("nan")
    assert attention.wrong_rows(found, expected) == 2


@pytest.mark.parametrize(
    "num_ranks",
    [pytest.param(n, marks=[pytest.mark.gpu, pytest.mark.sm90, pytest.mark.ranks(n)]) for n in (2, 4)],
)
def test_six_hundred_calls_in_all_ways_on_gpus_are_right(num_ranks):
    for found in run_ranks(attention.check, num_ranks, 600, backend="nccl", timeout_s=180):
        assert (
            found["wrong"] == 0 and found["compared"] == 60 and min(found["made"][way] for way in attention.WAYS) > 150
        )
