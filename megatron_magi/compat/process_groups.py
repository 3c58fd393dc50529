"""Setting up and tearing down torch.distributed in scripts that torchrun starts."""

from __future__ import annotations

import random
import socket
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist


class DistEnv(NamedTuple):
    """Where a process is among all that were started.

    Attributes:
        rank, world_size: in the whole job.
        local_rank, num_local_ranks: on this machine.
        num_nodes: machines.
        world_group: all ranks.
        device: this rank's GPU, or the CPU.
        seed: what the random generators were seeded with, None if they were not.
    """

    rank: int
    local_rank: int
    world_size: int
    num_nodes: int
    num_local_ranks: int
    world_group: dist.ProcessGroup
    device: torch.device
    seed: int | None


def setup_dist_env(
    backend: str | None = None, base_seed: int | None = None, seed_bias: Callable[[int], int] = lambda rank: 0
) -> DistEnv:
    """Joins the other ranks, in a script that torchrun started. Collective.

    Args:
        backend: ``"nccl"`` where there are GPUs, else ``"gloo"``, when None.
        base_seed: seeds the generators of python, numpy and torch with ``base_seed + seed_bias(rank)``; not when None.
        seed_bias: see ``base_seed``.
    """
    local_rank = dist.get_node_local_rank(fallback_rank=0)
    backend = backend or ("nccl" if torch.cuda.is_available() else "gloo")
    on_gpu = "nccl" in backend
    if on_gpu:
        torch.cuda.set_device(local_rank)
    dist.init_process_group(backend)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    hosts: list[str] = [""] * world_size
    dist.all_gather_object(hosts, socket.gethostname())
    seed = None
    if base_seed is not None:
        seed = base_seed + seed_bias(rank)
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002, for scripts that draw from numpy's own generator
        torch.manual_seed(seed)
    return DistEnv(
        rank=rank,
        local_rank=local_rank,
        world_size=world_size,
        num_nodes=len(set(hosts)),
        num_local_ranks=hosts.count(hosts[rank]),
        world_group=dist.group.WORLD,
        device=torch.device("cuda", local_rank) if on_gpu else torch.device("cpu"),
        seed=seed,
    )


def clearup_dist_env() -> None:
    """Leaves the group of all ranks; nothing distributed works after it."""
    dist.destroy_process_group()
