"""Interfaces of implementations that move rows between ranks (`Mover`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch

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


class Mover[Args](Protocol):
    """An implementation of `megatron_magi.comm.group_collective` for the ranks of one group.

    ``Args`` is `GroupCastArgs`, or `megatron_magi.comm.level_args.LevelArgs` in two levels.
    """

    def cast(self, tensors: Sequence[torch.Tensor], args: Args, layout: RowLayout, kept: bool = False) -> Started:
        """Starts sending rows of ``tensors`` as ``args`` says; the result is a list of tensors ``[num_recv, ...]``.

        Args:
            tensors: ``[num_rows, ...]`` each; free to change once this returns, unless ``kept``.
            args: which rows are sent where.
            layout: of ``tensors``.
            kept: the caller does not change ``tensors`` before the result is waited for.
        """

    def give_back(self, tensors: Sequence[torch.Tensor], args: Args, layout: RowLayout, kept: bool = False) -> Started:
        """Starts sending rows of ``tensors`` back to the ranks that the cast fetched them from.

        The result is a buffer of ``layout``, in the order of the arrivals of ``args``: that in which the cast sent its
        rows.

        Args:
            tensors: ``[num_recv, ...]`` each.
            args, layout, kept: as in `cast`.
        """


Into = tuple[Sequence[torch.Tensor], torch.Tensor]
"""Tensors, and the indices of their rows that received rows are copied to, int64 ``[num_recv]``."""


class PlacingMover(Mover[GroupCastArgs], Protocol):
    """A `Mover` that can read and write rows at given indices, as needed for one of two levels."""

    def cast(
        self,
        tensors: Sequence[torch.Tensor],
        args: GroupCastArgs,
        layout: RowLayout,
        kept: bool = False,
        into: Into | None = None,
    ) -> Started:
        """See `Mover`.

        Args:
            tensors, args, layout, kept: as there.
            into: where to write the result; new tensors when None. Only for ``args`` without ``recv_order``.
        """

    def give_back(
        self,
        tensors: Sequence[torch.Tensor],
        args: GroupCastArgs,
        layout: RowLayout,
        kept: bool = False,
        index: torch.Tensor | None = None,
        received: torch.Tensor | None = None,
    ) -> Started:
        """See `Mover`.

        Args:
            tensors, args, layout, kept: as there.
            index: int64 ``[num_recv]``, the rows of ``tensors`` to send; all in their order when None. Only for
                ``args`` without ``recv_order``.
            received: where to write the result, ``num_send`` rows; a new buffer when None.
        """


@runtime_checkable
class Adder(PlacingMover, Protocol):
    """A `PlacingMover` that can add returning rows as they arrive."""

    def add(
        self,
        tensors: Sequence[torch.Tensor],
        args: GroupCastArgs,
        layout: RowLayout,
        into: Sequence[torch.Tensor],
        kept: bool = False,
        index: torch.Tensor | None = None,
    ) -> Started:
        """`give_back` and the addition to ``into`` in one; the result is a list of these tensors."""
