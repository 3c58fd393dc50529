"""Ranks of one host read each other's rows where they lie, over NVLink: nothing is packed, sent or ordered.

A rank publishes the rows that others need in memory that all map, once and in chunks, on the stream of the caller.
On a stream of its own each rank reads exactly the rows it needs into their place, or adds them there, as chunks come.
Flags in the same memory stand for what NCCL would do; the host waits for nothing. A kernel that waits longer than the
time-out of the group ends, and what it waited for is raised by the next call. See ``csrc/group_collective/peers.cuh``.
"""

from __future__ import annotations

import ctypes
import struct
import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.distributed as dist

from megatron_magi.comm.calls import add_guard
from megatron_magi.comm.cast_args import GroupCastArgs
from megatron_magi.comm.movement import Started
from megatron_magi.comm.peers import MAX_RANKS, PEERS, Meeting, PeerMemory, refusal_of_host
from megatron_magi.comm.row_layout import RowLayout
from megatron_magi.comm.row_memory import ELEMENTS, MOST_TENSORS, WIDEST, Rows, with_rows
from megatron_magi.comm.slots import MAX_CHUNKS, Room, chunk_shift, slot_row_bytes
from megatron_magi.cuda.arriving import FLAG_BYTES, Arriving, part_rows
from megatron_magi.cuda.build import build
from megatron_magi.cuda.call_list import CallList, Patch, Place, Step
from megatron_magi.cuda.driver import Kernel, LaunchConfig, load_kernel

BULK_ROW_BYTES = 1024
"""Rows at least as long are read by TMA."""
_SLOT_ROWS = struct.Struct("4Q4q4i2iq")  # SlotRows of peers.cuh
_NUM_FETCHED, _NUM_BACK, _NUM_PUBLISHED, _NUM_CHUNKS = 0, 8, 16, 24  # bytes into PeerTables.counts

_CAST, _GIVE_BACK, _ADD, _ANNOUNCE = "cast", "give back", "add", "announce"
_BROKEN, _CALLS_PUBLISHED = 4 * (MAX_RANKS * MAX_CHUNKS + MAX_RANKS), 4 * (MAX_RANKS * MAX_CHUNKS + MAX_RANKS + 1)
"""Bytes into Control of peers.cuh."""


class Native:
    """A `Mover` for the ranks of one group; made by `native_of`."""

    def __init__(self, group: dist.ProcessGroup, meeting: Meeting, memory: PeerMemory, device: torch.device) -> None:
        self._meeting, self._memory, self._device = meeting, memory, device
        self._notice = memoryview(memory.notice.numpy())
        self._room = Room(memory)
        self._side = torch.cuda.Stream(device, priority=-1)
        self._last = -1  # stream on which rows were published
        self._beside = 0  # calls on the other stream that the last one has not been made to wait for
        self._flags = torch.zeros(FLAG_BYTES, dtype=torch.uint8, device=device)
        self._streams: dict[int, torch.cuda.Stream] = {}
        self._ready = torch.cuda.Event()
        self._events: list[torch.cuda.Event] = []
        self._lock = threading.Lock()
        _of_device(device).add(self)
        add_guard(group, self)

    def refusal(self, layout: RowLayout, most_rows: int | None) -> str | None:
        """Why rows cannot be moved, None if they can: then there is room for them. Collective, the same on all ranks.

        Args:
            layout: of the tensors.
            most_rows: how many rows of them any rank publishes; None if that is not known.

        Raises:
            RuntimeError: a rank did not come to an earlier call in time.
        """
        failure = self.failure()
        if failure is not None:
            raise RuntimeError(failure)
        return self._room.refusal(layout, most_rows)

    def cast(self, tensors: Sequence[torch.Tensor], args: GroupCastArgs, layout: RowLayout) -> Started:
        """See `megatron_magi.comm.movement.Mover`."""
        new = tensors[0].new_empty
        out = [new((args.num_recv, *shape), dtype=t) for shape, t in zip(layout.shapes, layout.dtypes, strict=True)]
        work = self._run(_CAST, tensors, args, layout, _rows(out, layout.sizes))
        return Started((work,), tuple(out), lambda: out)

    def give_back(self, tensors: Sequence[torch.Tensor], args: GroupCastArgs, layout: RowLayout) -> Started:
        """See `megatron_magi.comm.movement.Mover`."""
        received = layout.new_buffer(args.num_send, tensors[0].device)
        address, size = received.data_ptr(), layout.row_bytes
        rows = [(address + offset, size, width) for offset, width in zip(layout.offsets, layout.sizes, strict=True)]
        work = self._run(_GIVE_BACK, tensors, args, layout, rows)
        return Started((work,), (received,), lambda: received)

    def add(
        self,
        tensors: Sequence[torch.Tensor],
        args: GroupCastArgs,
        layout: RowLayout,
        into: Sequence[torch.Tensor],
    ) -> Started:
        """`give_back` and the addition to ``into`` in one; the result is a list of these tensors."""
        partial, wide = layout.dtypes[0], into[0].dtype
        sizes = [size // partial.itemsize * wide.itemsize for size in layout.sizes]
        work = self._run(_ADD, tensors, args, layout, _rows(into, sizes), (partial, wide))
        return Started((work,), tuple(into), lambda: list(into))

    def arriving(
        self,
        tensors: Sequence[torch.Tensor],
        args: GroupCastArgs,
        layout: RowLayout,
        into: Sequence[torch.Tensor],
        sources: Sequence[Place],
        places: tuple[Place, Place],
    ) -> Arriving:
        """`cast` for a kernel that waits for rows as they come, as steps of a list of calls for `queue`.

        Args:
            tensors, into: keys and values like those of the calls, and what they arrive in: rows of multiples of 16
                bytes, contiguous.
            args, layout: as in `cast`.
            sources, places: where they will be.
        """
        rows, results = _rows(tensors, layout.sizes), _rows(into, layout.sizes)
        publish, pull = self._launches(_ANNOUNCE, args, layout, rows, results, ())
        _, control, *_ = own = self._own_memory()
        return Arriving(
            into, places, (publish.step(sources), pull.step(places)), control + _CALLS_PUBLISHED,
            self._flags.data_ptr(), control + _BROKEN, own[2], own[3],
            # Who waits takes all SMs. Where two groups did so, on two streams, each could keep from publishing what the
            # other's ranks wait for.
            overlaps=len(_of_device(self._device)) == 1,
        )  # fmt: skip

    def adding(
        self,
        tensors: Sequence[torch.Tensor],
        args: GroupCastArgs,
        layout: RowLayout,
        into: Sequence[torch.Tensor],
        sources: Sequence[Place],
        places: Sequence[Place],
    ) -> tuple[Step, Step]:
        """`add` as steps: what publishes, and what adds. Arguments as in `arriving`."""
        partial, wide = layout.dtypes[0], into[0].dtype
        sizes = [size // partial.itemsize * wide.itemsize for size in layout.sizes]
        rows, results = _rows(tensors, layout.sizes), _rows(into, sizes)
        publish, pull = self._launches(_ADD, args, layout, rows, results, (partial, wide))
        return publish.step(sources), pull.step(places)

    def version(self) -> tuple[int, int, int]:
        """Another one when steps no longer hold."""
        return self._memory.generation, self._memory.slot_bytes, len(_of_device(self._device))

    def queue(self, calls: CallList, raw: int, *addresses: int) -> None:
        """Queues a list of calls, some of which are steps of this object, on the current stream.

        Args:
            calls: of `version`.
            raw: handle of the stream.
            addresses: see `CallList.queue`.

        Raises:
            RuntimeError: a rank did not come to an earlier call in time.
        """
        failure = self.failure()
        if failure is not None:
            raise RuntimeError(failure)
        with self._lock:
            if self._last != raw or self._beside:
                current = self._take_turn(raw)
                if self._beside:
                    current.wait_stream(self._side)
                    self._beside = 0
            calls.queue(*addresses)

    def _own_memory(self) -> tuple[int, int, int, int]:
        """Addresses of this rank's slots and flags and of the notice, and the time-out in nanoseconds."""
        numbers = PEERS.unpack(self._memory.packed)
        rank = self._meeting.rank
        return numbers[rank], numbers[MAX_RANKS + rank], numbers[2 * MAX_RANKS], numbers[2 * MAX_RANKS + 2]

    def failure(self) -> str | None:
        """What a kernel that gave up waited for, or that all were told to; None as long as none did."""
        if not any(self._notice[:5]):
            return None
        absent, part = self._notice[1], self._notice[4]
        waited = (
            f"attention of {self._meeting.names([self._meeting.rank])} waited for part {part} of the keys it fetches"
        )
        if absent:
            names = self._meeting.names([absent - 1])
            text = f"group collective: {names} did not come within {self._meeting.timeout_s:g} s"
            return f"{text}; {waited}" if part else text
        if self._notice[0]:
            return "group collective: the group was ended by an earlier error"
        return f"group collective: {waited} for {self._meeting.timeout_s:g} s" if part else None

    def stop(self) -> None:
        """Makes kernels that wait give up."""
        self._notice[0] = 1

    def _run(
        self,
        kind: str,
        tensors: Sequence[torch.Tensor],
        args: GroupCastArgs,
        layout: RowLayout,
        results: list[Rows],
        types: tuple[torch.dtype, ...] = (),
    ) -> _Done:
        """Publishes ``tensors`` on the current stream, and reads what others publish on a stream beside it.

        Args:
            kind: `_CAST`, `_GIVE_BACK` or `_ADD`.
            tensors: what is published.
            args: which rows travel where.
            layout: of ``tensors``.
            results: what is read goes there.
            types: of what is published, and of the rows that it is added to; empty where it is copied.
        """
        tensors = [with_rows(x) for x in tensors]
        rows = _rows(tensors, layout.sizes)
        publish, pull = self._launches(kind, args, layout, rows, results, types)
        with self._lock:
            raw = torch._C._cuda_getCurrentRawStream(self._device.index)
            current = self._take_turn(raw)
            self._beside += 1
            self._ready.record(current)
            publish.fire(rows, raw)
            self._side.wait_event(self._ready)
            pull.fire(results, self._side.cuda_stream)
            event = self._events.pop() if self._events else torch.cuda.Event()
            event.record(self._side)
        return _Done(event, self)

    def _take_turn(self, raw: int) -> torch.cuda.Stream:
        """The current stream, of which this is the handle: calls are published one after the other."""
        current = self._stream(raw)
        if self._last not in (-1, raw):
            current.wait_stream(self._stream(self._last))
        self._last = raw
        return current

    def _launches(self, kind: str, args: GroupCastArgs, *how: object) -> tuple[_Launch, _Launch]:
        """`_prepare`, once for all calls that differ in addresses alone; ``how``: the rest of its arguments."""
        _, rows, results, types = how
        forms = [(address % WIDEST, stride, size) for address, stride, size in (*rows, *results)]
        num_groups = len(_of_device(self._device))
        key = (self._memory.generation, num_groups, kind, types, *forms)
        known = args.launches.get(self)
        if known is None:
            known = args.launches[self] = {}
        launches = known.get(key)
        if launches is None:
            launches = known[key] = self._prepare(kind, args, *how, num_groups)
        return launches

    def _prepare(
        self,
        kind: str,
        args: GroupCastArgs,
        layout: RowLayout,
        rows: list[Rows],
        results: list[Rows],
        types: tuple[torch.dtype, ...],
        num_groups: int,
    ) -> tuple[_Launch, _Launch]:
        """The kernels of a call with their parameters, all but addresses of rows."""
        tables, device, row_bytes = args.peers, self._device, slot_row_bytes(layout)
        assert tables is not None  # or there would be a refusal
        counts = tables.counts.data_ptr()
        published: tuple[int, ...] = (0, 0, counts + _NUM_FETCHED)
        if kind in (_CAST, _ANNOUNCE):
            published = tables.published.data_ptr(), tables.starts.data_ptr(), counts + _NUM_CHUNKS
            pulled: tuple[int, ...] = (tables.fetch.data_ptr(), counts + _NUM_FETCHED)
        elif kind == _GIVE_BACK:
            pulled = (tables.back.data_ptr(), counts + _NUM_BACK)
        else:
            targets = args.arrivals.rows.data_ptr(), args.arrivals.starts.data_ptr()
            pulled = (*targets, tables.parts.data_ptr(), counts + _NUM_PUBLISHED)
        shift, packed = chunk_shift(row_bytes), self._memory.packed
        unit = _widest(rows)
        publish = _kernel("publish_rows", (f"UNIT={unit}",), device)
        if types:
            vector, unit_to = _vector(results, *types), types[1].itemsize
            defines = f"FROM={ELEMENTS[types[0]]}", f"INTO={ELEMENTS[types[1]]}", f"VECTOR={vector}"
            pull, unit_to = _kernel("pull_sums", defines, device), vector * unit_to
        else:
            unit_to = WIDEST if kind == _ANNOUNCE else _widest(results)
            is_bulk = unit_to == WIDEST and row_bytes >= BULK_ROW_BYTES
            pull = _kernel("pull_bulk" if is_bulk else "pull_rows", () if is_bulk else (f"UNIT={unit_to}",), device)
        if kind == _ANNOUNCE:
            pull = _kernel("pull_bulk", ("ANNOUNCES=1",), device)
            after: tuple[int, ...] = (self._flags.data_ptr(), part_rows(args.num_recv))
        else:
            after = ()
        return (
            _Launch(
                publish, num_groups, packed, pack_slot_rows(rows, row_bytes, unit, publish.loads), (*published, shift)
            ),
            _Launch(
                pull,
                num_groups,
                packed,
                pack_slot_rows(results, row_bytes, unit_to, pull.loads),
                (*pulled, shift, *after),
            ),
        )

    def _stream(self, raw: int) -> torch.cuda.Stream:
        """The stream of a handle, which is the current one, or was."""
        stream = self._streams.get(raw)
        if stream is None:
            stream = self._streams[raw] = torch.cuda.current_stream(self._device)
        return stream

    def await_event(self, event: torch.cuda.Event) -> None:
        """Makes the current stream wait for an event of this object, and takes that back."""
        raw = torch._C._cuda_getCurrentRawStream(self._device.index)
        self._stream(raw).wait_event(event)
        self._events.append(event)
        self._beside -= raw == self._last and self._beside > 0


class _Done:
    """The end of a call: a `Work`."""

    def __init__(self, event: torch.cuda.Event, native: Native) -> None:
        self._event: torch.cuda.Event | None = event
        self._native = native

    def wait(self) -> None:
        """Makes the current stream wait."""
        if self._event is not None:
            event, self._event = self._event, None
            self._native.await_event(event)

    def __del__(self) -> None:
        # Who has been stopped by an error does not wait, but frees memory that is being written.
        with suppress(Exception):
            self.wait()


class _Shape(NamedTuple):
    """How a kernel is launched: few SMs for what runs beside attention.

    Attributes:
        threads, num_blocks, shared_bytes: of the launch.
        num_tables: addresses among its parameters.
        loads: of a thread before its first store.
    """

    threads: int
    num_blocks: int
    num_tables: int
    loads: int = 8
    shared_bytes: int = 0


SHAPES = {
    "publish_rows": _Shape(512, 64, 3),
    "pull_rows": _Shape(512, 32, 2),
    "pull_bulk": _Shape(128, 16, 2, shared_bytes=4 * 12 * 4096),
    "pull_sums": _Shape(512, 64, 4, loads=4),
}


MOST_WAITING = 128
"""Blocks that may wait to read, and as many to publish, of all groups of a GPU together: of 132 SMs each takes two such
blocks at least, so those that others wait for always find room."""


def blocks_of(name: str, num_groups: int) -> int:
    """Blocks of a kernel where so many groups of a GPU may wait at once."""
    return min(SHAPES[name].num_blocks, MOST_WAITING // num_groups)


class _PeerKernel(NamedTuple):
    """A kernel on one device."""

    name: str
    kernel: Kernel
    params: struct.Struct
    loads: int


def needed_kernels(partial: torch.dtype, wide: torch.dtype) -> list[tuple[str, tuple[str, ...]]]:
    """Source and macros of the kernels that calls of attention take.

    Args:
        partial, wide: of the rows that are summed, and of their sums. Rows of heads are multiples of 16 bytes.
    """
    sums = f"FROM={ELEMENTS[partial]}", f"INTO={ELEMENTS[wide]}", f"VECTOR={WIDEST // partial.itemsize}"
    rows = [(name, (f"UNIT={WIDEST}",)) for name in ("publish_rows", "pull_rows")]
    return [
        (_source(name), macros)
        for name, macros in (*rows, ("pull_bulk", ()), ("pull_bulk", ("ANNOUNCES=1",)), ("pull_sums", sums))
    ]


def _source(name: str) -> str:
    return f"group_collective/{name}.cu"


@cache
def _kernel(name: str, defines: tuple[str, ...], device: torch.device) -> _PeerKernel:
    shape = SHAPES[name]
    image = build(_source(name), defines)
    kernel = load_kernel(image, f"magi_{name}", shape.threads, shape.shared_bytes, device)
    more = "Qq" if "ANNOUNCES=1" in defines else ""  # where it says what has arrived, and how many rows at a time
    params = struct.Struct(f"{PEERS.size}s{_SLOT_ROWS.size}s{shape.num_tables}Qq{more}")
    return _PeerKernel(name, kernel, params, shape.loads)


class _Launch:
    """A kernel with its parameters in memory; a call fills in the addresses of rows."""

    def __init__(self, kernel: _PeerKernel, num_groups: int, peers: bytes, rows: bytes, rest: tuple[int, ...]) -> None:
        self._kernel = kernel.kernel
        self._params = ctypes.create_string_buffer(kernel.params.pack(peers, rows, *rest))
        self._pointers = (ctypes.c_void_p * 1)(ctypes.addressof(self._params))
        self._addresses = (ctypes.c_uint64 * MOST_TENSORS).from_buffer(self._params, PEERS.size)
        self._config = LaunchConfig(self._kernel, blocks_of(kernel.name, num_groups))

    def step(self, places: Sequence[Place]) -> Step:
        """The launch with parameters of its own; ``places``: where rows will be."""
        memory = ctypes.create_string_buffer(self._params.raw, len(self._params))
        patches = tuple(Patch(PEERS.size + 8 * i, *place) for i, place in enumerate(places))
        config = LaunchConfig(self._kernel, self._config.grid[0])
        return Step(self._kernel, config, ctypes.addressof(memory), memory, patches)

    def fire(self, rows: list[Rows], stream: int) -> None:
        """Queues the kernel on a stream; the parameters are copied."""
        for i, row in enumerate(rows):
            self._addresses[i] = row[0]
        self._config.stream = stream
        self._kernel.launch(ctypes.addressof(self._config), self._pointers)


def _widest(rows: list[Rows]) -> int:
    """Bytes of the widest access that all addresses, strides and lengths allow."""
    bits = WIDEST
    for row in rows:
        for number in row:
            bits |= number
    return bits & -bits


def _vector(rows: list[Rows], partial: torch.dtype, wide: torch.dtype) -> int:
    """Elements of an access when rows of one type are added to ``rows`` of another."""
    bits = WIDEST * max(wide.itemsize // partial.itemsize, 1)
    for address, stride, size in rows:
        bits |= stride | size | (address if address % WIDEST else 0)
    return min((bits & -bits) // wide.itemsize, WIDEST // partial.itemsize)


def pack_slot_rows(rows: list[Rows], row_bytes: int, unit: int, loads: int) -> bytes:
    """``SlotRows`` of peers.cuh.

    Args:
        rows: of each tensor, in their order in a slot.
        row_bytes: of a row in a slot.
        unit: bytes of an access to ``rows``.
        loads: accesses of a thread before it waits for the first.
    """
    rest = (0,) * (MOST_TENSORS - len(rows))
    *begin, units = accumulate((size // unit for _, _, size in rows), initial=0)
    log2_lanes = min(max(-(-units // loads), 1) - 1, 31).bit_length()
    return _SLOT_ROWS.pack(
        *(row[0] for row in rows), *rest, *(row[1] for row in rows), *rest, *begin, *((units,) * len(rest)),
        units, log2_lanes, row_bytes,
    )  # fmt: skip


def _rows(tensors: Sequence[torch.Tensor], sizes: Sequence[int]) -> list[Rows]:
    return [(x.data_ptr(), x.stride(0) * x.element_size(), size) for x, size in zip(tensors, sizes, strict=True)]


@cache
def _of_device(device: torch.device) -> weakref.WeakSet[Native]:
    """What serves the groups of a GPU."""
    return weakref.WeakSet()


_known: weakref.WeakKeyDictionary[dist.ProcessGroup, tuple[Native | None, str] | RuntimeError]
_known = weakref.WeakKeyDictionary()
"""One a group, decided when it is first asked for, and for good: ranks that asked again would ask alone."""


def native_of(group: dist.ProcessGroup | None, device: torch.device) -> tuple[Native | None, str]:
    """What moves rows of the ranks of a group; None, with the reason, where it cannot. Collective the first time.

    Args:
        group: the ranks; the default group when None.
        device: this rank's GPU.

    Raises:
        RuntimeError: ranks did not come within the time-out of the group, now or when it was first asked for.
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


def _decide(group: dist.ProcessGroup, device: torch.device) -> tuple[Native | None, str]:
    meeting = Meeting(group)
    reason = refusal_of_host(meeting, device, len(_of_device(device)))
    if reason is not None:
        return None, reason
    memory, reason = PeerMemory.make(meeting, device)
    return (None if memory is None else Native(group, meeting, memory, device)), reason
