"""Moves of queries whose tables are at fixed addresses and change in place, for captured launches."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_magi.attention.travel import TravelArgs, travel_args
from megatron_magi.comm.group_collective import GroupCastArgs
from megatron_magi.comm.static_args import StaticArgs
from megatron_magi.plan import RankPlan
from megatron_magi.runtime.lasting import lasting


class StaticMoves:
    """The moves of the microbatch that was loaded, with room for those of others.

    Args:
        samples: plans of sample microbatches that must fit, of equal numbers of rows and ranks; queries of some travel.
        device: of the tables.
        headroom: capacity as a multiple of the rows that travel there.

    Attributes:
        args: the moves.
        num_queries: most rows of queries that kernels get, with those that are zeroed.
        room: of both collectives, in rows, see `GroupCastArgs.most`.

    Raises:
        ValueError: a plan tells nodes apart.
    """

    @lasting()
    def __init__(self, samples: Sequence[RankPlan], device: torch.device, headroom: float) -> None:
        num_rows, num_ranks = samples[0].num_rows, samples[0].cp_size
        self._device, made = device, [known for known in (travel_args(plan, device) for plan in samples) if known]
        there, back = ([self._flat(getattr(known, way)) for known in made] for way in ("there", "back"))
        self._there = StaticArgs(there, num_rows, num_ranks, device, headroom)
        num_guests = self._there.args.num_recv
        self._back = StaticArgs(back, num_guests, num_ranks, device, headroom)
        self.num_queries, self.room = num_rows + num_guests, (self._there.args.most, self._back.args.most)
        rows, tail = torch.zeros(self._back.args.num_recv, dtype=torch.int64, device=device), self._there.tail.clone()
        self.args = TravelArgs(self._there.args, self._back.args, rows, num_rows, tail)

    def shortages(self, plan: RankPlan) -> list[tuple[str, float] | None]:
        """As `StaticArgs.shortage`, of both collectives of the moves of another plan."""
        there, back, _ = self._of(plan)
        return [self._there.shortage(there), self._back.shortage(back)]

    def take(self, plan: RankPlan) -> list[tuple[Tensor, Tensor]]:
        """The copies that load the moves of another plan, as sources and targets."""
        there, back, rows = self._of(plan)
        tables = [*self._there.take(there), *self._back.take(back)]
        assert self.args.tail is not None
        torch.add(self._there.tail, self.args.num_rows, out=self.args.tail)
        # What comes back beyond the rows of this microbatch is put where nothing is read: behind the zeroed rows.
        self.args.rows.fill_(self.num_queries - 1)
        return tables if rows is None else [*tables, (rows, self.args.rows)]

    def _of(self, plan: RankPlan) -> tuple[GroupCastArgs | None, GroupCastArgs | None, Tensor | None]:
        moves = travel_args(plan, self._device)
        return (None, None, None) if moves is None else (self._flat(moves.there), self._flat(moves.back), moves.rows)

    @staticmethod
    def _flat(args: object) -> GroupCastArgs:
        if not isinstance(args, GroupCastArgs):
            raise ValueError("plans: nodes are told apart (ranks_per_node), which static plans do not")
        return args
