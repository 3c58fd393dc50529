"""Tensors whose sign torch only notes, such as the imaginary part of a conjugate: kernels read memory."""

from __future__ import annotations

import pytest
import torch

from megatron_magi import block_sparse_attention, slice_attention
from megatron_magi.api import calc_attn, flex_flash_attn_func, magi_attn_varlen_key
from megatron_magi.extensions import sdpa_func_with_sink
from megatron_magi.mask import builders
from tests import forced

MASK = builders.causal(70)


def by_mask(q, k, v, sink):
    return slice_attention(q, k, v, MASK, sink=sink)[0]


def by_key(q, k, v, sink):
    return calc_attn(q, k, v, magi_attn_varlen_key([0, 70], [0, 70], causal=True), sink=sink)[0]


def by_ranges(q, k, v, sink):
    return flex_flash_attn_func(q, k, v, sink=sink)[0]


def by_blocks(q, k, v, sink):
    blocks = torch.ones(1, 2, 2, dtype=torch.bool, device=q.device)
    return block_sparse_attention(q, k, v, blocks, q_block_size=64, k_block_size=64, sink=sink)[0]


def by_torch(q, k, v, sink):
    return sdpa_func_with_sink(*(x.transpose(0, 1)[None] for x in (q, k, v)), sink)[0].transpose(0, 1)


ON_GPU = [pytest.mark.gpu, pytest.mark.sm90]


@pytest.mark.parametrize(
    "device, dtype", [(forced.DEVICE, forced.DTYPE), pytest.param("cuda", torch.bfloat16, marks=ON_GPU)]
)
@pytest.mark.parametrize("attend", [by_mask, by_key, by_ranges, by_blocks, by_torch])
def test_they_are_read_as_their_copies(attend, device, dtype):
    shapes = (70, 2, 64), (70, 2, 64), (70, 2, 64), (2, 2)
    leaves = [
        torch.randn(s, device=device).to(torch.float32 if len(s) == 2 else dtype).requires_grad_() for s in shapes
    ]
    negative = [torch._neg_view(x) for x in leaves]
    assert all(x.is_neg() for x in negative)
    weights = torch._neg_view(torch.randn(shapes[0], device=device).to(dtype))
    found = []
    for inputs in (negative, [x.clone() for x in negative]):
        out = attend(*inputs)
        upstream = weights if inputs is negative else weights.clone()
        found.append((out.detach(), *torch.autograd.grad(out, leaves, upstream)))
    for lazy, written in zip(*found, strict=True):
        torch.testing.assert_close(lazy, written, rtol=0, atol=0)
