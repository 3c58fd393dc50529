"""The Hopper kernels of attention over lists of latent keys against fp64."""

from __future__ import annotations

import random

import pytest
import torch

from megatron_magi.backends.sm90 import latent, tuning
from megatron_magi.ops.latent_attention import latent_sparse_attention
from megatron_magi.testing.error_budget import assert_within_budget
from tests.backends.triton.test_latent_gpu import SCALE, random_lists, tensors
from tests.backends.triton.test_latent_gpu import plain_attention as attention_in_dtype
from tests.graph_capture import capture

pytestmark = [pytest.mark.gpu, pytest.mark.sm90]
DIM, DIM_V = 576, 512


def plain_attention(q, kv, indices, sink, scale):
    """Out by torch operations, with logits in fp32 and p in the dtype of q."""
    num_keys, heads_kv, _ = kv.shape
    lists = indices.transpose(0, 1).expand(heads_kv, -1, -1).long()
    hidden = ((lists < 0) | (lists >= num_keys))[:, :, None]
    keys = kv.transpose(0, 1)[torch.arange(heads_kv, device="cuda")[:, None, None], lists.clamp(0, num_keys - 1)]
    query = q.unflatten(1, (heads_kv, -1)).transpose(0, 1)
    logits = (query.float() @ keys.float().transpose(2, 3) * scale).masked_fill(hidden, -torch.inf)
    sinks = torch.full((1, q.shape[1]), -1e4, device="cuda") if sink is None else sink
    sinks = sinks.view(len(sinks), heads_kv, 1, -1).permute(1, 2, 3, 0).expand(*logits.shape[:3], -1)
    p = torch.softmax(torch.cat([logits, sinks], -1), -1)[..., : lists.shape[2]]
    return (p.to(q.dtype) @ keys[..., :DIM_V]).transpose(0, 1).flatten(1, 2)


def check(q, kv, indices, sink=None, scale=SCALE):
    """Compares out, lse and largest logits of the kernel; returns them."""
    options = {"softmax_scale": scale, "dim_v": DIM_V, "return_max_logits": True}
    q, kv = q.detach(), kv.detach()
    out, meta = latent_sparse_attention(q, kv, indices, sink=sink, impl="ffa", **options)
    wide = [None if x is None else x.double() for x in (q, kv, sink)]
    exact, exact_meta = latent_sparse_attention(*wide[:2], indices, sink=wide[2], impl="reference", **options)
    assert_within_budget("out", out, plain_attention(q, kv, indices, sink, scale), exact, elementwise=False)
    torch.testing.assert_close(meta.lse.double(), exact_meta.lse, atol=2e-4, rtol=2e-4)
    torch.testing.assert_close(meta.max_logits.double(), exact_meta.max_logits, atol=1e-3, rtol=1e-3)
    return out, meta.lse, meta.max_logits


@pytest.mark.parametrize(
    "heads, topk, dtype, has_sink",
    [
        ((128, 1), 2048, torch.bfloat16, False),
        ((64, 1), 512, torch.bfloat16, True),
        ((64, 1), 64, torch.float16, False),
        ((16, 1), 100, torch.float16, True),
        ((80, 1), 130, torch.bfloat16, True),
        ((40, 2), 1, torch.bfloat16, False),
        ((1, 1), 63, torch.bfloat16, True),
    ],
    ids=str,
)
def test_the_kernel_matches_fp64(heads, topk, dtype, has_sink):
    q, kv = tensors(150, 3000, heads, DIM, dtype)
    sink = torch.randn(2, heads[0], device="cuda") if has_sink else None
    check(q, kv, random_lists(150, 3000, topk, heads[1]), sink)


@pytest.mark.parametrize("seed", range(16))
def test_random_cases_match_fp64(seed):
    """Of more items than streaming multiprocessors, whose lists have from 0 to 9 blocks of keys."""
    draw = random.Random(seed)
    heads = draw.choice([(64, 1), (128, 1), (64, 2), (96, 1), (8, 1), (130, 2)])
    num_rows, num_keys = draw.choice([(1, 1), (300, 50), (400, 700), (700, 2000)]), draw.randint(1, 600)
    num_rows, num_keys = num_rows[0], max(num_keys, num_rows[1])
    dtype = draw.choice([torch.bfloat16, torch.float16])
    q, kv = tensors(num_rows, num_keys, heads, DIM, dtype)
    indices = random_lists(num_rows, num_keys, draw.randint(1, 560), draw.choice([1, heads[1]]))
    if draw.random() < 0.5:
        indices = indices.long()
    if draw.random() < 0.5:  # numbers behind the last key are passed over
        indices = indices.where(torch.rand(indices.shape, device="cuda") < 0.8, num_keys + 5)
    sink = torch.randn(1, heads[0], device="cuda") if draw.random() < 0.5 else None
    check(q, kv, indices, sink, draw.choice([SCALE, 0.3]))


def test_logits_that_grow_along_a_list_raise_the_references_of_both_warpgroups():
    """Blocks of 64 keys, of which each, every second, or the first has the largest logits so far."""
    q, kv = (x.detach() for x in tensors(200, 1024, (64, 1), DIM, torch.bfloat16))
    q = q.abs()
    kv = kv.abs() * torch.linspace(0.01, 2, 1024, device="cuda", dtype=torch.bfloat16)[:, None, None]
    rising = torch.arange(1024, device="cuda").expand(200, 1, -1).clone()
    rising[50:100] = rising[50:100].flip(-1)
    rising[100:150] = rising[100:150].view(50, 1, 8, 2, 64).flip(3).reshape(50, 1, -1)
    rising[150:] = rising[150:, :, torch.randperm(1024, device="cuda")]
    check(q, kv, rising, scale=0.5)


@pytest.mark.parametrize("topk", [0, 3, 70])
def test_queries_that_see_nothing_get_zero_or_the_sink(topk):
    q, kv = (x.detach() for x in tensors(140, 30, (64, 1), DIM, torch.bfloat16))
    indices = torch.full((140, 1, topk), -1, device="cuda")
    for sink in (None, torch.randn(1, 64, device="cuda")):
        out, lse, max_logits = check(q, kv, indices, sink)
        assert not out.any() and bool((max_logits == -torch.inf).all())
        assert torch.equal(lse, torch.full_like(lse, -torch.inf) if sink is None else sink.expand_as(lse))


def test_any_strides_are_read():
    q, kv = (x.detach() for x in tensors(150, 400, (64, 2), DIM, torch.bfloat16))
    wide_q = torch.empty(64, 150, 640, dtype=q.dtype, device="cuda")[..., 32 : 32 + DIM].transpose(0, 1)
    wide_kv = torch.empty(400, 3, 600, dtype=q.dtype, device="cuda")[:, 1:, :DIM]
    odd_kv = torch.empty(400, 2, 579, dtype=q.dtype, device="cuda")[..., 1:577]  # has to be copied
    for x, from_ in ((wide_q, q), (wide_kv, kv), (odd_kv, kv)):
        x.copy_(from_)
    indices = random_lists(150, 400, 130, 2)
    every_second = indices.repeat_interleave(2, -1)[..., ::2]
    want = check(q, kv, indices)[:2]
    for other in ((wide_q, wide_kv, every_second), (q, odd_kv, indices)):
        for a, b in zip(want, check(*other)[:2], strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize(
    "heads, topk, dtype, has_sink",
    [
        ((128, 1), 2048, torch.bfloat16, False),
        ((64, 1), 512, torch.bfloat16, True),
        ((16, 1), 100, torch.float16, True),
        ((80, 1), 130, torch.bfloat16, True),
        ((40, 2), 70, torch.bfloat16, False),
        ((1, 1), 63, torch.bfloat16, True),
    ],
    ids=str,
)
def test_gradients_match_fp64(heads, topk, dtype, has_sink):
    q, kv = tensors(150, 3000, heads, DIM, dtype)
    indices = random_lists(150, 3000, topk, heads[1])
    torch.manual_seed(0)
    sink = torch.randn(1, heads[0], device="cuda") if has_sink else None
    dout = torch.randn(150, heads[0], DIM_V, device="cuda").to(dtype)
    check_gradients(q, kv, indices, sink, dout)


def check_gradients(q, kv, indices, sink, dout, deterministic=False):
    """Compares gradients of the kernels with those in fp64; of the sink for each query, as it has few elements.

    They may be as far off as those by plain operations in 16 bits, or as the definition's in 16 bits, which like the
    kernels takes delta from the rounded output: that tells where few keys are seen and the terms of dS cancel.
    """
    sinks = None if sink is None else sink.detach().expand(len(q), 1, -1).clone().requires_grad_()
    leaves = [x for x in (q, kv, sinks) if x is not None]
    wide = [x.detach().double().requires_grad_() for x in leaves]
    options = {"softmax_scale": SCALE, "dim_v": DIM_V}
    own = {"deterministic": deterministic, "impl": "ffa"}
    out, _ = latent_sparse_attention(q, kv, indices, sink=sinks, **options, **own)
    plain = attention_in_dtype(q, kv, indices.where(indices < len(kv), -1), DIM_V, sink)
    defined, _ = latent_sparse_attention(q, kv, indices, sink=sinks, impl="reference", **options)
    exact, _ = latent_sparse_attention(*wide[:2], indices, sink=(*wide, None)[2], impl="reference", **options)
    ways = (out, leaves), (defined, leaves), (exact, wide), (plain, (q, kv))
    got, of_definition, wanted, by_operations = (torch.autograd.grad(*way, dout.to(way[0].dtype)) for way in ways)
    errors = []
    for i, name in enumerate(("dq", "dkv", "dsink")[: len(leaves)]):
        likes = of_definition[i : i + 1] + by_operations[i : i + 1]
        like = max(likes, key=lambda x, of=wanted[i]: float((x.double() - of).norm()))
        try:
            assert_within_budget(name, got[i], like, wanted[i], elementwise=False)
        except AssertionError as error:
            errors.append(f"{error}; of columns {relative_errors(got[i], wanted[i])}")
    assert not errors, "; ".join(errors)


def relative_errors(got, wanted):
    """Of each 64 columns, in the order of columns."""
    pairs = zip(got.double().split(64, -1), wanted.double().split(64, -1), strict=True)
    return [f"{float((a - b).norm() / b.norm().clamp_min(1e-30)):.1e}" for a, b in pairs]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_gradients_of_random_cases_match_fp64(seed, deterministic):
    """Of lists that are empty, of keys that are none, and of gradients of the output that are not contiguous."""
    torch.manual_seed(seed)
    draw = random.Random(seed)
    heads = draw.choice([(64, 1), (128, 1), (64, 2), (96, 1), (8, 1), (130, 2)])
    num_rows, num_keys = draw.choice([(1, 50), (300, 50), (400, 700), (700, 2000)])
    q, kv = tensors(num_rows, num_keys, heads, DIM, draw.choice([torch.bfloat16, torch.float16]))
    indices = random_lists(num_rows, num_keys, draw.randint(1, 560), draw.choice([1, heads[1]]))
    indices = indices.where(torch.rand(indices.shape, device="cuda") < 0.9, num_keys + 5)
    if draw.random() < 0.5:
        indices = indices.where(torch.rand(num_rows, 1, 1, device="cuda") < 0.7, -1)
    sink = torch.randn(1, heads[0], device="cuda")
    dout = torch.randn(heads[0], num_rows, DIM_V, device="cuda").transpose(0, 1)
    check_gradients(q, kv, indices, sink, dout.to(q.dtype), deterministic)


@pytest.mark.parametrize("deterministic", [False, True])
def test_gradients_of_any_strides_match_fp64(deterministic):
    q, kv = (x.detach() for x in tensors(150, 400, (64, 2), DIM, torch.bfloat16))
    wide_q = torch.empty(64, 150, 640, dtype=q.dtype, device="cuda")[..., 32 : 32 + DIM].transpose(0, 1)
    wide_kv = torch.empty(400, 3, 600, dtype=q.dtype, device="cuda")[:, 1:, :DIM]
    odd_kv = torch.empty(400, 2, 579, dtype=q.dtype, device="cuda")[..., 1:577]  # has to be copied
    dout = torch.randn(150, 70, 520, dtype=q.dtype, device="cuda")[:, 3:67, 8:]
    every_second = random_lists(150, 400, 130, 2).repeat_interleave(2, -1)[..., ::2]
    for keys in (wide_kv, odd_kv):
        wide_q.copy_(q), keys.copy_(kv)
        leaves = [x.detach().requires_grad_() for x in (wide_q, keys)]
        assert not any(x.is_contiguous() for x in (*leaves, dout, every_second))
        check_gradients(*leaves, every_second, None, dout, deterministic)


def test_gradients_match_fp64_where_items_begin_together(monkeypatch):
    monkeypatch.setattr(latent, "_BYTES_APART", 0)
    torch.manual_seed(0)
    q, kv = tensors(331, 2000, (128, 1), DIM, torch.bfloat16)  # 662 items; no other test has this shape
    dout = torch.randn(331, 128, DIM_V, device="cuda").to(q.dtype)
    for _ in range(2):  # the counter is zero again
        check_gradients(q, kv, random_lists(331, 2000, 300, 1), None, dout)


@pytest.mark.parametrize("deterministic", [False, True])
def test_small_gradients_do_not_vanish_in_fp16(deterministic):
    """With the softmax scale alone, 0.07, most of dS would be next to the smallest numbers of fp16."""
    torch.manual_seed(0)
    q, kv = tensors(150, 3000, (64, 1), DIM, torch.float16)
    indices = torch.randint(0, 3000, (150, 1, 300), device="cuda")
    dout = (3e-5 * torch.randn(150, 64, DIM_V, device="cuda")).half()
    options = {"softmax_scale": SCALE, "dim_v": DIM_V}
    out, _ = latent_sparse_attention(q, kv, indices, **options, deterministic=deterministic, impl="ffa")
    wide = [x.detach().double().requires_grad_() for x in (q, kv)]
    exact, _ = latent_sparse_attention(*wide, indices, **options, impl="reference")
    found = torch.autograd.grad(out, (q, kv), dout), torch.autograd.grad(exact, wide, dout.double())
    for name, got, wanted in zip(("dq", "dkv"), *found, strict=True):
        error = float((got.double() - wanted).norm() / wanted.norm())
        assert error < 0.01, f"{name}: {error:.1e}"


def store_always(monkeypatch, most_bytes):
    """What queries give to keys is stored, at most so many bytes at a time, never added at once."""
    monkeypatch.setattr(latent, "_stores", lambda *_: True)
    monkeypatch.setattr(tuning, "GIVEN_LATENT_BYTES", most_bytes)
    monkeypatch.setattr(tuning, "GIVEN_OVER_SUMS", 0)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("most_bytes", [1 << 30, 8 << 20])
@pytest.mark.parametrize(
    "heads, topk, dtype",
    [
        ((64, 1), 512, torch.bfloat16),
        ((128, 1), 300, torch.float16),
        ((96, 2), 130, torch.bfloat16),
        ((16, 2), 1, torch.float16),
    ],
    ids=str,
)
def test_gradients_that_are_stored_match_fp64(monkeypatch, heads, topk, dtype, most_bytes, deterministic):
    """In one part and, with 512 and 300 keys, in several."""
    store_always(monkeypatch, most_bytes)
    torch.manual_seed(0)
    q, kv = tensors(301, 3000, heads, DIM, dtype)
    dout = torch.randn(301, heads[0], DIM_V, device="cuda").to(q.dtype)
    for lists in {1, heads[1]}:
        check_gradients(q, kv, random_lists(301, 3000, topk, lists), None, dout, deterministic)


@pytest.mark.parametrize("most_bytes", [1 << 30, 8 << 20])
def test_keys_that_many_lists_name_often_get_the_gradients_of_fp64(monkeypatch, most_bytes):
    store_always(monkeypatch, most_bytes)
    q, kv = tensors(301, 700, (64, 1), DIM, torch.bfloat16)
    indices = random_lists(301, 700, 200, 1)
    indices[..., :20] = torch.arange(20, device="cuda")
    indices[..., 150:] = 5  # 50 times a list
    dout = torch.randn(301, 64, DIM_V, device="cuda").to(q.dtype)
    for deterministic in (False, True):
        check_gradients(q, kv, indices, None, dout, deterministic)


@pytest.mark.parametrize("most_bytes", [1 << 30, 8 << 20])
@pytest.mark.parametrize("heads", [64, 128])
def test_deterministic_gradients_repeat_bit_by_bit(monkeypatch, heads, most_bytes):
    monkeypatch.setattr(tuning, "GIVEN_LATENT_BYTES", most_bytes)
    monkeypatch.setattr(tuning, "GIVEN_OVER_SUMS", 0)
    q, kv = tensors(400, 300, (heads, 1), DIM, torch.bfloat16)
    indices = random_lists(400, 300, 500, 1)
    out, _ = latent_sparse_attention(q, kv, indices, softmax_scale=SCALE, deterministic=True, impl="ffa")
    dout = torch.randn_like(out)
    runs = [torch.autograd.grad(out, (q, kv), dout, retain_graph=True) for _ in range(10)]
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(runs[0], run, strict=True))


@pytest.mark.parametrize("impl", ["ffa", "triton"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_a_key_that_no_query_lists_does_not_matter_where_lists_have_gaps(deterministic, impl):
    """Key 0 has no finite element."""
    indices = random_lists(300, 700, 130, 1)
    indices = indices.masked_fill(indices == 0, -1)
    options = {"softmax_scale": SCALE, "deterministic": deterministic, "impl": impl}
    found = []
    for value in (0.0, torch.nan):
        q, kv = tensors(300, 700, (64, 1), DIM, torch.bfloat16)
        kv = kv.detach().index_fill(0, torch.tensor([0], device="cuda"), value).requires_grad_()
        out, _ = latent_sparse_attention(q, kv, indices, **options)
        found.append([out.detach(), *torch.autograd.grad(out, (q, kv), torch.ones_like(out))])
    for name, without, with_nan in zip(("out", "dq", "dkv"), *found, strict=True):
        if name == "dkv" and not deterministic:  # added in any order
            torch.testing.assert_close(with_nan, without, atol=2e-2, rtol=2e-2)
        else:
            assert torch.equal(without, with_nan), name


def test_queries_that_see_nothing_have_no_gradients():
    q, kv = tensors(140, 30, (64, 1), DIM, torch.bfloat16)
    out, _ = latent_sparse_attention(q, kv, torch.full((140, 1, 70), -1, device="cuda"), softmax_scale=1.0, impl="ffa")
    assert not any(x.any() for x in torch.autograd.grad(out, (q, kv), torch.ones_like(out)))


@pytest.mark.parametrize("deterministic", [False, True])
def test_captured_gradients_read_new_lists(deterministic):
    q, kv = tensors(300, 500, (128, 1), DIM, torch.bfloat16)
    indices = random_lists(300, 500, 300, 1)

    def step():
        out, _ = latent_sparse_attention(q, kv, indices, softmax_scale=SCALE, deterministic=deterministic, impl="ffa")
        return torch.autograd.grad(out, (q, kv), torch.ones_like(out))

    graph, captured = capture(step)
    indices.copy_(indices.roll(7, 0))
    graph.replay()
    for got, wanted in zip(captured, step(), strict=True):
        torch.testing.assert_close(got, wanted, atol=2e-2, rtol=2e-2)


def test_captured_graphs_read_new_lists_and_results_repeat():
    q, kv = (x.detach() for x in tensors(300, 500, (128, 1), DIM, torch.bfloat16))
    indices = random_lists(300, 500, 300, 1)

    def step():
        return latent_sparse_attention(q, kv, indices, softmax_scale=SCALE, impl="ffa")[0]

    graph, captured = capture(step)
    indices.copy_(indices.roll(7, 0))
    graph.replay()
    assert all(torch.equal(captured, step()) for _ in range(5))
