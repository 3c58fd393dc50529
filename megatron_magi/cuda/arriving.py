"""Rows that arrive while the kernel that reads them runs: what who brings them tells who waits for them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from megatron_magi.cuda.call_list import Place, Step

MOST_PARTS = 16
"""Parts that are told of one by one at most: kMostParts of csrc/common/arrivals.cuh."""
FLAG_BYTES = 2 * 4 * MOST_PARTS
"""Of ArrivalFlags there."""
_LEAST_PART_ROWS = 256


class GateParams(ctypes.Structure):
    """Gate of csrc/common/arrivals.cuh."""

    _fields_ = [
        ("call", ctypes.c_void_p), ("arrived", ctypes.c_void_p), ("broken", ctypes.c_void_p),
        ("notice", ctypes.c_void_p), ("timeout_ns", ctypes.c_int64),
        ("num_rows", ctypes.c_int32), ("part_rows", ctypes.c_int32), ("first", ctypes.c_int32),
        ("pad", ctypes.c_int32),
    ]  # fmt: skip


class Arriving(NamedTuple):
    """Rows that a kernel brings which is to be queued before the one that waits for them.

    That one starts when all blocks of the other have an SM, which is what makes waiting safe: it is queued as one that
    may overlap, on the same stream. Between the two may be one that overlaps likewise, lets the next one start when its
    own results are there, and ends behind the one that brings the rows.

    Attributes:
        tensors: like those that the rows will be in, ``[num_rows, ...]`` each.
        places: where these will be.
        step: the kernel that brings the rows.
        call, arrived, broken, notice: addresses, see `GateParams`.
        timeout_ns: after which who brings them gives up; who waits does after twice as long.
        overlaps: whether the kernel that waits may start before all rows have come.
    """

    tensors: Sequence[Tensor]
    places: tuple[Place, Place]
    step: Step
    call: int
    arrived: int
    broken: int
    notice: int
    timeout_ns: int
    overlaps: bool = True

    def gate(self, first: int) -> GateParams:
        """What who waits is told; ``first``: number of the first row."""
        num_rows = len(self.tensors[0])
        return GateParams(
            self.call, self.arrived, self.broken, self.notice, 2 * self.timeout_ns, num_rows, part_rows(num_rows), first
        )


def part_rows(num_rows: int) -> int:
    """Rows that are told of together."""
    return max(-(-num_rows // MOST_PARTS), _LEAST_PART_ROWS)
