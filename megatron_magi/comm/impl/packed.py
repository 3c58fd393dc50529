"""Moves rows as bytes: packed by destination into one buffer, exchanged, and reordered on arrival."""

from __future__ import annotations

import weakref
from types import ModuleType

import torch
import torch.distributed as dist

from megatron_magi.comm.movement import Exchange, FlatRows, Into, RankRows, Started


class Packed:
    """A `PlacingMover` over an exchange of bytes.

    Args:
        exchange: of bytes; None for one rank, where rows stay.
        ops: the row operations, see `megatron_magi.comm.rows`.
        group: the ranks.
    """

    def __init__(self, exchange: Exchange | None, ops: ModuleType, group: dist.ProcessGroup | None) -> None:
        self._exchange, self._ops = exchange, ops
        group = dist.group.WORLD if group is None else group
        # A weak reference: arguments of plans refer to this object, and plans may outlive groups.
        self._group = None if group is None else weakref.ref(group)

    def cast(self, rows: FlatRows, into: Into | None = None) -> Started:
        """See `megatron_magi.comm.movement.PlacingMover`."""
        tensors, args, layout, _ = rows
        ops, order = self._ops, args.recv_order
        send = layout.new_buffer(args.num_send, tensors[0].device)
        ops.pack_rows(tensors, args.send_index, layout, send)
        works, received = self._start(send, args.send_splits, args.recv_splits)

        def finish() -> list[torch.Tensor]:
            found = ops.unpack_rows(received, order, layout)
            if into is None:
                return found
            for x, whole in zip(found, into[0], strict=True):
                whole.index_copy_(0, into[1], x)
            return list(into[0])

        return Started(works, (send, received), finish)

    def give_back(
        self, rows: FlatRows, index: torch.Tensor | None = None, received: torch.Tensor | None = None
    ) -> Started:
        """See `megatron_magi.comm.movement.PlacingMover`."""
        tensors, args, layout, _ = rows
        send = layout.new_buffer(args.num_recv, tensors[0].device)
        self._ops.pack_rows(tensors, args.recv_position if index is None else index, layout, send)
        works, result = self._start(send, args.recv_splits, args.send_splits, received)
        return Started(works, (send, result), lambda: result)

    def _start(
        self,
        send: torch.Tensor,
        send_splits: tuple[int, ...],
        recv_splits: tuple[int, ...],
        received: torch.Tensor | None = None,
    ) -> tuple[list[dist.Work], torch.Tensor]:
        if self._exchange is None or self._group is None:
            return [], send if received is None else received.copy_(send)
        if received is None:
            received = torch.empty(sum(recv_splits), send.shape[1], dtype=torch.uint8, device=send.device)
        sent, arriving = RankRows(send, list(send_splits)), RankRows(received, list(recv_splits))
        return self._exchange(sent, arriving, self._group()), received
