"""Ranks of one host write rows directly into each other's memory over NVLink, without packing.

One kernel, on a side stream, writes the rows that other ranks need into their slots, chunk by chunk, and copies
received rows to their destination, or adds them there, as chunks arrive. For a kernel that waits for rows itself, rows
are published in the rank's own slot instead and read by the other ranks. Kernels synchronize through flags in the
shared memory; the host does not wait. A kernel that waits longer than the group's timeout ends, and the next call
raises an error that says what it waited for. See ``csrc/group_collective/peers.cuh``.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from typing import NamedTuple

import torch
import torch.distributed as dist

from megatron_magi.comm.cast_args import GroupCastArgs
from megatron_magi.comm.collective_checks import add_guard
from megatron_magi.comm.movement import FlatRows, Into, Started
from megatron_magi.comm.peer_kernels import (
    SHAPES,
    SUM_LOADS,
    PeerLaunch,
    blocks_apart,
    blocks_of,
    blocks_that_pull,
    kernel_of,
    params_of,
    put_kernel,
)
from megatron_magi.comm.peer_tables import ROUTE_WORDS
from megatron_magi.comm.peers import PeerMemory, Rendezvous, control_struct, refusal_of_host
from megatron_magi.comm.row_layout import RowLayout
from megatron_magi.comm.row_memory import WIDEST, Rows, rows_in, rows_of, slot_rows, vector_of, widest, with_rows
from megatron_magi.comm.slots import Room, chunk_shift, sent_shift, slot_row_bytes
from megatron_magi.comm.sm_budget import share_of
from megatron_magi.cuda.arriving import FLAG_BYTES, READ_BEHIND, Arriving, StepRows, part_rows
from megatron_magi.cuda.launch_list import LaunchList, Step
from megatron_magi.runtime.graph_capture import is_capturing

_NUM_FETCHED, _NUM_CHUNKS = 0, 16  # bytes into PeerTables.counts
_SEND, _TAKE = 1, 2  # Role of put.cuh
_BOTH, _APART = (_SEND | _TAKE,), (_SEND, _TAKE)

_CAST, _GIVE_BACK, _ADD, _GET = "cast", "give back", "add", "get"


class _Exchange(NamedTuple):
    """Parameters of a call.

    Attributes:
        kind: `_CAST`, `_GIVE_BACK` or `_ADD`.
        types: dtypes of the sent rows and of the rows to which they are added; empty if rows are copied.
        roles: of each of its kernels: sends, receives, or both.
        index: address of the index of result rows of a cast, or of the rows that go back; 0 for none.
    """

    kind: str
    types: tuple[torch.dtype, ...]
    roles: tuple[int, ...]
    index: int = 0


class Native:
    """An `Adder` for the ranks of one group; made by `native_of`."""

    def __init__(
        self, group: dist.ProcessGroup, rendezvous: Rendezvous, memory: PeerMemory, device: torch.device
    ) -> None:
        self._rendezvous, self._memory, self._device = rendezvous, memory, device
        self._notice = memoryview(memory.notice.numpy())
        self._room = Room(memory, functools.partial(is_capturing, device))
        self._num_sms = torch.cuda.get_device_properties(device).multi_processor_count
        self._side = torch.cuda.Stream(device, priority=-1)
        self._last = -1  # handle of the stream on which rows were last published
        self._beside = 0  # calls on the side stream for which the stream `_last` does not wait yet
        # Whether one of these sends, or leaves too few SMs to a kernel that sends. `await_event` does not write it.
        self._sends_beside = False
        self._joins = 0  # number of times that stream has waited for all of them
        self._flags = torch.zeros(FLAG_BYTES, dtype=torch.uint8, device=device)
        self._streams: dict[int, torch.cuda.Stream] = {}
        self._ready, self._started = torch.cuda.Event(), torch.cuda.Event()
        self._started.record(self._side)  # it exists from then on
        self._events: list[torch.cuda.Event] = []
        self._lock = threading.Lock()
        _of_device(device).add(self)
        add_guard(group, self)

    def refusal(self, layout: RowLayout, most_rows: int | None) -> str | None:
        """The reason why rows cannot be moved; None if they can, with memory for them. Collective, equal on all ranks.

        Args:
            layout: of the tensors.
            most_rows: most rows of them that any rank publishes; None if not known.

        Raises:
            RuntimeError: a rank timed out in an earlier call.
        """
        if (failure := self.failure()) is not None:
            raise RuntimeError(failure)
        return self._room.refusal(layout, most_rows)

    def cast(self, rows: FlatRows, into: Into | None = None) -> Started:
        """See `megatron_magi.comm.movement.PlacingMover`."""
        out, index = into or (rows.layout.new_tensors(rows.args.num_recv, rows.args.device), None)
        work, held = self._run(_CAST, rows, rows_of(out, rows.layout.sizes), index=index)
        return Started((work,), (*out, *held), lambda: list(out))

    def give_back(
        self, rows: FlatRows, index: torch.Tensor | None = None, received: torch.Tensor | None = None
    ) -> Started:
        """See `megatron_magi.comm.movement.PlacingMover`."""
        if received is None:
            received = rows.layout.new_buffer(rows.args.num_send, rows.tensors[0].device)
        work, held = self._run(_GIVE_BACK, rows, rows_in(received, rows.layout), index=index)
        return Started((work,), (received, *held), lambda: received)

    def add(self, rows: FlatRows, into: Sequence[torch.Tensor], index: torch.Tensor | None = None) -> Started:
        """`give_back` and the addition to ``into`` in one; the result is a list of these tensors."""
        types = rows.layout.dtypes[0], into[0].dtype
        work, held = self._run(_ADD, rows, rows_of(into, rows.layout.sizes_in(types[1])), types, index)
        return Started((work,), (*into, *held), lambda: list(into))

    def arriving(self, rows: StepRows, args: GroupCastArgs, layout: RowLayout) -> Arriving:
        """`cast` for a kernel that waits for rows as they arrive, as a step of a list of calls for `queue`.

        Args:
            rows: keys and values, and their destination: contiguous rows of a multiple of 16 bytes.
            args, layout: as in `cast`.
        """
        tensors, into, sources, places = rows
        sent, results = rows_of(tensors, layout.sizes), rows_of(into, layout.sizes)
        prepare = functools.partial(self._prepare_get, args, layout, sent, results)
        (launch,) = self._launches((_GET,), args, sent, results, prepare)
        peers = self._memory.peers
        control = peers.control[self._rendezvous.rank]
        # A waiting kernel occupies all SMs. With two groups, on two streams, each could block the publishing kernel for
        # which the other group's ranks wait.
        overlaps = len(_of_device(self._device)) == 1
        return Arriving(
            into, places, launch.step(sources, places), control + control_struct().get_call.offset,
            self._flags.data_ptr(), control + control_struct().broken.offset, peers.notice, peers.timeout_ns, overlaps,
        )  # fmt: skip

    def adding(self, rows: StepRows, args: GroupCastArgs, layout: RowLayout) -> Step:
        """`add` as a step after attention. Arguments as in `arriving`."""
        tensors, into, sources, places = rows
        types = layout.dtypes[0], into[0].dtype
        sent, results = rows_of(tensors, layout.sizes), rows_of(into, layout.sizes_in(types[1]))
        (exchange,) = self._exchanges(_Exchange(_ADD, types, _BOTH), args, layout, sent, results)
        # The kernel that runs concurrently is limited by memory, not by SMs, if much is sent.
        return exchange.step(sources, places, num_blocks=share_of(self._num_sms, len(_of_device(self._device))))

    def version(self) -> tuple[int, int, int]:
        """Changes when steps become invalid."""
        return self._memory.generation, self._memory.slot_bytes, len(_of_device(self._device))

    def queue(self, calls: LaunchList, raw: int, *addresses: int) -> None:
        """Launches a list of calls with steps of this object on the current stream.

        Args:
            calls: of `version`.
            raw: handle of the stream.
            addresses: see `LaunchList.queue`.

        Raises:
            RuntimeError: a rank timed out in an earlier call.
        """
        if (failure := self.failure()) is not None:
            raise RuntimeError(failure)
        with self._lock:
            captures = is_capturing(self._device)
            if captures or self._beside or self._last != raw:
                current = self._take_turn(raw, captures)
                if self._beside:
                    if captures:  # the other stream may not be captured yet, and a graph cannot wait for it
                        self._ready.record(current)
                        self._side.wait_event(self._ready)
                    self._join(current)
            calls.queue(*addresses)

    def failure(self) -> str | None:
        """What a kernel that timed out waited for, or that kernels were stopped; None if none did."""
        if not any(self._notice[:5]):
            return None
        absent, part = self._notice[1], self._notice[4]
        this_rank = self._rendezvous.names([self._rendezvous.rank])
        waited = f"attention of {this_rank} waited for part {part} of the keys it fetches"
        if absent:
            names = self._rendezvous.names([absent - 1])
            text = f"group collective: {names} did not arrive within {self._rendezvous.timeout_s:g} s"
            return f"{text}; {waited}" if part else text
        if self._notice[0]:
            return "group collective: the group was ended by an earlier error"
        return f"group collective: {waited} for {self._rendezvous.timeout_s:g} s" if part else None

    def is_captured(self) -> bool:
        """Whether CUDA graphs hold launches."""
        return self._room.has_graphs

    def forget_graphs(self) -> None:
        """To be called on all ranks when no CUDA graph with captured calls is left: their slots may be freed."""
        self._room.forget_graphs()

    def stop(self) -> None:
        """Stops waiting kernels."""
        self._notice[0] = 1

    def _run(
        self,
        kind: str,
        sent: FlatRows,
        results: list[Rows],
        types: tuple[torch.dtype, ...] = (),
        index: torch.Tensor | None = None,
    ) -> tuple[_Done, list[torch.Tensor]]:
        """Sends rows to the ranks that need them, and receives theirs, on a side stream.

        Args:
            kind: `_CAST`, `_GIVE_BACK` or `_ADD`.
            sent: the rows; unless ``kept``, they are read on the current stream.
            results: destination of received rows.
            types: dtypes of the sent rows and of the rows to which they are added; empty if rows are copied.
            index: of result rows of a cast, or of the rows that go back; see `PlacingMover`.

        Returns:
            The end of the call, and the objects that must live until then.
        """
        _, args, layout, kept = sent
        captures = is_capturing(self._device)
        kept = kept and not captures  # in a graph, calls are ordered by its streams
        tensors = [with_rows(x) for x in sent.tensors]
        rows = rows_of(tensors, layout.sizes)
        exchange = _Exchange(kind, types, _BOTH if kept else _APART, _address(index))
        launches = self._exchanges(exchange, args, layout, rows, results)
        with self._lock:
            raw = torch._C._cuda_getCurrentRawStream(self._device.index)
            current = self._take_turn(raw, captures)
            self._ready.record(current)
            self._side.wait_event(self._ready)
            if not kept:
                self._join_senders(current)
                launches[0].fire(raw, rows, results)
            launches[-1].fire(self._side.cuda_stream, rows, results)
            if kept:  # the next kernel on the current stream may occupy all SMs until its end
                current.wait_event(self._started)
            self._sends_beside = (self._beside > 0 and self._sends_beside) or kept or bool(types)
            self._beside += 1
            event = self._events.pop() if self._events else torch.cuda.Event()
            event.record(self._side)
            joins = self._joins
        return _Done(event, joins, self), tensors if kept else []

    def _join(self, current: torch.cuda.Stream) -> None:
        """Makes the current stream wait for all calls."""
        current.wait_stream(self._side)
        self._beside, self._sends_beside, self._joins = 0, False, self._joins + 1

    def _join_senders(self, current: torch.cuda.Stream) -> None:
        """Before the current stream sends rows: makes it wait for all calls if one of them sends too."""
        if self._beside and self._sends_beside:
            self._join(current)

    def _take_turn(self, raw: int, captures: bool) -> torch.cuda.Stream:
        """The current stream, of handle ``raw``, ordered after the stream that published last."""
        current = self._stream(raw)
        if captures:  # the caller must order replays of the graph with other calls
            self._room.stays = True
            return current
        if self._last not in (-1, raw):
            current.wait_stream(self._stream(self._last))
        self._last = raw
        return current

    def _launches(
        self,
        kind: tuple,
        args: GroupCastArgs,
        rows: list[Rows],
        results: list[Rows],
        prepare: Callable[[int], tuple[PeerLaunch, ...]],
    ) -> tuple[PeerLaunch, ...]:
        """The result of ``prepare`` for a share of SMs, cached for calls that differ in addresses alone."""
        forms = [(address % WIDEST, stride, size) for address, stride, size in (*rows, *results)]
        share = share_of(self._num_sms, len(_of_device(self._device)))
        key = (self._memory.generation, share, *kind, *forms)
        known = args.launches.setdefault(self, {})
        launches = known.get(key)
        if launches is None:
            launches = known[key] = prepare(share)
        return launches

    def _exchanges(
        self, exchange: _Exchange, args: GroupCastArgs, layout: RowLayout, rows: list[Rows], results: list[Rows]
    ) -> tuple[PeerLaunch, ...]:
        """`_prepare`, cached."""
        prepare = functools.partial(self._prepare, exchange, args, layout, rows, results)
        return self._launches(exchange, args, rows, results, prepare)

    def _prepare(
        self,
        exchange: _Exchange,
        args: GroupCastArgs,
        layout: RowLayout,
        rows: list[Rows],
        results: list[Rows],
        share: int,
    ) -> tuple[PeerLaunch, ...]:
        """The kernels of a call, one for each of its roles, with all parameters except addresses of rows."""
        kind, types, roles, index = exchange
        tables, row_bytes = args.peers, slot_row_bytes(layout)
        assert tables is not None and args.most is not None  # or there would be a refusal
        row = 8 * ROUTE_WORDS * (_CAST, _GIVE_BACK, _ADD).index(kind)
        sent, order = (args.send_index, args.recv_order) if kind == _CAST else (args.recv_position, None)
        assert not index or args.recv_order is None
        there, back = (index, 0) if kind == _CAST else (0, index)
        tables_of = {"sent": back or _address(sent), "route": tables.routes.data_ptr() + row}
        unit, most = widest(rows), args.most.received if kind == _CAST else args.most.sent
        if types:
            rows_to, starts, order = args.arrivals.rows, args.arrivals.starts, args.arrivals.sources
            tables_of |= {"rows": rows_to.data_ptr(), "starts": starts.data_ptr(), "order": order.data_ptr()}
            vector = vector_of(results, *types)
            unit_to, loads_to = vector * types[1].itemsize, SUM_LOADS
            name, defines = put_kernel(unit, row_bytes, types, vector)
        else:
            unit = unit_to = min(unit, widest(results))
            name, defines = put_kernel(unit, row_bytes)
            tables_of |= {"rows": there, "order": _address(order)}
            loads_to = SHAPES[name].loads
        kernel = kernel_of(name, defines, self._device)
        params = params_of(name)(
            **{"from": slot_rows(rows, row_bytes, unit, SHAPES[name].loads)}, peers=self._memory.peers,
            to=slot_rows(results, row_bytes, unit_to, loads_to), chunk_shift=sent_shift(row_bytes, most), **tables_of,
        )  # fmt: skip
        blocks, started = blocks_apart(share, bool(types)), 0
        if roles == _BOTH:
            blocks, started = (blocks_of(name, share),), self._started.cuda_event
        launches = []
        for num_blocks, params.roles in zip(blocks, roles, strict=True):
            launches.append(PeerLaunch(kernel, num_blocks, params, started))
        return tuple(launches)

    def _prepare_get(
        self, args: GroupCastArgs, layout: RowLayout, rows: list[Rows], results: list[Rows], share: int
    ) -> tuple[PeerLaunch, ...]:
        """The kernel that publishes rows and pulls those of other ranks, likewise."""
        tables, row_bytes = args.peers, slot_row_bytes(layout)
        assert tables is not None
        counts, unit = tables.counts.data_ptr(), widest(rows)
        num_blocks = blocks_of("get_rows", share)
        kernel = kernel_of("get_rows", (f"UNIT={unit}",), self._device)
        loads = SHAPES["get_rows"].loads
        params = params_of("get_rows")(
            **{"from": slot_rows(rows, row_bytes, unit, loads)}, to=slot_rows(results, row_bytes, WIDEST, loads),
            peers=self._memory.peers, rows=tables.published.data_ptr(), starts=tables.starts.data_ptr(),
            num_chunks=counts + _NUM_CHUNKS, places=tables.fetch.data_ptr(), num_pulled=counts + _NUM_FETCHED,
            chunk_shift=chunk_shift(row_bytes), flags=self._flags.data_ptr(), part_rows=part_rows(args.num_recv),
            pullers=blocks_that_pull(num_blocks), num_cleared=READ_BEHIND if args.is_static else 0,
        )  # fmt: skip
        return (PeerLaunch(kernel, num_blocks, params),)

    def _stream(self, raw: int) -> torch.cuda.Stream:
        """The stream of a handle, which is or was the current one."""
        stream = self._streams.get(raw)
        if stream is None:
            stream = self._streams[raw] = torch.cuda.current_stream(self._device)
        return stream

    def await_event(self, event: torch.cuda.Event, joins: int) -> None:
        """Makes the current stream wait for the event of a call made after ``joins`` joins, and recycles the event."""
        raw = torch._C._cuda_getCurrentRawStream(self._device.index)
        self._stream(raw).wait_event(event)
        self._events.append(event)
        # A join since then has reset the count.
        self._beside -= raw == self._last and joins == self._joins and self._beside > 0


class _Done:
    """The end of a call: a `Work`."""

    def __init__(self, event: torch.cuda.Event, joins: int, native: Native) -> None:
        self._event: torch.cuda.Event | None = event
        self._joins, self._native = joins, native

    def wait(self) -> None:
        """Makes the current stream wait."""
        if self._event is not None:
            event, self._event = self._event, None
            self._native.await_event(event, self._joins)

    def __del__(self) -> None:
        # After an error nobody waits for the call, but its memory is freed and must not be reused too early.
        with suppress(Exception):
            self.wait()


def _address(x: torch.Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


@cache
def _of_device(device: torch.device) -> weakref.WeakSet[Native]:
    """The instances of all groups of a GPU."""
    return weakref.WeakSet()


_known: weakref.WeakKeyDictionary[dist.ProcessGroup, tuple[Native | None, str] | RuntimeError]
_known = weakref.WeakKeyDictionary()
"""One for each group, or the reason why there is none. Decided once: asking again would be collective."""


def native_of(group: dist.ProcessGroup | None, device: torch.device) -> tuple[Native | None, str]:
    """The instance of a group, or None and the reason why it is not possible. Collective on the first call.

    Args:
        group: the ranks; the default group when None.
        device: this rank's GPU.

    Raises:
        RuntimeError: ranks did not take part within the group's timeout, now or in the first call.
    """
    group = dist.group.WORLD if group is None else group
    assert group is not None
    if group not in _known:
        try:
            _known[group] = _decide(group, device)
        except RuntimeError as error:
            _known[group] = error.with_traceback(None)
            raise
    known = _known[group]
    if isinstance(known, RuntimeError):
        raise RuntimeError(str(known))
    return known


def present_native(group: dist.ProcessGroup) -> Native | None:
    """The instance of a group, if there is one; not collective."""
    known = _known.get(group)
    return known[0] if isinstance(known, tuple) else None


def _decide(group: dist.ProcessGroup, device: torch.device) -> tuple[Native | None, str]:
    rendezvous = Rendezvous(group)
    others = list(_of_device(device))
    reason = refusal_of_host(rendezvous, device, len(others), any(other.is_captured() for other in others))
    if reason is not None:
        return None, reason
    memory, reason = PeerMemory.make(rendezvous, device)
    return (None if memory is None else Native(group, rendezvous, memory, device)), reason
