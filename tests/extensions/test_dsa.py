"""`dsa_attn_func` against dense attention of the listed keys."""

import pytest
import torch

from megatron_magi.extensions import dsa_attn_func

TOKENS, KEYS, HEADS, KEY_HEADS, DIM, TOPK = 9, 20, 4, 2, 8, 5


def inputs():
    generator = torch.Generator().manual_seed(3)
    shapes = ((TOKENS, HEADS, DIM), (KEYS, KEY_HEADS, DIM), (KEYS, KEY_HEADS, DIM))
    qkv = [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]
    lists = [torch.randperm(KEYS, generator=generator)[:TOPK] for _ in range(KEY_HEADS * TOKENS)]
    return qkv, torch.stack(lists).view(KEY_HEADS, TOKENS, TOPK)


def dense(q, k, v, index_map, scale):
    seen = torch.zeros(KEY_HEADS, TOKENS, KEYS, dtype=torch.bool).scatter_(2, index_map, True)
    seen = seen.repeat_interleave(HEADS // KEY_HEADS, 0)
    k, v = (x.repeat_interleave(HEADS // KEY_HEADS, 1) for x in (k, v))
    logits = (torch.einsum("qhd,khd->hqk", q, k) * scale).masked_fill(~seen, float("-inf"))
    return torch.einsum("hqk,khd->qhd", logits.softmax(-1), v), logits.logsumexp(-1).T


@pytest.mark.parametrize("backend", ["flex", "ffa_index_attn"])
def test_output_lse_and_gradients_are_those_of_dense_attention(backend):
    qkv, index_map = inputs()
    out, lse = dsa_attn_func(*qkv, index_map.int(), 0.3, backend)
    expected, expected_lse = dense(*qkv, index_map, 0.3)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse.detach())
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    got = torch.autograd.grad((out * weights).sum(), qkv)
    for gradient, right in zip(got, torch.autograd.grad((expected * weights).sum(), qkv), strict=True):
        torch.testing.assert_close(gradient, right)


def test_lists_by_query_and_unknown_backends_are_refused():
    qkv, index_map = inputs()
    with pytest.raises(ValueError, match=r"index_map: \[9, 2, 5\] is not \[num_heads_kv, num_tokens_q, topk\]"):
        dsa_attn_func(*qkv, index_map.transpose(0, 1))
    with pytest.raises(ValueError, match="backend: 'fa3' is unknown"):
        dsa_attn_func(*qkv, index_map, backend="fa3")
