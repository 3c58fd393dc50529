"""Exchange of rows as one all-to-all-v."""

from __future__ import annotations

import torch.distributed as dist

from megatron_magi.comm.movement import RankRows


def exchange(send: RankRows, received: RankRows, group: dist.ProcessGroup | None) -> list[dist.Work]:
    """See `megatron_magi.comm.movement.Exchange`."""
    work = dist.all_to_all_single(received.rows, send.rows, received.splits, send.splits, group=group, async_op=True)
    return [work]
