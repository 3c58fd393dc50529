"""What `make slurm-demo` asks of a job that is interrupted."""

from __future__ import annotations

import pytest

from pretrain_scripts.slurm.lab.demo import SAVE_INTERVAL, DemoFailed, check_order

LAST = 5 * SAVE_INTERVAL
STARTS = [0, 13, 20, 28]
"""Checkpoints that the starts before found."""


def trained(last: int, resumed: int) -> list[int]:
    return [*range(1, last + 1), *range(resumed, 6 * SAVE_INTERVAL + 1)]


@pytest.mark.parametrize(
    ("last", "saved"),
    [
        (LAST, LAST),
        (LAST, LAST - SAVE_INTERVAL),  # its checkpoint was under way
        (LAST + 1, LAST),
        (LAST - 1, LAST - SAVE_INTERVAL),
    ],
)
def test_a_node_that_dies_costs_what_came_after_the_last_whole_checkpoint(last: int, saved: int) -> None:
    check_order(trained(last, saved + 1), [*STARTS, saved])


@pytest.mark.parametrize(
    ("last", "resumed", "saved", "message"),
    [
        (LAST + 1, LAST - SAVE_INTERVAL + 1, LAST - SAVE_INTERVAL, f"the checkpoint of {LAST} was whole"),
        (LAST, LAST - SAVE_INTERVAL, LAST - SAVE_INTERVAL - 1, f"the checkpoint of {LAST - SAVE_INTERVAL} was whole"),
        (LAST - 1, LAST - 3, LAST - SAVE_INTERVAL, f"the last start found the checkpoint of {LAST - SAVE_INTERVAL}"),
        (LAST, LAST + 2, LAST + 1, f"the checkpoint of {LAST - SAVE_INTERVAL} was whole"),
    ],
)
def test_other_costs_of_a_node_that_dies_fail(last: int, resumed: int, saved: int, message: str) -> None:
    with pytest.raises(DemoFailed, match=message):
        check_order(trained(last, resumed), [*STARTS, saved])


def test_interruptions_that_leave_time_to_save_cost_nothing() -> None:
    """13 was trained after the checkpoint that the second start found."""
    with pytest.raises(DemoFailed, match="iteration 13 came after 13"):
        check_order([*range(1, 14), *trained(LAST, LAST + 1)[12:]], [0, 12, 20, 28, LAST])
    with pytest.raises(DemoFailed, match="iteration 13 came after 13: more than the node"):
        check_order([*range(1, 14), *trained(LAST - 1, LAST - 7)[12:]], [0, 12, 20, 28, LAST - 8])
