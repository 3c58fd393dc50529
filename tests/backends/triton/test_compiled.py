"""Every kernel is compiled for GPUs that are not here, and takes no more of them than they have."""

from __future__ import annotations

from typing import get_args

import pytest
import torch

from megatron_magi.backends.triton.tuning import SHARED_BYTES, Kernel, kind_of_capability, padded, sizes

pytest.importorskip("triton", reason="triton is not installed")

CAPABILITIES = [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)]
MOST_SPILLED = 256
"""Bytes of registers of a thread that may lie in memory: a few, outside of loops."""


@pytest.mark.parametrize("kernel", get_args(Kernel))
@pytest.mark.parametrize("capability", CAPABILITIES, ids=str)
def test_kernels_fit_every_gpu(capability, kernel):
    from tests.backends.triton.compiled import usage

    room = SHARED_BYTES[kind_of_capability(capability)]
    for dims in ((64, 64), (128, 128), (192, 128)) if capability in ((8, 6), (9, 0)) else ((128, 128),):
        used = usage(kernel, capability, dims, torch.bfloat16)
        assert used.shared <= room and used.spilled <= MOST_SPILLED, (dims, used)


@pytest.mark.parametrize("kernel", get_args(Kernel))
def test_kernels_of_fp32_and_with_every_option_fit_the_smallest_gpu(kernel):
    from tests.backends.triton.compiled import usage

    for dims, dtype in (((256, 256), torch.float32), ((128, 128), torch.float16)):
        used = usage(kernel, (8, 6), dims, dtype, special=True)
        assert used.shared <= SHARED_BYTES["small"], (dims, dtype, used)


def test_head_dims_are_filled_up_to_powers_of_two():
    assert [padded(n) for n in (1, 16, 17, 64, 65, 192, 256)] == [16, 16, 32, 64, 128, 256, 256]
    assert sizes("forward", "small", (192, 128), 2) == sizes("forward", "small", (256, 256), 2)


def test_a_gpu_that_is_not_known_gets_what_fits_the_smallest():
    assert kind_of_capability((13, 7)) == "small" == min(SHARED_BYTES, key=SHARED_BYTES.__getitem__)
