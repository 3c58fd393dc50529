"""Data types of a plan: immutable data, made on the CPU, executed without further decisions.

Index arrays are read-only numpy int64. "Row" is a token of the rank's shard; ``local`` counts
rows of the rank's own shard, ``remote`` rows of the buffer of one stage.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from megatron_magi.mask import bands as bd


@dataclass(frozen=True, eq=False)
class Dispatch:
    """Which rank holds which tokens; shared by all masks over the same sequence.

    The sequence of ``total_seqlen`` tokens is padded at its end to ``padded_seqlen`` and cut
    at ``chunk_bounds``; each rank holds some chunks, in ascending order unless ``chunk_row`` says otherwise.
    Dispatches with equal content are equal.
    """

    total_seqlen: int
    padded_seqlen: int
    cp_size: int
    chunk_bounds: np.ndarray  # [num_chunks + 1], from 0 to padded_seqlen
    chunk_rank: np.ndarray  # [num_chunks]
    chunk_row: np.ndarray  # [num_chunks]: row of its first token in the shard
    ranges: tuple[np.ndarray, ...]  # per rank [n, 2]: its global tokens in order of rows, adjacent chunks joined
    shard_lengths: tuple[int, ...]  # tokens of each rank, padding included
    digest: bytes

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Dispatch) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def global_index(self, cp_rank: int) -> np.ndarray:
        """Global token of each row of the shard, int64 ``[shard_lengths[cp_rank]]``.

        Padding rows have indices in ``[total_seqlen, padded_seqlen)``.
        """
        ranges = self.ranges[cp_rank]
        return bd.expand(ranges[:, 0], ranges[:, 1] - ranges[:, 0])[1]

    def global_indices(self) -> list[np.ndarray]:
        """`global_index` of every rank, in rank order."""
        return [self.global_index(rank) for rank in range(self.cp_size)]


@dataclass(frozen=True, eq=False)
class Transfer:
    """One group_cast (and in the backward direction one group_reduce), for one rank.

    The rank sends the rows ``send_index`` of its shard, grouped by destination, and receives
    ``sum(recv_splits)`` rows grouped by source. ``recv_order`` is None when they are already
    in buffer order; otherwise buffer row i is received row ``recv_order[i]``. The fields from ``owner_rows`` on
    describe the remote side of each row, for ranks that can access each other's memory.
    """

    send_index: np.ndarray  # [sum(send_splits)]
    send_splits: tuple[int, ...]  # rows to each rank
    recv_splits: tuple[int, ...]  # rows from each rank
    recv_order: np.ndarray | None  # [sum(recv_splits)]
    owner_rows: np.ndarray  # [sum(recv_splits)]: row of each received row in the shard of its owner
    first_there: tuple[int, ...]  # for each rank: rows that it receives before the first from this rank
    first_back: tuple[int, ...]  # for each rank: rows that it sends before the first to this rank
    most_rows: int  # maximum over ranks: rows of the shard up to the last that is sent
    most_recv: int  # maximum over ranks: received rows
    most_send: int  # maximum over ranks: sent rows
    levels: Levels | None = None  # the same in two levels, if nodes are distinguished

    @property
    def num_recv(self) -> int:
        """Rows of the stage's buffer."""
        return sum(self.recv_splits)

    @property
    def num_send(self) -> int:
        """Rows this rank sends."""
        return sum(self.send_splits)


@dataclass(frozen=True, eq=False)
class Levels:
    """A transfer between nodes of ``ranks_per_node`` consecutive ranks of the group, for one rank.

    ``near`` sends own rows to the ranks of its node. ``far`` sends them to the ranks with the same local rank, once to
    each node where any rank needs them; ``relay`` sends rows received by ``far`` to the ranks of the node.
    Row i received by ``near`` is row ``near_rows[i]`` of the transfer's buffer; likewise ``relay_rows``.
    """

    ranks_per_node: int
    near: Transfer
    far: Transfer
    relay: Transfer
    near_rows: np.ndarray
    relay_rows: np.ndarray


class Moves(NamedTuple):
    """Rows of queries that other ranks compute (hosts), for one rank.

    A host computes its own rows, and after them its guests: the rows that it computes for others.

    Attributes:
        there: sends rows of the shard to their hosts; its buffer is the guests.
        back: sends results of guests to their homes; its buffer is the rows of the shard that others compute.
        rows: row of the shard of each row of that buffer, int64 ``[back.num_recv]``.
    """

    there: Transfer
    back: Transfer
    rows: np.ndarray

    @property
    def num_guests(self) -> int:
        """Rows that this rank computes for others."""
        return self.there.num_recv


class StepKind(Enum):
    """FETCH and REDUCE start a communication; ATTEND computes, waiting for its fetch first."""

    FETCH = "fetch"
    ATTEND = "attend"
    REDUCE = "reduce"


class Step(NamedTuple):
    """One step of a schedule on one stage. Stage 0 is local, 1..degree are remote."""

    kind: StepKind
    stage: int


@dataclass(frozen=True)
class Schedule:
    """The ordered steps of one pass, the same on every rank.

    ``saved_stage``: the remote stage whose keys the forward keeps for the backward, or None.
    """

    forward: tuple[Step, ...]
    backward: tuple[Step, ...]
    saved_stage: int | None = None

    @cached_property
    def text(self) -> str:
        """The steps of both passes, for a plan's hash."""
        return ";".join(f"{step.kind.value}{step.stage}" for step in (*self.forward, *self.backward))


class _SetOnce:
    """Attributes are set once. (A frozen dataclass is unpacked, arrays and all, by torch.compile.)"""

    def __setattr__(self, name: str, value: object) -> None:
        if name in self.__dict__:
            raise AttributeError(f"{name}: {type(self).__name__} is read-only")
        super().__setattr__(name, value)


@dataclass(eq=False)
class Runtime:
    """Runtime state of `megatron_magi.attention` for a `RankPlan`; lives as long as the plan, and is not pickled.

    Attributes:
        calls: `attention.call_cache.Call` by cache key.
        templates: what calls share with those of other plans, likewise; None for a plan that shares nothing.
        casts: by device, arguments of the collectives, one for each stage (`attention.collective_args.plan_casts`).
        moves: by device, arguments of the collectives for queries of other ranks (`attention.travel.travel_args`).
        joined_casts: by device, arguments of the collective for the rows of all stages (`joined_cast` there).
        joined_bands: the mask over the keys of all stages (`attention.fused_comm.joined_bands`); None until it is made.
        tables: of a prepared batch: tile plans on the device, kept alive by this reference.
        keep_stage_tables: of a prepared batch: adds the tables of the stages; None if there are no others.
        mask_numbers: of a prepared batch: `backends.base.StageTables.numbers`; else None.
        tail: of a static plan of several ranks: the rows after the fetched ones, to be zeroed; else None.
    """

    calls: dict[tuple, Any] = field(default_factory=dict)
    templates: dict[tuple, Any] | None = None
    casts: dict[Any, tuple] = field(default_factory=dict)
    moves: dict[Any, Any] = field(default_factory=dict)
    joined_casts: dict[Any, Any] = field(default_factory=dict)
    joined_bands: np.ndarray | None = None
    tables: list[Any] = field(default_factory=list)
    keep_stage_tables: Callable[[], None] | None = None
    mask_numbers: Any = None
    tail: Any = None


@dataclass(eq=False)
class RankPlan(_SetOnce):
    """The part of a plan for one rank.

    Attributes:
        cp_rank, cp_size: this rank, and the number of ranks.
        num_rows: rows of the shard, padding included; those of each group of heads, one group after the other.
        bands: one table for each stage, int64 ``[n, 6]``: rows of the shard, and after them guests, times rows of the
            stage's keys; the keys of stage 0 are the shard's own. Rows that other ranks compute see nothing here.
        transfers: ``transfers[s - 1]`` fetches the keys of stage s.
        joined: fetches the keys of all stages into one buffer, in order of stages. None unless there are several
            stages, ``one_launch`` is set, and nodes are not distinguished.
        one_launch: see `OverlapConfig`.
        schedule: order of the steps.
        plan_hash: compared between ranks.
        area: visible pairs that the rank computes.
        num_tokens: rows that are tokens; rows after them are padding.
        moves: of queries that are not computed by the rank that holds them; None if all are.
        head_groups: groups of heads that travel apart (`plan.head_groups`); 1 if rows travel with all heads.
        runtime: device copies and state that calls keep with the plan.
    """

    cp_rank: int
    cp_size: int
    num_rows: int
    bands: tuple[np.ndarray, ...]
    transfers: tuple[Transfer, ...]
    joined: Transfer | None
    one_launch: bool
    schedule: Schedule
    plan_hash: int
    area: int
    num_tokens: int
    moves: Moves | None = None
    head_groups: int = 1
    runtime: Runtime = field(default_factory=Runtime, repr=False)

    def __getstate__(self) -> dict:
        return {**self.__dict__, "runtime": Runtime()}  # device state is not sent to other processes

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state, bands=tuple(own(table) for table in state["bands"]))

    @property
    def degree(self) -> int:
        """Number of remote stages."""
        return len(self.transfers)

    @property
    def num_queries(self) -> int:
        """Rows of queries that kernels get: of the shard, and guests."""
        return self.num_rows + (0 if self.moves is None else self.moves.num_guests)


def own(table: np.ndarray) -> np.ndarray:
    """An immutable copy that owns its memory, so that derived results can be cached."""
    copy = table.copy()
    copy.setflags(write=False)
    return copy
