import numpy as np
import pytest
from hypothesis import given

from megatron_magi.mask import AttnMask, builders
from megatron_magi.mask.dense import dense_bands
from megatron_magi.mask.row_intervals import most_intervals, row_intervals
from tests.ops.naive import masks


def dense(ends: np.ndarray, num_keys: int) -> np.ndarray:
    """What rows of intervals see, bool ``[num_rows, num_keys]``."""
    keys = np.arange(num_keys)
    seen = keys < ends[0][:, None]
    for first, last in zip(ends[1::2], ends[2::2], strict=True):
        seen |= (keys >= first[:, None]) & (keys < last[:, None])
    return seen


def check(mask: AttnMask) -> np.ndarray:
    rows, keys = mask.total_seqlen_q, mask.total_seqlen_k
    ends = row_intervals(mask.bands, rows)
    assert ends.dtype == np.int32 and ends.flags.c_contiguous and len(ends) % 2 == 1 and ends.shape[1] == rows
    np.testing.assert_array_equal(dense(ends, keys), dense_bands(mask.bands, rows, keys))
    assert (np.diff(ends, axis=0) >= 0).all()
    empty = ends[1::2] == ends[2::2]
    assert (empty <= (ends[1::2] == ends[-1])).all(), "an empty interval is behind all others"
    touches = (ends[1::2] == ends[:-1:2]) & ~empty & (ends[:-1:2] > 0)
    assert not touches.any(), "intervals that touch are one"
    assert len(ends) // 2 <= most_intervals(mask.bands)
    return ends


@given(masks())
def test_intervals_are_those_of_the_dense_definition(mask):
    check(mask)


@pytest.mark.parametrize(
    ("mask", "num_ends"),
    [
        (builders.full(7, 9), 1),
        (builders.causal(9), 1),
        (builders.varlen(doc_lengths=[3, 0, 4, 2]), 3),
        (builders.sliding_window(20, 3, 0, global_tokens=2), 3),
        (builders.block_causal(20, 6), 1),
        (AttnMask([(0, 6, 0, 4, 0), (0, 6, 4, 10, 1)], 6, 10), 1),
        (AttnMask([(0, 6, 7, 9, 0), (0, 6, 0, 2, 0), (2, 4, 4, 5, 0)], 6, 10), 5),
        (AttnMask([], 6, 10), 1),
    ],
)
def test_masks_have_as_many_intervals_as_a_row_needs(mask, num_ends):
    assert len(check(mask)) == num_ends


def test_most_intervals_is_the_deepest_stack_of_bands():
    mask = AttnMask([(0, 5, 0, 2, 0), (3, 8, 4, 6, 0), (5, 9, 0, 2, 0), (4, 5, 8, 9, 0)], 9, 10)
    assert most_intervals(mask.bands) == 3
