"""Exchange of rows as one all-to-all-v."""

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

    Collective: every rank calls it, also one that sends and receives nothing.

    Args:
        send: uint8 ``[sum(send_splits), row_bytes]``, rows grouped by destination.
        received: uint8 ``[sum(recv_splits), row_bytes]``, rows grouped by source.

    Returns:
        The works to wait for; both tensors must live until then.
    """
    work = dist.all_to_all_single(received, send, list(recv_splits), list(send_splits), group=group, async_op=True)
    return [work]
