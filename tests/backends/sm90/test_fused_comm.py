"""Steps of one launch: those of one mask, filled with the numbers of another, are those of that one."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from megatron_magi.backends.sm90 import fused_backward, fused_forward
from megatron_magi.backends.sm90.plan import Tiling, device_plan
from megatron_magi.backends.sm90.program import _later_numbers
from megatron_magi.backends.sm90.support import row_work
from megatron_magi.cuda.arriving import Arriving
from megatron_magi.cuda.launch_list import LaunchList
from megatron_magi.cuda.layout import Layout
from megatron_magi.mask import builders
from megatron_magi.operands.options import AttnOptions
from megatron_magi.operands.passes import ForwardInputs, ForwardOutput
from tests.backends.sm90.fake_driver import fake_driver

N, HEADS, HEADS_KV, DIM = 2048, 8, 2, 128
SLOTS = ("scratch", "q", "k", "v", "dout", "out", "lse", "dq", "dk", "dv")
MASKS = {
    "causal": builders.causal(N), "full": builders.full(N), "documents": builders.varlen(doc_lengths=[700, 500, 848]),
    "others": builders.varlen(doc_lengths=[100, 1300, 648]), "short": builders.varlen(doc_lengths=[64] * 32),
}  # fmt: skip


def lie(count, heads, dtype=torch.bfloat16):
    return Layout.new((count, heads, DIM), dtype, torch.device("cpu"))


def bands_of(mask, num_arriving):
    first = fused_forward.first_arriving(N)
    later = [(N // 2, N, first, first + num_arriving, -(1 << 40), 1 << 40)] if num_arriving else np.zeros((0, 6))
    return np.concatenate([mask.bands, later]).astype(np.int64)


def passes(mask, num_arriving, options):
    """A forward and a backward over a mask: their steps, forms and numbers."""
    bands, use = bands_of(mask, num_arriving), fused_forward.PassUse(options, 0)
    q, k, lse = lie(N, HEADS), lie(N, HEADS_KV), Layout.new((N, HEADS), torch.float32, torch.device("cpu"))
    rows = lie(num_arriving, HEADS_KV)
    numbers = _later_numbers(num_arriving, dict.fromkeys(("later.k", "later.v", "later.dk", "later.dv"), rows))
    places = ("scratch", "later.k"), ("scratch", "later.v")
    arriving = Arriving((rows, rows), places, (), 0, 0, 0, 0, 0) if num_arriving else None
    operands = ForwardInputs(q, k, k), ForwardOutput(q, lse)
    known = fused_forward.forward_pass(*operands, num_arriving, bands, use)
    step = fused_forward.forward_step(*operands, arriving, known.form, use, max_logits=False)
    yield [step], known.form, {**numbers, **known.numbers}
    of_back = fused_backward.BackwardTensors((q, k, k, q), q, lse, (q, k, k))
    known = fused_backward.backward_pass(of_back, num_arriving, bands, use)
    scratch, _ = fused_backward.scratch_numbers(of_back, known.form, use, known.numbers["key_sums"], 1 << 20)
    sent = fused_backward.Sent(arriving, (("scratch", "later.dk"), ("scratch", "later.dv")), moves=True, returns=True)
    before, keys, rest, _ = fused_backward.backward_steps(of_back, sent, known, use, wants_delta=False)
    yield [*before, *keys, *rest], known.form, {**numbers, **known.numbers, **scratch}


def memory(steps, numbers):
    made = LaunchList(steps, SLOTS, 0, threading.Lock()).with_numbers(numbers)
    return made._form.kernels, bytes(made._memory[: made._form.slots])


@pytest.mark.parametrize("deterministic", [False, True])
def test_steps_depend_on_the_mask_by_form_and_numbers_alone(monkeypatch, deterministic):
    options, shared = AttnOptions(0.1, deterministic=deterministic), 0
    with fake_driver(monkeypatch):
        # A launch that is kept has the last mask's numbers, none of which may stay.
        found = [[], []]
        for mask in MASKS.values():
            for num_arriving in (0, 1, 600):
                for kind, made in zip(found, passes(mask, num_arriving, options), strict=True):
                    kind.append(made)
        for kind in found:
            for steps, form, numbers in kind:
                for others, of_other, _ in kind:
                    if of_other == form and others is not steps:
                        shared += 1
                        assert memory(others, numbers) == memory(steps, numbers)
    assert shared > 100


def test_a_mask_with_another_form_has_other_kernels_or_tiles(monkeypatch):
    with fake_driver(monkeypatch):
        forms = [
            [form for _, form, _ in passes(MASKS[name], count, AttnOptions(0.1))]
            for name, count in (("causal", 0), ("causal", 1), ("short", 0))
        ]
    for a, b in zip(forms[0], forms[1], strict=True):
        assert a.arrives != b.arrives
    assert forms[0][0].tiles != forms[2][0].tiles


def test_a_rank_that_fetches_nothing_computes_beside_what_publishes_its_keys(monkeypatch):
    q, k, lse = lie(N, HEADS), lie(N, HEADS_KV), Layout.new((N, HEADS), torch.float32, torch.device("cpu"))
    operands, use = (ForwardInputs(q, k, k), ForwardOutput(q, lse)), fused_forward.PassUse(AttnOptions(0.1), 0)
    none, places = lie(0, HEADS_KV), (("scratch", "later.k"), ("scratch", "later.v"))
    with fake_driver(monkeypatch):
        known = fused_forward.forward_pass(*operands, 0, bands_of(MASKS["causal"], 0), use)
        step = fused_forward.forward_step(
            *operands, Arriving((none, none), places, (), 0, 0, 0, 0, 0), known.form, use, False
        )
        numbers = {**_later_numbers(0, {"later.k": none, "later.v": none}), **known.numbers}
        assert step.config.num_attributes == 1, "it does not wait for the kernel before it"
        assert "later.num_rows" in {field.name for field in step.fields}
        assert all(numbers[rows.name] > 0 for rows in step.maps), "a tensor map has rows"
        memory([step], numbers)


@pytest.mark.parametrize("num_arriving", [0, 600])
def test_what_a_worker_finds_for_another_shape_of_pass_is_found_anew(monkeypatch, num_arriving):
    q, k, lse = lie(N, HEADS), lie(N, HEADS_KV), Layout.new((N, HEADS), torch.float32, torch.device("cpu"))
    operands, bands = (ForwardInputs(q, k, k), ForwardOutput(q, lse)), bands_of(MASKS["documents"], num_arriving)
    use = fused_forward.PassUse(AttnOptions(0.1), 0, remembered=False)
    with fake_driver(monkeypatch):
        expected = fused_forward.forward_pass(*operands, num_arriving, bands, use).numbers
        shape = fused_forward.shape_of((q, k, k), num_arriving, use.options, 132)
        wrong = fused_forward.MaskNumbers(shape._replace(sm_margin=9), None, {}, {})
        assert fused_forward.forward_pass(*operands, num_arriving, bands, use, wrong).numbers == expected


def test_rows_and_keys_that_see_and_are_seen_are_counted_apart_for_keys_that_arrive():
    first, anywhere = fused_forward.first_arriving(N), (-(1 << 40), 1 << 40)
    own, later = (0, 100, 0, 50, *anywhere), (200, 300, first + 10, first + 20, *anywhere)
    for bands, expected in (([own, later], (300, 50, 20)), ([own], (100, 50, 1))):
        assert fused_forward.seen_rows_and_keys(np.array(bands, dtype=np.int64), first) == expected


def test_kernels_leave_the_margin_of_sms_free():
    shape = fused_forward.shape_of(
        (lie(N, HEADS), lie(N, HEADS_KV), lie(N, HEADS_KV)), 0, AttnOptions(0.1, sm_margin=8), 132
    )
    assert [shape.grid(num_items) for num_items in (0, 5, 10**6)] == [1, 5, 124]


@pytest.mark.parametrize(("num_keys", "packed"), [(N, 1), (N, 4), (1 << 17, 2)])
def test_kernels_of_one_launch_order_their_work_as_those_of_stages(num_keys, packed):
    k = torch.empty(num_keys, HEADS_KV, DIM, dtype=torch.bfloat16, device="meta")
    shape = fused_forward.shape_of(
        (lie(N, HEADS), lie(num_keys, HEADS_KV), lie(num_keys, HEADS_KV)), 0, AttnOptions(0.1), 132
    )
    plan = device_plan(MASKS["causal"].bands, Tiling(False, N, (128, 64), packed), torch.device("cpu"))
    found = fused_forward.row_numbers("rows", plan.host, shape, 64)
    expected = {"step": plan.host.step, "num_tiles": plan.num_tiles, **row_work(plan, HEADS, 64, k, k)}
    assert found == {
        "rows.grid": plan.num_tiles * HEADS // packed,
        **{f"rows.{n}": x for n, x in expected.items()},
    }


def test_a_pass_that_is_not_to_be_remembered_is_in_no_cache(monkeypatch):
    q, k, lse = lie(N, HEADS), lie(N, HEADS_KV), Layout.new((N, HEADS), torch.float32, torch.device("cpu"))
    operands, bands = (ForwardInputs(q, k, k), ForwardOutput(q, lse)), bands_of(MASKS["documents"], 0)
    with fake_driver(monkeypatch):
        first, again, other = (
            fused_forward.forward_pass(*operands, 0, bands, fused_forward.PassUse(AttnOptions(0.1), 0, remembered))
            for remembered in (True, True, False)
        )
    assert first is again is not other and other.use is None
