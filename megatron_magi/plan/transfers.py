"""The exchanges of keys in a plan, by stage and rank."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from megatron_magi.plan import cpp_partition
from megatron_magi.plan.exchange import exchange, rows_of
from megatron_magi.plan.hierarchy import two_levels
from megatron_magi.plan.partition import Partition, Ranges, Runs
from megatron_magi.plan.types import Transfer


class TransferTable:
    """What all ranks fetch; the transfers of one rank are derived on demand."""

    def __init__(
        self, part: Partition, stages: tuple[Ranges, ...], ranks_per_node: int | None = None, use_cpp: bool = False
    ) -> None:
        self._part = part
        self._stages = stages
        self._ranks_per_node = ranks_per_node
        self._use_cpp = use_cpp

    def for_rank(self, rank: int) -> tuple[Transfer, ...]:
        """The transfers of stages 1..degree for ``rank``."""
        return tuple(self._transfer(rank, ranges) for ranges in self._stages)

    def joined(self, rank: int) -> Transfer | None:
        """One transfer of the rows of all stages, in order of stages; None unless there are several.

        Also None if nodes are distinguished, as rows are then relayed stage by stage.
        """
        if len(self._stages) < 2 or self._ranks_per_node is not None:
            return None
        return self._transfer(rank, self._part.remote)

    def _transfer(self, rank: int, ranges: Ranges) -> Transfer:
        num_ranks = len(self._part.remote_rows)
        if self._use_cpp and self._ranks_per_node is None:
            return cpp_partition.transfer_of(ranges, self._part.runs, rank, num_ranks)
        return transfer_of(ranges, self._part.runs, rank, num_ranks, self._ranks_per_node)


def transfer_of(ranges: Ranges, runs: Runs, rank: int, num_ranks: int, ranks_per_node: int | None) -> Transfer:
    """The transfer of ranges, each to its place in a buffer; ``ranks_per_node``: None for one level."""
    transfer, place, length = exchange(ranges, runs, rank, num_ranks)
    levels = None if ranks_per_node is None else two_levels(ranges, runs, rank, num_ranks, ranks_per_node)
    return replace(transfer, recv_order=_recv_order(place, length), levels=levels)


def _recv_order(place: np.ndarray, length: np.ndarray) -> np.ndarray | None:
    """Received row of each buffer row; None when they agree."""
    in_buffer = np.argsort(place, kind="stable")
    if np.array_equal(in_buffer, np.arange(len(in_buffer))):
        return None
    return rows_of((np.cumsum(length) - length)[in_buffer], length[in_buffer])
