"""Dispatch by predicted time: what is counted, what is predicted, what is chosen."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_magi.backends.sm90 import choices, kernels
from megatron_magi.backends.sm90.cost import H100, KERNELS
from megatron_magi.comm.agreement import start_agreement
from megatron_magi.config import CostModel, DispatchConfig, MagiConfig, OverlapConfig
from megatron_magi.mask import AttnMask, builders
from megatron_magi.mask.dense import dense_bands, dense_mask
from megatron_magi.plan import cpp_solver, dispatch_from_chunks, make_dispatch, make_plan, predict
from megatron_magi.plan.chunks import ChunkedMask, chunk_bounds
from megatron_magi.plan.counts import Work, count
from megatron_magi.plan.dispatch import candidates, fastest, predictions
from megatron_magi.plan.partition import areas_by_place, partition

from .test_plan import LONG, masks, uneven_lengths

OVERLAP = OverlapConfig(cost=CostModel(num_heads_q=32, num_heads_kv=8))
built = pytest.mark.skipif(not cpp_solver.available(), reason="the planner in C++ is not built")


def batch(kind: str, total: int = 65536, num_documents: int = 20, seed: int = 0) -> AttnMask:
    lengths = uneven_lengths(total, num_documents, seed)
    if kind == "window":
        return builders.sliding_window(left=1024, right=0, doc_lengths=lengths)
    return builders.varlen(doc_lengths=lengths, causal=kind == "causal")


def scattered(mask: AttnMask, cp_size: int, seed: int, chunk: int) -> tuple[ChunkedMask, np.ndarray]:
    """Chunks given to ranks at random."""
    bounds = np.append(np.arange(0, mask.total_seqlen_q, chunk), mask.total_seqlen_q)
    rank = np.random.default_rng(seed).integers(0, cp_size, len(bounds) - 1)
    return ChunkedMask(mask, bounds, cp_size), rank


def scored(mask: AttnMask, cp_size: int, config: DispatchConfig):
    chunked = ChunkedMask(mask, chunk_bounds(mask.total_seqlen_q, cp_size, config), cp_size)
    found = candidates(chunked, config)
    return found, predictions(found, chunked, config, OVERLAP)


@st.composite
def banded_masks(draw) -> AttnMask:
    """A window, or rows that see two ranges of keys, in any order."""
    total, rng = draw(st.integers(4, 48)), np.random.default_rng(draw(st.integers(0, 1 << 30)))
    if draw(st.booleans()):
        return builders.sliding_window(total, draw(st.integers(0, 8)), draw(st.integers(0, 8)))
    cuts = np.unique([0, *rng.integers(0, total, draw(st.integers(0, 6))), total])
    slices = []
    for q0, q1 in itertools.pairwise(cuts.tolist()):
        k = np.sort(rng.integers(0, total + 1, 4))
        slices += [[q0, q1, *k[:2], rng.integers(4)], [q0, q1, *k[2:], rng.integers(4)]]
    return AttnMask(rng.permutation(np.array(slices)), total)


@built
@settings(max_examples=150)
@given(
    mask=masks(may_be_long=True) | banded_masks(),
    cp_size=st.integers(1, 6),
    seed=st.integers(0, 99),
    chunk=st.integers(1, 9),
    node=st.integers(1, 4),
)
def test_counts_in_cpp_equal_those_in_python(mask, cp_size, seed, chunk, node) -> None:
    chunked, rank = scattered(mask, cp_size, seed, chunk * (LONG if mask.total_seqlen_q >= LONG else 1))
    for ours, theirs in zip(*(c(chunked, rank, node).table() for c in (count, cpp_solver.count)), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@settings(max_examples=40)
@given(
    mask=masks(max_seqlen=30) | banded_masks(),
    cp_size=st.integers(1, 4),
    seed=st.integers(0, 99),
    chunk=st.integers(1, 9),
)
def test_counts_are_those_of_the_pieces_of_the_dense_mask(mask, cp_size, seed, chunk) -> None:
    chunked, rank = scattered(mask, cp_size, seed, chunk)
    held = np.repeat(rank, np.diff(chunked.bounds))
    expected, firsts = np.zeros((4, 2, cp_size), dtype=np.int64), [[set() for _ in range(cp_size)] for _ in range(2)]
    runs = np.split(np.arange(len(held)), np.flatnonzero(np.diff(held)) + 1)
    for band, rows in itertools.product(mask.bands, runs):
        this, seen = held[rows[0]], dense_bands(band[None], len(held), len(held))[rows]
        for place, keys in enumerate((held == this, held != this)):
            of = np.flatnonzero(seen.any(axis=0) & keys)
            if len(of):
                see = seen[:, of[0] : of[-1] + 1].any(axis=1)  # also keys between them
                expected[:3, place, this] += seen[:, of].sum(), see.sum(), len(of)
                firsts[place][this].add(rows[see][0])
    expected[3] = [[len(first) for first in of_place] for of_place in firsts]
    counts = count(chunked, rank, 8)
    np.testing.assert_array_equal([counts.work.area, counts.work.rows, counts.work.keys, counts.work.starts], expected)


@settings(max_examples=50)
@given(
    mask=masks(), cp_size=st.integers(1, 6), seed=st.integers(0, 99), chunk=st.integers(1, 9), node=st.integers(1, 4)
)
def test_counts_are_those_of_the_plan(mask, cp_size, seed, chunk, node) -> None:
    chunked, rank = scattered(mask, cp_size, seed, chunk)
    counts = count(chunked, rank, node)
    dispatch = dispatch_from_chunks(mask.total_seqlen_q, chunked.bounds, rank, cp_size)
    part = partition(mask, dispatch)
    np.testing.assert_array_equal(counts.work.area, np.stack(areas_by_place(part)))
    np.testing.assert_array_equal(counts.received.sum(axis=0), part.remote_rows)
    plan = make_plan(mask, MagiConfig(overlap=OverlapConfig(degree=1)), cp_size, dispatch)
    for this in range(cp_size):
        splits = sum((np.array(t.send_splits) for t in plan.for_rank(this).transfers), np.zeros(cp_size, np.int64))
        is_far = np.arange(cp_size) // node != this // node
        assert counts.sent[:, this].tolist() == [splits[~is_far].sum(), splits[is_far].sum()]


@settings(max_examples=50)
@given(mask=masks(), cp_size=st.integers(1, 4), seed=st.integers(0, 99), chunk=st.integers(1, 9))
def test_no_key_is_seen_by_more_rows_than_are_counted(mask, cp_size, seed, chunk) -> None:
    chunked, rank = scattered(mask, cp_size, seed, chunk)
    counts, held = count(chunked, rank, 8), np.repeat(rank, np.diff(chunked.bounds))
    for this in range(cp_size):
        seen = dense_mask(mask)[held == this].sum(axis=0)
        for place, keys in enumerate((held == this, held != this)):
            assert seen[keys].max(initial=0) <= counts.work.tallest[place, this] <= counts.work.rows[place, this]


def test_a_key_that_many_rows_see_keeps_its_sm_busy_longer_than_the_others() -> None:
    # As many pairs: all rows see the same 128 keys, or each its own. Keys take all heads: dq has its own kernel.
    shared = AttnMask(np.array([[0, 16384, 0, 128, 0]]), 16384)
    masks = shared, builders.varlen(doc_lengths=[128] * 128, causal=False)
    counts = [count(ChunkedMask(mask, np.array([0, 16384]), 1), np.array([0]), 8) for mask in masks]
    one, many = (predict.kernels_us(c, 16384, H100, OVERLAP.cost)[1] for c in counts)
    assert counts[0].work.area[0, 0] == counts[1].work.area[0, 0] and one > 2 * many


@pytest.mark.parametrize("planner", ["python", pytest.param("native", marks=built)])
def test_rows_of_a_window_stay_together_with_few_heads_too(planner) -> None:
    # Key heads of one rank of 8 tensor-parallel ones: a tile of keys is no longer busy than a window is wide.
    mask = builders.sliding_window(1 << 16, 1023, 0)
    counts = count(ChunkedMask(mask, np.array([0, 1 << 15, 1 << 16]), 2), np.arange(2), 8)
    # The corner before the first whole window is a piece of its own.
    assert counts.work.tallest.tolist() == [[2048, 1024], [0, 1023]]
    cost = CostModel(num_heads_q=8, num_heads_kv=1)
    plan = make_plan(mask, MagiConfig(DispatchConfig(planner=planner), overlap=OverlapConfig(cost=cost)), 2)
    assert max(plan.stats().received_rows) == 1023


def test_stages_of_one_launch_are_predicted_as_one() -> None:
    mask = batch("causal")
    chunked, rank = scattered(mask, 4, 0, 1024)
    counts, overlap = count(chunked, rank, 8), replace(OVERLAP, degree=4)
    for heads_kv in (1, 8):
        cost = CostModel(num_heads_q=32, num_heads_kv=heads_kv)
        staged, at_once = (
            predict.predict(counts, 16384, replace(H100, hidden=1.0), replace(overlap, one_launch=one, cost=cost))
            for one in (False, True)
        )
        assert at_once.degree == staged.degree == 4
        assert at_once.backward_us < staged.backward_us and at_once.step_us < staged.step_us
        # More than two ranks that fetch much go by stages in the forward.
        is_small = counts.received.sum(axis=0).max() * cost.row_bytes <= KERNELS.most_forward_bytes
        assert is_small == (heads_kv == 1)
        assert at_once.forward_us < staged.forward_us if is_small else at_once.forward_us == staged.forward_us
    two = count(chunked._replace(cp_size=2), rank % 2, 8)
    assert two.received.sum(axis=0).max() * OVERLAP.cost.row_bytes > KERNELS.most_forward_bytes
    staged, at_once = (predict.predict(two, 32768, H100, replace(overlap, one_launch=one)) for one in (False, True))
    assert at_once.forward_us < staged.forward_us
    kept = replace(overlap, hide_tail_reduce=True)  # stages follow each other
    assert predict.predict(counts, 16384, H100, replace(kept, one_launch=True)) == predict.predict(
        counts, 16384, H100, replace(kept, one_launch=False)
    )
    counts = count(chunked, rank, 2)  # between nodes rows come stage by stage
    assert predict.predict(counts, 16384, H100, overlap) == predict.predict(
        counts, 16384, H100, replace(overlap, one_launch=False)
    )


def test_nodes_of_the_configuration_come_before_those_of_the_rates() -> None:
    mask = batch("full")
    slow = replace(H100, far_gbytes_per_s=1.0, hidden=0.0)
    config = DispatchConfig(rates=slow)
    chunked = ChunkedMask(mask, chunk_bounds(mask.total_seqlen_q, 4, config), 4)
    found = candidates(chunked, config)
    times = [
        predictions(found, chunked, replace(config, rates=rates), OVERLAP, node)["zigzag"].device_us
        for rates, node in ((slow, None), (slow, 2), (replace(slow, ranks_per_node=2), None))
    ]
    assert times[0] < times[1] == times[2]


def test_rows_and_keys_are_counted_where_they_are_seen() -> None:
    # Rank 0 has 0 to 4 and 8 to 12; of one causal document, its last rows see own keys on both sides of others'.
    counts = count(ChunkedMask(builders.causal(16), np.arange(0, 17, 4), 2), np.array([0, 1, 0, 1]), 8)
    assert counts.work.rows.tolist() == [[8, 8], [4, 8]]
    assert counts.work.keys.tolist() == [[12, 12], [4, 12]]
    assert counts.work.row_edges.tolist() == [[8, 8], [0, 0]]
    assert counts.work.starts.tolist() == [[2, 2], [1, 2]]
    assert counts.work.tallest.tolist() == [[8, 8], [4, 8]]
    assert counts.received.tolist() == [[4, 8], [0, 0]]


@pytest.mark.parametrize(
    "change",
    [
        {"forward_tflops": 0.5},
        {"backward_tflops": 0.5},
        {"memory_gbytes_per_s": 0.5},
        {"gbytes_per_s": 0.1},
        {"collective_us": 10.0},
        {"tile_columns": 3.0},
        {"backward_us": 3.0},
    ],
)
def test_a_slower_machine_is_predicted_to_take_longer(change) -> None:
    mask = batch("causal")
    chunked, rank = scattered(mask, 4, 0, 1024)
    counts = count(chunked, rank, 8)
    slower = replace(H100, **{name: getattr(H100, name) * factor for name, factor in change.items()})
    before, after = (predict.predict(counts, 16384, rates, OVERLAP).device_us for rates in (H100, slower))
    assert after > before


@settings(max_examples=40)
@given(
    seed=st.integers(0, 99), field=st.sampled_from([*Work._fields, "received", "sent"]), more=st.integers(1, 1 << 30)
)
def test_more_to_do_never_takes_less(seed, field, more) -> None:
    mask = batch("causal", seed=seed)
    chunked, rank = scattered(mask, 4, seed, 1024)
    counts = count(chunked, rank, 8)
    overlap = replace(OVERLAP, degree=1)
    before = predict.predict(counts, 16384, H100, overlap)
    grown = getattr(counts.work if field in Work._fields else counts, field).copy()
    if field == "area":
        # Whether heads are packed and dq is summed goes by the area as well, and is a choice of the faster way.
        grown[1] += grown[1] * 8 + 16384 * 8192
    elif field in ("received", "sent", "row_edges", "key_edges"):
        grown += more
    else:
        return
    if field in Work._fields:
        counts = counts._replace(work=counts.work._replace(**{field: grown}))
    else:
        counts = counts._replace(**{field: grown})
    assert predict.predict(counts, 16384, H100, overlap).device_us >= before.device_us


def test_rows_from_other_nodes_take_longer_than_those_of_the_same() -> None:
    mask = batch("full")
    chunked, rank = scattered(mask, 4, 0, 1024)
    near, far = (
        predict.predict(count(chunked, rank, node), 16384, replace(H100, hidden=0.0), OVERLAP).device_us
        for node in (4, 2)
    )
    assert far > near


def test_communication_that_hides_takes_less_and_no_overlap_the_most() -> None:
    mask = batch("causal")
    chunked, rank = scattered(mask, 4, 0, 1024)
    counts = count(chunked, rank, 8)
    all_hidden, half, none = (
        predict.predict(
            counts, 16384, replace(H100, hidden=hidden), replace(OVERLAP, degree=1, one_launch=False)
        ).device_us
        for hidden in (1.0, 0.5, 0.0)
    )
    serial = predict.predict(counts, 16384, H100, replace(OVERLAP, degree=0)).device_us
    assert all_hidden < half < none == pytest.approx(serial)


@pytest.mark.parametrize("kind", ["causal", "full", "window"])
@pytest.mark.parametrize("cp_size", [2, 4, 8])
def test_the_default_is_never_predicted_slower_than_any_that_has_a_name(kind, cp_size) -> None:
    for seed in range(3):
        mask = batch(kind, 32768, 12, seed)
        config = DispatchConfig()
        found, times = scored(mask, cp_size, config)
        chosen = fastest(times)
        assert times[chosen].step_us <= 1.01 * min(t.step_us for t in times.values())
        first = next(iter(found))
        assert first == "affinity 1.01"  # which was the default: another is taken only for a gain
        assert (
            chosen == first
            or times[chosen].step_us < times[first].step_us
            or (times[chosen].device_us < times[first].device_us / 1.01)
            or (times[chosen].host_us, times[chosen].num_rows) < (times[first].host_us, times[first].num_rows)
        )
        dispatch = make_dispatch(mask, config, cp_size, OVERLAP)
        np.testing.assert_array_equal(dispatch.chunk_rank, found[chosen])


@pytest.mark.parametrize("planner", ["python", "auto"])
def test_each_candidate_is_what_its_name_gives(planner) -> None:
    config = DispatchConfig(planner=planner)
    mask = batch("causal", 32768, 12)
    found, _ = scored(mask, 4, config)
    assert {"min_heap", "zigzag", "sequential"} < set(found)
    for name, rank in found.items():
        algorithm, *tolerance = name.split()
        named = replace(config, algorithm=algorithm, balance_tolerance=float(tolerance[0]) if tolerance else 1.01)
        np.testing.assert_array_equal(make_dispatch(mask, named, 4).chunk_rank, rank)
        assert len(scored(mask, 4, named)[0]) == 1


def test_where_the_host_sets_the_pace_the_gpu_decides_and_what_is_alike_is_left_as_it_was() -> None:
    def chosen(**times: tuple[float, ...]) -> str:
        return fastest({name: predict.Prediction(t[0], t[1], 0.0, 0.0, 1, *t[2:]) for name, t in times.items()})

    assert chosen(first=(100, 90), second=(97, 97)) == "second"
    assert chosen(first=(100, 90), second=(99.5, 89.5)) == "first"
    assert chosen(first=(100, 90), second=(100, 60)) == "second"
    assert chosen(first=(100, 90), second=(100, 80), third=(120, 10)) == "second"
    assert chosen(first=(100, 90, 60), second=(100.5, 90.5, 50)) == "second"
    assert chosen(first=(100, 90, 50), second=(100, 90, 50), third=(100, 95, 40)) == "first"
    assert chosen(first=(100, 90, 50, 7), second=(100, 90, 50, 6), third=(100, 90, 51, 5)) == "second"


def test_masks_of_different_kinds_get_different_dispatches() -> None:
    chosen = [fastest(scored(mask, 2, DispatchConfig())[1]) for mask in (builders.causal(65536), builders.full(65536))]
    assert chosen == ["affinity 1.01", "zigzag"]


def test_the_network_decides_how_much_balance_is_worth() -> None:
    mask = batch("causal", 1 << 17, 30)
    received = []
    for rate in (1e6, 0.5):
        rates = replace(H100, gbytes_per_s=rate, host_forward_us=0.0, host_backward_us=0.0)
        plan = make_plan(mask, MagiConfig(DispatchConfig(rates=rates), OVERLAP), 8)
        received.append(max(plan.stats().received_rows))
    assert received[1] < received[0]


def test_zigzag_is_two_mirrored_pieces_a_rank_and_may_be_uneven() -> None:
    mask = builders.causal(80)
    even = make_dispatch(mask, DispatchConfig(algorithm="zigzag", chunk_size=10), 2)
    assert even.chunk_rank.tolist() == [0, 0, 1, 1, 1, 1, 0, 0]
    odd = make_dispatch(mask, DispatchConfig(algorithm="zigzag", chunk_size=16, uneven_shard=True), 3)
    assert odd.chunk_rank.tolist() == [0, 1, 2, 1, 0]


@settings(max_examples=40)
@given(total=st.integers(1, 3000), cp_size=st.integers(1, 9))
def test_the_padding_depends_on_the_length_alone(total, cp_size) -> None:
    algorithms = ("auto", "affinity", "min_heap", "sorted_sequential", "zigzag", "sequential")
    lengths = {
        make_dispatch(mask, DispatchConfig(algorithm=algorithm), cp_size).shard_lengths
        for algorithm in algorithms
        for mask in (builders.causal(total), builders.full(total))
    }
    assert len(lengths) == 1


def _hash_of(rank: int, num_ranks: int, slow_rank: int) -> tuple[int, str]:
    rates = replace(H100, forward_tflops=1.0) if rank == slow_rank else H100
    plan = make_plan(batch("causal", 4096, 5), MagiConfig(DispatchConfig(rates=rates)), num_ranks)
    try:
        start_agreement(plan.plan_hash, None, "plan").wait()
    except RuntimeError as error:
        return plan.plan_hash, str(error)
    return plan.plan_hash, ""


@pytest.mark.ranks(2)
def test_ranks_choose_alike_and_those_with_other_rates_are_told(ranks) -> None:
    (one, no_error), (other, _) = ranks(2, _hash_of, -1)
    assert one == other and not no_error
    (one, error), (other, same_error) = ranks(2, _hash_of, 1)
    assert one != other and error == same_error and error.startswith("plan: ranks disagree")


def test_rates_change_the_plan_of_a_named_algorithm_in_nothing() -> None:
    mask = batch("causal", 8192, 5)
    slow = replace(H100, forward_tflops=1.0)
    plans = [
        make_plan(mask, MagiConfig(DispatchConfig(algorithm="affinity", rates=rates)), 4)
        for rates in (None, H100, slow)
    ]
    assert len({plan.plan_hash for plan in plans}) == 1


def test_predictions_go_by_the_tiles_of_the_kernels() -> None:
    assert KERNELS.tall_tile_keys[128, 128][0] == 0  # tiles of packed heads are tall
    assert (KERNELS.key_tile, KERNELS.query_block) == choices.WHOLE_TILE
    assert kernels.QUERIES_WIDTH[128, 128] == KERNELS.dq_block
