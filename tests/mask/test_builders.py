import time

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from megatron_magi.mask import MaskType, builders
from megatron_magi.mask.bands import areas
from megatron_magi.mask.dense import dense_mask
from tests.mask.dense_definitions import count_cover, document_pairs, sees_all, sees_blocks, sees_causal, sees_window

lengths = st.lists(st.integers(0, 12), max_size=5)
length_pairs = st.lists(st.tuples(st.integers(0, 10), st.integers(0, 10)), max_size=4)
window = st.integers(-1, 13)


def assert_mask_is(mask, expected):
    np.testing.assert_array_equal(dense_mask(mask), expected)
    assert mask.area == expected.sum() == areas(mask.bands).sum()
    # AttnMask refuses overlaps itself; counted here without its help.
    assert count_cover(mask.bands_untightened, *expected.shape).max(initial=0) <= 1
    assert (np.diff(mask.table[:, :4].reshape(-1, 2, 2), axis=2) > 0).all(), "a slice is empty"


@given(st.integers(0, 9), st.one_of(st.none(), st.integers(0, 9)))
def test_full_and_causal_match_their_dense_definitions(seqlen_q, seqlen_k):
    num_k = seqlen_q if seqlen_k is None else seqlen_k
    assert_mask_is(builders.full(seqlen_q, seqlen_k), document_pairs([seqlen_q], [num_k], sees_all))
    assert_mask_is(builders.causal(seqlen_q, seqlen_k), document_pairs([seqlen_q], [num_k], sees_causal))


@given(length_pairs, st.booleans())
def test_varlen_matches_its_dense_definition(pairs, causal):
    num_q, num_k = [p[0] for p in pairs], [p[1] for p in pairs]
    mask = builders.varlen(doc_lengths=num_q, doc_lengths_k=num_k, causal=causal)
    assert_mask_is(mask, document_pairs(num_q, num_k, sees_causal if causal else sees_all))
    assert len(mask.table) <= len(pairs)


@given(length_pairs, window, window, st.integers(0, 6))
@example([(10, 10)], 2, 0, 3)
@example([(9, 4)], 0, 3, 2)
@example([(1, 1), (5, 5)], 4, 4, 1)
def test_sliding_window_matches_its_dense_definition(pairs, left, right, num_global):
    num_q, num_k = [p[0] for p in pairs], [p[1] for p in pairs]
    mask = builders.sliding_window(
        left=left, right=right, doc_lengths=num_q, doc_lengths_k=num_k, global_tokens=num_global
    )
    assert_mask_is(mask, document_pairs(num_q, num_k, sees_window(left, right, num_global)))
    assert len(mask.table) <= len(pairs) * (4 if num_global else 3)


@given(st.integers(1, 14), window, window, st.integers(0, 5))
@example(3, 2, 0, 0)
def test_no_slice_of_a_window_can_be_spared(seqlen, left, right, num_global):
    """Against a search over all ways to cut the rows into groups that one slice can hold."""
    mask = builders.sliding_window(seqlen, left, right, global_tokens=num_global)
    dense = document_pairs([seqlen], [seqlen], sees_window(left, right, num_global))
    runs = [np.flatnonzero(np.diff(np.r_[0, row.astype(int), 0])) for row in dense]
    has_global_run = any(len(run) > 2 for run in runs)
    assert len(mask.table) <= fewest_row_groups(runs) + has_global_run


def fewest_row_groups(runs):
    best = [0] + [len(runs)] * len(runs)
    for stop in range(1, len(runs) + 1):
        for start in range(stop):
            if len({len(run) for run in runs[start:stop]}) == 1:
                # An edge of a slice stands still or follows the row, all the way.
                steps = np.diff(np.array(runs[start:stop]), axis=0).T.tolist()
                if all(set(column) <= {0} or set(column) <= {1} for column in steps):
                    best[stop] = min(best[stop], best[start] + 1)
    return best[-1]


def test_a_causal_window_never_looks_ahead_and_unlimited_windows_are_causal_or_full():
    assert builders.sliding_window(20, left=4, causal=True) == builders.sliding_window(20, 4, 0)
    assert builders.sliding_window(20, causal=True) == builders.causal(20)
    assert builders.sliding_window(20) == builders.full(20)
    assert not np.triu(dense_mask(builders.sliding_window(20, 4, causal=True, global_tokens=9)), 1).any()


def test_a_window_over_documents_uses_the_four_mask_types():
    mask = builders.sliding_window(left=2, right=3, doc_lengths=[10, 1])
    assert [s.mask_type for s in mask.slices] == [
        MaskType.CAUSAL,
        MaskType.BI_CAUSAL,
        MaskType.INV_CAUSAL,
        MaskType.FULL,
    ]


@given(lengths, st.integers(1, 14))
def test_block_causal_matches_its_dense_definition(doc_lengths, block_size):
    mask = builders.block_causal(doc_lengths=doc_lengths, block_size=block_size)
    assert_mask_is(mask, document_pairs(doc_lengths, doc_lengths, sees_blocks(block_size)))
    assert len(mask.table) == sum(-(-n // block_size) for n in doc_lengths)


@given(lengths, st.data())
def test_prefix_lm_matches_its_dense_definition(doc_lengths, data):
    prefixes = [data.draw(st.integers(0, n)) for n in doc_lengths]
    mask = builders.prefix_lm(prefixes, doc_lengths)
    expected = document_pairs(doc_lengths, doc_lengths, sees_causal)
    start = 0
    for prefix, length in zip(prefixes, doc_lengths, strict=True):
        expected[start : start + prefix, start : start + prefix] = True
        start += length
    assert_mask_is(mask, expected)
    assert len(mask.table) <= sum((n > 0) + (1 < p < n) for p, n in zip(prefixes, doc_lengths, strict=True))


@given(st.lists(st.lists(st.sampled_from([7, 7, 7, 0]), min_size=6, max_size=6), min_size=1, max_size=3), st.booleans())
def test_eod_tokens_end_documents_and_sequences_never_meet(tokens, causal):
    batch = np.array(tokens)
    flat = batch.reshape(-1)
    doc = np.zeros(len(flat), dtype=int)
    for t in range(1, len(flat)):
        doc[t] = doc[t - 1] + (flat[t - 1] == 0 or t % 6 == 0)
    expected = doc[:, None] == doc[None, :]
    if causal:
        expected &= np.tril(np.ones_like(expected))
    by_token = builders.from_eod_positions(tokens=batch, eod=0, causal=causal)
    at = np.flatnonzero(flat == 0)
    by_position = builders.from_eod_positions(at, 6, batch_size=len(batch), causal=causal)
    assert_mask_is(by_token, expected)
    assert by_position == by_token
    assert len(by_token.table) == doc[-1] + 1


@pytest.mark.parametrize("convert", [list, np.array, torch.tensor, lambda x: torch.tensor(x, dtype=torch.int32)])
def test_lists_arrays_and_tensors_give_the_same_mask(convert):
    assert builders.varlen(convert([0, 3, 9])) == builders.varlen(doc_lengths=convert([3, 6]))
    assert builders.prefix_lm(convert([1, 2]), convert([3, 6])) == builders.prefix_lm([1, 2], [3, 6])
    assert builders.from_eod_positions(tokens=convert([5, 0, 5]), eod=0) == builders.varlen([0, 2, 3])


@pytest.mark.parametrize(
    "build, name",
    [
        (lambda: builders.varlen([1, 3]), "cu_seqlens"),
        (lambda: builders.varlen([]), "cu_seqlens"),
        (lambda: builders.varlen([0, 5, 3]), "cu_seqlens.*5 then 3 at index 2"),
        (lambda: builders.varlen([[0, 5]]), "cu_seqlens"),
        (lambda: builders.varlen([0.0, 5.0]), "cu_seqlens: expected integers"),
        (lambda: builders.varlen(), "cu_seqlens, doc_lengths: give exactly one, got none"),
        (lambda: builders.varlen([0, 1], doc_lengths=[1]), "cu_seqlens and doc_lengths"),
        (lambda: builders.varlen([0, 1], doc_lengths_k=[1, 1]), "doc_lengths_k: 2 documents"),
        (lambda: builders.varlen(doc_lengths=[3, -1]), "doc_lengths.*-1 at index 1"),
        (lambda: builders.causal(-1), "seqlen_q"),
        (lambda: builders.full(3.5), "seqlen_q"),
        (lambda: builders.sliding_window(8, -2, 0), "left"),
        (lambda: builders.sliding_window(8, 0, -3), "right"),
        (lambda: builders.sliding_window(8, 1, 1, causal=True), "right: a causal window"),
        (lambda: builders.sliding_window(8, 1, 0, global_tokens=-1), "global_tokens"),
        (lambda: builders.sliding_window(), "seqlen"),
        (lambda: builders.block_causal(8), "block_size"),
        (lambda: builders.block_causal(8, 0), "block_size"),
        (lambda: builders.prefix_lm([4], [3]), "prefix_lengths: prefix 0 has 4"),
        (lambda: builders.prefix_lm([1], [3, 3]), "prefix_lengths: 1 prefixes for 2"),
        (lambda: builders.from_eod_positions([6], 6), "positions"),
        (lambda: builders.from_eod_positions([1]), "seqlen"),
        (lambda: builders.from_eod_positions(tokens=[1, 2]), "eod"),
        (lambda: builders.from_eod_positions(tokens=[1, 2], eod="</s>"), "^eod: expected an integer, got '</s>'"),
        (lambda: builders.from_eod_positions(tokens=[1, 2], eod=[1, 2]), "^eod: expected an integer"),
        (lambda: builders.from_eod_positions(), "positions, tokens"),
        (lambda: builders.from_eod_positions(tokens=np.zeros((1, 1, 1), int), eod=0), "tokens"),
        (lambda: builders.varlen([0, 8], causal="no"), "^causal: expected True or False, got 'no'"),
        (lambda: builders.sliding_window(8, 1, 0, causal=1), "^causal"),
        (lambda: builders.from_eod_positions([3], 8, causal=None), "^causal"),
        (lambda: builders.prefix_tree([4, 4], "01"), "^sample_paths: expected lists of nodes"),
        (lambda: builders.prefix_tree([4, 4], None), "^sample_paths"),
        (lambda: builders.prefix_tree([4, 4], [0]), r"^sample_paths\[0\]: expected 1 dimension"),
        (lambda: builders.prefix_tree([4, 4], [[0], [0.5]]), r"^sample_paths\[1\]: expected integers"),
    ],
)
def test_bad_arguments_are_named(build, name):
    with pytest.raises(ValueError, match=name):
        build()


def test_five_hundred_documents_are_built_in_milliseconds():
    doc_lengths = np.random.default_rng(0).integers(1, 4000, 500)
    for build in (
        lambda: builders.varlen(doc_lengths=doc_lengths),
        lambda: builders.sliding_window(left=512, right=0, doc_lengths=doc_lengths, global_tokens=4),
        lambda: builders.prefix_lm(doc_lengths // 3, doc_lengths),
    ):
        times = []
        for _ in range(5):
            start = time.perf_counter()
            build()
            times.append(time.perf_counter() - start)
        # Typically 0.2 to 1 ms; a loop over tokens would take seconds.
        assert min(times) < 0.02
