"""Predictions in C++ against those in numpy, which define what is right: equal to the last bit."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_magi.backends.costs import DEFAULT
from megatron_magi.config import CostModel, OverlapConfig
from megatron_magi.cost_model import Rates
from megatron_magi.plan import cpp_predict, cpp_solver
from megatron_magi.plan.counts import Counts, Work
from megatron_magi.plan.degree import choose_degree
from megatron_magi.plan.predict import predict_all

pytestmark = pytest.mark.skipif(not cpp_solver.available(), reason="the planner in C++ is not built")


@st.composite
def models(draw) -> tuple[Rates, OverlapConfig]:
    """Rates near those of a GPU, every one of them another, and ways to choose and order stages."""
    rng = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    floats = [field.name for field in fields(Rates) if isinstance(getattr(DEFAULT, field.name), float)]
    rates = replace(DEFAULT, **{name: getattr(DEFAULT, name) * rng.uniform(0.5, 2) for name in floats})
    rates = replace(rates, hidden=float(rng.uniform(0, 1)))
    heads_kv = draw(st.sampled_from([1, 2, 8]))
    cost = CostModel(
        tflops=draw(st.sampled_from([None, 350.0])),
        gbytes_per_s=draw(st.sampled_from([None, 33.3])),
        stage_latency_us=draw(st.sampled_from([None, 0.0, 17.3])),
        num_heads_q=heads_kv * draw(st.sampled_from([1, 4, 6])),
        num_heads_kv=heads_kv,
        head_dim=draw(st.sampled_from([64, 128, 192])),
        head_dim_v=draw(st.sampled_from([None, 128])),
    )
    overlap = OverlapConfig(
        degree=draw(st.sampled_from([None, None, 0, 1, 3])),
        max_degree=draw(st.integers(1, 8)),
        hide_tail_reduce=draw(st.booleans()),
        one_launch=draw(st.booleans()),
        cost=cost,
    )
    return rates, overlap


def random_counts(rng: np.random.Generator, num: int, cp_size: int) -> tuple[Counts, list[int]]:
    """Counts of dispatches of up to a few thousand rows a rank; in some nothing is fetched, or nothing is computed."""
    rows = rng.integers(1, 1 << int(rng.integers(1, 18)), num)
    table = rng.integers(0, 1 + rows[:, None, None, None], (num, len(Work._fields) + 2, 2, cp_size))
    table *= rng.random(table.shape) < rng.uniform(0.3, 1.2)
    table[:, 0] *= rng.integers(0, 1 + rows)[:, None, None]  # areas
    table[:, 5] = np.minimum(table[:, 5], rng.integers(0, 100))  # starts
    if rng.random() < 0.5:
        table[:, 7:, 1] = 0  # one node
    if rng.random() < 0.2:
        table[:, 7:] = 0
    return Counts.of_table(table.swapaxes(0, 1)), rows.tolist()


@settings(max_examples=300)
@given(model=models(), seed=st.integers(0, 1 << 30), num=st.integers(1, 7), cp_size=st.sampled_from([1, 2, 3, 8, 33]))
def test_predictions_of_any_counts_equal_those_in_numpy(model, seed, num, cp_size) -> None:
    rates, overlap = model
    counts, rows = random_counts(np.random.default_rng(seed), num, cp_size)
    ours, theirs = (predict(counts, rows, rates, overlap) for predict in (predict_all, cpp_predict.predict_all))
    assert ours == theirs
    assert [list(map(type, one)) for one in ours] == [list(map(type, one)) for one in theirs]


@settings(max_examples=200)
@given(model=models(), seed=st.integers(0, 1 << 30), cp_size=st.integers(1, 9), has_rates=st.booleans())
def test_numbers_of_stages_equal_those_in_numpy(model, seed, cp_size, has_rates) -> None:
    rates, overlap = model
    counts, _ = random_counts(np.random.default_rng(seed), 1, cp_size)
    areas = [place.astype(np.int64) for place in counts.work.area[0]]
    given_counts = *areas, counts.received[0].sum(axis=0), overlap, rates if has_rates else None
    assert choose_degree(*given_counts) == cpp_predict.choose_degree(*given_counts)
