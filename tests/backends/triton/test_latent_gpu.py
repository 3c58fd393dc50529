"""The kernels of attention over lists of latent keys as users call them, on a GPU, against fp64."""

from __future__ import annotations

import pytest
import torch

from megatron_magi.ops.latent_attention import latent_sparse_attention
from megatron_magi.testing.error_budget import assert_within_budget
from tests.graph_capture import capture

pytestmark = pytest.mark.gpu
SCALE = 192**-0.5


def tensors(num_rows, num_keys, heads, dim, dtype):
    gen = torch.Generator(device="cuda").manual_seed(0)
    shapes = (num_rows, heads[0], dim), (num_keys, heads[1], dim)
    return [torch.randn(s, generator=gen, device="cuda").to(dtype).requires_grad_() for s in shapes]


def random_lists(num_rows, num_keys, topk, lists):
    """Keys in any order, causal, some named twice, some -1; the ends of lists are empty."""
    gen = torch.Generator(device="cuda").manual_seed(1)
    last = torch.arange(num_rows, device="cuda")[:, None, None] * num_keys // num_rows + 1
    listed = (torch.rand((num_rows, lists, topk), generator=gen, device="cuda") * last).int()
    ends = torch.randint(0, topk + topk // 4, (num_rows, lists, 1), generator=gen, device="cuda")
    some = torch.rand(listed.shape, generator=gen, device="cuda") < 0.9
    return listed.where((torch.arange(topk, device="cuda") < ends) & some, -1)


def plain_attention(q, kv, indices, dim_v, sink):
    """Out by torch operations in the dtype of q."""
    group = q.shape[1] // kv.shape[1]
    lists = indices.transpose(0, 1).expand(kv.shape[1], -1, -1)
    keys = kv.transpose(0, 1)[torch.arange(kv.shape[1], device="cuda")[:, None, None], lists.clamp_min(0)]
    query = q.unflatten(1, (-1, group)).transpose(0, 1)
    logits = (query @ keys.transpose(2, 3)).float() * SCALE
    logits = logits.masked_fill((lists < 0)[:, :, None], -1e4)
    sinks = torch.full((q.shape[1],), -1e4, device="cuda") if sink is None else sink[0]
    sinks = sinks.view(kv.shape[1], 1, group, 1).expand(*logits.shape[:3], 1)
    p = torch.softmax(torch.cat([logits, sinks], -1), -1)[..., :-1].masked_fill((lists < 0)[:, :, None], 0)
    return (p.to(q.dtype) @ keys[..., :dim_v]).transpose(0, 1).flatten(1, 2)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    "heads, dims, dtype, topk, has_sink",
    [
        ((128, 1), (576, 512), torch.bfloat16, 2048, False),
        ((64, 1), (576, 512), torch.bfloat16, 512, True),
        ((16, 1), (576, 512), torch.float16, 100, True),
        ((40, 2), (320, 256), torch.bfloat16, 130, False),
        ((20, 1), (512, 512), torch.bfloat16, 70, False),
        ((6, 2), (96, 64), torch.float32, 50, True),
    ],
    ids=str,
)
def test_kernels_match_fp64(heads, dims, dtype, topk, has_sink, deterministic):
    q, kv = tensors(150, 3000, heads, dims[0], dtype)
    indices = random_lists(150, 3000, topk, heads[1])
    sink = torch.randn(1, heads[0], device="cuda").requires_grad_() if has_sink else None
    leaves = [q, kv, *([sink] if has_sink else [])]
    options = {"softmax_scale": SCALE, "dim_v": dims[1], "return_max_logits": True, "deterministic": deterministic}
    out, meta = latent_sparse_attention(q, kv, indices, sink=sink, impl="triton", **options)
    dout = torch.randn_like(out)
    grads = torch.autograd.grad(out, leaves, dout)
    plain = plain_attention(q, kv, indices, dims[1], sink)
    plain_grads = torch.autograd.grad(plain, leaves, dout)
    wide = [x.detach().double().requires_grad_() for x in leaves]
    exact, exact_meta = latent_sparse_attention(
        *wide[:2], indices, sink=wide[2] if has_sink else None, impl="reference", **options
    )
    exact_grads = torch.autograd.grad(exact, wide, dout.double())
    torch.testing.assert_close(meta.lse.double(), exact_meta.lse, atol=2e-4, rtol=2e-4)
    torch.testing.assert_close(meta.max_logits.double(), exact_meta.max_logits, atol=1e-3, rtol=1e-3)
    results = zip((out, *grads), (plain, *plain_grads), (exact, *exact_grads), strict=True)
    for name, (got, like, wanted) in zip(("out", "dq", "dkv", "dsink"), results, strict=False):
        terms = wanted.double().abs().clamp_min(1.0) if name == "dsink" else None
        assert_within_budget(name, got, like, wanted, terms=terms, elementwise=False)


def test_deterministic_gradients_repeat_and_fit_memory(monkeypatch):
    from megatron_magi.backends.triton import latent

    q, kv = tensors(300, 100, (64, 1), 576, torch.bfloat16)
    indices = random_lists(300, 100, 64, 1)
    found = []
    for chunk_bytes in (1 << 30, 1 << 30, 40 * (64 * 576 * 4 + 64 * 64 * 4)):
        monkeypatch.setattr(latent, "CHUNK_BYTES", chunk_bytes)
        out, _ = latent_sparse_attention(q, kv, indices, softmax_scale=SCALE, deterministic=True, impl="triton")
        found.append(torch.autograd.grad(out, (q, kv), torch.ones_like(out)))
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize("deterministic", [False, True])
def test_captured_graphs_read_new_lists(deterministic):
    q, kv = tensors(100, 500, (64, 1), 576, torch.bfloat16)
    indices = random_lists(100, 500, 64, 1)

    def step():
        out, _ = latent_sparse_attention(
            q, kv, indices, softmax_scale=SCALE, deterministic=deterministic, impl="triton"
        )
        return out, *torch.autograd.grad(out, (q, kv), torch.ones_like(out))

    graph, captured = capture(step)
    indices.copy_(indices.roll(7, 0))
    graph.replay()
    for got, wanted in zip(captured, step(), strict=True):
        torch.testing.assert_close(got, wanted, atol=2e-2, rtol=2e-2)
