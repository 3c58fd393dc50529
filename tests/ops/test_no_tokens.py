"""Attention without queries, without keys, or without both: every entry, both passes."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_magi import block_sparse_attention, index_sparse_attention, slice_attention
from megatron_magi.api import calc_attn, dispatch, flex_flash_attn_func, magi_attn_flex_key, roll, undispatch
from megatron_magi.mask import AttnMask
from tests import forced

HEADS_Q, HEADS_KV = 4, 2
SHAPES = [(0, 0), (0, 70), (70, 0)]
ON_GPU = [pytest.mark.gpu, pytest.mark.sm90]


def by_mask(impl):
    def attend(q, k, v, **options):
        return slice_attention(q, k, v, AttnMask([], q.shape[0], k.shape[0]), impl=impl, **options)

    return attend


def by_ranges(q, k, v, **options):
    return flex_flash_attn_func(q, k, v, **options)


def by_no_ranges(q, k, v, **options):
    none = torch.zeros(0, 2, dtype=torch.int64, device=q.device)
    return flex_flash_attn_func(q, k, v, none, none, **options)


def blocks_of(q, k, q_block):
    return -(-q.shape[0] // q_block), -(-k.shape[0] // 128)


def by_blocks(form, impl="auto"):
    def attend(q, k, v, **options):
        rows, columns = blocks_of(q, k, 64)
        blocks = {
            "mask": torch.ones(rows, columns, dtype=torch.bool, device=q.device),
            "lists": torch.zeros(rows, 0, dtype=torch.int32, device=q.device),
            "csr": tuple(torch.zeros(n, dtype=torch.int32, device=q.device) for n in (rows + 1, 0)),
        }[form]
        sizes = {"q_block_size": 64, "k_block_size": 128, "causal": True}
        return block_sparse_attention(q, k, v, blocks, **sizes, impl=impl, **options)

    return attend


def by_indices(topk, impl="auto"):
    def attend(q, k, v, **options):
        indices = torch.full((q.shape[0], 1, topk), -1, device=q.device)
        return index_sparse_attention(q, k, v, indices, impl=impl, **options)

    return attend


ENTRIES = {
    "reference": by_mask("reference"),
    "torch": by_mask("torch"),
    "ranges": by_ranges,
    "no ranges": by_no_ranges,
    **{form: by_blocks(form) for form in ("mask", "lists", "csr")},
    "no indices": by_indices(0),
    "indices": by_indices(3),
}
KERNELS = {
    "ffa": by_mask("ffa"),
    "ffa ranges": by_ranges,
    **{f"ffa {form}": by_blocks(form, "ffa") for form in ("mask", "lists", "csr")},
    "ffa no indices": by_indices(0, "ffa"),
    "ffa indices": by_indices(3, "ffa"),
}
CASES = [(name, forced.DEVICE, torch.float32) for name in ENTRIES]
CASES += [pytest.param(name, "cuda", torch.float32, marks=pytest.mark.gpu) for name in ENTRIES]
CASES += [pytest.param(name, "cuda", torch.bfloat16, marks=ON_GPU) for name in KERNELS]


@pytest.mark.parametrize("entry, device, dtype", CASES)
@pytest.mark.parametrize("num_rows, num_keys", SHAPES)
@pytest.mark.parametrize("sinks", ["none", "sh", "ssh"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_results_and_gradients_are_zero(entry, device, dtype, num_rows, num_keys, sinks, deterministic):
    shapes = (num_rows, HEADS_Q, 64), (num_keys, HEADS_KV, 64), (num_keys, HEADS_KV, 64)
    inputs = [torch.randn(shape, device=device).to(dtype).requires_grad_() for shape in shapes]
    sink = None
    if sinks != "none":
        sink = torch.ones((*([num_rows] if sinks == "ssh" else []), 2, HEADS_Q), device=device, requires_grad=True)
        inputs.append(sink)
    options = {"sink_layout": sinks} if sinks == "ssh" and "range" in entry else {}
    attend = {**ENTRIES, **KERNELS}[entry]
    out, meta = attend(*inputs[:3], sink=sink, return_max_logits=True, deterministic=deterministic, **options)
    assert out.shape == shapes[0] and out.dtype == dtype and not out.any()
    lse = -math.inf if sink is None else 1 + math.log(2)
    torch.testing.assert_close(meta.lse, torch.full((num_rows, HEADS_Q), lse, device=device))
    assert bool((meta.max_logits == -math.inf).all()) and meta.max_logits.shape == (HEADS_Q,)
    for x, grad in zip(inputs, torch.autograd.grad(out.sum(), inputs), strict=True):
        assert grad.shape == x.shape and grad.dtype == x.dtype and not grad.any()


@pytest.mark.parametrize(
    "device, dtype", [(forced.DEVICE, torch.float32), pytest.param("cuda", torch.bfloat16, marks=ON_GPU)]
)
def test_a_key_of_no_tokens_has_padding_alone(device, dtype):
    key = magi_attn_flex_key([], [], [], 0, 0)
    x = torch.zeros(0, 2, 64, device=device, dtype=dtype, requires_grad=True)
    local = dispatch(x, key, pad_value=1)
    out, meta = calc_attn(local, local, local, key, return_max_logits=True)
    whole, rolled = undispatch(out, key), roll(local, 1, 0, key)
    assert whole.shape == x.shape and not out.any() and bool((meta.lse == -math.inf).all())
    assert torch.equal(rolled, local)
    (whole.sum() + rolled.sum()).backward()
    assert x.grad.shape == x.shape


@pytest.mark.parametrize("shape", [(8, 0), (8, 0, 3), (8, 3, 0)])
def test_rows_without_elements_are_moved(shape):
    key = magi_attn_flex_key([[0, 8]], [[0, 8]], ["full"], 8, 8)
    x = torch.zeros(shape, requires_grad=True)
    whole = undispatch(roll(dispatch(x, key), 1, 0, key), key)
    assert whole.shape == shape
    whole.sum().backward()
    assert x.grad.shape == shape
