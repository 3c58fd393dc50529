"""Sparse attention as a function: its meaning against dense attention, gradients, arguments, compiled functions."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_magi.backends.registry import SPARSE
from megatron_magi.ops.sparse_attention import block_sparse_attention, index_sparse_attention
from tests import forced
from tests.backends.sm90.sparse_cases import csr_of_mask, lists_with_gaps, random_mask


def tensors(num_rows, num_keys, heads=(4, 2), dim=8, seed=0):
    gen = forced.generator(seed)
    shapes = [(num_rows, heads[0], dim), (num_keys, heads[1], dim), (num_keys, heads[1], dim)]
    return [torch.randn(shape, generator=gen, dtype=forced.DTYPE).requires_grad_() for shape in shapes]


def dense_attention(q, k, v, visible, sink=None, softmax_scale=None):
    """``(out, lse)`` in fp64 of a mask ``[num_heads_kv or 1, num_rows, num_keys]``, head by head."""
    q, k, v, sink = (x if x is None else x.double() for x in (q, k, v, sink))
    outs, lses = [], []
    for head in range(q.shape[1]):
        head_kv = head // (q.shape[1] // k.shape[1])
        logits = q[:, head] @ k[:, head_kv].t() * (q.shape[2] ** -0.5 if softmax_scale is None else softmax_scale)
        logits = logits.masked_fill(~visible[head_kv if len(visible) > 1 else 0], -torch.inf)
        if sink is not None:
            logits = torch.cat([logits, sink[:, head].expand(len(q), -1)], 1)
        seen = (logits > -torch.inf).any(1)
        p = torch.softmax(logits[seen], 1)[:, : len(k)]
        outs.append(q.new_zeros(q.shape[0], v.shape[2]).index_put((seen,), p @ v[:, head_kv]))
        lses.append(logits.logsumexp(1))
    return torch.stack(outs, 1), torch.stack(lses, 1)


def expanded(mask, q_block, k_block, num_rows, num_keys, causal):
    row, key = torch.arange(num_rows), torch.arange(num_keys)
    visible = mask[:, row // q_block][:, :, key // k_block]
    return visible & (key <= row[:, None] + num_keys - num_rows) if causal else visible


def assert_close(got, want):
    most = forced.tolerance(1e-7)
    torch.testing.assert_close(got.double(), want.double(), rtol=most, atol=most)


def assert_same(got, want, inputs):
    assert_close(got[0], want[0])
    assert_close(got[1].lse, want[1])
    weights = torch.linspace(-1, 1, got[0].numel(), dtype=torch.float64).view(got[0].shape)
    for a, b in zip(*(torch.autograd.grad((x[0] * weights).sum(), inputs) for x in (got, want)), strict=True):
        assert_close(a, b)


sizes = st.tuples(st.integers(1, 40), st.integers(1, 200))


@settings(**forced.examples(40))
@given(
    sizes, st.integers(1, 20), st.sampled_from([64, 128]), st.sampled_from([(4, 2), (3, 1), (2, 2)]),
    st.booleans(), st.booleans(), st.booleans(), st.sampled_from(["mask", "csr", "lists"]), st.integers(0, 999),
    st.sampled_from([None, 0.8]),
)  # fmt: skip
def test_block_sparse_attention_is_dense_attention_of_the_expanded_mask(
    shape, q_block, k_block, heads, causal, per_head, has_sink, form, seed, scale
):
    num_rows, num_keys = shape
    gen = forced.generator(seed)
    mask = random_mask(gen, heads[1] if per_head else 1, num_rows, num_keys, q_block, k_block)
    blocks = {"mask": lambda: mask, "csr": lambda: csr_of_mask(mask), "lists": lambda: lists_with_gaps(mask, gen)}[
        form
    ]()
    inputs = tensors(num_rows, num_keys, heads, seed=seed)
    sink = torch.randn(2, heads[0], dtype=forced.DTYPE, generator=gen).requires_grad_() if has_sink else None
    options = {"q_block_size": q_block, "k_block_size": k_block, "causal": causal, "sink": sink}
    got = block_sparse_attention(*inputs, blocks, **options, softmax_scale=scale)
    visible = expanded(mask, q_block, k_block, num_rows, num_keys, causal)
    if bool(visible.any()):
        assert_same(got, dense_attention(*inputs, visible, sink, scale), [*inputs, *([sink] if has_sink else [])])


@settings(**forced.examples(25))
@given(sizes, st.integers(1, 30), st.sampled_from([(4, 2), (3, 1)]), st.booleans(), st.integers(0, 999))
def test_index_sparse_attention_is_dense_attention_of_the_listed_keys(shape, topk, heads, per_head, seed):
    num_rows, num_keys = shape
    gen = forced.generator(seed)
    lists = heads[1] if per_head else 1
    indices = torch.rand(num_rows, lists, num_keys, generator=gen).argsort(-1)[..., :topk]
    indices = indices.masked_fill(torch.rand(indices.shape, generator=gen) < 0.3, -1)
    inputs = tensors(num_rows, num_keys, heads, seed=seed)
    got = index_sparse_attention(*inputs, indices.to(torch.int32), softmax_scale=0.8)
    visible = torch.zeros(lists, num_rows, num_keys + 1, dtype=torch.bool)
    visible.scatter_(2, indices.transpose(0, 1).where(indices.transpose(0, 1) >= 0, num_keys), True)
    if bool(visible[..., :-1].any()):
        assert_same(got, dense_attention(*inputs, visible[..., :-1], softmax_scale=0.8), inputs)


def test_offsets_may_begin_and_end_inside_the_entries():
    """As those of some of the rows do."""
    q, k, v = tensors(12, 200)
    mask = torch.rand(2, 3, 4, generator=forced.generator(3)) < 0.6
    offsets, entries = csr_of_mask(mask)
    sizes = {"q_block_size": 4, "k_block_size": 64}
    part = block_sparse_attention(q[4:8], k, v, (offsets[:, 1:3], entries), **sizes)
    wanted = block_sparse_attention(q[4:8], k, v, mask[:, 1:2], **sizes)
    assert int(offsets[0, 1]) > 0 and int(offsets[1, 2]) < len(entries)
    assert_same(part, (wanted[0], wanted[1].lse), [q, k, v])


@pytest.mark.parametrize("sanity_check", [False, True])
def test_entries_that_are_in_no_list_may_be_anything(sanity_check):
    """As in a buffer that is not full."""
    q, k, v = tensors(12, 200)
    mask = torch.rand(2, 3, 4, generator=forced.generator(3)) < 0.6
    offsets, entries = csr_of_mask(mask)
    garbage = torch.tensor([77, -9], dtype=entries.dtype)
    sizes = {"q_block_size": 4, "k_block_size": 64, "sanity_check": sanity_check}
    found = block_sparse_attention(q, k, v, (offsets + 2, torch.cat([garbage, entries, garbage])), **sizes)
    wanted = block_sparse_attention(q, k, v, (offsets, entries), **sizes)
    assert_same(found, (wanted[0], wanted[1].lse), [q, k, v])


def test_a_key_that_is_listed_twice_counts_twice():
    q, k, v = tensors(3, 5)
    twice = torch.tensor([[[1, 1, 4]]] * 3)
    out, meta = index_sparse_attention(q, k, v, twice)
    wanted, wanted_lse = dense_attention(q, *(x[[1, 1, 4]] for x in (k, v)), torch.ones(1, 3, 3, dtype=torch.bool))
    assert_same((out, meta), (wanted, wanted_lse), [q, k, v])


def test_keys_with_one_large_logit_share_the_weight_of_their_row():
    """Though the lse has no digits for their number; one that is listed twice has twice as much."""
    q, k = (torch.full((num_tokens, 1, 8), 1e3) for num_tokens in (2, 128))
    v = torch.randn(128, 1, 8, generator=forced.generator(0))
    out, _ = index_sparse_attention(q, k, v, torch.tensor([[[5, 0, 5]]] * 2), softmax_scale=1 / 8)
    torch.testing.assert_close(out, v[[5, 0, 5]].mean(0).expand(2, 1, 8))
    lists = torch.tensor([[1, 0, 1]])
    out, _ = block_sparse_attention(q, k, v, lists, q_block_size=2, k_block_size=64, softmax_scale=1 / 8)
    torch.testing.assert_close(out, v.view(2, 64, 1, 8)[[1, 0, 1]].flatten(0, 1).mean(0).expand(2, 1, 8))


def test_rows_that_see_nothing_are_zero_and_largest_logits_are_of_what_is_seen():
    q, k, v = tensors(6, 128)
    mask = torch.zeros(2, 2, 2, dtype=torch.bool)
    mask[1, 0, 1] = True
    out, meta = block_sparse_attention(q, k, v, mask, q_block_size=3, k_block_size=64, return_max_logits=True)
    assert bool((out[3:] == 0).all()) and bool((out[:, :2] == 0).all()) and bool((meta.lse[3:] == -torch.inf).all())
    logits = torch.einsum("qhd,kd->hqk", q[:3, 2:], k[64:128, 1]) / 8**0.5
    assert_close(meta.max_logits[2:], logits.amax((1, 2)).detach())
    assert bool((meta.max_logits[:2] == -torch.inf).all())


@pytest.mark.parametrize("shape", [(0, 10), (10, 0)])
def test_no_queries_or_no_keys_are_no_mistake(shape):
    q, k, v = tensors(*shape)
    mask = torch.zeros(-(-shape[0] // 4), -(-shape[1] // 64), dtype=torch.bool)
    out, meta = block_sparse_attention(q, k, v, mask, q_block_size=4, k_block_size=64)
    assert out.shape == q.shape and bool((out == 0).all()) and bool((meta.lse == -torch.inf).all())


@forced.on_cpu
@pytest.mark.parametrize("sinks", [0, 2])
@pytest.mark.parametrize("shape", [(0, 10), (10, 0), (0, 0)])
@pytest.mark.parametrize("impl", [name for name in SPARSE if name != "reference"])
def test_kernels_are_not_called_for_no_queries_or_no_keys(monkeypatch, impl, shape, sinks):
    """The definition computes these."""
    q, k, v = (t.detach().float().requires_grad_() for t in tensors(*shape, dim=64))
    mask = torch.zeros(-(-shape[0] // 4), -(-shape[1] // 64), dtype=torch.bool)
    sink = torch.randn(sinks, 4, requires_grad=True) if sinks else None
    sizes = {"q_block_size": 4, "k_block_size": 64, "sink": sink, "impl": impl}
    monkeypatch.setattr(SPARSE[impl], "why_not", lambda *_: None)
    for name in ("forward", "backward"):
        monkeypatch.setattr(SPARSE[impl], name, lambda *_: pytest.fail("called"))
    out, meta = block_sparse_attention(q, k, v, mask, return_max_logits=True, **sizes)
    assert out.shape == q.shape and not out.any() and bool((meta.max_logits == -torch.inf).all())
    expected = torch.full((4,), -torch.inf) if sink is None else sink.detach().logsumexp(0)
    torch.testing.assert_close(meta.lse, expected.expand(shape[0], 4))
    leaves = [q, k, v, *([] if sink is None else [sink])]
    assert not any(grad.any() for grad in torch.autograd.grad(out.sum(), leaves))


MASK = torch.ones(3, 2, dtype=torch.bool)


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("blocks", {"blocks": MASK[:2]}),
        ("blocks", {"blocks": MASK[:, :1]}),
        ("blocks", {"blocks": MASK.float()}),
        ("blocks", {"blocks": MASK.expand(3, 3, 2)}),
        ("blocks", {"blocks": [[0]]}),
        ("blocks", {"blocks": torch.tensor([[0], [1], [2]])}),
        ("blocks", {"blocks": (torch.tensor([0, 1, 2]), torch.tensor([0, 1]))}),
        ("blocks", {"blocks": (torch.tensor([0, 2, 1, 2]), torch.tensor([0, 1]))}),
        ("blocks", {"blocks": (torch.tensor([0, 1, 2, 3]), torch.tensor([0, 1]))}),
        ("blocks", {"blocks": (torch.tensor([-1, 1, 2, 2]), torch.tensor([0, 1]))}),
        ("blocks", {"blocks": (torch.tensor([0, 1, 2, 2]), torch.tensor([0.0, 1.0]))}),
        ("blocks", {"blocks": (torch.tensor([[0, 1, 2, 2]] * 4), torch.tensor([0, 1]))}),
        ("blocks", {"blocks": (torch.tensor([0, 1, 2, 2]), torch.tensor([[0, 1]]))}),
        ("blocks", {"blocks": (torch.tensor([0, 1, 2, 2], device="meta"), torch.tensor([0, 1]))}),
        ("blocks", {"blocks": (torch.tensor([0, 1, 2, 2]), torch.tensor([0, 1], device="meta"))}),
        ("blocks", {"blocks": MASK.to("meta")}),
        ("q_block_size", {"q_block_size": 0}),
        ("q_block_size", {"q_block_size": 129}),
        ("k_block_size", {"k_block_size": 32}),
        ("k_block_size", {"k_block_size": torch.tensor([64, 128])}),
        ("causal", {"causal": 1}),
        ("sink", {"sink": torch.zeros(1, 3)}),
        ("softmax_scale", {"softmax_scale": -1.0}),
        ("return_max_logits", {"return_max_logits": 2}),
        ("deterministic", {"deterministic": None}),
        ("sanity_check", {"sanity_check": 1}),
        ("k", {"k": torch.full((100, 2, 8), torch.nan, dtype=forced.DTYPE), "sanity_check": True}),
        ("impl", {"impl": "fa3"}),
        ("q", {"q": torch.zeros(10, 4)}),
    ],
)
def test_what_is_wrong_is_named(name, changed):
    q, k, v = tensors(10, 100)
    arguments = {"q": q, "k": k, "v": v, "blocks": MASK, "q_block_size": 4, "k_block_size": 64, **changed}
    arguments.setdefault("sanity_check", forced.looks_at_values())
    with pytest.raises(ValueError, match=rf"^{name}:"):
        block_sparse_attention(**forced.on_device(arguments))


@forced.on_cpu
@pytest.mark.parametrize("shape", [(10, 100), (0, 100), (10, 0)])
@pytest.mark.parametrize("impl", [name for name in SPARSE if name != "reference"])
def test_kernels_for_gpus_are_refused_by_name_on_a_cpu(impl, shape):
    """Also where there is nothing that they would compute."""
    if impl == "triton" and forced.is_interpreted():
        pytest.skip("kernels in Triton are interpreted")
    mask = MASK[: -(-shape[0] // 4), : -(-shape[1] // 64)]
    with pytest.raises(ValueError, match=r"^(impl|q): .*'(ffa|triton)'.* on cpu; use"):
        block_sparse_attention(*tensors(*shape), mask, q_block_size=4, k_block_size=64, impl=impl)


@pytest.mark.parametrize(
    "indices",
    [
        torch.zeros(10, 3, 2, dtype=torch.int64),
        torch.zeros(9, 2, 2, dtype=torch.int64),
        torch.zeros(10, 2, dtype=torch.int64),
        torch.zeros(10, 2, 2),
        torch.full((10, 2, 2), 100),
        torch.zeros(10, 2, 2, dtype=torch.int64, device="meta"),
        None,
    ],
)
def test_indices_that_are_wrong_are_named(indices):
    with pytest.raises(ValueError, match=r"^indices:"):
        index_sparse_attention(
            *tensors(10, 100), forced.on_device(indices), sanity_check=forced.looks_at_values()
        )  # fmt: skip


@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_functions_are_one_graph_for_all_patterns():
    def step(q, k, v, mask, indices):
        out, meta = block_sparse_attention(q * 2, k, v, mask, q_block_size=4, k_block_size=64, return_max_logits=True)
        other, _ = index_sparse_attention(out, k, v, indices)
        return other + 1, meta.lse, meta.max_logits

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    inputs = tensors(10, 100)
    gen = forced.generator(0)
    for _ in range(3):
        mask = torch.rand(3, 2, generator=gen) < 0.7
        indices = torch.randint(-1, 100, (10, 1, 8), generator=gen)
        want, got = step(*inputs, mask, indices), compiled(*inputs, mask, indices)
        for a, b in zip(want, got, strict=True):
            assert_close(a, b)
        for a, b in zip(*(torch.autograd.grad(x[0].square().sum(), inputs) for x in (want, got)), strict=True):
            assert_close(a, b)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_operators_have_the_shapes_and_strides_that_compiled_graphs_expect(dtype):
    q, k, v = (t.detach().to(dtype).requires_grad_() for t in tensors(10, 100))
    v = torch.cat([v, v], 2)  # a head dim of its own
    indices = torch.randint(-1, 100, (1, 10, 8))
    pattern = [indices], 1, 1, False
    sink = torch.zeros(1, 4)
    forward = (q, k, v, sink, *pattern, True, 0.3, False, False, "auto")
    out, lse, _ = torch.ops.megatron_magi.sparse_attention(*forward)
    assert out.shape == (10, 4, 16)
    backward = (torch.ones_like(out), q, k, v, sink, out, lse, *pattern, 0.3, False, False, "auto")
    with torch.device("meta"):
        like = [t.detach().to("meta") if isinstance(t, torch.Tensor) else t for t in forward]
        like[4] = [indices.to("meta")]
        like_backward = [t.detach().to("meta") if isinstance(t, torch.Tensor) else t for t in backward]
        like_backward[7] = [indices.to("meta")]
    operators = torch.ops.megatron_magi
    for real, fake in (
        (operators.sparse_attention(*forward), operators.sparse_attention(*like)),
        (operators.sparse_attention_backward(*backward), operators.sparse_attention_backward(*like_backward)),
    ):
        for a, b in zip(real, fake, strict=True):
            assert a.shape == b.shape and a.dtype == b.dtype and a.stride() == b.stride()


@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_functions_refuse_scales_too():
    q, k, v = tensors(10, 100)
    compiled = torch.compile(
        lambda q, indices: index_sparse_attention(q, k, v, indices, softmax_scale=-1.0)[0], backend="aot_eager"
    )
    with pytest.raises(ValueError, match=r"^softmax_scale:"):
        compiled(q, torch.zeros(10, 1, 2, dtype=torch.int64))


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(
    ("name", "blocks"),
    [
        ("indices", torch.full((10, 1, 2), 100)),
        ("blocks", torch.tensor([[0], [1], [2]])),
        ("blocks", (torch.tensor([0, 2, 1, 2]), torch.tensor([0, 1]))),
    ],
)
def test_lists_that_nobody_reads_before_the_kernels_are_checked_where_asked_for(name, blocks):
    """As on a GPU: compiled functions do not look at what lists hold."""
    (q, k, v), blocks = tensors(10, 100), forced.on_device(blocks)

    def attend(check):
        if name == "indices":
            return index_sparse_attention(q, k, v, blocks, sanity_check=check)[0]
        return block_sparse_attention(q, k, v, blocks, q_block_size=4, k_block_size=64, sanity_check=check)[0]

    compiled = torch.compile(attend, backend="aot_eager")
    assert bool(compiled(False).isfinite().all())
    with pytest.raises(ValueError, match=rf"^{name}: expected"):
        compiled(True)


def test_a_gradient_that_is_not_finite_is_named_where_asked_for():
    q, k, v = tensors(10, 100)
    out, _ = index_sparse_attention(q, k, v, torch.zeros(10, 1, 2, dtype=torch.int64), sanity_check=True)
    with pytest.raises(ValueError, match=r"^dout: row 3 holds inf"):
        out.backward(torch.ones_like(out).index_fill(0, torch.tensor([3]), torch.inf))


def test_a_key_that_no_query_lists_does_not_matter_where_a_list_has_gaps():
    """Key 0 has no finite element, and neither has a query that lists nothing."""
    found = []
    for value in (0.0, torch.nan):
        q, k, v = (x.detach().clone() for x in tensors(5, 30))
        indices = torch.tensor([3, -1, 7, -1]).repeat(5, 2, 1)
        indices[2] = -1
        q[2], k[0], v[0] = value, value, value
        leaves = [x.requires_grad_() for x in (q, k, v)]
        out, _ = index_sparse_attention(*leaves, indices)
        found.append([out, *torch.autograd.grad(out.sum(), leaves)])
    for without, with_nan in zip(*found, strict=True):
        assert torch.equal(without, with_nan)
