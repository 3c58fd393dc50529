"""What ranks of `training/cuda_graphs.py` do: masks, as text for ``--magi-mask``, and what comes before training."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import torch

from megatron_magi.mask import AttnMask, builders
from megatron_magi.mask.microbatch import Microbatch

TURN = "turn"
"""File in the working directory of a run, whose turn it is."""
_EVERY, _FIRST = 40, 13
_calls = itertools.count()


def documents_rarely_stripes(batch: Microbatch) -> AttnMask:
    """Causal documents; in microbatch 13 of each 40 stripes of keys, whose tables are many times as long.

    For workers of a data loader, which take turns and plan each microbatch once.
    """
    worker, total = torch.utils.data.get_worker_info(), batch.batch_size * batch.seqlen
    assert worker is not None, "planned by workers"
    if (next(_calls) * worker.num_workers + worker.id) % _EVERY != _FIRST:
        return builders.varlen(batch.cu_seqlens, causal=True)
    return AttnMask([(0, total, at, at + 10, 0) for at in range(0, total - 10, max(total // 100, 20))], total)


def take_turn(workdir: Path) -> None:
    """Has the first microbatch wait for the turn of this run: ranks import and build their models side by side."""
    if not torch.cuda.is_available():  # Megatron's calls of CUDA are answered before it is imported
        await_turn(workdir)
        return
    from megatron_magi.mcore.forward_step import MagiForwardStep

    read = MagiForwardStep.read

    def read_in_turn(self: MagiForwardStep, data_iterator: object, model: torch.nn.Module) -> object:
        await_turn(workdir)
        MagiForwardStep.read = read
        return read(self, data_iterator, model)

    MagiForwardStep.read = read_in_turn


def await_turn(workdir: Path) -> None:
    """Until the file is there."""
    while not (workdir / TURN).exists():
        time.sleep(0.05)
