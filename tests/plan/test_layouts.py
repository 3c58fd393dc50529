"""Dispatches of given layouts, and plans over them, against a brute-force reading of the mask."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_magi.config import CommConfig, MagiConfig, OverlapConfig
from megatron_magi.mask import AttnMask
from megatron_magi.mask.builders import causal, varlen
from megatron_magi.mask.dense import dense_mask
from megatron_magi.plan import Plan, PlanSet, Transfer, dispatch_from_chunks, given_dispatch, make_plan
from tests.mask.dense_definitions import count_cover
from tests.plan.test_plan import check_other_sides, masks, stage_keys


@st.composite
def positions(draw, total_seqlen: int, cp_size: int) -> list[list[int]]:
    """Positions of each rank, in runs of any order and length, some ranks perhaps without any; padding last."""
    padding = draw(st.integers(0, 4))
    bounds = sorted({0, total_seqlen, *draw(st.lists(st.integers(0, total_seqlen), max_size=12))})
    runs = draw(st.permutations([range(*pair) for pair in itertools.pairwise(bounds)]))
    held: list[list[int]] = [[] for _ in range(cp_size)]
    for run in (*runs, *(range(at, at + 1) for at in range(total_seqlen, total_seqlen + padding))):
        some = list(run)
        held[draw(st.integers(0, cp_size - 1))] += (
            some[::-1] if run.start < total_seqlen and draw(st.booleans()) else some
        )
    return held


@settings(max_examples=150)
@given(data=st.data(), mask=masks(), cp_size=st.integers(1, 8), degree=st.sampled_from([None, 0, 1, 3]))
def test_every_visible_pair_is_computed_once_and_only_missing_keys_are_fetched(data, mask, cp_size, degree) -> None:
    n = mask.total_seqlen_q
    held = data.draw(positions(n, cp_size))
    dispatch = given_dispatch(held, n, cp_size)
    assert [index.tolist() for index in dispatch.global_indices()] == held
    plan = make_plan(mask, MagiConfig(overlap=OverlapConfig(degree=degree)), cp_size, dispatch)
    visible, computed = dense_mask(mask), np.zeros((dispatch.padded_seqlen,) * 2, dtype=np.int64)
    for rank in range(cp_size):
        keys = stage_keys(plan, rank)
        for some, bands in zip(keys, plan.for_rank(rank).bands, strict=True):
            computed[np.ix_(held[rank], some)] += count_cover(bands, len(held[rank]), len(some))
        real = [at for at in held[rank] if at < n]
        assert plan.for_rank(rank).num_tokens == len(real) and plan.for_rank(rank).num_rows == len(held[rank])
        missing = set(np.flatnonzero(visible[real].any(axis=0)).tolist()) - set(real)
        assert sorted(np.concatenate([[], *keys[1:]]).astype(int).tolist()) == sorted(missing)
    np.testing.assert_array_equal(computed[:n, :n], visible.astype(np.int64))
    assert computed.sum() == visible.sum()
    check_other_sides(plan)


def exchanged(sent: list[np.ndarray], transfers: list[Transfer]) -> list[np.ndarray]:
    """What each of the ranks of an exchange receives of the rows ``sent`` that they hold."""
    parts = [
        np.split(rows[t.send_index], np.cumsum(t.send_splits)[:-1]) for rows, t in zip(sent, transfers, strict=True)
    ]
    return [np.concatenate([part[dst] for part in parts]) for dst in range(len(sent))]


def in_two_levels(plan: Plan, stage: int, per_node: int) -> list[np.ndarray]:
    """Global key of each row of the stage's buffers, by carrying out the two levels on indices."""
    ranks = range(plan.cp_size)
    held = [plan.dispatch.global_index(rank) for rank in ranks]
    levels = [plan.for_rank(rank).transfers[stage].levels for rank in ranks]
    nodes = [list(ranks[first : first + per_node]) for first in ranks[::per_node]]
    arrived, buffers = dict.fromkeys(ranks), [np.full(plan.for_rank(r).transfers[stage].num_recv, -1) for r in ranks]
    for peers in zip(*nodes, strict=True):
        arrived |= zip(peers, exchanged([held[r] for r in peers], [levels[r].far for r in peers]), strict=True)
    for node in nodes:
        near = exchanged([held[r] for r in node], [levels[r].near for r in node])
        relayed = exchanged([arrived[r] for r in node], [levels[r].relay for r in node])
        for rank, own, others in zip(node, near, relayed, strict=True):
            buffers[rank][levels[rank].near_rows] = own
            buffers[rank][levels[rank].relay_rows] = others
    return buffers


@settings(max_examples=60)
@given(data=st.data(), mask=masks(), degree=st.sampled_from([1, 2]))
def test_rows_in_any_order_cross_nodes_once_and_arrive_in_order(data, mask, degree) -> None:
    dispatch = given_dispatch(data.draw(positions(mask.total_seqlen_q, 4)), mask.total_seqlen_q, 4)
    config = MagiConfig(overlap=OverlapConfig(degree=degree), comm=CommConfig(ranks_per_node=2))
    plan = make_plan(mask, config, 4, dispatch)
    for stage in range(plan.degree):
        for rank, buffer in enumerate(in_two_levels(plan, stage, 2)):
            np.testing.assert_array_equal(buffer, stage_keys(plan, rank)[1 + stage])


@settings(max_examples=100)
@given(total=st.integers(0, 200), cp_size=st.integers(1, 8), name=st.sampled_from(["contiguous", "zigzag"]))
def test_pieces_of_a_sequence_are_those_of_megatron(total, cp_size, name) -> None:
    pieces = cp_size * (2 if name == "zigzag" and cp_size > 1 else 1)
    dispatch = given_dispatch(name, total, cp_size)
    padded = max(-(-total // pieces), 1) * pieces
    view = np.arange(padded).reshape(pieces, -1)
    for rank in range(cp_size):
        mine = [rank] if pieces == cp_size else [rank, 2 * cp_size - 1 - rank]
        np.testing.assert_array_equal(dispatch.global_index(rank), view[mine].ravel())
    assert dispatch == given_dispatch(dispatch.global_indices(), total, cp_size)
    assert given_dispatch(name, total, cp_size, pad_size=padded - total + pieces).padded_seqlen == padded + pieces


@settings(max_examples=60)
@given(lengths=st.lists(st.integers(0, 5), min_size=1, max_size=8).filter(any), cp_size=st.integers(1, 5))
def test_pieces_of_documents_are_those_of_each_document(lengths, cp_size) -> None:
    ends = np.cumsum(lengths) * 2 * cp_size
    dispatch = given_dispatch("zigzag_documents", int(ends[-1]), cp_size, cu_seqlens=[0, *ends])
    for rank in range(cp_size):
        expected = []
        for start, size in zip([0, *ends], lengths, strict=False):
            pieces = np.arange(start, start + 2 * cp_size * size).reshape(2 * cp_size, size)
            expected += (
                pieces.ravel().tolist() if cp_size == 1 else pieces[[rank, 2 * cp_size - 1 - rank]].ravel().tolist()
            )
        assert dispatch.global_index(rank).tolist() == expected


def test_one_layout_is_one_value_and_hashes_tell_layouts_apart() -> None:
    mask = causal(16)
    named = {name: given_dispatch(name, 16, 2) for name in ("contiguous", "zigzag")}
    turned = given_dispatch([[*range(7, -1, -1)], [*range(8, 16)]], 16, 2)
    assert turned != named["contiguous"] and turned.chunk_rank.sum() > 0
    # The same chunks on the same ranks, in another order of rows.
    ordered = [
        given_dispatch([rows, range(4, 12)], 16, 2)
        for rows in ([*range(4), *range(12, 16)], [*range(12, 16), *range(4)])
    ]
    hashes = {make_plan(mask, None, 2, dispatch).plan_hash for dispatch in (named["contiguous"], turned, *ordered)}
    assert len(hashes) == 4 and ordered[0] == named["zigzag"]
    again = given_dispatch("zigzag", 16, 2)
    assert again == named["zigzag"] and hash(again) == hash(named["zigzag"])
    assert make_plan(mask, None, 2, again).plan_hash == make_plan(mask, None, 2, named["zigzag"]).plan_hash


def test_masks_of_a_microbatch_share_a_given_layout() -> None:
    dispatch = given_dispatch("zigzag", 32, 2)
    plans = PlanSet({0: causal(32), 1: varlen([0, 20, 32])}.__getitem__, [0, 1], MagiConfig(), 1, 2, dispatch)
    assert plans.dispatch is dispatch
    assert [plans.of(key).num_rows for key in (0, 1)] == [16, 16]


@pytest.mark.parametrize(
    ("layout", "options", "message"),
    [
        ("zig", {}, "layout: expected one of contiguous, zigzag, zigzag_documents"),
        (3, {}, "layout: expected positions for each of 2 ranks, got int"),
        ([[0, 1], [2], [3]], {}, "layout: expected positions for each of 2 ranks, got 3 arrays"),
        ([[0, 1], [1, 2, 3, 4, 5, 6, 7, 8]], {}, "layout: position 1 is held 2 times"),
        ([[0, 1, 2, 3], [3, 4, 5, 6]], {}, "layout: position 3 is held 2 times, position 7 never"),
        ([[0, 1, 2], [3, 4, 5, 6]], {}, "layout: 7 positions for 8 tokens; some are missing"),
        ([[0, 1, 2, 3], [4, 5, 6, 9]], {}, "layout: 8 positions must be all from 0 to 7"),
        ([[0, 1, 2, -1], [4, 5, 6, 7]], {}, "layout: 8 positions must be all from 0 to 7"),
        ([[0, 1, 2, 3], [8, 4, 5, 6, 7]], {}, r"layout\[1\]: padding must be the last rows"),
        ([[0.5], [1]], {}, r"layout\[0\]: expected integers"),
        ([[0, 1, 2, 3], [4, 5, 6, 7]], {"pad_size": 1}, "pad_size: got 1, but the layout has 0 rows"),
        ("zigzag", {"pad_size": 1}, "pad_size: got 1, but 8 tokens over 2"),
        ("zigzag", {"cu_seqlens": [0, 8]}, "cu_seqlens: bounds of documents are for"),
        ("zigzag_documents", {}, "cu_seqlens: bounds of documents are for"),
        ("zigzag_documents", {"cu_seqlens": [0, 4]}, "cu_seqlens: expected ascending bounds from 0 to 8"),
        ("zigzag_documents", {"cu_seqlens": [0, 8, 4, 8]}, "cu_seqlens: expected ascending bounds"),
        ("zigzag_documents", {"cu_seqlens": [0, 4, 7, 8]}, "cu_seqlens: document 1 has 3 tokens, no multiple of 4"),
    ],
)
def test_wrong_layouts_are_refused_by_name(layout, options, message) -> None:
    with pytest.raises(ValueError, match=f"^({message})"):
        given_dispatch(layout, 8, 2, **options)


@pytest.mark.parametrize("rows", [[0, 0], [0, 3], [4], [[0], [4]]])
def test_chunks_must_take_each_row_once(rows) -> None:
    with pytest.raises(ValueError, match=r"^chunk_row: expected the rows of each rank"):
        dispatch_from_chunks(8, np.array([0, 4, 8]), np.array([0, 0]), 1, np.array(rows))


def test_a_mask_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^dispatch: made for 8 tokens over 2 ranks"):
        make_plan(AttnMask([], 9), None, 2, given_dispatch("zigzag", 8, 2))
