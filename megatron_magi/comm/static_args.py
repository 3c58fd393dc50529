"""Arguments of collectives whose tables are at fixed addresses and change in place, for captured launches.

For ranks that can access each other's memory: their kernels also read the numbers of rows from tables
(`megatron_magi.comm.impl.native`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from megatron_magi.comm.cast_args import GroupCastArgs
from megatron_magi.comm.peer_tables import NUM_ARRAYS, MostRows, PeerTables
from megatron_magi.comm.rows import Arrivals
from megatron_magi.runtime.lasting import lasting

TAIL_ROWS = 256
"""Rows after the received ones that kernels may read."""


class StaticArgs:
    """Arguments with room for the rows of other microbatches.

    Args:
        samples: arguments of sample microbatches that must fit, built with peers, on their device; only those that send
            rows.
        num_rows: rows of every rank.
        num_ranks: ranks of the group.
        device: of the tables.
        headroom: capacity as a multiple of the rows sent there; never more than the other ranks have.
        own: rows, of which ``headroom - 1`` times as many are capacity in addition.

    Attributes:
        args: the arguments of the loaded microbatch, for impl ``native``. ``num_recv`` is the most received rows.
        tail: indices of the `TAIL_ROWS` rows after the received ones, int64, whose contents are undefined.
    """

    @lasting()
    def __init__(
        self,
        samples: Sequence[GroupCastArgs],
        num_rows: int,
        num_ranks: int,
        device: torch.device,
        headroom: float,
        own: int = 0,
    ) -> None:
        most_of = [args.most for args in samples if args.most is not None]
        assert len(most_of) == len(samples), "built with peers"
        self._longest, self._own = 0, own

        def room(counts: Iterable[int]) -> int:
            self._longest = max(self._longest, most := max(counts, default=0))
            return min(math.ceil((most + own) * headroom) - own + TAIL_ROWS, (num_ranks - 1) * num_rows)

        most = MostRows(num_rows, room(most.received for most in most_of), room(most.sent for most in most_of))
        num_send = room(
            n for args, most in zip(samples, most_of, strict=True) for n in (args.num_send, most.received, most.sent)
        )
        self._num_recv, self._num_send = most.received, num_send
        length = max(self._num_recv, self._num_send, num_rows) + TAIL_ROWS
        self._numbers = torch.arange(length, device=device)
        tables = [torch.zeros_like(self._numbers) for _ in range(6)]
        peers = [torch.zeros_like(self._numbers) for _ in range(NUM_ARRAYS)]
        rest = (0,) * (num_ranks - 1)
        self.args = GroupCastArgs(
            send_index=tables[0],
            send_splits=(self._num_send, *rest),
            recv_splits=(self._num_recv + TAIL_ROWS, *rest),
            recv_order=tables[1],
            num_rows_min=num_rows,
            most=most,
            host=None,
            is_static=True,
            usual=max((most.received for most in most_of), default=0),
        )
        known = vars(self.args)  # where cached properties store their values
        known["recv_position"], known["arrivals"] = tables[2], Arrivals(*tables[3:], ())
        known["peers"] = PeerTables(*peers)
        self.tail = self._numbers[:TAIL_ROWS].clone()

    def shortage(self, args: GroupCastArgs | None) -> tuple[str, float] | None:
        """Why other arguments of the group do not fit, and the headroom with which they would (inf if with none); None
        if they fit.
        """
        if args is None:
            return None
        assert args.most is not None and self.args.most is not None
        pairs = (args.num_send, self._num_send), *zip(args.most, self.args.most, strict=True)
        short = [(count, room) for count, room in pairs if count > room]
        if not short:
            return None
        (count, room), longest = max(short), self._longest + self._own
        return f"{count} rows travel, there is room for {room}", (count + self._own) / longest if longest else math.inf

    def take(self, args: GroupCastArgs | None) -> list[tuple[Tensor, Tensor]]:
        """The copies that load other arguments, as sources and targets; ``None``: no row is sent."""
        count = 0 if args is None else args.num_recv
        torch.add(self._numbers[:TAIL_ROWS], count, out=self.tail)
        own = [self.args.send_index, self.args.recv_order, self.args.recv_position, *_arrays(self.args)]
        if args is None:
            zeros = torch.zeros_like(self._numbers)
            return [(zeros, table) for table in own if table is not None]
        order = self._numbers[:count] if args.recv_order is None else args.recv_order
        position = self._numbers[:count] if args.recv_position is None else args.recv_position
        given = [args.send_index, order, position, *_arrays(args)]
        return [(a, b) for a, b in zip(given, own, strict=True) if b is not None]


def _arrays(args: GroupCastArgs) -> list[Tensor]:
    arrivals, peers = args.arrivals, args.peers
    assert peers is not None
    return [arrivals.rows, arrivals.starts, arrivals.sources, *peers]
