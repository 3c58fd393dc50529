"""The Hopper kernels by what they are compiled for, loaded when first used."""

from __future__ import annotations

from functools import cache

import torch

from megatron_magi.ops.hopper import build as hopper_build
from megatron_magi.ops.hopper import driver as hopper_driver
from megatron_magi.ops.hopper.driver import Kernel

FORWARD_WIDTH = {(64, 64): 128, (128, 128): 128, (192, 128): 128, (256, 256): 64}
"""Keys of a block by head dims (qk, v): the kernels that there are."""

BACKWARD_DIMS = ((64, 64), (128, 128))
_STAGES = 2
_SPARE_BYTES = 1024  # barriers and the like


def element(dtype: torch.dtype) -> str:
    """Macro of an element type."""
    return f"DTYPE={'Bf16' if dtype == torch.bfloat16 else 'Fp16'}"


@cache
def forward_kernel(device: torch.device, dtype: torch.dtype, dims: tuple[int, int], softcap: bool) -> Kernel:
    """Attention forward."""
    block_n = FORWARD_WIDTH[dims]
    defines = (
        f"HEAD_DIM={dims[0]}", f"HEAD_DIM_V={dims[1]}", f"BLOCK_N={block_n}", f"STAGES={_STAGES}",
        element(dtype), f"SOFTCAP={int(softcap)}",
    )  # fmt: skip
    shared = 2 * (128 * dims[0] + _STAGES * block_n * sum(dims)) + _SPARE_BYTES
    return _load(device, "forward", defines, 384, shared)


@cache
def backward_kernel(
    device: torch.device, dtype: torch.dtype, dims: tuple[int, int], softcap: bool, ordered: bool
) -> Kernel:
    """Attention backward; ``ordered``: the deterministic one."""
    defines = (
        f"HEAD_DIM={dims[0]}", f"HEAD_DIM_V={dims[1]}", f"STAGES={_STAGES}",
        element(dtype), f"SOFTCAP={int(softcap)}", f"ORDERED={int(ordered)}",
    )  # fmt: skip
    tiles = (128 + _STAGES * 64) * sum(dims) + 3 * 128 * 64  # k, v, q, dout; three of dS
    shared = 2 * tiles + 4 * 64 * dims[0] + _STAGES * 512 + _SPARE_BYTES
    return _load(device, "backward", defines, 384, shared)


@cache
def small_kernel(device: torch.device, name: str, defines: tuple[str, ...]) -> Kernel:
    """One of ``prepare``, ``row_delta``, ``finish_dq``."""
    return _load(device, name, defines, 256, 0)


def _load(device: torch.device, name: str, defines: tuple[str, ...], threads: int, shared_bytes: int) -> Kernel:
    image = hopper_build.build(f"attention/sm90/{name}.cu", defines)
    with torch.cuda.device(device):
        return hopper_driver.load_kernel(image, f"ffa_{name}", threads, shared_bytes)
