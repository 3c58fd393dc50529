"""A process group on the CPU for the ranks that must read and plan the same."""

from __future__ import annotations

import torch.distributed as dist


def make_agreement_group(group: dist.ProcessGroup) -> dist.ProcessGroup | None:
    """The ranks of ``group`` on gloo, so that comparing never waits for a device.

    Collective over all ranks: each makes the groups of all, in the same order.

    Returns:
        The group; None when it has a single rank.
    """
    if group.size() == 1:
        return None
    if dist.get_backend(group) == "gloo":
        return group
    mine = tuple(dist.get_process_group_ranks(group))
    everyone: list[tuple[int, ...] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    result = None
    for ranks in sorted(set(everyone)):
        made = dist.new_group(list(ranks), backend="gloo")
        if ranks == mine:
            result = made
    return result
