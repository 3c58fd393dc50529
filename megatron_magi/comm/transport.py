"""What moves rows between ranks: kernels over NVLink, NCCL, or gloo. This is the one place that decides.

Some questions are asked before there is a group: `may_use_peer_memory`, by plans of one launch and by what is compiled
ahead. Others of a group alone: `peer_collectives`.
"""

from __future__ import annotations

from types import ModuleType
from typing import NamedTuple

import torch
import torch.distributed as dist

from megatron_magi.comm import rows as torch_rows
from megatron_magi.comm.cast_args import GroupCastArgs
from megatron_magi.comm.impl import all_to_all, reference
from megatron_magi.comm.impl.hierarchical import Hierarchical, MoverChoice
from megatron_magi.comm.impl.native import Native, native_of
from megatron_magi.comm.impl.packed import Packed
from megatron_magi.comm.level_args import LevelArgs
from megatron_magi.comm.movement import Mover, PlacingMover
from megatron_magi.comm.nodes import nodes_of
from megatron_magi.comm.peers import MAX_RANKS
from megatron_magi.comm.row_layout import RowLayout

FOR_CAPTURES = "native"
"""The only implementation whose launches a CUDA graph can replay with other numbers of rows."""

Args = GroupCastArgs | LevelArgs
"""Which rows are sent where: in one level, or in two levels (nodes)."""

_EXCHANGES = {"reference": reference, "all_to_all": all_to_all}
_IMPLS = (*_EXCHANGES, "native")


def most_received(args: Args, back: bool = False) -> int | None:
    """Most rows that any rank receives in a cast, or back; None if not known."""
    if args.most is None:
        return None
    return args.most.sent if back else args.most.received


class _Alone:
    """Cache key of a rank without a group."""


_ALONE = _Alone()


class Transport(NamedTuple):
    """The implementations for a group.

    Attributes:
        native: for rows that can be moved through peer memory; None if that is not possible.
        other: for all other rows, as bytes or in two levels; None if only ``native`` was requested.
        ops: the row operations, see `megatron_magi.comm.rows`.
        rank: this rank.
    """

    native: Native | None
    other: Mover | None
    ops: ModuleType
    rank: int

    def mover(self, layout: RowLayout, most_rows: int | None) -> Mover:
        """The implementation for up to ``most_rows`` rows that a rank receives or publishes; the same on all ranks.

        Args:
            layout: of the tensors.
            most_rows: None if not known.

        Raises:
            ValueError: only ``native`` was requested, and cannot move these rows.
        """
        if self.native is not None:
            reason = self.native.refusal(layout, most_rows)
            if reason is None:
                return self.native
            if self.other is None:
                raise ValueError(f"impl: 'native' {reason}")
        assert self.other is not None
        return self.other


def transport_of(args: Args, group: dist.ProcessGroup | None, impl: str) -> Transport:
    """The transport of ``args`` for a group, found once; the first time it may be collective.

    Args:
        args: which rows are sent where.
        group: the ranks; the default group when None.
        impl: ``auto``: kernels over NVLink where all ranks reach each other's memory, else NCCL on GPUs, gloo on CPUs;
            or the name of an implementation.

    Raises:
        ValueError: there is no implementation of that name, it is not possible here, or the group does not fit.
        RuntimeError: ranks did not take part within the group's timeout.
    """
    key = _ALONE if args.num_ranks == 1 else dist.group.WORLD if group is None else group
    known = args.ways.get(key)
    if known is None:
        known = args.ways[key] = {}
    way = known.get(impl)
    if way is None:
        way = known[impl] = _find(args, group, impl)
    return way


def _find(args: Args, group: dist.ProcessGroup | None, impl: str) -> Transport:
    if impl not in ("auto", *_IMPLS):
        raise ValueError(f"impl: expected one of auto, {', '.join(_IMPLS)}, got {impl!r}")
    device, num_ranks = args.device, args.num_ranks
    ops = _row_ops(device, impl)
    if num_ranks == 1:
        return Transport(None, Packed(None, ops, None), ops, 0)
    if num_ranks != dist.get_world_size(group):
        raise ValueError(f"args: splits for {num_ranks} ranks, but group has {dist.get_world_size(group)}")
    backend, rank = _backend(group, device), dist.get_rank(group)
    if backend is None or (backend == "gloo" and device.type != "cpu"):
        known = dist.get_backend_config(group)
        raise ValueError(f"group: {known} cannot move tensors on {device.type}; gloo is for CPUs and NCCL for GPUs")
    plain = ("reference" if backend == "gloo" else "all_to_all") if impl in ("auto", "native") else impl
    if isinstance(args, LevelArgs):
        groups = nodes_of(dist.group.WORLD if group is None else group, args.ranks_per_node)
        inside = impl if impl == "native" else plain  # `auto` does not mix kernels that wait with NCCL between nodes
        near, relay = transport_of(args.near, groups.near, inside), transport_of(args.relay, groups.relay, inside)
        far = transport_of(args.far, groups.far, plain)
        natives = [way.native for way in (near, relay) if way.native is not None]
        groups.guards.extend(native for native in natives if native not in groups.guards)
        return Transport(None, Hierarchical(_choice(near), _choice(far), _choice(relay), ops), ops, rank)
    native, reason = None, "is for GPUs and NCCL"
    if impl in ("auto", "native") and backend == "nccl":
        native, reason = native_of(group, device)
    if impl == "native":
        if native is None:
            raise ValueError(f"impl: 'native' {reason}")
        return Transport(native, None, ops, rank)
    return Transport(native, Packed(_EXCHANGES[plain].exchange, ops, group), ops, rank)


def _choice(way: Transport) -> MoverChoice:
    """Chooses the implementation for one of two levels."""

    def choose(layout: RowLayout, args: GroupCastArgs, *, back: bool) -> PlacingMover:
        return way.mover(layout, most_received(args, back))

    return choose


def _row_ops(device: torch.device, impl: str) -> ModuleType:
    if device.type != "cuda" or impl == "reference":
        return torch_rows
    # Not at the top: Triton is installed only with GPUs.
    from megatron_magi.comm import gpu_rows

    return gpu_rows


def _backend(group: dist.ProcessGroup | None, device: torch.device) -> str | None:
    """The backend for tensors of a device; None if there is none."""
    pairs = (entry.split(":") for entry in dist.get_backend_config(group).split(","))
    return {pair[0]: pair[-1] for pair in pairs}.get(device.type)


def may_use_peer_memory(num_ranks: int, impl: str) -> bool:
    """Whether ``impl`` may mean kernels over NVLink for a group of so many ranks, as far as is known without it."""
    return impl in ("auto", FOR_CAPTURES) and 2 <= num_ranks <= MAX_RANKS


def peer_collectives(group: dist.ProcessGroup, device: torch.device) -> tuple[Native | None, str]:
    """The collectives over NVLink of a group, or None and the reason why these are not possible. Collective."""
    return native_of(group, device)
