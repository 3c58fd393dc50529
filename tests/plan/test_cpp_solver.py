"""The planner in C++ against the one in Python, which defines what is right."""

from __future__ import annotations

from dataclasses import fields, replace
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megatron_magi.config import DispatchConfig, MagiConfig
from megatron_magi.mask import AttnMask, builders
from megatron_magi.plan import Plan, cpp_solver, make_plan, swaps
from megatron_magi.plan.affinity import search
from megatron_magi.plan.chunks import ChunkedMask
from megatron_magi.plan.dispatch import _even, candidates
from megatron_magi.plan.swaps import sum_by_rank
from megatron_magi.plan.traffic import SearchInput, Start, Traffic
from megatron_magi.plan.types import Transfer

from .test_plan import LONG, assume_enough_tokens, configs, masks, uneven_lengths

built = pytest.mark.skipif(not cpp_solver.available(), reason="the planner in C++ is not built")


def plan_with(planner: str, mask: AttnMask, config: MagiConfig, cp_size: int) -> Plan:
    return make_plan(mask, replace(config, dispatch=replace(config.dispatch, planner=planner)), cp_size)


def assert_equal_plans(mask: AttnMask, config: MagiConfig, cp_size: int) -> None:
    ours, theirs = (plan_with(planner, mask, config, cp_size) for planner in ("python", "native"))
    np.testing.assert_array_equal(ours.dispatch.chunk_rank, theirs.dispatch.chunk_rank)
    assert ours.dispatch.chunk_rank.dtype == theirs.dispatch.chunk_rank.dtype == np.int64
    assert ours.plan_hash == theirs.plan_hash
    assert ours.stats() == theirs.stats()
    for rank in range(cp_size):
        a, b = ours.for_rank(rank), theirs.for_rank(rank)
        assert (a.num_rows, a.schedule, a.area, a.degree) == (b.num_rows, b.schedule, b.area, b.degree)
        for x, y in zip(a.bands, b.bands, strict=True):
            np.testing.assert_array_equal(x, y)
        assert (a.joined is None, a.num_tokens) == (b.joined is None, b.num_tokens)
        joined = [] if a.joined is None else [(a.joined, b.joined)]
        for x, y in (*zip(a.transfers, b.transfers, strict=True), *joined):
            assert_equal_transfers(x, y)


def assert_equal_transfers(a: Transfer, b: Transfer) -> None:
    for field in fields(Transfer):
        x, y = getattr(a, field.name), getattr(b, field.name)
        if field.name == "levels":
            assert (x is None) == (y is None)
        elif isinstance(x, np.ndarray):
            np.testing.assert_array_equal(x, y)
            assert x.dtype == y.dtype and not y.flags.writeable
        else:
            assert type(x) is type(y) and x == y, field.name


@built
@settings(max_examples=150)
@given(mask=masks(), config=configs(), cp_size=st.integers(1, 5))
def test_plans_of_any_mask_equal_those_of_the_python_planner(mask, config, cp_size) -> None:
    assume_enough_tokens(mask, config, cp_size)
    assert_equal_plans(mask, config, cp_size)


@built
@settings(max_examples=30)
@given(
    seed=st.integers(0, 1 << 30),
    tokens=st.integers(2000, 40_000),
    documents=st.sampled_from([1, 2, 9, 40]),
    cp_size=st.integers(2, 40),
    window=st.sampled_from([None, 64, 1024]),
    causal=st.booleans(),
    tolerance=st.sampled_from([1.0, 1.01, 1.25, 2.0]),
    chunk_size=st.sampled_from([None, 50, 128]),
    algorithm=st.sampled_from(["affinity", "affinity", "min_heap", "auto"]),
    uneven=st.booleans(),
)
def test_plans_of_packed_documents_equal_those_of_the_python_planner(
    seed, tokens, documents, cp_size, window, causal, tolerance, chunk_size, algorithm, uneven
) -> None:
    lengths = uneven_lengths(tokens, documents, seed)
    if window is None:
        mask = builders.varlen(doc_lengths=lengths, causal=causal)
    else:
        mask = builders.sliding_window(left=window, right=0 if causal else window, doc_lengths=lengths)
    assume(not uneven or tokens >= cp_size * (chunk_size or 1))
    dispatch = DispatchConfig(
        algorithm=algorithm, chunk_size=chunk_size, uneven_shard=uneven, balance_tolerance=tolerance
    )
    assert_equal_plans(mask, MagiConfig(dispatch=dispatch), cp_size)


def assert_equal_dispatches(mask: AttnMask, chunk: int, cp_size: int, **options) -> None:
    """The dispatches that a plan is chosen from; the last chunk may be short."""
    bounds = np.append(np.arange(0, mask.total_seqlen_q, chunk), mask.total_seqlen_q)
    both = (DispatchConfig(planner=planner, **options) for planner in ("python", "native"))
    ours, theirs = (candidates(ChunkedMask(mask, bounds, cp_size), config) for config in both)
    assert list(ours) == list(theirs)
    for name in ours:
        np.testing.assert_array_equal(ours[name], theirs[name], name)


@built
@settings(max_examples=150)
@given(
    mask=masks(max_seqlen=60, may_be_long=True),
    cp_size=st.integers(2, 8),
    chunk=st.integers(1, 3),
    tolerance=st.sampled_from([1.0, 1.01, 1.25, 2.0]),
)
def test_candidates_of_any_mask_are_those_of_the_python_planner(mask, cp_size, chunk, tolerance) -> None:
    chunk *= LONG if mask.total_seqlen_q >= LONG else 1
    assume(mask.total_seqlen_q >= cp_size * chunk)
    assert_equal_dispatches(mask, chunk, cp_size, balance_tolerance=tolerance)


@built
@settings(max_examples=40)
@given(
    lengths=st.lists(st.integers(1, 100), min_size=1, max_size=30),
    window=st.sampled_from([None, 5, 40]),
    causal=st.booleans(),
    cp_size=st.integers(2, 24),
    chunk=st.integers(1, 10),
    scale=st.sampled_from([1, 1 << 19]),
    limits=st.sampled_from([{"PARTNERS": swaps.PARTNERS}, {"PARTNERS": 1, "GATHERING_PASSES": 1, "SWAPS_TRIED": 2}]),
)
def test_candidates_of_packed_documents_are_those_of_the_python_planner(
    lengths, window, causal, cp_size, chunk, scale, limits
) -> None:
    assume(sum(lengths) >= cp_size * chunk)
    lengths = [scale * length for length in lengths]
    if window is None:
        mask = builders.varlen(doc_lengths=lengths, causal=causal)
    else:
        mask = builders.sliding_window(left=scale * window, right=0 if causal else window, doc_lengths=lengths)
    with patch.multiple(swaps, **limits):
        for tolerance in (1.0, 1.03):
            assert_equal_dispatches(mask, scale * chunk, cp_size, balance_tolerance=tolerance, algorithm="affinity")


@st.composite
def searches(draw):
    """Arguments of `affinity.search` of any kind: chunks need any blocks, perhaps not their own; many are alike."""
    rng = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    cp_size = draw(st.integers(2, 6) | st.integers(7, 40))
    num_chunks = cp_size * draw(st.integers(1, 4)) + draw(st.integers(0, 3))
    block = np.sort(rng.integers(0, num_chunks // draw(st.sampled_from([1, 2, 4])) + 1, num_chunks))
    block = np.unique(block, return_inverse=True)[1]  # no block without chunks
    needs = rng.random((num_chunks, int(block[-1]) + 1)) < draw(st.sampled_from([0.1, 0.3, 0.8]))
    traffic = object.__new__(Traffic)
    traffic.first, traffic.needed = np.append(0, needs.sum(axis=1).cumsum()), np.nonzero(needs)[1]
    traffic.block, traffic.chunk_rows = block, rng.integers(1, draw(st.sampled_from([2, 5, 1 << 24])), num_chunks)
    traffic.block_rows = np.bincount(block, traffic.chunk_rows).astype(np.int64)
    area = rng.integers(0, draw(st.sampled_from([2, 4, 100, 1 << 46])), num_chunks)
    balanced = rng.permutation(np.arange(num_chunks) % cp_size)
    tight = int(sum_by_rank(balanced, area, cp_size).max())
    loads = [tight * part // 8 for part in draw(st.lists(st.integers(8, 24), min_size=1, max_size=4))]
    starts = [
        Start(np.where(rng.random(num_chunks) < kept, rng.permutation(balanced), -1), most, least)
        for kept, most, least in draw(
            st.lists(
                st.tuples(st.sampled_from([0.0, 0.5, 1.0]), st.sampled_from(loads), st.sampled_from([0, *loads])),
                min_size=1,
                max_size=3,
            )
        )
    ]
    return SearchInput(traffic, area, balanced, starts, sorted(loads, reverse=True), draw(st.permutations(loads)))


@built
@settings(max_examples=150)
@given(
    searched=searches(),
    limits=st.fixed_dictionaries(
        {
            "SWAPS_PER_CHUNK": st.sampled_from([0, 1, swaps.SWAPS_PER_CHUNK]),
            "PARTNERS": st.sampled_from([1, swaps.PARTNERS]),
            "SWAPS_TRIED": st.sampled_from([1, 2, swaps.SWAPS_TRIED]),
            "GATHERING_PASSES": st.sampled_from([0, 1, swaps.GATHERING_PASSES]),
        }
    ),
)
def test_any_search_finds_what_that_in_python_finds(searched, limits) -> None:
    with patch.multiple(swaps, **limits):
        np.testing.assert_array_equal(cpp_solver.search(searched), search(searched))
        for target in (0, *searched.targets):
            loads = searched.area, np.bincount(searched.balanced), target
            np.testing.assert_array_equal(cpp_solver.even(*loads), _even(*loads))


@built
@pytest.mark.parametrize("passes", [1, swaps.GATHERING_PASSES])
def test_plans_that_are_gathered_from_the_even_dispatch_equal_those_of_the_python_planner(monkeypatch, passes) -> None:
    monkeypatch.setattr(swaps, "GATHERING_PASSES", passes)  # more than one are needed
    mask = builders.sliding_window(left=1024, right=0, doc_lengths=uneven_lengths(1 << 18, 8, 1))
    assert_equal_plans(mask, MagiConfig(dispatch=DispatchConfig(algorithm="affinity", balance_tolerance=1.0)), 16)


@built
@pytest.mark.parametrize(
    ("cp_size", "lengths", "window"),
    [
        (8, [304, 146, 47, 67, 422, 265, 285], 256),
        (6, [1020, 59, 173, 284], None),
        (7, [204, 259, 341, 27, 63, 318, 64, 516], None),
        (6, [813, 404, 39, 280], 256),
        (4, [138, 64, 464, 238, 376], 64),
    ],
)
def test_the_first_chunk_is_swapped_where_that_gathers_as_in_the_python_planner(cp_size, lengths, window) -> None:
    dispatch = DispatchConfig(algorithm="affinity", chunk_size=64, balance_tolerance=1.0)
    for causal in (True, False):
        mask = builders.varlen(doc_lengths=lengths, causal=causal)
        if window is not None:
            mask = builders.sliding_window(left=window, right=0 if causal else window, doc_lengths=lengths)
        assert_equal_plans(mask, MagiConfig(dispatch=dispatch), cp_size)


@built
def test_ranks_that_are_asked_for_a_swap_last_are_asked_in_the_same_order(monkeypatch) -> None:
    monkeypatch.setattr(swaps, "PARTNERS", 1)
    for seed in range(4):
        mask = builders.varlen(doc_lengths=uneven_lengths(20_000, 30, seed), causal=False)
        assert_equal_plans(
            mask, MagiConfig(dispatch=DispatchConfig(algorithm="affinity", chunk_size=128, balance_tolerance=1.0)), 12
        )


def test_where_it_is_not_built_plans_are_made_in_python_and_asking_for_it_is_an_error(monkeypatch) -> None:
    mask = builders.varlen(doc_lengths=[100, 300], causal=True)
    expected = plan_with("python", mask, MagiConfig(), 4)
    monkeypatch.setattr(cpp_solver, "_library", lambda: None)
    assert make_plan(mask, cp_size=4).plan_hash == expected.plan_hash
    with pytest.raises(ValueError, match=r"^planner: .*not built"):
        plan_with("native", mask, MagiConfig(), 4)


@built
def test_the_default_plans_in_cpp_where_it_is_built() -> None:
    assert cpp_solver.chosen("auto") and cpp_solver.chosen("native") and not cpp_solver.chosen("python")
