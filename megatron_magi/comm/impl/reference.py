"""Exchange of rows by sends and receives, peer by peer: a simple reference for any backend."""

from __future__ import annotations

import torch.distributed as dist

from megatron_magi.comm.movement import RankRows


def exchange(send: RankRows, received: RankRows, group: dist.ProcessGroup | None) -> list[dist.Work]:
    """See `megatron_magi.comm.movement.Exchange`."""
    me = dist.get_rank(group)
    outgoing, incoming = (x.rows.split(x.splits) for x in (send, received))
    incoming[me].copy_(outgoing[me])
    ops = []
    for step in range(1, dist.get_world_size(group)):
        # Empty messages are sent too: NCCL needs every rank in a group's first batch.
        to, source = (me + step) % len(outgoing), (me - step) % len(incoming)
        ops.append(dist.P2POp(dist.isend, outgoing[to], group=group, group_peer=to))
        ops.append(dist.P2POp(dist.irecv, incoming[source], group=group, group_peer=source))
    return dist.batch_isend_irecv(ops)
