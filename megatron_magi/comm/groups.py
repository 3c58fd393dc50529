"""Process groups: names, time-outs and ends."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_process_group_store

_POISON_TAG = 0x6D616769


def names_of(ranks: Iterable[int], world_ranks: Sequence[int]) -> str:
    """Ranks of a group in words; ``world_ranks``: the global rank of each."""
    return ", ".join(f"rank {rank} of the group (global rank {world_ranks[rank]})" for rank in ranks)


def abort(group: dist.ProcessGroup) -> None:
    """Ends what is under way on a group, and whatever is started after: it raises on this rank and on its peers."""
    with suppress(RuntimeError):
        group.abort()
    # gloo cannot be told to; but a receive that times out closes its connection, and all that wait for it raise.
    with suppress(RuntimeError, ValueError):
        if "gloo" not in dist.get_backend_config(group):
            return
        for peer in range(group.size()):
            if peer != group.rank():
                with suppress(RuntimeError):
                    group.recv([torch.empty(1)], peer, _POISON_TAG).wait(timedelta(milliseconds=1))


def store_of(group: dist.ProcessGroup | None) -> dist.Store:
    """The store of a group.

    Raises:
        RuntimeError: the group does not exist any more.
    """
    try:
        return _get_process_group_store(group)  # `ProcessGroup.get_group_store` is not in torch 2.8
    except KeyError:
        raise RuntimeError("group: does not exist any more") from None


def timeout_s(group: dist.ProcessGroup) -> float:
    """How long collectives of a group wait."""
    device = next(iter(dist.get_backend_config(group).split(","))).split(":")[0]
    return group._get_backend(torch.device(device)).options._timeout.total_seconds()
