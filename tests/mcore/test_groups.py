"""Groups on which ranks compare what they read."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from megatron_magi.mcore.groups import make_agreement_group


def _beside_nccl(rank: int, num_ranks: int) -> list[tuple]:
    """For groups of neighbours, and for one that is everyone: backend, ranks, and the sum of what these send."""
    first, last = dist.new_group([0, 1]), dist.new_group([2, 3])
    alone = [dist.new_group([i]) for i in range(num_ranks)]
    found = []
    assert make_agreement_group(dist.group.WORLD) is dist.group.WORLD  # gloo is what it is compared on
    backend, dist.get_backend = dist.get_backend, lambda group: "nccl"  # a process of its own
    for group in (first if rank < 2 else last, dist.group.WORLD):
        made = make_agreement_group(group)
        value = torch.tensor(10**rank)
        dist.all_reduce(value, group=made)
        found.append((made is group, backend(made), dist.get_process_group_ranks(made), value.item()))
    assert make_agreement_group(alone[rank]) is None
    return found


@pytest.mark.ranks(4)
def test_ranks_of_a_group_on_gpus_compare_on_a_group_of_their_own_on_cpus(ranks) -> None:
    for rank, (own, world) in enumerate(ranks(4, _beside_nccl)):
        assert own == (False, "gloo", [0, 1] if rank < 2 else [2, 3], 11 if rank < 2 else 1100)
        assert world == (False, "gloo", [0, 1, 2, 3], 1111)
