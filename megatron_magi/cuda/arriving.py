"""Rows that arrive while the kernel that reads them runs: what who brings them tells who waits for them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

MOST_PARTS = 16
"""Parts that are told of one by one at most: kMostParts of csrc/common/arrivals.cuh."""
FLAG_BYTES = 2 * 4 * MOST_PARTS
"""Of ArrivalFlags there."""
_LEAST_PART_ROWS = 256
_PARTS = 8


class GateParams(ctypes.Structure):
    """Gate of csrc/common/arrivals.cuh."""

    _fields_ = [
        ("call", ctypes.c_void_p), ("arrived", ctypes.c_void_p), ("broken", ctypes.c_void_p),
        ("notice", ctypes.c_void_p), ("timeout_ns", ctypes.c_int64),
        ("num_rows", ctypes.c_int32), ("part_rows", ctypes.c_int32), ("first", ctypes.c_int32),
        ("pad", ctypes.c_int32),
    ]  # fmt: skip


class Arriving(NamedTuple):
    """Rows that a kernel brings which is to be queued right before the one that waits for them.

    That one starts when all blocks of the first have an SM, which is what makes waiting safe: it is queued as one that
    may overlap (`megatron_magi.cuda.launch.Launch.fire`), on the same stream, and nothing between the two.

    Attributes:
        tensors: where the rows will be, ``[num_rows, ...]`` each; they have been allocated on the current stream.
        begin: queues the kernel that brings the rows on a stream, by its raw handle.
        call, arrived, broken, notice: addresses, see `GateParams`.
        timeout_ns: after which who brings them gives up; who waits does after twice as long.
        overlaps: whether the kernel that waits may start before all rows have come.
    """

    tensors: Sequence[Tensor]
    begin: Callable[[int], None]
    call: int
    arrived: int
    broken: int
    notice: int
    timeout_ns: int
    overlaps: bool = True


def part_rows(num_rows: int) -> int:
    """Rows that are told of together."""
    return max(-(-num_rows // _PARTS), _LEAST_PART_ROWS)
