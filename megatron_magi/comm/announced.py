"""A group_cast for a kernel that waits for rows itself, as they arrive."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from megatron_magi.comm.cast_args import GroupCastArgs
from megatron_magi.comm.group_collective import MOST_BYTES_OF_MANY, choose_mover
from megatron_magi.comm.impl.native import Native
from megatron_magi.comm.peers import MAX_RANKS
from megatron_magi.cuda.arriving import Arriving


def may_announce(num_ranks: int, most_recv: int, row_bytes: int, impl: str) -> bool:
    """Whether `announced_cast` can be meant for rows that travel, as far as that is known without a group.

    Args:
        num_ranks: of the group.
        most_recv: rows that any rank receives at most.
        row_bytes: of all tensors together.
        impl: as there.
    """
    if impl not in ("auto", "native") or not 2 <= num_ranks <= MAX_RANKS:
        return False
    return impl == "native" or num_ranks == 2 or most_recv * row_bytes <= MOST_BYTES_OF_MANY


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
