"""Many collectives with changing tables and sizes: every checked one is right, and memory does not grow."""

from __future__ import annotations

import pytest

from benchmarks.soak import collectives
from megatron_magi.testing.spawn import run_ranks


def few_calls(rank, num_ranks):
    collectives.MOST_ROWS, collectives.SAMPLES = (30,), 4
    return collectives.check(rank, num_ranks, 20, "cpu", ("auto", "all_to_all"))


def test_every_tenth_call_is_checked_and_memory_is_read():
    for found in run_ranks(few_calls, 2):
        assert found["wrong"] == 0 and found["checked"] == 2
        assert [call for call, *_ in found["memory"]] == list(range(0, 21, 5))


def test_what_memory_grows_by_is_told_from_what_it_takes_at_first():
    flat = [(call, 10.0 + 90.0 * (call > 1), 0.0, 0.0, 0.0) for call in range(21)]
    leaking = [(call, 10.0 * call, 0.0, 0.0, 0.0) for call in range(21)]
    assert collectives.growth(flat, 1) == 0 and collectives.growth(leaking, 1) == 160


@pytest.mark.parametrize(
    "num_ranks",
    [pytest.param(n, marks=[pytest.mark.gpu, pytest.mark.sm90, pytest.mark.ranks(n)]) for n in (2, 4)],
)
def test_six_hundred_calls_on_gpus_are_right_and_memory_is_flat(num_ranks):
    for found in run_ranks(collectives.check, num_ranks, 600, backend="nccl", timeout_s=180):
        assert found["wrong"] == 0 and found["checked"] == 60
        assert collectives.growth(found["memory"], 1) <= 64 and collectives.growth(found["memory"], 3) <= 64
