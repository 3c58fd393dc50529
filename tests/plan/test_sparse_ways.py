"""Which way of fetching keys for lists is predicted to be faster."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_magi.backends.costs import DEFAULT
from megatron_magi.plan.sparse_ways import SparseShape, ways_us

LONG = SparseShape(
    num_ranks=8,
    num_keys=1 << 19,
    longest=1 << 16,
    capacity=1 << 16,
    row_bytes=4096,
    num_lists=8,
    list_bytes=1 << 20,
    copies=True,
)


def test_all_keys_are_faster_where_all_may_be_selected():
    found = ways_us(LONG, DEFAULT)
    assert found.all_keys < found.selected


@pytest.mark.parametrize("share", [0.01, 0.1, 0.25])
def test_selected_ones_are_faster_where_few_may_be(share):
    found = ways_us(LONG._replace(capacity=int(share * LONG.longest)), DEFAULT)
    assert found.selected < found.all_keys


def test_short_sequences_are_gathered():
    found = ways_us(LONG._replace(num_keys=8192, longest=1024, capacity=10, list_bytes=1024), DEFAULT)
    assert found.all_keys < found.selected


def test_by_hand():
    """Two ranks without costs but for bytes: twice the rows of the other, and passes over memory."""
    rates = replace(
        DEFAULT,
        collective_us=0.0,
        host_stage_forward_us=0.0,
        gbytes_per_s=1.0,
        memory_gbytes_per_s=1000.0,
    )
    shape = SparseShape(2, 1000, 500, 100, 1000, 1, 0, False)
    found = ways_us(shape, rates)
    assert found.all_keys == pytest.approx(2 * 500 + 5 * 1000 / 1000)
    moved = 2 * 100 + 500 / 8 / 1000
    assert found.selected == pytest.approx(moved + (40 + 7 * 100 + 2 * 500) / 1000, rel=1e-2)


def test_ranks_of_other_nodes_are_slower():
    near = ways_us(LONG, replace(DEFAULT, ranks_per_node=8))
    far = ways_us(LONG, replace(DEFAULT, ranks_per_node=4))
    assert far.all_keys > 2 * near.all_keys and far.selected > 2 * near.selected
