import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_magi.backends.blocked import attention as blocked
from megatron_magi.backends.blocked.block_plan import BlockLimits, make_block_plan
from megatron_magi.mask import AttnMask, MaskType, builders
from megatron_magi.mask import bands as bd
from megatron_magi.ops.slice_attention import slice_attention
from megatron_magi.ops.slice_passes import row_delta, slice_attention_backward, slice_attention_forward
from megatron_magi.testing.error_budget import assert_within_budget
from tests import forced
from tests.ops.naive import Case, assert_close, masks, packed_causal

IMPLS = forced.impls("reference", "torch")
TINY = BlockLimits(call_cost=40, min_rows=3, max_rows=5, max_logits=60)
"""Limits that make many blocks and chunks of a few dozen tokens."""


@pytest.fixture
def tiny_blocks(monkeypatch):
    with_tiny_blocks(monkeypatch)


def with_tiny_blocks(monkeypatch):
    monkeypatch.setattr("megatron_magi.backends.blocked.block_plan.MIN_CHUNK", 4)
    monkeypatch.setattr(blocked, "block_plan", lambda bands, heads, device: make_block_plan(bands, heads, device, TINY))


def only_keys(bands, first, last):
    """The part of a table of bands that is in the keys ``[first, last)``."""
    bands = bands.copy()
    bands[:, bd.K0] = np.clip(bands[:, bd.K0], first, last)
    bands[:, bd.K1] = np.clip(bands[:, bd.K1], first, last)
    return bands


def attend(case, impl):
    def call(q, k, v, sink):
        options = {"softmax_scale": case.softmax_scale, "softcap": case.softcap}
        out, meta = slice_attention(q, k, v, case.mask, sink=sink, **options, return_max_logits=True, impl=impl)
        return out, meta.lse, meta.max_logits

    return call


def check_implementations_in_torch(case):
    """Also with blocks of a few tokens; returns the results of the naive formula."""
    expected = case.expected()
    for impl in IMPLS:
        assert_close(case.run(attend(case, impl)), expected)
    if "torch" in IMPLS:
        with pytest.MonkeyPatch.context() as monkeypatch:
            with_tiny_blocks(monkeypatch)
            assert_close(case.run(attend(case, "torch")), expected)
    return expected


@settings(max_examples=80)
@given(
    mask=masks(),
    heads=st.sampled_from([(1, 1), (2, 1), (1, 3), (2, 2)]),
    head_dim_v=st.sampled_from([3, 4]),
    softcap=st.sampled_from([0.0, 1.5]),
    sink=st.sampled_from([None, "sh", "ssh"]),
    seed=st.integers(0, 99),
    scale=st.sampled_from([None, 0.8]),
)
def test_every_implementation_equals_the_naive_formula_in_fp64(mask, heads, head_dim_v, softcap, sink, seed, scale):
    check_implementations_in_torch(
        Case(mask, *heads, head_dim_v=head_dim_v, softcap=softcap, sink=sink, seed=seed, softmax_scale=scale)
    )


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("sink", ["sh", "ssh"])
@pytest.mark.skipif(torch.float64 != forced.DTYPE, reason="finite differences need fp64")
def test_gradients_pass_gradcheck(impl, sink, tiny_blocks):
    mask = AttnMask([(0, 5, 0, 4, MaskType.CAUSAL), (3, 7, 5, 8, MaskType.FULL), (5, 7, 0, 3, 2)], 8, 9)
    case = Case(mask, 1, 2, head_dim=3, head_dim_v=2, softcap=2.0, sink=sink)
    torch.autograd.gradcheck(lambda *leaves: attend(case, impl)(*leaves)[0], case.leaves())


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_keys_given_in_parts_add_up_to_one_pass(impl, softcap, tiny_blocks):
    case = Case(packed_causal([7, 1, 19, 5]), 2, 2, softcap=softcap, sink="sh", softmax_scale=0.8)
    whole = case.expected()
    parts = [only_keys(case.mask.bands, first, last) for first, last in ((0, 6), (6, 17), (17, 32))]
    out = lse = dq = dk = dv = None
    for i, bands in enumerate(parts):
        out, lse, _ = slice_attention_forward(
            case.q, case.k, case.v, bands,
            softmax_scale=0.8, softcap=softcap, sink=case.sinks if i == 1 else None, out=out, lse=lse, impl=impl,
        )  # fmt: skip
    delta = row_delta(case.dout, out)
    for bands in parts:
        dq, dk, dv = slice_attention_backward(
            case.dout, case.q, case.k, case.v, lse, delta, bands,
            softmax_scale=0.8, softcap=softcap, dq=dq, dk=dk, dv=dv, impl=impl,
        )  # fmt: skip
    result = {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}
    assert_close(result, {name: whole[name] for name in result})


@pytest.mark.parametrize("impl", IMPLS)
def test_results_go_into_the_tensors_that_are_given(impl):
    case = Case(packed_causal([5, 9]), 1, 2)
    out, lse = torch.zeros(14, 2, 4), torch.full((14, 2), -torch.inf)
    given = slice_attention_forward(case.q, case.k, case.v, case.mask.bands, out=out, lse=lse, impl=impl)
    assert given[0] is out and given[1] is lse and out.abs().sum() > 0
    dk = torch.ones(14, 1, 4)
    dq, same, dv = slice_attention_backward(
        case.dout, case.q, case.k, case.v, lse, row_delta(case.dout, out), case.mask.bands, dk=dk, impl=impl
    )
    assert same is dk and dq.dtype == dv.dtype == forced.DTYPE
    expected = case.expected()
    torch.testing.assert_close(dk, (expected["dk"] + 1).float())
    torch.testing.assert_close(dv, expected["dv"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("given", ["dq", "dk", "dv"])
def test_one_gradient_may_be_added_to_while_the_others_are_new(impl, given):
    case = Case(packed_causal([5, 9]), 1, 2)
    expected = case.expected()
    start = torch.ones_like({"dq": case.q, "dk": case.k, "dv": case.v}[given])
    torch.use_deterministic_algorithms(True)  # torch fills memory that is not written yet with NaN
    try:
        grads = slice_attention_backward(
            case.dout, case.q, case.k, case.v, expected["lse"], row_delta(case.dout, expected["out"]),
            case.mask.bands, **{given: start}, impl=impl,
        )  # fmt: skip
    finally:
        torch.use_deterministic_algorithms(False)
    for name, grad in zip(("dq", "dk", "dv"), grads, strict=True):
        torch.testing.assert_close(grad, expected[name] + (name == given))


@pytest.mark.parametrize("impl", IMPLS)
def test_new_results_have_the_dtype_asked_for(impl):
    case = Case(packed_causal([5]), dtype=torch.bfloat16)
    out, lse, _ = slice_attention_forward(case.q, case.k, case.v, case.mask.bands, out_dtype=torch.float32, impl=impl)
    assert out.dtype == lse.dtype == torch.float32
    grads = slice_attention_backward(
        case.dout, case.q, case.k, case.v, lse, row_delta(case.dout, out), case.mask.bands,
        grad_dtype=torch.float32, impl=impl,
    )  # fmt: skip
    assert {g.dtype for g in grads} == {torch.float32}


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("sink", [None, "sh"])
def test_rows_that_see_nothing_get_zero_and_the_lse_of_the_sink(impl, sink):
    case = Case(AttnMask([(2, 4, 0, 3, 0)], 6, 5), sink=sink)
    result = case.run(attend(case, impl))
    for row in (0, 1, 4, 5):
        assert not result["out"][row].any() and not result["dq"][row].any()
        lse = torch.tensor([-torch.inf]) if sink is None else torch.logsumexp(case.sinks, 0)
        torch.testing.assert_close(result["lse"][row], lse.to(result["lse"]))
    assert not result["dk"][3:].any() and not result["dv"][3:].any()


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("num_rows, num_keys", [(0, 0), (0, 4), (4, 0), (4, 4)])
def test_no_band_and_no_token_are_fine(impl, num_rows, num_keys):
    case = Case(AttnMask([], num_rows, num_keys), 1, 2, sink="sh")
    result = case.run(attend(case, impl))
    assert not result["out"].any() and not result["dsink"].any()
    assert (result["max_logits"] == -torch.inf).all()
    assert result["dk"].shape == case.k.shape


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("garbage", [torch.nan, torch.inf])
@pytest.mark.skipif(forced.multiplies_hidden_pairs(), reason="kernels multiply hidden pairs by 0")
def test_garbage_in_tokens_of_no_pair_goes_nowhere(impl, softcap, garbage, tiny_blocks):
    rows = [(0, 3, 0, 3, 1), (5, 9, 5, 9, 1), (5, 9, 12, 14, 0)]
    case = Case(AttnMask(rows, 11, 15), 1, 2, softcap=softcap, sink="ssh")
    clean = case.expected()
    hidden_rows = [3, 4, 9, 10]
    hidden_keys = [3, 4, 9, 10, 11, 14]
    for tensor in (case.q, case.dout):
        tensor[hidden_rows] = garbage
    for tensor in (case.k, case.v):
        tensor[hidden_keys] = garbage
    assert_close(case.run(attend(case, impl)), clean)
    lse, delta = clean["lse"].clone(), row_delta(case.dout, clean["out"])
    lse[hidden_rows] = delta[hidden_rows] = garbage
    grads = slice_attention_backward(
        case.dout, case.q, case.k, case.v, lse, delta, case.mask.bands, softcap=softcap, impl=impl
    )
    names = ("dq", "dk", "dv")
    assert_close(dict(zip(names, grads, strict=True)), {name: clean[name] for name in names})


@pytest.mark.parametrize("impl", IMPLS)
def test_strides_do_not_matter(impl):
    case = Case(packed_causal([5, 9]), 2, 2)
    expected = case.expected()
    for name in ("q", "k", "v", "dout"):
        tensor = getattr(case, name)
        strided = torch.full((tensor.shape[2], tensor.shape[1], 2 * tensor.shape[0]), torch.nan, dtype=tensor.dtype)
        strided = strided.permute(2, 1, 0)[::2]
        strided.copy_(tensor)
        assert not strided.is_contiguous()
        setattr(case, name, strided)
    leaves = [t.requires_grad_() for t in (case.q, case.k, case.v)]
    out, _ = slice_attention(*leaves, case.mask, impl=impl)
    grads = torch.autograd.grad(out, leaves, case.dout)
    assert_close(dict(zip(("dq", "dk", "dv"), grads, strict=True)), {n: expected[n] for n in ("dq", "dk", "dv")})


@pytest.mark.parametrize("impl", IMPLS)
def test_repeated_calls_agree_bit_for_bit(impl):
    case = Case(packed_causal([300, 7, 150, 63]), 2, 2, sink="sh", dtype=torch.float32)
    first, second = case.run(attend(case, impl)), case.run(attend(case, impl))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_bands_that_are_changed_before_the_backward_are_those_of_the_forward():
    q, k, v = (torch.randn(9, 2, 8, dtype=torch.float64, requires_grad=True) for _ in "qkv")
    bands, is_read_only = builders.causal(9).bands.copy(), builders.causal(9).bands.copy().view()
    is_read_only.setflags(write=False)  # but its base is not
    for table, base in ((bands, bands), (is_read_only, is_read_only.base)):
        out = slice_attention(q, k, v, table)[0]
        expected = torch.autograd.grad(out.sum(), (q, k, v), retain_graph=True)
        base[:, bd.D_HI] = 99
        assert all(map(torch.equal, torch.autograd.grad(out.sum(), (q, k, v)), expected))


def test_only_the_gradients_asked_for_are_returned():
    case = Case(packed_causal([5]), sink="sh")
    sink = case.sinks.clone().requires_grad_()
    out, meta = slice_attention(case.q, case.k, case.v, case.mask, sink=sink)
    assert not meta.lse.requires_grad
    out.backward(case.dout)
    torch.testing.assert_close(sink.grad, case.expected()["dsink"])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("sink", [None, "sh"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_low_precision_errs_at_most_twice_as_much_as_dense_torch(dtype, sink, device):
    case = Case(packed_causal([120, 3, 61]), 2, 2, 32, 16, sink=sink, dtype=dtype, device=device)
    exact, same_dtype, fp32 = case.expected(torch.float64), case.expected(), case.expected(torch.float32)
    for name, value in case.run(attend(case, "torch")).items():
        reference = same_dtype if value.dtype == dtype else fp32  # lse and max_logits are in fp32
        terms = case.dsink_terms() if name == "dsink" else None
        assert_within_budget(name, value, reference[name], exact[name], terms=terms)


@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_the_half_precision_path_of_gpus_has_the_right_dtypes(softcap, tiny_blocks):
    mask = AttnMask([(0, 9, 0, 9, 1), (12, 20, 5, 9, 0), (12, 20, 12, 20, 1)], 20)
    with FakeTensorMode(allow_non_fake_inputs=True):
        q, k, v = (torch.empty(20, heads, 8, device="cuda", dtype=torch.bfloat16) for heads in (4, 2, 2))
        sink = torch.empty(1, 4, device="cuda")
        out, lse, max_logits = slice_attention_forward(
            q, k, v, mask.bands, softcap=softcap, sink=sink, return_max_logits=True, impl="torch"
        )
        grads = slice_attention_backward(
            out, q, k, v, lse, row_delta(out, out), mask.bands, softcap=softcap, impl="torch"
        )
    assert out.dtype == torch.bfloat16 and lse.dtype == max_logits.dtype == torch.float32
    assert [(g.dtype, g.shape) for g in grads] == [(t.dtype, t.shape) for t in (q, k, v)]


@pytest.mark.gpu
@settings(max_examples=20)
@given(mask=masks(), sink=st.sampled_from([None, "sh", "ssh"]), softcap=st.sampled_from([0.0, 1.5]))
def test_gpus_agree_with_the_naive_formula_in_fp64(mask, sink, softcap):
    expected = check_implementations_in_torch(Case(mask, 2, 2, sink=sink, softcap=softcap, device="cuda"))
    with pytest.MonkeyPatch.context() as monkeypatch:
        with_tiny_blocks(monkeypatch)
        half = Case(mask, 2, 2, sink=sink, softcap=softcap, device="cuda", dtype=torch.bfloat16)
        assert all(value.shape == expected[name].shape for name, value in half.run(attend(half, "torch")).items())


@pytest.mark.parametrize("impl", IMPLS)
def test_autocast_changes_no_bit_of_either_pass(impl):
    def passes(enabled):
        gen = forced.generator(0)
        q, k, v = (torch.randn(24, 2, 8, generator=gen, requires_grad=True) for _ in range(3))
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            out, meta = slice_attention(q, k, v, builders.causal(24), impl=impl)
            return out, meta.lse, *torch.autograd.grad(out.square().sum(), [q, k, v])

    for plain, cast in zip(passes(False), passes(True), strict=True):
        assert plain.dtype == cast.dtype and torch.equal(plain, cast)


IMPLEMENTATIONS = [
    ("reference", "cpu", 4, torch.float64),
    ("torch", "cpu", 4, torch.float64),
    pytest.param("ffa", "cuda", 64, torch.bfloat16, marks=[pytest.mark.gpu, pytest.mark.sm90]),
    pytest.param("ffa", "cuda", 256, torch.float16, marks=[pytest.mark.gpu, pytest.mark.sm90]),
    pytest.param("cudnn", "cuda", 64, torch.bfloat16, marks=[pytest.mark.gpu, pytest.mark.cudnn]),
]


@pytest.mark.parametrize(("impl", "device", "dim", "dtype"), IMPLEMENTATIONS)
@pytest.mark.parametrize("per_row", [False, True])
def test_one_sink_is_as_beside_one_of_minus_infinity(impl, device, dim, dtype, per_row):
    gen = forced.generator(0)
    q, k, v = (torch.randn(6, 2, dim, generator=gen, dtype=torch.float64) for _ in range(3))
    q, k, v = (t.to(device, dtype).requires_grad_() for t in (q, k, v))
    mask = AttnMask([(0, 4, 0, 4, 1)], 6)
    one = torch.randn(*([6] if per_row else []), 1, 2, generator=gen).to(device).requires_grad_()
    two = torch.cat([one, torch.full_like(one, -torch.inf)], dim=-2).detach().requires_grad_()
    results = []
    for sink in (one, two):
        out, meta = slice_attention(q, k, v, mask, sink=sink, deterministic=True, impl=impl)
        *grads, dsink = torch.autograd.grad(out.square().sum(), [q, k, v, sink])
        results.append([dsink[..., :1, :], out, meta.lse, *grads])
    assert results[0][0].any()
    torch.testing.assert_close(results[0][0], results[1][0])  # sums over rows may differ in order
    assert all(torch.equal(a, b) for a, b in zip(results[0][1:], results[1][1:], strict=True))


@pytest.mark.parametrize(("impl", "device", "dim", "dtype"), IMPLEMENTATIONS)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("per_row", [False, True])
def test_an_infinite_sink_takes_everything(impl, device, dim, dtype, deterministic, per_row):
    gen = forced.generator(0)
    q, k, v = (torch.randn(6, 2, dim, generator=gen, dtype=torch.float64) for _ in range(3))
    q, k, v = (t.to(device, dtype).requires_grad_() for t in (q, k, v))
    mask = AttnMask([(0, 4, 0, 4, 1)], 6)
    # The first head has an infinite sink and a finite one.
    sink = torch.tensor([[torch.inf, 0.5], [1.0, 0.2]], dtype=torch.float64, device=device)
    sink = (sink.expand(6, 2, 2) if per_row else sink).clone().requires_grad_()
    softcap = 0.0 if impl == "cudnn" else 5.0
    out, meta = slice_attention(q, k, v, mask, sink=sink, softcap=softcap, deterministic=deterministic, impl=impl)
    assert not out[:, 0].any() and (meta.lse[:, 0] == torch.inf).all()
    grads = torch.autograd.grad(out.square().sum() + out.sum(), [q, k, v, sink])
    assert all(g.isfinite().all() for g in grads)
    assert all(not g[..., 0, :].any() for g in grads[:3]) and not grads[3][..., 0].any()
    assert all(g[..., 1, :].any() for g in grads[:3]) and grads[3][..., 1].any()
    # More keys change nothing, as when they come from another rank.
    merged_out, merged_lse, _ = slice_attention_forward(
        q, k, v, mask.bands, out=out.detach().clone(), lse=meta.lse.clone(), impl=impl
    )
    assert not merged_out[:, 0].any() and (merged_lse[:, 0] == torch.inf).all()


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("softcap", [0.0, 1e30])
@pytest.mark.parametrize("size", [1e6, 1e10, 1e20, 1e36])
def test_logits_may_be_as_large_as_their_dtype_holds(impl, softcap, size, tiny_blocks):
    """As training that diverges makes them: a row's weight goes to its largest logit."""
    if impl not in ("torch", "reference") and size > 1e6:
        pytest.skip("of kernels not so large, see docs/own_loop.md")
    gen = forced.generator(0)
    q, k, v = (torch.randn(20, heads, 8, generator=gen) for heads in (4, 2, 2))
    q, k, v = (x.requires_grad_() for x in (q * size**0.5, k * size**0.5, v))
    results = []
    for inputs, by in ((tuple(x.double() for x in (q, k, v)), "reference"), ((q, k, v), impl)):
        out, meta = slice_attention(*inputs, builders.causal(20), impl=by, softcap=softcap)
        results.append((out.double(), meta.lse.double()))
    (exact, exact_lse), (out, lse) = results
    assert torch.allclose(lse, exact_lse, rtol=1e-5)
    if softcap == 0 or size < softcap:  # else logits are equal to the cap, and differences rounding
        assert torch.allclose(out, exact, atol=1e-5)
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.square().sum(), (q, k, v)))


@pytest.mark.parametrize("impl", IMPLS)
def test_keys_with_one_large_logit_share_the_weight_of_their_row(impl):
    """Though the lse has no digits for their number."""
    q, k = (torch.full((num_tokens, 1, 8), 1e3) for num_tokens in (4, 7))
    v = torch.randn(7, 1, 8, generator=forced.generator(0))
    out, _ = slice_attention(q, k, v, builders.full(4, 7), softmax_scale=1 / 8, impl=impl)
    torch.testing.assert_close(out, v.mean(0).expand(4, 1, 8))
