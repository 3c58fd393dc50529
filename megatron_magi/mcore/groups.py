"""A process group on the CPU for the ranks that must agree on plans."""

from __future__ import annotations

import torch.distributed as dist


def make_agreement_group(cp_group: dist.ProcessGroup) -> dist.ProcessGroup | None:
    """The ranks of ``cp_group`` on gloo, so that comparing plans never waits for a device.

    Collective over all ranks: each makes the groups of all, in the same order.

    Returns:
        The group; None when there is a single context-parallel rank.
    """
    if cp_group.size() == 1:
        return None
    if dist.get_backend(cp_group) == "gloo":
        return cp_group
    mine = tuple(dist.get_process_group_ranks(cp_group))
    everyone: list[tuple[int, ...] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    result = None
    for ranks in sorted(set(everyone)):
        group = dist.new_group(list(ranks), backend="gloo")
        if ranks == mine:
            result = group
    return result
