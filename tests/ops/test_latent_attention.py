"""Attention over lists of latent keys as a function: its meaning, gradients, memory, arguments, compiled functions."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_magi.backends.reference import lists
from megatron_magi.ops.latent_attention import latent_sparse_attention
from megatron_magi.ops.sparse_attention import index_sparse_attention
from tests import forced
from tests.ops.test_sparse_attention import assert_close, assert_same, dense_attention


def tensors(num_rows, num_keys, heads=(4, 1), dim=12, dtype=forced.DTYPE, seed=0):
    gen = forced.generator(seed)
    shapes = [(num_rows, heads[0], dim), (num_keys, heads[1], dim)]
    return [torch.randn(shape, generator=gen, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


def random_lists(num_rows, num_keys, topk, num_lists=1, seed=0):
    """Different keys, some of which are -1."""
    gen = forced.generator(seed)
    indices = torch.rand(num_rows, num_lists, num_keys, generator=gen).argsort(-1)[..., :topk]
    return indices.masked_fill(torch.rand(indices.shape, generator=gen) < 0.3, -1)


@settings(**forced.examples(30))
@given(
    st.tuples(st.integers(1, 30), st.integers(1, 60)), st.integers(1, 30), st.sampled_from([(4, 1), (3, 1), (4, 2)]),
    st.sampled_from([12, 8, 1]), st.sampled_from([None, 1, 2]), st.integers(1, 4000), st.integers(0, 999),
)  # fmt: skip
def test_it_is_dense_attention_of_the_listed_keys_over_values_that_are_a_slice(
    monkeypatched_bytes, shape, topk, heads, dim_v, sink_dims, chunk_bytes, seed
):
    monkeypatched_bytes(chunk_bytes)
    num_rows, num_keys = shape
    q, kv = tensors(num_rows, num_keys, heads, seed=seed)
    indices = random_lists(num_rows, num_keys, topk, heads[1], seed)
    sink = None
    if sink_dims:
        sink = torch.randn(2, heads[0], dtype=forced.DTYPE).requires_grad_()
    given = sink if sink_dims != 2 else sink.expand(num_rows, -1, -1)
    got = latent_sparse_attention(
        q, kv, indices.int(), softmax_scale=0.8, dim_v=dim_v, sink=given, return_max_logits=True
    )
    visible = torch.zeros(heads[1], num_rows, num_keys + 1, dtype=torch.bool)
    listed = indices.transpose(0, 1)
    visible = visible.scatter(2, listed.where(listed >= 0, num_keys), True)[..., :-1]
    wanted = dense_attention(q, kv, kv[..., :dim_v], visible, sink, softmax_scale=0.8)
    if bool(visible.any()):
        assert_same(got, wanted, [q, kv, *([sink] if sink_dims else [])])
    keys = kv.repeat_interleave(heads[0] // heads[1], 1)
    logits = torch.einsum("qhd,khd->hqk", q, keys) * 0.8
    logits = logits.masked_fill(~visible.repeat_interleave(heads[0] // heads[1], 0), -torch.inf)
    assert_close(got[1].max_logits, logits.amax((1, 2)).detach())


@pytest.fixture(scope="module")
def monkeypatched_bytes():
    """Sets the memory of a chunk of the definition."""
    with pytest.MonkeyPatch.context() as patch:
        yield lambda n: patch.setattr(lists, "CHUNK_BYTES", n)


def test_dims_of_mla_in_bf16_are_as_good_as_plain_torch():
    """By the definition; kernels round their probabilities too."""
    q, kv = tensors(6, 50, (64, 1), 576, torch.bfloat16)
    indices = random_lists(6, 50, 40)
    out, meta = latent_sparse_attention(q, kv, indices, softmax_scale=192**-0.5, impl="reference")
    assert out.shape == (6, 64, 512) and out.dtype == torch.bfloat16 and meta.lse.dtype == torch.float32
    out.float().square().sum().backward()
    exact_q, exact_kv = (x.detach().double().requires_grad_() for x in (q, kv))
    exact, exact_meta = latent_sparse_attention(exact_q, exact_kv, indices, softmax_scale=192**-0.5, impl="reference")
    exact.square().sum().backward()
    torch.testing.assert_close(meta.lse.double(), exact_meta.lse, atol=1e-5, rtol=1e-5)
    for a, b in ((out.detach(), exact.detach()), (q.grad, exact_q.grad), (kv.grad, exact_kv.grad)):
        # One rounding to bf16 of the result, and one of the output that gradients begin with.
        assert float((a.double() - b).norm() / b.norm()) < 2**-8


def test_it_is_index_sparse_attention_with_one_gradient():
    q, kv = tensors(9, 20, (4, 2))
    indices = torch.randint(-1, 20, (9, 2, 13), generator=forced.generator(1))  # some named twice
    got = latent_sparse_attention(q, kv, indices, softmax_scale=0.3, dim_v=7)
    want = index_sparse_attention(q, kv, kv[..., :7], indices, softmax_scale=0.3)
    assert_same(got, (want[0], want[1].lse), [q, kv])


def test_the_definition_takes_memory_for_some_queries_at_a_time(monkeypatch):
    """Of 512 queries, 64 heads and 256 keys of 576, all of which would take 302 MB gathered and 34 MB of logits."""
    most = 0
    gather = lists._chunks

    def measured(*args):
        nonlocal most
        for chunk in gather(*args):
            most = max(most, *(x.untyped_storage().nbytes() for x in (chunk.keys, chunk.values)))
            yield chunk

    monkeypatch.setattr(lists, "_chunks", measured)
    monkeypatch.setattr(lists, "CHUNK_BYTES", 8 << 20)
    q, kv = tensors(512, 300, (4, 1), 576, torch.float32)
    out, _ = latent_sparse_attention(q, kv, random_lists(512, 300, 256), softmax_scale=0.1, impl="reference")
    out.sum().backward()
    assert 1 << 20 < most <= 8 << 20


def test_gradients_of_the_definition_repeat():
    q, kv = tensors(64, 8, (4, 1), 64, torch.float32)
    indices = torch.randint(0, 8, (64, 1, 32), generator=forced.generator(0))
    out, _ = latent_sparse_attention(q, kv, indices, softmax_scale=0.1, dim_v=48, impl="reference")
    first, *others = (torch.autograd.grad(out.sum(), (q, kv), retain_graph=True) for _ in range(4))
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize(("num_rows", "num_keys", "topk"), [(0, 5, 3), (5, 0, 3), (5, 7, 0), (5, 7, 2)])
def test_queries_that_see_nothing_get_zero_or_the_sink(num_rows, num_keys, topk):
    q, kv = tensors(num_rows, num_keys)
    indices = torch.full((num_rows, 1, topk), -1)
    for sink in (None, torch.randn(1, 4, dtype=forced.DTYPE).requires_grad_()):
        out, meta = latent_sparse_attention(
            q, kv, indices, softmax_scale=1.0, dim_v=8, sink=sink, return_max_logits=True
        )
        out.sum().backward()
        assert out.shape == (num_rows, 4, 8) and not out.any() and not q.grad.any() and not kv.grad.any()
        assert_close(meta.lse, torch.full_like(meta.lse, -torch.inf) if sink is None else sink.expand_as(meta.lse))
        assert bool((meta.max_logits == -torch.inf).all())


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("q", {"q": torch.zeros(10, 12)}),
        ("q", {"q": torch.zeros(10, 4, 12, dtype=torch.int64)}),
        ("q", {"kv": torch.zeros(100, 3, 12, dtype=forced.DTYPE)}),
        ("kv", {"kv": torch.zeros(100, 1, 13, dtype=forced.DTYPE)}),
        ("kv", {"kv": torch.zeros(100, 1, 12, dtype=torch.float16)}),
        ("kv", {"kv": torch.zeros(100, 1, 12, dtype=forced.DTYPE, device="meta")}),
        ("kv", {"kv": torch.full((100, 1, 12), torch.nan, dtype=forced.DTYPE), "sanity_check": True}),
        ("kv", {"kv": None}),
        ("indices", {"indices": torch.zeros(9, 1, 2, dtype=torch.int64)}),
        ("indices", {"indices": torch.zeros(10, 2, 2, dtype=torch.int64)}),
        ("indices", {"indices": torch.zeros(10, 1, 2)}),
        ("indices", {"indices": torch.full((10, 1, 2), 100)}),
        ("dim_v", {"dim_v": 13}),
        ("dim_v", {"dim_v": 0}),
        ("dim_v", {"dim_v": 2.5}),
        ("softmax_scale", {"softmax_scale": None}),
        ("softmax_scale", {"softmax_scale": -1.0}),
        ("sink", {"sink": torch.zeros(1, 3)}),
        ("return_max_logits", {"return_max_logits": 2}),
        ("deterministic", {"deterministic": None}),
        ("sanity_check", {"sanity_check": 1}),
        ("impl", {"impl": "fa3"}),
    ],
)
def test_what_is_wrong_is_named(name, changed):
    q, kv = tensors(10, 100)
    indices = torch.zeros(10, 1, 2, dtype=torch.int64)
    arguments = {"q": q, "kv": kv, "indices": indices, "dim_v": 8, "softmax_scale": 1.0, **forced.on_device(changed)}
    arguments.setdefault("sanity_check", forced.looks_at_values())
    with pytest.raises(ValueError, match=rf"^{name}:"):
        latent_sparse_attention(**arguments)


@forced.on_cpu
def test_kernels_for_gpus_are_refused_by_name_on_a_cpu():
    q, kv = tensors(10, 100)
    with pytest.raises(ValueError, match=r"^impl: 'ffa' needs a Hopper GPU"):
        latent_sparse_attention(q, kv, torch.zeros(10, 1, 2, dtype=torch.int64), dim_v=8, softmax_scale=1.0, impl="ffa")


@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_functions_are_one_graph_and_check_where_asked_for():
    def step(q, kv, indices, check=False):
        out, meta = latent_sparse_attention(
            q * 2, kv, indices, softmax_scale=0.5, dim_v=8, return_max_logits=True, sanity_check=check
        )
        return out + 1, meta.lse, meta.max_logits

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    inputs = tensors(10, 100)
    for seed in range(3):
        indices = random_lists(10, 100, 8, seed=seed)
        want, got = step(*inputs, indices), compiled(*inputs, indices)
        for a, b in zip(want, got, strict=True):
            assert_close(a, b)
        for a, b in zip(*(torch.autograd.grad(x[0].square().sum(), inputs) for x in (want, got)), strict=True):
            assert_close(a, b)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    wrong = torch.full((10, 1, 8), 100)  # nobody looks at it before the kernels, as on a GPU
    assert not (compiled(*inputs, wrong)[0] - 1).any()
    with pytest.raises(ValueError, match=r"^indices: expected"):
        compiled(*inputs, wrong, True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_operators_have_the_shapes_and_strides_that_compiled_graphs_expect(dtype):
    q, kv = (t.detach() for t in tensors(10, 100, dtype=dtype))
    entries, sink = torch.randint(-1, 100, (1, 10, 8)), torch.zeros(1, 4)
    forward = (q, kv, sink, entries, 8, True, 0.3, False, False, "auto")
    out, lse, _ = torch.ops.megatron_magi.latent_sparse_attention(*forward)
    backward = (torch.ones_like(out), q, kv, sink, out, lse, entries, 8, 0.3, False, False, "auto")
    like, like_backward = (
        [t.to("meta") if isinstance(t, torch.Tensor) else t for t in call] for call in (forward, backward)
    )
    operators = torch.ops.megatron_magi
    for real, fake in (
        (operators.latent_sparse_attention(*forward), operators.latent_sparse_attention(*like)),
        (
            operators.latent_sparse_attention_backward(*backward),
            operators.latent_sparse_attention_backward(*like_backward),
        ),
    ):
        for a, b in zip(real, fake, strict=True):
            assert a.shape == b.shape and a.dtype == b.dtype and a.stride() == b.stride()


def test_a_gradient_that_is_not_finite_is_named_where_asked_for():
    q, kv = tensors(10, 100)
    indices = torch.zeros(10, 1, 2, dtype=torch.int64)
    out, _ = latent_sparse_attention(q, kv, indices, softmax_scale=1.0, dim_v=8, sanity_check=True)
    with pytest.raises(ValueError, match=r"^dout: row 3 holds inf"):
        out.backward(torch.ones_like(out).index_fill(0, torch.tensor([3]), torch.inf))


@forced.free_choice
def test_auto_is_the_first_kernel_that_takes_the_tensors_and_else_the_definition_which_is_said_once(
    caplog, monkeypatch
):
    from megatron_magi.backends import registry

    registry._warn_latent_once.cache_clear()
    ffa, triton, reference = (registry.LATENT[name] for name in ("ffa", "triton", "reference"))

    def chosen(device="cuda"):
        return registry.choose_latent("auto", torch.device(device), torch.bfloat16, (576, 512))

    monkeypatch.setattr(ffa, "why_not", lambda *_: "no Hopper")
    monkeypatch.setattr(triton, "why_not", lambda *_: "not here")
    with caplog.at_level(logging.WARNING):
        assert chosen() is chosen() is reference
    assert len(caplog.records) == 1
    assert "falls back to the definition, which is slow: no Hopper; not here" in caplog.text
    monkeypatch.setattr(triton, "why_not", lambda *_: None)
    assert chosen() is triton and chosen("cpu") is reference
    monkeypatch.setattr(ffa, "why_not", lambda *_: None)
    assert chosen() is ffa and chosen("cpu") is reference


def test_gradients_of_fp16_are_those_of_the_kernels_in_triton(monkeypatch):
    from megatron_magi.backends import registry

    ffa, triton, device = registry.LATENT["ffa"], registry.LATENT["triton"], torch.device("cpu")
    assert ffa.forward is not triton.forward and ffa.row_delta is triton.row_delta
    monkeypatch.setattr(triton, "backward", lambda *args: ("triton", *args))
    monkeypatch.setattr(ffa._first, "backward", lambda *args: ("ffa", *args))
    inputs, half = (SimpleNamespace(q=torch.empty(0, dtype=dtype)) for dtype in (torch.bfloat16, torch.float16))
    for deterministic in (False, True):
        assert ffa.backward(inputs, "pattern", 0.5, deterministic) == ("ffa", inputs, "pattern", 0.5, deterministic)
        assert ffa.backward(half, "pattern", 0.5, deterministic) == ("triton", half, "pattern", 0.5, deterministic)
    assert "needs a Hopper GPU" in str(ffa.why_not(device, torch.bfloat16, (576, 512)))
