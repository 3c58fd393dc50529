"""Plans may be kept longer than the groups that they were used with."""

from __future__ import annotations

import gc
import weakref

import torch
import torch.distributed as dist

from megatron_magi.attention import distributed_attention
from megatron_magi.config import MagiConfig
from megatron_magi.plan import make_plan
from tests.attention import cases as cs


def attend_and_end_the_group(rank: int, num_ranks: int) -> None:
    group = dist.new_group(list(range(num_ranks)))
    config = MagiConfig()
    plan = make_plan(cs.documents([64]), config, num_ranks).for_rank(rank)
    x = torch.zeros(plan.num_rows, 2, 8)
    distributed_attention(x, x, x, plan, group, config=config)
    alive = weakref.ref(group)
    dist.destroy_process_group(group)
    del group
    gc.collect()
    assert alive() is None and plan.runtime["calls"]
    again = dist.new_group(list(range(num_ranks)))
    distributed_attention(x, x, x, plan, again, config=config)


def test_a_plan_that_is_kept_keeps_no_group_alive_and_serves_the_next(ranks) -> None:
    ranks(2, attend_and_end_the_group)
