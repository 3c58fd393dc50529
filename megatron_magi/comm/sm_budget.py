"""SMs for the kernels of a GPU that wait for other ranks: those of all groups together, and NCCL's.

A kernel that waits keeps its SMs until another rank's has run, and a kernel whose blocks do not all find an SM keeps
back those that are queued after it. If two ranks wait for each other's kernels that have no room, nothing ends. So all
that may wait at once has SMs of its own:

- each group its share (`share_of`), whether it sends and takes in one kernel or in two;
- NCCL a kernel of all its channels, and a cluster of blocks of another communicator;
- attention that waits for rows itself (one launch) takes what is left, and all SMs in the end, only where there is one
  group (`Arriving.overlaps`); it is queued behind the kernel that publishes and brings rows, on each rank, so what it
  waits for has its SMs.
"""

from __future__ import annotations

MOST_GROUPS = 16
"""Most groups of a GPU: with more there would be too few blocks for each."""
MOST_SMS = 64
"""SMs of all groups together: 32 that send fill the links to 0.95, and as many receive."""
NCCL_CHANNELS, NCCL_CLUSTER = 32, 4
"""Blocks of one of NCCL's kernels at most, each an SM, and how many of them must be on one GPC."""
NUM_GPCS = 8


def room_of(num_sms: int) -> int:
    """SMs that the groups of a GPU of ``num_sms`` take together at most.

    Up to three SMs of a GPC may be free and of no use to a cluster of four.
    """
    others = NCCL_CHANNELS + NCCL_CLUSTER + NUM_GPCS * (NCCL_CLUSTER - 1)
    return max(min(MOST_SMS, num_sms - others), 0)


def most_groups(num_sms: int) -> int:
    """Groups of a GPU of ``num_sms`` at most: each sends and takes on one SM at least."""
    return min(MOST_GROUPS, room_of(num_sms) // 2)


def share_of(num_sms: int, num_groups: int) -> int:
    """SMs of each of so many groups of a GPU of ``num_sms``."""
    assert 0 < num_groups <= most_groups(num_sms)
    return room_of(num_sms) // num_groups
