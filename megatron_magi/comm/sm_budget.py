"""SM budget of kernels that wait for other ranks, over all groups of a GPU and NCCL.

A waiting kernel occupies its SMs until another rank's kernel has run, and a kernel whose thread blocks are not all
resident delays the kernels queued after it. If two ranks wait for each other's kernels, which find no SMs, they
deadlock. So all kernels that may wait at the same time have SMs of their own:

- each group its share (`share_of`), whether it sends and receives in one kernel or in two;
- NCCL one kernel with all its channels, and a cluster of thread blocks of another communicator;
- attention that waits for rows itself (one launch) uses the remaining SMs, and all SMs in the end, but only if there is
  one group (`Arriving.overlaps`). It is launched after the kernel that publishes and fetches rows, on each rank, so the
  kernels for which it waits already have their SMs.
"""

from __future__ import annotations

MOST_GROUPS = 16
"""Most groups of a GPU: with more, each would have too few thread blocks."""
MOST_SMS = 64
"""SMs of all groups together: 32 for sending, which reach 0.95 of the link bandwidth, and as many for receiving."""
NCCL_CHANNELS, NCCL_CLUSTER = 32, 4
"""Most thread blocks of an NCCL kernel, each on an SM, and how many of them must be on one GPC."""
NUM_GPCS = 8


def room_of(num_sms: int) -> int:
    """Most SMs for all groups of a GPU with ``num_sms`` SMs.

    Up to three SMs of a GPC may be free but unusable for a cluster of four.
    """
    others = NCCL_CHANNELS + NCCL_CLUSTER + NUM_GPCS * (NCCL_CLUSTER - 1)
    return max(min(MOST_SMS, num_sms - others), 0)


def most_groups(num_sms: int) -> int:
    """Most groups of a GPU with ``num_sms`` SMs: each sends and receives on at least one SM."""
    return min(MOST_GROUPS, room_of(num_sms) // 2)


def share_of(num_sms: int, num_groups: int) -> int:
    """SMs of each of ``num_groups`` groups of a GPU with ``num_sms`` SMs."""
    assert 0 < num_groups <= most_groups(num_sms)
    return room_of(num_sms) // num_groups
