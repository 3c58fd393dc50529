"""`row_delta`: a kernel where an implementation has one, one meaning everywhere."""

from __future__ import annotations

import pytest
import torch

from megatron_magi.attention import distributed_attention
from megatron_magi.backends.base import Backend
from megatron_magi.backends.registry import BACKENDS
from megatron_magi.config import AttendConfig, MagiConfig
from megatron_magi.mask import builders
from megatron_magi.ops.slice_attention import slice_attention
from megatron_magi.ops.slice_passes import row_delta
from megatron_magi.plan import make_plan
from tests import forced


def tensors(num_rows=20, dim=8):
    gen = forced.generator(0)
    return [torch.randn(num_rows, heads, dim, generator=gen, requires_grad=True) for heads in (4, 2, 2)]


def test_an_output_of_zero_counts_as_zero_whatever_its_gradient_is():
    out, dout = torch.ones(3, 2, 4), torch.full((3, 2, 4), torch.nan)
    dout[0], out[1:] = 2.0, 0.0
    assert row_delta(dout, out).tolist() == [[8.0, 8.0], [0.0, 0.0], [0.0, 0.0]]


def test_the_hopper_kernels_bring_their_own():
    assert BACKENDS["ffa"].row_delta is not Backend.row_delta
    assert BACKENDS["torch"].row_delta is Backend.row_delta


@pytest.mark.parametrize("distributed", [False, True])
def test_both_operators_use_the_kernel_of_their_implementation(monkeypatch, distributed):
    q, k, v = tensors()
    mask = builders.causal(20)
    plan, config = make_plan(mask), MagiConfig(attend=AttendConfig(impl="torch"))

    def grads():
        if distributed:
            out, _ = distributed_attention(q, k, v, plan.for_rank(0), None, config=config)
        else:
            out, _ = slice_attention(q, k, v, mask, impl="torch")
        return torch.autograd.grad(out.square().sum(), (q, k, v))

    expected, calls = grads(), []

    def kernel(dout, out):
        calls.append(out.shape)
        return (dout * out).sum(-1)

    monkeypatch.setattr(type(BACKENDS["torch"]), "row_delta", staticmethod(kernel))
    for got, grad in zip(grads(), expected, strict=True):
        torch.testing.assert_close(got, grad)
    assert calls == [(20, 4, 8)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.sm90])])
@pytest.mark.parametrize("impl", ["auto", "ffa"])
def test_an_output_of_more_than_16_bits_is_left_to_torch(impl, device, dtype, caplog):
    out, dout = (t.to(device, dtype) for t in torch.randn(2, 5, 4, 64))
    got = row_delta(dout, out, impl)
    torch.testing.assert_close(got, (dout * out).sum(-1))
    assert not caplog.records


@forced.on_cpu
def test_what_the_kernel_does_not_take_is_named():
    out = torch.ones(3, 2, 64).bfloat16()
    with pytest.raises(ValueError, match="impl: 'ffa' needs a Hopper GPU"):
        row_delta(out, out, "ffa")
    with pytest.raises(ValueError, match=r"dout: expected shape \[3, 2, 64\], got \[2, 64\]"):
        row_delta(out[0], out)


@pytest.mark.gpu
@pytest.mark.sm90
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_the_kernel_gives_what_torch_gives(dtype, dim):
    gen = torch.Generator("cuda").manual_seed(0)
    dout, out = (torch.randn(1000, 6, dim, generator=gen, device="cuda").to(dtype) for _ in range(2))
    out[5], dout[5] = 0, torch.nan
    got = row_delta(dout.transpose(0, 1).contiguous().transpose(0, 1), out, "ffa")
    torch.testing.assert_close(got, row_delta(dout, out), rtol=1e-5, atol=1e-4)
