"""Many steps through the public functions: each way runs, and growing memory is told."""

from __future__ import annotations

import torch

from benchmarks.soak import keys
from megatron_magi.testing.spawn import run_ranks


def few_steps(_rank, _num_ranks):
    keys.SAMPLES = 4
    soak = keys.Soak(torch.device("cpu"), tokens=32)
    return {way: list(keys.samples(soak, way, 8, "cpu")) for way in ("eager", "stages", "groups")}


def test_memory_is_read_in_each_way():
    for found in run_ranks(few_steps, 2):
        for rows in found.values():
            assert [row[0] for row in rows] == [2, 4, 6, 8]
            assert keys.grown(rows)["host"] < 100


def test_growth_is_that_since_the_first_fifth():
    rows = [(step, 7.0, 3.0, 500.0 + 10 * step, 0.0) for step in range(20)]
    assert keys.grown(rows) == {"device": 0, "torch": 0, "host": 150}
