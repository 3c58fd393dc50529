"""The planner in C++ (csrc/solver): equal to the Python functions that it replaces, but faster.

A plain library called through ctypes, so it needs no Python headers to build and works with any interpreter.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from megatron_magi.plan import swaps
from megatron_magi.plan.chunks import ChunkedMask
from megatron_magi.plan.counts import Counts, Work
from megatron_magi.plan.traffic import SearchInput
from megatron_magi.runtime import cpp_library
from megatron_magi.runtime.cpp_library import address

_VERSION = 8
"""Raised with that of csrc/solver/solver.cpp: a library that was built from other sources is not used."""
_Int = ctypes.c_int64
_NUM_COUNTS = len(Work._fields) + 2
"""Of `Counts`: received and sent rows come after the work."""


class _Limits(ctypes.Structure):
    _fields_ = [(name, _Int) for name in ("swaps_per_chunk", "partners", "swaps_tried", "gathering_passes")]


class _Traffic(ctypes.Structure):
    _fields_ = [
        *((name, _Int) for name in ("num_chunks", "num_blocks")),
        *((name, ctypes.c_void_p) for name in ("first", "needed", "block", "chunk_rows", "block_rows")),
    ]


@cache
def _library() -> ctypes.CDLL | None:
    """The library next to this file; None if it was not built, or was built from other sources."""
    return cpp_library.load(Path(__file__).parent, "solver", _VERSION)


def library() -> ctypes.CDLL:
    """The library, where it is `available`."""
    found = _library()
    assert found is not None
    return found


def available() -> bool:
    """Whether the C++ planner was built from the sources of this package."""
    return _library() is not None


def chosen(planner: str) -> bool:
    """See `cpp_library.chosen`."""
    return cpp_library.chosen(planner, _library())


def even(area: np.ndarray, capacity: np.ndarray, target: int) -> np.ndarray:
    """`dispatch._even` in C++, with equal results."""
    rank = np.empty(len(area), dtype=np.int64)
    sizes = _Int(len(area)), _Int(len(capacity))
    _call("magi_balance", *sizes, area, capacity, _Int(target), ctypes.byref(_limits()), rank)
    return rank


def search(of: SearchInput) -> np.ndarray:
    """`affinity.search` in C++, with equal results."""
    traffic, area, balanced, starts, targets, limits = of
    arrays = [_array(a) for a in (traffic.first, traffic.needed, traffic.block, traffic.chunk_rows, traffic.block_rows)]
    view = _Traffic(len(area), len(traffic.block_rows), *(address(a) for a in arrays))
    capacity = np.bincount(balanced)
    ranks = np.tile(balanced.astype(np.int64), (len(limits), 1))
    _call(
        "magi_search",
        ctypes.byref(view),
        _Int(len(capacity)),
        area,
        capacity,
        np.stack([start.rank for start in starts]),
        np.array([start.most for start in starts], dtype=np.int64),
        np.array([start.least for start in starts], dtype=np.int64),
        _Int(len(starts)),
        np.array(targets, dtype=np.int64),
        _Int(len(targets)),
        np.array(limits, dtype=np.int64),
        _Int(len(limits)),
        ctypes.byref(_limits()),
        ranks,
    )
    return ranks


def count(chunked: ChunkedMask, rank: np.ndarray, ranks_per_node: int, host: np.ndarray | None = None) -> Counts:
    """`counts.count` in C++, with equal results."""
    hosts = None if host is None else host[None]
    return count_all(chunked, rank[None], ranks_per_node, hosts).map(lambda of_all: of_all[0])


def count_all(chunked: ChunkedMask, ranks: np.ndarray, ranks_per_node: int, hosts: np.ndarray | None = None) -> Counts:
    """`counts.count_all` in C++, with equal results."""
    (mask, bounds, cp_size), (num, num_chunks) = chunked, ranks.shape
    out = np.empty((num, _NUM_COUNTS, 2, cp_size), dtype=np.int64)
    sizes = _Int(num_chunks), _Int(num), _Int(cp_size), _Int(ranks_per_node)
    of_queries = ranks if hosts is None else hosts
    _call("magi_count", mask.bands, _Int(len(mask.bands)), bounds, ranks, of_queries, *sizes, out)
    return Counts.of_table(out.swapaxes(0, 1))


def spread(arrays: list[np.ndarray], weights: list[int], aims: list[tuple[int, bool]], load: np.ndarray) -> np.ndarray:
    """`travel.spread` in C++, with equal results.

    Args:
        arrays: `travel.Blocks`, without its bounds.
        weights: `travel.Weights`, then the numbers of hosts and of rows there.
        aims: `travel.Aim`.
        load: area of each rank at home, int64 ``[cp_size]``.
    """
    hosts = np.empty((len(aims), len(arrays[0])), dtype=np.int64)
    targets, near = (np.array([aim[at] for aim in aims], dtype=np.int64) for at in (0, 1))
    sizes = _Int(len(arrays[0])), _Int(len(load))
    of_rows = np.array(weights, dtype=np.int64)
    _call("magi_spread", *sizes, *arrays, of_rows, targets, near, _Int(len(aims)), load, hosts)
    return hosts


def _limits() -> _Limits:
    return _Limits(swaps.SWAPS_PER_CHUNK, swaps.PARTNERS, swaps.SWAPS_TRIED, swaps.GATHERING_PASSES)


def _array(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array, dtype=np.int64)


def _call(name: str, *arguments: Any) -> None:
    """Calls a function of the library; arrays are passed by address, and outputs must have the right size."""
    function: Callable[..., Any] = getattr(library(), name)
    function.restype = None
    kept = [_array(a) if isinstance(a, np.ndarray) else a for a in arguments]
    function(*(ctypes.c_void_p(address(a)) if isinstance(a, np.ndarray) else a for a in kept))
