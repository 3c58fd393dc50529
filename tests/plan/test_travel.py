"""The choice of the ranks that compute queries."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_magi.backends.costs import DEFAULT
from megatron_magi.config import CommConfig, CostModel, DispatchConfig, MagiConfig, OverlapConfig
from megatron_magi.mask.builders import causal, full, varlen
from megatron_magi.mask.dense import dense_mask
from megatron_magi.plan import Dispatch, PlanSet, given_dispatch, make_plan, travel
from megatron_magi.plan.chunks import ChunkedMask
from megatron_magi.plan.counts import count, count_moves
from megatron_magi.plan.predict import Moved, predict_all
from megatron_magi.plan.swaps import sum_by_rank
from tests.plan.test_layouts import positions
from tests.plan.test_moves import host_of
from tests.plan.test_plan import masks, uneven_lengths

SLOW = replace(DEFAULT, forward_tflops=1e-4, backward_tflops=1e-4)
"""A GPU on which even short sequences are worth moving."""


def config_of(rates=SLOW, planner="auto", **options) -> MagiConfig:
    cost = CostModel(num_heads_q=8, num_heads_kv=2)
    return MagiConfig(
        dispatch=DispatchConfig(rates=rates, planner=planner), overlap=OverlapConfig(cost=cost), **options
    )


def step_of(mask, dispatch: Dispatch, compute: Dispatch, config: MagiConfig) -> float:
    """Predicted step of a plan, from single tokens."""
    home, host = host_of(dispatch), host_of(dispatch)
    host[: mask.total_seqlen_q] = host_of(compute)[: mask.total_seqlen_q]
    bounds, node = np.arange(len(home) + 1), DEFAULT.ranks_per_node
    counts = count(ChunkedMask(mask, bounds, dispatch.cp_size), home, node, host)
    moved = Moved(*count_moves(bounds, home, host[None], dispatch.cp_size, node))
    counts = counts.map(lambda alone: alone[None])
    rows = [max(dispatch.shard_lengths)]
    return predict_all(counts, rows, config.dispatch.rates, config.overlap, moved)[0].step_us


@settings(max_examples=60)
@given(data=st.data(), mask=masks(), cp_size=st.integers(1, 8), slow=st.booleans())
def test_no_choice_is_predicted_slower_than_all_at_home(data, mask, cp_size, slow) -> None:
    n = mask.total_seqlen_q
    dispatch = given_dispatch(data.draw(positions(n, cp_size)), n, cp_size)
    config = config_of(SLOW if slow else DEFAULT)
    found = travel.choose_hosts(mask, dispatch, config)
    plan = make_plan(mask, config, cp_size, dispatch, "auto")
    if found.hosts is None:
        assert not any(plan.stats().guest_rows)
        return
    compute = given_dispatch(
        [np.flatnonzero(np.repeat(found.hosts[1], np.diff(found.hosts[0])) == r) for r in range(cp_size)], n, cp_size
    )
    at_home, chosen = (step_of(mask, dispatch, where, config) for where in (dispatch, compute))
    assert (at_home, chosen) == pytest.approx((found.home.step_us, found.predicted.step_us), rel=1e-6)
    assert chosen < at_home
    # Each rank computes what it was given; padding stays at home.
    visible = dense_mask(mask).sum(axis=1)
    np.testing.assert_array_equal(plan.stats().areas, sum_by_rank(host_of(compute)[:n], visible, cp_size))
    assert host_of(compute)[n:].tolist() == host_of(dispatch)[n:].tolist()


@pytest.mark.parametrize(("layout", "at_home"), [("contiguous", 1.88), ("zigzag", 1.0)])
def test_even_work_stays_at_home_and_uneven_work_is_made_even(layout, at_home) -> None:
    mask, dispatch = causal(1 << 17), given_dispatch(layout, 1 << 17, 8)
    config = config_of(DEFAULT)
    home, found = (make_plan(mask, config, 8, dispatch, compute).stats() for compute in ("home", "auto"))
    assert home.balance == pytest.approx(at_home, abs=0.01)
    assert found.balance < 1.03 and any(found.guest_rows) == (at_home > 1.02)


def test_a_short_sequence_is_computed_at_home() -> None:
    dispatch = given_dispatch("contiguous", 1024, 8)
    assert travel.choose_hosts(causal(1024), dispatch, config_of(DEFAULT)).hosts is None


def test_whole_documents_go_to_a_host() -> None:
    # One rank holds 8 documents, the other next to nothing: it fetches the keys of those that it computes alone.
    mask = varlen(doc_lengths=[4096] * 8 + [1] * 28672, causal=False)
    dispatch = given_dispatch([[*range(32768)], [*range(32768, 61440)]], 61440, 2)
    plan = make_plan(mask, config_of(DEFAULT), 2, dispatch, "auto")
    assert plan.stats().balance < 1.02 and plan.stats().received_rows == (0, 16384)


def test_queries_stay_in_their_node_where_others_are_far() -> None:
    # In each of two nodes one rank has all the work: no query has to cross.
    mask = varlen(doc_lengths=[8192, *[1] * 8192, 8192, *[1] * 8192], causal=True)
    dispatch = given_dispatch("contiguous", 32768, 4)
    config = config_of(comm=CommConfig(ranks_per_node=2))
    plan = make_plan(mask, config, 4, dispatch, "auto")
    assert plan.stats().balance < 1.05
    for rank in range(4):
        moves = plan.for_rank(rank).moves
        assert not moves.there.levels.far.num_recv and not moves.there.levels.relay.num_recv


@settings(max_examples=40)
@given(data=st.data(), mask=masks(), cp_size=st.integers(2, 8))
def test_blocks_cover_the_sequence_and_hold_their_keys(data, mask, cp_size) -> None:
    n = mask.total_seqlen_q
    dispatch = given_dispatch(data.draw(positions(n, cp_size)), n, cp_size)
    blocks, home, visible = travel.make_blocks(mask, dispatch), host_of(dispatch), dense_mask(mask)
    for at, (first, last) in enumerate(zip(blocks.bounds, blocks.bounds[1:], strict=False)):
        assert (home[first:last] == blocks.home[at]).all() and blocks.rows[at] == last - first
        rows = visible[first:last] if first < n else visible[:0]
        keys = np.flatnonzero(rows.any(axis=0))
        assert blocks.area[at] == rows.sum()
        if len(keys):
            low, high = blocks.bounds[blocks.low[at]], blocks.bounds[blocks.high[at]]
            assert low <= keys[0] <= keys[-1] < high
    assert blocks.bounds[0] == 0 and blocks.bounds[-1] == dispatch.padded_seqlen


def test_scattered_layouts_are_computed_at_home(monkeypatch) -> None:
    monkeypatch.setattr(travel, "MOST_BLOCKS", 16)
    dispatch = given_dispatch([[*range(0, 64, 2)], [*range(1, 64, 2)]], 64, 2)
    assert travel.make_blocks(full(64), dispatch) is None
    assert travel.choose_hosts(full(64), dispatch, config_of()).hosts is None


def test_every_mask_of_a_microbatch_has_its_own_hosts() -> None:
    dispatch, config = given_dispatch("contiguous", 4096, 4), config_of()
    masks_of = {0: causal(4096), 1: full(4096), 2: varlen(doc_lengths=[100, 1000, 2996])}
    plans = PlanSet(masks_of.__getitem__, [0, 1], config, 1, 4, dispatch)
    travels = [plans.of(key).moves is not None for key in (0, 1, 2)]
    assert travels == [True, False, True]
    at_home = replace(config, dispatch=replace(config.dispatch, queries="home"))
    assert PlanSet(masks_of.__getitem__, [0], at_home, 1, 4, dispatch).of(0).moves is None
    wanted = replace(config, dispatch=replace(config.dispatch, queries="travel", algorithm="sequential"))
    assert PlanSet(masks_of.__getitem__, [0], wanted, 1, 4).of(0).moves is not None
    free = replace(wanted, dispatch=replace(wanted.dispatch, queries="auto"))
    assert PlanSet(masks_of.__getitem__, [0], free, 1, 4).of(0).moves is None


def test_a_choice_is_the_same_on_every_rank_and_depends_on_the_rates() -> None:
    mask, dispatch = varlen(doc_lengths=uneven_lengths(1 << 16, 40, 0)), given_dispatch("contiguous", 1 << 16, 8)
    plans = [make_plan(mask, config_of(DEFAULT), 8, dispatch, "auto") for _ in range(2)]
    assert plans[0].plan_hash == plans[1].plan_hash
    config = config_of(replace(DEFAULT, hidden=0.4))
    config = replace(config, dispatch=replace(config.dispatch, algorithm="zigzag"))
    plain = replace(config, dispatch=replace(config.dispatch, rates=None))
    assert (
        make_plan(mask, config, 8, dispatch, "auto").plan_hash != make_plan(mask, plain, 8, dispatch, "auto").plan_hash
    )


def test_python_and_cpp_choose_the_same_hosts() -> None:
    from megatron_magi.plan import cpp_solver

    if not cpp_solver.available():
        pytest.skip("the C++ planner is not built")
    rng = np.random.default_rng(0)
    for seed in range(12):
        cp_size = int(rng.integers(2, 17))
        total = int(rng.integers(4000, 60_000))
        mask = varlen(doc_lengths=uneven_lengths(total, int(rng.integers(1, 60)), seed), causal=bool(seed % 2))
        name = ("contiguous", "zigzag")[seed % 3 == 0]
        dispatch = given_dispatch(name, total, cp_size)
        found = [travel.choose_hosts(mask, dispatch, config_of(planner=p)) for p in ("python", "native")]
        assert (found[0].home, found[0].predicted) == (found[1].home, found[1].predicted)
        assert (found[0].hosts is None) == (found[1].hosts is None)
        if found[0].hosts is not None:
            np.testing.assert_array_equal(found[0].hosts[1], found[1].hosts[1])
