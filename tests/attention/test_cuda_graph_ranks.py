"""Static plans of several ranks: what travels is right for each mask that is loaded, and all ranks load or none."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megatron_magi.attention import StaticPlans, fused_comm, load_together, prepare_batch
from megatron_magi.attention.collective_args import cleared, plan_casts
from megatron_magi.attention.travel import travel_args
from megatron_magi.comm import group_collective, peers, transport
from megatron_magi.comm.impl.native import Native, native_of
from megatron_magi.comm.row_layout import RowLayout
from megatron_magi.comm.slots import Room, most_rows
from megatron_magi.comm.static_args import _arrays
from megatron_magi.config import AttendConfig, CommConfig, DispatchConfig, MagiConfig, OverlapConfig
from megatron_magi.cuda.arriving import READ_BEHIND
from megatron_magi.mask import AttnMask, builders
from megatron_magi.plan import Dispatch, RankPlan, given_dispatch, make_plan
from megatron_magi.runtime.upload import current_device
from megatron_magi.testing.spawn import run_ranks
from tests import forced
from tests.attention.test_cuda_graph import (
    CPU,
    ONE_LAUNCH,
    ONE_STAGE,
    attend,
    documents,
    largest_difference,
    plan_of,
    shape_of,
    shards_of,
    some_masks,
    tensors,
)
from tests.comm.test_collective_checks import be_quick
from tests.graph_capture import capture


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_collectives_find_the_tables_of_the_plan_that_was_loaded(num_ranks):
    rows = 512 * num_ranks
    masks = [*some_masks(rows)[::6], AttnMask([], rows), builders.sliding_window(rows, 1, 0)]
    first, *others = [shards_of(mask, num_ranks) for mask in masks]
    assert any(not shards[0].degree for shards in others), "nothing travels"
    for rank in range(num_ranks):
        static = StaticPlans({0: first[rank]}, CPU, headroom=8)
        (own,) = plan_casts(static.plans[0], CPU)
        before = [t.data_ptr() for t in _arrays(own)]
        for shards in (*others, first):
            assert static._static[0].why_not(shards[rank]) is None
            static._load({0: shards[rank]})
            casts = plan_casts(shards[rank], CPU)
            tail = static.plans[0].runtime.tail
            num_recv = casts[0].num_recv if casts else 0
            assert torch.equal(tail, num_recv + torch.arange(256)) and tail[-1] < own.num_recv
            assert [t.data_ptr() for t in _arrays(own)] == before
            if not casts:
                assert all(not t.any() for t in _arrays(own))
                continue
            for a, b in zip(_arrays(own), _arrays(casts[0]), strict=True):
                assert torch.equal(a[: len(b)], b)
            arange = torch.arange(num_recv)
            assert torch.equal(own.send_index[: casts[0].num_send], casts[0].send_index)
            order, position = casts[0].recv_order, casts[0].recv_position
            assert torch.equal(own.recv_order[:num_recv], arange if order is None else order)
            assert torch.equal(own.recv_position[:num_recv], arange if position is None else position)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_where_nothing_travels_at_first_there_is_room_for_what_travels_in_samples(num_ranks):
    nothing, causal, window = (
        shards_of(mask, num_ranks)
        for mask in (
            AttnMask([], 512 * num_ranks),
            builders.causal(512 * num_ranks),
            builders.sliding_window(512 * num_ranks, 30, 0),
        )
    )
    assert not nothing[0].degree and causal[0].degree == 1
    for rank in range(num_ranks):
        alone = StaticPlans({0: nothing[rank]}, CPU, headroom=1)
        reason = alone._static[0].why_not(causal[rank])
        assert re.search("rows travel, there is room for 256; .*, or with headroom=(.*)$", reason)
        headroom = float(reason.rpartition("=")[2])
        roomy = StaticPlans({0: nothing[rank]}, CPU, headroom=headroom)
        assert roomy._static[0].why_not(causal[rank]) is None
        static = StaticPlans({0: nothing[rank]}, CPU, samples=[{0: causal[rank]}])
        (own,) = plan_casts(static.plans[0], CPU)
        assert not any(t.any() for t in _arrays(own)), "the first is loaded"
        for shards in (causal, window, nothing):
            assert static._static[0].why_not(shards[rank]) is None
            static._load({0: shards[rank]})
            for cast in plan_casts(shards[rank], CPU):
                assert torch.equal(own.send_index[: cast.num_send], cast.send_index)
    with pytest.raises(ValueError, match="samples: 0 has other numbers of rows or ranks"):
        StaticPlans({0: nothing[0]}, CPU, samples=[{0: plan_of(builders.causal(64))}])
    with pytest.raises(ValueError, match="plans: expected 0, got 1"):
        StaticPlans({0: nothing[0]}, CPU, samples=[{1: nothing[0]}])


def load_two(rank: int, num_ranks: int) -> list:
    group = dist.group.WORLD
    causal, window = (shards_of(m)[rank] for m in (builders.causal(1024), builders.sliding_window(1024, 30, 0)))
    statics = [StaticPlans({0: causal}, CPU, group) for _ in range(2)]

    def rows_now() -> list[int]:
        return [int(static.plans[0].runtime.tail[0]) for static in statics]

    found = [rows_now(), load_together([(static, {0: window}) for static in statics]), rows_now()]
    last = causal if rank == 0 else plan_of(builders.causal(64))
    found += [load_together([(statics[0], {0: causal}), (statics[1], {0: last})]), rows_now()]
    return [*found, causal.transfers[0].num_recv, window.transfers[0].num_recv]


def test_several_are_loaded_together_on_all_ranks_or_none_is(ranks):
    found = ranks(2, load_two)
    for before, first, between, _, after, causal, window in found:
        assert before == [causal] * 2 and first is None and between == after == [window] * 2
    assert any(causal != window for *_, causal, window in found)
    assert found[0][3] == (1, "no room on ranks [1] of the group")
    assert found[1][3] == (1, "it has 64 rows, of 1 ranks, not 512 of 2")


def make_with_other_room(rank: int, num_ranks: int, headrooms: list[float]) -> str:
    be_quick()
    window = shards_of(builders.sliding_window(1024, 30, 0))[rank]
    with pytest.raises((ValueError, RuntimeError)) as error:
        StaticPlans({0: window}, CPU, dist.group.WORLD, headroom=headrooms[rank])
    return str(error.value)


def test_ranks_that_make_different_room_are_a_message_on_all(ranks):
    """They would not wait for the rows that the others send."""
    first, second = ranks(2, make_with_other_room, [1.0, 4.0])
    assert first == second and first.startswith("headroom and samples of static plans: ranks disagree: rank 1 ")
    own = "headroom: expected a finite number of at least 1, got 0.5"
    told, first = ranks(2, make_with_other_room, [1.0, 0.5])
    assert first == own and f"rank 1 of the group (global rank 1) raised ValueError: {own}" in told


def make_in_one_launch_or_not(rank: int, num_ranks: int) -> str:
    be_quick()
    config = MagiConfig(overlap=ONE_LAUNCH if rank == 0 else ONE_STAGE)
    window = make_plan(builders.sliding_window(1024, 30, 0), config, num_ranks).for_rank(rank)
    with pytest.raises(RuntimeError) as error:
        StaticPlans({0: window}, CPU, dist.group.WORLD)
    return str(error.value)


def test_ranks_of_which_some_ask_for_one_launch_are_a_message_on_all(ranks):
    first, second = ranks(2, make_in_one_launch_or_not)
    assert first == second and first.startswith("one_launch of static plans: ranks disagree: rank 1 ")


def make_of_uneven_shards(rank: int, num_ranks: int) -> str:
    be_quick()
    config = MagiConfig(dispatch=DispatchConfig(uneven_shard=True), overlap=OverlapConfig(degree=1))
    plan = make_plan(builders.causal(1000), config, num_ranks).for_rank(rank)
    with pytest.raises(RuntimeError) as error:
        StaticPlans({0: plan}, CPU, dist.group.WORLD)
    return str(error.value)


def test_uneven_shards_are_refused_by_name_on_all_ranks(ranks):
    found = ranks(3, make_of_uneven_shards)
    assert len(set(found)) == 1
    assert found[0].startswith("rows of static plans (not with uneven_shard): ranks disagree")


def load_other_names(rank: int, num_ranks: int) -> list[str]:
    be_quick()
    plan = shards_of(builders.causal(1024))[rank]
    static = StaticPlans({0: plan}, CPU, dist.group.WORLD)
    with pytest.raises((ValueError, RuntimeError)) as error:
        static.load({rank: plan})
    return str(error.value)


def test_plans_that_one_rank_cannot_load_are_a_message_on_all(ranks):
    own = "plans: expected 0, got 1"
    told = f"static plans: rank 1 of the group (global rank 1) raised ValueError: {own}"
    assert ranks(2, load_other_names) == [told, own]


def test_rows_behind_those_that_have_come_are_zeros():
    """Kernels multiply hidden rows by 0, and what a buffer held before may be NaN."""
    rows = [torch.full((4, 2), torch.nan) for _ in "kv"]
    assert all(t is before and t.isnan().all() for t, before in zip(cleared(rows, None), rows, strict=True))
    for t in cleared(rows, torch.tensor([2, 3])):
        assert t[:2].isnan().all() and (t[2:] == 0).all()


class Slots:
    """Stands for memory of peers: what it grew to, and whether slots were kept then."""

    def __init__(self) -> None:
        self.slot_bytes, self.grown, self.num_forgotten = 0, [], 0

    def grow(self, num_bytes: int, keep: bool) -> None:
        self.slot_bytes = num_bytes
        self.grown.append((num_bytes, keep))

    def forget_kept(self) -> None:
        self.num_forgotten += 1


def test_room_is_made_for_all_rows_of_other_ranks_and_grows_beside_what_graphs_refer_to(monkeypatch):
    slots, capturing = Slots(), []
    room = Room(slots, lambda: bool(capturing))
    monkeypatch.setattr(transport, "_find", lambda *_: transport.Transport(room, None, None, 0))
    there, back, wide = (RowLayout.make(((8, 128 * n),), (torch.bfloat16,)) for n in (8, 16, 32))
    window, causal = (shards_of(m, 4)[1] for m in (builders.sliding_window(4096, 8, 0), builders.causal(4096)))
    group = Slots()  # anything that can be referred to
    for plan in (window, causal):
        (args,) = plan_casts(StaticPlans({0: plan}, CPU).plans[0], CPU)
        group_collective.make_room([args], there, back, group)
        room.stays = True  # as a capture does
    assert slots.grown == [(128 << 20, False)], "3 times 1024 rows of 32 kB"
    capturing.append(True)
    with pytest.raises(ValueError, match=r"impl: 'native' has room for .* bytes, which cannot grow while a CUDA graph"):
        group_collective.make_room([args], wide, None, group)
    capturing.clear()
    group_collective.make_room([args], wide, None, group)
    assert slots.grown[1:] == [(256 << 20, True)] and room.has_graphs
    wider = RowLayout.make(((8, 1 << 13),), (torch.bfloat16,))
    group_collective.make_room([args], wider, None, group)
    assert slots.grown[2:] == [(512 << 20, False)] and room.has_graphs, "no graph refers to those in between"
    monkeypatch.setattr(group_collective, "present_native", lambda _group: SimpleNamespace(forget_graphs=forget))

    def forget() -> None:
        Native.forget_graphs(SimpleNamespace(_room=room))

    group_collective.forget_graphs(group)
    assert slots.num_forgotten == 1 and not room.has_graphs
    huge = RowLayout.make(((8, 1 << 17),), (torch.bfloat16,))
    assert most_rows(huge) == 512, "of 2 MB in 1 GB"


class OneRank:
    """A `Rendezvous` of one rank."""

    rank, size, timeout_s = 0, 1, 1.0

    def gather(self, value):
        return [value]


def test_memory_of_graphs_is_kept_until_they_are_gone(monkeypatch):
    """And is then freed by the next growth, together with that which no graph refers to."""
    shared = []

    class Memory:
        addresses, state = (0,), "mapped"

        def close(self):
            self.state = "closed"

        def free(self):
            assert self.state == "closed"
            self.state = "freed"

    def share(_rendezvous, num_bytes, _device):
        if num_bytes > 64:
            return None, "out of memory"
        shared.append(Memory())
        return shared[-1], ""

    monkeypatch.setattr(peers, "share", share)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _device: None)
    monkeypatch.setattr(torch, "zeros", lambda *size, pin_memory, **options: torch.empty(*size, **options).zero_())
    memory = peers.PeerMemory(OneRank(), Memory(), CPU)
    memory._finalizer.detach()

    def states() -> list[str]:
        return [data.state for data in shared]

    assert memory.grow(1) is None and memory.grow(2, keep=True) is None and states() == ["mapped", "mapped"]
    known = memory.peers
    assert memory.grow(64, keep=True) == "out of memory" and (memory.slot_bytes, memory.peers) == (2, known)
    assert memory.grow(4) is None and states() == ["mapped", "freed", "mapped"], "no graph refers to those in between"
    assert memory._owned.data == [shared[0], shared[2]]
    memory.forget_kept()
    assert states() == ["mapped", "freed", "mapped"], "other ranks may still have it mapped"
    assert memory.grow(8) is None and states() == ["freed", "freed", "freed", "mapped"]
    assert memory.grow(64) == "out of memory" and memory.slot_bytes == 0 and states()[3] == "freed"


def among_nan(run: Callable[[], list[torch.Tensor]]) -> list[torch.Tensor]:
    """Results of ``run``, for which memory that held NaN is at hand in each replay."""
    torch.full((32 << 20,), torch.nan, device="cuda")
    return run()


def hosts_of(total: int, num_ranks: int) -> list[Dispatch]:
    """Where queries of contiguous shards are computed: half of them elsewhere, all at home, all elsewhere."""
    size = total // num_ranks
    swapped = [range(r * size, (r + 1) * size) for r in (*range(1, num_ranks), 0)]
    return [given_dispatch(layout, total, num_ranks) for layout in ("zigzag", "contiguous", swapped)]


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_moves_are_those_of_the_plan_that_was_loaded(num_ranks):
    total = 512 * num_ranks
    home, config = given_dispatch("contiguous", total, num_ranks), MagiConfig(overlap=ONE_LAUNCH)
    plans = [make_plan(builders.causal(total), config, num_ranks, home, hosts) for hosts in hosts_of(total, num_ranks)]
    for rank in range(num_ranks):
        first, at_home, swapped = (plan.for_rank(rank) for plan in plans)
        assert first.moves and swapped.moves and at_home.moves is None
        static = StaticPlans({0: at_home}, CPU, headroom=8, samples=[{0: first}], queries="travel")
        (made,) = static.plans[0].runtime.moves.values()
        most = static._static[0]._moves.num_queries
        before = [t.data_ptr() for t in (made.rows, made.tail, *_arrays(made.there), *_arrays(made.back))]
        assert not any(t.any() for t in (*_arrays(made.there), *_arrays(made.back))), "the first is loaded"
        for plan in (swapped, first, at_home):
            assert static._static[0].why_not(plan) is None
            static._load({0: plan})
            moves = travel_args(plan, CPU)
            num_guests = plan.num_queries - plan.num_rows
            assert torch.equal(made.tail, plan.num_queries + torch.arange(256)) and made.tail[-1] < most
            num_back = 0 if moves is None else len(moves.rows)
            assert (made.rows[num_back:] == most - 1).all() and most - 1 >= plan.num_queries + READ_BEHIND
            assert [t.data_ptr() for t in (made.rows, made.tail, *_arrays(made.there), *_arrays(made.back))] == before
            if moves is None:
                assert num_guests == 0 and not any(t.any() for t in (*_arrays(made.there), *_arrays(made.back)))
                continue
            assert torch.equal(made.rows[:num_back], moves.rows) and num_guests == moves.there.num_recv
            for own, args in ((made.there, moves.there), (made.back, moves.back)):
                for a, b in zip(_arrays(own), _arrays(args), strict=True):
                    assert torch.equal(a[: len(b)], b)
                assert torch.equal(own.send_index[: args.num_send], args.send_index)
    few = [[*range(64, 512)], [*range(64), *range(512, 1024)], [*range(1024, total)]][:num_ranks]
    few_travel = make_plan(builders.causal(total), config, num_ranks, home, given_dispatch(few, total, num_ranks))
    narrow = StaticPlans({0: few_travel.for_rank(0)}, CPU, headroom=1, queries="travel")
    reason, advice = narrow._static[0].why_not(plans[2].for_rank(0)).split("; ")
    assert reason == "512 rows travel, there is room for 320" and advice.endswith("or with headroom=8.0")


def replay_on_ranks(
    rank: int, num_ranks: int, deterministic: bool, overlap: OverlapConfig, travels: bool = False
) -> tuple[int, int]:
    """A graph over several ranks, replayed with masks that fetch much, little and nothing; how many were replayed."""
    device, rows = current_device(), 2048
    config = MagiConfig(
        attend=AttendConfig(impl="ffa", deterministic=deterministic), comm=CommConfig(impl="native"), overlap=overlap
    )
    shape = shape_of((8, 2), (128, 128)).kernels_for(device)
    inputs = tensors(rows, shape, device)
    sink = torch.randn(1, 8, device=device, generator=torch.Generator(device).manual_seed(1)).requires_grad_()
    masks = some_masks(rows * num_ranks)
    stripes = [(0, rows * num_ranks, at, at + 10, 0) for at in range(0, rows * num_ranks, 60)]  # for which is no room
    masks.insert(20, AttnMask(stripes, rows * num_ranks))
    group = dist.group.WORLD

    def plan_for(number: int) -> RankPlan:
        mask, ways = masks[number], ()
        if travels:
            total = rows * num_ranks
            hosts = hosts_of(total, num_ranks)
            ways = given_dispatch("contiguous", total, num_ranks), hosts[number % len(hosts)]
        return make_plan(mask, config, num_ranks, *ways).for_rank(rank)

    queries = "travel" if travels else "home"
    static = StaticPlans({0: plan_for(0)}, device, group, headroom=6, queries=queries)
    graph, results = capture(lambda: among_nan(partial(attend, inputs, static.plans[0], config, sink, group)))
    num_replayed = num_eager = 0
    wrong = []
    for number in range(len(masks)):
        batch = prepare_batch({0: plan_for(number)}, shape, config, like=static.facts)
        batch.to(device)
        expected = among_nan(partial(attend, inputs, batch.plans[0], config, sink, group))
        for result in results:
            result.fill_(float("nan"))
        if static.load(batch.plans) is not None:
            num_eager += 1
            continue
        num_replayed += 1
        graph.replay()
        tables = [bands.tobytes() for bands in batch.plans[0].bands]
        # Equal stages are remembered as one, with one choice of kernels; where queries travel it may differ.
        same_kernels = len(set(tables)) == 2 and not travels
        for i, (a, b) in enumerate(zip(results, expected, strict=True)):
            most = 0.0 if same_kernels and (i < 2 or deterministic) else 2**-6
            difference = largest_difference(a, b)
            if not difference <= most:
                wrong.append((number, i, difference, int(a.isnan().sum()), int(b.isnan().sum())))
    assert not wrong, f"mask, result, difference, NaN replayed and in eager mode: {wrong}"
    return num_replayed, num_eager


on_gpus = pytest.mark.parametrize(
    "num_ranks",
    [
        pytest.param(n, marks=[pytest.mark.gpu, pytest.mark.sm90, pytest.mark.ranks(n), forced.for_hopper])
        for n in (2, 4)
    ],
)


by_stages_or_not = pytest.mark.parametrize("overlap", [ONE_STAGE, ONE_LAUNCH], ids=["stages", "one launch"])


@on_gpus
@by_stages_or_not
@pytest.mark.parametrize("deterministic", [False, True])
def test_one_graph_of_several_ranks_replayed_with_50_masks_equals_eager_mode(num_ranks, deterministic, overlap):
    found = run_ranks(replay_on_ranks, num_ranks, deterministic, overlap, backend="nccl", timeout_s=120)
    assert len(set(found)) == 1 and found[0][0] >= 50 and found[0][1] >= 1


@on_gpus
@by_stages_or_not
def test_queries_travel_in_one_graph_replayed_with_many_masks(num_ranks, overlap):
    found = run_ranks(replay_on_ranks, num_ranks, False, overlap, True, backend="nccl", timeout_s=120)
    assert len(set(found)) == 1 and found[0][0] >= 40, "replayed, eager"


def replay_without_eager_calls(rank: int, num_ranks: int, num_steps: int, overlap: OverlapConfig) -> tuple[int, int]:
    """Replays alone, one behind the other, with plans that change; forward and backward of two layers.

    Returns:
        How many numbers are wrong, and by how many bytes memory has grown.
    """
    device, rows = current_device(), 1024
    config = MagiConfig(comm=CommConfig(impl="native"), overlap=overlap)
    shape = shape_of((8, 2), (128, 128)).kernels_for(device)
    inputs = tensors(rows, shape, device)
    group = dist.group.WORLD
    plans = [make_plan(documents(s, 3 + s % 7, rows * num_ranks), config, num_ranks).for_rank(rank) for s in range(8)]
    static = StaticPlans({0: plans[0]}, device, group, headroom=8)
    batches = [prepare_batch({0: plan}, shape, config, like=static.facts) for plan in plans]
    expected = []
    for batch in batches:
        batch.to(device)
        expected.append(attend(inputs, batch.plans[0], config, group=group)[0].detach().clone())
    graph, results = capture(
        lambda: [
            *attend(inputs, static.plans[0], config, group=group),
            *attend(inputs, static.plans[0], config, group=group),
        ]
    )
    wrong, before = torch.zeros((), dtype=torch.int64, device=device), 0
    for step in range(num_steps):
        assert static.load(batches[step * 5 % 8].plans) is None
        graph.replay()
        wrong += (results[0] != expected[step * 5 % 8]).sum() + (results[5] != expected[step * 5 % 8]).sum()
        if step == 10:
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
    torch.cuda.synchronize()
    return int(wrong), max(0, torch.cuda.memory_allocated() - before)


@on_gpus
@by_stages_or_not
def test_1000_replays_of_several_ranks_are_right_and_grow_no_memory(num_ranks, overlap):
    found = run_ranks(replay_without_eager_calls, num_ranks, 1000, overlap, backend="nccl", timeout_s=120)
    assert found == [(0, 0)] * num_ranks, "numbers that are wrong, bytes by which memory has grown"


def replay_after_a_larger_call(rank: int, num_ranks: int, overlap: OverlapConfig) -> int:
    """A graph, then eager calls that need larger slots, then a second graph over these; replays of both are right.

    Returns:
        How often slots were allocated.
    """
    device, group = current_device(), dist.group.WORLD
    native, other = (MagiConfig(comm=CommConfig(impl=impl), overlap=overlap) for impl in ("native", "all_to_all"))
    shape = shape_of((8, 2), (128, 128)).kernels_for(device)
    runs = []
    for rows in (1024, 32_768):
        mask, inputs = builders.causal(rows * num_ranks), tensors(rows, shape, device)
        plan = make_plan(mask, native, num_ranks).for_rank(rank)
        by_nccl = attend(inputs, make_plan(mask, other, num_ranks).for_rank(rank), other, group=group)
        expected = [t.detach().clone() for t in by_nccl]
        del by_nccl  # with what autograd noted on another stream than the capture's
        static = StaticPlans({0: plan}, device, group, headroom=1)
        made = capture(partial(attend, inputs, static.plans[0], native, group=group))
        runs.append((*made, expected, static, inputs))  # a graph reads its inputs where they were
        found = []
        for number, (graph, results, wanted, *_) in enumerate(runs * 3):
            for result in results:
                result.fill_(float("nan"))
            graph.replay()
            for name, a, b in zip(("out", "lse", "dq", "dk", "dv"), results, wanted, strict=True):
                found.append((rows, number % len(runs), name, int(a.isnan().sum()), largest_difference(a, b)))
        assert all(difference <= 2**-6 for *_, difference in found), found
    memory = native_of(group, device)[0]._memory
    assert len(memory._kept) == 1 and memory.slot_bytes > 16 << 20
    group_collective.forget_graphs(group)
    return memory.generation


@on_gpus
@by_stages_or_not
def test_graphs_are_replayed_after_a_larger_call_has_got_memory_of_its_own(num_ranks, overlap):
    found = run_ranks(replay_after_a_larger_call, num_ranks, overlap, backend="nccl", timeout_s=120)
    assert found == [2] * num_ranks, "allocations of slots"


def stay_away(rank: int, num_ranks: int, overlap: OverlapConfig) -> None:
    """Rank 0 replays less often than the others."""
    device, rows = current_device(), 2048
    group = dist.new_group(list(range(num_ranks)), timeout=timedelta(seconds=3))
    config = MagiConfig(comm=CommConfig(impl="native", verify=False), overlap=overlap)
    plan = make_plan(builders.causal(rows * num_ranks), config, num_ranks).for_rank(rank)
    inputs = tensors(rows, shape_of((8, 2), (128, 128)), device)
    static = StaticPlans({0: plan}, device, group)
    graph, _ = capture(lambda: attend(inputs, static.plans[0], config, group=group))
    graph.replay()
    torch.cuda.synchronize()
    if rank == 0:
        time.sleep(8)
        return
    begin = time.monotonic()
    graph.replay()
    torch.cuda.synchronize()
    assert 2 < time.monotonic() - begin < 7
    with pytest.raises(RuntimeError, match=r"rank 0 .* did not arrive within 3 s"):
        static.load({0: plan})
    assert torch.ones(3, device="cuda").sum() == 3, "the device is as it was"


@on_gpus
@by_stages_or_not
def test_a_replay_that_waits_for_a_rank_which_does_not_come_ends_and_the_next_load_names_it(num_ranks, overlap):
    run_ranks(stay_away, num_ranks, overlap, backend="nccl", timeout_s=60)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_there_is_room_for_rows_of_other_masks_of_one_kind(num_ranks):
    """Also where the first one fetches next to nothing."""
    total = 1024 * num_ranks
    windows = [builders.sliding_window(total, width, 0) for width in (1, 30, 200, 1000)]
    for masks in (windows, [documents(seed, 16, total) for seed in range(4)]):
        static = StaticPlans({0: shards_of(masks[0], num_ranks)[0]}, CPU)
        for mask in masks[1:]:
            assert static._static[0].why_not(shards_of(mask, num_ranks)[0]) is None


def test_a_forward_of_several_ranks_is_one_launch_where_that_of_the_first_mask_is():
    """Whatever the headroom: more memory than is used makes nothing slower."""
    plan = shards_of(builders.sliding_window(4096, 8, 0), 4)[0]
    (eager,), (static,) = (plan_casts(x, CPU) for x in (plan, StaticPlans({0: plan}, CPU, headroom=8).plans[0]))
    most = eager.most.received
    assert 4 * most < static.most.received
    k = torch.empty(1, fused_comm._MOST_FORWARD_BYTES // (2 * most), 1, dtype=torch.int8)
    for args in (eager, static):
        transfer = fused_comm.Fetched(args, lambda: None, "native")
        assert transfer.forward_pays(k, k) and not transfer.forward_pays(k, k.half())
