"""Plans may be kept longer than the groups that they were used with, and be prepared with both levels."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.distributed as dist

from megatron_magi.attention import AttnShape, distributed_attention, prepare_batch
from megatron_magi.attention.collective_args import plan_casts
from megatron_magi.config import CommConfig, MagiConfig
from megatron_magi.plan import make_plan
from tests.attention import cases as cs


def attend_and_end_the_group(rank: int, num_ranks: int) -> None:
    group = dist.new_group(list(range(num_ranks)))
    config = MagiConfig()
    plan = make_plan(cs.documents([64]), config, num_ranks).for_rank(rank)
    x = torch.zeros(plan.num_rows, 2, 8)
    distributed_attention(x, x, x, plan, group, config=config)
    out, _ = distributed_attention(x.requires_grad_(), x, x, plan, group, config=config)
    alive = weakref.ref(group)
    dist.destroy_process_group(group)
    del group
    gc.collect()
    assert alive() is None and plan.runtime.calls
    with pytest.raises(RuntimeError, match="group: does not exist any more"):
        out.sum().backward()  # and not on the default group
    again = dist.new_group(list(range(num_ranks)))
    distributed_attention(x, x, x, plan, again, config=config)


def test_a_plan_that_is_kept_keeps_no_group_alive_and_serves_the_next(ranks) -> None:
    ranks(2, attend_and_end_the_group)


def test_a_prepared_batch_brings_the_tables_of_both_levels():
    config = MagiConfig(comm=CommConfig(ranks_per_node=2))
    plans = [make_plan(cs.documents([64, 30]), config, 4).for_rank(3) for _ in range(2)]
    batch = prepare_batch({0: plans[0]}, AttnShape(2, 2, 8, 8, torch.float32), config)
    batch.to("cpu")
    brought, made = (plan_casts(plan, torch.device("cpu")) for plan in plans)
    assert brought is batch.plans[0].runtime.casts[torch.device("cpu")] and len(made) == len(brought) > 0
    for a, b in zip(brought, made, strict=True):
        assert a.ranks_per_node == b.ranks_per_node == 2 and a.num_recv == b.num_recv
        for part in ("near", "far", "relay"):
            one, other = getattr(a, part), getattr(b, part)
            assert torch.equal(one.send_index, other.send_index) and one.recv_splits == other.recv_splits
            assert torch.equal(one.peers.fetch, other.peers.fetch)
        for name in ("near_rows", "relay_rows"):
            assert torch.equal(getattr(a, name), getattr(b, name))
        assert torch.equal(a.arrivals.sources, b.arrivals.sources)
