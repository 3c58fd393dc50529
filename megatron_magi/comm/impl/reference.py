"""Exchange of rows by sends and receives, peer by peer: a simple reference for any backend."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist


def exchange(
    send: torch.Tensor,
    received: torch.Tensor,
    send_splits: Sequence[int],
    recv_splits: Sequence[int],
    group: dist.ProcessGroup | None,
) -> list[dist.Work]:
    """Starts sending ``send`` to, and filling ``received`` from, all ranks of ``group``.

    Args:
        send: uint8 ``[sum(send_splits), row_bytes]``, rows grouped by destination.
        received: uint8 ``[sum(recv_splits), row_bytes]``, rows grouped by source.

    Returns:
        The works to wait for; both tensors must live until then.
    """
    me = dist.get_rank(group)
    outgoing, incoming = send.split(list(send_splits)), received.split(list(recv_splits))
    incoming[me].copy_(outgoing[me])
    ops = []
    for step in range(1, dist.get_world_size(group)):
        # Empty messages are sent too: NCCL needs every rank in a group's first batch.
        to, source = (me + step) % len(outgoing), (me - step) % len(incoming)
        ops.append(dist.P2POp(dist.isend, outgoing[to], group=group, group_peer=to))
        ops.append(dist.P2POp(dist.irecv, incoming[source], group=group, group_peer=source))
    return dist.batch_isend_irecv(ops)
