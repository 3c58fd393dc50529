"""Rows of queries that other ranks compute: q and dout travel to their hosts; out, lse and dq travel back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from megatron_magi.attention.collective_args import cast_args, cleared
from megatron_magi.comm.group_collective import Args, group_cast
from megatron_magi.plan import RankPlan
from megatron_magi.runtime.results import unviewed
from megatron_magi.runtime.upload import upload


class TravelArgs(NamedTuple):
    """`megatron_magi.plan.types.Moves` on a device.

    Attributes:
        there: sends rows to their hosts.
        back: sends results of guests to their homes.
        rows: row of the shard of each row that comes back, int64.
        num_rows: rows of the shard; guests follow them.
        tail: of a static plan: rows after the guests, to be zeroed; else None.
    """

    there: Args
    back: Args
    rows: torch.Tensor
    num_rows: int
    tail: torch.Tensor | None = None

    def to_hosts(self, tensors: Sequence[torch.Tensor], group: dist.ProcessGroup, impl: str) -> list[torch.Tensor]:
        """The rows of this rank and those of its guests, ``[num_rows + num_guests, ...]``; the tensors themselves if
        it has none. Collective.

        Args:
            tensors: ``[num_rows, ...]`` each.
            group, impl: as in `group_cast`.
        """
        coming, num_guests = group_cast(tensors, self.there, group, impl=impl, kept=True), self.there.num_recv
        if not num_guests:
            coming.wait()
            return list(tensors)
        both = [x.new_empty((self.num_rows + num_guests, *x.shape[1:])) for x in tensors]
        for into, x in zip(both, tensors, strict=True):
            into[: self.num_rows].copy_(x)  # while guests travel
        for into, guests in zip(both, coming.wait(), strict=True):
            into[self.num_rows :].copy_(guests)
        return cleared(both, self.tail)

    def to_homes(self, tensors: Sequence[torch.Tensor], group: dist.ProcessGroup, impl: str) -> list[torch.Tensor]:
        """The rows of this rank, ``[num_rows, ...]``, in the memory of the tensors; no views to autograd. Collective.

        Rows that other ranks computed are written to ``tensors``.

        Args:
            tensors: ``[num_rows + num_guests, ...]`` each.
            group, impl: as in `group_cast`.
        """
        guests = [x[self.num_rows :] for x in tensors]
        for x, rows in zip(tensors, group_cast(guests, self.back, group, impl=impl, kept=True).wait(), strict=True):
            x.index_copy_(0, self.rows, rows)
        return [x if len(x) == self.num_rows else unviewed(x[: self.num_rows]) for x in tensors]


def travel_args(plan: RankPlan, device: torch.device) -> TravelArgs | None:
    """The moves of a plan on a device, kept like `plan_casts`; None if all queries are computed where they are held."""
    if plan.moves is None:
        return None
    made = plan.runtime.moves.get(device)
    if made is None:
        there, back, rows = plan.moves
        (on_device,) = upload([rows], device)
        made = TravelArgs(cast_args(there, device), cast_args(back, device), on_device, plan.num_rows)
        plan.runtime.moves[device] = made
    return made
