"""Sinks for FlashAttention, by fakes of its modules: the attention with a sink in the matrix, both passes."""

import contextlib
import inspect
import sys

import pytest
import torch

from megatron_magi import extensions
from tests.dense_attention import dense_attention
from tests.extensions import fakes

HEADS_Q, HEADS_KV, DIM = 4, 2, 8
VERSIONS = ("fa2", "fa3", "fa4")


@pytest.fixture(autouse=True)
def modules(monkeypatch):
    fakes.install(monkeypatch)


def tensors(batch, sq, sk, num_sinks, layout, dim=DIM, heads_kv=HEADS_KV):
    draw = torch.Generator().manual_seed(0)
    shapes = [(*batch, sq, HEADS_Q, dim), (*batch, sk, heads_kv, dim), (*batch, sk, heads_kv, dim)]
    shapes.append((num_sinks, HEADS_Q) if layout == "sh" else (*batch, sq, num_sinks, HEADS_Q))
    return [torch.randn(s, generator=draw, dtype=torch.float64).requires_grad_() for s in shapes]


def expected(q, k, v, sink, visible):
    """``(out, lse)`` of one sequence, by rows if the sink is."""
    if sink.ndim == 2:
        return dense_attention(q, k, v, visible, sink=sink)
    rows = [dense_attention(q[i : i + 1], k, v, visible[i : i + 1], sink=sink[i]) for i in range(len(q))]
    return [torch.cat(x) for x in zip(*rows, strict=True)]


def grads(out, inputs):
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return torch.autograd.grad((out * weights).sum(), inputs)


def assert_equal(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("layout", ["sh", "ssh"])
@pytest.mark.parametrize("version", VERSIONS)
def test_a_batch_is_attention_with_the_sink_in_its_matrix(version, layout):
    sq, sk = 7, 5  # causal: the first two rows see nothing but the sink
    inputs = tensors((2,), sq, sk, 3, layout)
    function = getattr(extensions, f"{version}_func_with_sink")
    out, lse, *rest = function(*inputs, layout, causal=True, return_attn_probs=True)
    assert rest == ([None] if version == "fa2" else [])
    assert not lse.requires_grad
    visible = fakes.seen(sq, sk, True, -1, -1)
    each = [
        expected(*(x[i] for x in inputs[:3]), inputs[3] if layout == "sh" else inputs[3][i], visible) for i in range(2)
    ]
    assert_equal([out, lse], [torch.stack([o for o, _ in each]), torch.stack([x.t() for _, x in each])])
    assert_equal(grads(out, inputs), grads(torch.stack([o for o, _ in each]), inputs))


@pytest.mark.parametrize("layout", ["sh", "ssh"])
@pytest.mark.parametrize("version", VERSIONS)
def test_packed_sequences_are_attention_with_the_sink_in_its_matrix(version, layout):
    bounds = torch.tensor([0, 3, 4, 9], dtype=torch.int32)
    inputs = tensors((), 9, 9, 2, layout)
    function = getattr(extensions, f"{version}_varlen_func_with_sink")
    out = function(*inputs[:3], bounds, bounds, 5, 5, inputs[3], layout, causal=True)
    document = torch.bucketize(torch.arange(9), bounds[1:].to(torch.int64), right=True)
    visible = (document[:, None] == document[None]) & torch.ones(9, 9, dtype=torch.bool).tril()
    want, _ = expected(*inputs, visible)
    assert_equal([out], [want])
    assert_equal(grads(out, inputs), grads(want, inputs))


def test_packed_tensors_are_their_parts():
    q, k, v, sink = tensors((2,), 6, 6, 2, "sh", heads_kv=HEADS_Q)
    want = extensions.fa2_func_with_sink(q, k, v, sink, causal=True)
    qkv, kv = torch.stack([q, k, v], dim=2), torch.stack([k, v], dim=2)
    assert_equal([extensions.fa2_qkvpacked_func_with_sink(qkv, sink, causal=True)], [want])
    assert_equal([extensions.fa2_kvpacked_func_with_sink(q, kv, sink=sink, causal=True)], [want])
    assert_equal([extensions.fa3_qkvpacked_func_with_sink(qkv, sink, causal=True)], [want])
    bounds, flat = torch.tensor([0, 6, 12], dtype=torch.int32), [x.flatten(0, 1) for x in (q, qkv, kv)]
    lengths = (bounds, bounds, 6, 6)
    ours = extensions.fa2_varlen_qkvpacked_func_with_sink(flat[1], bounds, 6, sink, "sh", causal=True)
    assert_equal([ours.view_as(want)], [want])
    ours = extensions.fa2_varlen_kvpacked_func_with_sink(flat[0], flat[2], *lengths, sink, causal=True)
    assert_equal([ours.view_as(want)], [want])
    assert_equal(grads(ours.view_as(want), [q, k, v, sink]), grads(want, [q, k, v, sink]))
    q, k, v, sink = tensors((2,), 6, 6, 2, "sh")
    heads = torch.cat([q, k, v], dim=2)
    ours = extensions.fa3_qkvpacked_func_with_sink(heads, sink, num_heads_q=HEADS_Q)
    assert_equal([ours], [extensions.fa3_func_with_sink(q, k, v, sink)])


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("layout", ["sh", "ssh"])
def test_gradients_are_those_of_small_differences(version, layout):
    inputs = tensors((1,), 4, 3, 2, layout)
    options = {"causal": True, "softcap": 1.5}
    options |= {"window_size": (1, 0)} if version != "fa4" else {}
    function = getattr(extensions, f"{version}_func_with_sink")
    assert torch.autograd.gradcheck(lambda q, k, v, sink: function(q, k, v, sink, layout, **options), inputs)


def test_dropout_leaves_sinks_alone_and_its_gradients_are_exact():
    inputs = tensors((1,), 4, 4, 1, "sh")
    assert torch.autograd.gradcheck(lambda *x: extensions.fa2_func_with_sink(*x, dropout_p=0.4), inputs)


def test_head_dims_that_have_to_be_padded():
    inputs = tensors((1,), 5, 5, 1, "sh", dim=6)
    out = extensions.fa2_func_with_sink(*inputs, causal=True)
    want, _ = expected(*(x[0] for x in inputs[:3]), inputs[3], fakes.seen(5, 5, True, -1, -1))
    assert_equal([out[0]], [want])
    assert_equal(grads(out[0], inputs), grads(want, inputs))


@pytest.mark.parametrize("version", VERSIONS)
def test_without_sink_it_is_the_kernel(version):
    q, k, v, _ = tensors((1,), 5, 3, 1, "sh")
    out = getattr(extensions, f"{version}_func_with_sink")(q, k, v, causal=True)
    want, _ = dense_attention(q[0], k[0], v[0], fakes.seen(5, 3, True, -1, -1))
    assert_equal([out[0]], [want])
    assert_equal(grads(out[0], [q, k, v]), grads(want, [q, k, v]))


SCALE, SLOPES, DESCALES = 0.3, torch.ones(HEADS_Q), [torch.full((1, HEADS_KV), 1.0 + i) for i in range(3)]
OPTIONS = {
    "fa2": {"dropout_p": 0.25, "window_size": (3, 2), "alibi_slopes": SLOPES},
    "fa3": {
        **dict(zip(("q_descale", "k_descale", "v_descale"), DESCALES, strict=True)),
        "window_size": (3, 2),
        "num_splits": 4,
        "pack_gqa": True,
        "sm_margin": 8,
    },
    "fa4": {"num_splits": 4, "pack_gqa": True},
}
"""What one version has besides what all have, none of it a default."""
OF_ONE_PASS = {"deterministic", "num_splits", "pack_gqa", "q_descale", "k_descale", "v_descale"}
KERNELS = {
    "fa2": ("flash_attn.flash_attn_interface", "_wrapped_flash_attn{}_forward", "_wrapped_flash_attn{}_backward"),
    "fa3": ("flash_attn_interface", "_flash_attn_forward", "_flash_attn_backward"),
    "fa4": ("flash_attn.cute.interface", "_flash_attn_fwd", "_flash_attn_bwd"),
}


def given_to_kernels(version, form, monkeypatch, options):
    """Arguments by name of the forward and of the backward kernel that a function calls with ``options``."""
    module, *names = KERNELS[version]
    given = []
    for name in (name.format("_varlen" if form == "varlen" else "") for name in names):
        fake = getattr(sys.modules[module], name)

        def spy(*args, fake=fake, **kwargs):
            bound = inspect.signature(fake).bind(*args, **kwargs)
            given.append({name.removeprefix("is_"): x for name, x in bound.arguments.items()})
            bound.arguments |= {"alibi_slopes": None} if "alibi_slopes" in bound.arguments else {}
            return fake(*bound.args, **bound.kwargs)

        monkeypatch.setattr(sys.modules[module], name, spy)
    q, k, v, sink = tensors((1,), 6, 6, 1, "sh", heads_kv=HEADS_Q)
    lengths = (torch.tensor([0, 6], dtype=torch.int32),) * 2 + (6, 7)
    calls = {
        "": lambda f: f(q, k, v, sink, "sh", **options),
        "varlen": lambda f: f(*(x[0] for x in (q, k, v)), *lengths, sink, "sh", **options),
        "qkvpacked": lambda f: f(torch.stack([q, k, v], dim=2), sink, "sh", **options),
    }
    calls[form](getattr(extensions, "_".join(filter(None, (version, form, "func_with_sink"))))).sum().backward()
    if form == "varlen":
        assert all((x["max_seqlen_q"], x["max_seqlen_k"]) == (6, 7) for x in given)
    return given


FORMS = [(version, form) for version in VERSIONS for form in ("", "varlen", "qkvpacked")]


@pytest.mark.parametrize("version, form", FORMS[:-1], ids="-".join)  # version 4 has no packed tensors
def test_every_option_reaches_the_kernels_by_its_name(version, form, monkeypatch):
    options = {"softmax_scale": SCALE, "causal": True, "softcap": 1.5, "deterministic": True, **OPTIONS[version]}
    if form == "qkvpacked":  # FlashAttention's own does without these
        options = {name: x for name, x in options.items() if name not in ("num_splits", "pack_gqa")}
    given = given_to_kernels(version, form, monkeypatch, options)
    assert len(given) == 2, "a forward and a backward"
    left, right = options.pop("window_size", (None, None))
    options |= {} if left is None else {"window_size_left": left, "window_size_right": right}
    for name, value in options.items():
        found = [x[name] for x in given if name in x]
        assert len(found) == (1 if name in OF_ONE_PASS else 2), name
        assert all(x is value or x == value for x in found), name


def test_arguments_are_checked():
    q, k, v, sink = tensors((1,), 5, 5, 1, "sh")
    lengths = (torch.tensor([0, 5]),) * 2 + (5, 5)
    for call, message in (
        (lambda: extensions.fa2_func_with_sink(q, k, v, sink[:, :2]), "sink: expected shape"),
        (lambda: extensions.fa3_func_with_sink(q, k, v, sink, "ssh"), "sink: expected shape"),
        (lambda: extensions.fa4_func_with_sink(q, k, v, sink, "hs"), "sink_layout: expected"),
        (lambda: extensions.fa2_func_with_sink(q, k, v, sink.long()), "sink: expected floats on .* got torch.int64"),
        (lambda: extensions.fa2_func_with_sink(q, k, v, sink.to("meta")), "sink: expected floats on .* on meta"),
        (lambda: extensions.fa2_func_with_sink(q, k, v, dropout_p=0.1, return_attn_probs=True), "return_attn_probs:"),
        (lambda: extensions.fa2_varlen_func_with_sink(q, k, v, *lengths, block_table=q), "block_table: not"),
        (lambda: extensions.fa3_func_with_sink(q, k, v, qv=q), "qv: not supported"),
        (lambda: extensions.fa3_func_with_sink(q, k, v, attention_chunk=2), "attention_chunk: not supported"),
        (lambda: extensions.fa3_qkvpacked_func_with_sink(q), "num_heads_q: of 4 heads"),
        (lambda: extensions.fa2_func_with_sink(None, k, v), "q: expected a tensor, got NoneType"),
        (lambda: extensions.fa3_func_with_sink(q, k[0], v), "k: expected 4 dimensions"),
        (lambda: extensions.fa4_func_with_sink(q, k, v.half()), "v: expected 4 dimensions"),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            call()


@pytest.mark.parametrize("version", VERSIONS)
def test_options_of_another_kind_are_named(version):
    q, k, v, _ = tensors((1,), 5, 5, 1, "sh")
    function, varlen = (getattr(extensions, f"{version}_{form}func_with_sink") for form in ("", "varlen_"))
    wrong = {"softmax_scale": "a", "causal": "no", "softcap": True, "deterministic": 1, "return_attn_probs": "no"}
    if version != "fa4":
        for size in (3, (1, 2, 3), (2.5, 0), (True, 0), ("1", 0), "ab"):
            with pytest.raises(ValueError, match=r"^window_size: expected"):
                function(q, k, v, window_size=size)
    wrong |= {"fa2": {"dropout_p": "0.5"}, "fa3": {"num_splits": 2.5, "sm_margin": True, "pack_gqa": 1}}.get(
        version, {}
    )
    for name, value in wrong.items():
        with pytest.raises(ValueError, match=f"^{name}: expected"):
            function(q, k, v, **{name: value})
    bounds = torch.tensor([0, 5], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"^max_seqlen_k: expected an integer"):
        varlen(q[0], k[0], v[0], bounds, bounds, 5, 5.5)
    if version == "fa3":
        with pytest.raises(ValueError, match=r"^num_heads_q: expected an integer"):
            extensions.fa3_qkvpacked_func_with_sink(q, num_heads_q=2.0)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_kernel_that_is_not_installed_is_named(version, monkeypatch):
    for name in [name for name in sys.modules if name.startswith("flash_attn")]:
        monkeypatch.setitem(sys.modules, name, None)
    q, k, v, sink = tensors((1,), 5, 5, 1, "sh")
    with pytest.raises(ImportError, match=f"^flash_attn.*{version}.*_with_sink need"):
        getattr(extensions, f"{version}_func_with_sink")(q, k, v, sink)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("place", [0, 1, 3])
def test_a_second_derivative_is_an_error_by_any_input(version, place):
    inputs = tensors((2,), 4, 5, 1, "sh")
    out = getattr(extensions, f"{version}_func_with_sink")(*inputs)
    (first,) = torch.autograd.grad(out.square().sum(), inputs[0], create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        torch.autograd.grad(first.sum(), inputs[place], materialize_grads=True)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("is_moved", [False, True])
def test_lengths_that_are_changed_before_the_backward_are_an_error_unless_autograd_has_a_copy(version, is_moved):
    """As where the next microbatch is read into the same memory; flash-attn's own functions say so too."""
    bounds, inputs = torch.tensor([0, 3, 9], dtype=torch.int32), tensors((), 9, 9, 1, "sh")
    function = getattr(extensions, f"{version}_varlen_func_with_sink")

    def attend(bounds):
        return function(*inputs[:3], bounds, bounds, 6, 6, inputs[3])

    want = grads(attend(bounds.clone()), inputs)
    copies = torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda x: x)
    with copies if is_moved else contextlib.nullcontext():
        out = attend(bounds)
    bounds[1] = 7
    if is_moved:
        assert_equal(grads(out, inputs), want)
        return
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        grads(out, inputs)


def test_kernels_of_ones_own_may_be_any_object():
    class Plain:
        empty_lse = -torch.inf

        def forward(self, q, k, v):
            return *fakes.run(q, k, v, 0.5, True, (-1, -1), 0.0, self.empty_lse), ()

        def backward(self, dout, q, k, v, out, lse, kept):
            inputs = [x.detach().requires_grad_() for x in (q, k, v)]
            with torch.enable_grad():
                visible = fakes.seen(4, 4, True, -1, -1)
                one_by_one = zip(*inputs, strict=True)
                dense = torch.stack([dense_attention(*x, visible, softmax_scale=0.5)[0] for x in one_by_one])
            return torch.autograd.grad(dense, inputs, dout)

    q, k, v, _ = tensors((2,), 4, 4, 1, "sh")
    out, _ = extensions.attention_with_sink(Plain(), q, k, v)
    want = extensions.fa2_func_with_sink(q, k, v, causal=True, softmax_scale=0.5)
    assert_equal([out, *grads(out, [q, k, v])], [want, *grads(want, [q, k, v])])


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("batch, sq, sk", [(2, 0, 5), (2, 4, 0), (0, 4, 5)])
def test_without_queries_keys_or_batch_no_kernel_is_called(version, batch, sq, sk, monkeypatch):
    inputs = tensors((batch,), sq, sk, 1, "sh")
    monkeypatch.setattr(f"megatron_magi.extensions.flash_attention_{version[2]}._module", None)
    out, lse, *_ = getattr(extensions, f"{version}_func_with_sink")(*inputs, return_attn_probs=True)
    assert not out.any() and out.shape == inputs[0].shape and lse.shape == (batch, HEADS_Q, sq)
    assert_equal([lse], [inputs[3].detach()[0, :, None].expand(batch, -1, sq)])
    for x, grad in zip(inputs, torch.autograd.grad(out.sum(), inputs), strict=True):
        assert grad.shape == x.shape and not grad.any()


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("sq, sk", [(0, 5), (4, 0)])
def test_so_of_packed_sequences(version, sq, sk, monkeypatch):
    inputs = tensors((), sq, sk, 2, "ssh")
    monkeypatch.setattr(f"megatron_magi.extensions.flash_attention_{version[2]}._module", None)
    lengths = torch.tensor([0, sq], dtype=torch.int32), torch.tensor([0, sk], dtype=torch.int32), sq, sk
    function = getattr(extensions, f"{version}_varlen_func_with_sink")
    out, lse, *_ = function(*inputs[:3], *lengths, inputs[3], "ssh", return_attn_probs=True)
    assert not out.any() and out.shape == inputs[0].shape and lse.shape == (HEADS_Q, sq)
    assert_equal([lse], [inputs[3].detach().logsumexp(1).t()])
