"""group_cast and group_reduce: rows travel to the ranks that need them, and partial rows back.

Every rank of the group takes part in every call, in the same order, also when it has no row to
send or receive. Each call is one message a pair of ranks, whatever the number of tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from megatron_magi.comm import rows as torch_rows
from megatron_magi.comm.impl import all_to_all, reference
from megatron_magi.comm.row_layout import RowLayout
from megatron_magi.comm.rows import Arrivals, arrival_arrays
from megatron_magi.upload import upload

_IMPLS = {"reference": reference, "all_to_all": all_to_all}


class CastFacts(NamedTuple):
    """What is left of `CastTables` when its arrays are on a device.

    Attributes:
        send_splits, recv_splits, num_rows_min: see `GroupCastArgs`.
        level_sizes: see `Arrivals`.
        num_arrays: that there are.
    """

    send_splits: tuple[int, ...]
    recv_splits: tuple[int, ...]
    num_rows_min: int
    level_sizes: tuple[int, ...]
    num_arrays: int


@dataclass(frozen=True, eq=False)
class CastTables:
    """Which rows travel where, as arrays on the CPU; made by `of`.

    Attributes:
        send_index, send_splits, recv_splits, recv_order, num_rows_min: see `GroupCastArgs`.
    """

    send_index: np.ndarray
    send_splits: tuple[int, ...]
    recv_splits: tuple[int, ...]
    recv_order: np.ndarray | None
    num_rows_min: int

    @classmethod
    def of(
        cls,
        send_index: np.ndarray,
        send_splits: Sequence[int],
        recv_splits: Sequence[int],
        recv_order: np.ndarray | None,
    ) -> CastTables:
        """Checks the arguments of `GroupCastArgs.build`, with its errors."""
        send_splits, recv_splits = tuple(int(n) for n in send_splits), tuple(int(n) for n in recv_splits)
        send_index = np.asarray(send_index, dtype=np.int64)
        order = None if recv_order is None else np.asarray(recv_order, dtype=np.int64)
        _check_indices(send_index, send_splits, recv_splits, order)
        return cls(send_index, send_splits, recv_splits, order, int(send_index.max(initial=-1)) + 1)

    def arrays(self) -> tuple[CastFacts, list[np.ndarray]]:
        """All index arrays, those of group_reduce included, and the rest; see `GroupCastArgs.from_uploaded`."""
        rows, starts, sources, levels = arrival_arrays(self.send_index)
        arrays = [self.send_index, rows, starts, sources]
        if self.recv_order is not None:
            arrays += [self.recv_order, _inverse(self.recv_order)]
        return CastFacts(self.send_splits, self.recv_splits, self.num_rows_min, levels, len(arrays)), arrays


class _Way(NamedTuple):
    """How rows travel.

    Attributes:
        exchange: starts the communication; None in a group of one rank, where rows stay.
        ops: the row operations, see `megatron_magi.comm.rows`.
        rank: this one.
    """

    exchange: Callable[..., list[dist.Work]] | None
    ops: ModuleType
    rank: int


@dataclass(frozen=True, eq=False)
class GroupCastArgs:
    """Which rows travel where, as one rank sees it; made by `build`.

    Attributes:
        send_index: local rows to send, grouped by destination, int64 ``[num_send]``.
        send_splits: rows to each rank.
        recv_splits: rows from each rank.
        recv_order: buffer row i is received row ``recv_order[i]``, int64 ``[num_recv]``; None
            when received rows are in buffer order already.
        num_rows_min: smallest number of local rows that ``send_index`` is valid for.
        host_send_index, host_recv_order: the arrays on the CPU, from which the rest is made; None where all is made.
        ways: how rows travel, by group and implementation, found out at the first call.
    """

    send_index: torch.Tensor
    send_splits: tuple[int, ...]
    recv_splits: tuple[int, ...]
    recv_order: torch.Tensor | None
    num_rows_min: int
    host_send_index: np.ndarray | None
    host_recv_order: np.ndarray | None
    ways: dict[tuple[dist.ProcessGroup | None, str], _Way] = field(default_factory=dict, repr=False)

    @classmethod
    def build(
        cls,
        send_index: np.ndarray,
        send_splits: Sequence[int],
        recv_splits: Sequence[int],
        recv_order: np.ndarray | None = None,
        device: torch.device | str = "cpu",
    ) -> GroupCastArgs:
        """From index arrays on the CPU, which must not change; copied to ``device`` at once.

        Args:
            send_index: int64 ``[sum(send_splits)]``, see the class.
            send_splits, recv_splits: one number a rank of the group.
            recv_order: int64 ``[sum(recv_splits)]``, a permutation, or None.
            device: where the tensors to move live.

        Raises:
            ValueError: lengths disagree, a number is negative, or ``recv_order`` is no permutation.
        """
        tables = CastTables.of(send_index, send_splits, recv_splits, recv_order)
        order = tables.recv_order
        moved = upload([tables.send_index] if order is None else [tables.send_index, order], device)
        return cls(
            send_index=moved[0],
            send_splits=tables.send_splits,
            recv_splits=tables.recv_splits,
            recv_order=None if order is None else moved[1],
            num_rows_min=tables.num_rows_min,
            host_send_index=tables.send_index,
            host_recv_order=order,
        )

    @classmethod
    def from_uploaded(cls, facts: CastFacts, moved: Sequence[torch.Tensor]) -> GroupCastArgs:
        """With everything on its device already: nothing is made or copied when it is first used.

        Args:
            facts: of the tables.
            moved: `CastTables.arrays` as tensors.
        """
        send_index, rows, starts, sources, *order = moved
        args = cls(
            send_index=send_index,
            send_splits=facts.send_splits,
            recv_splits=facts.recv_splits,
            recv_order=order[0] if order else None,
            num_rows_min=facts.num_rows_min,
            host_send_index=None,
            host_recv_order=None,
        )
        known = vars(args)  # where cached properties keep what they have made
        known["arrivals"] = Arrivals(rows, starts, sources, facts.level_sizes)
        known["recv_position"] = order[1] if order else None
        return args

    @staticmethod
    def num_indices(num_send: int, num_recv: int) -> int:
        """The most int64 indices that such arguments keep on their device, those for group_reduce included."""
        return 4 * num_send + 1 + 2 * num_recv

    @cached_property
    def arrivals(self) -> Arrivals:
        """For group_reduce: which returning rows belong to which local row. Made when first asked for."""
        assert self.host_send_index is not None
        *arrays, levels = arrival_arrays(self.host_send_index)
        return Arrivals(*upload(arrays, self.send_index.device), levels)

    @cached_property
    def recv_position(self) -> torch.Tensor | None:
        """For group_reduce: the inverse of ``recv_order``, None like it. Made when first asked for."""
        if self.host_recv_order is None:
            return None
        return upload([_inverse(self.host_recv_order)], self.send_index.device)[0]

    @property
    def num_send(self) -> int:
        """Rows this rank sends."""
        return sum(self.send_splits)

    @property
    def num_recv(self) -> int:
        """Rows this rank receives."""
        return sum(self.recv_splits)


class Handle:
    """Rows under way.

    Attributes:
        sent_bytes: bytes this rank sends to other ranks.
        received_bytes: bytes this rank receives from other ranks.
    """

    def __init__(
        self,
        works: list[dist.Work],
        buffers: tuple[torch.Tensor, torch.Tensor],
        finish: Callable[[], Any],
        sent_bytes: int,
        received_bytes: int,
    ) -> None:
        self.sent_bytes = sent_bytes
        self.received_bytes = received_bytes
        self._works = works
        self._buffers = buffers
        self._finish: Callable[[], Any] | None = finish
        device = buffers[0].device
        self._device, self._stream = device, _raw_stream(device)

    def wait(self) -> Any:
        """Waits for the rows and returns what the operation promises.

        On GPUs the host does not block: the current stream waits for the communication.

        Raises:
            RuntimeError: called a second time.
        """
        if self._finish is None:
            raise RuntimeError("wait: this handle has been waited for already")
        finish, self._finish = self._finish, None
        for work in self._works:
            work.wait()
        # NCCL runs on a stream of its own, which waited for the starting stream at the start; work.wait() makes
        # the current stream wait for it. So when both are one stream, a buffer that is freed now cannot be
        # handed out again before the communication is over. Another stream must tell the allocator.
        if self._stream != _raw_stream(self._device):
            for buffer in self._buffers:
                buffer.record_stream(torch.cuda.current_stream(buffer.device))
        self._works, self._buffers = [], ()
        with torch.no_grad():
            return finish()


@torch.no_grad()
def group_cast(
    tensors: Sequence[torch.Tensor],
    args: GroupCastArgs,
    group: dist.ProcessGroup | None = None,
    impl: str = "auto",
) -> Handle:
    """Starts sending local rows to the ranks that need them.

    Args:
        tensors: ``[num_rows, ...]`` each, of any dtypes and trailing shapes, on the device of
            ``args``; may be changed or freed once this returns.
        args: which rows travel where.
        group: the ranks; the default group when None.
        impl: ``reference`` (peer by peer), ``all_to_all`` (one all-to-all-v; kernels on
            GPUs), or ``auto``: the former on gloo, the latter on NCCL.

    Returns:
        A handle; ``wait()`` returns a list of tensors ``[num_recv, ...]`` with contiguous rows
        (which may lie further apart than their length, side by side with the other tensors').
        Not differentiable: its adjoint is `group_reduce`.

    Raises:
        ValueError: tensors, ``args`` and ``group`` do not fit, or ``impl`` does not support them.
    """
    way = _choose(tensors, args, group, impl)
    ops = way.ops
    for x in tensors:
        if x.shape[0] < args.num_rows_min:
            raise ValueError(f"tensors: {x.shape[0]} rows, but args sends row {args.num_rows_min - 1}")
    layout = RowLayout.of(tensors)
    device = tensors[0].device
    send = layout.new_buffer(args.num_send, device)
    ops.pack_rows(tensors, args.send_index, layout, send)

    def finish(received: torch.Tensor) -> list[torch.Tensor]:
        return ops.unpack_rows(received, args.recv_order, layout)

    return _start(way, send, args.send_splits, args.recv_splits, group, finish)


@torch.no_grad()
def group_reduce(
    tensors: Sequence[torch.Tensor],
    args: GroupCastArgs,
    group: dist.ProcessGroup | None = None,
    *,
    into: Sequence[torch.Tensor],
    impl: str = "auto",
) -> Handle:
    """Starts sending partial rows back to the ranks that own them, to be summed: group_cast reversed.

    A row's contributions are added in the order of their ranks, in fp32 or wider, and rounded
    once, so results are bitwise repeatable.

    Args:
        tensors: ``[num_recv, ...]`` each: partial rows of the buffer that the cast filled.
        args: those of the cast.
        group, impl: as in `group_cast`.
        into: one tensor ``[num_rows, ...]`` for each of ``tensors``, possibly of a wider dtype;
            rows must be contiguous. ``wait()`` adds to them in place and returns them as a list.

    Raises:
        ValueError: tensors, ``into``, ``args`` and ``group`` do not fit, or ``impl`` does not
            support them.
    """
    way = _choose(tensors, args, group, impl)
    ops = way.ops
    _check_reduce(tensors, args, into)
    layout, send = _pack_partials(tensors, args, ops)

    def finish(received: torch.Tensor) -> list[torch.Tensor]:
        ops.add_rows(received, layout, args.arrivals, into)
        return list(into)

    return _start(way, send, args.recv_splits, args.send_splits, group, finish)


@torch.no_grad()
def group_reduce_lse(
    out: torch.Tensor,
    lse: torch.Tensor,
    args: GroupCastArgs,
    group: dist.ProcessGroup | None = None,
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
            in place and returns them. Parts with lse -inf count nothing; rows that only have
            such parts get output 0 and lse -inf.

    Raises:
        ValueError: as in `group_reduce`, or ``lse`` is not the shape of ``out`` without its last
            dimension.
    """
    way = _choose((out, lse), args, group, impl)
    ops = way.ops
    _check_reduce((out, lse), args, into)
    if out.shape[:-1] != lse.shape or out.dim() != 3:
        raise ValueError(f"lse: shape {list(lse.shape)} does not fit out {list(out.shape)}")
    layout, send = _pack_partials((out, lse), args, ops)

    def finish(received: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        arriving_out, arriving_lse = layout.views(received)
        ops.merge_rows(arriving_out, arriving_lse, args.arrivals, *into)
        return into

    return _start(way, send, args.recv_splits, args.send_splits, group, finish)


def _pack_partials(
    tensors: Sequence[torch.Tensor], args: GroupCastArgs, ops: ModuleType
) -> tuple[RowLayout, torch.Tensor]:
    """Buffer rows in the order in which they were received, ready to go back."""
    layout = RowLayout.of(tensors)
    send = layout.new_buffer(args.num_recv, tensors[0].device)
    ops.pack_rows(tensors, args.recv_position, layout, send)
    return layout, send


def _start(
    way: _Way,
    send: torch.Tensor,
    send_splits: tuple[int, ...],
    recv_splits: tuple[int, ...],
    group: dist.ProcessGroup | None,
    finish: Callable[[torch.Tensor], Any],
) -> Handle:
    row_bytes, (exchange, _, me) = send.shape[1], way
    if exchange is None:
        return Handle([], (send, send), lambda: finish(send), 0, 0)
    received = torch.empty(sum(recv_splits), row_bytes, dtype=torch.uint8, device=send.device)
    works = exchange(send, received, send_splits, recv_splits, group)
    num_sent, num_received = send.shape[0] - send_splits[me], received.shape[0] - recv_splits[me]
    return Handle(works, (send, received), lambda: finish(received), num_sent * row_bytes, num_received * row_bytes)


def _choose(tensors: Sequence[torch.Tensor], args: GroupCastArgs, group: dist.ProcessGroup | None, impl: str) -> _Way:
    """How rows of these tensors travel, asked once for ``args``."""
    if not tensors:
        raise ValueError("tensors: expected at least one")
    device = args.send_index.device
    for x in tensors:
        if x.device != device:
            raise ValueError(f"tensors: all must be on the device of args, {device}, got {x.device}")
    key = (group if len(args.send_splits) > 1 else None, impl)
    way = args.ways.get(key)
    if way is None:
        way = args.ways[key] = _find_way(args, group, impl)
    return way


def _find_way(args: GroupCastArgs, group: dist.ProcessGroup | None, impl: str) -> _Way:
    if impl not in ("auto", *_IMPLS):
        raise ValueError(f"impl: expected one of auto, {', '.join(_IMPLS)}, got {impl!r}")
    device = args.send_index.device
    if len(args.send_splits) == 1:
        return _Way(None, _row_ops(device, impl), 0)
    if len(args.send_splits) != dist.get_world_size(group):
        raise ValueError(f"args: splits for {len(args.send_splits)} ranks, but group has {dist.get_world_size(group)}")
    backend = _backend(group, device)
    if impl == "auto":
        impl = "reference" if backend == "gloo" else "all_to_all"
    if backend is None or (backend == "gloo" and device.type != "cpu"):
        raise ValueError(f"impl: {impl!r} cannot move tensors on {device.type} in a group with backend {backend}")
    return _Way(_IMPLS[impl].exchange, _row_ops(device, impl), dist.get_rank(group))


def _row_ops(device: torch.device, impl: str) -> ModuleType:
    if device.type != "cuda" or impl == "reference":
        return torch_rows
    # Not at the top: Triton exists only where GPUs do.
    from megatron_magi.comm import gpu_rows

    return gpu_rows


def _raw_stream(device: torch.device) -> int | None:
    """Handle of the current stream; None where there are none."""
    return torch._C._cuda_getCurrentRawStream(device.index) if device.type == "cuda" else None


def _backend(group: dist.ProcessGroup | None, device: torch.device) -> str | None:
    """The backend that serves tensors of a device, None when there is none."""
    pairs = (entry.split(":") for entry in dist.get_backend_config(group).split(","))
    return {pair[0]: pair[-1] for pair in pairs}.get(device.type)


def _inverse(order: np.ndarray) -> np.ndarray:
    """The inverse of a permutation."""
    position = np.empty_like(order)
    position[order] = np.arange(len(order))
    return position


def _check_indices(
    send_index: np.ndarray, send_splits: tuple[int, ...], recv_splits: tuple[int, ...], recv_order: np.ndarray | None
) -> None:
    """Raises ValueError for inconsistent arguments."""
    if len(send_splits) != len(recv_splits) or not send_splits:
        raise ValueError(f"recv_splits: for {len(recv_splits)} ranks, but send_splits is for {len(send_splits)}")
    for name, splits in (("send_splits", send_splits), ("recv_splits", recv_splits)):
        if min(splits) < 0:
            raise ValueError(f"{name}: must not be negative, got {list(splits)}")
    if send_index.shape != (sum(send_splits),):
        raise ValueError(f"send_index: expected {sum(send_splits)} rows, got shape {list(send_index.shape)}")
    if send_index.min(initial=0) < 0:
        raise ValueError(f"send_index: must not be negative, got {send_index.min()}")
    if recv_order is None:
        return
    num_recv = sum(recv_splits)
    is_permutation = recv_order.shape == (num_recv,) and recv_order.min(initial=0) >= 0
    if not is_permutation or not np.array_equal(np.bincount(recv_order, minlength=num_recv), np.ones(num_recv)):
        raise ValueError(f"recv_order: not a permutation of {num_recv} rows")


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
