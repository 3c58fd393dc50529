"""A rank's plan on its device: arguments of its collectives, made once for a plan and device."""

from __future__ import annotations

import torch

from megatron_magi.comm.group_collective import (
    Args,
    CastFacts,
    CastTables,
    GroupCastArgs,
    LevelArgs,
    LevelFacts,
    LevelTables,
)
from megatron_magi.comm.peer_tables import PeerRows
from megatron_magi.plan import RankPlan, Transfer


def cast_tables(transfer: Transfer) -> CastTables | LevelTables:
    """A transfer as arrays for collectives: in two levels if the plan has nodes."""
    t, levels = transfer, transfer.levels
    if levels is None:
        peers = PeerRows(t.owner_rows, t.first_there, t.first_back, t.most_rows, t.most_recv, t.most_send)
        return CastTables.of(t.send_index, t.send_splits, t.recv_splits, t.recv_order, peers)
    near, far, relay = (cast_tables(part) for part in (levels.near, levels.far, levels.relay))
    return LevelTables(levels.ranks_per_node, near, far, relay, levels.near_rows, levels.relay_rows)


def uploaded_args(facts: CastFacts | LevelFacts, moved: list[torch.Tensor]) -> Args:
    """Arguments of a collective whose arrays are on their device."""
    return (LevelArgs if isinstance(facts, LevelFacts) else GroupCastArgs).from_uploaded(facts, moved)


def cast_args(transfer: Transfer, device: torch.device) -> Args:
    """Arguments of the collective of a transfer."""
    tables = cast_tables(transfer)
    if isinstance(tables, LevelTables):
        return LevelArgs.build(tables, device)
    return GroupCastArgs.of_tables(tables, device)


def plan_casts(plan: RankPlan, device: torch.device) -> tuple[Args, ...]:
    """Arguments of the collectives of ``plan``; entry s - 1 feeds stage s.

    Kept with the plan, so they live as long as the plan. (They do not refer back to it: a cycle
    would keep device memory until the garbage collector runs, which trainers often switch off.)
    """
    casts = plan.runtime.casts.get(device)
    if casts is None:
        casts = plan.runtime.casts[device] = tuple(cast_args(transfer, device) for transfer in plan.transfers)
    return casts


def cleared(tensors: list[torch.Tensor], tail: torch.Tensor | None) -> list[torch.Tensor]:
    """The tensors, with zeros in the rows ``tail``, which kernels may read after the received ones."""
    if tail is not None:
        for t in tensors:
            t.index_fill_(0, tail, 0)
    return tensors


def joined_transfer(plan: RankPlan) -> Transfer:
    """The transfer of the rows of all stages, at least one, at once."""
    return plan.transfers[0] if plan.joined is None else plan.joined


def joined_cast(plan: RankPlan, device: torch.device) -> Args:
    """Arguments of the collective that fetches the rows of all stages at once; kept like `plan_casts`."""
    if plan.joined is None:
        return plan_casts(plan, device)[0]
    cast = plan.runtime.joined_casts.get(device)
    if cast is None:
        cast = plan.runtime.joined_casts[device] = cast_args(plan.joined, device)
    return cast
