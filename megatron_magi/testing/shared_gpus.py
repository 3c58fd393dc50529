"""Several ranks on one GPU, in tests on machines with fewer GPUs than ranks: see ``MAGI_TEST_RANKS_PER_GPU`` in
CONTRIBUTING.md.

Processes take turns on a GPU, so a kernel that waits for one of another rank ends in one of its next turns. That shows
results, not times. Ranks of users have a GPU each (`megatron_magi.comm.peers.RANKS_PER_GPU`).

What starts processes itself, as torchrun does, starts a module of Python on shared GPUs by way of this one:

    torchrun --nproc-per-node 2 -m megatron_magi.testing.shared_gpus MODULE ARGUMENTS
"""

from __future__ import annotations

import ctypes
import os
import runpy
import sys

from megatron_magi import envs

_FIRST_NCCL = (2, 30)
"""The first that takes several ranks on one GPU, when asked to."""


def most_ranks() -> int:
    """For how many ranks the GPUs of this machine suffice."""
    return envs.ranks_per_gpu() * _num_gpus()


def why_not(num_ranks: int) -> str | None:
    """Why so many ranks cannot run on the GPUs of this machine; None if they can."""
    count, each = _num_gpus(), envs.ranks_per_gpu()
    if count * each < num_ranks:
        shared = f" for {each} ranks each" if each > 1 else ""
        return f"needs {num_ranks} GPUs, there are {count}{shared}"
    if count < num_ranks and (version := nccl_version()) < _FIRST_NCCL:
        known, first = (".".join(map(str, v)) for v in (version, _FIRST_NCCL))
        return f"ranks that share a GPU need NCCL {first} or later, this is {known or 'none'}"
    return None


def local_rank(rank: int) -> int:
    """Index of the GPU of a rank of this machine."""
    count = _num_gpus() if envs.ranks_per_gpu() > 1 else 0
    return rank % count if count else rank


def begin() -> None:
    """What a rank does before it has a group, where ranks may share GPUs; else nothing."""
    if (each := envs.ranks_per_gpu()) == 1:
        return
    from megatron_magi.comm import peers

    os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    peers.RANKS_PER_GPU = each


def nccl_version() -> tuple[int, ...]:
    """Of the library that is loaded, which may be another than torch was built with; empty if there is none."""
    number = ctypes.c_int()
    try:
        status = ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(number))
    except OSError:
        return ()
    return () if status else (number.value // 10000, number.value // 100 % 100, number.value % 100)


def _num_gpus() -> int:
    import torch  # not at the top: ranks set their number of threads before

    return torch.cuda.device_count()


def main() -> None:
    """Runs a module as this rank of torchrun."""
    os.environ["LOCAL_RANK"] = str(local_rank(envs.local_rank()))
    begin()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
