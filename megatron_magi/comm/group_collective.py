"""group_cast and group_reduce: send rows to the ranks that need them, and reduce partial rows at their owners.

Every rank of the group takes part in every call, in the same order, also when it has no row to
send or receive. Each call sends one message between each pair of ranks, for all tensors together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron_magi.comm.cast_args import CastFacts, CastTables, GroupCastArgs
from megatron_magi.comm.groups import Group, group_of
from megatron_magi.comm.impl.hierarchical import Hierarchical
from megatron_magi.comm.impl.native import Native, present_native
from megatron_magi.comm.level_args import LevelArgs, LevelFacts, LevelTables
from megatron_magi.comm.movement import Mover, SentRows, Started
from megatron_magi.comm.nodes import nodes_of
from megatron_magi.comm.row_layout import RowLayout, resolved
from megatron_magi.comm.row_memory import can_add
from megatron_magi.comm.rows import PartialRows
from megatron_magi.comm.slots import most_rows
from megatron_magi.comm.transport import Args, Transport, most_received, transport_of
from megatron_magi.profiling import profiled_collective

__all__ = [
    "Args",
    "CastFacts",
    "CastTables",
    "GroupCastArgs",
    "Handle",
    "LevelArgs",
    "LevelFacts",
    "LevelTables",
    "group_cast",
    "group_reduce",
    "group_reduce_lse",
    "make_room",
]


class Handle:
    """A collective that has been started.

    Attributes:
        sent_bytes: bytes this rank sends to other ranks, including rows that it relays or sums for its node.
        received_bytes: bytes this rank receives from other ranks, likewise.
        far_sent_bytes, far_received_bytes: the part of these between nodes, if nodes are distinguished.
        adds_late: `wait` adds to ``into``, on the stream of its caller, while other calls on the group may add as well.
    """

    def __init__(
        self,
        started: Started,
        finish: Callable[[], Any],
        num_bytes: tuple[int, int],
        far_bytes: tuple[int, int],
        args: Any = None,
    ) -> None:
        self._args = args  # kept alive: running kernels read its tables
        self.adds_late = False
        self.sent_bytes, self.received_bytes = num_bytes
        self.far_sent_bytes, self.far_received_bytes = far_bytes
        self._works, self._buffers = started.works, started.buffers
        self._finish: Callable[[], Any] | None = finish
        device = started.buffers[0].device
        self._device, self._stream = device, _raw_stream(device)

    def wait(self) -> Any:
        """Waits for the rows and returns the result of the operation.

        On GPUs the host does not block: the current stream waits for the communication.

        Raises:
            RuntimeError: called a second time.
        """
        if self._finish is None:
            raise RuntimeError("wait: this handle has been waited for already")
        finish, self._finish = self._finish, None
        for work in self._works:
            work.wait()
        # Communication runs on a stream of its own, which waited for the starting stream; work.wait() makes the current
        # stream wait for it. If the current stream is the starting one, a buffer that is freed now cannot be reused
        # before the communication is complete. On another stream, record_stream must tell the allocator.
        if self._stream is not None and self._stream != _raw_stream(self._device):
            for buffer in self._buffers:
                buffer.record_stream(torch.cuda.current_stream(buffer.device))
        self._works, self._buffers = [], ()
        with torch.no_grad():
            result = finish()
        self._args = None
        return result


def _raw_stream(device: torch.device) -> int | None:
    """Handle of the current stream; None on CPUs."""
    return torch._C._cuda_getCurrentRawStream(device.index) if device.type == "cuda" else None


@profiled_collective
@torch.no_grad()
def group_cast(
    tensors: Sequence[torch.Tensor],
    args: Args,
    group: Group = None,
    impl: str = "auto",
    *,
    kept: bool = False,
) -> Handle:
    """Starts sending local rows to the ranks that need them.

    Args:
        tensors: ``[num_rows, ...]`` each, of any dtypes and trailing shapes, on the device of
            ``args``; may be freed once this returns, and changed unless ``kept``.
        args: which rows are sent where; `LevelArgs` if nodes are distinguished.
        group: the ranks, a group or a mesh; the default group when None.
        impl: ``reference`` (peer by peer), ``all_to_all`` (one all-to-all-v; kernels on
            GPUs), ``native`` (through peer memory, see `megatron_magi.comm.impl.native`),
            or ``auto``: ``reference`` on gloo; on NCCL ``native`` if possible, else ``all_to_all``. In two levels it
            applies inside a node; between nodes ``native`` and ``auto`` mean ``auto`` without peer memory.
        kept: ``tensors`` do not change before ``wait()``, so that other work of the current stream need not wait until
            they are sent.

    Returns:
        A handle; ``wait()`` returns a list of tensors ``[num_recv, ...]`` with contiguous rows
        (whose stride may exceed their length, as tensors may be interleaved).
        Not differentiable: its adjoint is `group_reduce`.

    Raises:
        ValueError: tensors, ``args`` and ``group`` do not fit, or ``impl`` does not support them.
        RuntimeError: with ``native``, a rank timed out in an earlier call; it is named.
    """
    way = _choose(tensors, args, group_of(group), impl)
    for x in tensors:
        if x.shape[0] < args.num_rows_min:
            raise ValueError(f"tensors: {x.shape[0]} rows, but args sends row {args.num_rows_min - 1}")
    tensors = [resolved(x) for x in tensors]
    layout = RowLayout.of(tensors)
    started = way.mover(layout, most_received(args)).cast(SentRows(tensors, args, layout, kept))
    return _handle(way, started, started.finish, args, layout)


@profiled_collective
@torch.no_grad()
def group_reduce(
    tensors: Sequence[torch.Tensor],
    args: Args,
    group: Group = None,
    *,
    into: Sequence[torch.Tensor],
    impl: str = "auto",
    at_once: bool = False,
    kept: bool = False,
) -> Handle:
    """Starts sending partial rows back to the ranks that own them, to be summed: group_cast reversed.

    A row's contributions are added in rank order, in fp32 or wider, and rounded
    once, so results are bitwise repeatable. In two levels those of another node are added there first, and their sum
    is rounded to the dtype of ``tensors``, in which it is sent.

    Args:
        tensors: ``[num_recv, ...]`` each: partial rows of the buffer that the cast filled.
        args: those of the cast.
        group, impl: as in `group_cast`.
        into: one tensor ``[num_rows, ...]`` for each of ``tensors``, possibly of a wider dtype;
            rows must be contiguous. ``wait()`` adds to them in place and returns them as a list.
        at_once: ``into`` is neither read nor changed before ``wait()``, so rows may be added as they arrive. Earlier
            calls with `Handle.adds_late` must have been waited for.
        kept: as in `group_cast`.

    Raises:
        ValueError: tensors, ``into``, ``args`` and ``group`` do not fit, or ``impl`` does not
            support them.
        RuntimeError: as in `group_cast`.
    """
    way = _choose(tensors, args, group_of(group), impl)
    _check_reduce(tensors, args, into)
    tensors = [resolved(x) for x in tensors]
    layout = RowLayout.of(tensors)
    mover = way.mover(layout, most_received(args, back=True))
    if at_once and isinstance(mover, Native) and can_add(layout, into):
        started = mover.add(SentRows(tensors, args, layout, kept), into)
        return _handle(way, started, started.finish, args, layout, back=True)
    assert not getattr(args, "is_static", False), "numbers of rows that the host does not know"
    started = mover.give_back(SentRows(tensors, args, layout, kept))

    def finish() -> list[torch.Tensor]:
        way.ops.add_rows(started.finish(), layout, args.arrivals, into)
        return list(into)

    handle = _handle(way, started, finish, args, layout, back=True)
    handle.adds_late = way.native is not None
    return handle


@profiled_collective
@torch.no_grad()
def group_reduce_lse(
    out: torch.Tensor,
    lse: torch.Tensor,
    args: Args,
    group: Group = None,
    *,
    into: tuple[torch.Tensor, torch.Tensor],
    impl: str = "auto",
) -> Handle:
    """Starts sending partial attention results back to their owners, to be merged by their lse.

    Args:
        out: ``[num_recv, num_heads, head_dim]``, partial results for rows of the buffer.
        lse: ``[num_recv, num_heads]``, natural log; -inf where no key was seen.
        args, group, impl: as in `group_reduce`.
        into: ``(out, lse)`` of the local rows, ``[num_rows, ...]``. ``wait()`` merges into them
            in place and returns them. Parts with lse -inf are ignored; rows with only
            such parts get output 0 and lse -inf.

    Raises:
        ValueError: as in `group_reduce`, or ``lse`` is not the shape of ``out`` without its last
            dimension.
    """
    way = _choose((out, lse), args, group_of(group), impl)
    _check_reduce((out, lse), args, into)
    if out.shape[:-1] != lse.shape or out.dim() != 3:
        raise ValueError(f"lse: shape {list(lse.shape)} does not fit out {list(out.shape)}")
    out, lse = resolved(out), resolved(lse)
    layout = RowLayout.of((out, lse))
    mover = way.mover(layout, most_received(args, back=True))
    if isinstance(mover, Hierarchical):
        mover = mover.merging
    started = mover.give_back(SentRows((out, lse), args, layout))

    def finish() -> tuple[torch.Tensor, torch.Tensor]:
        arriving_out, arriving_lse = layout.views(started.finish())
        way.ops.merge_rows(PartialRows(arriving_out, arriving_lse), args.arrivals, PartialRows(*into))
        return into

    return _handle(way, started, finish, args, layout, back=True)


def make_room(
    casts: Sequence[Args], there: RowLayout, back: RowLayout | None, group: dist.ProcessGroup | None, impl: str = "auto"
) -> bool:
    """Allocates the memory that later calls of `group_cast` and `group_reduce` need.

    Collective. Without it memory grows on demand, and each time all ranks wait for their GPUs. For static arguments,
    which CUDA graphs refer to, it is the most that calls with as many rows a rank can need, as graphs keep theirs.

    Args:
        casts: arguments of the calls.
        there, back: layouts of the rows that are cast, and of those that are reduced; None for none.
        group, impl: as in `group_cast`.

    Returns:
        Whether there is such memory for all of them, and so for calls of fewer rows.

    Raises:
        ValueError, RuntimeError: as `group_cast`.
    """
    needs = [need for args in casts for need in _needs(args, there, back, group, impl)]
    needs.sort(key=lambda need: -need[1].row_bytes * (need[2] or 0))
    movers = [
        way.mover(layout, count) for way, layout, count in needs
    ]  # without short-circuit: each of these is collective
    return all(isinstance(mover, Native) for mover in movers)


def _needs(
    args: Args, there: RowLayout, back: RowLayout | None, group: dist.ProcessGroup | None, impl: str
) -> list[tuple[Transport, RowLayout, int | None]]:
    """The arguments of `Transport.mover` in the calls with ``args``."""
    way = transport_of(args, group, impl)
    if isinstance(args, LevelArgs):
        groups = nodes_of(dist.group.WORLD if group is None else group, args.ranks_per_node)
        parts = ((args.near, groups.near), (args.relay, groups.relay))
        return [need for part, ranks in parts for need in _needs(part, there, back, ranks, impl)]
    needs = [(way, there, most_received(args)), (way, there, _most_published(args))]
    if args.is_static and args.most is not None:
        all_others = (args.num_ranks - 1) * args.most.held
        needs += [(way, layout, min(all_others, most_rows(layout))) for layout in (there, back) if layout is not None]
    return needs if back is None else [*needs, (way, back, most_received(args, back=True))]


def _most_published(args: Args) -> int | None:
    """Rows up to the last that any rank publishes for a kernel that waits for them."""
    return None if args.most is None else args.most.held


def raise_failure(group: dist.ProcessGroup) -> None:
    """Raises if a kernel in a replayed CUDA graph has timed out; nothing else checks this after replays.

    Raises:
        RuntimeError: a rank timed out in an earlier call.
    """
    native = present_native(group)
    failure = None if native is None else native.failure()
    if failure is not None:
        raise RuntimeError(failure)


def forget_graphs(group: dist.ProcessGroup) -> None:
    """To be called on all ranks when no CUDA graph with calls on the group is left: its memory may be freed."""
    native = present_native(group)
    if native is not None:
        native.forget_graphs()


def choose_mover(
    tensors: Sequence[torch.Tensor], args: GroupCastArgs, group: dist.ProcessGroup | None, impl: str, back: bool = False
) -> tuple[Mover, RowLayout]:
    """The implementation that casts rows, or sends partial rows ``back``, and their layout; arguments of `group_cast`.

    Collective, except after `make_room` for these rows.
    """
    layout = RowLayout.of(tensors)
    most = most_received(args, back=True) if back else _most_published(args)
    return _choose(tensors, args, group, impl).mover(layout, most), layout


def _handle(
    way: Transport, started: Started, finish: Callable[[], Any], args: Args, layout: RowLayout, back: bool = False
) -> Handle:
    step = -1 if back else 1
    num_bytes, far_bytes = (
        tuple(rows * layout.row_bytes for rows in counts[::step])
        for counts in (args.rows_away(way.rank), args.rows_far(way.rank))
    )
    return Handle(started, finish, num_bytes, far_bytes, args)


def _choose(tensors: Sequence[torch.Tensor], args: Args, group: dist.ProcessGroup | None, impl: str) -> Transport:
    """The implementations for these tensors, chosen once for ``args``."""
    if not tensors:
        raise ValueError("tensors: expected at least one")
    device = args.device
    for x in tensors:
        if x.device != device:
            raise ValueError(f"tensors: all must be on the device of args, {device}, got {x.device}")
    return transport_of(args, group, impl)


def _check_reduce(tensors: Sequence[torch.Tensor], args: GroupCastArgs, into: Sequence[torch.Tensor]) -> None:
    if len(into) != len(tensors):
        raise ValueError(f"into: {len(into)} tensors for {len(tensors)} to reduce")
    for x, y in zip(tensors, into, strict=True):
        if x.shape[0] != args.num_recv:
            raise ValueError(f"tensors: {x.shape[0]} rows, but args receives {args.num_recv}")
        if x.shape[1:] != y.shape[1:] or y.device != x.device:
            raise ValueError(f"into: {list(y.shape)} on {y.device} does not fit rows {list(x.shape[1:])} on {x.device}")
        if y.shape[0] < args.num_rows_min:
            raise ValueError(f"into: {y.shape[0]} rows, but args sends row {args.num_rows_min - 1}")
        if not y.is_contiguous() and y.shape[0] and not y[0].is_contiguous():
            raise ValueError("into: rows must be contiguous")
        if y.is_conj() or y.is_neg():
            raise ValueError("into: a lazily conjugated or negated tensor cannot be added to; give a copy, x.clone()")
