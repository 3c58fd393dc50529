"""The sparse Hopper kernels against fp64 on random patterns, shapes and options, and on the most uneven lists."""

from __future__ import annotations

import random

import pytest
import torch

from megatron_magi.backends.sm90 import sparse as sparse_hopper
from megatron_magi.backends.sm90 import tuning
from megatron_magi.operands.sparse_pattern import SparsePattern, num_blocks
from tests.backends.sm90.sparse_cases import (
    Case,
    check_backward,
    check_forward,
    csr_of_mask,
    lists_with_gaps,
    make_case,
    random_mask,
    to_cuda,
)

pytestmark = [pytest.mark.gpu, pytest.mark.sm90]

MOST_LOGITS = 30_000_000  # in fp64, several times
HEADS = ((128, 1), (64, 8), (7, 7), (24, 8), (96, 1), (5, 1), (160, 2), (16, 16))


def draw_pattern(draw: random.Random, num_rows: int, num_keys: int, heads_kv: int) -> SparsePattern:
    """Of any form; rows that see nothing or all, and entries given twice, are among them."""
    generator = torch.Generator().manual_seed(draw.randrange(1 << 30))
    k_block = draw.choice((1, 64, 64, 128, 128))
    q_block = 1 if k_block == 1 else draw.choice((1, 2, 5, 16, 64, 100, 128))
    mask = random_mask(generator, draw.choice((1, heads_kv)), num_rows, num_keys, q_block, k_block, draw.random())
    form = "lists" if k_block == 1 else draw.choice(("mask", "csr", "lists"))
    if form == "mask":
        tensors = (mask,)
    elif form == "csr":
        tensors = csr_of_mask(mask)
    else:
        lists = lists_with_gaps(mask, generator)[..., : draw.choice((1, 40, 1000, 1000))]
        tensors = (torch.cat([lists, lists[..., :1]], -1) if draw.random() < 0.3 else lists,)
    return to_cuda(SparsePattern(tensors, q_block, k_block, k_block > 1 and draw.random() < 0.5))


def draw_case(draw: random.Random) -> Case:
    heads = draw.choice(HEADS)
    num_keys = draw.choice((1, 63, 700, 1024, 3001))
    num_rows = min(draw.choice((1, 17, 300, 300, 1500)), MOST_LOGITS // (heads[0] * num_keys))
    pattern = draw_pattern(draw, num_rows, num_keys, heads[1])
    dim, dtype = draw.choice((64, 128)), draw.choice((torch.bfloat16, torch.float16))
    return make_case(pattern, num_rows, num_keys, heads, dim, dtype, draw.randrange(1 << 30))


@pytest.mark.parametrize("seed", range(40))
def test_random_patterns_match_fp64(monkeypatch, seed):
    draw = random.Random(seed)
    x = draw_case(draw)
    monkeypatch.setattr(
        tuning, "SPARSE_PART_BYTES", num_blocks(4 * x.q.numel() // x.k.shape[1], draw.choice((1, 3, 20)))
    )
    sink = torch.randn(x.q.shape[1], device="cuda")
    check_forward(x)
    check_forward(x, sink)
    check_backward(x)
    check_backward(x, deterministic=True)


@pytest.mark.parametrize("k_block", [1, 64, 128])
@pytest.mark.parametrize("topk", [1, 3])
def test_all_lists_are_one_list(monkeypatch, k_block, topk):
    """A few keys are seen by all queries, the others by none."""
    monkeypatch.setattr(tuning, "SPARSE_PART_BYTES", 1 << 16)
    num_rows, num_keys = 150, 1500
    columns = num_blocks(num_keys, k_block)
    for heads, q_block in (((128, 1), 1), ((8, 2), 1 if k_block == 1 else 100)):
        one = torch.tensor([0, columns - 1, columns // 2])[:topk]
        lists = one.expand(1, num_blocks(num_rows, q_block), topk).int().cuda()
        x = make_case(SparsePattern((lists,), q_block, k_block, False), num_rows, num_keys, heads)
        check_forward(x)
        check_backward(x)
        check_backward(x, deterministic=True)


@pytest.mark.parametrize("k_block", [1, 64, 128])
def test_queries_without_keys_have_the_sink_alone(k_block):
    lists = torch.full((1, 50, 6), -1, dtype=torch.int32)
    lists[0, ::3] = torch.randint(0, num_blocks(900, k_block), (17, 6), dtype=torch.int32)
    x = make_case(to_cuda(SparsePattern((lists,), 1, k_block, False)), 50, 900, (16, 2))
    sink = torch.randn(16, device="cuda")
    out, lse, _ = x.forward(sparse_hopper, sink[None])
    empty = torch.arange(50, device="cuda") % 3 > 0
    assert not bool(out[empty].any())
    torch.testing.assert_close(lse[empty], sink.expand(33, 16))
    check_forward(x, sink[None])
