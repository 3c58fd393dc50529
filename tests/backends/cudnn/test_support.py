"""What the backend cudnn lacks, decided without a GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron_magi.backends import registry
from megatron_magi.backends.base import StageMasks, TableUse
from megatron_magi.backends.cudnn import plans, support
from megatron_magi.backends.sm90 import support as hopper
from megatron_magi.mask import AttnMask, builders
from megatron_magi.operands.options import AttnOptions
from megatron_magi.ops.slice_attention import slice_attention

GPU = torch.device("cuda", 0)
BF16, DIMS = torch.bfloat16, (128, 128)
PLAIN = AttnOptions(0.1)


@pytest.fixture
def on_gpu(monkeypatch):
    """``on_gpu(capability, version)``: as on such a GPU, with such a version of the package."""

    def pretend(capability, version="1.32.0"):
        monkeypatch.setattr(support, "_where", lambda _device: (f"GPU {capability}", capability))
        monkeypatch.setattr(support, "installed_version", lambda: version)
        monkeypatch.setattr(hopper, "_is_hopper", lambda device: device.type == "cuda" and capability == (9, 0))
        monkeypatch.setattr(registry, "_said", set())
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
        monkeypatch.setattr("megatron_magi.backends.triton.support._missing_of_compiler", lambda: None)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: f"GPU {capability}")

    return pretend


def of_many_intervals(count: int) -> AttnMask:
    return AttnMask([(0, 4, 2 * i, 2 * i + 1, 0) for i in range(count)], 4, 2 * count)


@pytest.mark.parametrize("capability", [(9, 0), (10, 0), (10, 3)])
@pytest.mark.parametrize("dims", [(128, 128), (64, 64), (8, 120), (192, 128)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_it_takes_what_the_package_has(on_gpu, capability, dims, dtype):
    on_gpu(capability)
    assert support.why_not(GPU, dtype, dims, "'torch'") is None


@pytest.mark.parametrize(
    ("capability", "version", "dtype", "dims", "reason"),
    [
        ((8, 0), "1.32.0", BF16, DIMS, r"^impl: 'cudnn' needs a GPU of compute capability 9.0, 10.0 or 10.3, q is on"),
        ((12, 0), "1.32.0", BF16, DIMS, r"^impl: .* q is on GPU \(12, 0\)"),
        ((10, 0), None, BF16, DIMS, r"^impl: .*needs nvidia-cudnn-frontend 1.32.x, which is not installed \(pip inst"),
        ((10, 0), "1.31.0", BF16, DIMS, r"^impl: .*1.32.x, 1.31.0 is installed"),
        ((10, 0), "1.33.1", BF16, DIMS, r"^impl: .*1.32.x, 1.33.1 is installed"),
        ((10, 0), "1.32.0", torch.float32, DIMS, r"^q: impl 'cudnn' takes bf16 and fp16, got torch.float32"),
        ((9, 0), "1.32.0", BF16, (160, 160), r"^q, v: .*up to 128, 192 with 128, and 256, got 160 .* and 160"),
        ((9, 0), "1.32.0", BF16, (36, 64), r"^q, v: .*multiples of 8"),
        ((9, 0), "1.32.0", BF16, (64, 128), r"^q, v: .*56 and 64 of q and k with at most 96 of v .* got 128"),
        ((10, 3), "1.32.0", BF16, (256, 256), r"^q, v: .*256 on compute capability 9.0 alone"),
    ],
)
def test_what_it_lacks_is_named(on_gpu, capability, version, dtype, dims, reason):
    on_gpu(capability, version)
    found = support.why_not(GPU, dtype, dims, "'torch'")
    assert found is not None and found.endswith("; use 'torch'")
    with pytest.raises(ValueError, match=reason):
        raise ValueError(found)


def test_on_hopper_groups_of_heads_need_one_head_dim(on_gpu):
    on_gpu((9, 0))
    assert support.why_not(GPU, BF16, (192, 128), "x", 1) is None
    assert support.why_not(GPU, BF16, (128, 128), "x", 4) is None
    assert "different head dims on compute capability 9.0" in str(support.why_not(GPU, BF16, (192, 128), "x", 4))
    on_gpu((10, 0))
    assert support.why_not(GPU, BF16, (192, 128), "x", 4) is None


def test_head_dim_256_is_taken_on_hopper(on_gpu):
    on_gpu((9, 0))
    assert support.why_not(GPU, BF16, (256, 256), "'torch'") is None


def test_options_and_masks_that_it_lacks_are_named():
    assert support.why_not_call(PLAIN, builders.causal(9).bands, "'torch'") is None
    assert "softcap: impl 'cudnn' has none, got 2" in str(support.why_not_call(AttnOptions(0.1, 2.0), None, "x"))
    most = support.MOST_INTERVALS
    assert support.why_not_call(PLAIN, of_many_intervals(most).bands, "x") is None
    assert f"at most {most} bands, got {most + 1}" in str(
        support.why_not_call(PLAIN, of_many_intervals(most + 1).bands, "x")
    )


def test_forced_by_name_it_refuses_on_a_cpu():
    q = torch.zeros(4, 1, 8)
    with pytest.raises(ValueError, match=r"^impl: 'cudnn' needs a GPU .* q is on cpu; use 'torch'"):
        slice_attention(q, q, q, builders.causal(4), impl="cudnn")


@pytest.mark.parametrize(
    ("capability", "version", "dtype", "dims", "options", "mask", "name"),
    [
        ((9, 0), "1.32.0", BF16, DIMS, PLAIN, builders.causal(4), "ffa"),
        ((9, 0), None, BF16, DIMS, AttnOptions(0.1, 2.0), builders.causal(4), "ffa"),
        ((10, 0), "1.32.0", BF16, DIMS, PLAIN, builders.causal(4), "cudnn"),
        ((10, 3), "1.32.0", BF16, (64, 64), PLAIN, builders.causal(4), "cudnn"),
        ((10, 0), None, BF16, DIMS, PLAIN, builders.causal(4), "triton"),
        ((10, 0), "1.32.0", torch.float32, DIMS, PLAIN, builders.causal(4), "triton"),
        ((10, 0), "1.32.0", BF16, (256, 256), PLAIN, builders.causal(4), "triton"),
        ((10, 0), "1.32.0", BF16, DIMS, AttnOptions(0.1, 2.0), builders.causal(4), "triton"),
        ((10, 0), "1.32.0", BF16, DIMS, PLAIN, of_many_intervals(support.MOST_INTERVALS + 1), "triton"),
        ((8, 0), "1.32.0", BF16, DIMS, PLAIN, builders.causal(4), "triton"),
        ((8, 9), "1.32.0", BF16, DIMS, PLAIN, builders.causal(4), "triton"),
        ((12, 0), "1.32.0", BF16, DIMS, PLAIN, builders.causal(4), "triton"),
        ((9, 0), "1.32.0", torch.float32, DIMS, PLAIN, builders.causal(4), "triton"),
        ((7, 5), "1.32.0", BF16, DIMS, PLAIN, builders.causal(4), "torch"),
    ],
)
def test_the_choice_follows_capability_options_and_mask(on_gpu, capability, version, dtype, dims, options, mask, name):
    on_gpu(capability, version)
    found = registry.choose("auto", GPU, dtype, dims, options, (mask.bands,))
    assert found.name == name
    assert registry.choose("auto", torch.device("cpu"), dtype, dims, options, (mask.bands,)).name == "torch"


def test_the_choice_is_logged_once_with_the_reason(on_gpu, caplog):
    on_gpu((10, 0))
    caplog.set_level("INFO", logger="megatron_magi")
    for _ in range(2):
        registry.choose("auto", GPU, BF16, DIMS, PLAIN)
    (record,) = caplog.records
    assert record.getMessage().startswith("attention is computed by 'cudnn': impl: 'ffa' needs a Hopper GPU")
    registry.choose("auto", GPU, BF16, DIMS, AttnOptions(0.1, 2.0))
    assert "softcap: impl 'cudnn' has none" in caplog.records[-1].getMessage() and len(caplog.records) == 2


def test_tables_of_a_batch_hold_the_intervals_of_each_stage():
    stages = (builders.causal(6).bands, of_many_intervals(support.MOST_INTERVALS + 1).bands, AttnMask([], 6).bands)
    masks = StageMasks(stages, 6, (6, 200, 6), 0, None, False, False, None, 206)
    use = TableUse((4, 2), DIMS, BF16, 132, (0, 0), False, True, True, "auto")
    made = plans.make_stage_tables(masks, use)
    first, *others = made.tables
    assert len(made.arrays) == first.num_arrays == first.num_plans == 1
    np.testing.assert_array_equal(first.seen.ends, [[1, 2, 3, 4, 5, 6]])
    assert first.shape == plans.Shape(6, 6, (4, 2), DIMS, BF16, True)
    assert all(table.num_plans == table.num_arrays == 0 for table in others), "no plan is needed, or it is refused"
