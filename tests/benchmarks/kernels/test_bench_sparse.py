"""The benchmark of sparse attention over latent keys, without a GPU: its peers' calls, and its figures."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from benchmarks._lib import providers
from benchmarks._lib.latent_providers import LATENT_PEERS
from benchmarks._lib.providers import Unavailable
from benchmarks._lib.sparse_cases import LATENT_SCALE, Case
from benchmarks.kernels import bench_sparse
from megatron_magi.ops.latent_attention import latent_sparse_attention

QUERIES, KEYS, HEADS, TOPK = 4, 30, 8, 10


@pytest.fixture
def case():
    indices = torch.randint(0, KEYS, (QUERIES, 1, TOPK), generator=torch.Generator().manual_seed(0), dtype=torch.int32)

    def attend(q, kv, **options):
        return latent_sparse_attention(q, kv, indices, softmax_scale=LATENT_SCALE, **options)

    return Case(
        "mla top 10", (QUERIES, KEYS), (HEADS, 1), (1, 1), TOPK, attend,
        ours="triton", dims=(576, 512), indices=indices,
    )  # fmt: skip


@pytest.fixture
def tensors(case):
    assert case.shapes == [(QUERIES, HEADS, 576), (KEYS, 1, 576)]
    return [torch.randn(s) for s in case.shapes]


@pytest.fixture
def modules(monkeypatch):
    """Puts modules in the place of those that are imported; None is one that is not installed."""

    def put(**given):
        for name, module in given.items():
            monkeypatch.setitem(sys.modules, name, module)
        providers._first_module.cache_clear()

    yield put
    providers._first_module.cache_clear()


def fake_flash_mla(q, kv, indices, sm_scale, d_v=512):
    out, meta = latent_sparse_attention(q, kv, indices, softmax_scale=sm_scale, dim_v=d_v)
    return out, meta.lse, meta.lse


def test_peers_get_the_case_as_their_libraries_take_it(case, tensors, modules):
    seen, factor = {}, 1.0

    def backward(q, kv, out, dout, lse, sink, indices, *, softmax_scale, topk_length):
        seen.update(kv=kv.shape, indices=indices.shape, lengths=topk_length.tolist(), scale=softmax_scale)
        leaves = [x.detach().requires_grad_() for x in (q, kv[:, None])]
        own, meta = latent_sparse_attention(*leaves, indices[:, None], softmax_scale=softmax_scale)
        torch.testing.assert_close((out, lse), (own.detach(), meta.lse))
        assert bool((sink == -torch.inf).all())
        dq, dkv = torch.autograd.grad(own, leaves, dout)
        return {"dq": factor * dq, "dkv": dkv[:, 0]}

    wrapper = SimpleNamespace(sparse_attention_backward_wrapper=backward)
    modules(flash_mla=SimpleNamespace(flash_mla_sparse_fwd=fake_flash_mla), cudnn=SimpleNamespace(DSA=wrapper))
    forward, nothing = bench_sparse.peer_of(case, "flash_mla")(case, *tensors)
    torch.testing.assert_close(forward(), case.attend(*tensors)[0])
    no_forward, backward_pass = bench_sparse.peer_of(case, "cudnn_dsa")(case, *tensors)
    assert nothing is None and no_forward is None
    assert backward_pass().shape == tensors[0].shape
    assert seen == {"kv": (KEYS, 576), "indices": (QUERIES, TOPK), "lengths": [TOPK] * QUERIES, "scale": LATENT_SCALE}
    factor = 1.1
    with pytest.raises(RuntimeError, match=r"its dq is 0\.100 off"):
        bench_sparse.peer_of(case, "cudnn_dsa")(case, *tensors)
    assert bench_sparse._is_known("cudnn_dsa", {"cudnn_dsa backward": 1.0}, {})


def test_peers_that_are_not_there_say_so(case, tensors, modules):
    modules(flash_mla=None, cudnn=None, tilelang=None)
    for name in LATENT_PEERS.keys() - {"triton"}:  # which is ours
        with pytest.raises(Unavailable):
            bench_sparse.peer_of(case, name)(case, *tensors)
    modules(flash_mla=SimpleNamespace())
    with pytest.raises(Unavailable, match="flash_mla_sparse_fwd"):
        LATENT_PEERS["flash_mla"](case, *tensors)
    for name, indices in (("flex", case.indices), ("tilelang", None)):
        with pytest.raises(Unavailable, match="latent keys"):
            bench_sparse.peer_of(SimpleNamespace(indices=indices), name)


def test_rates_count_the_products_of_both_dims(case):
    row = bench_sparse._row(case, "triton", {"triton forward": 1.0, "triton backward": 2.0}, "")
    pairs = QUERIES * TOPK * HEADS
    assert case.forward_flops == 2 * pairs * (576 + 512)
    assert case.backward_flops == 2 * pairs * (3 * 576 + 2 * 512)
    named = dict(zip(bench_sparse.HEADER, row, strict=True))
    assert named["case"] == "mla top 10" and named["forward_ms"] == "1.0000" and named["heads"] == "8:1"
    of_blocks = Case("blocks", (64, 128), (4, 2), (64, 64), 32, case.attend)
    assert of_blocks.forward_flops == 4 * 64 * 32 * 4 * 128
    assert of_blocks.backward_flops == 2.5 * of_blocks.forward_flops and len(of_blocks.shapes) == 3
