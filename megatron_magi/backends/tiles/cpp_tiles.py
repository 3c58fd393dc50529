"""Tile plans in C++ (csrc/solver/tiles.cpp): equal to functions of `tiles`, but faster.

Tiles with rows that see several intervals in one run of columns are still divided into passes by `passes.py`, in numpy.
"""

from __future__ import annotations

import ctypes
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np

from megatron_magi.backends.tiles import costs as tile_costs
from megatron_magi.backends.tiles.passes import assign_passes
from megatron_magi.backends.tiles.tiles import TilePlan
from megatron_magi.mask import bands as bd
from megatron_magi.runtime import cpp_library
from megatron_magi.runtime.cpp_library import address

_VERSION = 6
"""Raised with that of csrc/solver/tiles.cpp: a library that was built from other sources is not used."""
_Int, _Pointer = ctypes.c_int64, ctypes.c_void_p


class Shape(ctypes.Structure):
    """Arguments of `plan_tiles`, and what tiles and passes cost."""

    _fields_ = [
        *((name, _Int) for name in ("num_rows", "block_m", "block_n", "align", "hide_tail", "parts", "tile_cost")),
        ("pass_cost", ctypes.c_double),
        ("masked_cost", ctypes.c_double),
    ]

    @classmethod
    def of(
        cls, num_rows: int, block_m: int, block_n: int, align: int, hide_tail: bool, parts: int, packed: int
    ) -> Shape:
        """From the arguments of `tiles.plan_tiles`."""
        pass_cost = tile_costs.PASS_COST_BLOCKS * 128 / (block_n * packed)
        costs = tile_costs.TILE_COST_COLUMNS, pass_cost, tile_costs.MASKED_COST if hide_tail else 0.0
        return cls(num_rows, block_m, block_n, align, hide_tail, parts, *costs)


class _View(ctypes.Structure):
    _fields_ = [*((name, _Pointer) for name in ("tiles", "passes", "costs")), ("num_tiles", _Int), ("block_n", _Int)]

    def __init__(self, plan: TilePlan) -> None:
        self.kept = [np.ascontiguousarray(array) for array in (plan.tiles, plan.passes, plan.costs)]
        super().__init__(*(address(array) for array in self.kept), len(plan.tiles), plan.block_n)


@cache
def _library() -> ctypes.CDLL | None:
    """The library next to this file; None if it was not built, or was built from other sources."""
    library = cpp_library.load(Path(__file__).parent, "tiles", _VERSION)
    if library is not None:
        library.magi_tiles_begin.restype = _Pointer
        library.magi_tiles_begin.argtypes = [_Pointer, _Int, _Pointer, _Pointer]
        library.magi_tiles_pieces.argtypes = [_Pointer] * 3
        library.magi_tiles_give.argtypes = [_Pointer, _Pointer, _Pointer, _Int, _Pointer, _Int]
        library.magi_tiles_end.argtypes = [_Pointer] * 5
        library.magi_tiles_local_first.argtypes = [_Pointer, *[_Int] * 4, _Pointer]
        library.magi_tiles_drift.argtypes = [_Pointer] * 2
        library.magi_tiles_makespan.argtypes, library.magi_tiles_makespan.restype = [_Pointer, _Int, _Int], _Int
        library.magi_tiles_facts.argtypes = [_Pointer, _Int, _Pointer]
        library.magi_host_plan_begin.restype = library.magi_schedule_begin.restype = _Pointer
        library.magi_host_plan_begin.argtypes = [_Pointer, _Int, *[_Pointer] * 3]
        library.magi_host_plan_end.argtypes = [_Pointer] * 4
        library.magi_schedule_begin.argtypes = [_Pointer] * 5
        library.magi_schedule_end.argtypes = [_Pointer] * 2
    return library


def library() -> ctypes.CDLL | None:
    """The library, for modules that have functions of their own in it; None where it is not `available`."""
    return _library()


def available() -> bool:
    """Whether the C++ planner was built from the sources of this package."""
    return _library() is not None


def chosen(planner: str) -> bool:
    """See `cpp_library.chosen`."""
    return cpp_library.chosen(planner, _library())


def plan_tiles(
    bands: bd.IntArray,
    num_rows: int,
    block_m: int,
    block_n: int,
    *,
    align: int = 1,
    hide_tail: bool = False,
    parts: int = 2,
    packed: int = 1,
) -> TilePlan:
    """`tiles.plan_tiles` in C++, with equal results; only where this is `available`."""
    library = _library()
    assert library is not None
    shape = Shape.of(num_rows, block_m, block_n, align, hide_tail, parts, packed)
    bands = np.ascontiguousarray(bands, dtype=np.int64)
    counts = (_Int * 3)()
    handle = library.magi_tiles_begin(address(bands), len(bands), ctypes.byref(shape), counts)
    num_tiles, num_pieces, num_passes = counts
    if num_passes < 0:
        pieces, tile = np.empty((num_pieces, 6), dtype=np.int64), np.empty(num_pieces, dtype=np.int64)
        library.magi_tiles_pieces(handle, address(pieces), address(tile))
        found = map(np.ascontiguousarray, assign_passes(pieces, tile, block_n, align, shape.pass_cost))
        pieces, pass_of_piece, pass_tile = found
        num_passes = len(pass_tile)
        library.magi_tiles_give(
            handle, address(pieces), address(pass_of_piece), len(pieces), address(pass_tile), num_passes
        )
    tiles, passes = np.empty((num_tiles, 4), dtype=np.int32), np.empty((num_passes, 8), dtype=np.int32)
    bounds, costs = np.empty((num_passes, block_m, 2), dtype=np.int32), np.empty(num_tiles, dtype=np.int64)
    library.magi_tiles_end(handle, *(address(array) for array in (tiles, passes, bounds, costs)))
    return TilePlan(tiles, passes, bounds, costs, block_m, block_n, block_n)


def local_first(plan: TilePlan, first: int, num_arriving: int, late: int, lead: int) -> TilePlan:
    """`tiles.local_first` in C++, with equal results; only where this is `available`."""
    library, view, order = _library(), _View(plan), np.empty(len(plan.tiles), dtype=np.int64)
    assert library is not None
    library.magi_tiles_local_first(ctypes.addressof(view), first, num_arriving, late, lead, address(order))
    return replace(plan, tiles=plan.tiles[order], costs=plan.costs[order])


def drift(plan: TilePlan) -> tuple[float, float]:
    """`tiles.drift` in C++, with equal results; only where this is `available`."""
    library, view, out = _library(), _View(plan), (ctypes.c_double * 2)()
    assert library is not None
    library.magi_tiles_drift(ctypes.addressof(view), out)
    return tuple(out)


def makespan(costs: np.ndarray, num_sms: int) -> int:
    """`sm90.schedule._makespan` in C++, of int64 ``[num_items]``; only where this is `available`."""
    library = _library()
    assert library is not None
    costs = np.ascontiguousarray(costs, dtype=np.int64)
    return library.magi_tiles_makespan(address(costs), len(costs), num_sms)


def runs_and_area(bands: bd.IntArray) -> tuple[int, int]:
    """Distinct first rows of a table of bands, and visible pairs, in C++; only where this is `available`."""
    library, out = _library(), (_Int * 2)()
    assert library is not None
    bands = np.ascontiguousarray(bands, dtype=np.int64)
    library.magi_tiles_facts(address(bands), len(bands), out)
    return tuple(out)
