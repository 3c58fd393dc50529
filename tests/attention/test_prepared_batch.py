"""Batches that are prepared ahead: everything is there when layers run, and nothing else changes."""

from __future__ import annotations

import gc
import pickle
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_magi.attention import AttnShape, distributed, distributed_attention, fused_comm, prepare_batch
from megatron_magi.backends.sm90 import mask_numbers
from megatron_magi.backends.sm90 import plan as hopper_plan
from megatron_magi.backends.sm90 import program as hopper_program
from megatron_magi.comm import cast_args
from megatron_magi.config import AttendConfig, CommConfig, DispatchConfig, MagiConfig, OverlapConfig
from megatron_magi.cuda import driver
from megatron_magi.cuda.arriving import Arriving
from megatron_magi.cuda.launch_list import Step
from megatron_magi.cuda.params import struct
from megatron_magi.mask import AttnMask, builders
from megatron_magi.plan import make_plan
from megatron_magi.runtime.lru import LruCache
from megatron_magi.runtime.upload import PackedArrays
from tests import forced
from tests.attention import cases as cs
from tests.backends.sm90.fake_driver import fake_driver

CPU = torch.device("cpu")
SHAPE = AttnShape(4, 2, 128, 128, torch.bfloat16, num_sms=132)


def prepared_equals_made_when_due(rank: int, num_ranks: int) -> bool:
    mask = cs.documents([50, 3, 40, 27])
    config = MagiConfig(overlap=OverlapConfig(degree=2))
    plan = make_plan(mask, config, num_ranks)
    batch = prepare_batch(
        {"all": plan.for_rank(rank)}, AttnShape(4, 2, 8, 8, torch.float64), config,
        {"rows": plan.dispatch.global_index(rank)},
    )  # fmt: skip
    batch = pickle.loads(pickle.dumps(batch))
    rows = batch.to(CPU)["rows"]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(plan.dispatch.padded_seqlen, 4, 8, dtype=torch.float64, generator=generator)[rows]
    results = []
    for rank_plan in (batch.plans["all"], plan.for_rank(rank)):
        q, k, v = (t.clone().requires_grad_() for t in (x, x[:, :2], x[:, 2:]))
        out = distributed_attention(q, k, v, rank_plan, dist.group.WORLD, config=config)[0]
        results.append([out, *torch.autograd.grad(out.square().sum(), (q, k, v))])
    return all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_a_prepared_batch_gives_what_a_plan_gives_bit_by_bit(ranks, num_ranks):
    assert all(ranks(num_ranks, prepared_equals_made_when_due))


class NothingUnderWay:
    """Rows that have arrived."""

    adds_late = False

    def __init__(self, result):
        self._result = result

    def wait(self):
        return self._result


@pytest.fixture
def one_rank_alone(monkeypatch):
    """This process is rank 0 of two; rows of the other are zero, and nothing is sent."""

    class Queue:
        def __init__(self):
            self.number, self.asked, self.is_only = 0, 0, True

        def version(self):
            return self.number

        def queue(self, calls, _stream, *addresses):
            calls.queue(*addresses)

    native = Queue()

    def step(name):
        return Step(driver.Kernel(name, 1, 0), 1, struct("common/arrivals.cuh", "ArrivalFlags")())

    def get_step(rows, args, group, impl):
        native.asked += 1
        brings = step("get_rows")
        arriving = Arriving(rows.into, rows.places, brings, 0, 0, 0, 0, 0, native.is_only)
        return None if impl != "native" else (native, arriving)

    monkeypatch.setattr(fused_comm, "get_step", get_step)
    monkeypatch.setattr(fused_comm, "put_step", lambda *_: step("put_rows"))
    monkeypatch.setattr(hopper_program, "current_stream", lambda _device: 0)

    def cast(tensors, args, group, impl, **_):
        return NothingUnderWay([x.new_zeros((args.num_recv, *x.shape[1:])) for x in tensors])

    monkeypatch.setattr(distributed, "group_cast", cast)
    monkeypatch.setattr(distributed, "make_room", lambda *_: None)
    for module in (distributed, fused_comm):
        monkeypatch.setattr(module, "group_reduce", lambda tensors, args, group, into, **_: NothingUnderWay(into))

    monkeypatch.setattr(distributed, "group_of", lambda group: group)

    class Group:
        def size(self):
            return 2

        def rank(self):
            return 0

    group = Group()
    group.native = native
    return group


MASKS = {
    "documents": builders.varlen(doc_lengths=[700, 40, 90, 1218]),
    "short": builders.varlen(doc_lengths=[64] * 32),
    "causal": builders.causal(4096),
    "window": builders.sliding_window(2048, left=100, right=0),
    "many": builders.varlen(doc_lengths=[300] * 7),
    "empty": AttnMask([(0, 700, 0, 700, 0)], total_seqlen_q=2048),
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize(
    ("dims", "options"),
    [
        ((128, 128), {}),
        ((64, 64), {"overlap": OverlapConfig(degree=2)}),
        ((128, 128), {"attend": AttendConfig(deterministic=True, backward_sm_margin=8)}),
        ((128, 128), {"overlap": OverlapConfig(degree=1, hide_tail_reduce=True)}),
        ((128, 128), {"comm": CommConfig(backward_high_precision_reduce=True)}),
        ((192, 128), {}),
        ((128, 128), {"comm": CommConfig("native"), "overlap": OverlapConfig(one_launch=True)}),
        ((64, 64), {"comm": CommConfig("native"), "overlap": OverlapConfig(degree=3, one_launch=True)}),
    ],
)
@forced.free_choice
def test_layers_find_all_tables_of_a_prepared_batch(monkeypatch, one_rank_alone, mask, dims, options):
    config = MagiConfig(**options)
    config = replace(config, attend=replace(config.attend, impl="ffa"), comm=replace(config.comm, verify=False))
    heads = (4, 2) if mask is not MASKS["causal"] else (32, 16)  # whose sums do not fit everywhere
    shape = AttnShape(*heads, *dims, torch.bfloat16)
    with fake_driver(monkeypatch) as launched:
        shape = shape.kernels_for(CPU)
        assert shape.num_sms == 132
        for cp_size in (1, 2):
            monkeypatch.setattr(hopper_plan, "_plans", LruCache(1 << 30))
            plan = make_plan(mask, config, cp_size).for_rank(0)
            batch = pickle.loads(pickle.dumps(prepare_batch({0: plan}, shape, config)))
            batch.to(CPU)
            plan = batch.plans[0]
            with monkeypatch.context() as patch:
                refuse(patch)
                for _ in range(2):
                    q, k, v = tensors(plan.num_rows, shape)
                    out = distributed_attention(q, k, v, plan, one_rank_alone if cp_size > 1 else None, config=config)[
                        0
                    ]
                    torch.autograd.grad(out, (q, k, v), torch.zeros_like(out))
        assert {"forward", "preprocess"} <= set(launched)


def test_tables_of_stages_stay_closed_until_a_pass_goes_by_stages(monkeypatch, one_rank_alone):
    config = MagiConfig(attend=AttendConfig(impl="ffa"), comm=CommConfig("native", verify=False))
    plan = make_plan(MASKS["causal"], config, 2).for_rank(0)
    with fake_driver(monkeypatch):
        batch = pickle.loads(pickle.dumps(prepare_batch({0: plan}, SHAPE, config, {"rows": np.arange(3)})))
        assert batch.to(CPU)["rows"].tolist() == [0, 1, 2]
        stages = batch.parts.plans[0].stages
        for announces in (True, False):
            with monkeypatch.context() as patch:
                refuse(patch)
                if not announces:
                    patch.setattr(fused_comm, "get_step", lambda *_: None)
                attend(batch.plans[0], SHAPE, config, one_rank_alone)
                assert stages.is_closed == announces
            batch.plans[0].runtime.calls.clear()


@pytest.mark.parametrize(
    ("mask", "backward"),
    [
        ("causal", [*["preprocess", "backward", "postprocess_keys"] * 2, "postprocess_dq"]),
        ("many", ["preprocess", "backward", "backward", "postprocess_dq"]),
    ],
)
def test_stages_share_statistics_and_sums_of_dq(monkeypatch, one_rank_alone, mask, backward):
    """The kernels of a call with a remote stage: at most ten, with two that pack rows and one that adds them."""
    config = MagiConfig(
        dispatch=DispatchConfig("affinity"),
        attend=AttendConfig(impl="ffa"),
        comm=CommConfig(verify=False),
        overlap=OverlapConfig(degree=1),
    )
    plan = make_plan(MASKS[mask], config, 2).for_rank(0)
    shape = SHAPE._replace(num_heads_q=8 if mask == "causal" else 2)
    with fake_driver(monkeypatch) as launched:
        q, k, v = tensors(plan.num_rows, shape)
        for _ in range(3):
            launched.clear()
            out = distributed_attention(q, k, v, plan, one_rank_alone, config=config)[0]
            grads = torch.autograd.grad(out, (q, k, v), torch.zeros_like(out))
            assert launched == ["forward", "forward", "row_delta", *backward]
            assert all(grad.dtype == torch.bfloat16 and grad.is_contiguous() for grad in grads)
    assert len(launched) + 3 <= 10 or mask == "causal"


@pytest.mark.parametrize(
    ("mask", "options", "is_only", "backward"),
    [
        ("causal", {}, True, ["backward", "postprocess_keys", "put_rows", "postprocess_dq"]),
        ("many", {}, True, ["backward", "put_rows", "postprocess_dq"]),
        ("many", {}, False, ["backward", "put_rows", "postprocess_dq"]),
        ("many", {"deterministic": True}, True, ["backward", "put_rows", "backward_queries"]),
        # With several groups nothing keeps SMs while it waits for ranks.
        ("many", {"deterministic": True}, False, ["backward", "backward_queries", "put_rows"]),
    ],
)
def test_one_launch_queues_at_most_eight_kernels_that_are_prepared_once(
    monkeypatch, one_rank_alone, mask, options, is_only, backward
):
    config = MagiConfig(
        dispatch=DispatchConfig("affinity"),
        attend=AttendConfig(impl="ffa", **options),
        comm=CommConfig("native", verify=False),
        overlap=OverlapConfig(degree=2),
    )
    plan, native = make_plan(MASKS[mask], config, 2).for_rank(0), one_rank_alone.native
    native.is_only = is_only
    shape = SHAPE._replace(num_heads_q=8 if mask == "causal" else 2)
    expected = ["get_rows", "forward", "get_rows", "preprocess", *backward]
    assert len(expected) <= 8
    overlapping = {}
    with fake_driver(monkeypatch) as launched:
        launch = driver.Kernel.launch

        def note(kernel, config, pointers):
            overlapping[kernel.handle] = driver.LaunchConfig.from_address(config).num_attributes
            launch(kernel, config, pointers)

        monkeypatch.setattr(driver.Kernel, "launch", note)
        q, k, v = tensors(plan.num_rows, shape)
        for call, (version, asked) in enumerate([(0, 1), (0, 1), (1, 2), (1, 2)]):
            native.number = version
            launched.clear()
            out = distributed_attention(q, k, v, plan, one_rank_alone, config=config)[0]
            torch.autograd.grad(out, (q, k, v), torch.zeros_like(out))
            assert launched == expected and native.asked == asked, call
    # What finishes dq takes it that the kernels before the exchange are complete; what computes dq does not.
    rest = "backward_queries" if "backward_queries" in backward else "postprocess_dq"
    assert overlapping["preprocess"] and overlapping[rest] and not overlapping["get_rows"]
    assert overlapping["put_rows"] == (backward[-1] == "backward_queries")
    assert overlapping["forward"] == overlapping["backward"] == is_only


def test_a_plan_that_is_kept_keeps_no_more_tables_than_the_cache_of_passes(monkeypatch, one_rank_alone):
    config = MagiConfig(
        dispatch=DispatchConfig("affinity"), attend=AttendConfig(impl="ffa"), comm=CommConfig(verify=False)
    )
    plan = make_plan(MASKS["documents"], config, 2).for_rank(0)
    with fake_driver(monkeypatch):
        monkeypatch.setattr(hopper_plan, "_plans", LruCache(1, 1))
        q, k, v = tensors(plan.num_rows, SHAPE)
        made = []
        device_plan = hopper_plan.device_plan
        monkeypatch.setattr(
            hopper_plan, "device_plan", lambda *args: made.append(weakref.ref(p := device_plan(*args))) or p
        )
        for _ in range(3):
            out = distributed_attention(q, k, v, plan, one_rank_alone, config=config)[0]
            torch.autograd.grad(out, (q, k, v), torch.zeros_like(out))
        num_made = len(made)
        assert num_made == 2 * len(plan.bands), "made once for each pass"
        hopper_program._bound.drop(lambda _key: True)
        alive = [ref() for ref in made if ref() is not None]
        assert len(alive) <= 1, "that in the cache of plans"
        del alive
        distributed_attention(q, k, v, plan, one_rank_alone, config=config)
        assert len(made) == num_made + len(plan.bands)


def test_tables_of_batches_under_way_are_there_whatever_came_after_them_and_go_with_their_batch(monkeypatch):
    """As in a pipeline, where the backward of a microbatch comes many microbatches later."""
    config = MagiConfig(attend=AttendConfig(impl="ffa"))
    with fake_driver(monkeypatch):
        monkeypatch.setattr(hopper_plan, "_plans", LruCache(1 << 30, 1))
        known, batches = set(hopper_plan._prepared), []  # of other tests
        for n in range(5):
            plan = make_plan(builders.varlen(doc_lengths=[700, 40 + n, 90]), config).for_rank(0)
            batches.append(prepare_batch({0: plan}, SHAPE, config))
            batches[-1].to(CPU)
        del plan
        assert not len(hopper_plan._plans) and len(set(hopper_plan._prepared) - known) > 5
        with monkeypatch.context() as patch:
            refuse(patch)
            for batch in batches:
                attend(batch.plans[0], SHAPE, config)
        gc.collect()
        gc.disable()  # device memory does not wait for it
        try:
            del batches, batch
            assert set(hopper_plan._prepared) <= known
        finally:
            gc.enable()


def test_batches_of_equal_masks_and_other_heads_find_the_schedules_of_their_own(monkeypatch):
    config, shapes = MagiConfig(attend=AttendConfig(impl="ffa")), (SHAPE, SHAPE._replace(num_heads_q=8, num_heads_kv=4))
    with fake_driver(monkeypatch):
        for planned in (False, True):  # when it was due, too
            monkeypatch.setattr(hopper_plan, "_plans", LruCache(1 << 30))
            plans = [make_plan(MASKS["many"], config).for_rank(0) for _ in shapes]
            if planned:
                attend(plans[0], SHAPE, config)
            batches = [prepare_batch({0: plan}, shape, config) for plan, shape in zip(plans, shapes, strict=True)]
            for batch in batches:
                batch.to(CPU)
            with monkeypatch.context() as patch:
                refuse(patch)
                for batch, shape in zip(batches, shapes, strict=True):
                    attend(batch.plans[0], shape, config)


def attend(plan, shape, config, group=None):
    q, k, v = tensors(plan.num_rows, shape)
    out = distributed_attention(q, k, v, plan, group, config=config)[0]
    torch.autograd.grad(out, (q, k, v), torch.zeros_like(out))


@pytest.mark.parametrize(
    ("cp_size", "options"),
    [(1, {}), (2, {"comm": CommConfig("native", verify=False)}), (2, {"overlap": OverlapConfig(degree=2)})],
)
def test_layers_make_nothing_where_their_launches_are_prepared_like_those_of_the_batch_before(
    monkeypatch, one_rank_alone, cp_size, options
):
    config = MagiConfig(**{"comm": CommConfig("all_to_all", verify=False), **options})
    config = replace(config, attend=replace(config.attend, impl="ffa"))
    group = one_rank_alone if cp_size > 1 else None

    def step(plan) -> None:
        q, k, v = tensors(plan.num_rows, SHAPE)
        out = distributed_attention(q, k, v, plan, group, config=config)[0]
        torch.autograd.grad(out, (q, k, v), torch.zeros_like(out))

    with fake_driver(monkeypatch) as launched:
        last, expected = None, None
        for n in range(6):
            # The first two have keys that arrive, and have none; what both kinds launch is known then.
            mask = builders.full(2048) if n % 2 == 0 else builders.varlen(doc_lengths=[100 + n, 924 - n, 1024])
            plan = make_plan(mask, config, cp_size).for_rank(0)
            batch = prepare_batch({0: plan}, SHAPE, config)
            batch.to(CPU, like=last)
            assert batch.plans[0] is plan and len(plan.runtime.calls) == (n > 0)
            with monkeypatch.context() as patch:
                if n > 1:
                    patch.setattr(
                        hopper_program, "BoundLaunches", lambda *_args, **_options: pytest.fail("made in a layer")
                    )
                launched.clear()
                step(plan)
                first = list(launched)
                launched.clear()
                step(plan)
                assert launched == first and (n < 2 or n % 2 or launched == expected)
            expected, last = expected or first, batch.plans


@pytest.mark.parametrize(
    ("dims", "options"),
    [
        ((128, 128), {"overlap": OverlapConfig(degree=2)}),
        ((128, 128), {"comm": CommConfig("native", verify=False, backward_high_precision_reduce=True)}),
        ((256, 256), {}),
    ],
)
def test_launches_like_those_of_the_batch_before_are_those_of_the_mask_itself(
    monkeypatch, one_rank_alone, dims, options
):
    """Masks that fetch keys, that fetch none, and of which this rank alone fetches none write other dtypes."""
    config = MagiConfig(**{"comm": CommConfig("all_to_all", verify=False), **options})
    config = replace(config, attend=replace(config.attend, impl="ffa"))
    shape = AttnShape(4, 2, *dims, torch.bfloat16, num_sms=132)
    masks = [builders.full(2048), builders.varlen(doc_lengths=[1024, 1024]), builders.causal(2048)]

    def run(plan) -> list[dict]:
        q, k, v = tensors(plan.num_rows, shape)
        for _ in range(2):
            out = distributed_attention(q, k, v, plan, one_rank_alone, config=config)[0]
            torch.autograd.grad(out, (q, k, v), torch.zeros_like(out))
        (call,) = plan.runtime.calls.values()
        # What each list of launches is, but for addresses of tables, which every plan has of its own.
        return [
            {key: (one.form, one.is_direct, one.later) for key, one in program.bound.items()}
            for program in (call.program, *call.stages) if program is not None
        ]  # fmt: skip

    with fake_driver(monkeypatch):
        forms, last = set(), None
        for mask in (*masks, *masks[::-1], *masks):
            plans = [make_plan(mask, config, 2).for_rank(0) for _ in range(2)]
            batch = prepare_batch({0: plans[0]}, shape, config)
            batch.to(CPU, like=last)
            assert run(batch.plans[0]) == run(plans[1])
            (call,) = plans[0].runtime.calls.values()
            forms.add((call.accumulates, call.sums_meet))
            last = batch.plans
        assert len(forms) > 1


def test_keys_that_nobody_fetches_are_read_where_they_lie(monkeypatch):
    plan = make_plan(MASKS["causal"], cp_size=1).for_rank(0)
    q, k, v = tensors(plan.num_rows, SHAPE)
    k, v = (t.transpose(0, 1).contiguous().transpose(0, 1) for t in (k, v))  # heads lie apart
    with fake_driver(monkeypatch) as launched:
        monkeypatch.setattr(fused_comm, "with_rows", lambda _: pytest.fail("copied"))
        out = distributed_attention(q, k, v, plan, None, config=MagiConfig(attend=AttendConfig(impl="ffa")))[0]
        torch.autograd.grad(out, (q, k, v), torch.zeros_like(out))
        assert launched[0] == "forward"


def with_numbers(tables):
    """`numbers_on_device`, which must use the numbers that are prepared, if there are any."""

    def call(is_backward, shape, bands, device, stream, prepared=None, *rest):
        found = tables(is_backward, shape, bands, device, stream, prepared, *rest)
        known = None if prepared is None else prepared[is_backward]
        assert known is None or (known.numbers.items() <= found.numbers.items() and known.shape == shape)
        return found

    return call


def refuse(monkeypatch) -> None:
    """Makes it an error to plan, hash or copy anything to the device."""

    def fail(*_args, **_options):
        pytest.fail("made in a layer")

    monkeypatch.setattr(hopper_plan, "make_host_plan", fail)
    monkeypatch.setattr(hopper_plan.hashlib, "blake2b", fail)
    monkeypatch.setattr(hopper_plan.HostPlan, "schedule", fail)
    monkeypatch.setattr(mask_numbers, "numbers_on_device", with_numbers(mask_numbers.numbers_on_device))
    monkeypatch.setattr(PackedArrays, "to", fail)
    monkeypatch.setattr(cast_args, "arrival_arrays", fail)


def tensors(num_rows: int, shape: AttnShape) -> list[torch.Tensor]:
    sizes = (
        (shape.num_heads_q, shape.head_dim),
        (shape.num_heads_kv, shape.head_dim),
        (shape.num_heads_kv, shape.head_dim_v),
    )
    return [torch.zeros(num_rows, *size, dtype=shape.dtype, requires_grad=True) for size in sizes]


def test_a_layer_of_another_shape_makes_what_it_needs(monkeypatch):
    config = MagiConfig(attend=AttendConfig(impl="ffa"))
    plan = make_plan(MASKS["documents"], config).for_rank(0)
    with fake_driver(monkeypatch):
        monkeypatch.setattr(hopper_plan, "_plans", LruCache(1 << 30))
        prepare_batch({0: plan}, SHAPE, config).to(CPU)
        before = len(hopper_plan._plans)
        q, k, v = tensors(plan.num_rows, SHAPE._replace(head_dim=192))
        out = distributed_attention(q, k, v, plan, None, config=config)[0]
        torch.autograd.grad(out, (q, k, v), torch.zeros_like(out))
        assert out.shape == (plan.num_rows, 4, 128) and len(hopper_plan._plans) > before


@pytest.mark.sm90
def test_a_step_with_a_prepared_batch_does_not_wait_for_the_gpu():
    device, config = torch.device("cuda"), MagiConfig()
    shape = AttnShape(4, 2, 128, 128, torch.bfloat16).kernels_for(device)
    q, k, v = (t.detach().cuda().requires_grad_() for t in tensors(2048, shape))
    batches = [
        prepare_batch(
            {0: make_plan(builders.varlen(doc_lengths=[n, 2048 - n])).for_rank(0)}, shape, config
        ).pin_memory()
        for n in (100, 500, 900)
    ]

    def step(batch) -> None:
        batch.to(device)
        out = distributed_attention(q, k, v, batch.plans[0], None, config=config)[0]
        torch.autograd.grad(out, (q, k, v), torch.ones_like(out))

    step(batches[0])  # compiles kernels
    if forced.NAME == "cudnn":  # a thread that plans waits for counts, but for nothing that is queued on this stream
        for batch in batches[1:]:
            torch.cuda.synchronize()
            torch.cuda._sleep(2_000_000_000)  # cycles, more than a second
            busy = torch.cuda.Event()
            busy.record()
            step(batch)
            assert not busy.query()
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        for batch in batches[1:]:
            step(batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
