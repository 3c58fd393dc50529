"""Static plans of several ranks whose passes are one launch each, which waits for keys of the mask that is loaded."""

from __future__ import annotations

import pytest
import torch

from megatron_magi.attention import AttnShape, StaticPlans, distributed, fused_comm, prepare_batch, travel
from megatron_magi.attention.kernel_list import needed_kernels
from megatron_magi.backends.sm90 import kernels
from megatron_magi.backends.sm90 import plan as hopper_plan
from megatron_magi.config import AttendConfig, CommConfig, MagiConfig, OverlapConfig
from megatron_magi.cuda import driver
from megatron_magi.mask import AttnMask, builders
from megatron_magi.plan import RankPlan, given_dispatch, make_plan
from megatron_magi.runtime.lru import LruCache
from tests import forced
from tests.attention import test_prepared_batch
from tests.attention.test_cuda_graph import CPU, OF_A_MASK, attend, documents, note_grids, some_masks, tensors
from tests.backends.sm90.fake_driver import fake_driver

one_rank_alone = test_prepared_batch.one_rank_alone

ROWS, NUM_RANKS = 1024, 2
SHAPES = {
    "packed": (8, 1, 128, 128),
    "several heads": (4, 2, 128, 128),
    "heads of 64": (2, 2, 64, 64),
    "wide heads": (4, 1, 192, 128),
}


def config_of(**attend_options) -> MagiConfig:
    return MagiConfig(
        attend=AttendConfig(impl="ffa", **attend_options),
        comm=CommConfig(impl="native", verify=False),
        overlap=OverlapConfig(degree=1, one_launch=True),
    )


def shape_of(name: str) -> AttnShape:
    return AttnShape(*SHAPES[name], torch.bfloat16, num_sms=132)


def plan_for(mask: AttnMask, config: MagiConfig, rank: int = 0, *, travels: bool = False) -> RankPlan:
    ways = [given_dispatch(name, mask.total_seqlen_q, NUM_RANKS) for name in ("contiguous", "zigzag")]
    return make_plan(mask, config, NUM_RANKS, *(ways if travels else ())).for_rank(rank)


def tables_of(plan: RankPlan) -> dict[str, hopper_plan.DevicePlan]:
    """The tables that the launches of the only call read, by pass and kernel."""
    (call,) = plan.runtime.calls.values()
    assert call.program is not None
    bound = list(call.program.bound.values())
    return {f"{len(known.tables)} {name}": table for known in bound for name, table in known.tables.items()}


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("name", "travels"), [*((name, False) for name in SHAPES), ("several heads", True)])
@forced.free_choice
def test_launches_are_those_of_eager_mode_and_stay_and_read_the_tables_that_it_reads(
    monkeypatch,
    one_rank_alone,
    name,
    travels,
    deterministic,
):
    config, shape = config_of(deterministic=deterministic), shape_of(name)
    with fake_driver(monkeypatch) as launched:
        grids = note_grids(monkeypatch)
        asked = note_kernels(monkeypatch)
        monkeypatch.setattr(travel, "group_cast", distributed.group_cast)
        masks = some_masks(NUM_RANKS * ROWS)[::5]
        first, *others = (plan_for(mask, config, travels=travels) for mask in masks)
        assert (first.moves is not None) == travels
        inputs = tensors(first.num_rows, shape, CPU)
        static = StaticPlans({0: first}, CPU, headroom=8, queries="travel")

        def run(plan: RankPlan) -> list[str]:
            launched.clear()
            attend(inputs, plan, config, group=one_rank_alone)
            return list(launched)

        taken = run(static.plans[0])
        assert taken[:2] == ["get_rows", "forward"] and asked <= set(needed_kernels(shape, config, 2, captured=True))
        if name != "wide heads":
            assert taken[2:5] == ["get_rows", "preprocess", "backward"] and taken.count("forward") == 1
            assert all("CAPTURED=1" in macros for kernel, macros in asked if "postprocess_dq" not in kernel)
            masks_of_stages = static._static[0].masks
            assert not any(mask.is_read for mask in masks_of_stages), "no memory for tables that no launch reads"

        def launches() -> list[tuple]:
            """What launches are told of a mask, and their grids."""
            structs = [(kernel, of) for kernel, x in launched.params.items() for of in (x, getattr(x, "plan", None))]
            return [
                dict(grids),
                *((kernel, *(getattr(of, field, None) for field in OF_A_MASK)) for kernel, of in structs),
            ]

        before = launches()
        for other in (*others, first):
            batch = prepare_batch({0: other}, shape, config, like=static.facts)
            batch.to(CPU)
            plan = batch.plans[0]
            assert static._static[0].why_not(plan) is None
            static._load({0: plan})
            assert run(static.plans[0]) == taken and launches() == before
            of_eager = run(plan)
            if plan.degree and name != "wide heads":
                splits = {"postprocess_keys"}  # no tile of some masks is split
                assert [k for k in of_eager if k not in splits] == [k for k in taken if k not in splits]
            check_tables(static, plan)
            grids.clear()
            launched.params.clear()


def note_kernels(monkeypatch: pytest.MonkeyPatch) -> set[tuple[str, tuple[str, ...]]]:
    """Sources and macros of the kernels that are loaded from now on."""
    load, asked = kernels._load, set()

    def note(device, kernel, macros, *sizes) -> driver.Kernel:
        asked.add((kernels.source_of(kernel), macros))
        return load(device, kernel, macros, *sizes)

    monkeypatch.setattr(kernels, "_load", note)
    return asked


def check_tables(static: StaticPlans, plan: RankPlan) -> None:
    """The static plan's tables and numbers are those that eager calls with ``plan``, which is loaded, read."""
    num_fetched = plan.transfers[0].num_recv if plan.degree else 0
    own, expected, memory = tables_of(static.plans[0]), tables_of(plan), static._memory
    assert own.keys() == expected.keys()
    for key, room in own.items():
        wanted = expected[key]
        numbers = memory._numbers[room.numbers[0]].tolist()
        assert numbers[0] == wanted.num_tiles and numbers[3] == wanted.host.step and numbers[5] == num_fetched
        check_begins_with(room, wanted)
        for of_schedule, made in room.schedules.items():
            schedule = hopper_plan.schedule_of(wanted, *of_schedule)
            assert torch.equal(made.items[: len(schedule.items)], schedule.items)
            numbers = memory._numbers[room.of_schedule[of_schedule]].tolist()
            assert numbers[1:3] == [len(schedule.items), schedule.num_split] and numbers[5] == num_fetched


def check_begins_with(room, wanted) -> None:
    """Each table of a plan with room begins with that of the other plan."""
    for i, at in enumerate(("tiles", "passes", "bounds")):
        ends = (*wanted.host.offsets[1:], wanted.memory.nbytes)
        table = wanted.memory[wanted.host.offsets[i] // 4 : ends[i] // 4]
        begin = (getattr(room, at) - room.memory.data_ptr()) // 4
        assert torch.equal(room.memory[begin : begin + len(table)], table), at


@pytest.mark.parametrize("name", SHAPES)
@forced.free_choice
def test_a_batch_prepared_for_them_has_all_tables_that_loading_takes(monkeypatch, one_rank_alone, name):
    config, shape = config_of(), shape_of(name)
    total = NUM_RANKS * ROWS
    first = plan_for(documents(99, 8, total), config)
    with fake_driver(monkeypatch):
        inputs = tensors(first.num_rows, shape, CPU)
        static = StaticPlans({0: first}, CPU, headroom=8)
        attend(inputs, static.plans[0], config, group=one_rank_alone)
        thirds = builders.varlen(doc_lengths=[total // 4, total // 4, total // 2])
        masks = documents(3, 9, total), builders.causal(total), builders.sliding_window(total, 30, 0), thirds
        plans = [plan_for(mask, config) for mask in masks]
        assert not plans[-1].degree, "nothing is fetched"
        for plan in plans:
            if name == "wide heads" and not (plan.degree and plan.transfers[0].num_recv):
                continue  # their backward goes by stages, and a stage without keys has no tables
            monkeypatch.setattr(hopper_plan, "_plans", LruCache(1 << 30))
            batch = prepare_batch({0: plan}, shape, config, like=static.facts)
            batch.to(CPU)
            with monkeypatch.context() as patch:
                patch.setattr(hopper_plan, "make_host_plan", lambda *_: pytest.fail("made when it is loaded"))
                patch.setattr(hopper_plan.HostPlan, "schedule", lambda *_: pytest.fail("made when it is loaded"))
                assert static._static[0].why_not(batch.plans[0]) is None
                static._load(batch.plans)


@forced.free_choice
def test_a_forward_that_goes_by_stages_reads_their_tables(monkeypatch, one_rank_alone):
    """As where several ranks fetch much; the backward is one launch."""
    config, shape, total = config_of(), shape_of("several heads"), NUM_RANKS * ROWS
    first, second = (plan_for(documents(seed, 8, total), config) for seed in (99, 3))
    monkeypatch.setattr(fused_comm.Fetched, "forward_pays", lambda *_: False)
    with fake_driver(monkeypatch) as launched:
        inputs = tensors(first.num_rows, shape, CPU)
        static = StaticPlans({0: first}, CPU, headroom=8)
        attend(inputs, static.plans[0], config, group=one_rank_alone)
        assert launched[:2] == ["forward", "forward"] and "get_rows" in launched[2:]
        made = static._static[0]
        assert all(mask.is_read for mask in (*made.masks, made.joined))
        batch = prepare_batch({0: second}, shape, config, like=static.facts)
        batch.to(CPU)
        with monkeypatch.context() as patch:
            patch.setattr(hopper_plan, "make_host_plan", lambda *_: pytest.fail("made when it is loaded"))
            assert made.why_not(batch.plans[0]) is None
            static._load(batch.plans)
        for mask, bands in zip(made.masks, second.bands, strict=True):
            for tiling, room in mask._plans.items():
                check_begins_with(room, mask._source(tiling, mask._now))
            assert mask._now.bands.tobytes() == bands.tobytes()


def test_plans_that_ask_for_stages_get_stages():
    overlap = OverlapConfig(degree=1, one_launch=False)
    kept = OverlapConfig(degree=1, hide_tail_reduce=True)
    for options in (overlap, kept):
        config = MagiConfig(overlap=options)
        plan = plan_for(builders.causal(NUM_RANKS * ROWS), config)
        static = StaticPlans({0: plan}, CPU)
        assert static._static[0].joined is None and static.facts[0].joined is None
        assert not static.plans[0].one_launch and static.plans[0].runtime.joined_bands is None
