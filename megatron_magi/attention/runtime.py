"""A rank's plan on its device: what the steps of a schedule need, made once a plan and device."""

from __future__ import annotations

import torch

from megatron_magi.comm.group_collective import GroupCastArgs
from megatron_magi.comm.peer_tables import PeerRows
from megatron_magi.plan import RankPlan, Transfer


def peer_rows(transfer: Transfer) -> PeerRows:
    """The other side of each row of a transfer."""
    return PeerRows(transfer.owner_rows, transfer.buffer_rows, transfer.most_rows, transfer.most_recv)


def plan_casts(plan: RankPlan, device: torch.device) -> tuple[GroupCastArgs, ...]:
    """Arguments of the collectives of ``plan``; entry s - 1 feeds stage s.

    Kept with the plan, so they live as long as the plan. (They do not refer back to it: a cycle
    would keep device memory until the garbage collector runs, which trainers often switch off.)
    """
    key = str(device)
    casts = plan.runtime.get(key)
    if casts is None:
        casts = plan.runtime[key] = tuple(
            GroupCastArgs.build(t.send_index, t.send_splits, t.recv_splits, t.recv_order, device, peer_rows(t))
            for t in plan.transfers
        )
    return casts


def joined_transfer(plan: RankPlan) -> Transfer:
    """The transfer of the rows of all stages at once, of which there is one at least."""
    return plan.transfers[0] if plan.joined is None else plan.joined


def joined_key(device: torch.device) -> str:
    """Where `joined_cast` keeps what it returns."""
    return f"joined {device}"


def joined_cast(plan: RankPlan, device: torch.device) -> GroupCastArgs:
    """Arguments of the collective that brings the rows of all stages at once; kept like `plan_casts`."""
    if plan.joined is None:
        return plan_casts(plan, device)[0]
    key, t = joined_key(device), plan.joined
    if key not in plan.runtime:
        plan.runtime[key] = GroupCastArgs.build(
            t.send_index, t.send_splits, t.recv_splits, t.recv_order, device, peer_rows(t)
        )
    return plan.runtime[key]
