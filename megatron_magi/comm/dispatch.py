"""dispatch and undispatch: a global tensor to shards and back; roll: a shift of the global sequence.

All are differentiable. The sequence lies along one dimension, ``dim``; other dimensions are free.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from megatron_magi.comm.calls import calls_of
from megatron_magi.comm.group_collective import CastFacts, CastTables, GroupCastArgs, group_cast
from megatron_magi.comm.groups import Group, group_of
from megatron_magi.mask.documents import integer
from megatron_magi.upload import upload


class RowsCall(NamedTuple):
    """What ranks must agree on to move rows."""

    operation: str
    dtype: torch.dtype
    row_shape: tuple[int, ...]
    gradient: bool = False
    is_partial_grad: bool = False
    shift: int = 0

    @classmethod
    def of(cls, operation: str, x: torch.Tensor, dim: int = 0, **options: Any) -> RowsCall:
        """For a tensor whose rows lie along ``dim``."""
        gradient = x.requires_grad and torch.is_grad_enabled()
        return cls(operation, x.dtype, (*x.shape[:dim], *x.shape[dim + 1 :]), gradient, **options)


def dispatch(x: torch.Tensor, index: torch.Tensor, *, dim: int = 0, pad_value: float = 0) -> torch.Tensor:
    """This rank's shard of a global tensor.

    The gradient of ``x`` is this rank's alone: zero for the rows of other ranks. Where ``x`` is a
    parameter or was computed from one, the caller's reduction of parameter gradients over the
    context-parallel ranks sums the parts. `dispatch_replicated` gathers the whole instead.

    Args:
        x: global tensor, the same on all ranks, ``[..., total_seqlen, ...]``.
        index: global row of each row of the shard, int64 ``[num_rows]``; indices of
            ``total_seqlen`` or more are padding.
        dim: dimension of the sequence.
        pad_value: what padding rows hold.

    Returns:
        ``[..., num_rows, ...]``.

    Raises:
        ValueError: ``x`` has no dimension ``dim``.
    """
    dim = _dimension(dim, x)
    total_seqlen = x.shape[dim]
    if total_seqlen == 0:
        return x.new_full((*x.shape[:dim], index.numel(), *x.shape[dim + 1 :]), pad_value)
    out = x.index_select(dim, index.clamp(max=total_seqlen - 1))
    is_pad = (index >= total_seqlen).view(-1, *([1] * (x.dim() - dim - 1)))
    return out.masked_fill(is_pad, pad_value)


@dataclass(frozen=True, eq=False)
class UndispatchArgs:
    """Where the rows of all shards are, as one rank sees it, on a device; made by `build`.

    Attributes:
        shard_lengths: rows of each rank.
        gathered_index: where each global row is in the shards concatenated by rank, each filled up
            to the longest, int64 ``[total_seqlen]``.
        local_index: global row of each row of this rank's shard, int64 ``[num_rows]``; padding
            from ``total_seqlen`` on.
        cp_rank: this rank.
    """

    shard_lengths: tuple[int, ...]
    gathered_index: torch.Tensor
    local_index: torch.Tensor
    cp_rank: int

    @classmethod
    def build(
        cls, global_index: Sequence[np.ndarray], total_seqlen: int, cp_rank: int, device: torch.device | str
    ) -> UndispatchArgs:
        """Copies the index arrays to ``device``, where the shards live.

        Args:
            global_index: for each rank the global row of each row of its shard, int64 ``[num_rows]``.
            total_seqlen: rows that `undispatch` returns; the rest is padding.
            cp_rank: whose arguments to make.

        Raises:
            ValueError: ``global_index`` does not hold every one of the shards' rows exactly once, or
                fewer than ``total_seqlen``.
        """
        lengths = tuple(len(index) for index in global_index)
        place = np.full(sum(lengths), -1, dtype=np.int64)
        for rank, index in enumerate(global_index):
            inside = (index >= 0) & (index < len(place))
            place[index[inside]] = rank * max(lengths) + np.flatnonzero(inside)
        if place.min(initial=0) < 0 or len(place) < total_seqlen:
            raise ValueError(
                f"global_index: expected every row below {len(place)} exactly once, at least {total_seqlen} of them"
            )
        mine = np.asarray(global_index[cp_rank], dtype=np.int64)
        return cls(lengths, *upload([place[:total_seqlen], mine], device), cp_rank)

    @property
    def longest(self) -> int:
        """Rows of the longest shard."""
        return max(self.shard_lengths)


def dispatch_replicated(
    x: torch.Tensor,
    args: UndispatchArgs,
    group: Group = None,
    *,
    dim: int = 0,
    pad_value: float = 0,
    verify: bool = True,
) -> torch.Tensor:
    """`dispatch`, but with the whole gradient of ``x`` on every rank: that of each row from the rank that holds it.

    The backward is collective: either all ranks run it or none. The gradient of padding rows is dropped.

    Args:
        x: global tensor, the same on all ranks, ``[..., total_seqlen, ...]``.
        args: made by `UndispatchArgs.build`, on the device of ``x``.
        group: the ranks, a group or a mesh.
        dim, pad_value: as in `dispatch`.
        verify: ranks that disagree, also in whether they want a gradient, get a message, see
            `megatron_magi.comm.calls`.

    Returns:
        ``[..., num_rows, ...]``.

    Raises:
        ValueError: ``x`` has no dimension ``dim`` or not ``total_seqlen`` rows along it, or ``args``
            is for another number of ranks.
    """
    group, dim = group_of(group), _dimension(dim, x)
    _check_ranks(args, group)
    if x.shape[dim] != args.gathered_index.numel():
        raise ValueError(f"x: {x.shape[dim]} rows along dim {dim}, but args is for {args.gathered_index.numel()}")
    rows = x.movedim(dim, 0)
    if not (x.requires_grad and torch.is_grad_enabled()):
        return dispatch(rows, args.local_index, pad_value=pad_value).movedim(0, dim)
    with calls_of(group, len(args.shard_lengths), verify) as calls:
        # There will be a collective, on all ranks or on none.
        calls.agree(RowsCall.of("dispatch", x, dim))
        return _DispatchReplicated.apply(rows, args, group, pad_value, verify).movedim(0, dim)


def undispatch(
    x_local: torch.Tensor,
    args: UndispatchArgs,
    group: Group = None,
    *,
    dim: int = 0,
    is_partial_grad: bool = False,
    verify: bool = True,
) -> torch.Tensor:
    """The global tensor from all ranks' shards, on every rank.

    Args:
        x_local: this rank's shard, ``[..., num_rows, ...]``.
        args: made by `UndispatchArgs.build`, on the device of ``x_local``.
        group: the ranks, a group or a mesh.
        dim: dimension of the sequence.
        is_partial_grad: False when every rank has the whole gradient of the result (all compute
            the same from it): each takes its rows. True when each rank has a part: parts are
            summed over the ranks, which makes the backward collective.
        verify: ranks that disagree get a message, see `megatron_magi.comm.calls`.

    Returns:
        ``[..., total_seqlen, ...]``.

    Raises:
        ValueError: ``x_local`` has no dimension ``dim`` or not ``num_rows`` rows along it, or
            ``args`` is for another number of ranks.
        RuntimeError: the ranks disagree in dtype, width or ``is_partial_grad``.
    """
    group, num_ranks, num_rows = group_of(group), len(args.shard_lengths), args.shard_lengths[args.cp_rank]
    with calls_of(group, num_ranks, verify) as calls:
        dim = _dimension(dim, x_local)
        _check_ranks(args, group)
        if x_local.shape[dim] != num_rows:
            raise ValueError(f"x_local: {x_local.shape[dim]} rows along dim {dim}, but args is for {num_rows}")
        calls.agree(RowsCall.of("undispatch", x_local, dim, is_partial_grad=is_partial_grad))
        return _Undispatch.apply(x_local.movedim(dim, 0), args, group, is_partial_grad, verify).movedim(0, dim)


def _dimension(dim: int, x: torch.Tensor) -> int:
    """``dim`` counted from the first dimension; ValueError where ``x`` has no such dimension."""
    if not -x.dim() <= integer(dim, "dim") < x.dim():
        raise ValueError(f"dim: {dim} is not a dimension of a tensor of shape {list(x.shape)}")
    return dim % x.dim()


def _check_ranks(args: UndispatchArgs, group: dist.ProcessGroup | None) -> None:
    num_ranks = len(args.shard_lengths)
    if num_ranks > 1 and num_ranks != dist.get_world_size(group):
        raise ValueError(f"args: for {num_ranks} ranks, group has {dist.get_world_size(group)}")


class _DispatchReplicated(torch.autograd.Function):
    """`dispatch_replicated` along dimension 0."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        args: UndispatchArgs,
        group: dist.ProcessGroup | None,
        pad_value: float,
        verify: bool,
    ) -> torch.Tensor:
        ctx.args, ctx.group, ctx.verify = args, group, verify
        return dispatch(x, args.local_index, pad_value=pad_value)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        return undispatch(grad, ctx.args, ctx.group, verify=ctx.verify), None, None, None, None


class _Undispatch(torch.autograd.Function):
    """`undispatch` along dimension 0."""

    @staticmethod
    def forward(
        ctx: Any,
        x_local: torch.Tensor,
        args: UndispatchArgs,
        group: dist.ProcessGroup | None,
        is_partial_grad: bool,
        verify: bool,
    ) -> torch.Tensor:
        ctx.args, ctx.group, ctx.is_partial_grad, ctx.verify = args, group, is_partial_grad, verify
        if len(args.shard_lengths) == 1:
            return x_local.index_select(0, args.gathered_index)
        send = x_local.contiguous()
        if x_local.shape[0] < args.longest:
            send = x_local.new_zeros(args.longest, *x_local.shape[1:])
            send[: x_local.shape[0]] = x_local
        gathered = send.new_empty(len(args.shard_lengths) * args.longest, *send.shape[1:])
        dist.all_gather_into_tensor(gathered, send, group=group)
        return gathered.index_select(0, args.gathered_index)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        args: UndispatchArgs = ctx.args
        if not ctx.is_partial_grad or len(args.shard_lengths) == 1:
            return dispatch(grad, args.local_index), None, None, None, None
        with calls_of(ctx.group, len(args.shard_lengths), ctx.verify) as calls:
            calls.agree(RowsCall.of("undispatch backward", grad))
            parts = grad.new_zeros(len(args.shard_lengths) * args.longest, *grad.shape[1:])
            parts.index_copy_(0, args.gathered_index, grad)
            mine = grad.new_empty(args.longest, *grad.shape[1:])
            dist.reduce_scatter_tensor(mine, parts, group=ctx.group)
        return mine[: args.shard_lengths[args.cp_rank]], None, None, None, None


@dataclass(frozen=True, eq=False)
class RollArrays:
    """What one rank does to roll the global sequence, int64 arrays on the CPU.

    Attributes:
        shift: places that tokens move towards the end.
        num_rows: rows of the shard.
        local_from: row whose content row i takes; i itself where it comes from another rank.
        local_to: row that takes the content of row i; i itself where another rank takes it.
        send_rows: rows whose content goes to other ranks, grouped by rank.
        send_splits: how many to each.
        recv_rows: rows whose content comes from other ranks, grouped by rank.
        recv_splits: how many from each.
    """

    shift: int
    num_rows: int
    local_from: np.ndarray
    local_to: np.ndarray
    send_rows: np.ndarray
    send_splits: tuple[int, ...]
    recv_rows: np.ndarray
    recv_splits: tuple[int, ...]

    def tables(self) -> tuple[RollFacts, list[np.ndarray]]:
        """All arrays that there and back take, and the rest; see `RollArgs.from_uploaded`."""
        there, sent = CastTables.of(self.send_rows, self.send_splits, self.recv_splits, None).arrays()
        back, received = CastTables.of(self.recv_rows, self.recv_splits, self.send_splits, None).arrays()
        return RollFacts(self.shift, self.num_rows, there, back), [self.local_from, self.local_to, *sent, *received]


class RollFacts(NamedTuple):
    """What is left of `RollArrays` when its arrays are on a device.

    Attributes:
        shift, num_rows: see `RollArrays`.
        there, back: of the collectives.
    """

    shift: int
    num_rows: int
    there: CastFacts
    back: CastFacts

    @property
    def num_arrays(self) -> int:
        """That there are."""
        return 2 + self.there.num_arrays + self.back.num_arrays


def make_roll_args(global_index: Sequence[np.ndarray], shift: int, total_seqlen: int, cp_rank: int) -> RollArrays:
    """Plans the roll of a dispatched sequence; pure, the same convention on all ranks.

    Args:
        global_index: for each rank the global token of each row, int64 ``[num_rows]``; tokens of
            ``total_seqlen`` or more are padding, which stays as it is.
        shift: places that tokens move towards the end, as in `torch.roll`.
        total_seqlen: tokens of the sequence.
        cp_rank: whose arguments to make.

    Raises:
        ValueError: ``global_index`` does not hold every token exactly once.
    """
    tokens = np.concatenate(global_index)
    is_token = tokens < total_seqlen
    if not (np.bincount(tokens[is_token], minlength=total_seqlen) == 1).all():
        raise ValueError(f"global_index: does not hold every one of {total_seqlen} tokens exactly once")
    owner, row = np.empty(total_seqlen, dtype=np.int64), np.empty(total_seqlen, dtype=np.int64)
    lengths = [len(index) for index in global_index]
    owner[tokens[is_token]] = np.repeat(np.arange(len(lengths)), lengths)[is_token]
    row[tokens[is_token]] = np.concatenate([np.arange(n) for n in lengths])[is_token]
    mine = np.asarray(global_index[cp_rank], dtype=np.int64)
    # Both ends list the rows they exchange by the receiver's token, so the lists agree.
    received = _exchange_by_rank(mine, shift, total_seqlen, owner, row, cp_rank, by_sender=False)
    sent = _exchange_by_rank(mine, shift, total_seqlen, owner, row, cp_rank, by_sender=True)
    return RollArrays(
        shift=shift,
        num_rows=len(mine),
        local_from=received[0],
        local_to=sent[0],
        send_rows=sent[1],
        send_splits=_counts(sent[2], len(lengths)),
        recv_rows=received[1],
        recv_splits=_counts(received[2], len(lengths)),
    )


def _exchange_by_rank(
    mine: np.ndarray,
    shift: int,
    total_seqlen: int,
    owner: np.ndarray,
    row: np.ndarray,
    cp_rank: int,
    by_sender: bool,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Local partner of each row, rows with a remote partner grouped by its rank, and those ranks."""
    partner_row = np.arange(len(mine), dtype=np.int64)
    rows = np.flatnonzero(mine < total_seqlen)
    partner = (mine[rows] + (shift if by_sender else -shift)) % max(total_seqlen, 1)
    is_local = owner[partner] == cp_rank
    partner_row[rows[is_local]] = row[partner[is_local]]
    rows, partner = rows[~is_local], partner[~is_local]
    receiver_token = partner if by_sender else mine[rows]
    order = np.lexsort((receiver_token, owner[partner]))
    return partner_row, rows[order], owner[partner[order]]


def _counts(ranks: np.ndarray, num_ranks: int) -> tuple[int, ...]:
    return tuple(np.bincount(ranks, minlength=num_ranks).tolist())


@dataclass(frozen=True, eq=False)
class RollArgs:
    """`RollArrays` on a device: there and back."""

    shift: int
    num_rows: int
    local_from: torch.Tensor
    local_to: torch.Tensor
    forward: GroupCastArgs
    backward: GroupCastArgs

    @classmethod
    def build(cls, arrays: RollArrays, device: torch.device | str) -> RollArgs:
        """Copies the index arrays to ``device``, where the tensors to roll live."""
        a = arrays
        local_from, local_to = upload([a.local_from, a.local_to], device)
        return cls(
            shift=a.shift,
            num_rows=a.num_rows,
            local_from=local_from,
            local_to=local_to,
            forward=GroupCastArgs.build(a.send_rows, a.send_splits, a.recv_splits, None, device),
            backward=GroupCastArgs.build(a.recv_rows, a.recv_splits, a.send_splits, None, device),
        )

    @classmethod
    def from_uploaded(cls, facts: RollFacts, moved: Sequence[torch.Tensor]) -> RollArgs:
        """From `RollArrays.tables` as tensors, where the tensors to roll live."""
        local_from, local_to, *rest = moved
        there = GroupCastArgs.from_uploaded(facts.there, rest[: facts.there.num_arrays])
        back = GroupCastArgs.from_uploaded(facts.back, rest[facts.there.num_arrays :])
        return cls(facts.shift, facts.num_rows, local_from, local_to, there, back)

    @property
    def inverse(self) -> RollArgs:
        """The roll by the opposite shift."""
        return RollArgs(-self.shift, self.num_rows, self.local_to, self.local_from, self.backward, self.forward)


def roll(
    x_local: torch.Tensor,
    args: RollArgs,
    group: Group = None,
    *,
    dim: int = 0,
    impl: str = "auto",
    verify: bool = True,
) -> torch.Tensor:
    """Rolls the global sequence of a dispatched tensor, as `torch.roll` would roll the whole.

    Only rows that change their rank travel. The gradient is rolled back.

    Args:
        x_local: this rank's shard, ``[..., num_rows, ...]``.
        args: made by `make_roll_args` and `RollArgs.build`; the shift is in them.
        group: the ranks, a group or a mesh.
        dim: dimension of the sequence.
        impl: see `megatron_magi.comm.group_collective.group_cast`.
        verify: ranks that disagree get a message, see `megatron_magi.comm.calls`.

    Returns:
        A new tensor of the shape of ``x_local``; padding rows are unchanged.

    Raises:
        ValueError: ``x_local`` has no dimension ``dim``, or not the number of rows along it that
            ``args`` was made for.
        RuntimeError: the ranks disagree in dtype, width or shift.
    """
    group = group_of(group)
    with calls_of(group, len(args.forward.send_splits), verify) as calls:
        dim = _dimension(dim, x_local)
        if x_local.shape[dim] != args.num_rows:
            raise ValueError(f"x_local: {x_local.shape[dim]} rows along dim {dim}, but args is for {args.num_rows}")
        calls.agree(RowsCall.of("roll", x_local, dim, shift=args.shift))
        return _Roll.apply(x_local.movedim(dim, 0), args, group, impl, verify).movedim(0, dim)


class _Roll(torch.autograd.Function):
    """`roll` along dimension 0."""

    @staticmethod
    def forward(
        ctx: Any, x_local: torch.Tensor, args: RollArgs, group: dist.ProcessGroup | None, impl: str, verify: bool
    ) -> torch.Tensor:
        ctx.args, ctx.group, ctx.impl, ctx.verify = args, group, impl, verify
        return _roll_rows(x_local, args, group, impl)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        args: RollArgs = ctx.args.inverse
        with calls_of(ctx.group, len(args.forward.send_splits), ctx.verify) as calls:
            calls.agree(RowsCall.of("roll backward", grad, shift=args.shift))
            return _roll_rows(grad, args, ctx.group, ctx.impl), None, None, None, None


def _roll_rows(x_local: torch.Tensor, args: RollArgs, group: dist.ProcessGroup | None, impl: str) -> torch.Tensor:
    # Which row of its owner a row is was not worked out for rolls: they are small.
    handle = group_cast([x_local], args.forward, group, "auto" if impl == "native" else impl)
    out = x_local.index_select(0, args.local_from)
    (received,) = handle.wait()
    # The rows that this rank takes from others are those it would send when rolling back.
    return out.index_copy_(0, args.backward.send_index, received)
