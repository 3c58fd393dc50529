"""Rows that arrive while the kernel that reads them runs: what the fetching and the waiting kernel share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from megatron_magi.cuda.launch_list import Map, Place, Step
from megatron_magi.cuda.layout import Layout, Like

MOST_PARTS = 16
"""Most parts of the rows, each with its own flag: kMostParts of csrc/common/arrivals.cuh."""
FLAG_BYTES = 2 * 4 * MOST_PARTS
"""Size of ArrivalFlags there."""
_LEAST_PART_ROWS = 256
READ_BEHIND = 128
"""Rows behind the last that a waiting kernel may read if their number is not known when it is launched: those of its
largest tile or block of keys. The fetching kernel clears them.
"""


class StepRows(NamedTuple):
    """Rows that a kernel moves between ranks.

    Attributes:
        tensors, into: tensors of the layouts of what is moved, and of its destination.
        sources, places: their addresses.
    """

    tensors: Sequence[Like]
    into: Sequence[Like]
    sources: Sequence[Place]
    places: tuple[Place, ...]


class Arriving(NamedTuple):
    """Rows fetched by a kernel that is launched right before the kernel that waits for them.

    The waiting kernel is a programmatic dependent launch on the same stream: it starts when all thread blocks of the
    fetching kernel are resident, so waiting cannot deadlock. Another dependent kernel may be launched between the two,
    if it triggers the launch of the next one when its own results are written, and ends after the fetching kernel.

    Attributes:
        tensors: tensors of the layout of the destination, ``[num_rows, ...]`` each.
        places: addresses of the destination.
        step: the fetching kernel.
        call, arrived, broken, notice: addresses, see ArrivalBarrier in csrc/common/arrivals.cuh.
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

    def set_barrier(self, barrier: Any, first: int) -> None:
        """Sets the members of ArrivalBarrier in csrc/common/arrivals.cuh that are the same for all masks.

        Args:
            barrier: a kernel's parameter.
            first: index of the first row.
        """
        barrier.call, barrier.arrived, barrier.broken = self.call, self.arrived, self.broken
        barrier.notice = self.notice
        barrier.timeout_ns, barrier.first = 2 * self.timeout_ns, first

    def maps(self, box_rows: int) -> list[Map]:
        """Tensor maps of the rows, in boxes of ``box_rows``; the number of rows is the mask's ``seen.later``."""
        likes = (Layout.of(t).with_rows(max(1, len(t))) for t in self.tensors)
        return [Map(like, (box_rows,), place, "seen.later") for like, place in zip(likes, self.places, strict=True)]


def part_rows(num_rows: int) -> int:
    """Rows of a part."""
    return max(-(-num_rows // MOST_PARTS), _LEAST_PART_ROWS)
