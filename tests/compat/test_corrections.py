"""Partial results that are joined are the attention over all keys, and sinks join the denominator."""

import pytest
import torch

from megatron_magi import api
from tests.dense_attention import dense_attention

ROWS, KEYS, HEADS, DIM = 6, 10, 4, 3


def parts(seed=0):
    """Attention over the first keys, the others, and all. The first row sees none, the second none of the first."""
    gen = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(n, HEADS, DIM, generator=gen, dtype=torch.float64) for n in (ROWS, KEYS, KEYS))
    visible = torch.rand(ROWS, KEYS, generator=gen) < 0.7
    visible[0], visible[1, :4] = False, False
    results = [dense_attention(q, k[s], v[s], visible[:, s]) for s in (slice(4), slice(4, None), slice(None))]
    return [(out, lse.contiguous()) for out, lse in results], (q, k, v, visible)


@pytest.mark.parametrize("inplace", [False, True])
def test_two_partial_results_are_joined(inplace):
    ((out1, lse1), (out2, lse2), (out, lse)), _ = parts()
    assert lse[0].isneginf().all() and lse1[1].isneginf().all() and not lse2[1].isneginf().any()
    for call, results in (
        (lambda o, e: [api.correct_attn_lse(e, lse2, inplace)], [("lse", lse)]),
        (lambda o, e: [api.correct_attn_out(o, e, out2, lse2, lse, inplace)], [("out", out)]),
        (lambda o, e: api.correct_attn_out_lse(o, e, out2, lse2, inplace), [("out", out), ("lse", lse)]),
    ):
        given = {"out": out1.clone(), "lse": lse1.clone()}
        for got, (name, expected) in zip(call(given["out"], given["lse"]), results, strict=True):
            torch.testing.assert_close(got, expected)
            assert (got is given[name]) == inplace
            torch.testing.assert_close(given[name], expected if inplace else {"out": out1, "lse": lse1}[name])


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("sink_layout", ["sh", "ssh"])
def test_sinks_join_the_denominator(sink_layout, inplace):
    (_, _, (out, lse)), (q, k, v, visible) = parts(1)
    shape = (2, HEADS) if sink_layout == "sh" else (ROWS, 2, HEADS)
    sink = torch.randn(shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    expected_out, expected_lse = torch.empty_like(out), torch.empty_like(lse)
    for row in range(ROWS):
        of_row = sink if sink_layout == "sh" else sink[row]
        pieces = dense_attention(q[row : row + 1], k, v, visible[row : row + 1], sink=of_row)
        expected_out[row], expected_lse[row] = (piece[0] for piece in pieces)
    got = api.correct_attn_out_with_sink(out.clone(), lse, sink, sink_layout, inplace)
    torch.testing.assert_close(got, expected_out)
    torch.testing.assert_close(api.correct_attn_lse_with_sink(lse.clone(), sink, sink_layout, inplace), expected_lse)
    both = out.clone(), lse.clone()
    results = api.correct_attn_out_lse_with_sink(*both, sink, sink_layout, inplace)
    for got, expected, given in zip(results, (expected_out, expected_lse), both, strict=True):
        torch.testing.assert_close(got, expected)
        assert (got is given) == inplace


def test_gradients_flow_through_joined_results():
    ((out1, lse1), (out2, lse2), (_, lse)), _ = parts(3)
    sink = torch.randn(2, HEADS, dtype=torch.float64)
    rows = slice(2, None)  # finite differences of -inf are none
    arguments = [x[rows].clone().requires_grad_() for x in (out1, lse1, out2, lse2)]
    assert torch.autograd.gradcheck(api.correct_attn_out_lse, arguments)
    assert torch.autograd.gradcheck(api.correct_attn_out, [*arguments, lse[rows].clone().requires_grad_()])
    assert torch.autograd.gradcheck(api.correct_attn_out_lse_with_sink, [*arguments[:2], sink.requires_grad_()])
    whole = [x.clone().requires_grad_() for x in (out1, lse1, out2, lse2)]
    (api.correct_attn_out(*whole, lse).sum() + api.correct_attn_out_lse(*whole)[0].sum()).backward()
    assert all(x.grad.isfinite().all() for x in whole)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda out, lse: api.correct_attn_lse(lse, lse[1:]), "lse2"),
        (lambda out, lse: api.correct_attn_out(out, lse, out[1:], lse, lse), "out2"),
        (lambda out, lse: api.correct_attn_out(out, lse, out, lse[1:], lse), "lse2"),
        (lambda out, lse: api.correct_attn_lse_with_sink(lse, lse[:2], "shd"), "sink_layout: expected 'sh' or 'ssh'"),
        (lambda out, lse: api.correct_attn_lse_with_sink(lse, lse[:2, :1]), "sink: expected shape"),
        (lambda out, lse: api.correct_attn_lse_with_sink(lse, lse[None], "ssh"), "sink: expected shape"),
        (lambda out, lse: api.correct_attn_out(out, lse, out, lse, lse[1:]), "lse: expected the shape of out1"),
        (lambda out, lse: api.correct_attn_out_lse(out, lse[1:], out, lse), "lse1: expected the shape of out1"),
        (lambda out, lse: api.correct_attn_out_lse(out, lse, out, lse[1:]), "lse2: expected the shape of out2"),
        (lambda out, lse: api.correct_attn_out_lse(out, lse, out[1:], lse), "out2"),
        (lambda out, lse: api.correct_attn_out_lse_with_sink(out[1:], lse, lse[:1]), "lse: expected the shape of out"),
        (lambda out, lse: api.correct_attn_lse_with_sink(lse[0], lse[:1]), r"lse: expected shape \[num_rows"),
        (lambda out, lse: api.correct_attn_lse(None, lse), "lse1: expected a tensor, got NoneType"),
        (lambda out, lse: api.correct_attn_out_lse(out, lse, out, 0.0), "lse2: expected a tensor, got float"),
        (lambda out, lse: api.correct_attn_out_with_sink(out, lse, None), "sink: expected a tensor, got NoneType"),
    ],
)
def test_shapes_that_do_not_fit_are_named(call, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        call(torch.zeros(ROWS, HEADS, DIM), torch.zeros(ROWS, HEADS))
