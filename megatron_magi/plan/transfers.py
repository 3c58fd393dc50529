"""Arguments of group_cast and group_reduce, and the lower bound on the bytes they move."""

from __future__ import annotations

import numpy as np

from megatron_magi.mask import bands as bd
from megatron_magi.plan.hierarchy import Pieces, two_levels
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
        return tuple(self._transfer(rank, stage) for stage in range(1, self._degree + 1))

    def joined(self, rank: int) -> Transfer | None:
        """One transfer of the rows of all stages, one stage behind the other; None unless there are several.

        None too where nodes are told apart, as rows are handed on stage by stage then.
        """
        if self._degree < 2 or self._ranks_per_node is not None:
            return None
        return self._rows_of(rank, self._pieces.stage > 0, self._pieces.position)

    def _transfer(self, rank: int, stage: int) -> Transfer:
        return self._rows_of(rank, self._pieces.stage == stage, self._buffer_row)

    def _rows_of(self, rank: int, here: np.ndarray, buffer_row: np.ndarray) -> Transfer:
        """The transfer of some pieces, each to its row of a buffer."""
        p = self._pieces
        sent = np.flatnonzero((self._src == rank) & here)  # by dst, then start
        received = np.flatnonzero((p.dst == rank) & here)
        before, ahead = np.flatnonzero((self._src < rank) & here), np.flatnonzero((p.dst < rank) & here)
        by_source = received[np.lexsort((p.start[received], self._src[received]))]
        levels = None
        if self._ranks_per_node is not None:
            of_all = Pieces(self._src, p.dst, self._src_row, p.length, buffer_row)
            levels = two_levels(of_all.take(np.flatnonzero(here)), rank, self._cp_size, self._ranks_per_node)
        return Transfer(
            levels=levels,
            send_index=_rows(self._src_row[sent], p.length[sent]),
            send_splits=self._splits(p.dst[sent], p.length[sent]),
            recv_splits=self._splits(self._src[received], p.length[received]),
            recv_order=self._recv_order(by_source, buffer_row),
            owner_rows=_rows(self._src_row[by_source], p.length[by_source]),
            first_there=self._splits(p.dst[before], p.length[before]),
            first_back=self._splits(self._src[ahead], p.length[ahead]),
            most_rows=int((self._src_row + p.length)[here].max(initial=0)),
            most_recv=int((buffer_row + p.length)[here].max(initial=0)),
            most_send=max(self._splits(self._src[here], p.length[here])),
        )

    def _splits(self, peer: np.ndarray, length: np.ndarray) -> tuple[int, ...]:
        rows = np.zeros(self._cp_size, dtype=np.int64)
        np.add.at(rows, peer, length)
        return tuple(rows.tolist())

    def _recv_order(self, by_source: np.ndarray, buffer_row: np.ndarray) -> np.ndarray | None:
        """Received row of each buffer row; None when they agree."""
        length = self._pieces.length[by_source]
        arrives_at = np.cumsum(length) - length
        in_buffer = np.argsort(buffer_row[by_source], kind="stable")
        if np.array_equal(in_buffer, np.arange(len(in_buffer))):
            return None
        return _rows(arrives_at[in_buffer], length[in_buffer])


def _rows(first: np.ndarray, length: np.ndarray) -> np.ndarray:
    out = bd.expand(first, length)[1]
    out.setflags(write=False)
    return out
