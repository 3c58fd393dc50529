"""Hierarchical exchange: a row is sent once to each other node, however many ranks need it there, then inside the node.

A cast sends own rows inside the node and once to each other node, where the receiving rank relays them. A reduction
goes the same way back: a node's partial rows are summed by the relaying rank, rounded once to the dtype in which they
are sent, and cross as one row. Sums are formed in rank order, so they are bitwise repeatable.

The second step waits for the first: on GPUs on a stream of its own, so that neither the host nor the caller's stream
waits; on CPUs when the result is waited for.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import cache, cached_property
from types import ModuleType
from typing import Any, Protocol

import torch

from megatron_magi.comm.cast_args import GroupCastArgs
from megatron_magi.comm.level_args import LevelArgs
from megatron_magi.comm.movement import Adder, PlacingMover, SentRows, Started
from megatron_magi.comm.row_layout import RowLayout
from megatron_magi.comm.row_memory import can_add
from megatron_magi.comm.rows import PartialRows


class MoverChoice(Protocol):
    """Chooses the implementation for rows of a layout."""

    def __call__(self, layout: RowLayout, args: GroupCastArgs, *, back: bool) -> PlacingMover:
        """``back``: the rows go back to the ranks that a cast fetched them from."""


class Hierarchical:
    """A `Mover` for `LevelArgs`.

    Args:
        near, far, relay: the implementation for each part.
        ops: the row operations, see `megatron_magi.comm.rows`.
        merges: rows that go back are ``(out, lse)``, merged by lse instead of summed.
    """

    def __init__(
        self, near: MoverChoice, far: MoverChoice, relay: MoverChoice, ops: ModuleType, merges: bool = False
    ) -> None:
        self._near, self._far, self._relay, self._ops, self._merges = near, far, relay, ops, merges

    @cached_property
    def merging(self) -> Hierarchical:
        """A mover that merges partial results of attention, ``(out, lse)``, instead of summing."""
        return Hierarchical(self._near, self._far, self._relay, self._ops, merges=True)

    def cast(self, rows: SentRows[LevelArgs]) -> Started:
        """See `megatron_magi.comm.movement.Mover`."""
        _, args, layout, _ = rows
        out = layout.new_tensors(args.num_recv, args.device)
        far = self._far(layout, args.far, back=False).cast(rows._replace(args=args.far))
        near = self._near(layout, args.near, back=False).cast(rows._replace(args=args.near), (out, args.near_rows))
        relay = self._relay(layout, args.relay, back=False)

        def pass_on(arrived: list[torch.Tensor]) -> Started:
            return relay.cast(SentRows(arrived, args.relay, layout), (out, args.relay_rows))

        relayed = _Next(far, pass_on, args.device)

        def finish() -> list[torch.Tensor]:
            near.finish()
            relayed.result()
            return out

        return Started((*near.works, relayed), (*far.buffers, *near.buffers, *out), finish)

    def give_back(self, rows: SentRows[LevelArgs]) -> Started:
        """See `megatron_magi.comm.movement.Mover`; the result is in the order of `LevelArgs.arrivals`."""
        _, args, layout, _ = rows
        received = layout.new_buffer(args.near.num_send + args.far.num_send, args.device)
        home, away = received[: args.near.num_send], received[args.near.num_send :]
        relayed = self._sum_of_node(rows)
        near = self._near(layout, args.near, back=True)
        near_back = near.give_back(rows._replace(args=args.near), args.near_rows, home)
        far = self._far(layout, args.far, back=True)

        def cross(sums: list[torch.Tensor]) -> Started:
            return far.give_back(SentRows(sums, args.far, layout, kept=True), None, away)

        crossed = _Next(relayed, cross, args.device)

        def finish() -> torch.Tensor:
            near_back.finish()
            crossed.result()
            return received

        return Started((*near_back.works, crossed), (*relayed.buffers, *near_back.buffers, received), finish)

    def _sum_of_node(self, rows: SentRows[LevelArgs]) -> Started:
        """Sums the partial rows of the node's ranks, to one for each row received by `LevelArgs.far`."""
        _, args, layout, _ = rows
        relayed = rows._replace(args=args.relay)
        sums = [x.zero_() for x in layout.new_tensors(args.far.num_recv, args.device)]
        mover = self._relay(layout, args.relay, back=True)
        if isinstance(mover, Adder) and not self._merges and can_add(layout, sums):
            return mover.add(relayed, sums, args.relay_rows)
        started = mover.give_back(relayed, args.relay_rows)

        def finish() -> list[torch.Tensor]:
            arrived = started.finish()
            if self._merges:
                sums[1].fill_(-torch.inf)
                self._ops.merge_rows(PartialRows(*layout.views(arrived)), args.relay.arrivals, PartialRows(*sums))
            else:
                self._ops.add_rows(arrived, layout, args.relay.arrivals, sums)
            return sums

        return started._replace(buffers=(*started.buffers, *sums), finish=finish)


class _Next:
    """A `Work`: a step that starts when another one is complete."""

    def __init__(self, first: Started, step: Callable[[Any], Started], device: torch.device) -> None:
        self._first, self._step = first, step
        self._result: Any = None
        self._event: torch.cuda.Event | None = None
        self._kept: tuple[Any, ...] = ()
        if device.type == "cuda":
            stream = _side_stream(device)
            # The first step may have no work that does: in a group of one rank, rows are moved on the caller's stream.
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                self._run()
                self._event = stream.record_event()

    def _run(self) -> None:
        for work in self._first.works:
            work.wait()
        started = self._step(self._first.finish())
        for work in started.works:
            work.wait()
        self._result = started.finish()
        self._kept = started.buffers

    def wait(self) -> None:
        """Makes the current stream wait; on CPUs the host waits."""
        if self._event is None:
            if self._result is None:
                self._run()
            return
        event, self._event = self._event, None
        current = torch.cuda.current_stream(event.device)  # the current device may be another
        current.wait_event(event)
        result = self._result if isinstance(self._result, list) else [self._result]
        for x in (*result, *self._kept):
            x.record_stream(current)

    def result(self) -> Any:
        """The result of the second step, after `wait`."""
        result, self._result, self._kept = self._result, None, ()
        return result

    def __del__(self) -> None:
        # After an error nobody waits for the work, but its memory is freed and must not be reused too early.
        with suppress(Exception):
            if self._event is not None:
                self.wait()


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """One for each device: the allocator has separate memory for each stream."""
    return torch.cuda.Stream(device, priority=-1)
