"""Plans whose tables stay where they are: captured launches are right for each mask that is loaded."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from megatron_magi import api
from megatron_magi.attention import AttnShape, StaticPlans, distributed_attention, prepare_batch
from megatron_magi.backends.sm90 import plan as hopper_plan
from megatron_magi.backends.sm90.plan import device_plan, schedule_of
from megatron_magi.config import AttendConfig, CommConfig, MagiConfig, OverlapConfig
from megatron_magi.cuda import driver
from megatron_magi.mask import AttnMask, builders
from megatron_magi.ops.slice_attention import slice_attention
from megatron_magi.plan import RankPlan, given_dispatch, make_plan
from tests import forced
from tests.attention.cases import random_mask
from tests.backends.sm90.fake_driver import fake_driver
from tests.graph_capture import capture

ROWS = 1024
CPU = torch.device("cpu")
ONE_STAGE = OverlapConfig(degree=1, one_launch=False)
ONE_LAUNCH = OverlapConfig(degree=1, one_launch=True)
CONFIG = MagiConfig(attend=AttendConfig(impl="ffa"))


def shape_of(heads: tuple[int, int], dims: tuple[int, int]) -> AttnShape:
    return AttnShape(*heads, *dims, torch.bfloat16, num_sms=132)


def plan_of(mask: AttnMask) -> RankPlan:
    return make_plan(mask).for_rank(0)


def documents(seed: int, count: int, rows: int = ROWS) -> AttnMask:
    """So many packed causal documents of random lengths."""
    cuts = np.sort(np.random.default_rng(seed).choice(np.arange(1, rows), count - 1, replace=False))
    return builders.varlen(doc_lengths=np.diff(cuts, prepend=0, append=rows).tolist())


def some_masks(rows: int) -> list[AttnMask]:
    """Of many kinds, after a first of 8 documents."""
    masks = [documents(seed, 2 + 3 * seed % 15, rows) for seed in range(40)]
    masks += [builders.causal(rows), builders.full(rows), AttnMask([], rows)]
    masks += [builders.sliding_window(rows, w, 0) for w in (1, 30, 200)]
    masks += [random_mask(rows, 6, seed) for seed in range(8)]
    return [documents(99, 8, rows), *masks]


def tensors(rows: int, shape: AttnShape, device: str | torch.device) -> list[torch.Tensor]:
    """q, k, v and the gradient of the output."""
    gen = torch.Generator(device).manual_seed(0)
    sizes = (shape.num_heads_q, shape.head_dim), (shape.num_heads_kv, shape.head_dim)
    sizes = (*sizes, (shape.num_heads_kv, shape.head_dim_v), (shape.num_heads_q, shape.head_dim_v))
    made = [torch.randn(rows, *size, generator=gen, device=device, dtype=torch.bfloat16) for size in sizes]
    return [t.requires_grad_(i < 3) for i, t in enumerate(made)]


def attend(
    inputs, plan: RankPlan, config: MagiConfig = CONFIG, sink: torch.Tensor | None = None, group=None
) -> list[torch.Tensor]:
    """out, lse and gradients."""
    q, k, v, dout = inputs
    out, meta = distributed_attention(q, k, v, plan, group, config=config, sink=sink)
    wanted = (q, k, v) if sink is None else (q, k, v, sink)
    return [out, meta.lse, *torch.autograd.grad(out, wanted, dout)]


OF_A_MASK = (
    "tiles", "segments", "bounds", "step", "items", "numbers", "counter", "num_tiles", "num_items", "num_key_sums",
    "heads_inner", "splits", "head_section", "long_blocks", "stats_row",
)  # fmt: skip


def largest_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """Of ``a`` from ``b``, relative to the largest of ``b``; NaN where one has NaN."""
    scale = b.detach().abs().nan_to_num(posinf=0).max().clamp(min=1e-6)
    return float((torch.where(a == b, 0, (a - b).abs()).max() / scale).detach())


SHAPES = {
    "packed": ((8, 1), (128, 128)),
    "several heads": ((4, 2), (128, 128)),
    "heads of 64": ((2, 2), (64, 64)),
    "wide heads": ((4, 1), (192, 128)),
}


def note_grids(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Thread blocks of each kernel's last launch from now on."""
    note, grids = driver.Kernel.launch, {}

    def look(kernel, config, pointers) -> None:
        note(kernel, config, pointers)
        grids[kernel.handle] = driver.LaunchConfig.from_address(config).grid[0]

    monkeypatch.setattr(driver.Kernel, "launch", look)
    return grids


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_launches_stay_and_read_the_tables_of_the_mask_that_was_loaded(monkeypatch, name, deterministic):
    config = MagiConfig(attend=AttendConfig(impl="ffa", deterministic=deterministic))
    with fake_driver(monkeypatch) as launched:
        grids = note_grids(monkeypatch)
        inputs = tensors(ROWS, shape_of(*SHAPES[name]), CPU)
        first, *others = some_masks(ROWS)[::5]
        static = StaticPlans({0: plan_of(first)}, CPU, headroom=8)
        attend(inputs, static.plans[0], config)

        def launches() -> list[tuple]:
            """What launches are told of a mask, and their grids."""
            assert len(launched.params) >= 4 and grids.keys() == launched.params.keys()
            structs = [(kernel, of) for kernel, x in launched.params.items() for of in (x, getattr(x, "plan", None))]
            return [grids, *((kernel, *(getattr(of, name, None) for name in OF_A_MASK)) for kernel, of in structs)]

        (mask,) = static._static[0].masks
        before, num_plans = launches(), len(mask._plans)
        for other in (*others, first):
            assert static.load({0: plan_of(other)}) is None
            for tiling, plan in mask._plans.items():
                expected = device_plan(other.bands, tiling, CPU)
                numbers = mask.memory._numbers[plan.numbers[0]].tolist()
                assert numbers[0] == expected.num_tiles and numbers[3] == expected.host.step
                assert mask.memory._numbers[plan.numbers[1]][0] == np.count_nonzero(expected.host.costs)
                for at in ("tiles", "passes", "bounds"):
                    check_equal(plan, expected, at)
                for key, room in plan.schedules.items():
                    made = schedule_of(expected, *key)
                    assert torch.equal(room.items[: len(made.items)], made.items) and made.num_split <= room.num_split
                    numbers = mask.memory._numbers[plan.of_schedule[key]].tolist()
                    assert numbers[1:5] == [
                        len(made.items), made.num_split, expected.host.step, int(expected.host.heads_inner)
                    ]  # fmt: skip
            attend(inputs, static.plans[0], config)
            assert launches() == before and len(mask._plans) == num_plans


def test_tables_that_are_made_in_inference_mode_are_loaded_outside_of_it(monkeypatch):
    with fake_driver(monkeypatch):
        q, k, v, dout = tensors(ROWS, shape_of((4, 2), (128, 128)), CPU)
        with torch.inference_mode():
            static = StaticPlans({0: plan_of(documents(0, 3))}, CPU)
            distributed_attention(q, k, v, static.plans[0], None, config=CONFIG)
        for seed in (1, 2):
            assert static.load({0: plan_of(documents(seed, 4))}) is None
            attend((q, k, v, dout), static.plans[0])


def test_a_mask_that_is_loaded_between_a_forward_and_its_backward_is_an_error(monkeypatch):
    """The backward reads the tables of the mask that was loaded last."""
    with fake_driver(monkeypatch):
        q, k, v, dout = tensors(ROWS, shape_of((4, 2), (128, 128)), CPU)
        first, second = plan_of(documents(0, 3)), plan_of(documents(1, 4))
        static = StaticPlans({0: first}, CPU)
        out, _ = distributed_attention(q, k, v, static.plans[0], None, config=CONFIG)
        assert static.load({0: second}) is None
        with pytest.raises(RuntimeError, match=r"^key: .* between a forward and its backward"):
            torch.autograd.grad(out, (q, k, v), dout)
        attend((q, k, v, dout), static.plans[0])


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_mask_that_is_loaded_before_a_checkpoint_is_run_again_is_an_error(monkeypatch, reentrant):
    with fake_driver(monkeypatch):
        q, k, v, dout = tensors(ROWS, shape_of((4, 2), (128, 128)), CPU)
        static = StaticPlans({0: plan_of(documents(0, 3))}, CPU)

        def layer(*qkv: torch.Tensor) -> torch.Tensor:
            return distributed_attention(*qkv, static.plans[0], None, config=CONFIG)[0]

        def out() -> torch.Tensor:
            return checkpoint(layer, q, k, v, use_reentrant=reentrant)

        torch.autograd.backward(out(), dout)
        late = out()
        assert static.load({0: plan_of(documents(1, 4))}) is None
        with pytest.raises(RuntimeError, match=r"key: .* between a forward and its backward"):
            torch.autograd.backward(late, dout)
        torch.autograd.backward(out(), dout)


def test_bands_that_are_loaded_between_a_forward_and_its_backward_are_an_error(monkeypatch):
    """The same for attention on one device, which takes bands."""
    with fake_driver(monkeypatch):
        q, k, v, dout = tensors(ROWS, shape_of((4, 2), (128, 128)), CPU)
        static = StaticPlans({0: plan_of(documents(0, 3))}, CPU)
        bands = static.plans[0].bands[0]
        for load in (False, True):
            out, _ = slice_attention(q, k, v, bands, impl="ffa")
            if load:
                assert static.load({0: plan_of(documents(1, 4))}) is None
                with pytest.raises(RuntimeError, match=r"^key: .* between a forward and its backward"):
                    torch.autograd.grad(out, (q, k, v), dout)
            else:
                torch.autograd.grad(out, (q, k, v), dout)


def check_equal(plan, expected, at: str) -> None:
    def table(of) -> torch.Tensor:
        begin = (getattr(of, at) - of.memory.data_ptr()) // 4
        return of.memory[begin:]

    ends = dict(zip(("tiles", "passes", "bounds"), (*expected.host.offsets[1:], expected.memory.nbytes), strict=True))
    own = table(expected)
    own = own[: ends[at] // 4 - (len(expected.memory) - len(own))]
    assert torch.equal(table(plan)[: len(own)], own)


def test_a_mask_for_which_there_is_no_room_changes_nothing_and_says_why(monkeypatch):
    with fake_driver(monkeypatch):
        inputs = tensors(8192, shape_of((8, 1), (128, 128)), CPU)
        first, second = documents(0, 3, 8192), documents(1, 4, 8192)
        stripes = [(0, 8192, at, at + 10, 0) for at in range(0, 8192, 400)]
        many = AttnMask(stripes, 8192)  # each tile sees 21 places
        static = StaticPlans({"a": plan_of(first), "b": plan_of(first)}, CPU, headroom=1)
        for plan in static.plans.values():
            attend(inputs, plan)
        memory = static._memory
        before = memory._numbers.clone()
        reason = static.load({"a": plan_of(second), "b": plan_of(many)})
        assert reason is not None and "there is room for" in reason
        memory.send()
        assert torch.equal(memory._numbers, before)
        assert static.load({"a": plan_of(second), "b": plan_of(second)}) is None


def test_a_batch_prepared_for_static_plans_has_all_tables_that_loading_takes(monkeypatch):
    with fake_driver(monkeypatch):
        shape = shape_of((8, 1), (128, 128))
        inputs = tensors(ROWS, shape, CPU)
        static = StaticPlans({0: plan_of(documents(0, 8))}, CPU)
        attend(inputs, static.plans[0])
        for mask in (documents(3, 9), builders.causal(ROWS)):  # causal alone would take other kernels
            batch = prepare_batch({0: plan_of(mask)}, shape, CONFIG, like=static.facts)
            batch.to(CPU)
            with monkeypatch.context() as patch:
                patch.setattr(hopper_plan, "make_host_plan", lambda *_: pytest.fail("made when it is loaded"))
                patch.setattr(hopper_plan.HostPlan, "schedule", lambda *_: pytest.fail("made when it is loaded"))
                assert static.load(batch.plans) is None
            batch.to(CPU)


def test_a_batch_of_more_stages_than_the_static_plans_is_refused_when_it_is_prepared():
    static = StaticPlans({0: plan_of(builders.causal(ROWS))}, CPU)
    shape, plan = shape_of((8, 1), (128, 128)), shards_of(builders.causal(ROWS), degree=2)[0]
    with pytest.raises(ValueError, match=r"^plans: 0 has 2 remote stages, what it is prepared like has 0$"):
        prepare_batch({0: plan}, shape, CONFIG, like=static.facts)


@pytest.mark.parametrize("impl", ["torch", "cudnn", "triton"])
def test_backends_that_are_not_captured_refuse_static_plans_by_name(impl):
    inputs = tensors(64, shape_of((8, 1), (128, 128)), CPU)
    static = StaticPlans({0: plan_of(builders.causal(64))}, CPU)
    with pytest.raises(ValueError, match=rf"^rank_plan: a static key.* with impl 'ffa' alone, not '{impl}'"):
        attend(inputs, static.plans[0], MagiConfig(attend=AttendConfig(impl=impl)))


@pytest.mark.parametrize("impl", ["cudnn", "triton"])
def test_a_batch_that_no_call_would_read_is_refused_when_it_is_prepared(impl):
    plans = {0: plan_of(builders.causal(64))}
    shape = shape_of((8, 1), (128, 128))._replace(backend=impl)
    with pytest.raises(ValueError, match=rf"^shape: .* of impl '{impl}' \(kernels_for\), config has 'ffa'$"):
        prepare_batch(plans, shape, CONFIG)
    with pytest.raises(ValueError, match=rf"^like: static plans read no tables of impl '{impl}', which shape is for$"):
        prepare_batch(plans, shape, MagiConfig(), like=StaticPlans(plans, CPU).facts)


@forced.free_choice
def test_what_cannot_be_captured_is_refused_by_name():
    plan = plan_of(builders.causal(64))
    inputs = tensors(64, shape_of((8, 1), (128, 128)), CPU)
    static = StaticPlans({0: plan}, CPU)
    with pytest.raises(ValueError, match=r"^rank_plan: a static key.* with impl 'ffa' alone, not 'torch'"):
        attend(inputs, static.plans[0], MagiConfig())
    with pytest.raises(ValueError, match=r"^headroom: expected a finite number of at least 1"):
        StaticPlans({0: plan}, CPU, headroom=0.5)
    with pytest.raises(ValueError, match="plans: 0 has 2 remote stages"):
        StaticPlans({0: shards_of(builders.causal(64), degree=2)[0]}, CPU)
    nodes = make_plan(builders.causal(64), MagiConfig(comm=CommConfig(ranks_per_node=2), overlap=ONE_STAGE), 4)
    with pytest.raises(ValueError, match="plans: 0 tells nodes apart"):
        StaticPlans({0: nodes.for_rank(0)}, CPU)
    with pytest.raises(ValueError, match="plans: expected 0, got 1"):
        static.load({1: plan})
    assert "it has 32 rows" in static.load({0: plan_of(builders.causal(32))})


def shards_of(mask: AttnMask, num_ranks: int = 2, degree: int = 1) -> list[RankPlan]:
    plan = make_plan(mask, MagiConfig(overlap=OverlapConfig(degree=degree)), num_ranks)
    return [plan.for_rank(rank) for rank in range(num_ranks)]


def test_there_is_room_for_the_tables_of_samples(monkeypatch):
    with fake_driver(monkeypatch):
        inputs = tensors(8192, shape_of((8, 1), (128, 128)), CPU)
        first, many = documents(0, 3, 8192), AttnMask([(0, 8192, at, at + 10, 0) for at in range(0, 8192, 400)], 8192)
        static = StaticPlans({0: plan_of(first)}, CPU, headroom=1, samples=[{0: plan_of(many)}])
        attend(inputs, static.plans[0])
        for mask in (many, documents(1, 4, 8192), first):
            assert static.load({0: plan_of(mask)}) is None


@forced.for_hopper
@pytest.mark.sm90
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("with_sink", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_one_graph_replayed_with_50_masks_equals_eager_mode(name, with_sink, deterministic):
    device, rows = torch.device("cuda", 0), 2048
    config = MagiConfig(attend=AttendConfig(impl="ffa", deterministic=deterministic))
    shape = shape_of(*SHAPES[name]).kernels_for(device, "ffa")
    inputs = tensors(rows, shape, device)
    sink = torch.randn(1, shape.num_heads_q, device=device).requires_grad_() if with_sink else None
    masks = some_masks(rows)
    assert len(masks) > 50
    static = StaticPlans({0: plan_of(masks[0])}, device, headroom=16)
    graph, results = capture(lambda: attend(inputs, static.plans[0], config, sink))
    for number, mask in enumerate(masks):
        batch = prepare_batch({0: plan_of(mask)}, shape, config, like=static.facts)
        batch.to(device)
        expected = attend(inputs, batch.plans[0], config, sink)
        for result in results:
            result.fill_(float("nan"))
        assert static.load(batch.plans) is None
        graph.replay()
        for i, (a, b) in enumerate(zip(results, expected, strict=True)):
            if i < 2 or deterministic:  # else sums of dq, dk and dv are formed in the order in which SMs come
                assert torch.equal(a, b), (number, i)
            else:
                assert largest_difference(a, b) <= 2**-6, (number, i)
    hopper_plan._facts.drop(lambda _key: True)


@forced.for_hopper
@pytest.mark.sm90
def test_replays_follow_each_other_without_waiting_and_grow_no_memory():
    device, rows = torch.device("cuda", 0), 4096
    shape = shape_of((16, 2), (128, 128)).kernels_for(device)
    inputs = tensors(rows, shape, device)
    config = MagiConfig()
    static = StaticPlans({0: plan_of(documents(0, 12, rows))}, device)
    graph, results = capture(lambda: attend(inputs, static.plans[0], config))
    batches = [
        prepare_batch({0: plan_of(documents(seed, 8 + seed % 9, rows))}, shape, config, like=static.facts).pin_memory()
        for seed in range(20)
    ]
    outs, peaks = [], []
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for batch in batches:
            batch.to(device)
            assert static.load(batch.plans) is None
            graph.replay()
            outs.append(results[0].clone())
    finally:
        torch.cuda.set_sync_debug_mode("default")
    expected = [attend(inputs, batch.plans[0], config)[0].detach() for batch in batches]
    assert all(torch.equal(a, b) for a, b in zip(outs, expected, strict=True))
    del outs, expected
    for n in range(60):
        assert static.load(batches[n % 20].plans) is None
        graph.replay()
        if n % 20 == 19:
            torch.cuda.synchronize()
            peaks.append(torch.cuda.memory_allocated())
    assert len(set(peaks)) == 1


@forced.for_hopper
@pytest.mark.sm90
def test_tables_are_not_made_while_a_graph_is_captured():
    device = torch.device("cuda", 0)
    inputs = tensors(256, shape_of((8, 1), (128, 128)), device)
    static = StaticPlans({0: plan_of(documents(0, 4, 256))}, device)
    attend(inputs, plan_of(documents(0, 4, 256)))  # compiles
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="run the same calls once before"), torch.cuda.graph(graph):
        attend(inputs, static.plans[0])


@pytest.mark.sm90
def test_a_graph_does_not_capture_tables_that_may_be_dropped():
    key = api.magi_attn_varlen_key([0, 100, 256], [0, 100, 256], causal=True)
    q, k, v, _ = (t.detach() for t in tensors(256, shape_of((8, 1), (128, 128)), "cuda"))
    expected = api.calc_attn(q, k, v, key)[0]
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="make_static_key"), torch.cuda.graph(graph):
        api.calc_attn(q, k, v, key)
    assert torch.equal(api.calc_attn(q, k, v, key)[0], expected)


@forced.for_hopper
@pytest.mark.sm90
def test_a_static_key_takes_the_place_of_the_key_that_was_loaded():
    device, rows = torch.device("cuda", 0), 1000
    q, k, v, _ = (t.detach() for t in tensors(rows, shape_of((8, 2), (128, 128)), device))
    keys = [api.magi_attn_varlen_key([0, n, rows], [0, n, rows], causal=True) for n in (300, 500, 1)]
    static = api.make_static_key(keys[0])
    graph, (out, lse) = capture(lambda: ((made := api.calc_attn(q, k, v, static))[0], made[1].lse))
    for key in keys:
        assert static.load(key) is None
        graph.replay()
        expected, meta = api.calc_attn(q, k, v, key)
        torch.testing.assert_close(out, expected, atol=1e-2, rtol=1e-2)
        torch.testing.assert_close(lse, meta.lse, atol=1e-4, rtol=1e-4)
    assert "it has 900 rows" in static.load(api.magi_attn_varlen_key([0, 900], [0, 900]))


def test_a_static_key_is_of_one_group_and_configuration():
    key = api.magi_attn_varlen_key([0, 64], [0, 64])
    static = api.make_static_key(key)
    other = api.magi_attn_varlen_key([0, 64], [0, 64], dist_attn_config=CONFIG)
    with pytest.raises(ValueError, match="key: its group and configuration"):
        static.load(other)
    with pytest.raises(ValueError, match=r"^headroom: expected a finite number of at least 1"):
        api.make_static_key(key, headroom=0)
    with pytest.raises(ValueError, match="key: "):
        api.make_static_key(static)


def test_queries_that_travel_where_those_of_the_first_plans_do_not_are_refused_by_name():
    home, hosts = (given_dispatch(name, 64, 2) for name in ("contiguous", "zigzag"))
    mask, config = builders.causal(64), MagiConfig(overlap=ONE_STAGE)
    at_home, plan = (make_plan(mask, config, 2, home, *more).for_rank(0) for more in ((), (hosts,)))
    for plans, samples in (({"a": plan}, ()), ({"a": at_home}, [{"a": plan}])):
        with pytest.raises(ValueError, match=r"^plans: queries of 'a' travel.*dispatch.queries=\"home\""):
            StaticPlans(plans, CPU, samples=samples)
    with pytest.raises(ValueError, match=r"^queries: expected 'home' or 'travel', got 'auto'"):
        StaticPlans({"a": plan}, CPU, queries="auto")
    reason = StaticPlans({"a": at_home}, CPU)._static["a"].why_not(plan)
    assert reason == 'its queries travel, those of the first plans do not; plan it with dispatch.queries="home"'
    groups = replace(plan, head_groups=2)
    with pytest.raises(ValueError, match=r"^plans: groups of heads of 'a' travel apart, those of static plans do not"):
        StaticPlans({"a": groups}, CPU, queries="travel")
    static = StaticPlans({"a": plan}, CPU, queries="travel")
    assert static._static["a"].why_not(groups) == "groups of its heads travel apart"
