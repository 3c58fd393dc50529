import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_magi.operands.merge import merge, merge_, merge_sink_, sink_gradient, sink_lse

lse_values = st.one_of(st.just(-torch.inf), st.floats(-40, 40), st.floats(-4000, 4000))


@st.composite
def partials(draw, count):
    """Partial results of one head over some rows; outputs of rows without keys are 0."""
    num_rows = draw(st.integers(1, 4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    results = []
    for _ in range(count):
        lse = torch.tensor(draw(st.lists(lse_values, min_size=num_rows, max_size=num_rows)), dtype=torch.float64)
        out = torch.randn(num_rows, 1, 3, generator=generator, dtype=torch.float64)
        results.append((out * (lse > -torch.inf)[:, None, None], lse[:, None]))
    return results


def same(a, b):
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


@given(partials(3))
def test_merge_is_associative(results):
    a, b, c = results
    same(merge(*merge(*a, *b), *c), merge(*a, *merge(*b, *c)))


@given(partials(2))
def test_merge_is_commutative(results):
    a, b = results
    same(merge(*a, *b), merge(*b, *a))


@given(partials(1))
def test_a_result_over_no_key_changes_nothing(results):
    ((out, lse),) = results
    nothing = torch.zeros_like(out), torch.full_like(lse, -torch.inf)
    same(merge(out, lse, *nothing), (out, lse))
    same(merge(*nothing, out, lse), (out, lse))


def test_garbage_beside_an_lse_of_minus_infinity_is_dropped():
    out, lse = torch.randn(3, 2, 4), torch.randn(3, 2)
    garbage = torch.full_like(out, torch.nan), torch.full_like(lse, -torch.inf)
    same(merge(out, lse, *garbage), (out, lse))
    merged, merged_lse = merge(*garbage, *garbage)
    assert not merged.any() and (merged_lse == -torch.inf).all()


@given(partials(2))
def test_merge_in_place_is_merge(results):
    (out, lse), b = results
    expected = merge(out, lse, *b)
    merge_(out, lse, *b)
    same((out, lse), expected)


def test_merge_in_place_keeps_the_dtype_of_its_target():
    out, lse = torch.randn(3, 2, 4).bfloat16(), torch.randn(3, 2)
    expected, _ = merge(out, lse, torch.ones(3, 2, 4), torch.zeros(3, 2))
    assert expected.dtype == torch.float32
    merge_(out, lse, torch.ones(3, 2, 4), torch.zeros(3, 2))
    assert torch.equal(out, expected.bfloat16())


def test_gradients_of_merge_are_right_and_finite_for_minus_infinity():
    out_a, out_b = (torch.randn(4, 1, 2, dtype=torch.float64, requires_grad=True) for _ in range(2))
    lse_a = torch.tensor([0.5, -torch.inf, 1.0, -torch.inf], dtype=torch.float64)[:, None].requires_grad_()
    lse_b = torch.tensor([1.5, 0.0, -torch.inf, -torch.inf], dtype=torch.float64)[:, None].requires_grad_()
    out, lse = merge(out_a, lse_a, out_b, lse_b)
    # Rows without keys have lse -inf; its gradient is asked for where it is finite.
    loss = out.square().sum() + lse[:3].sum()
    grads = torch.autograd.grad(loss, [out_a, lse_a, out_b, lse_b])
    assert all(grad.isfinite().all() for grad in grads)
    assert all(not grad[3].any() for grad in grads)
    finite = [t.detach()[:1].requires_grad_() for t in (out_a, lse_a, out_b, lse_b)]
    torch.autograd.gradcheck(merge, finite)


@pytest.mark.parametrize("wrong", ["lse_a", "lse_b", "out_b"])
def test_shapes_that_disagree_are_named(wrong):
    tensors = {
        "out_a": torch.zeros(3, 2, 4), "lse_a": torch.zeros(3, 2),
        "out_b": torch.zeros(3, 2, 4), "lse_b": torch.zeros(3, 2),
    }  # fmt: skip
    tensors[wrong] = torch.zeros(3, 2, 5) if wrong == "out_b" else torch.zeros(2, 3)
    with pytest.raises(ValueError, match=f"^{wrong}:"):
        merge(**tensors)


@pytest.mark.parametrize("num_sinks", [1, 2])
@pytest.mark.parametrize("per_row", [False, True])
def test_the_sink_gradient_is_that_of_autograd(per_row, num_sinks):
    torch.manual_seed(0)
    sink = (3 * torch.randn(*((5,) if per_row else ()), num_sinks, 3, dtype=torch.float64)).requires_grad_()
    lse, dout = torch.randn(5, 3, dtype=torch.float64), torch.randn(5, 3, 4, dtype=torch.float64)
    keys_only = torch.randn(5, 3, 4, dtype=torch.float64)
    total = torch.logaddexp(lse, sink_lse(sink, torch.float64))
    out = keys_only * torch.exp(lse - total)[..., None]
    (expected,) = torch.autograd.grad(out, sink, dout)
    actual = sink_gradient(sink.detach(), total.detach(), (dout * out.detach()).sum(-1))
    torch.testing.assert_close(actual, expected)


@given(partials(2))
def test_a_sink_is_a_partial_result_with_output_zero(results):
    (out, lse), (_, sinks) = results
    expected = merge(out, lse, torch.zeros_like(out), sinks)
    merge_sink_(out, lse, sinks)
    same((out, lse), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("num_rows", [(), (5,)])
def test_one_sink_is_itself_and_lies_in_order(num_rows, dtype):
    sink = torch.randn(3, *num_rows, 1).to(dtype).movedim(0, -1)
    sink[..., 0] = torch.inf
    found = sink_lse(sink, torch.float32)
    assert found.is_contiguous()
    assert torch.equal(found, sink.float()[..., 0, :])


def test_no_sink_at_all_and_sinks_of_minus_infinity_add_nothing():
    assert (sink_lse(torch.zeros(0, 3), torch.float32) == -torch.inf).all()
    sink = torch.full((2, 3), -torch.inf)
    lse = torch.full((4, 3), -torch.inf)
    assert not sink_gradient(sink, lse, torch.zeros(4, 3)).any()
