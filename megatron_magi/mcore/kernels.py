"""Kernels are compiled before the first step, not in the one that first needs them."""

from __future__ import annotations

import torch.distributed as dist

from megatron_magi import envs
from megatron_magi.cuda import build
from megatron_magi.cuda.target import DEFAULT_TARGET


def compile_ahead(kernels: list[tuple[str, tuple[str, ...]]], local_rank: int, target: str = DEFAULT_TARGET) -> None:
    """The first rank of each node compiles what is missing, the others wait; collective over all ranks.

    Args:
        kernels: source and macros of each.
        local_rank: of this process on its node.
        target: the compiler's name of an architecture.

    Raises:
        RuntimeError: a rank could not compile; raised on all.
    """
    report = None
    if local_rank == 0 and kernels:
        try:
            build.build_all(kernels, envs.load_build().prebuild_jobs, target=target)
        except Exception as error:  # noqa: BLE001  (whatever it is, the other ranks must not wait)
            report = f"{type(error).__name__}: {error}"
    reports: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(reports, report)
    for rank, told in enumerate(reports):
        if told is not None:
            raise RuntimeError(f"kernels could not be compiled on global rank {rank}: {told}")
