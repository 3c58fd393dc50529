"""Steps of one launch: those of one mask, filled with the numbers of another, are those of that one."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from megatron_magi.backends.sm90 import mask_numbers
from megatron_magi.backends.sm90.backward_steps import BackwardSteps
from megatron_magi.backends.sm90.forward_steps import forward_steps
from megatron_magi.backends.sm90.mask_numbers import numbers_on_device, pass_shape
from megatron_magi.backends.sm90.program import _later_numbers
from megatron_magi.cuda.arriving import Arriving
from megatron_magi.cuda.launch_list import LaunchList, Step
from megatron_magi.cuda.layout import Layout
from megatron_magi.mask import builders
from megatron_magi.operands.options import AttnOptions
from megatron_magi.operands.passes import BackwardInputs, ForwardInputs, ForwardOutput, Gradients
from tests.backends.sm90.fake_driver import fake_driver

N, HEADS, HEADS_KV, DIM = 2048, 8, 2, 128
SLOTS = ("scratch", "stats", "q", "k", "v", "dout", "out", "lse", "dq", "dk", "dv")
MASKS = {
    "causal": builders.causal(N), "full": builders.full(N), "documents": builders.varlen(doc_lengths=[700, 500, 848]),
    "others": builders.varlen(doc_lengths=[100, 1300, 648]), "short": builders.varlen(doc_lengths=[64] * 32),
}  # fmt: skip


def lie(count, heads, dtype=torch.bfloat16):
    return Layout.new((count, heads, DIM), dtype, torch.device("cpu"))


def bands_of(mask, num_arriving):
    first = mask_numbers.first_arriving(N)
    later = [(N // 2, N, first, first + num_arriving, -(1 << 40), 1 << 40)] if num_arriving else np.zeros((0, 6))
    return np.concatenate([mask.bands, later]).astype(np.int64)


def passes(mask, num_arriving, options):
    """A forward and a backward over a mask: their steps, forms and numbers."""
    bands = bands_of(mask, num_arriving)
    q, k, lse = lie(N, HEADS), lie(N, HEADS_KV), Layout.new((N, HEADS), torch.float32, torch.device("cpu"))
    rows = lie(num_arriving, HEADS_KV)
    numbers = _later_numbers(num_arriving, dict.fromkeys(("later.k", "later.v", "later.dk", "later.dv"), rows))
    places = ("scratch", "later.k"), ("scratch", "later.v")
    arriving = Arriving((rows, rows), places, None, 0, 0, 0, 0, 0)
    operands, shape = (ForwardInputs(q, k, k), ForwardOutput(q, lse)), pass_shape((q, k, k), num_arriving, options)
    known = numbers_on_device(False, shape, bands, q.device, 0)
    _, *steps = forward_steps(*operands, known.form, options, 0, arriving)
    yield steps, known.form, {**numbers, **known.numbers}
    inputs, grads = BackwardInputs(q, k, k, q, lse, lse), Gradients(q, k, k)
    known, returning = numbers_on_device(True, shape, bands, q.device, 0), Step(None, 1, None)
    kernels = BackwardSteps(inputs, q, grads, known.form, options, 0, arriving, returning)
    scratch = kernels.scratch(known.numbers["key_sums"], 1 << 20)
    steps = [step for step in kernels.steps()[1:] if step.kernel is not None]
    yield steps, known.form, {**numbers, **known.numbers, **scratch}


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
    operands, options = (ForwardInputs(q, k, k), ForwardOutput(q, lse)), AttnOptions(0.1)
    none, places = lie(0, HEADS_KV), (("scratch", "later.k"), ("scratch", "later.v"))
    with fake_driver(monkeypatch):
        known = numbers_on_device(False, pass_shape((q, k, k), 0, options), bands_of(MASKS["causal"], 0), q.device, 0)
        arriving = Arriving((none, none), places, Step(None, 1, None), 0, 0, 0, 0, 0)
        first, step = forward_steps(*operands, known.form, options, 0, arriving)
        numbers = {**_later_numbers(0, {"later.k": none, "later.v": none}), **known.numbers}
        assert first is arriving.step and step.overlaps, "it does not wait for the kernel before it"
        assert "later.num_rows" in step.numbers.values()
        assert all(numbers[one.rows] > 0 for one in step.maps if one.rows), "a tensor map has rows"
        memory([step], numbers)


@pytest.mark.parametrize("num_arriving", [0, 600])
def test_what_a_worker_finds_for_another_shape_of_pass_is_found_anew(monkeypatch, num_arriving):
    q, k, options = lie(N, HEADS), lie(N, HEADS_KV), AttnOptions(0.1)
    bands = bands_of(MASKS["documents"], num_arriving)
    with fake_driver(monkeypatch):
        shape = pass_shape((q, k, k), num_arriving, options)
        expected = numbers_on_device(False, shape, bands, q.device, 0).numbers
        wrong = mask_numbers.MaskNumbers(shape._replace(sm_margin=9), None, {}, {})
        assert numbers_on_device(False, shape, bands, q.device, 0, (wrong, None)).numbers == expected


def test_rows_and_keys_that_see_and_are_seen_are_counted_apart_for_keys_that_arrive():
    first, anywhere = mask_numbers.first_arriving(N), (-(1 << 40), 1 << 40)
    own, later = (0, 100, 0, 50, *anywhere), (200, 300, first + 10, first + 20, *anywhere)
    for bands, expected in (
        ([own, later], [300, 50, 20]),
        ([own], [100, 50, 1]),
        ([later], [300, 1, 20]),
        ([], [1] * 3),
    ):
        found = mask_numbers.seen_numbers(np.array(bands, dtype=np.int64).reshape(-1, 6), N)
        assert [found[f"seen.{name}"] for name in ("rows", "keys", "later")] == expected


def test_kernels_leave_the_margin_of_sms_free(monkeypatch):
    with fake_driver(monkeypatch):
        shape = pass_shape((lie(N, HEADS), lie(N, HEADS_KV), lie(N, HEADS_KV)), 0, AttnOptions(0.1, sm_margin=8))
    assert [shape.grid(num_items) for num_items in (0, 5, 10**6)] == [1, 5, 124]
