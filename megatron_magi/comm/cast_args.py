"""Which rows are sent where, for one rank: index arrays on the CPU and on a device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch

from megatron_magi.comm.peer_tables import NUM_ARRAYS, ROUTE_WORDS, MostRows, PeerRows, PeerTables, peer_arrays
from megatron_magi.comm.rows import Arrivals, arrival_arrays
from megatron_magi.runtime.upload import upload


class CastFacts(NamedTuple):
    """The part of `CastTables` that stays on the host when its arrays are on a device.

    Attributes:
        send_splits, recv_splits, num_rows_min: see `GroupCastArgs`.
        level_sizes: see `Arrivals`.
        most: of `PeerRows`; None without.
        num_arrays: number of these arrays.
    """

    send_splits: tuple[int, ...]
    recv_splits: tuple[int, ...]
    num_rows_min: int
    level_sizes: tuple[int, ...]
    most: MostRows | None
    num_arrays: int


@dataclass(frozen=True, eq=False)
class CastTables:
    """Which rows are sent where, as arrays on the CPU; made by `of`.

    Attributes:
        send_index, send_splits, recv_splits, recv_order, num_rows_min: see `GroupCastArgs`.
        peers: the remote side of each row, if known.
    """

    send_index: np.ndarray
    send_splits: tuple[int, ...]
    recv_splits: tuple[int, ...]
    recv_order: np.ndarray | None
    num_rows_min: int
    peers: PeerRows | None = None

    @classmethod
    def of(
        cls,
        send_index: np.ndarray,
        send_splits: Sequence[int],
        recv_splits: Sequence[int],
        recv_order: np.ndarray | None,
        peers: PeerRows | None = None,
    ) -> CastTables:
        """Checks the arguments of `GroupCastArgs.build`, with its errors."""
        send_splits, recv_splits = tuple(int(n) for n in send_splits), tuple(int(n) for n in recv_splits)
        send_index = np.asarray(send_index, dtype=np.int64)
        order = None if recv_order is None else np.asarray(recv_order, dtype=np.int64)
        _check_indices(send_index, send_splits, recv_splits, order)
        num_rows_min = int(send_index.max(initial=-1)) + 1
        if peers is not None:
            _check_peers(peers, send_splits, recv_splits, num_rows_min)
        return cls(send_index, send_splits, recv_splits, order, num_rows_min, peers)

    def arrays(self) -> tuple[CastFacts, list[np.ndarray]]:
        """All index arrays, those of group_reduce included, and the rest; see `GroupCastArgs.from_uploaded`."""
        rows, starts, sources, levels = arrival_arrays(self.send_index)
        arrays = [self.send_index, rows, starts, sources]
        if self.recv_order is not None:
            arrays += [self.recv_order, _inverse(self.recv_order)]
        if self.peers is not None:
            arrays += self.peer_arrays(len(rows))
        most = None if self.peers is None else self.peers.most
        return CastFacts(self.send_splits, self.recv_splits, self.num_rows_min, levels, most, len(arrays)), arrays

    @property
    def num_sent_rows(self) -> int:
        """Local rows that are sent, each counted once: those of `Arrivals`."""
        return int(np.count_nonzero(np.bincount(self.send_index)))

    def peer_arrays(self, num_owned: int) -> list[np.ndarray]:
        """The arrays of `PeerTables`; ``num_owned``: rows of `Arrivals`."""
        assert self.peers is not None
        return peer_arrays(self.send_index, self.send_splits, self.recv_splits, self.recv_order, num_owned, self.peers)


@dataclass(frozen=True, eq=False)
class GroupCastArgs:
    """Which rows are sent where, for one rank; made by `build`.

    Attributes:
        send_index: local rows to send, grouped by destination, int64 ``[num_send]``.
        send_splits: rows to each rank.
        recv_splits: rows from each rank.
        recv_order: buffer row i is received row ``recv_order[i]``, int64 ``[num_recv]``; None
            when received rows are in buffer order already.
        num_rows_min: smallest number of local rows that ``send_index`` is valid for.
        most: see `CastFacts`.
        host: the arrays on the CPU, from which the rest is derived; None if nothing is left to derive.
        is_static: the contents of the arrays change, see `megatron_magi.comm.static_args`.
        usual: of arguments that change: the most rows of any rank that are received of the samples; else None.
        ways: cache of implementations, by group and ``impl``, filled in the first call. Entries live as long as the
            group, as plans may keep the arguments longer.
        launches: cache of prepared launches, by implementation; likewise.
    """

    send_index: torch.Tensor
    send_splits: tuple[int, ...]
    recv_splits: tuple[int, ...]
    recv_order: torch.Tensor | None
    num_rows_min: int
    most: MostRows | None
    host: CastTables | None
    is_static: bool = False
    usual: int | None = None
    ways: WeakKeyDictionary[Any, dict] = field(default_factory=WeakKeyDictionary, repr=False)
    launches: WeakKeyDictionary[Any, dict] = field(default_factory=WeakKeyDictionary, repr=False)

    @classmethod
    def build(
        cls,
        send_index: np.ndarray,
        send_splits: Sequence[int],
        recv_splits: Sequence[int],
        recv_order: np.ndarray | None = None,
        device: torch.device | str = "cpu",
        peers: PeerRows | None = None,
    ) -> GroupCastArgs:
        """Makes arguments from index arrays on the CPU, which must not change.

        ``send_index`` and ``recv_order`` are copied to ``device`` now, what is derived from them on first use.

        Args:
            send_index: int64 ``[sum(send_splits)]``, see the class.
            send_splits, recv_splits: one number a rank of the group.
            recv_order: int64 ``[sum(recv_splits)]``, a permutation, or None.
            device: where the tensors to move live.
            peers: the remote side of each row, which ``native`` needs.

        Raises:
            ValueError: lengths disagree, a number is negative, or ``recv_order`` is no permutation.
        """
        return cls.of_tables(CastTables.of(send_index, send_splits, recv_splits, recv_order, peers), device)

    @classmethod
    def of_tables(cls, tables: CastTables, device: torch.device | str) -> GroupCastArgs:
        """`build` from tables that have been checked."""
        order, peers = tables.recv_order, tables.peers
        arrays = [tables.send_index] if order is None else [tables.send_index, order]
        # What the first call between GPUs that reach each other's memory needs, in the same copy.
        goes_along = peers is not None and torch.device(device).type == "cuda"
        if goes_along:
            arrays += tables.peer_arrays(tables.num_sent_rows)
        moved = upload(arrays, device)
        args = cls(
            send_index=moved[0],
            send_splits=tables.send_splits,
            recv_splits=tables.recv_splits,
            recv_order=None if order is None else moved[1],
            num_rows_min=tables.num_rows_min,
            most=None if peers is None else peers.most,
            host=tables,
        )
        if goes_along:
            vars(args)["peers"] = PeerTables(*moved[-NUM_ARRAYS:])  # where a cached property stores its value
        return args

    @classmethod
    def from_uploaded(cls, facts: CastFacts, moved: Sequence[torch.Tensor]) -> GroupCastArgs:
        """Makes arguments from arrays on their device, so that nothing is computed or copied later.

        Args:
            facts: of the tables.
            moved: `CastTables.arrays` as tensors.
        """
        send_index, rows, starts, sources, *rest = moved
        tables = None if facts.most is None else PeerTables(*rest[-NUM_ARRAYS:])
        order = rest if tables is None else rest[:-NUM_ARRAYS]
        args = cls(
            send_index=send_index,
            send_splits=facts.send_splits,
            recv_splits=facts.recv_splits,
            recv_order=order[0] if order else None,
            num_rows_min=facts.num_rows_min,
            most=facts.most,
            host=None,
        )
        known = vars(args)  # where cached properties store their values
        known["arrivals"] = Arrivals(rows, starts, sources, facts.level_sizes)
        known["recv_position"] = order[1] if order else None
        known["peers"] = tables
        return args

    @staticmethod
    def num_indices(num_send: int, num_recv: int) -> int:
        """Upper bound of int64 indices of such arguments on their device, those for group_reduce included.

        Without the chunks of `PeerTables`, which are few.
        """
        return 5 * num_send + 3 * num_recv + 8 + 3 * ROUTE_WORDS

    @cached_property
    def arrivals(self) -> Arrivals:
        """For group_reduce: which returning rows belong to which local row. Computed on first use."""
        assert self.host is not None
        *arrays, levels = arrival_arrays(self.host.send_index)
        return Arrivals(*upload(arrays, self.send_index.device), levels)

    @cached_property
    def recv_position(self) -> torch.Tensor | None:
        """For group_reduce: the inverse of ``recv_order``, or None like it. Computed on first use."""
        if self.host is None or self.host.recv_order is None:
            return None
        return upload([_inverse(self.host.recv_order)], self.send_index.device)[0]

    @cached_property
    def peers(self) -> PeerTables | None:
        """Tables for ranks that can access each other's memory; None if the remote side of rows is not known. Computed
        on first use.
        """
        if self.most is None:
            return None
        assert self.host is not None
        arrays = self.host.peer_arrays(self.host.num_sent_rows)
        return PeerTables(*upload(arrays, self.send_index.device))

    @property
    def device(self) -> torch.device:
        """The device of the tensors that are moved."""
        return self.send_index.device

    @property
    def num_ranks(self) -> int:
        """Ranks of the group."""
        return len(self.send_splits)

    def rows_away(self, rank: int) -> tuple[int, int]:
        """Rows that ``rank``, whose arguments these are, sends to other ranks in a cast, and receives from others."""
        return self.num_send - self.send_splits[rank], self.num_recv - self.recv_splits[rank]

    def rows_far(self, rank: int) -> tuple[int, int]:
        """The part of `rows_away` that crosses nodes: none, as nodes are not distinguished here."""
        return 0, 0

    @cached_property
    def num_send(self) -> int:
        """Rows this rank sends."""
        return sum(self.send_splits)

    @cached_property
    def num_recv(self) -> int:
        """Rows this rank receives."""
        return sum(self.recv_splits)


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


def _check_peers(
    peers: PeerRows, send_splits: tuple[int, ...], recv_splits: tuple[int, ...], num_rows_min: int
) -> None:
    """Raises ValueError if ``peers`` does not fit the splits."""
    rows, num_recv, num_send = peers.owner_rows, sum(recv_splits), sum(send_splits)
    if rows.shape != (num_recv,) or rows.min(initial=0) < 0 or rows.max(initial=-1) >= peers.most_rows:
        raise ValueError(f"peers: expected {num_recv} owner_rows below {peers.most_rows}, got shape {list(rows.shape)}")
    for name, first, splits, most in (
        ("first_there", peers.first_there, send_splits, peers.most_recv),
        ("first_back", peers.first_back, recv_splits, peers.most_send),
    ):
        if len(first) != len(splits) or any(not 0 <= a <= most - n for a, n in zip(first, splits, strict=True)):
            raise ValueError(f"peers: expected {name} of {len(splits)} ranks, up to {most} rows, got {list(first)}")
    if peers.most_rows < num_rows_min or peers.most_recv < num_recv or peers.most_send < num_send:
        bounds = ", ".join(map(str, peers[-3:]))
        raise ValueError(f"peers: bounds {bounds} are below {num_rows_min}, {num_recv}, {num_send}")
