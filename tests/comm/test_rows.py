"""Partial results merge by rows as they merge by tensors."""

from __future__ import annotations

import numpy as np
import torch

from megatron_magi.comm import rows
from megatron_magi.operands.merge import merge_
from tests.comm.random_transfers import arrivals_of

PARTS = 4


def partial_results():
    """Rows by parts of one head: ordinary, unseen with garbage, infinite, NaN in lse, NaN in out."""
    gen = torch.Generator().manual_seed(0)
    out = torch.randn(PARTS, 7, 1, 3, generator=gen, dtype=torch.float64)
    lse = 5 * torch.randn(PARTS, 7, 1, generator=gen, dtype=torch.float64)
    lse[0, 1], lse[2, 2], lse[:, 3] = -torch.inf, -torch.inf, -torch.inf
    lse[1, 4], lse[:2, 5], lse[2, 6] = torch.inf, torch.nan, -2000
    out[lse == -torch.inf] = torch.nan
    out[1, 0, 0, 1] = torch.nan
    out[2, 6] = torch.nan  # its weight is 0 next to the others
    return out, lse


def test_rows_merge_as_whole_tensors_do_also_with_nan_and_infinity():
    out, lse = partial_results()
    expected, merged = [out[0].clone(), lse[0].clone()], [out[0].clone(), lse[0].clone()]
    for part in range(1, PARTS):
        merge_(*expected, out[part], lse[part])
    local_rows = np.tile(np.arange(7), PARTS - 1)
    parts = rows.PartialRows(out[1:].flatten(0, 1), lse[1:].flatten(0, 1))
    rows.merge_rows(parts, arrivals_of(local_rows, "cpu"), merged)
    for a, b in zip(merged, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-13, equal_nan=True)


def test_nan_that_counts_stays_visible_and_garbage_without_weight_does_not():
    out, lse = partial_results()
    merged = [out[0].clone(), lse[0].clone()]
    local_rows = np.tile(np.arange(7), PARTS - 1)
    parts = rows.PartialRows(out[1:].flatten(0, 1), lse[1:].flatten(0, 1))
    rows.merge_rows(parts, arrivals_of(local_rows, "cpu"), merged)
    assert merged[0][0, 0].isnan().tolist() == [False, True, False]
    assert merged[0][5].isnan().all() and merged[1][5].isnan().all()
    assert not merged[0][3].any() and (merged[1][3] == -torch.inf).all()
    torch.testing.assert_close(merged[0][4], out[1, 4])
    assert (merged[1][4] == torch.inf).all()
    assert merged[0][[1, 2, 6]].isfinite().all()


def test_sums_are_rounded_once_and_those_of_integers_are_exact():
    for into, parts, expected in (
        (torch.tensor([[256.0]], dtype=torch.bfloat16), torch.ones(2, 1, dtype=torch.bfloat16), 258),  # 256 + 1 is 256
        (torch.tensor([[1 << 60]]), torch.ones(2, 1, dtype=torch.int64), (1 << 60) + 2),
    ):
        rows.sum_rows(parts, arrivals_of(np.array([0, 0]), "cpu"), into)
        assert into.item() == expected
