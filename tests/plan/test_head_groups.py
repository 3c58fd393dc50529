"""Plans whose queries travel by groups of heads."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_magi.backends.costs import DEFAULT
from megatron_magi.config import CostModel, DispatchConfig, MagiConfig, OverlapConfig
from megatron_magi.mask.builders import causal
from megatron_magi.mask.dense import dense_mask
from megatron_magi.plan import dispatch_from_chunks, given_dispatch, make_plan
from megatron_magi.plan.head_groups import copied_chunks, copied_mask, copies_us, num_groups, overlap_of_group
from megatron_magi.plan.travel import BETTER, choose_hosts
from tests.plan.test_layouts import positions
from tests.plan.test_plan import masks


@settings(max_examples=40)
@given(data=st.data(), mask=masks(), cp_size=st.integers(1, 4), groups=st.integers(1, 3))
def test_groups_are_copies_of_mask_and_layout(data, mask, cp_size, groups) -> None:
    n = mask.total_seqlen_q
    dispatch = given_dispatch(data.draw(positions(n, cp_size)), n, cp_size)
    padded = dispatch.padded_seqlen
    copied = np.zeros((groups, padded, groups, padded), dtype=bool)
    for group in range(groups):
        copied[group, :n, group, :n] = dense_mask(mask)
    found = copied_mask(mask, padded, groups)
    assert np.array_equal(dense_mask(found), copied.reshape(groups * padded, -1))
    held = dispatch_from_chunks(*copied_chunks(dispatch, groups))
    for rank in range(cp_size):
        rows = dispatch.global_index(rank)
        assert held.global_index(rank).tolist() == [g * padded + at for g in range(groups) for at in rows.tolist()]


def config_of(flatten: bool, **rates) -> MagiConfig:
    dispatch = DispatchConfig(rates=replace(DEFAULT, **rates), flatten_head_groups=flatten)
    return MagiConfig(dispatch, OverlapConfig(cost=CostModel(num_heads_q=64, num_heads_kv=8)))


def test_groups_are_taken_where_their_step_is_predicted_to_be_shorter_with_all_copies() -> None:
    mask, dispatch, far = causal(1 << 19), given_dispatch("contiguous", 1 << 19, 64), config_of(True)
    rows, groups = (make_plan(mask, config, 64, dispatch, "auto") for config in (config_of(False), far))
    assert (rows.head_groups, groups.head_groups, num_groups(far)) == (1, 8, 8)
    of_rows = choose_hosts(mask, dispatch, far).predicted.step_us
    held = dispatch_from_chunks(*copied_chunks(dispatch, 8))
    of_group = replace(far, overlap=overlap_of_group(far.overlap, 8))
    of_groups = choose_hosts(copied_mask(mask, dispatch.padded_seqlen, 8), held, of_group).predicted.step_us
    assert of_groups + copies_us(1 << 13, far.overlap.cost, DEFAULT) <= BETTER * of_rows
    assert sum(groups.stats().received_rows) < 0.95 * sum(rows.stats().received_rows)
    assert 0 <= sum(groups.stats().areas) - mask.area < 64
    assert groups.stats().num_rows == rows.stats().num_rows == (1 << 13,) * 64
    near = make_plan(causal(1 << 14), far, 2, given_dispatch("contiguous", 1 << 14, 2), "auto")
    assert near.head_groups == 1 and any(near.stats().guest_rows)
    even = make_plan(causal(1 << 14), far, 2, given_dispatch("zigzag", 1 << 14, 2), "auto")
    assert even.head_groups == 1 and not any(even.stats().guest_rows)


@pytest.mark.parametrize(("heads", "groups"), [(1, 1), (2, 2), (8, 8), (12, 6), (32, 8), (7, 7), (11, 1)])
def test_groups_divide_the_key_heads(heads: int, groups: int) -> None:
    config = replace(config_of(True), overlap=OverlapConfig(cost=CostModel(num_heads_q=heads, num_heads_kv=heads)))
    assert num_groups(config) == groups


def test_what_does_not_fit_is_refused() -> None:
    mask, dispatch = causal(64), given_dispatch("zigzag", 64, 2)
    with pytest.raises(ValueError, match=r"^head_groups: 2 are for a dispatch as compute"):
        make_plan(mask, config_of(True), 2, dispatch, "auto", head_groups=2)
    with pytest.raises(ValueError, match=r"^compute: made for 64 tokens over 2 ranks, the mask has 128 over 2"):
        make_plan(mask, config_of(True), 2, dispatch, given_dispatch("contiguous", 64, 2), head_groups=2)
    with pytest.raises(ValueError, match=r"^head_groups: 3 do not divide num_heads_q=64"):
        make_plan(mask, config_of(True), 2, dispatch, given_dispatch("contiguous", 192, 2), head_groups=3)
