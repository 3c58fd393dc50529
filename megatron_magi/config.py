"""Configuration: frozen, validated, never rewritten. Every field has a default that fits."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

DispatchAlgorithm = Literal["affinity", "min_heap", "sorted_sequential", "sequential"]
CommImpl = Literal["auto", "reference", "all_to_all"]
PlannerImpl = Literal["auto", "python", "native"]
AttendImpl = Literal["auto", "reference", "torch", "ffa"]


def _check_count(name: str, value: int, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name}: expected a whole number of at least {least}, got {value!r}")


@dataclass(frozen=True)
class DispatchConfig:
    """How tokens are spread over ranks.

    Attributes:
        algorithm: ``affinity`` keeps keys and the queries that need them together as far as
            ``balance_tolerance`` allows; ``min_heap`` minimises the largest area alone;
            ``sorted_sequential`` deals the chunks, sorted by area, to and fro;
            ``sequential`` gives every rank one contiguous piece.
        chunk_size: tokens a chunk; chosen from the length and the number of ranks when None.
        uneven_shard: shards may differ in length and nothing is padded. False pads the
            sequence at its end so that all shards are equally long.
        alignment: shard lengths are multiples of this (tensor-parallel ranks with sequence
            parallelism), ignored with ``uneven_shard``.
        balance_tolerance: largest area of a rank over the mean with ``affinity``; below 1.001 it counts as
            1.001. Where not even ``min_heap`` gets that far (few or very uneven chunks), what ``min_heap``
            reaches is the bound. A larger tolerance never moves more rows, counted in blocks of chunks.
        planner: ``native`` plans in C++, ``python`` in numpy, with equal results; ``auto`` in C++ where it is built.
    """

    algorithm: DispatchAlgorithm = "affinity"
    chunk_size: int | None = None
    uneven_shard: bool = False
    alignment: int = 1
    balance_tolerance: float = 1.01
    planner: PlannerImpl = "auto"

    def __post_init__(self) -> None:
        known = ("affinity", "min_heap", "sorted_sequential", "sequential")
        if self.algorithm not in known:
            raise ValueError(f"algorithm: expected one of {', '.join(known)}, got {self.algorithm!r}")
        if self.planner not in ("auto", "python", "native"):
            raise ValueError(f"planner: expected one of auto, python, native, got {self.planner!r}")
        if self.chunk_size is not None:
            _check_count("chunk_size", self.chunk_size, 1)
        _check_count("alignment", self.alignment, 1)
        if not self.balance_tolerance >= 1.0:
            raise ValueError(f"balance_tolerance: expected a ratio of at least 1, got {self.balance_tolerance}")


@dataclass(frozen=True)
class CostModel:
    """Rates that the overlap degree is chosen with: one H200 and NVLink unless told otherwise.

    Attributes:
        tflops: attention rate of a rank, TFLOP/s.
        gbytes_per_s: bytes that a rank receives a second, GB/s.
        stage_latency_us: fixed cost of one more stage (launches, merge), microseconds.
        num_heads_q, num_heads_kv, head_dim, head_dim_v: shape of the attention, one TP rank.
        element_bytes: bytes an element that is moved.
    """

    tflops: float = 500.0
    gbytes_per_s: float = 250.0
    stage_latency_us: float = 40.0
    num_heads_q: int = 8
    num_heads_kv: int = 1
    head_dim: int = 128
    head_dim_v: int | None = None
    element_bytes: int = 2

    def __post_init__(self) -> None:
        for name in ("tflops", "gbytes_per_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}: expected a positive rate, got {getattr(self, name)}")
        if not self.stage_latency_us >= 0:
            raise ValueError(f"stage_latency_us: must not be negative, got {self.stage_latency_us}")
        for name in ("num_heads_q", "num_heads_kv", "head_dim", "element_bytes"):
            _check_count(name, getattr(self, name), 1)
        if self.head_dim_v is not None:
            _check_count("head_dim_v", self.head_dim_v, 1)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of k and v."""
        return self.num_heads_kv * (self.head_dim + (self.head_dim_v or self.head_dim)) * self.element_bytes

    def attend_us(self, area):
        """Microseconds of a forward pass over ``area`` (query, key) pairs, a number or an array of numbers."""
        flops = 2.0 * area * self.num_heads_q * (self.head_dim + (self.head_dim_v or self.head_dim))
        return flops / (self.tflops * 1e6)

    def fetch_us(self, num_rows):
        """Microseconds to receive ``num_rows`` rows of k and v, a number or an array of numbers."""
        return num_rows * self.row_bytes / (self.gbytes_per_s * 1e3)


@dataclass(frozen=True)
class OverlapConfig:
    """How communication hides behind compute.

    Attributes:
        degree: number of remote stages; 0 chooses none to fetch in one stage before all
            compute (no overlap); chosen by ``cost`` when None.
        max_degree: largest number of stages that is considered.
        hide_tail_reduce: keep the last remote stage's keys from the forward, so that the
            backward ends with local compute and its last reduction hides behind it.
        cost: the rates.
    """

    degree: int | None = None
    max_degree: int = 8
    hide_tail_reduce: bool = False
    cost: CostModel = field(default_factory=CostModel)

    def __post_init__(self) -> None:
        if self.degree is not None:
            _check_count("degree", self.degree, 0)
        _check_count("max_degree", self.max_degree, 1)


@dataclass(frozen=True)
class AttendConfig:
    """How a rank computes.

    Attributes:
        impl: implementation of `slice_attention`; ``auto`` chooses by device.
        deterministic: bitwise repeatable results.
        forward_sm_margin, backward_sm_margin: streaming multiprocessors left to communication.
    """

    impl: AttendImpl = "auto"
    deterministic: bool = False
    forward_sm_margin: int = 0
    backward_sm_margin: int = 0

    def __post_init__(self) -> None:
        known = ("auto", "reference", "torch", "ffa")
        if self.impl not in known:
            raise ValueError(f"impl: expected one of {', '.join(known)}, got {self.impl!r}")
        for name in ("forward_sm_margin", "backward_sm_margin"):
            _check_count(name, getattr(self, name), 0)


@dataclass(frozen=True)
class CommConfig:
    """How rows travel.

    Attributes:
        impl: implementation of group_cast and group_reduce; ``auto`` chooses by backend.
        backward_high_precision_reduce: partial dk and dv travel in fp32, at twice the bytes.
        dsink_all_reduce: reduction of the sink's gradient over the CP group inside the
            operator: ``none`` leaves it to the framework.
        verify: compare plan hashes over the CP group before a plan is first used.
    """

    impl: CommImpl = "auto"
    backward_high_precision_reduce: bool = False
    dsink_all_reduce: Literal["none", "sum", "avg"] = "none"
    verify: bool = True

    def __post_init__(self) -> None:
        for name, known in (
            ("impl", ("auto", "reference", "all_to_all")),
            ("dsink_all_reduce", ("none", "sum", "avg")),
        ):
            if getattr(self, name) not in known:
                raise ValueError(f"{name}: expected one of {', '.join(known)}, got {getattr(self, name)!r}")


@dataclass(frozen=True)
class MagiConfig:
    """Everything, in one hashable value."""

    dispatch: DispatchConfig = field(default_factory=DispatchConfig)
    overlap: OverlapConfig = field(default_factory=OverlapConfig)
    attend: AttendConfig = field(default_factory=AttendConfig)
    comm: CommConfig = field(default_factory=CommConfig)
