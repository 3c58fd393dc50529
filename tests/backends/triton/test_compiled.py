"""Every kernel is compiled for GPUs that are not here, and takes no more of them than they have."""

from __future__ import annotations

import itertools
from typing import get_args

import pytest
import torch

from megatron_magi.backends.triton.tuning import (
    ALIGNMENT,
    SHARED_BYTES,
    Kernel,
    LatentKernel,
    kind_of_capability,
    padded,
    sizes,
)
from megatron_magi.mask import builders

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


@pytest.mark.parametrize("kernel", ["forward", "query_gradient"])
def test_kernels_for_narrow_masks_leave_room_for_two_on_a_multiprocessor(kernel):
    from tests.backends.triton.compiled import usage

    found = sizes(kernel, "hopper", (128, 128), 2, narrow=True)
    assert found.described and found != sizes(kernel, "hopper", (128, 128), 2)
    used = usage(kernel, (9, 0), (128, 128), torch.bfloat16, found=found)
    assert 2 * (used.shared + 1024) <= 228 << 10 and used.spilled == 0, used


@pytest.mark.parametrize("capability", CAPABILITIES, ids=str)
def test_kernels_over_rows_keep_their_registers(capability):
    from tests.backends.triton.compiled import row_usage

    assert all(used.spilled == 0 for used in row_usage(capability))


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("kernel", get_args(Kernel))
def test_kernels_of_fp32_with_every_option_fit_the_smallest_gpu(kernel, dim):
    from tests.backends.triton.compiled import usage

    used = usage(kernel, (8, 6), (dim, dim), torch.float32, special=True)
    assert used.shared <= SHARED_BYTES["small"] and used.spilled <= 64, used


@pytest.mark.parametrize(
    "kernel, capability, dim",
    [
        *((kernel, (8, 6), 128) for kernel in get_args(Kernel)),
        ("key_gradient", (9, 0), 128),
        ("key_gradient", (10, 0), 128),
        ("forward", (12, 0), 256),
    ],
    ids=str,
)
def test_kernels_with_every_option_keep_their_registers(kernel, capability, dim):
    from tests.backends.triton.compiled import usage

    used = usage(kernel, capability, (dim, dim), torch.bfloat16, special=True)
    assert used.shared <= SHARED_BYTES[kind_of_capability(capability)] and used.spilled <= MOST_SPILLED, used


@pytest.mark.parametrize("kernel", get_args(Kernel))
@pytest.mark.parametrize("capability", CAPABILITIES, ids=str)
def test_kernels_over_lists_fit_every_gpu(capability, kernel):
    from tests.backends.triton.compiled import mask_usage, sparse_usage

    assert mask_usage(capability).spilled == 0
    half, cases = torch.bfloat16, [(128, 64, torch.bfloat16)]
    if capability == (8, 6):
        cases += [(64, 128, half), (256, 64, half), (128, 1, half), (128, 64, torch.float32), (256, 1, torch.float32)]
    for dim, k_block, dtype in cases:
        used = sparse_usage(kernel, capability, (dim, dim), dtype, k_block)
        assert used.shared <= SHARED_BYTES["small"] and used.spilled <= 64, (dim, k_block, dtype, used)


@pytest.mark.parametrize("kernel", get_args(LatentKernel))
@pytest.mark.parametrize("capability", CAPABILITIES, ids=str)
def test_kernels_over_lists_of_latent_keys_fit_every_gpu(capability, kernel):
    from tests.backends.triton.compiled import latent_helpers_usage, latent_usage

    room, half = SHARED_BYTES[kind_of_capability(capability)], torch.bfloat16
    if kernel == "forward":
        assert all(used.spilled == 0 for used in latent_helpers_usage(capability))
    cases = [((576, 512), half, 128, False)]
    if capability == (8, 6):
        cases += [((576, 512), torch.float32, 128, False), ((512, 512), half, 16, True)]
    if capability == (9, 0):
        cases += [((576, 512), torch.float16, 64, True)]
    for *case, stores in cases:
        used = latent_usage(kernel, capability, *case, stores)
        most = MOST_SPILLED if kernel == "forward" else 64
        assert used.shared <= room and used.spilled <= most, (case, used)


def test_head_dims_are_filled_up_to_powers_of_two():
    assert [padded(n) for n in (1, 16, 17, 64, 65, 192, 256)] == [16, 16, 32, 64, 128, 256, 256]
    assert sizes("forward", "small", (192, 128), 2) == sizes("forward", "small", (256, 256), 2)


def test_a_gpu_that_is_not_known_gets_what_fits_the_smallest():
    assert kind_of_capability((13, 7)) == "small" == min(SHARED_BYTES, key=SHARED_BYTES.__getitem__)


def test_blocks_of_queries_that_are_described_begin_at_multiples_of_16_bytes():
    from megatron_magi.backends.triton.tables import Tiling, _arrays

    bands = builders.varlen(doc_lengths=[30, 1, 50, 41, 77, 3, 200], causal=True).bands
    found = sizes("key_gradient", "hopper", (128, 96), 2)
    assert found.described
    _, passes, _ = _arrays(bands, Tiling.of("key_gradient", found, 402, 402), "python")
    assert passes[:, 0].any() and not (passes[:, 0] * 4 % ALIGNMENT).any()
    for dims, itemsize in (((128, 100), 2), ((60, 64), 2), ((128, 128), 4)):  # rows of 100 and 60 are not aligned
        assert not sizes("key_gradient", "hopper", dims, itemsize).described


def test_softcap_changes_warps_alone():
    """Tables of a mask are made without knowing of it."""
    cases = itertools.product(SHARED_BYTES, get_args(Kernel), (64, 128, 256), (2, 4), (False, True))
    for kind, kernel, dim, itemsize, narrow in cases:
        plain, capped = (sizes(kernel, kind, (dim, dim), itemsize, capped=c, narrow=narrow) for c in (False, True))
        assert plain._replace(warps=capped.warps) == capped
