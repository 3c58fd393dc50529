"""Algorithms by the names of MagiAttention: how chunks are given to ranks, and remote rows to stages.

All names are there, so that code which mentions them runs. Those that a plan can be made with are in `ALGORITHM_OF`;
configurations refuse the others by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

from megatron_magi.checks import flag, integer, number


class DispatchAlgType(Enum):
    """Names of dispatch algorithms, as in `DispatchAlg.type`."""

    LOWER_BOUND = "lower_bound"
    DYNAMIC_PROGRAMMING = "dynamic_programming"
    BINARY_SEARCH = "binary_search"
    MIN_HEAP = "min_heap"
    TOPP_HEAP = "topp_heap"
    SEQUENTIAL_SELECT = "sequential_select"
    SORTED_SEQUENTIAL_SELECT = "sorted_sequential_select"


@dataclass(frozen=True)
class DispatchAlg:
    """How chunks are given to ranks; a base class.

    Attributes:
        type: its name.
        is_optimal: the largest area of a rank is the least possible.
        is_partitions_returned: it says which rank has which chunk, not only how large the largest area is.
        is_equal_num_workloads: ranks have equally many chunks.
        is_affinity_considered: it looks at the keys that chunks share.
    """

    type: ClassVar[DispatchAlgType]
    is_optimal: ClassVar[bool] = False
    is_partitions_returned: ClassVar[bool] = True
    is_equal_num_workloads: ClassVar[bool] = True
    is_affinity_considered: ClassVar[bool] = False


@dataclass(frozen=True)
class LBDispatchAlg(DispatchAlg):
    """A lower bound of the largest area: no distribution, so no key can be made with it."""

    type = DispatchAlgType.LOWER_BOUND
    is_partitions_returned = False
    is_equal_num_workloads = False


@dataclass(frozen=True)
class DPDispatchAlg(DispatchAlg):
    """The least largest area by dynamic programming: no distribution, so no key can be made with it."""

    type = DispatchAlgType.DYNAMIC_PROGRAMMING
    is_optimal = True
    is_partitions_returned = False
    is_equal_num_workloads = False


@dataclass(frozen=True)
class BSDispatchAlg(DispatchAlg):
    """The least largest area by binary search, of unequally many chunks: no key can be made with it."""

    type = DispatchAlgType.BINARY_SEARCH
    is_optimal = True
    is_equal_num_workloads = False


@dataclass(frozen=True)
class MinHeapDispatchAlg(DispatchAlg):
    """Each chunk, by decreasing area, to the rank with the least: best balance, most communication."""

    type = DispatchAlgType.MIN_HEAP


@dataclass(frozen=True)
class ToppHeapDispatchAlg(DispatchAlg):
    """Balance within a tolerance, chunks of a document together. ``top_p`` has no effect: the tolerance
    is ``DispatchConfig.balance_tolerance`` of `MagiConfig`."""

    top_p: float = 0.0
    type = DispatchAlgType.TOPP_HEAP
    is_affinity_considered = True

    def __post_init__(self) -> None:
        number(self.top_p, "top_p", 0.0)


@dataclass(frozen=True)
class SequentialDispatchAlg(DispatchAlg):
    """One contiguous piece a rank."""

    type = DispatchAlgType.SEQUENTIAL_SELECT


@dataclass(frozen=True)
class SortedSequentialSelectAlg(DispatchAlg):
    """Chunks sorted by area, dealt in serpentine order. ``allocation_ratio`` has no effect."""

    allocation_ratio: float = 1.0
    type = DispatchAlgType.SORTED_SEQUENTIAL_SELECT

    def __post_init__(self) -> None:
        number(self.allocation_ratio, "allocation_ratio", 0.0)


ALGORITHM_OF = {
    MinHeapDispatchAlg: "min_heap",
    ToppHeapDispatchAlg: "affinity",
    SequentialDispatchAlg: "sequential",
    SortedSequentialSelectAlg: "sorted_sequential",
}
"""The ``algorithm`` of `megatron_magi.config.DispatchConfig` that each name stands for."""


class OverlapAlgType(Enum):
    """How remote rows are dealt to stages, as in `OverlapAlg.type`. Only ``UNIFORM`` can be configured."""

    UNIFORM = "uniform"
    GREEDY = "greedy"


@dataclass(frozen=True)
class OverlapAlg:
    """How remote rows are dealt to stages; a base class.

    Attributes:
        type: its name.
        is_optimal: the forward takes the least time possible.
    """

    type: ClassVar[OverlapAlgType]
    is_optimal: ClassVar[bool] = False


@dataclass(frozen=True)
class UniformOverlapAlg(OverlapAlg):
    """Remote rows are dealt to equal stages. The arguments have no effect."""

    random_costs: bool = False
    random_seed: int | None = None
    type = OverlapAlgType.UNIFORM

    def __post_init__(self) -> None:
        flag(self.random_costs, "random_costs")
        if self.random_seed is not None:
            integer(self.random_seed, "random_seed")


@dataclass(frozen=True)
class GreedyOverlapAlg(OverlapAlg):
    """A name only: MagiAttention does not implement it either, and `OverlapConfig` refuses it."""

    type = OverlapAlgType.GREEDY
