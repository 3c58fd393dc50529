"""dispatch and undispatch: a global tensor to shards and back.

Both are differentiable. The sequence lies along one dimension, ``dim``; other dimensions are free.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from megatron_magi.checks import integer
from megatron_magi.comm.collective_checks import calls_of
from megatron_magi.comm.groups import Group, all_gather_single, group_of, reduce_scatter_single
from megatron_magi.comm.row_layout import resolved
from megatron_magi.runtime.no_compile import refuse_transforms
from megatron_magi.runtime.upload import upload

_STANDS_FOR = {
    **{getattr(torch, name): torch.uint8 for name in dir(torch) if name.startswith(("float8_", "float4_"))},
    torch.uint16: torch.int16,
    torch.uint32: torch.int32,
    torch.uint64: torch.int64,
}
"""Dtypes of which torch neither fills nor sends rows, with one of the same width of which it does."""


def as_filled(x: torch.Tensor) -> torch.Tensor:
    """``x``, or a view of it in another dtype of its width where torch does not fill rows of its own.

    Raises:
        ValueError: the view would drop the gradient of ``x``.
    """
    if x.dtype not in _STANDS_FOR:
        return x
    if x.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"x: rows of {x.dtype} are moved without gradients; give a tensor that requires none")
    return x.view(_STANDS_FOR[x.dtype])


def value_as_filled(value: float, dtype: torch.dtype) -> float:
    """What `as_filled` makes of a number that ``dtype`` holds."""
    # The bits of 0 are 0 in all of these dtypes but float8_e8m0fnu, which has no 0.
    if not value or dtype not in _STANDS_FOR:
        return value
    value = value if dtype.is_floating_point else int(value)
    return as_filled(torch.tensor([value], dtype=dtype, device="cpu")).item()


def as_moved(x: torch.Tensor) -> torch.Tensor:
    """`as_filled` in a dtype that backends send too."""
    x = as_filled(x)
    return x.view(torch.bfloat16) if x.dtype == torch.int16 else x


def along_rows(move: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, dim: int) -> torch.Tensor:
    """What ``move`` makes of ``x``, whose sequence lies along ``dim``, in the dtype of ``x``.

    ``move`` takes and returns tensors whose sequence comes first, in the dtype in which `as_moved` views them; complex
    numbers as pairs of real ones.
    """
    x = resolved(x)
    moved = move((torch.view_as_real(x) if x.is_complex() else as_moved(x)).movedim(dim, 0)).movedim(0, dim)
    if x.is_complex():
        return torch.view_as_complex(moved)
    return moved if moved.dtype == x.dtype else moved.view(x.dtype)


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
        """The record for a tensor whose rows lie along ``dim``."""
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
        ValueError: ``x`` has no dimension ``dim``, or is of 8 or 4 bits an element and requires a gradient.
    """
    if x.dtype in _STANDS_FOR:
        value = value_as_filled(pad_value, x.dtype)
        return dispatch(as_filled(x), index, dim=dim, pad_value=value).view(x.dtype)
    dim = sequence_dimension(dim, x)
    total_seqlen = x.shape[dim]
    if total_seqlen == 0:
        padding = x.new_full((*x.shape[:dim], index.numel(), *x.shape[dim + 1 :]), pad_value)
        padding.narrow(dim, 0, 0).copy_(x)  # differentiable, as any other length is
        return padding
    out = x.index_select(dim, index.clamp(max=total_seqlen - 1))
    is_pad = (index >= total_seqlen).view(-1, *([1] * (x.dim() - dim - 1)))
    return out.masked_fill(is_pad, pad_value)


@dataclass(frozen=True, eq=False)
class UndispatchArgs:
    """Index tensors that find the rows of all shards, on a device, for one rank; made by `build`.

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
            `megatron_magi.comm.collective_checks`.

    Returns:
        ``[..., num_rows, ...]``.

    Raises:
        ValueError: ``x`` has no dimension ``dim`` or not ``total_seqlen`` rows along it, or ``args``
            is for another number of ranks.
    """
    refuse_transforms("dispatch")
    group, dim = group_of(group), sequence_dimension(dim, x)
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
        verify: ranks that disagree get a message, see `megatron_magi.comm.collective_checks`.

    Returns:
        ``[..., total_seqlen, ...]``.

    Raises:
        ValueError: ``x_local`` has no dimension ``dim`` or not ``num_rows`` rows along it, or
            ``args`` is for another number of ranks.
        RuntimeError: the ranks disagree in dtype, width or ``is_partial_grad``.
    """
    refuse_transforms("undispatch")
    group, num_ranks, num_rows = group_of(group), len(args.shard_lengths), args.shard_lengths[args.cp_rank]
    with calls_of(group, num_ranks, verify) as calls:
        dim = sequence_dimension(dim, x_local)
        _check_ranks(args, group)
        check_shard(x_local, dim, num_rows)
        calls.agree(RowsCall.of("undispatch", x_local, dim, is_partial_grad=is_partial_grad))
        return along_rows(lambda rows: _Undispatch.apply(rows, args, group, is_partial_grad, verify), x_local, dim)


def sequence_dimension(dim: int, x: torch.Tensor) -> int:
    """``dim`` counted from the first dimension; ValueError where ``x`` has no such dimension."""
    if not -x.dim() <= integer(dim, "dim") < x.dim():
        raise ValueError(f"dim: {dim} is not a dimension of a tensor of shape {list(x.shape)}")
    return dim % x.dim()


def check_shard(x_local: torch.Tensor, dim: int, num_rows: int) -> None:
    """Raises ValueError unless ``x_local`` has this rank's ``num_rows`` along ``dim``."""
    if x_local.shape[dim] != num_rows:
        raise ValueError(f"x_local: {x_local.shape[dim]} rows along dim {dim}, this rank's shard has {num_rows}")


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
        all_gather_single(gathered, send, group=group)
        return gathered.index_select(0, args.gathered_index)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        args: UndispatchArgs = ctx.args
        if not ctx.is_partial_grad or len(args.shard_lengths) == 1:
            # Where this is differentiated, the gradient of ``grad`` is whole on every rank too.
            return dispatch_replicated(grad, args, ctx.group, verify=ctx.verify), None, None, None, None
        with calls_of(ctx.group, len(args.shard_lengths), ctx.verify) as calls:
            calls.agree(RowsCall.of("undispatch backward", grad))
            return _SumParts.apply(grad, args, ctx.group, ctx.verify), None, None, None, None


class _SumParts(torch.autograd.Function):
    """This rank's rows of the sum of what all ranks have: the adjoint of `_Undispatch`."""

    @staticmethod
    def forward(
        ctx: Any, parts: torch.Tensor, args: UndispatchArgs, group: dist.ProcessGroup | None, verify: bool
    ) -> torch.Tensor:
        ctx.args, ctx.group, ctx.verify = args, group, verify
        padded = parts.new_zeros(len(args.shard_lengths) * args.longest, *parts.shape[1:])
        padded.index_copy_(0, args.gathered_index, parts)
        mine = parts.new_empty(args.longest, *parts.shape[1:])
        reduce_scatter_single(mine, padded, group=group)
        return mine[: args.shard_lengths[args.cp_rank]]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return undispatch(grad, ctx.args, ctx.group, is_partial_grad=True, verify=ctx.verify), None, None, None
