"""A pass's tables and work items in C++ (csrc/solver/host_plan.hpp, schedule.hpp): equal to those of `plan` and
`schedule`, but one call each.
"""

from __future__ import annotations

import ctypes

import numpy as np
from numpy.typing import NDArray

from megatron_magi.backends.sm90 import tuning
from megatron_magi.backends.tiles import cpp_tiles, tiles
from megatron_magi.backends.tiles.cpp_tiles import Shape
from megatron_magi.mask import bands as bd
from megatron_magi.runtime.cpp_library import address

_Int = ctypes.c_int64
_ROW, _PASS, _END = 4, 8, 4  # numbers of a tile and of a pass in a table, and at its end


class _HostShape(ctypes.Structure):
    _fields_ = [
        ("own", Shape),
        ("later", Shape),
        *((name, _Int) for name in ("is_backward", "packed", "first", "num_arriving", "late", "lead")),
    ]


class _Work(ctypes.Structure):
    _fields_ = [
        (name, _Int)
        for name in (
            "num_tiles", "heads_kv", "group", "num_sms", "max_split", "long_tile", "narrow", "own_rows", "lead",
        )
    ]  # fmt: skip


class _Tuning(ctypes.Structure):
    _fields_ = [
        *((name, _Int) for name in (
            "long_blocks", "long_blocks_uneven", "item_cost_blocks", "part_cost_blocks", "piece_blocks",
            "most_blocks_in_step", "most_pieces", "section_tiles", "last_items", "last_of_many_items",
            "least_piece_blocks", "enough_items", "falling_cost_most_items", "l2_bytes", "queries", "slack",
            "query_bytes",
        )),
        *((name, ctypes.c_double) for name in ("balanced", "falling_cost_gain")),
    ]  # fmt: skip


_TUNED = [(name, name.upper()) for name, _ in _Tuning._fields_ if name not in ("queries", "slack", "query_bytes")]
"""Fields and their names in `tuning`."""


def host_plan(
    bands: bd.IntArray, tiling: tuple[bool, int, tuple[int, int], int, tuple[int, int, int, int] | None]
) -> tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.int32], int, int, tuple[float, float]] | None:
    """What `plan.make_host_plan` makes of a mask and a `Tiling`; only where the library is `available`.

    Returns:
        Starts, costs and table of a `HostPlan`, the number of its passes, its step, and the drift; None where passes
        have to be found by numpy.
    """
    library = cpp_tiles.library()
    assert library is not None
    is_backward, rows, (block_m, block_n), packed, arriving = tiling
    if is_backward:
        parts, align = 1 if block_m == 64 else 2, tiles.UNIT // packed
        first = rows if arriving is None else arriving[0]
        of_blocks = block_m, block_n // packed, align, True, parts, packed
        own = Shape.of(rows if arriving is None else first - tiles.GAP, *of_blocks)
        later = Shape.of(rows - first, *of_blocks)
    else:
        own = later = Shape.of(rows, block_m // packed, block_n, 1, False, block_m // 64, 1)
    shape = _HostShape(own, later, is_backward, packed, *((-1, 0, 0, 0) if arriving is None else arriving))
    bands = np.ascontiguousarray(bands, dtype=np.int64)
    counts, drifts = (_Int * 3)(), (ctypes.c_double * 2)()
    handle = library.magi_host_plan_begin(address(bands), len(bands), ctypes.byref(shape), counts, drifts)
    if handle is None:
        return None
    num_tiles, num_passes, step = counts
    table = np.empty(_ROW * num_tiles + (_PASS + 2 * own.block_m) * num_passes + _END, dtype=np.int32)
    starts, costs = np.empty(num_tiles, dtype=np.int32), np.empty(num_tiles, dtype=np.int64)
    library.magi_host_plan_end(handle, address(table), address(starts), address(costs))
    return starts, costs, table, num_passes, step, tuple(drifts)


def schedule(
    starts: np.ndarray, costs: np.ndarray, work: tuple[int, ...], queries: int, slack: int, query_bytes: int
) -> tuple[NDArray[np.int32], int]:
    """Items of `schedule.make_schedule` and their number of split tiles; only where the library is `available`.

    Args:
        starts, costs: ``[num_tiles]``, as there.
        work: the other arguments, the first arriving row last but one (-1 where nothing arrives), and the blocks that
            items of earlier rows lead by.
        queries, slack: constants of `schedule`.
        query_bytes: of a query of one head.
    """
    library = cpp_tiles.library()
    assert library is not None
    starts, costs = np.ascontiguousarray(starts, dtype=np.int32), np.ascontiguousarray(costs, dtype=np.int64)
    of_work, counts = _Work(len(costs), *work), (_Int * 2)()
    tuned = {name: getattr(tuning, known) for name, known in _TUNED}
    limits = _Tuning(queries=queries, slack=slack, query_bytes=query_bytes, **tuned)
    handle = library.magi_schedule_begin(
        address(starts), address(costs), ctypes.byref(of_work), ctypes.byref(limits), counts
    )
    num_items, num_split = counts
    items = np.empty((num_items, 4), dtype=np.int32)
    library.magi_schedule_end(handle, address(items))
    return items, num_split
