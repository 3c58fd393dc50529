"""Configuration: frozen, validated, never rewritten. Every field has a default that fits."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from megatron_magi.cost_model import Rates

DispatchAlgorithm = Literal["auto", "affinity", "min_heap", "sorted_sequential", "zigzag", "sequential"]
CommImpl = Literal["auto", "reference", "all_to_all", "native"]
QueryPlace = Literal["auto", "home", "travel"]
PlannerImpl = Literal["auto", "python", "native"]
AttendImpl = Literal["auto", "reference", "torch", "ffa", "cudnn", "triton"]
SinkReduction = Literal["none", "sum", "avg"]


_MOST = (1 << 31) - 1


def _check_count(name: str, value: int, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= _MOST:
        raise ValueError(f"{name}: expected a whole number of at least {least} and below 2**31, got {value!r}")


def _check_flags(part: object, *names: str) -> None:
    for name in names:
        if not isinstance(getattr(part, name), bool):
            raise ValueError(f"{name}: expected True or False, got {getattr(part, name)!r}")


def _check_choice(name: str, value: str, known: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in known:
        raise ValueError(f"{name}: expected one of {', '.join(known)}, got {value!r}")


def _check_part(name: str, value: object, wanted: type) -> None:
    if not isinstance(value, wanted):
        raise ValueError(f"{name}: expected {wanted.__name__}, got {type(value).__name__}")


def _is_number(value: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= 1e300


@dataclass(frozen=True)
class DispatchConfig:
    """Distribution of tokens over ranks.

    Attributes:
        algorithm: ``auto`` takes the one of the others with the shortest step of the slowest rank, predicted by
            ``rates``, and of ``affinity`` wider tolerances too;
            ``affinity`` keeps keys and the queries that need them together as far as
            ``balance_tolerance`` allows; ``min_heap`` minimises the largest area alone;
            ``sorted_sequential`` deals the chunks, sorted by area, in serpentine order; ``zigzag`` gives every rank two
            contiguous pieces, mirrored about the middle of the sequence;
            ``sequential`` gives every rank one contiguous piece.
        chunk_size: tokens a chunk; chosen from the length and the number of ranks when None.
        pad_size: tokens of padding at the end of the sequence, exactly this many or an error; as few
            as make all shards equally long when None, on one rank none. At most 65,536 or the tokens of a rank,
            whichever is more, times the number of ranks; on one rank any number up to there.
        uneven_shard: shards may differ in length and nothing is padded. False pads the
            sequence at its end so that all shards are equally long.
        alignment: shard lengths are multiples of this (tensor-parallel ranks with sequence
            parallelism), ignored with ``uneven_shard``.
        balance_tolerance: largest area of a rank over the mean with ``affinity``; below 1.001 it counts as
            1.001. Where not even ``min_heap`` gets that far (few or very uneven chunks), what ``min_heap``
            reaches is the bound. A larger tolerance never moves more rows, counted in blocks of chunks.
        planner: ``native`` plans in C++, ``python`` in numpy, with equal results; ``auto`` in C++ where it is built.
        rates: of the GPUs, for ``auto``. All ranks must have the same: they are part of what ranks compare. None: in
            keys of `megatron_magi.api` and with Megatron those of the GPU that is there (`calibration.present_rates`);
            in plans that are made by hand those of an H100.
        queries: where queries are computed. ``home``: by the rank that holds them. ``travel``: also by others, where
            the predicted step is shorter: q, out, lse and their gradients travel between them. ``auto``: ``travel`` for
            layouts that are given, ``home`` for the planner's, which are even already.
        flatten_head_groups: queries that travel may do so by groups of heads, each to another rank, where the predicted
            step is shorter than that with whole rows (`megatron_magi.plan.head_groups`).
    """

    algorithm: DispatchAlgorithm = "auto"
    chunk_size: int | None = None
    uneven_shard: bool = False
    alignment: int = 1
    balance_tolerance: float = 1.01
    pad_size: int | None = None
    planner: PlannerImpl = "auto"
    rates: Rates | None = None
    queries: QueryPlace = "auto"
    flatten_head_groups: bool = False

    def __post_init__(self) -> None:
        _check_choice("queries", self.queries, get_args(QueryPlace))
        _check_choice("algorithm", self.algorithm, get_args(DispatchAlgorithm))
        _check_choice("planner", self.planner, get_args(PlannerImpl))
        if self.rates is not None:
            _check_part("rates", self.rates, Rates)
        _check_flags(self, "uneven_shard", "flatten_head_groups")
        if self.chunk_size is not None:
            _check_count("chunk_size", self.chunk_size, 1)
        if self.pad_size is not None:
            _check_count("pad_size", self.pad_size, 0)
        _check_count("alignment", self.alignment, 1)
        tolerance = self.balance_tolerance
        if not (_is_number(tolerance) or tolerance == float("inf")) or not tolerance >= 1.0:
            raise ValueError(f"balance_tolerance: expected a ratio of at least 1, got {self.balance_tolerance!r}")


@dataclass(frozen=True)
class CostModel:
    """Shape of the attention, and rates for the number of remote stages (`OverlapConfig.degree`) that a user may set.

    Rates that are None are those of the GPU (`DispatchConfig.rates`, and its kernels' costs): see
    `megatron_magi.plan.degree.stage_costs`. Dispatches are compared with `DispatchConfig.rates` alone.

    Attributes:
        tflops: attention rate of a rank, TFLOP/s.
        gbytes_per_s: bytes that a rank receives a second, GB/s.
        stage_latency_us: fixed cost of one more stage (launches, merge), microseconds.
        num_heads_q, num_heads_kv, head_dim, head_dim_v: shape of the attention, one TP rank.
        element_bytes: bytes an element that is moved.
    """

    tflops: float | None = None
    gbytes_per_s: float | None = None
    stage_latency_us: float | None = None
    num_heads_q: int = 8
    num_heads_kv: int = 1
    head_dim: int = 128
    head_dim_v: int | None = None
    element_bytes: int = 2

    def __post_init__(self) -> None:
        for name in ("tflops", "gbytes_per_s"):
            rate = getattr(self, name)
            if rate is not None and not (_is_number(rate) and rate > 0):
                raise ValueError(f"{name}: expected a positive rate, got {rate!r}")
        latency = self.stage_latency_us
        if latency is not None and not (_is_number(latency) and latency >= 0):
            raise ValueError(f"stage_latency_us: expected a number that is not negative, got {latency!r}")
        for name in ("num_heads_q", "num_heads_kv", "head_dim", "element_bytes"):
            _check_count(name, getattr(self, name), 1)
        if self.head_dim_v is not None:
            _check_count("head_dim_v", self.head_dim_v, 1)

    @property
    def head_dims(self) -> tuple[int, int]:
        """Of queries and keys, and of values."""
        return self.head_dim, self.head_dim_v or self.head_dim

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of k and v."""
        return self.num_heads_kv * sum(self.head_dims) * self.element_bytes

    def attend_us(self, area):
        """Microseconds of a forward pass over ``area`` (query, key) pairs, a number or an array of numbers."""
        assert self.tflops is not None, "rates are filled in by `stage_costs`"
        return 2.0 * area * self.num_heads_q * sum(self.head_dims) / (self.tflops * 1e6)

    def fetch_us(self, num_rows):
        """Microseconds to receive ``num_rows`` rows of k and v, a number or an array of numbers."""
        assert self.gbytes_per_s is not None, "rates are filled in by `stage_costs`"
        return num_rows * self.row_bytes / (self.gbytes_per_s * 1e3)


@dataclass(frozen=True)
class OverlapConfig:
    """Overlap of communication and computation.

    Attributes:
        degree: number of remote stages; 0 fetches all keys before computing (no overlap); chosen by ``cost`` when None.
        max_degree: largest number of stages that is considered.
        hide_tail_reduce: keep the last remote stage's keys from the forward, so that the
            backward ends with local compute and its last reduction hides behind it.
        one_launch: compute attention over the keys of all stages in one launch, which waits for fetched keys inside
            the kernel, if kernels and collectives support it; else stage by stage.
        cost: shape of the attention, and rates for the choice of ``degree`` in place of the GPU's.
    """

    degree: int | None = None
    max_degree: int = 8
    hide_tail_reduce: bool = False
    one_launch: bool = True
    cost: CostModel = field(default_factory=CostModel)

    def __post_init__(self) -> None:
        if self.degree is not None:
            _check_count("degree", self.degree, 0)
        _check_count("max_degree", self.max_degree, 1)
        _check_flags(self, "hide_tail_reduce", "one_launch")
        _check_part("cost", self.cost, CostModel)


@dataclass(frozen=True)
class AttendConfig:
    """Attention on one rank.

    Attributes:
        impl: implementation of `slice_attention`; ``auto`` chooses by device.
        deterministic: bitwise repeatable results.
        forward_sm_margin, backward_sm_margin: streaming multiprocessors left to communication.
        sanity_check: in each pass look for NaN and inf in q, k, v, sink and the gradient of the output, rows that
            the mask hides and padding too, and compare every call with the other ranks'. Slow.
    """

    impl: AttendImpl = "auto"
    deterministic: bool = False
    forward_sm_margin: int = 0
    backward_sm_margin: int = 0
    sanity_check: bool = False

    def __post_init__(self) -> None:
        _check_choice("impl", self.impl, get_args(AttendImpl))
        _check_flags(self, "deterministic", "sanity_check")
        for name in ("forward_sm_margin", "backward_sm_margin"):
            _check_count(name, getattr(self, name), 0)


@dataclass(frozen=True)
class CommConfig:
    """Communication of rows between ranks.

    Attributes:
        impl: implementation of group_cast and group_reduce; ``auto`` chooses by backend, and ``native`` where GPUs of
            one host are linked. An explicit ``native`` is an error where it is not possible.
        backward_high_precision_reduce: partial dk and dv are sent in fp32, at twice the bytes.
        dsink_all_reduce: reduction of the sink's gradient over the CP group inside the
            operator: ``none`` leaves it to the framework.
        ranks_per_node: number of consecutive ranks of the group that share a node: rows that several of them need
            from another node are sent there once, and partial gradients are summed inside a node before they leave
            it. One level when None; 1, or all ranks of the group, means the same.
        verify: compare plan hashes over the CP group before a plan is first used, and operations, dtypes, widths
            and options of calls where they change; an error on one rank becomes one on all.
    """

    impl: CommImpl = "auto"
    backward_high_precision_reduce: bool = False
    dsink_all_reduce: SinkReduction = "none"
    ranks_per_node: int | None = None
    verify: bool = True

    def __post_init__(self) -> None:
        _check_choice("impl", self.impl, get_args(CommImpl))
        _check_choice("dsink_all_reduce", self.dsink_all_reduce, get_args(SinkReduction))
        _check_flags(self, "backward_high_precision_reduce", "verify")
        if self.ranks_per_node is not None:
            _check_count("ranks_per_node", self.ranks_per_node, 1)


@dataclass(frozen=True)
class MagiConfig:
    """The whole configuration, as one hashable value.

    Raises:
        ValueError: parts do not go with each other (`dsink_all_reduce` and `flatten_head_groups`).
    """

    dispatch: DispatchConfig = field(default_factory=DispatchConfig)
    overlap: OverlapConfig = field(default_factory=OverlapConfig)
    attend: AttendConfig = field(default_factory=AttendConfig)
    comm: CommConfig = field(default_factory=CommConfig)

    def __hash__(self) -> int:
        """Found once: configurations are looked up with each key."""
        known = self.__dict__.get("_hash")
        if known is None:
            known = hash((self.dispatch, self.overlap, self.attend, self.comm))
            object.__setattr__(self, "_hash", known)
        return known

    def __getstate__(self) -> dict:
        """Without the hash, which differs between processes."""
        return {name: value for name, value in self.__dict__.items() if name != "_hash"}

    def __post_init__(self) -> None:
        _check_part("dispatch", self.dispatch, DispatchConfig)
        _check_part("overlap", self.overlap, OverlapConfig)
        _check_part("attend", self.attend, AttendConfig)
        _check_part("comm", self.comm, CommConfig)
        if self.dispatch.flatten_head_groups and self.comm.dsink_all_reduce != "none":
            raise ValueError(
                f"dsink_all_reduce: {self.comm.dsink_all_reduce!r} does not go with dispatch.flatten_head_groups"
            )
