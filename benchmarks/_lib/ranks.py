"""Ranks that torchrun has started."""

from __future__ import annotations

import torch
import torch.distributed as dist

from megatron_magi import envs


def join_ranks(on_cpu: bool) -> None:
    """Makes the group of all ranks: over NCCL, each with a GPU, or ``on_cpu`` over gloo, each with one thread."""
    dist.init_process_group("gloo" if on_cpu else "nccl")
    if on_cpu:
        torch.set_num_threads(1)
    else:
        torch.cuda.set_device(envs.local_rank())
