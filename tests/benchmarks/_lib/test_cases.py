"""Masks of the attention benchmark, and what they cost."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from benchmarks._lib.cases import (
    MASKS,
    NUM_SLICES,
    Shape,
    documents,
    equal_documents,
    log_uniform_lengths,
    short_documents,
)
from benchmarks._lib.providers import document_ends, interval_ends, visibility
from megatron_magi.mask.dense import dense_mask


@pytest.mark.parametrize("total", [1024, 5000, 32768])
@pytest.mark.parametrize("split", [documents, short_documents, equal_documents])
def test_documents_are_positive_and_add_up(split, total):
    lengths = split(total)
    assert sum(lengths) == total
    assert min(lengths) > 0


def test_document_lengths_lie_in_their_range_and_repeat():
    lengths = log_uniform_lengths(100_000, 64, 640)
    assert all(64 <= n <= 640 for n in lengths[:-1]) and lengths[-1] <= 640
    assert 200 < np.mean(lengths) < 300
    assert lengths == log_uniform_lengths(100_000, 64, 640)
    assert lengths != log_uniform_lengths(100_000, 64, 640, seed=1)


@pytest.mark.parametrize("name", ["many_ranges", "distant_ranges"])
@pytest.mark.parametrize("length", [1024, 8192])
def test_many_ranges_are_a_thousand_slices(name, length):
    assert len(MASKS[name](length).mask.table) == NUM_SLICES


@pytest.mark.parametrize("length", [1024, 2048])
@pytest.mark.parametrize("name", list(MASKS))
def test_every_mask_is_what_it_is_described_as(name, length):
    """Its formula for FlexAttention, and the flags that other libraries are called by, mean the same mask."""
    case = MASKS[name](length)
    dense = torch.from_numpy(dense_mask(case.mask))
    q, k = torch.arange(length)[:, None], torch.arange(length)[None]
    formula = torch.ones_like(dense) if name == "full" else visibility(case, "cpu")(0, 0, q, k)
    assert torch.equal(formula, dense)
    assert int(dense.sum()) == case.mask.area
    assert case.causal == bool((~dense | (k <= q)).all())
    if case.plain:
        lengths = case.doc_lengths or (length,)
        document = torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths))
        told = document[:, None] == document[None]
        if case.causal:
            told = told & (k <= q)
        if case.window is not None:
            told = told & (q - k < case.window)
        assert torch.equal(told, dense)


@pytest.mark.parametrize("name", list(MASKS))
def test_intervals_of_each_query_are_what_the_mask_shows_it(name):
    mask = MASKS[name](2048).mask
    ends = interval_ends(mask).astype(np.int64)
    assert (np.diff(ends, axis=0) >= 0).all() and ends.shape[0] % 2 == 1
    keys = np.arange(2048)
    seen = keys < ends[0][:, None]
    for low, high in zip(ends[1::2], ends[2::2], strict=True):
        seen |= (keys >= low[:, None]) & (keys < high[:, None])
    assert np.array_equal(seen, dense_mask(mask))
    most = {"full": 1, "causal": 1, "distant_ranges": 9, "prefix_tree": 5}.get(name, 3)
    assert len(ends) == most


@pytest.mark.parametrize("name", [n for n in MASKS if MASKS[n](2048).doc_lengths is not None])
def test_ends_inside_documents_are_what_the_mask_shows_each_query(name):
    case = MASKS[name](2048)
    first = np.repeat(np.cumsum(case.doc_lengths) - case.doc_lengths, case.doc_lengths)[:, None]
    keys = np.arange(2048)
    seen = (keys >= first) & (keys < first + document_ends(case)[0][:, None])
    assert np.array_equal(seen, dense_mask(case.mask))


@pytest.mark.parametrize("length", [32768, 131072])
@pytest.mark.parametrize("name", list(MASKS))
def test_every_mask_exists_at_length(name, length):
    case = MASKS[name](length)
    assert case.length == length
    assert 0 < case.mask.area <= length**2


def test_work_of_equal_head_dims_is_four_and_ten_operations_a_pair_head_and_dim():
    assert Shape(64, 8, 128, 128).flops(1000) == (4 * 1000 * 64 * 128, 10 * 1000 * 64 * 128)


def test_work_counts_the_products_of_each_head_dim():
    assert Shape(2, 1, 192, 128).flops(10) == (2 * 10 * 2 * (192 + 128), 2 * 10 * 2 * (3 * 192 + 2 * 128))
