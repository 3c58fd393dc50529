"""Process groups: groups of meshes, names of ranks in messages, timeouts, polling and abort."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _get_process_group_store

_POISON_TAG = 0x6D616769

# Torch 2.13 has other names for both.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

Group = dist.ProcessGroup | DeviceMesh | None
"""The ranks of a call; see `group_of`."""


def group_of(group_or_mesh: Group, name: str = "group") -> dist.ProcessGroup | None:
    """The process group of a group, of a mesh of one or two dimensions, or of None.

    The only place that handles meshes: public functions take either and convert it.

    Args:
        group_or_mesh: the ranks. A mesh of two dimensions becomes one group, which is collective the first time.
        name: of the argument, for messages.

    Raises:
        ValueError: anything else.
    """
    if group_or_mesh is None or isinstance(group_or_mesh, dist.ProcessGroup):
        return group_or_mesh
    if group_or_mesh is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(f"{name}: this rank is not in the group; only its members may call this")
    if not isinstance(group_or_mesh, DeviceMesh):
        raise ValueError(f"{name}: expected a ProcessGroup, a DeviceMesh or None, got {type(group_or_mesh).__name__}")
    if group_or_mesh.ndim == 1:
        return group_or_mesh.get_group()
    if group_or_mesh.ndim == 2:
        if group_or_mesh.mesh_dim_names is None:
            raise ValueError(f"{name}: a mesh of two dimensions needs mesh_dim_names to become one group")
        return group_or_mesh._flatten().get_group()
    raise ValueError(f"{name}: expected one or two dimensions, got {group_or_mesh.ndim}")


def names_of(ranks: Iterable[int], world_ranks: Sequence[int]) -> str:
    """Ranks of a group in words; ``world_ranks``: the global rank of each."""
    return ", ".join(f"rank {rank} of the group (global rank {world_ranks[rank]})" for rank in ranks)


def pause(waited_s: float, longest_s: float) -> None:
    """Sleeps between polls, longer with the time waited so far."""
    time.sleep(min(max(waited_s / 10, 1e-4), longest_s))


def wait_awake(done: Callable[[], bool], longest_s: float = 2e-4) -> None:
    """Polls ``done()`` for a short time without sleeping, as `pause` would."""
    end = time.perf_counter() + longest_s
    while not done() and time.perf_counter() < end:
        time.sleep(0)  # others may run


def abort(group: dist.ProcessGroup) -> None:
    """Aborts running and later communication of a group: it raises on this rank and on its peers."""
    with suppress(RuntimeError):
        group.abort()
    # gloo has no abort; but a receive that times out closes its connection, and all operations that wait for it raise.
    with suppress(RuntimeError, ValueError):
        if "gloo" not in dist.get_backend_config(group):
            return
        for peer in range(group.size()):
            if peer != group.rank():
                with suppress(RuntimeError):
                    group.recv([torch.empty(1, device="cpu")], peer, _POISON_TAG).wait(timedelta(milliseconds=1))


def store_of(group: dist.ProcessGroup | None) -> dist.Store:
    """The store of a group.

    Raises:
        RuntimeError: the group does not exist any more.
    """
    try:
        return _get_process_group_store(group)  # `ProcessGroup.get_group_store` is not in torch 2.8
    except KeyError:
        raise RuntimeError("group: does not exist any more") from None


def exists(group: dist.ProcessGroup | None) -> bool:
    """Whether a group has not been destroyed; None, a rank alone, exists always."""
    return group is None or group in dist.distributed_c10d._world.pg_map


def timeout_s(group: dist.ProcessGroup) -> float:
    """How long collectives of a group wait."""
    device = next(iter(dist.get_backend_config(group).split(","))).split(":")[0]
    return group._get_backend(torch.device(device)).options._timeout.total_seconds()
