"""What the Triton backend takes, and why not."""

from __future__ import annotations

import shutil

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from megatron_magi import slice_attention
from megatron_magi.attention import distributed_attention
from megatron_magi.backends.triton import support
from megatron_magi.backends.triton.backend import TritonKernels
from megatron_magi.config import AttendConfig, MagiConfig
from megatron_magi.mask import builders
from megatron_magi.plan import make_plan

CUDA = torch.device("cuda", 0)


@pytest.fixture
def gpu(monkeypatch):
    """A GPU of compute capability 8.6, as far as questions about it go."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 6))
    support._missing_of_compiler.cache_clear()
    yield
    support._missing_of_compiler.cache_clear()


def why_not(dtype=torch.bfloat16, dims=(128, 128), device=CUDA):
    return TritonKernels().why_not(device, dtype, dims)


def test_it_takes_what_its_kernels_do(gpu, monkeypatch):
    monkeypatch.setattr(support.Path, "exists", lambda path: True)
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    assert why_not() is None and why_not(torch.float32, (256, 64)) is None
    assert "takes fp16, bf16 and fp32, got torch.float64" in why_not(torch.float64)
    assert "head dims up to 256, got 264 and 8" in why_not(dims=(264, 8))
    assert "computes on GPUs, got a tensor on cpu" in why_not(device=torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    assert "needs compute capability 8.0, this GPU has 7.5" in why_not()


def test_without_a_compiler_it_says_so(gpu, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert "needs a C compiler" in why_not()


def test_without_headers_it_says_so(gpu, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(support.Path, "exists", lambda path: False)
    assert "needs Python's headers" in why_not()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("distributed", [False, True])
def test_tensors_of_a_cpu_are_refused_by_name(monkeypatch, distributed, dtype):
    monkeypatch.setattr(support, "_is_interpreted", lambda: False)
    x, mask = torch.zeros(8, 2, 16, dtype=dtype), builders.causal(8)

    def attend():
        if not distributed:
            return slice_attention(x, x, x, mask, impl="triton")
        config = MagiConfig(attend=AttendConfig(impl="triton"))
        return distributed_attention(x, x, x, make_plan(mask).for_rank(0), None, config=config)

    with pytest.raises(ValueError, match=r"^q: impl 'triton' computes on GPUs, got a tensor on cpu; use 'torch'"):
        attend()


@pytest.mark.gpu
def test_fp64_is_refused_by_name_on_a_gpu():
    x = torch.zeros(8, 2, 16, dtype=torch.float64, device="cuda")
    with pytest.raises(ValueError, match=r"^q: impl 'triton' takes fp16, bf16 and fp32, got torch\.float64"):
        slice_attention(x, x, x, builders.causal(8), impl="triton")
