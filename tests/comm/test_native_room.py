"""Native calls of several groups and NCCL's, on several streams: those that wait leave room for those they wait for."""

from __future__ import annotations

from collections import deque
from datetime import timedelta
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_magi.comm.group_collective import group_cast
from megatron_magi.comm.impl import native
from megatron_magi.testing.spawn import run_ranks
from tests.comm.random_transfers import Transfers

NUM_GROUPS, NUM_COMMUNICATORS, NUM_STREAMS = 4, 2, 4
IN_FLIGHT = 12
ROWS, WIDTH = 1024, 1024
LATEST_CYCLES = 1_000_000
"""Of the clock: about half a millisecond."""


def call_beside_each_other(rank, num_ranks, num_calls, timeout_s):
    """Wrong values of many calls, of which each rank comes late to others."""
    everyone, timeout = list(range(num_ranks)), timedelta(seconds=timeout_s)
    groups = [dist.new_group(everyone, timeout=timeout) for _ in range(NUM_GROUPS + NUM_COMMUNICATORS)]
    streams = [torch.cuda.Stream() for _ in range(NUM_STREAMS)]
    rows = [[np.arange(ROWS * (i != j)) for j in everyone] for i in everyone]
    args = Transfers([ROWS] * num_ranks, rows, [None] * num_ranks).args(rank, "cuda")
    x = torch.full((ROWS, WIDTH), float(rank), device="cuda")
    packed, splits = x.repeat(num_ranks - 1, 1), [ROWS * (r != rank) for r in everyone]
    expected = torch.tensor([float(r) for r in everyone if r != rank], device="cuda").repeat_interleave(ROWS)
    for group in groups[NUM_GROUPS:]:
        dist.barrier(group)  # makes the communicator
    wrong, under_way = torch.zeros((), dtype=torch.int64, device="cuda"), deque()
    order, late = np.random.default_rng(0), np.random.default_rng(1 + rank)
    torch.cuda.synchronize()

    def begin(at):
        if at < NUM_GROUPS:
            handle = group_cast([x], args, groups[at], "native", kept=bool(order.integers(2)))
            return lambda: handle.wait()[0]
        received = torch.empty_like(packed)
        work = dist.all_to_all_single(received, packed, splits, splits, group=groups[at], async_op=True)
        return lambda: (work.wait(), received)[1]

    def end_oldest():
        stream, end = under_way.popleft()
        with torch.cuda.stream(stream):
            wrong.add_((end() != expected.unsqueeze(1)).sum())

    for _ in range(num_calls):
        stream = streams[order.integers(NUM_STREAMS)]
        with torch.cuda.stream(stream):
            torch.cuda._sleep(int(late.integers(LATEST_CYCLES)))
            under_way.append((stream, begin(order.integers(len(groups)))))
        if len(under_way) > IN_FLIGHT:
            end_oldest()
    while under_way:
        end_oldest()
    torch.cuda.synchronize()
    return int(wrong)


@pytest.mark.parametrize(
    "num_ranks",
    [pytest.param(n, marks=[pytest.mark.gpu, pytest.mark.sm90, pytest.mark.ranks(n)]) for n in (2, 4, 8)],
)
def test_groups_that_wait_beside_each_other_and_nccl_do_not_keep_each_other_from_running(num_ranks):
    assert run_ranks(call_beside_each_other, num_ranks, 600, 10, backend="nccl", timeout_s=60) == [0] * num_ranks


@pytest.mark.parametrize("captured", [False, True])
def test_who_decides_on_a_group_knows_the_others_of_the_gpu_and_whether_graphs_hold_their_calls(monkeypatch, captured):
    others, told = [SimpleNamespace(is_captured=lambda held=held: held) for held in (False, captured)], []
    monkeypatch.setattr(native, "_of_device", lambda _: others)
    monkeypatch.setattr(native, "Rendezvous", lambda group: None)
    monkeypatch.setattr(native, "refusal_of_host", lambda rendezvous, device, *rest: told.append(rest) or "no")
    assert native._decide(None, torch.device("cuda", 0)) == (None, "no") and told == [(2, captured)]
