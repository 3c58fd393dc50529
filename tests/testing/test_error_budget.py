"""The budget of low precision lets rounding pass, whatever the size of values, and stops what is wrong."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch

from megatron_magi.testing.error_budget import assert_within_budget
from tests.ops.naive import Case, naive_attention, packed_causal

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
RESULTS = ["out", "dq", "dk", "dv"]


@cache
def attention(dtype):
    """A case, its results in fp64 and in ``dtype``; not to be changed."""
    case = Case(packed_causal([120, 3, 61]), 2, 2, 32, 16, dtype=dtype)
    return case, case.expected(torch.float64), case.expected()


def draw(seed=0, scale=1.0):
    return scale * torch.randn(64, 16, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("scale", [2.0**-10, 1.0, 2.0**10])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_correctly_rounded_result_passes_even_beside_an_exact_reference(dtype, scale):
    exact = draw(scale=scale)
    assert_within_budget("x", exact.to(dtype), exact, exact)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_a_few_units_in_the_last_place_of_the_largest_value_pass_in_fp32_and_many_do_not(scale):
    exact = draw(scale=scale)
    reference = exact.float()
    unit = torch.finfo(torch.float32).eps * exact.abs().max()
    signs = draw(seed=1).sign()
    assert_within_budget("x", (exact + 2 * unit * signs).float(), reference, exact)
    with pytest.raises(AssertionError, match=r"x: root mean square of errors .*, allowed"):
        assert_within_budget("x", (exact + 20 * unit * signs).float(), reference, exact)
    damaged = exact.clone()
    damaged[5, 7] += 20 * unit
    with pytest.raises(AssertionError, match="x: largest of errors"):
        assert_within_budget("x", damaged.float(), reference, exact)
    assert_within_budget("x", damaged.float(), reference, exact, elementwise=False)


def test_sums_of_256_terms_pass_in_every_order_beside_the_most_accurate_one():
    terms = torch.from_numpy(np.random.default_rng(0).standard_normal((256, 500)))
    exact = terms.float().double().sum(0)
    for order in (terms, terms.flip(0), terms.sort(0).values, terms.sort(0, descending=True).values):
        one_by_one = torch.zeros(500)
        for term in order.float():
            one_by_one += term
        assert_within_budget("sum", one_by_one, exact.float(), exact, terms=terms.abs().sum(0))


@pytest.mark.parametrize("name", RESULTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_that_is_off_by_one_percent_fails(dtype, name):
    _, exact, plain = attention(dtype)
    assert_within_budget(name, exact[name].to(dtype), plain[name], exact[name])
    with pytest.raises(AssertionError, match=f"{name}: root mean square"):
        assert_within_budget(name, (1.01 * exact[name]).to(dtype), plain[name], exact[name])


@pytest.mark.parametrize("name", RESULTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_without_the_last_key_of_each_row_fails(dtype, name):
    case, exact, plain = attention(dtype)
    visible = case.visible & ~torch.eye(len(case.q), dtype=torch.bool)
    short = case.run(lambda q, k, v, s: naive_attention(q, k, v, visible), torch.float64)
    with pytest.raises(AssertionError, match=name):
        assert_within_budget(name, short[name].to(dtype), plain[name], exact[name])


@pytest.mark.parametrize("name", RESULTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_in_which_one_row_of_a_short_document_misses_a_key_fails(dtype, name):
    case, exact, plain = attention(dtype)
    visible = case.visible.clone()
    visible[122, 121] = False
    short = case.run(lambda q, k, v, s: naive_attention(q, k, v, visible), torch.float64)
    with pytest.raises(AssertionError, match=f"{name}: (largest|root mean square)"):
        assert_within_budget(name, short[name].to(dtype), plain[name], exact[name])


def test_the_error_of_sums_that_cancel_is_measured_by_their_terms():
    exact = torch.zeros(64, 16, dtype=torch.float64)
    got = draw(scale=1e-6).float()
    with pytest.raises(AssertionError, match="x: root mean square"):
        assert_within_budget("x", got, exact.bfloat16(), exact)
    assert_within_budget("x", got, exact.bfloat16(), exact, terms=torch.full_like(exact, 10.0))


def test_results_are_finite_where_the_exact_ones_are_and_else_the_same():
    exact = draw()
    exact[3] = -torch.inf
    good = exact.float()
    assert_within_budget("lse", good, good, exact)
    wrong = (((0, 0), torch.nan, "not finite"), ((3, 0), 1.0, "infinities"), ((3, 1), torch.inf, "infinities"))
    for place, value, message in wrong:
        bad = good.clone()
        bad[place] = value
        with pytest.raises(AssertionError, match=f"lse: .*{message}"):
            assert_within_budget("lse", bad, good, exact)
    nothing = torch.full((4,), -torch.inf)
    assert_within_budget("lse", nothing, nothing, nothing.double())


@pytest.mark.parametrize("argument", ["reference", "exact", "terms"])
def test_tensors_of_another_shape_are_refused_by_name(argument):
    tensors = {"reference": torch.zeros(3), "exact": torch.zeros(3), "terms": torch.zeros(3)}
    with pytest.raises(ValueError, match=rf"^{argument}: expected the shape \(3,\)"):
        assert_within_budget("x", torch.zeros(3), **tensors | {argument: torch.zeros(1)})
