"""Ranges that are masks of blocks: that they are found to be, mean the same, and go to the sparse kernels."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_magi.backends.registry import SPARSE
from megatron_magi.mask import builders
from megatron_magi.operands.options import AttnOptions
from megatron_magi.ops import flex_flash_attn, sparse_ranges
from megatron_magi.ops.flex_flash_attn import flex_flash_attn_func
from megatron_magi.ops.mask_tensors import HostRanges
from megatron_magi.ops.sparse_ranges import block_lists, sparse_pattern_of
from megatron_magi.runtime.lru import LruCache
from tests import forced


def block_table(mask, q_block, k_block, num_rows, num_keys):
    return builders.block_sparse(
        mask, q_block_size=q_block, k_block_size=k_block, seqlen_q=num_rows, seqlen_k=num_keys
    ).table


def dense(lists, num_rows, num_keys):
    mask = np.zeros((len(lists.offsets) - 1, -(-num_keys // lists.k_block)), dtype=bool)
    mask[np.repeat(np.arange(len(mask)), np.diff(lists.offsets)), lists.entries] = True
    return mask.repeat(lists.q_block, 0)[:num_rows].repeat(lists.k_block, 1)[:, :num_keys]


@settings(max_examples=60)
@given(
    st.integers(1, 300), st.integers(1, 900), st.sampled_from([1, 3, 16, 128]), st.sampled_from([1, 5, 64, 128]),
    st.integers(0, 999),
)  # fmt: skip
def test_lists_of_ranges_mean_the_same(num_rows, num_keys, q_block, k_block, seed):
    generator = np.random.default_rng(seed)
    mask = generator.random((-(-num_rows // q_block), -(-num_keys // k_block))) < 0.5
    table = generator.permutation(np.array(block_table(mask, q_block, k_block, num_rows, num_keys)))
    lists = block_lists(table, num_rows, num_keys)
    if not mask.any():
        assert lists is None
        return
    assert np.array_equal(
        dense(lists, num_rows, num_keys), mask.repeat(q_block, 0)[:num_rows].repeat(k_block, 1)[:, :num_keys]
    )
    assert lists.k_block in (64, 128) if k_block >= 64 else lists.k_block in (1, 64, 128)


@pytest.mark.parametrize(
    "table",
    [
        [(0, 64, 0, 64, 1)],
        [(0, 64, 0, 64, 0), (0, 32, 32, 96, 0)],
        [(0, 64, 0, 2000, 0)],
        [(-64, 64, 0, 64, 0)],
        [(64, 64, 0, 64, 0)],
        [(0, 64, 0, 64, 0), (64, 32, 64, 128, 0)],
        [(0, 64, 0, 64, 0), (64, 64, 0, 2000, 0)],
    ],
)
def test_ranges_that_are_no_mask_of_blocks_are_left_to_others(table):
    assert block_lists(np.array(table), 128, 1000) is None


def like(num_tokens, heads, dim=128):
    return torch.empty(num_tokens, heads, dim, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("heads", "q_block", "k_block", "options", "taken"),
    [
        ((128, 1), 1, 128, {}, True),
        ((128, 1), 1, 1, {}, True),
        ((128, 1), 1, 1, {"deterministic": True}, False),
        ((16, 16), 1, 1, {}, False),  # a query fills an eighth of a tile
        ((64, 8), 16, 64, {}, False),  # 8 packed heads of 16 queries fill a tile of the dense kernels too
        ((64, 4), 8, 64, {}, True),
        ((64, 4), 8, 64, {"softcap": 1.0}, False),
        ((64, 4), 8, 64, {"sm_margin": 8}, False),
        ((8, 8), 128, 128, {}, False),
    ],
)
def test_sparse_kernels_get_what_fills_their_tiles_better(monkeypatch, heads, q_block, k_block, options, taken):
    monkeypatch.setattr(sparse_ranges, "fast_sparse", lambda *_: SPARSE["ffa"])
    mask = np.random.default_rng(0).random((32, 1024 // k_block)) < 0.5
    rows = len(mask) * q_block
    table = block_table(mask, q_block, k_block, rows, 1024)
    ranges = HostRanges([table[:, :2], table[:, 2:4]], rows, 1024)
    tensors = like(rows, heads[0]), like(1024, heads[1]), like(1024, heads[1])
    found = sparse_pattern_of(ranges, *tensors, AttnOptions(1.0, **options))
    assert (found is not None) == taken
    assert sparse_pattern_of(ranges, *tensors, AttnOptions(1.0, **options)) is found  # the same tensors again
    if found is not None:
        assert (found.q_block, found.k_block) == (q_block, k_block)


@pytest.mark.parametrize("k_block", [1, 128])
def test_patterns_that_are_made_in_inference_mode_can_be_saved_for_a_backward(monkeypatch, k_block):
    monkeypatch.setattr(sparse_ranges, "fast_sparse", lambda *_: SPARSE["ffa"])
    table = block_table(np.random.default_rng(0).random((80, 1024 // k_block)) < 0.5, 1, k_block, 80, 1024)
    ranges = HostRanges([table[:, :2], table[:, 2:4]], 80, 1024)
    with torch.inference_mode():
        pattern = sparse_pattern_of(ranges, like(80, 128), like(1024, 1), like(1024, 1), AttnOptions(1.0))
    assert pattern is not None and not any(x.is_inference() for x in pattern.tensors)


def test_lists_of_single_keys_of_very_different_lengths_are_not_padded(monkeypatch):
    monkeypatch.setattr(sparse_ranges, "fast_sparse", lambda *_: SPARSE["ffa"])
    found = []
    for longest in (30, 1001):
        mask = np.zeros((200, 1001), dtype=bool)
        mask[:, :20:2] = mask[0, :longest:2] = True
        table = block_table(mask, 1, 1, *mask.shape)
        ranges = HostRanges([table[:, :2], table[:, 2:4]], *mask.shape)
        found.append(sparse_pattern_of(ranges, like(200, 128), like(1001, 1), like(1001, 1), AttnOptions(1.0)))
    assert found[0] is not None and found[0].tensors[0].shape == (1, 200, 15) and found[1] is None


def test_patterns_that_are_kept_are_bounded_by_the_memory_of_their_lists(monkeypatch):
    monkeypatch.setattr(sparse_ranges, "fast_sparse", lambda *_: SPARSE["ffa"])
    lists, patterns = LruCache(10_000, 256), LruCache(10_000, 256)
    monkeypatch.setattr(sparse_ranges, "_lists", lists)
    monkeypatch.setattr(sparse_ranges, "_patterns", patterns)
    for seed in range(20):
        mask = np.random.default_rng(seed).random((64, 64)) < 0.5  # of 8 kB, from few ranges
        table = block_table(mask, 1, 128, 64, 8192)
        ranges = HostRanges([table[:, :2], table[:, 2:4]], 64, 8192)
        assert sparse_pattern_of(ranges, like(64, 128), like(8192, 1), like(8192, 1), AttnOptions(1.0)) is not None
        assert len(lists) == len(patterns) == 1 and 8000 < patterns.num_bytes < 10_000


@pytest.mark.gpu
@pytest.mark.sm90
@pytest.mark.parametrize(("q_block", "k_block"), [(1, 128), (4, 64), (1, 1)])
@pytest.mark.parametrize("on_device", [False, True])
def test_the_function_of_ranges_takes_the_sparse_kernels_and_means_the_same(monkeypatch, q_block, k_block, on_device):
    mask = np.random.default_rng(0).random((200 // q_block, -(-1000 // k_block))) < 0.4
    table = block_table(mask, q_block, k_block, 200, 1000)
    ranges = [torch.tensor(np.array(x), dtype=torch.int32) for x in (table[:, :2], table[:, 2:4])]
    ranges = [x.cuda() for x in ranges] if on_device else ranges
    torch.manual_seed(0)
    inputs = [
        torch.randn(n, h, 128, device="cuda").bfloat16().requires_grad_() for n, h in ((200, 64), (1000, 1), (1000, 1))
    ]
    sink = torch.randn(1, 64, device="cuda").requires_grad_()
    flags = {"ref_block_size": (q_block, k_block), "max_seqlen_q": q_block, "auto_range_merge": True, "swap_ab": True,
             "pack_gqa": True, "sparse_load": True, "swap_bwd_qk_loop": True}  # fmt: skip
    want, want_meta = flex_flash_attn_func(*inputs, *ranges, sink=sink, impl="torch", return_max_logits=True)
    if forced.NAME in (None, "ffa"):  # else the dense kernels of a backend compute ranges of a mask
        monkeypatch.setattr(flex_flash_attn, "attend", None)
    got, meta = flex_flash_attn_func(*inputs, *ranges, sink=sink, return_max_logits=True, **flags)
    pairs = [(got, want), (meta.lse, want_meta.lse), (meta.max_logits, want_meta.max_logits)]
    pairs += zip(*(torch.autograd.grad(x.float().square().sum(), (*inputs, sink)) for x in (got, want)), strict=True)
    for a, b in pairs:
        assert float((a - b).float().norm()) <= 2e-2 * float(b.float().norm())
