"""Interfaces of implementations that move rows between ranks (`Mover`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
import torch.distributed as dist

from megatron_magi.comm.cast_args import GroupCastArgs
from megatron_magi.comm.row_layout import RowLayout


class Work(Protocol):
    """A communication that has been started."""

    def wait(self) -> Any:
        """Makes the current stream wait until it is complete; on CPUs the host waits."""


class Started(NamedTuple):
    """A movement of rows that has been started.

    Attributes:
        works: communication to wait for.
        buffers: memory that must live until then.
        finish: to be called afterwards, on the stream that waited; returns the result.
    """

    works: Sequence[Work]
    buffers: tuple[torch.Tensor, ...]
    finish: Callable[[], Any]


class RankRows(NamedTuple):
    """Rows as bytes, grouped by the rank that they go to, or come from.

    Attributes:
        rows: uint8 ``[sum(splits), row_bytes]``.
        splits: number of rows for each rank.
    """

    rows: torch.Tensor
    splits: list[int]


class Exchange(Protocol):
    """Starts sending rows to, and receiving rows from, all ranks of a group, as bytes."""

    def __call__(self, send: RankRows, received: RankRows, group: dist.ProcessGroup | None) -> Sequence[Work]:
        """Collective: every rank calls it, also one that sends and receives nothing.

        Returns:
            The works to wait for; both tensors must live until then.
        """


class SentRows[Args](NamedTuple):
    """Rows to send.

    ``Args`` is `GroupCastArgs`, or `megatron_magi.comm.level_args.LevelArgs` in two levels.

    Attributes:
        tensors: ``[num_rows, ...]`` each, ``[num_recv, ...]`` if rows go back; free to change once a call has
            returned, unless ``kept``.
        args: which rows are sent where.
        layout: of ``tensors``.
        kept: the caller does not change ``tensors`` before the result is waited for.
    """

    tensors: Sequence[torch.Tensor]
    args: Args
    layout: RowLayout
    kept: bool = False


class Mover[Args](Protocol):
    """An implementation of `megatron_magi.comm.group_collective` for the ranks of one group."""

    def cast(self, rows: SentRows[Args]) -> Started:
        """Starts sending rows as their arguments say; the result is a list of tensors ``[num_recv, ...]``."""

    def give_back(self, rows: SentRows[Args]) -> Started:
        """Starts sending rows back to the ranks that the cast fetched them from.

        The result is a buffer of their layout, in the order of the arrivals of their arguments: that in which the cast
        sent its rows.
        """


Into = tuple[Sequence[torch.Tensor], torch.Tensor]
"""Tensors, and the indices of their rows that received rows are copied to, int64 ``[num_recv]``."""

type FlatRows = SentRows[GroupCastArgs]
"""Rows that are sent in one level."""


class PlacingMover(Mover[GroupCastArgs], Protocol):
    """A `Mover` that can read and write rows at given indices, as needed for one of two levels."""

    def cast(self, rows: FlatRows, into: Into | None = None) -> Started:
        """See `Mover`; ``into``: where to write the result, only for arguments without ``recv_order``."""

    def give_back(
        self, rows: FlatRows, index: torch.Tensor | None = None, received: torch.Tensor | None = None
    ) -> Started:
        """See `Mover`.

        Args:
            rows: as there.
            index: int64 ``[num_recv]``, the rows of the tensors to send; all in their order when None. Only for
                arguments without ``recv_order``.
            received: where to write the result, ``num_send`` rows; a new buffer when None.
        """


@runtime_checkable
class Adder(PlacingMover, Protocol):
    """A `PlacingMover` that can add returning rows as they arrive."""

    def add(self, rows: FlatRows, into: Sequence[torch.Tensor], index: torch.Tensor | None = None) -> Started:
        """`give_back` and the addition to ``into`` in one; the result is a list of these tensors."""
