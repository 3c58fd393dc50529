"""A rank that dies or raises between native collectives: every other ends with an error that names it."""

from __future__ import annotations

import multiprocessing
import os
import time
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_magi.comm.group_collective import group_cast, group_reduce
from megatron_magi.testing import shared_gpus
from tests.comm.random_transfers import Transfers

TIMEOUT_S = 3
LOST = 1


def lose_a_rank(rank: int, num_ranks: int, how: str, folder: str) -> None:
    """Calls until an error comes, which is written down; rank `LOST` leaves after some calls."""
    shared_gpus.begin()
    device = torch.device("cuda", shared_gpus.local_rank(rank))
    torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl", init_method=f"file://{folder}/store", rank=rank, world_size=num_ranks,
        device_id=device,
    )  # fmt: skip
    group = dist.new_group(list(range(num_ranks)), timeout=timedelta(seconds=TIMEOUT_S))
    rows = [[np.arange(600 * (i != j)) for j in range(num_ranks)] for i in range(num_ranks)]
    args = Transfers([600] * num_ranks, rows, [None] * num_ranks).args(rank, "cuda")
    x = torch.ones(600, 1024, device="cuda")
    total = torch.zeros_like(x)
    left = time.monotonic()
    try:
        for call in range(100_000):
            if rank == LOST and call == 20:
                torch.cuda.synchronize()
                if how == "dies":
                    os._exit(9)
                raise ValueError("the rank has failed")
            (got,) = group_cast([x], args, group, "native").wait()
            group_reduce([got], args, group, into=[total], impl="native", at_once=True).wait()
            if call < 20:
                torch.cuda.synchronize()
                left = time.monotonic()
    except RuntimeError as error:
        torch.cuda.synchronize()  # the device is as it was
        Path(folder, f"rank{rank}").write_text(f"{time.monotonic() - left:.1f} {error}")
        os._exit(0)


@pytest.mark.parametrize(
    "num_ranks",
    [pytest.param(n, marks=[pytest.mark.gpu, pytest.mark.sm90, pytest.mark.ranks(n)]) for n in (2, 4, 8)],
)
@pytest.mark.parametrize("how", ["dies", "raises"])
def test_every_other_rank_ends_with_an_error_that_names_the_one_that_is_lost(num_ranks, how, tmp_path):
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=lose_a_rank, args=(rank, num_ranks, how, str(tmp_path))) for rank in range(num_ranks)
    ]
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.join(90)
        codes = [process.exitcode for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert codes == [(9 if how == "dies" else 1) if rank == LOST else 0 for rank in range(num_ranks)]
    for rank in set(range(num_ranks)) - {LOST}:
        seconds, text = (tmp_path / f"rank{rank}").read_text().split(" ", 1)
        assert f"rank {LOST} of the group (global rank {LOST}) did not arrive within {TIMEOUT_S} s" in text
        assert TIMEOUT_S - 1 < float(seconds) < 3 * TIMEOUT_S
