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

import torch
import torch.distributed as dist

from megatron_magi.comm.calls import add_guard
from megatron_magi.comm.cast_args import GroupCastArgs
from megatron_magi.comm.movement import Started
from megatron_magi.comm.peer_tables import CHUNK_ROWS, PeerTables
from megatron_magi.comm.peers import PEERS, Meeting, PeerMemory, refusal_of_host
from megatron_magi.comm.row_layout import RowLayout
from megatron_magi.cuda.build import build
from megatron_magi.cuda.driver import Kernel, LaunchConfig, load_kernel

MOST_BYTES = 1 << 30
"""Of a slot, of which a rank has two; what does not fit travels otherwise."""
_LEAST_BYTES = 16 << 20
_MAX_CHUNKS = 1 << 16
_CHUNK_BYTES = 64 << 10  # about what is published together
_MAX_TENSORS = 4
_WIDEST = 16  # bytes of an access
_ELEMENTS = {torch.bfloat16: "BFloat", torch.float16: "Half", torch.float32: "float", torch.float64: "double"}
_SLOT_ROWS = struct.Struct("4Q4q4i2iq")  # SlotRows of peers.cuh
_NUM_FETCHED, _NUM_BACK, _NUM_PUBLISHED, _NUM_CHUNKS = 0, 8, 16, 24  # bytes into PeerTables.counts

_Row = tuple[int, int, int]
"""Rows in memory: address, bytes from one to the next, bytes of one."""


class Native:
    """A `Mover` for the ranks of one group; made by `native_of`."""

    def __init__(self, group: dist.ProcessGroup, meeting: Meeting, memory: PeerMemory, device: torch.device) -> None:
        self._meeting, self._memory, self._device = meeting, memory, device
        self._notice = memory.notice.numpy()
        self._most_bytes = MOST_BYTES
        self._side = torch.cuda.Stream(device, priority=-1)
        self._last: torch.cuda.Stream | None = None
        self._ready = torch.cuda.Event()
        self._events: list[torch.cuda.Event] = []
        self._lock = threading.Lock()
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
        if most_rows is None:
            return "needs args that were built with peers"
        if len(layout.sizes) > _MAX_TENSORS:
            return f"moves at most {_MAX_TENSORS} tensors at once, got {len(layout.sizes)}"
        row_bytes = slot_row_bytes(layout)
        num_bytes = row_bytes * most_rows
        if num_bytes > self._most_bytes or most_rows > _MAX_CHUNKS << chunk_shift(row_bytes):
            return f"moves at most {self._most_bytes} bytes a rank, got {most_rows} rows of {row_bytes}"
        if num_bytes > self._memory.slot_bytes or not self._memory.slot_bytes:
            wanted = max(_LEAST_BYTES, 1 << (num_bytes - 1).bit_length())
            before = self._memory.slot_bytes
            reason = self._memory.grow(wanted)
            if reason is not None:
                self._most_bytes = before
                return f"has no room for {wanted} bytes: {reason}"
        return None

    def cast(self, tensors: Sequence[torch.Tensor], args: GroupCastArgs, layout: RowLayout) -> Started:
        """See `megatron_magi.comm.movement.Mover`."""
        tables = _tables(args)
        new = tensors[0].new_empty
        out = [new((args.num_recv, *shape), dtype=t) for shape, t in zip(layout.shapes, layout.dtypes, strict=True)]
        counts = tables.counts.data_ptr()
        published = tables.published.data_ptr(), tables.starts.data_ptr(), counts + _NUM_CHUNKS
        pulled = tables.fetch.data_ptr(), counts + _NUM_FETCHED
        work = self._run(tensors, published, _rows(out, layout.sizes), None, pulled, layout)
        return Started((work,), tuple(out), lambda: out)

    def give_back(self, tensors: Sequence[torch.Tensor], args: GroupCastArgs, layout: RowLayout) -> Started:
        """See `megatron_magi.comm.movement.Mover`."""
        tables = _tables(args)
        received = layout.new_buffer(args.num_send, tensors[0].device)
        address, size = received.data_ptr(), layout.row_bytes
        rows = [(address + offset, size, width) for offset, width in zip(layout.offsets, layout.sizes, strict=True)]
        counts = tables.counts.data_ptr()
        pulled = tables.back.data_ptr(), counts + _NUM_BACK
        work = self._run(tensors, (0, 0, counts + _NUM_FETCHED), rows, None, pulled, layout)
        return Started((work,), (received,), lambda: received)

    def can_add(self, layout: RowLayout, into: Sequence[torch.Tensor]) -> bool:
        """Whether `add` takes these: tensors of equal dtypes, of 16 or 32 bits, or all of 64."""
        partial, wide = layout.dtypes[0], into[0].dtype
        known = {partial, wide} <= _ELEMENTS.keys() and (partial == torch.float64) == (wide == torch.float64)
        return known and all(t == partial for t in layout.dtypes) and all(x.dtype == wide for x in into)

    def add(
        self,
        tensors: Sequence[torch.Tensor],
        args: GroupCastArgs,
        layout: RowLayout,
        into: Sequence[torch.Tensor],
    ) -> Started:
        """`give_back` and the addition to ``into`` in one; the result is a list of these tensors."""
        tables, arrivals, types = _tables(args), args.arrivals, (layout.dtypes[0], into[0].dtype)
        counts = tables.counts.data_ptr()
        addresses = (t.data_ptr() for t in (arrivals.rows, arrivals.starts, tables.parts))
        sizes = [size // types[0].itemsize * types[1].itemsize for size in layout.sizes]
        work = self._run(
            tensors,
            (0, 0, counts + _NUM_FETCHED),
            _rows(into, sizes),
            types,
            (*addresses, counts + _NUM_PUBLISHED),
            layout,
        )
        return Started((work,), tuple(into), lambda: list(into))

    def failure(self) -> str | None:
        """What a kernel that gave up waited for, None as long as none did."""
        absent = int(self._notice[1])
        if not absent:
            return None
        names = self._meeting.names([absent - 1])
        return f"group collective: {names} did not come within {self._meeting.timeout_s:g} s"

    def stop(self) -> None:
        """Makes kernels that wait give up."""
        self._notice[0] = 1

    def _run(
        self,
        tensors: Sequence[torch.Tensor],
        published: tuple[int, ...],
        rows: list[_Row],
        types: tuple[torch.dtype, torch.dtype] | None,
        pulled: tuple[int, ...],
        layout: RowLayout,
    ) -> _Done:
        """Publishes ``tensors`` on the current stream, and reads what others publish on a stream beside it.

        Args:
            tensors: what is published.
            published, pulled: addresses of the tables of the kernels.
            rows: what is read goes there.
            types: of what is published, and of the rows that it is added to; None where it is copied.
            layout: of ``tensors``.
        """
        device, peers = self._device, self._memory.packed
        row_bytes = slot_row_bytes(layout)
        shift = chunk_shift(row_bytes)
        tensors = [_with_rows(x) for x in tensors]
        publish, publish_rows = _plain("publish_rows", _rows(tensors, layout.sizes), row_bytes, device)
        if types is None:
            pull, pull_rows = _plain("pull_rows", rows, row_bytes, device)
        else:
            pull, pull_rows = _summing(rows, types, row_bytes, device)
        with self._lock:
            current = torch.cuda.current_stream(device)
            if self._last is not None and self._last != current:
                current.wait_stream(self._last)  # calls are published one after the other
            self._last = current
            self._ready.record(current)
            publish.fire(peers, publish_rows, published, shift, current)
            self._side.wait_event(self._ready)
            pull.fire(peers, pull_rows, pulled, shift, self._side)
            event = self._events.pop() if self._events else torch.cuda.Event()
            event.record(self._side)
        return _Done(event, self._events, device)


class _Done:
    """The end of a call: a `Work`."""

    def __init__(self, event: torch.cuda.Event, events: list[torch.cuda.Event], device: torch.device) -> None:
        self._event: torch.cuda.Event | None = event
        self._events, self._device = events, device

    def wait(self) -> None:
        """Makes the current stream wait."""
        if self._event is not None:
            torch.cuda.current_stream(self._device).wait_event(self._event)
            self._events.append(self._event)
            self._event = None

    def __del__(self) -> None:
        # Who has been stopped by an error does not wait, but frees memory that is being written.
        with suppress(Exception):
            self.wait()


class _PeerKernel:
    """A kernel with room for its parameters, on one device."""

    def __init__(self, name: str, defines: tuple[str, ...], device: torch.device) -> None:
        threads, num_blocks = _SHAPES[name]
        image = build(f"group_collective/{name}.cu", defines)
        self._kernel: Kernel = load_kernel(image, f"magi_{name}", threads, 0, device)
        tables = {"publish_rows": 3, "pull_rows": 2, "pull_sums": 4}[name]
        self._layout = struct.Struct(f"{PEERS.size}s{_SLOT_ROWS.size}s{tables}Qq")
        self._params = ctypes.create_string_buffer(self._layout.size)
        self._pointers = (ctypes.c_void_p * 1)(ctypes.addressof(self._params))
        self._config = LaunchConfig(self._kernel, num_blocks)

    def fire(
        self,
        peers: bytes,
        rows: bytes,
        tables: tuple[int, ...],
        shift: int,
        stream: torch.cuda.Stream,
    ) -> None:
        """Queues the kernel on a stream."""
        self._layout.pack_into(self._params, 0, peers, rows, *tables, shift)
        self._config.stream = stream.cuda_stream
        self._kernel.launch(ctypes.addressof(self._config), self._pointers)


_SHAPES = {"publish_rows": (256, 128), "pull_rows": (512, 32), "pull_sums": (512, 64)}
"""Threads and blocks of each kernel: few processors for what runs beside attention."""
_LOADS = {"publish_rows": 8, "pull_rows": 8, "pull_sums": 4}  # of a thread before its first store


@cache
def _kernel(name: str, defines: tuple[str, ...], device: torch.device) -> _PeerKernel:
    return _PeerKernel(name, defines, device)


def _plain(name: str, rows: list[_Row], row_bytes: int, device: torch.device) -> tuple[_PeerKernel, bytes]:
    """The kernel that copies such rows, and ``SlotRows`` for it."""
    bits = _WIDEST
    for row in rows:
        for number in row:
            bits |= number
    unit = bits & -bits
    return _kernel(name, (f"UNIT={unit}",), device), pack_slot_rows(rows, row_bytes, unit, _LOADS[name])


def _summing(
    rows: list[_Row], types: tuple[torch.dtype, torch.dtype], row_bytes: int, device: torch.device
) -> tuple[_PeerKernel, bytes]:
    """The kernel that adds to such rows, and ``SlotRows`` for it."""
    partial, wide = types
    bits = _WIDEST * wide.itemsize // partial.itemsize if wide.itemsize > partial.itemsize else _WIDEST
    for address, stride, size in rows:
        bits |= stride | size | (address if address % _WIDEST else 0)
    vector = min((bits & -bits) // wide.itemsize, _WIDEST // partial.itemsize)
    defines = f"FROM={_ELEMENTS[partial]}", f"INTO={_ELEMENTS[wide]}", f"VECTOR={vector}"
    packed = pack_slot_rows(rows, row_bytes, vector * wide.itemsize, _LOADS["pull_sums"])
    return _kernel("pull_sums", defines, device), packed


def pack_slot_rows(rows: list[_Row], row_bytes: int, unit: int, loads: int) -> bytes:
    """``SlotRows`` of peers.cuh.

    Args:
        rows: of each tensor, in their order in a slot.
        row_bytes: of a row in a slot.
        unit: bytes of an access to ``rows``.
        loads: accesses of a thread before it waits for the first.
    """
    rest = (0,) * (_MAX_TENSORS - len(rows))
    *begin, units = accumulate((size // unit for _, _, size in rows), initial=0)
    log2_lanes = min(max(-(-units // loads), 1) - 1, 31).bit_length()
    return _SLOT_ROWS.pack(
        *(row[0] for row in rows), *rest, *(row[1] for row in rows), *rest, *begin, *((units,) * len(rest)),
        units, log2_lanes, row_bytes,
    )  # fmt: skip


def slot_row_bytes(layout: RowLayout) -> int:
    """Bytes of a row in a slot: its tensors side by side, and a gap after the last."""
    return max(-(-sum(layout.sizes) // _WIDEST), 1) * _WIDEST


def chunk_shift(row_bytes: int) -> int:
    """Log2 of the rows that are published together."""
    return min(max(_CHUNK_BYTES // row_bytes, CHUNK_ROWS).bit_length() - 1, 16)


def _rows(tensors: Sequence[torch.Tensor], sizes: Sequence[int]) -> list[_Row]:
    return [(x.data_ptr(), x.stride(0) * x.element_size(), size) for x, size in zip(tensors, sizes, strict=True)]


def _with_rows(x: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy, with contiguous rows."""
    return x if not x.shape[0] or x[0].is_contiguous() else x.contiguous()


def _tables(args: GroupCastArgs) -> PeerTables:
    tables = args.peers
    assert tables is not None  # or there would be a refusal
    return tables


_known: weakref.WeakKeyDictionary[dist.ProcessGroup, tuple[Native | None, str]] = weakref.WeakKeyDictionary()
"""One a group, decided when it is first asked for."""


def native_of(group: dist.ProcessGroup | None, device: torch.device) -> tuple[Native | None, str]:
    """What moves rows of the ranks of a group; None, with the reason, where it cannot. Collective the first time.

    Args:
        group: the ranks; the default group when None.
        device: this rank's GPU.

    Raises:
        RuntimeError: ranks did not come within the time-out of the group.
    """
    group = dist.group.WORLD if group is None else group
    assert group is not None
    if group not in _known:
        meeting = Meeting(group)
        reason = refusal_of_host(meeting, device)
        memory = None
        if reason is None:
            memory, reason = PeerMemory.make(meeting, device)
        _known[group] = (None if memory is None else Native(group, meeting, memory, device)), reason or ""
    return _known[group]
