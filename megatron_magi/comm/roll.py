"""roll: a shift of the global sequence over shards. Only rows that change rank are sent. Differentiable."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from megatron_magi.comm.collective_checks import calls_of
from megatron_magi.comm.dispatch import RowsCall, along_rows, check_shard, sequence_dimension
from megatron_magi.comm.group_collective import CastFacts, CastTables, GroupCastArgs, group_cast
from megatron_magi.comm.groups import Group, group_of
from megatron_magi.runtime.no_compile import refuse_transforms
from megatron_magi.runtime.upload import upload


@dataclass(frozen=True, eq=False)
class RollArrays:
    """The steps of one rank to roll the global sequence, as int64 arrays on the CPU.

    Attributes:
        shift: positions that tokens move towards the end.
        num_rows: rows of the shard.
        local_from: source row of row i; i itself if the source is on another rank.
        local_to: destination row of row i; i itself if it is on another rank.
        send_rows: rows that are sent to other ranks, grouped by rank.
        send_splits: number of rows to each rank.
        recv_rows: rows that are received from other ranks, grouped by rank.
        recv_splits: number of rows from each rank.
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
        """All arrays of both directions, and the rest; see `RollArgs.from_uploaded`."""
        there, sent = CastTables.of(self.send_rows, self.send_splits, self.recv_splits, None).arrays()
        back, received = CastTables.of(self.recv_rows, self.recv_splits, self.send_splits, None).arrays()
        return RollFacts(self.shift, self.num_rows, there, back), [self.local_from, self.local_to, *sent, *received]


class RollFacts(NamedTuple):
    """The part of `RollArrays` that stays on the host when its arrays are on a device.

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
        """Number of arrays of `RollArrays.tables`."""
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
    # Sender and receiver order the rows they exchange by the receiver's token, so the lists agree.
    received = _exchange_by_rank(mine, -shift, owner, row, cp_rank, by_sender=False)
    sent = _exchange_by_rank(mine, shift, owner, row, cp_rank, by_sender=True)
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
    mine: np.ndarray, distance: int, owner: np.ndarray, row: np.ndarray, cp_rank: int, by_sender: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Pairs each row of a shard with the row whose token is ``distance`` positions further.

    Args:
        mine: token of each row of the shard, int64 ``[num_rows]``.
        distance: in tokens, modulo their number.
        owner, row: rank of each token, and its row there, int64 ``[total_seqlen]``.
        cp_rank: this rank.
        by_sender: rows are sent to their partners; else received from them.

    Returns:
        The local partner of each row, or the row itself; rows with a remote partner, grouped by its rank; those ranks.
    """
    total_seqlen = len(owner)
    partner_row = np.arange(len(mine), dtype=np.int64)
    rows = np.flatnonzero(mine < total_seqlen)
    partner = (mine[rows] + distance) % total_seqlen  # arbitrary if there are no tokens
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
        facts, tables = arrays.tables()
        return cls.from_uploaded(facts, upload(tables, device))

    @classmethod
    def from_uploaded(cls, facts: RollFacts, moved: Sequence[torch.Tensor]) -> RollArgs:
        """Makes arguments from the arrays of `RollArrays.tables`, as tensors on the device of the tensors to roll."""
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

    Only rows that change rank are sent. The gradient is rolled back.

    Args:
        x_local: this rank's shard, ``[..., num_rows, ...]``.
        args: made by `make_roll_args` and `RollArgs.build`; the shift is in them.
        group: the ranks, a group or a mesh.
        dim: dimension of the sequence.
        impl: see `megatron_magi.comm.group_collective.group_cast`.
        verify: ranks that disagree get a message, see `megatron_magi.comm.collective_checks`.

    Returns:
        A new tensor of the shape of ``x_local``; padding rows are unchanged.

    Raises:
        ValueError: ``x_local`` has no dimension ``dim``, or not the number of rows along it that
            ``args`` was made for.
        RuntimeError: the ranks disagree in dtype, width or shift.
    """
    refuse_transforms("roll")
    group = group_of(group)
    with calls_of(group, len(args.forward.send_splits), verify) as calls:
        dim = sequence_dimension(dim, x_local)
        check_shard(x_local, dim, args.num_rows)
        calls.agree(RowsCall.of("roll", x_local, dim, shift=args.shift))
        return along_rows(lambda rows: _Roll.apply(rows, args, group, impl, verify), x_local, dim)


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
            return _Roll.apply(grad, args, ctx.group, ctx.impl, ctx.verify), None, None, None, None


def _roll_rows(x_local: torch.Tensor, args: RollArgs, group: dist.ProcessGroup | None, impl: str) -> torch.Tensor:
    # The owners' row indices are not computed for rolls, which are small.
    handle = group_cast([x_local], args.forward, group, "auto" if impl == "native" else impl)
    out = x_local.index_select(0, args.local_from)
    (received,) = handle.wait()
    # The rows that this rank receives are those it would send when rolling back.
    return out.index_copy_(0, args.backward.send_index, received)
