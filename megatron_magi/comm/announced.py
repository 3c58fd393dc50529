"""A group_cast for a kernel that waits for rows itself, as they arrive."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from megatron_magi.comm.cast_args import GroupCastArgs
from megatron_magi.comm.group_collective import choose_mover
from megatron_magi.comm.impl.native import Native
from megatron_magi.comm.peers import MAX_RANKS
from megatron_magi.cuda.arriving import Arriving


def may_announce(num_ranks: int, impl: str) -> bool:
    """Whether `announced_cast` can be meant, as far as that is known without a group; arguments as there."""
    return impl in ("auto", "native") and 2 <= num_ranks <= MAX_RANKS


@torch.no_grad()
def announced_cast(
    tensors: Sequence[torch.Tensor], args: GroupCastArgs, group: dist.ProcessGroup | None, impl: str
) -> Arriving | None:
    """Publishes rows, to be read when the kernel that waits for them is queued; None where they travel otherwise.

    Collective, and the same on all ranks.

    Args:
        tensors, args, group, impl: as in `megatron_magi.comm.group_collective.group_cast`.
    """
    mover, layout = choose_mover(tensors, args, group, impl)
    return mover.announce(tensors, args, layout) if isinstance(mover, Native) else None
