"""Plans against a brute-force reading of the mask."""

from __future__ import annotations

import pickle
import time
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from megatron_magi.backends.sm90.cost import H100, KERNELS
from megatron_magi.config import CommConfig, CostModel, DispatchConfig, MagiConfig, OverlapConfig
from megatron_magi.mask import AttnMask, builders
from megatron_magi.mask import bands as bd
from megatron_magi.mask.dense import dense_mask
from megatron_magi.plan import Plan, StepKind, cpp_partition, dispatch_from_chunks, make_plan
from megatron_magi.plan import plan as plan_module
from megatron_magi.plan.chunks import chunk_bounds
from megatron_magi.plan.degree import stage_costs, step_us
from megatron_magi.plan.partition import areas_by_place, localise, partition, whole
from megatron_magi.plan.types import Runtime
from tests.mask.dense_definitions import count_cover

AFFINITY = MagiConfig(dispatch=DispatchConfig(algorithm="affinity"))
LONG = 1 << 25
ALGORITHMS = ("auto", "affinity", "min_heap", "sorted_sequential", "zigzag", "sequential")


@st.composite
def masks(draw, max_seqlen: int = 48, *, may_be_long: bool = False) -> AttnMask:
    """A mask of up to five random slices that do not overlap, of any type and alignment; all lengths may be multiples
    of `LONG`, so that no area fits in 32 bits.
    """
    seqlen = draw(st.integers(1, max_seqlen))
    kept: list[tuple[int, ...]] = []
    for _ in range(draw(st.integers(0, 5))):
        q = sorted((draw(st.integers(0, seqlen)), draw(st.integers(0, seqlen))))
        k = sorted((draw(st.integers(0, seqlen)), draw(st.integers(0, seqlen))))
        candidate = (*q, *k, draw(st.integers(0, 3)))
        try:
            AttnMask([*kept, candidate], seqlen)
        except ValueError:
            continue
        kept.append(candidate)
    scale = LONG if may_be_long and draw(st.booleans()) else 1
    return AttnMask([(*(scale * at for at in edges), kind) for *edges, kind in kept], scale * seqlen)


@st.composite
def configs(draw) -> MagiConfig:
    uneven = draw(st.booleans())
    return MagiConfig(
        dispatch=DispatchConfig(
            algorithm=draw(st.sampled_from(ALGORITHMS)),
            chunk_size=draw(st.sampled_from([None, 1, 2, 5])) if not uneven else 1,
            uneven_shard=uneven,
            alignment=draw(st.sampled_from([1, 2, 3])),
        ),
        overlap=OverlapConfig(degree=draw(st.sampled_from([None, 0, 1, 2, 5])), hide_tail_reduce=draw(st.booleans())),
    )


def documents(lengths: list[int] | np.ndarray, mask_type: int = 1) -> AttnMask:
    ends = np.cumsum(lengths)
    starts = ends - lengths
    types = np.full(len(ends), mask_type)
    return AttnMask(np.stack([starts, ends, starts, ends, types], axis=1), int(ends[-1]))


def uneven_lengths(total: int, num_documents: int, seed: int = 0) -> np.ndarray:
    """Log-uniform over a factor of 64, which is how wild real documents are."""
    weight = np.exp(np.random.default_rng(seed).uniform(0, np.log(64), num_documents))
    lengths = np.maximum(1, (weight / weight.sum() * total).astype(np.int64))
    lengths[-1] += total - lengths.sum()
    return lengths


def stage_keys(plan: Plan, cp_rank: int) -> list[np.ndarray]:
    """Global key of every row of each stage's buffer, by carrying out the transfers on indices."""
    held = [plan.dispatch.global_index(r) for r in range(plan.cp_size)]
    keys = [held[cp_rank]]
    for stage in range(plan.degree):
        received = []
        for src in range(plan.cp_size):
            sent = plan.for_rank(src).transfers[stage]
            first = sum(sent.send_splits[:cp_rank])
            received.append(held[src][sent.send_index[first : first + sent.send_splits[cp_rank]]])
        mine = plan.for_rank(cp_rank).transfers[stage]
        assert tuple(len(r) for r in received) == mine.recv_splits
        rows = np.concatenate(received)
        keys.append(rows if mine.recv_order is None else rows[mine.recv_order])
    return keys


def check_other_sides(plan: Plan) -> None:
    """Each row that travels is where its owner and its destination say of each other."""
    views = [plan.for_rank(rank).transfers for rank in range(plan.cp_size)]
    for stage in range(plan.degree):
        every = [view[stage] for view in views]
        counts = np.array([sent.send_splits for sent in every])
        for src, sent in enumerate(every):
            rows = np.split(sent.send_index, np.cumsum(sent.send_splits)[:-1])
            assert sent.first_there == tuple(counts[:src].sum(axis=0))
            assert sent.first_back == tuple(counts[:, :src].sum(axis=1))
            for dst, received in enumerate(every):
                first = sum(received.recv_splits[:src])
                part = slice(first, first + received.recv_splits[src])
                np.testing.assert_array_equal(received.owner_rows[part], rows[dst])
        most_rows = max(t.send_index.max(initial=-1) + 1 for t in every)
        assert {(t.most_rows, t.most_recv, t.most_send) for t in every} == {
            (most_rows, max(t.num_recv for t in every), max(t.num_send for t in every))
        }


def assume_enough_tokens(mask: AttnMask, config: MagiConfig, cp_size: int) -> None:
    assume(not config.dispatch.uneven_shard or mask.total_seqlen_q >= cp_size)


# Rank 1 sees its own keys last where it sees fetched ones first, and the places of these follow those of its own.
FETCHED_BEHIND_OWN = AttnMask([(8, 12, 8, 11, 0), (8, 12, 3, 6, 0), (12, 16, 0, 3, 0)], 16)
SEQUENTIAL = MagiConfig(dispatch=DispatchConfig(algorithm="sequential"), overlap=OverlapConfig(degree=1))


@settings(max_examples=150)
@example(mask=FETCHED_BEHIND_OWN, config=SEQUENTIAL, cp_size=2)
@given(mask=masks(), config=configs(), cp_size=st.integers(1, 5))
def test_every_visible_pair_is_computed_exactly_once(mask: AttnMask, config: MagiConfig, cp_size: int) -> None:
    assume_enough_tokens(mask, config, cp_size)
    plan = make_plan(mask, config, cp_size)
    computed = np.zeros((plan.dispatch.padded_seqlen,) * 2, dtype=np.int64)
    for rank in range(cp_size):
        rows = plan.dispatch.global_index(rank)
        for keys, bands in zip(stage_keys(plan, rank), plan.for_rank(rank).bands, strict=True):
            computed[np.ix_(rows, keys)] += count_cover(bands, len(rows), len(keys))
    n = mask.total_seqlen_q
    np.testing.assert_array_equal(computed[:n, :n], dense_mask(mask).astype(np.int64))
    assert computed[n:].sum() == 0 and computed[:, n:].sum() == 0
    assert sum(plan.stats().areas) == mask.area
    check_other_sides(plan)


@settings(max_examples=100)
@given(mask=masks(), config=configs(), cp_size=st.integers(1, 5))
def test_areas_with_own_and_fetched_keys_are_those_of_the_stages(mask, config, cp_size) -> None:
    assume_enough_tokens(mask, config, cp_size)
    plan = make_plan(mask, config, cp_size)
    own, fetched = areas_by_place(partition(mask, plan.dispatch))
    for rank in range(cp_size):
        local, *remote = (int(bd.areas(b).sum()) for b in plan.for_rank(rank).bands)
        assert (own[rank], fetched[rank]) == (local, sum(remote))


def test_bands_are_put_into_local_coordinates_of_the_rank_that_is_asked_for_once_whatever_the_degree(
    monkeypatch,
) -> None:
    asked = []
    for module in (plan_module, cpp_partition):
        original = module.localise

        def noted(*args, original=original):
            asked.append((len(args[1]), args[2]))
            return original(*args)

        monkeypatch.setattr(module, "localise", noted)
    for degree in (None, 0, 1, 3):
        plan = make_plan(documents([100, 300]), MagiConfig(overlap=OverlapConfig(degree=degree)), 4)
        for _ in range(2):
            plan.stats(), plan.for_rank(2)
    assert asked == [(asked[0][0], 2), (1, 2), (1, 2), (3, 2)]


@settings(max_examples=100)
@given(mask=masks(), config=configs(), cp_size=st.integers(1, 5))
def test_a_rank_receives_exactly_the_keys_it_needs_and_does_not_hold(mask, config, cp_size) -> None:
    assume_enough_tokens(mask, config, cp_size)
    plan = make_plan(mask, config, cp_size)
    visible = dense_mask(mask)
    for rank in range(cp_size):
        held = plan.dispatch.global_index(rank)
        real = held[held < mask.total_seqlen_q]
        needed = set(np.flatnonzero(visible[real].any(axis=0)).tolist()) - set(real.tolist())
        received = np.concatenate(stage_keys(plan, rank)[1:] or [np.zeros(0, np.int64)]).tolist()
        assert len(received) == len(set(received))
        assert set(received) == needed
        assert plan.stats().received_rows[rank] == plan.stats().lower_bound_rows[rank] == len(needed)


@settings(max_examples=100)
@given(mask=masks(), config=configs(), cp_size=st.integers(1, 5))
def test_shards_cover_the_sequence_once_and_even_shards_are_equal(mask, config, cp_size) -> None:
    assume_enough_tokens(mask, config, cp_size)
    dispatch = make_plan(mask, config, cp_size).dispatch
    held = np.concatenate([dispatch.global_index(r) for r in range(cp_size)])
    np.testing.assert_array_equal(np.sort(held), np.arange(dispatch.padded_seqlen))
    if config.dispatch.uneven_shard:
        assert dispatch.padded_seqlen == mask.total_seqlen_q
    else:
        assert len(set(dispatch.shard_lengths)) == 1
        assert dispatch.shard_lengths[0] % config.dispatch.alignment == 0


@settings(max_examples=60)
@given(mask=masks(), degree=st.integers(0, 6), hide=st.booleans(), cp_size=st.integers(1, 4))
def test_schedules_attend_each_stage_once_after_its_fetch(mask, degree, hide, cp_size) -> None:
    config = MagiConfig(overlap=OverlapConfig(degree=degree, hide_tail_reduce=hide))
    plan = make_plan(mask, config, cp_size)
    schedule = plan.schedule
    for steps, saved in ((schedule.forward, None), (schedule.backward, schedule.saved_stage)):
        attended = [s.stage for s in steps if s.kind is StepKind.ATTEND]
        assert sorted(attended) == list(range(plan.degree + 1))
        fetched = [s.stage for s in steps if s.kind is StepKind.FETCH]
        assert sorted(fetched) == [s for s in range(1, plan.degree + 1) if s != saved]
        for stage in fetched:
            assert _at(steps, StepKind.FETCH, stage) < _at(steps, StepKind.ATTEND, stage)
    reduced = [s.stage for s in schedule.backward if s.kind is StepKind.REDUCE]
    assert sorted(reduced) == list(range(1, plan.degree + 1))
    for stage in reduced:
        assert _at(schedule.backward, StepKind.ATTEND, stage) < _at(schedule.backward, StepKind.REDUCE, stage)
    if plan.degree and hide and degree != 0:
        assert schedule.backward[-1] == (StepKind.ATTEND, 0)


def _at(steps, kind, stage) -> int:
    return [tuple(s) for s in steps].index((kind, stage))


def test_plans_are_deterministic_and_hashes_tell_masks_apart() -> None:
    mask, other = documents([5, 9, 2, 16]), documents([5, 9, 3, 15])
    first, again = make_plan(mask, cp_size=2), make_plan(documents([5, 9, 2, 16]), cp_size=2)
    assert first.plan_hash == again.plan_hash < 2**63
    np.testing.assert_array_equal(first.dispatch.chunk_rank, again.dispatch.chunk_rank)
    assert first.plan_hash != make_plan(other, cp_size=2).plan_hash


def test_several_masks_share_one_dispatch() -> None:
    full, window = documents([64, 64]), documents([8] * 16)
    plan = make_plan(full, cp_size=4)
    second = make_plan(window, cp_size=4, dispatch=plan.dispatch)
    assert second.dispatch is plan.dispatch
    assert sum(second.stats().areas) == window.area
    with pytest.raises(ValueError, match="dispatch: made for 128 tokens over 4 ranks"):
        make_plan(full, cp_size=2, dispatch=plan.dispatch)


def test_64_uneven_documents_over_8_ranks_balance_within_two_percent() -> None:
    for seed in range(5):
        plan = make_plan(documents(uneven_lengths(131072, 64, seed)), AFFINITY, 8)
        assert plan.stats().balance <= 1.02


def test_affinity_moves_a_fraction_of_the_rows_of_min_heap_at_the_same_balance() -> None:
    moved = {"affinity": 0, "min_heap": 0}
    for seed in range(5):
        mask = documents(uneven_lengths(131072, 64, seed))
        for algorithm in moved:
            stats = make_plan(mask, MagiConfig(dispatch=DispatchConfig(algorithm=algorithm)), 8).stats()
            assert stats.balance <= 1.02
            moved[algorithm] += sum(stats.received_rows)
    assert moved["affinity"] < 0.16 * moved["min_heap"]


def test_a_million_tokens_in_500_documents_over_64_ranks_plan_in_a_second() -> None:
    mask = documents(uneven_lengths(1 << 20, 500))
    best = float("inf")
    for _ in range(3):
        start = time.process_time()  # of this process: the machine may be busy with others
        plan = make_plan(mask, cp_size=64)
        for rank in range(64):
            plan.for_rank(rank)
        best = min(best, time.process_time() - start)
    assert make_plan(mask, AFFINITY, 64).stats().balance <= 1.05
    assert best < 1.0


def test_the_cost_model_adds_stages_only_where_they_hide_something() -> None:
    mask = documents([4096])
    slow_link = OverlapConfig(cost=CostModel(gbytes_per_s=1.0, tflops=10.0, stage_latency_us=1.0))
    slow_stage = OverlapConfig(cost=CostModel(stage_latency_us=1e6))
    assert make_plan(mask, MagiConfig(overlap=slow_link), 4).degree > 1
    assert make_plan(mask, MagiConfig(overlap=slow_stage), 4).degree == 1
    assert make_plan(documents([1024] * 4), cp_size=1).degree == 0


def test_rates_that_are_not_set_are_those_of_the_gpu() -> None:
    shape = CostModel(num_heads_q=32)
    of_gpu = stage_costs(shape, replace(H100, gbytes_per_s=123.0))
    assert (of_gpu.gbytes_per_s, of_gpu.num_heads_q) == (123.0, 32)
    assert (of_gpu.tflops, of_gpu.stage_latency_us) == (KERNELS.stage_tflops, KERNELS.stage_latency_us)
    assert stage_costs(replace(shape, tflops=1.0, stage_latency_us=0.0), H100).tflops == 1.0
    # A slow link makes stages worth their latency; rates of a config reach the choice.
    mask = documents([8192])
    degrees = []
    for gbytes_per_s in (1e5, 10.0):
        rates = replace(H100, gbytes_per_s=gbytes_per_s)
        config = MagiConfig(dispatch=DispatchConfig(algorithm="zigzag", rates=rates), overlap=OverlapConfig(cost=shape))
        degrees.append(make_plan(mask, config, 4).degree)
    assert degrees[0] == 1 < degrees[1], degrees


def test_a_fetch_waits_for_the_stage_before_the_one_it_overlaps() -> None:
    """Times by hand: 50 us of own keys, 20 us of fetched ones, which travel 40 us; a stage costs 1 us."""
    cost = CostModel(4e-6, 2e-3, 1.0, num_heads_q=1, num_heads_kv=1, head_dim=1, element_bytes=1)
    assert (cost.attend_us(50), cost.fetch_us(40)) == (50, 40)
    found = step_us(np.array([50]), np.array([20]), np.array([40]), 2, cost)
    # One stage: 51 + 21, and 126 + 51 + 40 to return gradients. Two: the second fetch begins at 51, or at 126.
    np.testing.assert_allclose(found, [72 + 217, (51 + 20 + 11) + (126 + 26 + 26 + 20)])


def test_documents_that_fit_their_ranks_move_nothing() -> None:
    plan = make_plan(documents([256] * 4), MagiConfig(dispatch=DispatchConfig(chunk_size=256)), 4)
    assert plan.degree == 0
    assert plan.stats().received_rows == (0, 0, 0, 0)


@settings(max_examples=60)
@given(
    seqlen=st.integers(0, 3000),
    pad_size=st.integers(0, 3000),
    chunk_size=st.sampled_from([None, 1, 7, 128]),
    alignment=st.sampled_from([1, 4]),
    cp_size=st.integers(1, 5),
)
def test_a_padding_that_is_given_is_kept_or_refused(seqlen, pad_size, chunk_size, alignment, cp_size) -> None:
    config = DispatchConfig(pad_size=pad_size, chunk_size=chunk_size, alignment=alignment)
    unit = alignment * cp_size
    if chunk_size is not None and cp_size > 1:
        unit = np.lcm(alignment, chunk_size) * cp_size
    mask = AttnMask([(0, seqlen, 0, seqlen, 1)], seqlen)
    if seqlen + pad_size == 0 or (seqlen + pad_size) % unit:
        with pytest.raises(ValueError, match=f"^pad_size: got {pad_size}, but {seqlen} tokens"):
            make_plan(mask, MagiConfig(dispatch=config), cp_size)
        return
    dispatch = make_plan(mask, MagiConfig(dispatch=config), cp_size).dispatch
    assert dispatch.padded_seqlen == seqlen + pad_size
    assert set(dispatch.shard_lengths) == {(seqlen + pad_size) // cp_size}
    if chunk_size is not None and cp_size > 1:
        assert (np.diff(dispatch.chunk_bounds) == chunk_size).all()


@pytest.mark.parametrize(
    ("shard", "size"), [(4096, 128), (5000, 125), (4093, 4093), (8186, 4093), (2**31 - 1, 2**31 - 1)]
)
def test_chunks_that_divide_a_given_padding_are_few_and_near_the_usual_size(shard, size) -> None:
    bounds = chunk_bounds(2 * shard, 2, DispatchConfig(pad_size=0))
    assert bounds[1] == size and bounds[-1] == 2 * shard


@pytest.mark.parametrize("chunk_size", [None, 5, 512])
def test_one_rank_needs_no_padding(chunk_size) -> None:
    config = DispatchConfig(chunk_size=chunk_size)
    assert make_plan(documents([777]), MagiConfig(dispatch=config), 1).dispatch.padded_seqlen == 777
    config = DispatchConfig(chunk_size=chunk_size, alignment=8)
    assert make_plan(documents([777]), MagiConfig(dispatch=config), 1).dispatch.padded_seqlen == 784


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda mask: make_plan(torch.zeros(8, 8)), "mask"),
        (lambda mask: make_plan(None), "mask"),
        (lambda mask: make_plan(mask, DispatchConfig()), "config"),
        (lambda mask: make_plan(mask, cp_size=2.0), "cp_size"),
        (lambda mask: make_plan(mask, cp_size=True), "cp_size"),
        (lambda mask: make_plan(mask, cp_size="2"), "cp_size"),
        (lambda mask: make_plan(mask, cp_size=10**7), "cp_size"),
        (lambda mask: make_plan(mask, dispatch=mask), "dispatch"),
        (lambda mask: make_plan(mask, MagiConfig(dispatch=DispatchConfig(chunk_size=10**7))), "chunk_size"),
        (lambda mask: make_plan(mask, MagiConfig(dispatch=DispatchConfig(alignment=10**7)), 2), "alignment"),
        (lambda mask: make_plan(mask, MagiConfig(dispatch=DispatchConfig(pad_size=10**7))), "pad_size"),
    ],
)
def test_arguments_of_another_kind_or_size_are_refused_by_name(make, name) -> None:
    with pytest.raises(ValueError, match=rf"^{name}: expected"):
        make(documents([16]))


def test_a_long_sequence_may_have_long_chunks() -> None:
    config = MagiConfig(dispatch=DispatchConfig(chunk_size=1 << 17))
    assert make_plan(documents([1 << 18]), config, 2).dispatch.shard_lengths == (1 << 17,) * 2


def test_fewer_tokens_than_ranks_need_even_shards() -> None:
    mask = documents([4, 4])
    with pytest.raises(ValueError, match=r"^cp_size: 8 tokens .* fewer than 9 ranks"):
        make_plan(mask, MagiConfig(dispatch=DispatchConfig(uneven_shard=True)), 9)
    assert make_plan(mask, cp_size=9).dispatch.padded_seqlen == 9


def test_no_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^cp_size:"):
        make_plan(documents([4, 4]), cp_size=0)


def test_queries_and_keys_must_be_the_same_tokens() -> None:
    with pytest.raises(ValueError, match="total_seqlen_k"):
        make_plan(AttnMask([(0, 4, 0, 8, 0)], 4, 8), cp_size=1)


def test_a_plan_is_read_only() -> None:
    plan = make_plan(documents([8]), cp_size=2).for_rank(0)
    with pytest.raises(AttributeError, match="read-only"):
        plan.num_rows = 3
    with pytest.raises(ValueError, match="read-only"):
        plan.bands[0][:] = 0
    assert all(b.base is None for b in plan.bands)  # nor can another array change them


@pytest.mark.parametrize("rank", [2, -1, None, "0", 0.0, [0]])
def test_a_rank_out_of_range_is_refused(rank) -> None:
    with pytest.raises(ValueError, match=r"^cp_rank: "):
        make_plan(documents([8]), cp_size=2).for_rank(rank)


@pytest.mark.parametrize(
    "config",
    [
        MagiConfig(comm=CommConfig(backward_high_precision_reduce=True)),
        MagiConfig(overlap=OverlapConfig(degree=1, one_launch=False)),
        MagiConfig(overlap=OverlapConfig(degree=1, hide_tail_reduce=True)),
        MagiConfig(overlap=OverlapConfig(degree=0)),
        MagiConfig(overlap=OverlapConfig(degree=2)),
    ],
)
def test_hashes_tell_apart_what_travels_otherwise_or_at_another_time(config) -> None:
    mask, plain = documents([64]), MagiConfig(overlap=OverlapConfig(degree=1))
    assert make_plan(mask, plain, 2).plan_hash != make_plan(mask, config, 2).plan_hash


def test_planning_many_chunks_stays_quick() -> None:
    """Ten million tokens: thousands of chunks a rank must not cost their square."""
    start = time.process_time()
    plan = make_plan(documents([10_000_000]), cp_size=8)
    assert plan.stats().balance <= 1.02
    assert time.process_time() - start < 5.0


def test_a_plan_keeps_nothing_for_each_pair_of_ranks() -> None:
    """One causal document: each rank needs rows of all before it."""
    mask, config = documents([1 << 16]), MagiConfig(dispatch=DispatchConfig(algorithm="zigzag"))
    tracemalloc.start()
    try:
        make_plan(mask, config, 2048).for_rank(1024)
        assert tracemalloc.get_traced_memory()[1] < 2048**2 * 8
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("lengths", [[8192], [500, 3000, 1200, 3492], [64] * 128])
def test_many_ranks_agree_on_what_travels(lengths) -> None:
    check_other_sides(make_plan(documents(lengths), cp_size=48))


@pytest.mark.parametrize("algorithm", ["min_heap", "affinity"])
def test_swaps_find_the_even_split(algorithm) -> None:
    """Largest first puts 8 with 4 and 7 with 5 on top of 6s: only swaps reach 15 each."""
    lengths = [6, 6, 5, 5, 4, 4]
    mask = AttnMask([(i, i + 1, 0, n, 0) for i, n in enumerate(lengths)], 6)
    config = MagiConfig(dispatch=DispatchConfig(algorithm=algorithm, chunk_size=1))
    assert make_plan(mask, config, 2).stats().areas == (15, 15)


def test_plans_travel_between_processes_without_what_is_on_a_device() -> None:
    plan = make_plan(documents([5, 9, 2, 16]), cp_size=2)
    plan.for_rank(1).runtime.casts["cuda:0"] = (object(),)
    copy = pickle.loads(pickle.dumps(plan.for_rank(1)))
    assert vars(copy.runtime) == vars(Runtime()) and copy.plan_hash == plan.plan_hash
    mask = pickle.loads(pickle.dumps(plan.mask))
    assert mask == plan.mask and not mask.table.flags.writeable and not mask.bands.flags.writeable


@settings(max_examples=200)
@given(masks(may_be_long=True), st.booleans())
@example(builders.varlen(doc_lengths=[3, 1, 0, 7]), True)
@example(builders.varlen(doc_lengths=[3, 1, 0, 7], causal=False), False)
@example(builders.prefix_lm(prefix_lengths=[2, 5], doc_lengths=[4, 6]), False)
def test_the_plan_of_one_rank_is_its_partition(mask: AttnMask, uneven: bool) -> None:
    dispatch = DispatchConfig(uneven_shard=uneven)
    plan = make_plan(mask, MagiConfig(dispatch=dispatch), 1)
    part = partition(mask, plan.dispatch)
    (bands,) = localise(part, (), 0)
    found = plan.for_rank(0)
    assert np.array_equal(found.bands[0], bands) and not found.bands[0].flags.writeable
    assert plan.stats().areas == (mask.area,) and found.area == mask.area
    assert plan.degree == 0 and not found.transfers and found.joined is None
    quick = whole(mask, plan.dispatch)
    if quick is not None:
        for name in ("runs", "queries", "remote"):
            assert all(map(np.array_equal, getattr(quick, name), getattr(part, name)))
        assert all(np.array_equal(getattr(quick, n), getattr(part, n)) for n in ("bands", "band_run", "remote_rows"))


def test_a_layout_of_one_rank_in_another_order_is_not_taken_for_the_sequence() -> None:
    mask = builders.varlen(doc_lengths=[4, 4])
    turned = dispatch_from_chunks(8, np.array([0, 4, 8]), np.zeros(2, np.int64), 1, np.array([4, 0]))
    assert whole(mask, turned) is None
    plan = make_plan(mask, cp_size=1, dispatch=turned)
    assert np.array_equal(plan.for_rank(0).bands[0], localise(partition(mask, turned), (), 0)[0])
