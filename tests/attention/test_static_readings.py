"""A backward computes with the mask that its forward read, also in CUDA graphs of their own, or says so."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from megatron_magi.attention import StaticPlans, distributed, distributed_attention, travel
from megatron_magi.config import AttendConfig, MagiConfig
from megatron_magi.cuda import driver
from megatron_magi.ops.slice_attention import slice_attention
from megatron_magi.plan import RankPlan
from tests import forced
from tests.attention import test_cuda_graph_one_launch as one_launch
from tests.attention.test_cuda_graph import (
    CONFIG,
    CPU,
    ROWS,
    SHAPES,
    attend,
    documents,
    largest_difference,
    plan_of,
    shape_of,
    tensors,
)
from tests.backends.sm90.fake_driver import fake_driver
from tests.graph_capture import capture

one_rank_alone = one_launch.one_rank_alone

BETWEEN = r"key: .* between a forward and its backward"
Forward = Callable[[], torch.Tensor]


def plans_of(count: int) -> list[dict[int, RankPlan]]:
    return [{0: plan_of(documents(seed, 3 + seed))} for seed in range(count)]


@pytest.fixture
def launched(monkeypatch):
    """The driver is faked; yields what the kernel that began the last backward compared: the content that it expected,
    that which was loaded, and the address of the first.
    """
    with fake_driver(monkeypatch) as found:
        note, compared = driver.Kernel.launch, []

        def look(kernel, config, pointers) -> None:
            note(kernel, config, pointers)
            if kernel.handle == "preprocess":
                params = found.params["preprocess"]
                loaded = (ctypes.c_int64 * 4).from_address(params.numbers)[3]
                compared[:] = ctypes.c_int64.from_address(params.read).value, loaded, params.read

        monkeypatch.setattr(driver.Kernel, "launch", look)
        yield compared


@pytest.fixture
def setting():
    """Static plans with the first of three masks, the masks, and inputs."""
    plans = plans_of(3)
    return StaticPlans(plans[0], CPU, headroom=4), plans, tensors(ROWS, shape_of((4, 2), (128, 128)), CPU)


KINDS = ["reentrant", "twice", "other", "plain"]


def layer_of(kind: str, static: StaticPlans, qkv: list[torch.Tensor]) -> Forward:
    """A layer in a checkpoint, in two, in one of torch's other kind, or in none."""

    def layer(*tensors: torch.Tensor) -> torch.Tensor:
        return distributed_attention(*tensors, static.plans[0], None, config=CONFIG)[0] * 2

    def inner(*tensors: torch.Tensor) -> torch.Tensor:
        return checkpoint(layer, *(t * 1 for t in tensors), use_reentrant=True)

    if kind == "plain":
        return lambda: layer(*qkv)
    run = inner if kind == "twice" else layer
    return lambda: checkpoint(run, *qkv, use_reentrant=kind != "other")


@pytest.mark.usefixtures("launched")
@pytest.mark.parametrize("kind", KINDS)
def test_a_backward_after_forwards_of_another_mask_is_an_error_until_its_own_is_loaded_again(setting, kind):
    static, plans, (*qkv, dout) = setting
    forward = layer_of(kind, static, qkv)
    firsts = forward(), forward()
    assert static.load(plans[1]) is None
    seconds = forward(), forward()
    seconds[0].backward(dout)
    with pytest.raises(RuntimeError, match=BETWEEN):
        firsts[0].backward(dout)
    assert static.load(plans[0]) is None
    firsts[1].backward(dout)
    with pytest.raises(RuntimeError, match=BETWEEN):
        seconds[1].backward(dout)


@pytest.mark.usefixtures("launched")
@pytest.mark.parametrize("kind", KINDS)
def test_forwards_without_a_backward_under_other_masks_do_not_matter(setting, kind):
    static, plans, (*qkv, dout) = setting
    forward = layer_of(kind, static, qkv)
    for step in range(4):
        for other in (1, 2, 0):  # an evaluation, then the mask of the step
            assert static.load(plans[(other + step) % 3]) is None
            with torch.no_grad():
                forward()
        out = forward()
        with torch.no_grad():
            forward()
        out.backward(dout)


@pytest.mark.usefixtures("launched")
@pytest.mark.parametrize("kind", KINDS)
def test_a_thread_that_runs_backwards_counts_nodes_of_its_own(setting, kind):
    """As that of a GPU does."""
    static, plans, (*qkv, dout) = setting
    forward, ahead = layer_of(kind, static, qkv), torch.ones(1, requires_grad=True)

    def backward(out: torch.Tensor, num_nodes: int) -> None:
        kept = [ahead * 1 for _ in range(num_nodes)]
        out.backward(dout)
        del kept

    with ThreadPoolExecutor(1) as thread:
        for num_nodes in (0, 500, 500):
            firsts = forward(), forward()
            assert static.load(plans[1]) is None
            thread.submit(backward, forward(), num_nodes).result()
            with pytest.raises(RuntimeError, match=BETWEEN):
                thread.submit(backward, firsts[0], num_nodes).result()
            assert static.load(plans[0]) is None
            thread.submit(backward, firsts[1], num_nodes).result()


@pytest.mark.usefixtures("launched")
@pytest.mark.parametrize("kind", KINDS)
def test_each_step_may_have_a_thread_of_its_own(setting, kind):
    static, plans, (*qkv, dout) = setting
    forward = layer_of(kind, static, qkv)

    def step(number: int) -> None:
        kept = [qkv[0] * 1 for _ in range((8 - number) * 20)]
        assert static.load(plans[number % 3]) is None
        forward().backward(dout)
        del kept

    for number in range(8):
        with ThreadPoolExecutor(1) as thread:
            thread.submit(step, number).result()


@pytest.mark.usefixtures("launched")
@pytest.mark.parametrize("kind", KINDS)
def test_an_evaluation_of_another_mask_may_come_between_if_the_mask_is_loaded_again(setting, kind):
    static, plans, (*qkv, dout) = setting
    forward = layer_of(kind, static, qkv)
    out = forward()
    assert static.load(plans[1]) is None
    with torch.no_grad():
        forward()
    assert static.load(plans[0]) is None
    out.backward(dout)


@pytest.mark.usefixtures("launched")
def test_a_mask_with_the_content_of_the_first_is_the_first(setting):
    static, _, (*qkv, dout) = setting
    out = layer_of("plain", static, qkv)()
    assert static.load(plans_of(1)[0]) is None
    out.backward(dout)


class Captures:
    """Stands for captures of CUDA graphs: ``number`` of the one that is under way, 0 for none."""

    number = 0


@pytest.fixture
def captures(monkeypatch):
    now = Captures()
    monkeypatch.setattr(driver, "capture_of", lambda _device: now.number)
    return now


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("of_bands", [False, True])
def test_kernels_of_a_graph_compare_the_mask_that_the_graph_of_the_forward_read(launched, captures, name, of_bands):
    first, second, _ = plans_of(3)
    static = StaticPlans(first, CPU, headroom=4)
    *qkv, dout = tensors(ROWS, shape_of(*SHAPES[name]), CPU)
    of_first, of_second = first[0].plan_hash, second[0].plan_hash

    def forward() -> torch.Tensor:
        if of_bands:
            return slice_attention(*qkv, static.plans[0].bands[0], impl="ffa")[0]
        return distributed_attention(*qkv, static.plans[0], None, config=CONFIG)[0]

    def backward(out: torch.Tensor) -> tuple[int, ...]:
        torch.autograd.grad(out, qkv, dout)
        return tuple(launched)

    assert backward(forward())[:2] == (of_first, of_first)
    captures.number = 1
    outs = [forward() for _ in range(4)]
    assert backward(outs[0])[:2] == (of_first, of_first), "one graph"
    captures.number = 0
    assert static.load(second) is None
    captures.number = 2
    expected, loaded, place = backward(outs[1])
    assert (expected, loaded) == (of_first, of_second)
    assert backward(outs[2]) == (expected, loaded, place), "a graph copies the content once"
    captures.number = 0
    assert backward(outs[3]) == (expected, loaded, place), "in eager mode, of a captured forward"
    out = forward()
    captures.number = 3
    assert backward(out)[:2] == (of_second, of_second)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("travels", [False, True])
@forced.free_choice
def test_one_launch_of_several_ranks_compares_likewise(
    monkeypatch,
    launched,
    captures,
    one_rank_alone,
    name,
    travels,
):
    config, total = one_launch.config_of(), one_launch.NUM_RANKS * ROWS
    monkeypatch.setattr(travel, "group_cast", distributed.group_cast)
    plans = [one_launch.plan_for(documents(seed, 8, total), config, travels=travels) for seed in (0, 1)]
    static = StaticPlans({0: plans[0]}, CPU, headroom=8, queries="travel")
    *qkv, dout = tensors(ROWS, one_launch.shape_of(name), CPU)
    captures.number = 1
    outs = [distributed_attention(*qkv, static.plans[0], one_rank_alone, config=config)[0] for _ in range(2)]
    torch.autograd.grad(outs.pop(), qkv, dout)
    assert launched[:2] == [plans[0].plan_hash] * 2
    captures.number = 0
    static._load({0: plans[1]})
    captures.number = 2
    torch.autograd.grad(outs.pop(), qkv, dout)
    assert launched[:2] == [plan.plan_hash for plan in plans]


@pytest.mark.parametrize("kind", KINDS)
def test_a_graph_that_runs_a_checkpoint_again_compares_the_mask_of_the_first_forward(launched, captures, setting, kind):
    static, plans, (*qkv, dout) = setting
    forward = layer_of(kind, static, qkv)
    forward().backward(dout)
    captures.number = 1
    outs = [forward() for _ in range(3)]
    outs[0].backward(dout)
    assert launched[:2] == [plans[0][0].plan_hash] * 2
    captures.number = 0
    assert static.load(plans[1]) is None
    for captures.number in (2, 0):
        outs.pop().backward(dout)
        assert launched[:2] == [plans[i][0].plan_hash for i in (0, 1)]


@pytest.mark.usefixtures("launched")
def test_the_next_load_says_that_a_backward_found_another_mask(setting):
    static, plans, inputs = setting
    attend(inputs, static.plans[0])
    assert static.load(plans[1]) is None
    static._memory._failed[0] = 1  # as the kernel does
    with pytest.raises(RuntimeError, match=r"^key: a CUDA graph ran a backward .* gradients are NaN"):
        static.load(plans[2])
    assert static.load(plans[2]) is None


@forced.for_hopper
@pytest.mark.sm90
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_graphs_of_a_forward_and_its_backward_give_its_gradients_or_nan(name, deterministic):
    device = torch.device("cuda", 0)
    config = MagiConfig(attend=AttendConfig(impl="ffa", deterministic=deterministic))
    first, second, _ = plans_of(3)
    *qkv, dout = inputs = tensors(ROWS, shape_of(*SHAPES[name]), device)
    sink = torch.randn(1, qkv[0].shape[1], device=device).requires_grad_()
    static = StaticPlans(first, device, headroom=4)
    attend(inputs, static.plans[0], config, sink)

    def forward() -> torch.Tensor:
        return distributed_attention(*qkv, static.plans[0], None, config=config, sink=sink)[0]

    of_forward, out = capture(forward)
    of_backward = torch.cuda.CUDAGraph()
    with torch.cuda.graph(of_backward, pool=of_forward.pool()):
        grads = torch.autograd.grad(out, (*qkv, sink), dout)

    def check(plans: dict[int, RankPlan]) -> None:
        expected = attend(inputs, plans[0], config, sink)[2:]
        assert all(largest_difference(a, b) <= 2**-6 for a, b in zip(grads, expected, strict=True))

    for plans, other in ((first, second), (second, first)):
        assert static.load(plans) is None
        of_forward.replay()
        of_backward.replay()
        check(plans)
        assert static.load(other) is None
        of_backward.replay()
        torch.cuda.synchronize()
        assert all(grad.isnan().flatten(1).any(1).all() for grad in grads[:3]), "each row sees itself"
        with pytest.raises(RuntimeError, match=r"^key: a CUDA graph ran a backward"):
            static.load(plans)
        assert static.load(plans) is None
        of_backward.replay()
        check(plans)


@forced.for_hopper
@pytest.mark.sm90
def test_callables_that_torch_captures_give_gradients_of_their_mask_or_nan():
    device = torch.device("cuda", 0)
    first, second, _ = plans_of(3)
    *qkv, dout = inputs = tensors(ROWS, shape_of((8, 2), (128, 128)), device)
    static = StaticPlans(first, device, headroom=4)
    attend(inputs, static.plans[0])

    def layer(*tensors: torch.Tensor) -> torch.Tensor:
        return distributed_attention(*tensors, static.plans[0], None, config=CONFIG)[0]

    samples = tuple(t.detach().clone().requires_grad_() for t in qkv)
    graphed = torch.cuda.make_graphed_callables(layer, samples)
    for plans in (first, second, first):
        assert static.load(plans) is None
        out = graphed(*qkv)
        found = [out, *torch.autograd.grad(out, qkv, dout)]
        expected = attend(inputs, plans[0])
        del expected[1]
        assert all(largest_difference(a, b) <= 2**-6 for a, b in zip(found, expected, strict=True))
    out = graphed(*qkv)
    assert static.load(second) is None
    assert all(grad.isnan().any() for grad in torch.autograd.grad(out, qkv, dout))
    torch.cuda.synchronize()
    with pytest.raises(RuntimeError, match=r"^key: a CUDA graph ran a backward"):
        static.load(first)
