"""What `slice_attention` queues on Hopper GPUs is prepared once a mask, and copied for the next; without a GPU."""

from __future__ import annotations

from weakref import ref

import numpy as np
import pytest
import torch

from megatron_magi.backends.sm90 import attention as hopper
from megatron_magi.backends.sm90 import backward_steps, choices, forward_steps, plan, program
from megatron_magi.mask import builders
from megatron_magi.ops.slice_attention import slice_attention
from megatron_magi.ops.slice_operator import slice_attention_traced
from megatron_magi.runtime.lru import LruCache
from tests.backends.sm90.cases import pack_heads

N = 512
MASKS = [builders.varlen(doc_lengths=lengths) for lengths in ([200, 312], [100, 30, 382])]


def tensors(num_keys=N, dims=(128, 128), num_rows=N):
    shapes = (num_rows, 8, dims[0]), (num_keys, 2, dims[0]), (num_keys, 2, dims[1])
    return [torch.zeros(shape, dtype=torch.bfloat16, requires_grad=True) for shape in shapes]


def step(mask, **options):
    q, k, v = tensors(mask.total_seqlen_k, num_rows=mask.total_seqlen_q)
    out, _ = slice_attention(q, k, v, mask, impl="ffa", **options)
    return torch.autograd.grad(out, (q, k, v), torch.zeros_like(out))


def memory(launches):
    """Of the lists of calls of both passes, as they are queued for some addresses."""
    found = {}
    for key, walk in launches.bound.items():
        (calls,) = walk.lists
        calls.queue(*range(1, calls._form.num_slots + 1))
        found[key] = bytes(calls._memory)
    assert len(found) == 2
    return found


def test_calls_of_a_known_mask_make_nothing(launched, monkeypatch):
    step(MASKS[0])
    first = list(launched)
    assert first[:3] == ["forward", "preprocess", "backward"] and first[-1] == "postprocess_dq"
    monkeypatch.setattr(program, "BoundLaunches", lambda *_: pytest.fail("made again"))
    launched.clear()
    step(builders.varlen(doc_lengths=[200, 312]))
    assert launched == first


def test_another_mask_takes_a_copy_of_the_calls(launched, monkeypatch):
    step(MASKS[0])
    monkeypatch.setattr(forward_steps, "forward_steps", lambda *_: pytest.fail("made again"))
    monkeypatch.setattr(backward_steps.BackwardSteps, "steps", lambda _: pytest.fail("made again"))
    step(MASKS[1])


@pytest.mark.parametrize("other", [MASKS[0], builders.varlen(doc_lengths=[N], doc_lengths_k=[300], causal=False)])
def test_copied_calls_are_those_of_the_mask_itself(launched, other):
    """Other documents, and another number of keys."""
    mask = builders.varlen(doc_lengths=[N], doc_lengths_k=[900], causal=False)
    step(other)
    step(mask)
    copied = hopper._programs.items()[-1][1]
    assert copied.makers is hopper._programs.items()[0][1].makers
    hopper._programs.drop(lambda _: True)
    hopper._makers.drop(lambda _: True)
    step(mask)
    assert memory(copied) == memory(hopper._programs.items()[-1][1])


def test_calls_go_with_the_tables_that_they_read(launched):
    step(MASKS[0])
    launches = hopper._programs.items()[-1][1]
    assert len(launches.bound) == 2
    program._bound.drop(lambda _: True)
    assert not launches.bound
    step(MASKS[0])
    assert len(launches.bound) == 2


def test_a_mask_in_use_stays_prepared_however_many_others_come(launched, monkeypatch):
    """Calls of a known mask do not ask the cache of launches, which keeps those used last."""
    monkeypatch.setattr(program, "_bound", LruCache(1 << 30, max_items=4))
    others = [builders.varlen(doc_lengths=[i, N - i]) for i in range(1, 6)]
    step(MASKS[0])
    known = dict(hopper._programs.items()[-1][1].bound)
    assert len(known) == 2
    for other in others:
        step(other)
        step(MASKS[0])
    assert dict(hopper._programs.items()[-1][1].bound) == known
    assert not hopper._programs.items()[0][1].bound, "the others are forgotten"


@pytest.mark.parametrize("sink", [None, torch.zeros(1, 8, requires_grad=True)])
def test_a_compiled_function_queues_the_lists_of_eager_mode(launched, sink):
    step(MASKS[0], sink=sink)
    first, lists = list(launched), dict(hopper._programs.items()[-1][1].bound)
    launched.clear()
    q, k, v = tensors()
    out, _ = slice_attention_traced(
        q, k, v, [torch.from_numpy(MASKS[0].packed)], sink=sink, softmax_scale=None, softcap=0.0,
        return_max_logits=False, deterministic=False, sm_margin=0, sanity_check=False, impl="ffa",
    )  # fmt: skip
    grads = torch.autograd.grad(out, (q, k, v, *(() if sink is None else (sink,))), torch.zeros_like(out))
    assert launched == first and "row_delta" not in first
    assert len(grads) == 3 + (sink is not None)
    ((_, launches),) = hopper._programs.items()
    assert dict(launches.bound) == lists


def test_strides_that_change_from_call_to_call_take_bounded_memory(launched):
    for width in range(128, 128 + 8 * 70, 8):
        _, k, v = (t.detach() for t in tensors())
        wide = torch.zeros(N, 8, width, dtype=torch.bfloat16)[..., :128]
        slice_attention(wide, k, v, MASKS[0], impl="ffa")
    ((_, launches),) = hopper._programs.items()
    assert len(launches.makers) == 64


def test_a_call_under_way_keeps_the_tables_that_it_reads(launched):
    step(MASKS[0])
    launches = hopper._programs.items()[-1][1]
    under_way = next(iter(launches.bound.values()))
    tables = [ref(plan.memory) for plan in under_way.tables.values()]
    assert tables
    for kept in (program._bound, plan._plans):
        kept.drop(lambda _: True)
    assert list(launches.bound.values()) == [under_way] and all(table() is not None for table in tables)
    del under_way
    assert not launches.bound and not any(table() is not None for table in tables)


def test_masks_that_are_remembered_take_bounded_memory(launched, monkeypatch):
    """A table of many slices is megabytes."""
    masks = [builders.varlen(doc_lengths=[length, *[8] * 50, N - 400 - length]) for length in range(1, 21)]
    most = 4 * masks[0].bands.nbytes
    monkeypatch.setattr(hopper, "_programs", LruCache(most))
    for mask in masks:
        slice_attention(*tensors(), mask, impl="ffa")
        assert sum(launches.bands.nbytes for _, launches in hopper._programs.items()) <= most
    assert len(hopper._programs) == 4


def test_tests_that_choose_kernels_find_no_calls_of_others(launched, monkeypatch):
    step(MASKS[0])
    assert "postprocess_dq" in launched and "backward_queries" not in launched
    launched.clear()
    monkeypatch.setattr(choices, "sums_pay", lambda *_: False)
    pack_heads(monkeypatch, 1)
    step(MASKS[0])
    assert "postprocess_dq" not in launched and "backward_queries" in launched


def test_bands_that_change_later_are_another_mask(launched):
    bands = MASKS[0].bands.copy()
    q, k, v = tensors()
    slice_attention(q, k, v, bands, impl="ffa")
    bands[:] = 0
    slice_attention(q, k, v, bands, impl="ffa")
    first, second = (launches for _, launches in hopper._programs.items())
    np.testing.assert_array_equal(first.bands, MASKS[0].bands)
    assert not second.bands.any()


@pytest.mark.parametrize(
    ("dims", "options", "expected"),
    [
        ((192, 128), {}, ["forward", "row_delta", "preprocess", "backward_keys", "backward_queries"]),
        ((80, 80), {}, ["forward", "row_delta", "preprocess", "backward", "postprocess_dq"]),
        ((128, 128), {"deterministic": True}, ["forward", "preprocess", "backward", "backward_queries"]),
    ],
)
def test_delta_is_a_launch_of_its_own_for_heads_whose_backward_no_list_takes(launched, dims, options, expected):
    q, k, v = tensors(dims=dims)
    out, _ = slice_attention(q, k, v, MASKS[0], impl="ffa", **options)
    torch.autograd.grad(out, (q, k, v), torch.zeros_like(out))
    assert [name for name in launched if name != "postprocess_keys"] == expected


def test_a_sink_and_the_largest_logits_are_part_of_what_a_list_is_for(launched):
    sink = torch.zeros(1, 8, requires_grad=True)
    step(MASKS[0])
    step(MASKS[0], sink=sink)
    step(MASKS[0], sink=sink, return_max_logits=True)
    q, k, v = tensors()
    out, _ = slice_attention(q, k, v, MASKS[0], impl="ffa", sink=torch.zeros(N, 1, 8, requires_grad=True))
    torch.autograd.grad(out, (q, k, v), torch.zeros_like(out))
    ((_, launches),) = hopper._programs.items()
    forwards = [key for key in launches.bound if key[1:3] in ((False, 0), (False, 2), (True, 2), (False, 3))]
    assert len(forwards) == 4 and len(launches.bound) == 6  # a backward with and one without delta
