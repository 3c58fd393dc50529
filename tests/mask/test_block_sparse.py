"""Masks of blocks as slices: what they mean, what is refused."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_magi import make_plan
from megatron_magi.mask import builders
from megatron_magi.mask.dense import dense_mask


@settings(max_examples=100)
@given(
    st.integers(1, 40), st.integers(1, 60), st.integers(1, 20), st.integers(1, 20), st.booleans(), st.integers(0, 999)
)
def test_a_mask_of_blocks_is_its_blocks_token_by_token(num_q, num_k, q_block, k_block, causal, seed):
    shape = (-(-num_q // q_block), -(-num_k // k_block))
    blocks = np.random.default_rng(seed).random(shape) < 0.5
    mask = builders.block_sparse(
        torch.from_numpy(blocks), q_block_size=q_block, k_block_size=k_block, seqlen_q=num_q, seqlen_k=num_k,
        causal=causal,
    )  # fmt: skip
    wanted = blocks.repeat(q_block, 0)[:num_q].repeat(k_block, 1)[:, :num_k]
    if causal:
        wanted = wanted & (np.arange(num_k) <= np.arange(num_q)[:, None] + num_k - num_q)
    assert np.array_equal(dense_mask(mask), wanted)


def test_a_mask_of_blocks_is_planned_like_any_other():
    blocks = np.random.default_rng(0).random((32, 32)) < 0.3
    mask = builders.block_sparse(blocks, q_block_size=64, k_block_size=64, seqlen_q=2048)
    stats = make_plan(mask, cp_size=4).stats()
    assert stats.balance < 1.2


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("block_mask", {"block_mask": np.ones((2, 3), bool)}),
        ("block_mask", {"block_mask": np.ones((3, 3))}),
        (
            "block_mask: is on cuda:0, .*context parallelism",
            {"block_mask": SimpleNamespace(device=torch.device("cuda", 0))},
        ),
        ("q_block_size", {"q_block_size": 0}),
        ("k_block_size", {"k_block_size": 1.5}),
        ("seqlen_q", {"seqlen_q": -1}),
        ("causal", {"causal": "no"}),
    ],
)
def test_what_is_wrong_with_a_mask_of_blocks_is_named(name, changed):
    arguments = {"block_mask": np.ones((3, 3), bool), "q_block_size": 4, "k_block_size": 4, "seqlen_q": 10, **changed}
    with pytest.raises(ValueError, match=rf"^{name}"):
        builders.block_sparse(**arguments)
