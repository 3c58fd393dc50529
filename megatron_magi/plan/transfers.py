"""The exchanges of a plan, stage by stage, as each rank sees them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from megatron_magi.plan.exchange import Pieces, exchange, rows_of
from megatron_magi.plan.hierarchy import two_levels
from megatron_magi.plan.partition import RemotePieces, Runs, stage_offsets
from megatron_magi.plan.types import Transfer


class TransferTable:
    """All pieces of all ranks, from which the view of one rank is cut when it is asked for."""

    def __init__(
        self, runs: Runs, pieces: RemotePieces, cp_size: int, degree: int, ranks_per_node: int | None = None
    ) -> None:
        self._pieces = pieces
        self._cp_size = cp_size
        self._degree = degree
        self._ranks_per_node = ranks_per_node
        self._src = runs.rank[pieces.run]
        self._src_row = pieces.start - runs.bounds[pieces.run] + runs.local[pieces.run]
        self._buffer_row = stage_offsets(pieces, cp_size, degree)

    def for_rank(self, rank: int) -> tuple[Transfer, ...]:
        """The transfers of stages 1..degree as ``rank`` sees them."""
        stages = range(1, self._degree + 1)
        return tuple(self._transfer(rank, self._pieces.stage == stage, self._buffer_row) for stage in stages)

    def joined(self, rank: int) -> Transfer | None:
        """One transfer of the rows of all stages, one stage behind the other; None unless there are several.

        None too where nodes are told apart, as rows are handed on stage by stage then.
        """
        if self._degree < 2 or self._ranks_per_node is not None:
            return None
        return self._transfer(rank, self._pieces.stage > 0, self._pieces.position)

    def _transfer(self, rank: int, here: np.ndarray, buffer_row: np.ndarray) -> Transfer:
        """The transfer of some pieces, each to its row of a buffer."""
        p = self._pieces
        pieces = Pieces(self._src, p.dst, self._src_row, p.length, buffer_row).take(np.flatnonzero(here))
        transfer, arriving = exchange(pieces, rank, self._cp_size)
        levels = None
        if self._ranks_per_node is not None:
            levels = two_levels(pieces, rank, self._cp_size, self._ranks_per_node)
        return replace(transfer, recv_order=_recv_order(arriving), levels=levels)


def _recv_order(arriving: Pieces) -> np.ndarray | None:
    """Received row of each buffer row; None when they agree."""
    arrives_at = np.cumsum(arriving.length) - arriving.length
    in_buffer = np.argsort(arriving.place, kind="stable")
    if np.array_equal(in_buffer, np.arange(len(in_buffer))):
        return None
    return rows_of(arrives_at[in_buffer], arriving.length[in_buffer])
