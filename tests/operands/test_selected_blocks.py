"""Which blocks lists name, and how many places a buffer for them needs."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron_magi.operands.selected_blocks import BlockTables, Run, listed, renumbered
from megatron_magi.operands.sparse_pattern import SparsePattern

ROWS, COLUMNS, BLOCK = 5, 6, 64
MASK = torch.rand(2, ROWS, COLUMNS, generator=torch.Generator().manual_seed(0)) < 0.2
MASK[..., COLUMNS - 1] = False


def pattern_of(form: str) -> SparsePattern:
    """`MASK` in each form; lists with -1, twice the same, and numbers of no block."""
    if form == "mask":
        return SparsePattern((MASK,), 1, BLOCK, False)
    rows = [[row.nonzero()[:, 0] for row in of_list] for of_list in MASK]
    if form == "lists":
        entries = [[torch.cat([row, row, torch.full((14 - 2 * len(row),), -1)]) for row in some] for some in rows]
        entries = torch.stack([torch.stack(some) for some in entries])
        return SparsePattern((entries.masked_fill(entries == -1, COLUMNS + 3).int(),), 1, BLOCK, False)
    # Entries of no list come first and last.
    entries = torch.cat([torch.tensor([0, 1]), *(row for some in rows for row in some), torch.tensor([2, 5])])
    lengths = torch.tensor([[len(row) for row in some] for some in rows])
    ends = lengths.flatten().cumsum(0).view(2, -1) + 2
    return SparsePattern((torch.cat([ends[:, :1] - lengths[:, :1], ends], 1), entries.int()), 1, BLOCK, False)


@pytest.mark.parametrize("form", ["mask", "lists", "csr"])
def test_blocks_that_any_list_names_are_found_up_to_the_end_of_its_run(form: str) -> None:
    ends = torch.tensor([6, 2, 1, 0, 4])
    for given in (None, ends):
        seen = MASK if given is None else MASK & (torch.arange(COLUMNS) < given[:, None])
        expected = seen.any(1)
        found = listed(pattern_of(form), COLUMNS * BLOCK - 3, given)
        assert torch.equal(found, expected.any(0, keepdim=True) if form == "csr" else expected)
    assert (MASK.any(1) != expected).any()


def test_numbers_that_are_in_no_table_are_passed_over() -> None:
    table = torch.tensor([[4, -1, 7], [0, 1, 2]])
    entries = torch.tensor([[[0, 1, 2], [-1, 3, 9]], [[2, 2, -5], [0, 1, 3]]], dtype=torch.int32)
    expected = [[[4, -1, 7], [-1, -1, -1]], [[2, 2, -1], [0, 1, -1]]]
    assert renumbered(entries, table).tolist() == expected
    assert renumbered(entries[0, 0], table[:1]).tolist() == expected[0][0]


def test_a_buffer_has_a_place_for_each_block_that_may_come_in_parts() -> None:
    index = [np.array([3, 1, 2, 0, 10, 11]), np.arange(12, 39), np.array([39, 4, 5, 6, 7, 8, 9, 40])]
    tables = BlockTables.build(
        index, 0, [Run(0, 3, 4), Run(1, 1, 3), Run(3, 0, 1), Run(4, 10, 12)], 40, (1, 8), False, "cpu"
    )
    # The last block is an area; of the others rank 1 has 4, 8 and 8 tokens, rank 2 has 4 and 2, rank 0 two parts.
    assert tables.areas == ((32, 40),) and tables.parts == ((3, 4), (2, 2)) and tables.num_own == 2
    assert [tables.num_slots(capacity, 99) for capacity in (1, 2, 4, 8)] == [2, 3, 4, 4]
    assert tables.num_slots(8, 1) == 1
    causal = BlockTables.build(index, 0, tables_runs := [Run(0, 3, 4), Run(4, 10, 12)], 40, (1, 8), True, "cpu")
    assert causal.areas == ((0, 4), (8, 12)) and causal.num_own == 0 and causal.runs == tuple(tables_runs)
    assert causal.area_slot.tolist() == [0, 1, -1, -1, -1] and causal.ends.tolist() == [1, 2, 2]
