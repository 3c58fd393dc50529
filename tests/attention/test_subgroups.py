"""Groups of ranks whose size changes from microbatch to microbatch: right values, nothing that grows, no hang."""

from __future__ import annotations

import gc
import os
import re
import threading
import time
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

from megatron_magi import api
from megatron_magi.attention import distributed_attention
from megatron_magi.comm import collective_checks, timeouts
from megatron_magi.comm.store_channel import StoreChannel
from megatron_magi.config import AttendConfig, DispatchConfig, MagiConfig
from megatron_magi.mask import builders
from megatron_magi.mask.dense import dense_mask
from megatron_magi.plan import make_plan
from tests import forced
from tests.comm.test_collective_checks import be_quick, outcome
from tests.dense_attention import dense_attention

HEADS, DIM, SIZES = (4, 2, 2), 8, (1, 2, 4)
LENGTHS = {1: ([5, 3], [8]), 2: ([16, 24], [1, 31, 8]), 4: ([96], [40, 56])}
"""Documents of microbatches, by the number of ranks that compute them."""
LAYOUTS = (None, "zigzag", "contiguous")


def groups_of(num_ranks: int, timeout_s: float = 60.0) -> dict[int, dist.ProcessGroup]:
    """By size, this rank's group of neighbours."""
    made = {}
    for size in SIZES:
        if size <= num_ranks:
            starts = range(0, num_ranks, size)
            ranks = [list(range(start, start + size)) for start in starts]
            made[size], _ = dist.new_subgroups_by_enumeration(ranks, timeout=timedelta(seconds=timeout_s))
    return made


def step(group: dist.ProcessGroup, lengths: list[int], layout: str | None, seed: int) -> None:
    """A forward and a backward of packed documents on a group, against dense attention."""
    bounds = np.append(0, np.cumsum(lengths)).tolist()
    key = api.magi_attn_varlen_key(bounds, bounds, causal=True, cp_group_or_mesh=group, layout=layout)
    draw = torch.Generator().manual_seed(seed)
    *x, weight = (torch.randn(bounds[-1], n, DIM, generator=draw, dtype=forced.DTYPE) for n in (*HEADS, HEADS[0]))
    whole = [t.requires_grad_() for t in x]
    expected = dense_attention(*whole, dense_mask(builders.varlen(bounds)))[0]
    grads = torch.autograd.grad(expected, whole, weight)
    rows = api.get_position_ids(key)
    real = rows < bounds[-1]  # padding rows see nothing
    rows = rows.clamp(max=bounds[-1] - 1)
    local = [t.detach()[rows].requires_grad_() for t in x]
    out, _ = api.calc_attn(*local, key)
    out.backward(weight[rows] * real[:, None, None])
    torch.testing.assert_close(out[real], expected[rows][real])
    for t, grad in zip(local, grads, strict=True):
        torch.testing.assert_close(t.grad[real], grad[rows][real])


def handles() -> dict[str, int]:
    """What a process holds: threads, open files, tensors, entries of the job's store."""
    gc.collect()
    return {
        "threads": threading.active_count(),
        "files": len(os.listdir("/proc/self/fd")),
        "tensors": sum(issubclass(type(x), torch.Tensor) for x in gc.get_objects()),
        "plans": len(api.functions._RUNTIMES),
    }


def alternate(rank: int, num_ranks: int) -> None:
    """Rounds of microbatches on groups of 1, 2 and 4 ranks, of which those of equal size run at their own pace."""
    groups, votes, held = groups_of(num_ranks), [], []
    counted = StoreChannel.vote

    def vote(self, call, digest):
        votes.append(call)
        return counted(self, call, digest)

    StoreChannel.vote = vote
    for turn in range(3):
        votes.clear()
        for number, size in enumerate((1, 4, 2, 1, 2, 4)):
            lengths = LENGTHS[size][(rank // size + number) % 2]
            for seed in range(1 + rank // size % 2):  # a group may compute more microbatches than its neighbours
                step(groups[size], lengths, LAYOUTS[number % 3], seed)
        dist.barrier()
        held.append(handles())
        if turn > 1:
            assert not votes, "calls that follow each other as before are not compared"
    assert held[1] == held[2]
    assert len(collective_checks._logs) == 2, "of the groups of several ranks"


def test_groups_of_1_2_and_4_ranks_alternate_without_new_costs(ranks) -> None:
    ranks(4, alternate)


def make_and_destroy(rank: int, num_ranks: int) -> None:
    """Groups that exist for one microbatch only leave nothing behind."""
    held = []
    be_quick()
    for turn in range(5):
        made, _ = dist.new_subgroups_by_enumeration([[0, 1], [2, 3]] if turn % 2 else [[0, 1, 2, 3]])
        step(made, [40], "zigzag", turn)
        dist.barrier()
        dist.destroy_process_group(made)
        del made
        time.sleep(3 * timeouts.LOOK_S)  # the thread of the group that went before it ends by itself
        held.append(handles())
    for name in held[0]:
        assert held[-1][name] <= max(some[name] for some in held[:3]), (name, held)


def test_groups_that_come_and_go_leave_nothing_behind(ranks) -> None:
    ranks(4, make_and_destroy)


def wrong_size(rank: int, num_ranks: int) -> str:
    """Rank 1 takes the plan of all ranks for the pair."""
    be_quick()
    pair = groups_of(num_ranks, 10.0)[2]
    config = MagiConfig(DispatchConfig(), attend=AttendConfig(impl=forced.impl("torch")))
    plans = {size: make_plan(builders.causal(64), config, size) for size in (2, 4)}

    def call(size: int) -> None:
        plan = plans[size].for_rank(rank % size)
        q, k, v = (torch.ones(plan.num_rows, n, DIM) for n in HEADS)
        distributed_attention(q, k, v, plan, pair, config=config)

    call(2)
    return outcome(call, size=4 if rank == 1 else 2)[0]


def test_a_plan_for_another_number_of_ranks_is_one_message_in_its_group(ranks) -> None:
    first, second, *others = ranks(4, wrong_size)
    assert "rank 1 of the group" in first and "plan" in first, first
    assert second == "ValueError: group: this process is rank 1 of 2, the plan is for rank 1 of 4"
    assert others == ["no error"] * 2


def wrong_order(rank: int, num_ranks: int) -> tuple[str, float]:
    """Rank 1 begins with the microbatch of all ranks, the others with those of pairs."""
    be_quick()
    groups = groups_of(num_ranks, 6.0)
    for size in (2, 4):
        step(groups[size], LENGTHS[size][0], "zigzag", 0)

    def both() -> None:
        for size in (4, 2) if rank == 1 else (2, 4):
            step(groups[size], LENGTHS[size][1], "zigzag", 0)

    return outcome(both)


def test_groups_in_another_order_on_one_rank_end_in_messages(ranks) -> None:
    for message, seconds in ranks(4, wrong_order):
        assert seconds < 30
        assert re.search(r"^RuntimeError: plan: rank [01] of the group .* did not (arrive|take part)", message), message
