"""`make_plan`: from a mask, a configuration and a number of ranks to what each rank holds, fetches and computes."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

import numpy as np

from megatron_magi.backends.costs import DEFAULT
from megatron_magi.checks import int_at_least
from megatron_magi.config import DispatchConfig, MagiConfig, OverlapConfig
from megatron_magi.mask import AttnMask
from megatron_magi.plan import cpp_partition, cpp_predict, cpp_solver
from megatron_magi.plan.chunks import ChunkedMask, chunk_bounds
from megatron_magi.plan.degree import choose_degree
from megatron_magi.plan.dispatch import assign_chunks
from megatron_magi.plan.head_groups import copied_chunks, copied_mask, copies_us, num_groups, overlap_of_group
from megatron_magi.plan.moves import QueryMoves
from megatron_magi.plan.nodes import gather_in_nodes, nodes_in_use
from megatron_magi.plan.overlap_schedule import make_schedule
from megatron_magi.plan.partition import areas_by_place, localise, partition, rows_of_chunks, split_stages, whole
from megatron_magi.plan.swaps import sum_by_rank
from megatron_magi.plan.transfers import TransferTable
from megatron_magi.plan.travel import BETTER, Choice, choose_hosts
from megatron_magi.plan.types import Dispatch, RankPlan, Schedule, own

MAX_RANKS = 1 << 16
_FORMAT = b"plan-1"
"""Part of the hash, so that ranks with different planner versions do not agree."""


@dataclass(frozen=True)
class PlanStats:
    """Statistics of a plan. Tuples have one entry for each rank. With several ``head_groups`` pairs and rows are those
    of all heads that amount to the same, rounded up.

    Attributes:
        areas: visible (query, key) pairs that the rank computes, those of guests too.
        balance: largest area over the mean; 1.0 if there is nothing to compute.
        num_rows: rows that the rank holds, padding included.
        received_rows: rows of k and v that the rank fetches in a forward pass.
        lower_bound_rows: rows that it needs and does not hold.
        degree: remote stages.
        guest_rows: rows of q that it computes for others: they arrive in a forward pass, and their outputs leave;
            gradients of outputs arrive in the backward pass, and those of q leave.
        head_groups: groups of heads that travel apart.
    """

    areas: tuple[int, ...]
    balance: float
    num_rows: tuple[int, ...]
    received_rows: tuple[int, ...]
    lower_bound_rows: tuple[int, ...]
    degree: int
    guest_rows: tuple[int, ...]
    head_groups: int = 1


class Plan:
    """The plan of one mask for all ranks: who holds, computes and sends what. Read-only."""

    def __init__(
        self,
        mask: AttnMask,
        dispatch: Dispatch,
        config: MagiConfig,
        compute: Dispatch | None = None,
        by_rates: bool = False,
        head_groups: int = 1,
    ) -> None:
        """
        Args:
            compute: who computes the queries of each group of heads: of `copied_chunks`; None for their holders.
            head_groups: groups of heads that travel apart.
        """
        self.mask = mask
        self.dispatch = dispatch
        self.config = config
        self.head_groups = head_groups
        if head_groups > 1:
            mask = copied_mask(mask, dispatch.padded_seqlen, head_groups)
            dispatch = dispatch_from_chunks(*copied_chunks(dispatch, head_groups))
        self._held, overlap = dispatch, overlap_of_group(config.overlap, head_groups)
        ranks_per_node = nodes_in_use(config.comm.ranks_per_node, dispatch.cp_size)
        moves = None if compute is None else QueryMoves(dispatch, compute, ranks_per_node)
        self._moves = moves if moves is not None and moves.any else None
        queries = None if self._moves is None else self._moves.queries
        use_cpp = cpp_solver.chosen(config.dispatch.planner)
        alone = whole(mask, dispatch) if queries is None else None
        self._is_whole = alone is not None
        if alone is not None:
            self._part = alone
            own_area, fetched_area = np.array([mask.area]), np.zeros(1, dtype=np.int64)
        elif use_cpp:
            self._part, (own_area, fetched_area) = cpp_partition.partition(mask, dispatch, queries)
        else:
            self._part = partition(mask, dispatch, queries)
            own_area, fetched_area = areas_by_place(self._part)
        self._use_cpp = use_cpp
        self._area = own_area + fetched_area
        self.degree = 0
        if not self._is_whole:
            chooses, rows = cpp_predict.choose_degree if use_cpp else choose_degree, self._part.remote_rows
            self.degree = chooses(own_area, fetched_area, rows, overlap, config.dispatch.rates)
        self._stages = split_stages(self._part, self.degree)
        self._transfers = TransferTable(self._part, self._stages, ranks_per_node, use_cpp)
        self.schedule: Schedule = make_schedule(
            self.degree, overlap=overlap.degree != 0, hide_tail_reduce=overlap.hide_tail_reduce
        )
        by_rates = by_rates or config.dispatch.algorithm == "auto"
        self.plan_hash = _plan_hash(mask, dispatch, self._moves, self.degree, self.schedule, config, by_rates)
        self._rank_plans: dict[int, RankPlan] = {}

    @property
    def cp_size(self) -> int:
        """Number of context-parallel ranks."""
        return self.dispatch.cp_size

    def for_rank(self, cp_rank: int) -> RankPlan:
        """The part of rank ``cp_rank``; made once.

        Raises:
            ValueError: ``cp_rank`` is not in ``[0, cp_size)``.
        """
        cp_rank = int_at_least(cp_rank, "cp_rank", 0, most=self.cp_size - 1)
        if cp_rank not in self._rank_plans:
            if self._is_whole:
                bands = (self._part.bands,)
            else:
                into_local = cpp_partition.localise if self._use_cpp else localise
                bands = tuple(own(b) for b in into_local(self._part, self._stages, cp_rank))
            self._rank_plans[cp_rank] = RankPlan(
                cp_rank=cp_rank,
                cp_size=self.cp_size,
                num_rows=self._held.shard_lengths[cp_rank],
                bands=bands,
                transfers=self._transfers.for_rank(cp_rank),
                joined=self._transfers.joined(cp_rank) if self.config.overlap.one_launch else None,
                one_launch=self.config.overlap.one_launch,
                schedule=self.schedule,
                plan_hash=self.plan_hash,
                area=int(self._area[cp_rank]),
                num_tokens=int(np.diff(np.minimum(self.dispatch.ranges[cp_rank], self.dispatch.total_seqlen)).sum()),
                moves=None if self._moves is None else self._moves.for_rank(cp_rank),
                head_groups=self.head_groups,
            )
        return self._rank_plans[cp_rank]

    def take_rank_plan(self, plan: RankPlan) -> None:
        """Takes a rank's part that was sent here from elsewhere, with what is prepared for it, in place of its own."""
        assert plan.plan_hash == self.plan_hash and plan.cp_size == self.cp_size
        self._rank_plans[plan.cp_rank] = plan

    def stats(self) -> PlanStats:
        """Balance and volume of the plan."""
        received, guests = np.zeros(self.cp_size, dtype=np.int64), np.zeros(self.cp_size, dtype=np.int64)
        for ranges in self._stages:
            received += sum_by_rank(ranges.dst, ranges.end - ranges.start, self.cp_size)
        if self._moves is not None:
            guests = self._moves.num_guests
        mean = int(self._area.sum()) / self.cp_size

        def of_all_heads(counts: np.ndarray) -> tuple[int, ...]:
            return tuple((-(-counts // self.head_groups)).tolist())

        return PlanStats(
            areas=of_all_heads(self._area),
            balance=int(self._area.max()) / mean if mean else 1.0,
            num_rows=self.dispatch.shard_lengths,
            received_rows=of_all_heads(received),
            lower_bound_rows=of_all_heads(self._part.remote_rows),
            degree=self.degree,
            guest_rows=of_all_heads(guests),
            head_groups=self.head_groups,
        )

    def __repr__(self) -> str:
        return f"Plan({self.mask!r}, cp_size={self.cp_size}, degree={self.degree}, hash={self.plan_hash:016x})"


def make_plan(
    mask: AttnMask,
    config: MagiConfig | None = None,
    cp_size: int = 1,
    dispatch: Dispatch | None = None,
    compute: Dispatch | Literal["home", "auto"] = "home",
    head_groups: int = 1,
) -> Plan:
    """Plans distributed attention: pure, deterministic, on the CPU, without communication.

    Args:
        mask: the mask of the whole sequence; queries and keys are the same tokens.
        config: how; defaults when None.
        cp_size: number of ranks.
        dispatch: reuse the token distribution of another plan over a sequence of the same
            length, so that several masks (window and full layers) share one dispatch.
        compute: who computes each query. ``"home"``: the rank that holds it. ``"auto"``: also another, if the predicted
            step is shorter (`travel.choose_hosts`). Or the rank of each as a dispatch of the same tokens, in which
            padding and the order of rows have no effect. Queries travel to other ranks, and their results back.
        head_groups: with a dispatch as ``compute``: groups of heads that travel apart. The dispatch is then that of all
            tokens and the padding for the first group, after them for the second, and so on.

    Raises:
        ValueError: an argument is out of range, or ``dispatch`` or ``compute`` does not fit.
    """
    config = MagiConfig() if config is None else config
    for name, value, wanted in (("mask", mask, AttnMask), ("config", config, MagiConfig)):
        if not isinstance(value, wanted):
            raise ValueError(f"{name}: expected {wanted.__name__}, got {type(value).__name__}")
    cp_size = int_at_least(cp_size, "cp_size", 1, most=MAX_RANKS)
    if mask.total_seqlen_q != mask.total_seqlen_k:
        raise ValueError(
            f"mask: queries and keys must be the same tokens, got total_seqlen_q={mask.total_seqlen_q} and "
            f"total_seqlen_k={mask.total_seqlen_k}"
        )
    if dispatch is None:
        dispatch = make_dispatch(mask, config.dispatch, cp_size, config.overlap, config.comm.ranks_per_node)
    for name, value in (("dispatch", dispatch), ("compute", compute)):
        if name == "compute" and isinstance(value, str) and value in ("home", "auto"):
            continue
        if not isinstance(value, Dispatch):
            other = "None" if name == "dispatch" else "home or auto"
            raise ValueError(f"{name}: expected a Dispatch, or {other}, got {value!r}")
        expected = mask.total_seqlen_q
        if name == "compute" and head_groups > 1:
            expected = head_groups * dispatch.padded_seqlen
        if value.total_seqlen != expected or value.cp_size != cp_size:
            raise ValueError(
                f"{name}: made for {value.total_seqlen} tokens over {value.cp_size} ranks, "
                f"the mask has {expected} over {cp_size}"
            )
    if isinstance(compute, str):
        if head_groups != 1:
            raise ValueError(f"head_groups: {head_groups} are for a dispatch as compute")
        return Plan(mask, dispatch, config) if compute == "home" else _plan_travel(mask, dispatch, config)
    return Plan(mask, dispatch, config, compute, head_groups=head_groups)


def _plan_travel(mask: AttnMask, dispatch: Dispatch, config: MagiConfig) -> Plan:
    """The plan with the shortest predicted step: all queries at home, or some elsewhere, by rows or by groups too."""
    found, groups = choose_hosts(mask, dispatch, config), num_groups(config)
    if groups > 1 and found.predicted is not None:
        of_groups, hosts = hosts_of_groups(mask, dispatch, config, groups)
        copies = copies_us(max(dispatch.shard_lengths), config.overlap.cost, config.dispatch.rates or DEFAULT)
        step_us = of_groups.predicted.step_us + copies if of_groups.predicted is not None else 0.0
        if hosts is not None and step_us <= BETTER * found.predicted.step_us:
            return Plan(mask, dispatch, config, hosts, by_rates=True, head_groups=groups)
    rows = None if found.hosts is None else dispatch_from_chunks(dispatch.total_seqlen, *found.hosts, dispatch.cp_size)
    return Plan(mask, dispatch, config, rows, by_rates=True)


def hosts_of_groups(
    mask: AttnMask, dispatch: Dispatch, config: MagiConfig, groups: int
) -> tuple[Choice, Dispatch | None]:
    """The choice of the ranks that compute the queries of each of so many groups of heads, and ``compute`` of
    `make_plan` for it; None if all are computed at home.
    """
    total, bounds, rank, cp_size, row = copied_chunks(dispatch, groups)
    held = dispatch_from_chunks(total, bounds, rank, cp_size, row)
    of_group = replace(config, overlap=overlap_of_group(config.overlap, groups))
    found = choose_hosts(copied_mask(mask, dispatch.padded_seqlen, groups), held, of_group)
    return found, None if found.hosts is None else dispatch_from_chunks(total, *found.hosts, cp_size)


def who_computes(config: DispatchConfig, is_given: bool) -> Literal["home", "auto"]:
    """``compute`` of `make_plan` by ``config.queries``; ``is_given``: the dispatch is that of a given layout."""
    return "auto" if config.queries == "travel" or (config.queries == "auto" and is_given) else "home"


def make_dispatch(
    mask: AttnMask,
    config: DispatchConfig,
    cp_size: int,
    overlap: OverlapConfig | None = None,
    ranks_per_node: int | None = None,
) -> Dispatch:
    """Distributes the tokens of a mask over ranks.

    Args:
        overlap: stages and shape of the attention, for predicted times; defaults when None.
        ranks_per_node: see `CommConfig`: ranks that need each other's keys are placed in one node, and times are
            predicted for these nodes; for those of the rates when None.

    Raises:
        ValueError: uneven shards of fewer tokens than ranks, or ranks that are no whole number of nodes.
    """
    total = mask.total_seqlen_q
    bounds = chunk_bounds(total, cp_size, config)
    if len(bounds) - 1 < cp_size:
        raise ValueError(
            f"cp_size: {total} tokens in chunks of {int(bounds[1]) if total else 0} give "
            f"{len(bounds) - 1} chunks, fewer than {cp_size} ranks; use a smaller chunk_size or even shards"
        )
    if cp_size == 1:
        return _of_one_rank(total, bounds.tobytes())
    nodes = nodes_in_use(ranks_per_node, cp_size)
    overlap = OverlapConfig() if overlap is None else overlap
    rank = assign_chunks(ChunkedMask(mask, bounds, cp_size), config, overlap, ranks_per_node)
    if nodes is not None and config.algorithm in ("auto", "affinity"):
        rank = gather_in_nodes(mask, bounds, rank, cp_size, nodes)
    return dispatch_from_chunks(total, bounds, rank, cp_size)


@lru_cache(maxsize=64)  # by lengths: documents do not matter
def _of_one_rank(total_seqlen: int, chunk_bounds: bytes) -> Dispatch:
    bounds = np.frombuffer(chunk_bounds, dtype=np.int64)
    return dispatch_from_chunks(total_seqlen, bounds, np.zeros(len(bounds) - 1, dtype=np.int64), 1)


def dispatch_from_chunks(
    total_seqlen: int,
    chunk_bounds: np.ndarray,
    chunk_rank: np.ndarray,
    cp_size: int,
    chunk_row: np.ndarray | None = None,
) -> Dispatch:
    """A user-defined dispatch: chunk i is ``[chunk_bounds[i], chunk_bounds[i + 1])`` on ``chunk_rank[i]``.

    Args:
        total_seqlen: tokens of the sequence, without padding.
        chunk_bounds: int64 ``[num_chunks + 1]``, from 0 to the padded length.
        chunk_rank: int64 ``[num_chunks]``.
        cp_size: number of ranks.
        chunk_row: row of the first token of each chunk in the shard of its rank, int64 ``[num_chunks]``; ascending
            with the tokens when None.

    Raises:
        ValueError: the bounds do not cover the tokens in order, a rank is out of range, or the rows of a rank are not
            each taken once.
    """
    bounds, rank = np.array(chunk_bounds, dtype=np.int64), np.array(chunk_rank, dtype=np.int64)
    if len(bounds) < 2 or bounds[0] != 0 or bounds[-1] < total_seqlen or (np.diff(bounds) <= 0).any():
        raise ValueError(f"chunk_bounds: expected increasing bounds from 0 to at least {total_seqlen} tokens")
    if rank.shape != (len(bounds) - 1,) or (rank < 0).any() or (rank >= cp_size).any():
        raise ValueError(f"chunk_rank: expected {len(bounds) - 1} ranks in [0, {cp_size})")
    order = np.argsort(rank, kind="stable")
    row = ascending = rows_of_chunks(bounds, rank, order)
    if chunk_row is not None:
        row = np.array(chunk_row, dtype=np.int64)
        order = np.lexsort((row, rank)) if row.shape == rank.shape else None
        if order is None or not np.array_equal(row, rows_of_chunks(bounds, rank, order)):
            raise ValueError("chunk_row: expected the rows of each rank, each taken by one chunk")
    ranges = _joined_ranges(bounds, rank, cp_size, order)
    lengths = tuple(sum_by_rank(rank, np.diff(bounds), cp_size).tolist())
    text = hashlib.sha256(np.int64([total_seqlen, cp_size]).tobytes() + bounds.tobytes() + rank.tobytes())
    if row is not ascending and not np.array_equal(row, ascending):
        text.update(b"rows" + row.tobytes())
    for array in (bounds, rank, row):
        array.setflags(write=False)
    return Dispatch(total_seqlen, int(bounds[-1]), cp_size, bounds, rank, row, ranges, lengths, text.digest())


def _joined_ranges(bounds: np.ndarray, rank: np.ndarray, cp_size: int, chunk: np.ndarray) -> tuple[np.ndarray, ...]:
    """The tokens of each rank, read-only ``[n, 2]``, with adjacent chunks joined; ``chunk``: in order of ranks and
    rows.
    """
    breaks = np.flatnonzero((np.diff(chunk) != 1) | (np.diff(rank[chunk]) != 0)) + 1
    first, last = np.append(0, breaks), np.append(breaks, len(chunk)) - 1
    ranges = np.stack([bounds[chunk[first]], bounds[chunk[last] + 1]], axis=1)
    ranges.setflags(write=False)
    edges = np.searchsorted(rank[chunk[first]], np.arange(cp_size + 1)).tolist()
    return tuple(ranges[edges[r] : edges[r + 1]] for r in range(cp_size))


def _plan_hash(
    mask: AttnMask,
    dispatch: Dispatch,
    moves: QueryMoves | None,
    degree: int,
    schedule: Schedule,
    config: MagiConfig,
    by_rates: bool,
) -> int:
    """Identifies all that ranks must agree on: what is sent, when, in which dtype and by which implementation.

    This includes the rates if anything is chosen by predicted time (``by_rates``): ranks with different rates may agree
    on one batch and not on the next.
    """
    text = hashlib.sha256(_FORMAT + mask.digest + dispatch.digest)
    if moves is not None:
        text.update(b"moves" + b"".join(array.tobytes() for array in moves.digest_arrays()))
    text.update(f"{degree}|{schedule.text}|{schedule.saved_stage}|{config.overlap.one_launch}|{config.comm}".encode())
    if by_rates:
        text.update((config.dispatch.rates or DEFAULT).digest)
    return int.from_bytes(text.digest()[:8], "little") >> 1
