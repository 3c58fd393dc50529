"""Rows that arrive while the kernel that reads them runs: what the fetching and the waiting kernel share."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from megatron_magi.cuda.launch_list import Place, Step

MOST_PARTS = 16
"""Most parts of the rows, each with its own flag: kMostParts of csrc/common/arrivals.cuh."""
FLAG_BYTES = 2 * 4 * MOST_PARTS
"""Size of ArrivalFlags there."""
_LEAST_PART_ROWS = 256


class GateParams(ctypes.Structure):
    """ArrivalBarrier of csrc/common/arrivals.cuh."""

    _fields_ = [
        ("call", ctypes.c_void_p), ("arrived", ctypes.c_void_p), ("broken", ctypes.c_void_p),
        ("notice", ctypes.c_void_p), ("timeout_ns", ctypes.c_int64),
        ("num_rows", ctypes.c_int32), ("part_rows", ctypes.c_int32), ("first", ctypes.c_int32),
        ("pad", ctypes.c_int32),
    ]  # fmt: skip


class Arriving(NamedTuple):
    """Rows fetched by a kernel that is launched right before the kernel that waits for them.

    The waiting kernel is a programmatic dependent launch on the same stream: it starts when all thread blocks of the
    fetching kernel are resident, so waiting cannot deadlock. Another dependent kernel may be launched between the two,
    if it triggers the launch of the next one when its own results are written, and ends after the fetching kernel.

    Attributes:
        tensors: tensors of the layout of the destination, ``[num_rows, ...]`` each.
        places: addresses of the destination.
        step: the fetching kernel.
        call, arrived, broken, notice: addresses, see `GateParams`.
        timeout_ns: timeout of the fetching kernel; the waiting kernel stops after twice as long.
        overlaps: whether the waiting kernel may start before all rows have arrived.
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
        """Parameters of the waiting kernel; ``first``: index of the first row."""
        num_rows = len(self.tensors[0])
        return GateParams(
            self.call, self.arrived, self.broken, self.notice, 2 * self.timeout_ns, num_rows, part_rows(num_rows), first
        )


def part_rows(num_rows: int) -> int:
    """Rows of a part."""
    return max(-(-num_rows // MOST_PARTS), _LEAST_PART_ROWS)
