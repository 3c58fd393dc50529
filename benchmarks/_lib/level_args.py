"""Arguments of a group collective in two levels."""

from __future__ import annotations

import numpy as np
import torch

from megatron_magi.attention.collective_args import cast_tables
from megatron_magi.comm.group_collective import LevelArgs
from megatron_magi.plan import Transfer
from megatron_magi.plan.hierarchy import two_levels
from megatron_magi.plan.partition import Ranges, Runs


def level_args(
    rows: tuple[Ranges, Runs], rank: int, num_ranks: int, ranks_per_node: int, device: torch.device | str = "cuda"
) -> LevelArgs:
    """Of what each rank fetches and where it is, with neighbours taken for a node."""
    levels = two_levels(*rows, rank, num_ranks, ranks_per_node)
    nothing = np.zeros(0, dtype=np.int64)
    transfer = Transfer(nothing, (), (), None, nothing, (), (), 0, 0, 0, levels)
    return LevelArgs.build(cast_tables(transfer), device)
