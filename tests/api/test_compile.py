"""Compiled code may call the public functions; what is around them is compiled."""

import pytest
import torch

from megatron_magi import api
from megatron_magi.ops.slice_attention import slice_attention

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def tensors():
    gen = torch.Generator().manual_seed(0)
    return [torch.randn(10, n, 8, generator=gen, requires_grad=True) for n in (4, 2, 2)]


def same_as_uncompiled(fn):
    results = []
    for call in (fn, torch.compile(fn, backend="eager")):
        inputs = tensors()
        out = call(*inputs)
        results.append((out, *torch.autograd.grad(out.square().sum(), inputs)))
    for eager, compiled in zip(*results, strict=True):
        assert torch.equal(eager, compiled)


def test_a_whole_attention_step_can_be_compiled():
    def step(q, k, v):
        key = api.magi_attn_flex_key([[0, 10]], [[0, 10]], "causal", 10, 10)
        q, k, v = (api.dispatch(x * 2, key) for x in (q, k, v))
        positions = api.get_position_ids(key).to(q.device)[:, None, None]
        out, _ = api.calc_attn(q + positions, k, v, key)
        return api.undispatch(api.roll(out, 1, 0, key), key) * 3

    same_as_uncompiled(step)


def test_attention_over_ranges_can_be_compiled():
    ranges, types = torch.tensor([[0, 6], [6, 10]]), torch.tensor([1, 0])
    same_as_uncompiled(lambda q, k, v: 2 * api.flex_flash_attn_func(q * 2, k, v, ranges, ranges, types)[0])


def test_attention_over_bands_can_be_compiled():
    bands = api.magi_attn_flex_key([[0, 10]], [[0, 10]], "causal", 10, 10).mask.bands
    same_as_uncompiled(lambda q, k, v: 2 * slice_attention(q * 2, k, v, bands)[0])
