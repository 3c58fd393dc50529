"""The sparse backward ends on as few SMs as it gets: no thread block waits for one that has none."""

from __future__ import annotations

import time

import pytest
import torch

from megatron_magi.backends.sm90 import sparse as sparse_hopper
from megatron_magi.backends.sm90 import tuning
from megatron_magi.backends.sm90.support import sm_count
from megatron_magi.operands.sparse_pattern import SparsePattern
from tests.backends.sm90.hold_sms import sms_taken
from tests.backends.sm90.sparse_cases import Case, make_case
from tests.gpu_memory import needs_gigabytes

pytestmark = [pytest.mark.gpu, pytest.mark.sm90]

MOST_SECONDS = 60
"""Of a launch that takes tens of milliseconds: processes that share the GPU have it by turns."""


def case_of_cut_lists(k_block: int, heads: tuple[int, int]) -> Case:
    """For each key head as many lists of queries as there are SMs, all cut into four parts."""
    keys, rows = k_block * sm_count(torch.device("cuda", torch.cuda.current_device())), 256
    mask = torch.ones(1, rows, keys // k_block, dtype=torch.bool, device="cuda")
    return make_case(SparsePattern((mask,), 1, k_block, False), rows, keys, heads)


@pytest.mark.parametrize("free", [1, 8])
@pytest.mark.parametrize(("k_block", "heads"), [(64, (128, 1)), (128, (128, 1)), (64, (96, 3))])
def test_parts_of_lists_wait_for_no_block_without_an_sm(monkeypatch, k_block, heads, free):
    needs_gigabytes(4)  # one such test at a time: each takes the GPU's SMs from the others
    x = case_of_cut_lists(k_block, heads)
    monkeypatch.setattr(tuning, "SPARSE_PART_BYTES", x.q.numel() // heads[1])  # a quarter of what a key head reads
    out, lse, _ = x.forward(sparse_hopper)
    inputs = x.backward_inputs(out, lse)

    def backward():
        return sparse_hopper.backward(inputs, x.pattern, x.scale, True)

    for _ in range(2):  # the second takes memory while the results of the first are there
        want = backward()
    torch.cuda.synchronize()
    done = torch.cuda.Event()
    with sms_taken(sm_count(x.q.device) - free):
        got = backward()
        done.record()
        until = time.monotonic() + MOST_SECONDS
        while not done.query() and time.monotonic() < until:
            time.sleep(0.01)
        in_time = done.query()
    torch.cuda.synchronize()
    assert in_time, f"not done in {MOST_SECONDS} s on {free} SMs"
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
