"""Which masks are given to the package as sequences, decided without a GPU."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given

from megatron_magi.backends.cudnn import sequences
from megatron_magi.mask import AttnMask, builders
from megatron_magi.mask.dense import dense_bands
from megatron_magi.mask.row_intervals import row_intervals
from tests.backends.cudnn.documents import always_split, documents
from tests.mask.test_row_intervals import dense
from tests.ops.naive import masks


def lengths_of(found: sequences.Sequences) -> tuple[list[int], list[int]]:
    """Rows and keys of sequences, without the empty ones at the end."""
    rows, keys = np.diff(found.rows), np.diff(found.keys)
    full = int(np.flatnonzero(rows + keys)[-1]) + 1
    assert not rows[full:].any() and not keys[full:].any()
    return rows[:full].tolist(), keys[:full].tolist()


def check(mask: AttnMask) -> sequences.Sequences | None:
    """Sequences mean the mask, whatever they are."""
    rows, keys = mask.total_seqlen_q, mask.total_seqlen_k
    found = sequences.split(mask.bands, rows, keys, num_heads_kv=8)
    if found is None:
        return None
    assert found.rows.dtype == found.keys.dtype == np.int32 and len(found.rows) == len(found.keys) > 2
    for ends, total, longest in zip(found[:2], (rows, keys), found.longest, strict=True):
        assert ends[0] == 0 and ends[-1] == total and (np.diff(ends) >= 0).all() and np.diff(ends).max() <= longest
    ends = row_intervals(sequences.local(mask.bands, found), rows)
    number = np.repeat(np.arange(len(found.rows) - 1), np.diff(found.rows))
    assert (ends >= 0).all() and (ends[-1] <= np.diff(found.keys)[number]).all(), "keys of another sequence"
    visible = np.zeros((rows, keys), dtype=bool)
    for i, (first, last) in enumerate(zip(found.rows[:-1], found.rows[1:], strict=True)):
        start, stop = found.keys[i : i + 2]
        visible[first:last, start:stop] = dense(ends[:, first:last], stop - start)
    np.testing.assert_array_equal(visible, dense_bands(mask.bands, rows, keys))
    return found


@given(documents())
def test_sequences_mean_the_mask(mask):
    check(mask)
    with always_split():
        check(mask)


@given(masks(longest=40))
def test_sequences_of_any_mask_mean_it(mask):
    check(mask)
    with always_split():
        check(mask)


@pytest.mark.parametrize("causal", [False, True])
def test_documents_are_sequences_of_their_own(causal):
    lengths = [300, 500, 129, 700, 400]
    found = check(builders.varlen(doc_lengths=lengths, causal=causal))
    assert found is not None and lengths_of(found) == (lengths, lengths)
    assert found.longest == (768, 768), "of whole tiles"


def test_windows_and_blocks_in_documents_are_sequences_too():
    lengths = [300, 500, 129, 700, 400]
    for mask in (
        builders.sliding_window(doc_lengths=lengths, left=90, right=0),
        builders.block_causal(block_size=100, doc_lengths=lengths),
    ):
        found = check(mask)
        assert found is not None and lengths_of(found) == (lengths, lengths)


def test_rows_and_keys_in_no_pair_belong_to_the_sequence_before():
    mask = AttnMask([(10, 300, 20, 330, 0), (340, 600, 350, 700, 1)], 640, 777)
    with always_split():
        found = check(mask)
    assert found is not None and lengths_of(found) == ([340, 300], [350, 427])


@pytest.mark.parametrize(
    "mask",
    [
        builders.full(2000),
        builders.causal(2000),
        builders.sliding_window(2000, 100, 0),
        builders.prefix_tree([100, 300, 300, 300], [[0, 1], [0, 2], [0, 3]])[0],
        builders.varlen(doc_lengths=[0, 2000, 0]),
        AttnMask([(0, 1000, 1000, 2000, 0), (1000, 2000, 0, 1000, 0)], 2000),  # the keys are not in the order of rows
        AttnMask([(0, 1000, 0, 1001, 0), (1000, 2000, 1000, 2000, 0)], 2000),  # one key in both
        AttnMask([], 2000),
    ],
)
def test_other_masks_are_planned_as_a_whole(mask):
    assert check(mask) is None
    with always_split():
        assert check(mask) is None


@pytest.mark.parametrize(
    ("lengths", "gains"),
    [
        ([500, 129, 700, 400, 260, 59] * 16, True),
        ([16384] + [250] * 64, False),  # blocks would be started for each as for the longest
        ([3000] + [100] * 300, False),
        ([8] * 1000, False),  # shorter than tiles
        ([128] * 50, False),  # tiles begin with documents as it is
    ],
)
def test_sequences_are_split_where_that_saves_more_tiles_than_it_starts_blocks(lengths, gains):
    total = sum(lengths)
    found = sequences.split(builders.varlen(doc_lengths=lengths, causal=True).bands, total, total, num_heads_kv=1)
    assert (found is not None) == gains


def test_the_number_of_sequences_takes_few_values():
    numbers = {n: len(sequences._padded(np.arange(n + 1))) - 1 for n in range(1, 2000)}
    assert all(n <= padded <= n + n // 8 for n, padded in numbers.items())
    assert len(set(numbers.values())) < 15 + 8 * 8


@pytest.mark.parametrize(("length", "count", "num_heads_kv"), [(100, 40, 8), (300, 200, 8), (300, 100, 32)])
def test_more_sequences_than_pay_for_their_plan_and_memory_are_planned_as_a_whole(length, count, num_heads_kv):
    mask = builders.varlen(doc_lengths=[length] * count)
    total = length * count
    assert sequences.split(mask.bands, total, total, num_heads_kv) is None
    assert sequences.split(builders.varlen(doc_lengths=[300] * 100).bands, 30000, 30000, 8) is not None
