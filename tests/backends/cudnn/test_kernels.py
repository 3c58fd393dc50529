"""The backend cudnn on a GPU, against fp64."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_magi.attention import AttnShape, distributed_attention, prepare_batch
from megatron_magi.backends.cudnn import passes, plans
from megatron_magi.backends.cudnn.sequences import split
from megatron_magi.config import AttendConfig, MagiConfig
from megatron_magi.mask import AttnMask, builders
from megatron_magi.mask import bands as bd
from megatron_magi.operands.options import make_options
from megatron_magi.ops.slice_attention import slice_attention
from megatron_magi.ops.slice_passes import row_delta, slice_attention_backward, slice_attention_forward
from megatron_magi.plan import make_plan
from megatron_magi.runtime.lru import LruCache
from tests.backends.cudnn.documents import always_split, documents
from tests.backends.sm90.cases import Inputs, assert_as_good, plain_attention
from tests.ops.naive import Case, masks, packed_causal

pytestmark = [pytest.mark.gpu, pytest.mark.cudnn]

DIMS = [(64, 64), (128, 128), (40, 40), pytest.param((256, 256), marks=pytest.mark.sm90)]
TWO_DIMS = [(192, 128), (40, 72)]
"""Of q and k, and of v: on Hopper with one query head for each key head."""
HEADS = [(16, 1), (6, 4), (1, 4)]
OPTIONS = {
    "heads": st.sampled_from(HEADS),
    "sink": st.sampled_from([None, "sh", "ssh"]),
    "deterministic": st.booleans(),
    "seed": st.integers(0, 99),
}
"""Of random cases, besides the mask."""


def run(case: Case, **options) -> dict[str, torch.Tensor]:
    def attend(q, k, v, sink):
        out, meta = slice_attention(q, k, v, case.mask, sink=sink, return_max_logits=True, impl="cudnn", **options)
        return out, meta.lse, meta.max_logits

    return case.run(attend)


def check(case: Case, got: dict[str, torch.Tensor]) -> None:
    exact = case.expected(torch.float64)
    x = Inputs(case.q, case.k, case.v, case.dout, case.mask.bands, make_options(case.q, None, 0.0, False, 0))
    plain = plain_attention(x, case.sinks, from_out=True)
    for name, value in zip(("out", "dq", "dk", "dv", "dsink"), plain, strict=False):
        if name in got:
            assert_as_good(name, got[name], value, exact[name])
    torch.testing.assert_close(got["lse"].double(), exact["lse"], atol=2e-4, rtol=2e-4)
    if "max_logits" in got:
        torch.testing.assert_close(got["max_logits"].double(), exact["max_logits"], atol=1e-3, rtol=1e-3)
    visible = case.visible
    for name, unseen in (("out", ~visible.any(1)), ("dq", ~visible.any(1)), ("dk", ~visible.any(0))):
        assert not bool(got[name][unseen].any()), f"{name} of tokens in no pair is not zero"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dims", [*DIMS, *TWO_DIMS], ids=str)
@settings(max_examples=20)
@given(mask=masks(longest=400), **OPTIONS)
def test_random_masks_match_fp64(dims, dtype, mask, heads, sink, deterministic, seed):
    check_random(dims, dtype, mask, heads, sink, deterministic, seed)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dims", [*DIMS, *TWO_DIMS], ids=str)
@settings(max_examples=20)
@given(mask=documents(longest=300), **OPTIONS)
def test_random_masks_behind_each_other_match_fp64(dims, dtype, mask, heads, sink, deterministic, seed):
    with always_split():
        check_random(dims, dtype, mask, heads, sink, deterministic, seed)


def check_random(dims, dtype, mask, heads, sink, deterministic, seed):
    heads = (16, 1) if dims in TWO_DIMS else heads
    case = Case(mask, *heads, *dims, sink=sink, dtype=dtype, device="cuda", seed=seed)
    check(case, run(case, deterministic=deterministic))


@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize(
    ("lengths", "form", "number"),
    [
        ([300, 7, 450, 1200], nullcontext, 4),
        ([300, 7, 450, 60] * 9 + [500], always_split, 40),
        ([1957], nullcontext, 0),
    ],
    ids=["sequences", "padded", "whole"],
)
def test_deterministic_gradients_repeat_bitwise(dims, group, lengths, form, number):
    case = Case(packed_causal(lengths), 4, group, *dims, sink="sh", dtype=torch.bfloat16, device="cuda")
    with form():
        found = split(case.mask.bands, sum(lengths), sum(lengths), case.num_heads_kv)
        assert (0 if found is None else len(found.rows) - 1) == number
        first = run(case, deterministic=True)
        for _ in range(3):
            again = run(case, deterministic=True)
            assert all(torch.equal(first[name], again[name]) for name in first)


def only_keys(bands: np.ndarray, first: int, last: int) -> np.ndarray:
    bands = bands.copy()
    bands[:, bd.K0] = np.clip(bands[:, bd.K0], first, last)
    bands[:, bd.K1] = np.clip(bands[:, bd.K1], first, last)
    return bands


@pytest.mark.parametrize("form", [nullcontext, always_split])
@pytest.mark.parametrize("dims", [(128, 128), (64, 64)], ids=str)
def test_stages_are_merged_by_lse_and_delta_may_be_given_without_the_output(dims, form):
    with form():
        check_stages(dims)


def check_stages(dims):
    case = Case(packed_causal([300, 7, 450]), 2, 4, *dims, sink="sh", dtype=torch.bfloat16, device="cuda")
    parts = [only_keys(case.mask.bands, first, last) for first, last in ((0, 200), (200, 500), (500, 757))]
    out = lse = dq = dk = dv = None
    for i, bands in enumerate(parts):
        out, lse, _ = slice_attention_forward(
            case.q, case.k, case.v, bands, sink=case.sinks if i == 1 else None, out=out, lse=lse,
            out_dtype=torch.float32, impl="cudnn",
        )  # fmt: skip
    delta = row_delta(case.dout, out.to(case.dtype))
    for bands in parts:
        dq, dk, dv = slice_attention_backward(
            case.dout, case.q, case.k, case.v, lse, delta, bands, dq=dq, dk=dk, dv=dv, grad_dtype=torch.float32,
            impl="cudnn",
        )  # fmt: skip
    results = {"out": out, "dq": dq, "dk": dk, "dv": dv}
    check(case, {"lse": lse, **{name: t.to(case.dtype) for name, t in results.items()}})


def test_views_and_tensors_that_are_not_aligned():
    case = Case(packed_causal([100, 33]), 2, 2, 64, 64, dtype=torch.bfloat16, device="cuda")
    expected = run(case)
    together = torch.cat([case.q, case.k, case.v], dim=1)
    case.q, case.k, case.v = together[:, :4], together[:, 4:6], together[:, 6:]
    views = run(case)
    odd = torch.empty(case.k.numel() + 3, dtype=torch.bfloat16, device="cuda")[3:].view(case.k.shape)
    case.k = odd.copy_(case.k)
    for found in (views, run(case)):
        assert all(torch.equal(found[name], expected[name]) for name in ("out", "lse"))


def test_a_prepared_batch_brings_its_plan_and_takes_it_along(monkeypatch):
    config = MagiConfig(attend=AttendConfig(impl="cudnn"))
    shape = AttnShape(8, 2, 128, 128, torch.bfloat16).kernels_for("cuda", "cudnn")
    assert shape.backend == "cudnn" and shape.num_sms
    monkeypatch.setattr(plans, "_plans", LruCache(1 << 30))
    q, k, v = (torch.randn(600, heads, 128, device="cuda", dtype=torch.bfloat16) for heads in (8, 2, 2))
    for lengths in ([100, 500], [600], [250, 1, 349]):
        plan = make_plan(builders.varlen(doc_lengths=lengths, causal=True), config, 1)
        batch = prepare_batch({"mask": plan.for_rank(0)}, shape, config)
        batch.to("cuda")
        rank_plan = batch.plans["mask"]
        index = torch.from_numpy(plan.dispatch.global_index(0)).to("cuda")
        (planned,) = plans._prepared.values()
        assert plans.is_split(planned.plan()) == (len(lengths) > 1)
        leaves = [t[index].clone().requires_grad_() for t in (q, k, v)]
        out, _ = distributed_attention(*leaves, rank_plan, None, config=config)
        out.square().sum().backward()
        assert not len(plans._plans), "a plan was made in the step"
        expected = slice_attention(*(t.detach() for t in leaves), rank_plan.bands[0], impl="reference")[0]
        torch.testing.assert_close(out, expected, atol=2e-2, rtol=2e-2)
        del batch, plan, rank_plan, out, leaves, planned
        gc.collect()
        assert not len(plans._prepared)
        plans._plans.drop(lambda _key: True)


def test_new_masks_compile_nothing(monkeypatch):
    from cutlass import cute

    rng = np.random.default_rng(0)
    q, k, v = (torch.randn(2048, heads, 64, device="cuda", dtype=torch.bfloat16) for heads in (4, 2, 2))
    q.requires_grad_()

    def step(mask: AttnMask) -> None:
        slice_attention(q, k, v, mask, impl="cudnn")[0].sum().backward()

    def draw() -> AttnMask:
        cuts = np.unique(rng.integers(1, 2048, rng.integers(0, 9)))
        lengths = np.diff(np.concatenate([[0], cuts, [2048]]))
        return builders.sliding_window(doc_lengths=lengths, left=int(rng.integers(1, 900)), right=0, global_tokens=2)

    monkeypatch.setattr(passes, "_kernels", LruCache(0, 256))
    for _ in range(20):
        step(draw())

    def refuse(*_args, **_options):
        raise AssertionError("a kernel is compiled for a new mask")

    monkeypatch.setattr(cute, "compile", refuse)
    for _ in range(1000):
        step(draw())
    forms = {passes._form(planned.plan()) for _, planned in plans._plans.items()}
    assert len(passes._kernels) <= len(forms) * (2 * 2 + 9), "two passes of a whole and of up to 9 documents"


def test_a_mask_that_is_being_captured_is_refused():
    q = torch.randn(64, 2, 64, device="cuda", dtype=torch.bfloat16)
    mask = builders.causal(64)
    slice_attention(q, q, q, mask, impl="cudnn")
    torch.cuda.synchronize()
    with torch.cuda.graph(torch.cuda.CUDAGraph()), pytest.raises(RuntimeError, match="a CUDA graph keeps no mask"):
        slice_attention(q, q, q, mask, impl="cudnn")


def test_softcap_is_refused_and_no_key_gives_nothing():
    q = torch.randn(64, 2, 64, device="cuda", dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="softcap: impl 'cudnn' has none"):
        slice_attention(q, q, q, builders.causal(64), softcap=2.0, impl="cudnn")
    case = replace(Case(AttnMask([], 64), 1, 2, 64, 64, dtype=torch.bfloat16, device="cuda"))
    got = run(case)
    assert not any(got[name].any() for name in ("out", "dq", "dk", "dv")) and (got["lse"] == -torch.inf).all()
