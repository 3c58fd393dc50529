"""The Hopper kernels by compile-time parameters, loaded on first use."""

from __future__ import annotations

import ctypes
import itertools
from functools import cache

import torch

from megatron_magi.backends.sm90.cost import KERNELS
from megatron_magi.cuda import build as hopper_build
from megatron_magi.cuda import driver as hopper_driver
from megatron_magi.cuda.driver import Kernel
from megatron_magi.cuda.params import kernel_params

FORWARD_TILES = {
    (64, 64): ((128, 128), (192, 128)),
    (128, 128): ((128, 128), (192, 64)),
    (192, 128): ((128, 128),),
    (192, 192): ((128, 96),),
    (256, 256): ((128, 64),),
}
"""Tile shapes by head dims (qk, v): queries of a tile, 64 for each warpgroup, and keys of a block. Which of two is
faster depends on the mask, see `forward_tile`.
"""
WHOLE_DIMS = ((64, 64), (128, 128))
"""Head dims whose backward can be one kernel, which accumulates dq in device memory; see `backward_steps`."""

PART_TILES = {(192, 128): (64, 128), (256, 256): (64, 64)}
"""Head dims whose backward is always two kernels: for dk and dv, with keys of a tile and queries of a block; for dq."""

BACKWARD_DIMS = (*WHOLE_DIMS, *PART_TILES)

DIM_UNIT = 8
"""Head dims must be multiples of it: TMA needs strides of 16 bytes."""

QUERIES_WIDTH = {(64, 64): 96, (128, 128): 96, (192, 128): 64, (256, 256): 64}
"""Keys of a block of the kernel for dq, by head dims."""

_QUERIES_STAGES = {(64, 64): (3, 2), (128, 128): (3, 2), (192, 128): (3, 2), (256, 256): (2, 1)}
"""Stages of keys and of values of that kernel."""
_ELEMENTS = {torch.bfloat16: "Bf16", torch.float16: "Fp16"}
_STAGES, _TALL_STAGES = 2, 3
_SPARE_BYTES = 1024  # barriers and the like


@cache
def kernel_dims(dims: tuple[int, int], backward: bool = True) -> tuple[int, int] | None:
    """Head dims (qk, v) of the kernels that take tensors of such head dims, or None.

    The smallest that hold both: missing columns are read as zeros.
    """
    if any(dim <= 0 or dim % DIM_UNIT for dim in dims):
        return None
    all_dims = BACKWARD_DIMS if backward else FORWARD_TILES
    return min((known for known in all_dims if known[0] >= dims[0] and known[1] >= dims[1]), key=sum, default=None)


def are_kernel_dims(dims: tuple[int, int]) -> bool:
    """Whether tensors of such head dims have kernels of exactly these."""
    return kernel_dims(dims) == dims


def element(dtype: torch.dtype) -> str:
    """Macro of an element type."""
    return f"DTYPE={_ELEMENTS[dtype]}"


def forward_tile(dims: tuple[int, int], keys: float, packed: int) -> tuple[int, int]:
    """The best of `FORWARD_TILES` for queries that see ``keys`` keys on average, with ``packed`` heads."""
    tiles = FORWARD_TILES[dims]
    return tiles[-1 if len(tiles) > 1 and keys >= KERNELS.tall_tile_keys[dims][packed == 1] else 0]


def _forward_stages(tile: tuple[int, int]) -> int:
    return _TALL_STAGES if tile[0] > 128 else _STAGES


def forward_macros(
    dtype: torch.dtype,
    dims: tuple[int, int],
    tile: tuple[int, int],
    softcap: bool,
    stream_kv: bool = False,
    captured: bool = False,
) -> tuple[str, ...]:
    """Macros of a forward kernel.

    Args:
        dtype, dims: of the tensors.
        tile: one of `FORWARD_TILES`.
        softcap: logits are capped.
        stream_kv: some keys are fetched while it runs.
        captured: the mask's numbers are read from memory, see `changing_mask`.
    """
    return (
        f"HEAD_DIM={dims[0]}", f"HEAD_DIM_V={dims[1]}", f"GROUPS={tile[0] // 64}", f"BLOCK_N={tile[1]}",
        f"STAGES={_forward_stages(tile)}",
        f"Q_STAGES={_query_stages(dims)}", f"STAGED={int(_has_room(dims))}",
        element(dtype), f"SOFTCAP={int(softcap)}", *_if_stream_kv(stream_kv), *if_captured(captured),
    )  # fmt: skip


def backward_macros(
    dtype: torch.dtype,
    dims: tuple[int, int],
    softcap: bool,
    adds_dq: bool,
    stream_kv: bool = False,
    captured: bool = False,
) -> tuple[str, ...]:
    """Macros of a backward kernel; ``stream_kv`` and ``captured`` as in `forward_macros`."""
    return (
        f"HEAD_DIM={dims[0]}", f"HEAD_DIM_V={dims[1]}", f"STAGES={_backward_stages(dims, adds_dq)}",
        element(dtype), f"SOFTCAP={int(softcap)}", f"ADD_DQ={int(adds_dq)}",
        f"SPLIT_STATS={int(splits_stats(dtype, dims, softcap, adds_dq))}", *_if_stream_kv(stream_kv),
        *if_captured(captured),
    )  # fmt: skip


def _holds_keys(dims: tuple[int, int], adds_dq: bool) -> bool:
    """Whether the backward kernel keeps keys and values in registers and issues a block's wgmmas together (kHold)."""
    return adds_dq and dims[0] == 64


def _backward_stages(dims: tuple[int, int], adds_dq: bool) -> int:
    """Stages of queries, and buffers of dS, of the backward kernel."""
    return _STAGES + _holds_keys(dims, adds_dq)


def splits_stats(dtype: torch.dtype, dims: tuple[int, int], softcap: bool, adds_dq: bool) -> bool:
    """Whether the backward kernel takes row statistics as bf16 terms, 16 bytes a row (SPLIT_STATS)."""
    return adds_dq and not softcap and dims in ((64, 64), (128, 128)) and dtype == torch.bfloat16


def queries_macros(
    dtype: torch.dtype, dims: tuple[int, int], softcap: bool, stream_kv: bool = False, captured: bool = False
) -> tuple[str, ...]:
    """Macros of a kernel for dq; ``stream_kv`` and ``captured`` as in `forward_macros`."""
    stages, stages_v = _QUERIES_STAGES[dims]
    return (
        *_part_defines(dtype, dims, softcap, QUERIES_WIDTH[dims]), f"STAGES={stages}", f"STAGES_V={stages_v}",
        f"STAGED={int(_has_room(dims))}", *_if_stream_kv(stream_kv), *if_captured(captured),
    )  # fmt: skip


def if_captured(captured: bool) -> tuple[str, ...]:
    """Macro of a kernel that reads a mask's numbers from memory."""
    return ("CAPTURED=1",) if captured else ()


def _if_stream_kv(stream_kv: bool) -> tuple[str, ...]:
    return ("STREAM_KV=1",) if stream_kv else ()


def postprocess_keys_macros(
    dtype: torch.dtype, head_dim: int, stream_kv: bool = False, captured: bool = False
) -> tuple[str, ...]:
    """Macros of a kernel that finishes dk and dv; ``stream_kv`` and ``captured`` as in `forward_macros`."""
    return (f"HEAD_DIM={head_dim}", element(dtype), *_if_stream_kv(stream_kv), *if_captured(captured))


def postprocess_dq_macros(dtype: torch.dtype, head_dim: int, concurrent: bool = False) -> tuple[str, ...]:
    """Macros of a kernel that finishes dq; ``concurrent``: it runs while another kernel sends dk and dv."""
    return (f"HEAD_DIM={head_dim}", element(dtype), *(("CONCURRENT=1",) if concurrent else ()))


def delta_macros(dtype: torch.dtype, head_dim_v: int, captured: bool = False) -> tuple[str, ...]:
    """Macros of the kernel for row statistics if it also computes delta; ``captured`` as in `forward_macros`."""
    return ("DELTA=1", f"HEAD_DIM_V={head_dim_v}", element(dtype), *if_captured(captured))


def keys_macros(dtype: torch.dtype, dims: tuple[int, int], softcap: bool, captured: bool = False) -> tuple[str, ...]:
    """Macros of a kernel for dk and dv of `PART_TILES`; ``captured`` as in `forward_macros`."""
    return (
        *_part_defines(dtype, dims, softcap, PART_TILES[dims][1]), f"STAGES={_STAGES}", *if_captured(captured)
    )  # fmt: skip


def _has_room(dims: tuple[int, int]) -> bool:
    """Whether shared memory has room to stage the results of a tile of queries next to the next queries."""
    return max(dims) <= 128


def _query_stages(dims: tuple[int, int]) -> int:
    """Stages of queries of the forward kernel."""
    return 2 if _has_room(dims) else 1


def common_kernels() -> list[tuple[str, tuple[str, ...]]]:
    """Name and macros of the kernels that most models use, deterministic or not; wheels contain them precompiled."""
    found: list[tuple[str, tuple[str, ...]]] = [("preprocess", ())]
    for dtype, dim in itertools.product((torch.bfloat16, torch.float16), (64, 128)):
        dims = (dim, dim)
        for stream_kv in (False, True):
            found += [("forward", forward_macros(dtype, dims, tile, False, stream_kv)) for tile in FORWARD_TILES[dims]]
            found += [
                ("backward", backward_macros(dtype, dims, False, True, stream_kv)),
                ("backward", backward_macros(dtype, dims, False, False, stream_kv)),
                ("backward_queries", queries_macros(dtype, dims, False, stream_kv)),
                ("postprocess_keys", postprocess_keys_macros(dtype, dim, stream_kv)),
                ("postprocess_dq", postprocess_dq_macros(dtype, dim, stream_kv)),
            ]
        found += [
            ("preprocess", delta_macros(dtype, dim)),
            ("row_delta", (f"HEAD_DIM_V={dim}", element(dtype))),
        ]
    return found


def source_of(name: str) -> str:
    """Path of a kernel's source, relative to the source folder."""
    return f"attention/sm90/{name}.cu"


def params(
    name: str, *, stream_kv: bool = False, captured: bool = False, delta: bool = False
) -> type[ctypes.Structure]:
    """The parameters of a kernel, read from its source.

    Args:
        name: of the kernel.
        stream_kv, captured: as in `forward_macros`.
        delta: as of `delta_macros`.
    """
    chosen = {"STREAM_KV=1": stream_kv, "CAPTURED=1": captured, "DELTA=1": delta}
    return kernel_params(source_of(name), tuple(macro for macro, there in chosen.items() if there))


@cache
def forward_kernel(
    device: torch.device,
    dtype: torch.dtype,
    dims: tuple[int, int],
    tile: tuple[int, int],
    softcap: bool,
    stream_kv: bool = False,
    captured: bool = False,
) -> Kernel:
    """Attention forward; ``tile``: one of `FORWARD_TILES`."""
    (rows, keys), stages = tile, _forward_stages(tile)
    defines = forward_macros(dtype, dims, tile, softcap, stream_kv, captured)
    tiles = rows * _query_stages(dims) * dims[0] + stages * keys * sum(dims)  # q, k, v
    return _load(device, "forward", defines, 128 + 2 * rows, 2 * tiles + stages * 8 * rows + _SPARE_BYTES)


@cache
def backward_kernel(
    device: torch.device,
    dtype: torch.dtype,
    dims: tuple[int, int],
    softcap: bool,
    adds_dq: bool,
    stream_kv: bool = False,
    captured: bool = False,
) -> Kernel:
    """Attention backward: dk and dv, and with ``adds_dq`` dq."""
    defines = backward_macros(dtype, dims, softcap, adds_dq, stream_kv, captured)
    stages = _backward_stages(dims, adds_dq)
    tiles = (128 + 64 * stages) * sum(dims) + stages * 128 * 64  # k, v, q, dout, dS
    shared = 2 * tiles + 4 * 64 * dims[0] + stages * (512 + 1024) + _SPARE_BYTES
    shared += 4 * 2 * 128 * dims[0] if _holds_keys(dims, adds_dq) else 0  # staging of dk and dv
    shared += (stages * 2 + 4) * 1024 if splits_stats(dtype, dims, softcap, adds_dq) else stages * 512
    return _load(device, "backward", defines, 384, shared)


@cache
def backward_keys_kernel(
    device: torch.device, dtype: torch.dtype, dims: tuple[int, int], softcap: bool, captured: bool = False
) -> Kernel:
    """Attention backward of `PART_TILES`: dk and dv."""
    keys, queries = PART_TILES[dims]
    defines = keys_macros(dtype, dims, softcap, captured)
    tiles = (keys + _STAGES * queries) * sum(dims) + keys * queries  # k and v, q and dout, P
    return _load(device, "backward_keys", defines, 384, 2 * tiles + _STAGES * 8 * queries + _SPARE_BYTES)


@cache
def backward_queries_kernel(
    device: torch.device,
    dtype: torch.dtype,
    dims: tuple[int, int],
    softcap: bool,
    stream_kv: bool = False,
    captured: bool = False,
) -> Kernel:
    """Attention backward: dq."""
    defines = queries_macros(dtype, dims, softcap, stream_kv, captured)
    stages, stages_v = _QUERIES_STAGES[dims]
    tiles = 128 * sum(dims) + QUERIES_WIDTH[dims] * (stages * dims[0] + stages_v * dims[1])
    tiles += 128 * dims[0] if _has_room(dims) else 0  # staging of dq
    return _load(device, "backward_queries", defines, 384, 2 * tiles + stages * 1024 + _SPARE_BYTES)


def _part_defines(dtype: torch.dtype, dims: tuple[int, int], softcap: bool, width: int) -> tuple[str, ...]:
    return (
        f"HEAD_DIM={dims[0]}", f"HEAD_DIM_V={dims[1]}", f"WIDTH={width}",
        element(dtype), f"SOFTCAP={int(softcap)}",
    )  # fmt: skip


@cache
def small_kernel(device: torch.device, name: str, defines: tuple[str, ...]) -> Kernel:
    """One of ``preprocess``, ``row_delta``, ``postprocess_dq``, ``postprocess_keys``."""
    return _load(device, name, defines, 256, 0)


def _load(device: torch.device, name: str, defines: tuple[str, ...], threads: int, shared_bytes: int) -> Kernel:
    image = hopper_build.build(source_of(name), defines)
    return hopper_driver.load_kernel(image, f"ffa_{name}", threads, shared_bytes, device)
