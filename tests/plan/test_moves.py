"""Plans whose queries are computed by other ranks than those that hold them, against a brute-force reading."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_magi.config import CommConfig, MagiConfig, OverlapConfig
from megatron_magi.mask.builders import causal
from megatron_magi.mask.dense import dense_mask
from megatron_magi.plan import Dispatch, Plan, given_dispatch, make_plan
from megatron_magi.plan.types import Transfer
from tests.mask.dense_definitions import count_cover
from tests.plan.test_layouts import exchanged, positions
from tests.plan.test_plan import check_other_sides, masks, stage_keys


def queries_of(plan: Plan) -> list[np.ndarray]:
    """Position of each row that each rank computes, by carrying out the moves on positions."""
    held = [plan.dispatch.global_index(rank) for rank in range(plan.cp_size)]
    moves = [plan.for_rank(rank).moves for rank in range(plan.cp_size)]
    if moves[0] is None:
        return held
    guests = in_order(exchanged(held, [m.there for m in moves]), [m.there for m in moves])
    back = in_order(exchanged(guests, [m.back for m in moves]), [m.back for m in moves])
    for rank, m in enumerate(moves):
        np.testing.assert_array_equal(held[rank][m.rows], back[rank])
        assert m.num_guests == len(guests[rank]) == m.back.num_send and len(m.rows) == m.there.num_send
    return [np.concatenate(pair) for pair in zip(held, guests, strict=True)]


def in_order(arrived: list[np.ndarray], transfers: list[Transfer]) -> list[np.ndarray]:
    return [a if t.recv_order is None else a[t.recv_order] for a, t in zip(arrived, transfers, strict=True)]


def host_of(compute: Dispatch) -> np.ndarray:
    """The rank of each token."""
    host = np.empty(compute.padded_seqlen, dtype=np.int64)
    for rank, index in enumerate(compute.global_indices()):
        host[index] = rank
    return host


@settings(max_examples=150)
@given(data=st.data(), mask=masks(), cp_size=st.integers(1, 8), degree=st.sampled_from([None, 0, 1, 3]))
def test_every_visible_pair_is_computed_once_by_the_host_of_its_query(data, mask, cp_size, degree) -> None:
    n = mask.total_seqlen_q
    dispatch = given_dispatch(data.draw(positions(n, cp_size)), n, cp_size)
    compute = given_dispatch(data.draw(positions(n, cp_size)), n, cp_size)
    plan = make_plan(mask, MagiConfig(overlap=OverlapConfig(degree=degree)), cp_size, dispatch, compute)
    host, home = host_of(compute)[:n], host_of(dispatch)[:n]
    visible, computed = dense_mask(mask), np.zeros((dispatch.padded_seqlen,) * 2, dtype=np.int64)
    queries = queries_of(plan)
    for rank in range(cp_size):
        keys, of_rank = stage_keys(plan, rank), plan.for_rank(rank)
        assert of_rank.num_queries == len(queries[rank]) and of_rank.num_rows == dispatch.shard_lengths[rank]
        for some, bands in zip(keys, of_rank.bands, strict=True):
            cover = count_cover(bands, len(queries[rank]), len(some))
            np.add.at(computed, np.ix_(queries[rank], some), cover)
            at_others = np.flatnonzero(host[np.minimum(queries[rank], n - 1)] != rank) if n else []
            assert not cover[at_others].any()
        missing = set(np.flatnonzero(visible[host == rank].any(axis=0)).tolist()) - set(keys[0].tolist())
        assert sorted(np.concatenate([[], *keys[1:]]).astype(int).tolist()) == sorted(missing)
        assert plan.stats().guest_rows[rank] == np.sum((host == rank) & (home != rank))
        assert of_rank.area == visible[host == rank].sum() == plan.stats().areas[rank]
    np.testing.assert_array_equal(computed[:n, :n], visible.astype(np.int64))
    assert computed.sum() == visible.sum()
    check_other_sides(plan)


def test_computing_at_home_is_the_plan_without_moves() -> None:
    home, other = given_dispatch("zigzag", 64, 4), given_dispatch("contiguous", 64, 4)
    plain = make_plan(causal(64), None, 4, home)
    same = make_plan(causal(64), None, 4, home, home)
    assert same.plan_hash == plain.plan_hash and same.for_rank(1).moves is None
    hashes = {make_plan(causal(64), None, 4, home, compute).plan_hash for compute in ("home", other)}
    assert len(hashes) == 2


def test_padding_stays_at_home() -> None:
    home, other = given_dispatch("contiguous", 61, 4), given_dispatch([[], [], [], [*range(61)]], 61, 4)
    plan = make_plan(causal(61), None, 4, home, other)
    assert plan.stats().guest_rows == (0, 0, 0, 48)
    plan = make_plan(causal(61), None, 4, home, given_dispatch([[*range(61)], [], [], []], 61, 4))
    assert plan.stats().guest_rows == (45, 0, 0, 0)


def test_moves_in_two_levels_bring_each_row_once() -> None:
    config = MagiConfig(comm=CommConfig(ranks_per_node=2))
    home, other = given_dispatch("contiguous", 64, 4), given_dispatch("zigzag", 64, 4)
    plan = make_plan(causal(64), config, 4, home, other)
    for rank in range(4):
        moves = plan.for_rank(rank).moves
        for transfer in (moves.there, moves.back):
            rows = np.concatenate([transfer.levels.near_rows, transfer.levels.relay_rows])
            assert sorted(rows.tolist()) == list(range(transfer.num_recv))


def test_a_wrong_place_to_compute_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"^compute: made for 8 tokens over 2 ranks"):
        make_plan(causal(9), None, 2, None, given_dispatch("zigzag", 8, 2))
    with pytest.raises(ValueError, match=r"^compute: expected a Dispatch, or home or auto, got 'zigzag'"):
        make_plan(causal(8), None, 2, None, "zigzag")
