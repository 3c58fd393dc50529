"""What moves rows between ranks: it sees rows and tables, and how they travel is its own affair."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch

from megatron_magi.comm.cast_args import GroupCastArgs
from megatron_magi.comm.row_layout import RowLayout


class Work(Protocol):
    """Something under way."""

    def wait(self) -> Any:
        """Makes the current stream wait for it; the host, where there is no stream."""


class Started(NamedTuple):
    """Rows under way.

    Attributes:
        works: to wait for.
        buffers: memory that must live until then.
        finish: called after that, on the stream that waited; gives the result.
    """

    works: Sequence[Work]
    buffers: tuple[torch.Tensor, ...]
    finish: Callable[[], Any]


Into = tuple[Sequence[torch.Tensor], torch.Tensor]
"""Tensors, and which of their rows rows are copied to, int64."""


class Mover(Protocol):
    """An implementation of `megatron_magi.comm.group_collective` for the ranks of one group."""

    def cast(
        self,
        tensors: Sequence[torch.Tensor],
        args: GroupCastArgs,
        layout: RowLayout,
        kept: bool = False,
        into: Into | None = None,
    ) -> Started:
        """Rows of ``tensors`` go where ``args`` says; the result is a list of tensors ``[num_recv, ...]``.

        Args:
            tensors: ``[num_rows, ...]`` each; free to change once this returns, unless ``kept``.
            args: which rows travel where.
            layout: of ``tensors``.
            kept: nobody changes ``tensors`` before the result is waited for.
            into: the result, if that is there already; for ``args`` without ``recv_order``.
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
        """Rows of ``tensors``, ``[num_recv, ...]`` each, go back to where the cast took them from; as in `cast`.

        With ``index``, int64 ``[num_recv]``, for ``args`` without ``recv_order``, these rows of them. ``received``: the
        buffer, if it is there already.

        The result is a buffer of ``layout`` with ``num_send`` rows, in the order in which they were sent.
        """


@runtime_checkable
class Adder(Mover, Protocol):
    """A `Mover` that adds what goes back as it comes."""

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
