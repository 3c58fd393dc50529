"""Sinks for torch's attention: the attention with a sink in the matrix, forward and backward."""

import math

import pytest
import torch

from megatron_magi.extensions import sdpa_func_with_sink
from megatron_magi.testing.error_budget import assert_within_budget

BATCH, HEADS_Q, HEADS_KV, DIM = 2, 4, 2, 8


def tensors(sq, sk, layout="sh", dim=DIM, dtype=torch.float64, device="cpu", num_sinks=2):
    draw = torch.Generator().manual_seed(0)
    shapes = [(BATCH, HEADS_Q, sq, dim), (BATCH, HEADS_KV, sk, dim), (BATCH, HEADS_KV, sk, dim)]
    shapes.append((num_sinks, HEADS_Q) if layout == "sh" else (BATCH, sq, num_sinks, HEADS_Q))
    made = [torch.randn(s, generator=draw).to(device, dtype) for s in shapes]
    made[3] = made[3].to(torch.promote_types(dtype, torch.float32))
    return [x.requires_grad_() for x in made]


def dense(q, k, v, sink, visible, scale=None):
    """``(out, lse)`` straight from the definition; ``visible`` bool or added to logits."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    logits = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    logits = logits.masked_fill(~visible, -torch.inf) if visible.dtype == torch.bool else logits + visible
    if sink is not None:
        sinks = sink.t()[None, :, None] if sink.ndim == 2 else sink.permute(0, 3, 1, 2)
        logits = torch.cat([logits, sinks.to(logits.dtype).expand(*logits.shape[:3], -1)], dim=-1)
    lse = logits.logsumexp(-1)
    p = torch.exp(logits - lse.masked_fill(lse == -torch.inf, 0)[..., None])[..., : k.shape[2]]
    return p.to(v.dtype) @ v, lse


def grads(out, inputs):
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return torch.autograd.grad((out * weights.to(out)).sum(), inputs)


def assert_equal(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def masks(sq, sk):
    draw = torch.Generator().manual_seed(2)
    seen = torch.rand(BATCH, 1, sq, sk, generator=draw) < 0.6
    seen[:, :, 1] = False
    added = torch.randn(HEADS_Q, sq, sk, generator=draw, dtype=torch.float64).masked_fill(~seen[0, 0], -torch.inf)
    return {"bool": seen, "added": added}


@pytest.mark.parametrize("layout", ["sh", "ssh"])
@pytest.mark.parametrize("kind", ["full", "causal", "bool", "added"])
def test_it_is_attention_with_the_sink_in_its_matrix(layout, kind):
    sq, sk = 6, 9
    inputs = tensors(sq, sk, layout)
    options = {"full": {}, "causal": {"is_causal": True}}.get(kind) or {"attn_mask": masks(sq, sk).get(kind)}
    visible = {"full": torch.ones(sq, sk, dtype=torch.bool), "causal": torch.ones(sq, sk, dtype=torch.bool).tril()}
    visible.update(masks(sq, sk))
    out, lse = sdpa_func_with_sink(*inputs, layout, scale=0.4, enable_gqa=True, return_lse=True, **options)
    want = dense(*inputs, visible[kind], 0.4)
    assert not lse.requires_grad
    assert_equal([out, lse], want)
    assert_equal(grads(out, inputs), grads(want[0], inputs))


@pytest.mark.parametrize("head_dim_v", [DIM - 3, DIM + 4])
def test_values_may_have_a_head_dim_of_their_own(head_dim_v):
    q, k, _, sink = tensors(6, 9)
    v = torch.randn(BATCH, HEADS_KV, 9, head_dim_v, dtype=torch.float64, requires_grad=True)
    out, lse = sdpa_func_with_sink(q, k, v, sink, enable_gqa=True, return_lse=True)
    want = dense(q, k, v, sink, torch.ones(6, 9, dtype=torch.bool))
    assert_equal([out, lse], want)
    assert_equal(grads(out, [q, k, v, sink]), grads(want[0], [q, k, v, sink]))


@pytest.mark.parametrize("layout", ["sh", "ssh"])
def test_gradients_are_those_of_small_differences(layout):
    inputs = tensors(4, 5, layout)
    mask = masks(4, 5)["bool"]

    def attend(q, k, v, sink):
        return sdpa_func_with_sink(q, k, v, sink, layout, attn_mask=mask, enable_gqa=True)

    assert torch.autograd.gradcheck(attend, inputs)


def test_without_sink_it_is_torch_own():
    q, k, v, _ = tensors(5, 5)
    out, lse = sdpa_func_with_sink(q, k, v, attn_mask=masks(5, 5)["bool"], enable_gqa=True, return_lse=True)
    want = dense(q, k, v, None, masks(5, 5)["bool"])
    assert_equal([out, lse], want)
    assert (lse[:, :, 1] == -torch.inf).all()
    assert_equal(grads(out, [q, k, v]), grads(want[0], [q, k, v]))


@pytest.mark.parametrize("kind", ["bool", "added"])
def test_a_mask_that_is_changed_before_the_backward_is_an_error_or_was_copied(kind):
    inputs, mask = tensors(6, 9), masks(6, 9)[kind]
    want = grads(sdpa_func_with_sink(*inputs, attn_mask=mask.clone(), enable_gqa=True), inputs)
    out = sdpa_func_with_sink(*inputs, attn_mask=mask, enable_gqa=True)
    mask.zero_()
    if kind == "bool":  # torch's kernels add it
        assert_equal(grads(out, inputs), want)
        return
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        grads(out, inputs)


def test_arguments_are_checked():
    q, k, v, sink = tensors(5, 5)
    mask = torch.zeros(5, 5, dtype=torch.float64)
    for call, message in (
        (lambda: sdpa_func_with_sink(q, k, v, sink, attn_mask=mask, is_causal=True), "attn_mask: not together"),
        (lambda: sdpa_func_with_sink(q, k, v, sink, attn_mask=mask.requires_grad_()), "attn_mask: not together"),
        (lambda: sdpa_func_with_sink(q, k, v, sink, "ssh", enable_gqa=True), "sink: expected shape"),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            call()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["full", "causal", "longer", "bool", "wide"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_kernels_for_cuda_are_as_exact_as_plain_torch(dtype, kind):
    sq, sk, dim = 130, 203 if kind == "longer" else 130, 100 if kind == "wide" else 64
    inputs = tensors(sq, sk, dim=dim, dtype=dtype, device="cuda")
    visible = torch.ones(sq, sk, dtype=torch.bool, device="cuda")
    visible = visible.tril() if kind in ("causal", "longer") else visible
    options = {"is_causal": kind in ("causal", "longer")}
    if kind == "bool":
        visible = options["attn_mask"] = masks(sq, sk)["bool"].cuda()
        options["is_causal"] = False
    out, lse = sdpa_func_with_sink(*inputs, enable_gqa=True, return_lse=True, **options)
    exact_inputs = [x.detach().double().requires_grad_() for x in inputs]
    exact, exact_lse = dense(*exact_inputs, visible)
    plain, plain_lse = dense(*inputs, visible)
    assert_within_budget("out", out, plain, exact)
    assert_within_budget("lse", lse, plain_lse.to(lse.dtype), exact_lse)
    of = zip("qkvs", grads(out, inputs), grads(plain, inputs), grads(exact, exact_inputs), strict=True)
    for name, ours, reference, true in of:
        assert_within_budget(f"d{name}", ours, reference, true, elementwise=name != "s")


@pytest.mark.parametrize("sink", [[[0.0] * HEADS_Q], torch.zeros(1, HEADS_Q, dtype=torch.int64), torch.zeros(1, 3)])
def test_sinks_that_are_no_floats_of_the_right_shape_are_named(sink):
    q, k, v, _ = tensors(5, 7)
    with pytest.raises(ValueError, match=r"^sink:"):
        sdpa_func_with_sink(q, k, v, sink, enable_gqa=True)


def test_a_sink_elsewhere_is_named():
    q, k, v, sink = tensors(5, 7)
    with pytest.raises(ValueError, match=r"^sink: .* got torch.float64 on meta"):
        sdpa_func_with_sink(q, k, v, sink.to("meta"), enable_gqa=True)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((1, 2, 4, 8), (1, 3, 4, 8), (1, 3, 4, 8)), r"k: expected \[1, 2, 4, 8\], got \[1, 3, 4, 8\]"),
        (((1, 2, 4, 8), (2, 2, 4, 8), (2, 2, 4, 8)), "k: expected"),
        (((1, 2, 4, 8), (1, 2, 4, 7), (1, 2, 4, 8)), "k: expected"),
        (((1, 2, 4, 8), (1, 2, 4, 8), (1, 2, 5, 8)), "v: expected the batch, heads and tokens of k"),
        (((2, 4, 8), (2, 4, 8), (2, 4, 8)), r"q: expected \[batch_size"),
        (((1, 2, 4, 8), (2, 4, 8), (1, 2, 4, 8)), "k: expected 4 dimensions"),
    ],
)
def test_shapes_that_do_not_fit_are_named_before_torchs_kernels_see_them(shapes, message):
    """The kernel for CPUs divides by numbers of heads, and would end the process."""
    for enable_gqa in (False, True):
        with pytest.raises(ValueError, match=f"^{message}"):
            sdpa_func_with_sink(*map(torch.zeros, shapes), enable_gqa=enable_gqa)


def test_tensors_and_masks_that_are_none_are_named():
    x = torch.zeros(1, 2, 4, 8)
    for call, message in (
        (lambda: sdpa_func_with_sink(None, x, x), "q: expected a tensor, got NoneType"),
        (lambda: sdpa_func_with_sink(x, x.half(), x), "k: expected 4 dimensions, torch.float32 on cpu"),
        (
            lambda: sdpa_func_with_sink(x, x, x, attn_mask=torch.zeros(3, 3)),
            r"attn_mask: .* \[1, 2, 4, 4\], got \[3, 3\]",
        ),
        (lambda: sdpa_func_with_sink(x, x, x, attn_mask=[[1]]), "attn_mask: expected a tensor"),
        (
            lambda: sdpa_func_with_sink(x, x, x, attn_mask=torch.ones(4, 4).long()),
            "attn_mask: expected bool, or floats",
        ),
        (lambda: sdpa_func_with_sink(x, x, x, is_causal=1), "is_causal: expected True or False"),
        (lambda: sdpa_func_with_sink(x, x, x, enable_gqa="no"), "enable_gqa: expected True or False"),
        (lambda: sdpa_func_with_sink(x, x, x, return_lse="no"), "return_lse: expected True or False"),
        (lambda: sdpa_func_with_sink(x, x, x, scale=True), "scale: expected a number"),
        (lambda: sdpa_func_with_sink(x, x, x, scale=float("nan")), "scale: expected a finite number"),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            call()


EMPTY = {"no queries": (BATCH, 0, 7), "no keys": (BATCH, 5, 0), "no tokens": (BATCH, 0, 0), "no batch": (0, 5, 7)}
DEVICES = [("cpu", torch.float64), *(pytest.param("cuda", t, marks=pytest.mark.gpu) for t in (torch.half, torch.float))]


@pytest.mark.parametrize("device, dtype", DEVICES)
@pytest.mark.parametrize("kind", ["full", "causal", "bool"])
@pytest.mark.parametrize("layout", ["sh", "ssh"])
@pytest.mark.parametrize("case", EMPTY)
def test_without_queries_keys_or_batch_it_is_what_torch_computes(case, layout, kind, device, dtype):
    batch, sq, sk = EMPTY[case]
    inputs = [x.detach()[:batch] for x in tensors(sq, sk, "sh", device=device, dtype=dtype)[:3]]
    sinks = (2, HEADS_Q) if layout == "sh" else (batch, sq, 2, HEADS_Q)
    inputs = [x.requires_grad_() for x in (*inputs, torch.ones(sinks, device=device))]
    options = {"full": {}, "causal": {"is_causal": True}}.get(kind)
    if options is None:
        options = {"attn_mask": torch.ones(sq, sk, dtype=torch.bool, device=device)}
    out, lse = sdpa_func_with_sink(*inputs, layout, enable_gqa=True, return_lse=True, **options)
    right = torch.nn.functional.scaled_dot_product_attention(*inputs[:3], enable_gqa=True, **options)
    if right is None:  # of torch's fused kernels without a batch
        right = torch.zeros_like(inputs[0])
    assert torch.equal(out, right) and out.dtype == right.dtype
    assert lse.shape == out.shape[:3]
    torch.testing.assert_close(lse, torch.full_like(lse, 1 + math.log(2)))
    plain, plain_lse = sdpa_func_with_sink(*inputs[:3], enable_gqa=True, return_lse=True, **options)
    assert torch.equal(plain, right) and bool((plain_lse == -torch.inf).all())
    for x, grad in zip(inputs, torch.autograd.grad(out.sum(), inputs), strict=True):
        assert grad.shape == x.shape and not grad.any()


@pytest.mark.parametrize("place, shape", [(0, (2, 0, 5, 8)), (1, (2, 0, 5, 8)), (2, (2, 2, 5, 0)), (0, (2, 2, 5, 0))])
@pytest.mark.parametrize("enable_gqa", [False, True])
def test_no_heads_and_no_head_dim_are_refused(place, shape, enable_gqa):
    qkv = [torch.zeros(2, 2, 5, 8) for _ in "qkv"]
    qkv[place] = torch.zeros(shape)
    with pytest.raises(ValueError, match=f"^{'qkv'[place]}: heads and head_dim must be positive"):
        sdpa_func_with_sink(*qkv, enable_gqa=enable_gqa)
