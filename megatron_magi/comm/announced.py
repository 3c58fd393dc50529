"""group_cast for a kernel that waits for rows itself, as they arrive, and group_reduce of what it makes of them.

Both are steps of a list of calls, prepared once and queued by `Native.queue`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from megatron_magi.comm.cast_args import GroupCastArgs
from megatron_magi.comm.group_collective import choose_mover
from megatron_magi.comm.impl.native import Native
from megatron_magi.comm.peers import MAX_RANKS
from megatron_magi.comm.row_memory import can_add
from megatron_magi.cuda.arriving import Arriving
from megatron_magi.cuda.call_list import Place, Step
from megatron_magi.cuda.layout import Like


def may_announce(num_ranks: int, impl: str) -> bool:
    """Whether `announced_cast` can be meant, as far as that is known without a group; arguments as there."""
    return impl in ("auto", "native") and 2 <= num_ranks <= MAX_RANKS


@torch.no_grad()
def announced_cast(
    tensors: Sequence[Like],
    args: GroupCastArgs,
    group: dist.ProcessGroup | None,
    impl: str,
    into: Sequence[Like],
    sources: Sequence[Place],
    places: tuple[Place, Place],
) -> tuple[Native, Arriving] | None:
    """What publishes and reads rows; None, on all ranks, where they travel otherwise. Collective.

    Args:
        tensors, args, group, impl: as in `megatron_magi.comm.group_collective.group_cast`.
        into, sources, places: as in `Native.arriving`.
    """
    mover, layout = choose_mover(tensors, args, group, impl)
    if not isinstance(mover, Native):
        return None
    return mover, mover.arriving(tensors, args, layout, into, sources, places)


@torch.no_grad()
def returned_sums(
    tensors: Sequence[Like],
    args: GroupCastArgs,
    group: dist.ProcessGroup | None,
    impl: str,
    into: Sequence[Like],
    sources: Sequence[Place],
    places: Sequence[Place],
) -> Step | None:
    """What sends partial rows back and adds those that come to ``into``; as `announced_cast`."""
    mover, layout = choose_mover(tensors, args, group, impl, back=True)
    if not isinstance(mover, Native) or not can_add(layout, into):
        return None
    return mover.adding(tensors, args, layout, into, sources, places)
