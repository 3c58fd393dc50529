"""The Hopper kernels by compile-time parameters: a function for each, named as its source."""

from __future__ import annotations

import ctypes
import itertools
from functools import cache
from typing import NamedTuple

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


def source_of(name: str) -> str:
    """Path of a kernel's source, relative to the source folder."""
    return f"attention/sm90/{name}.cu"


def params(name: str) -> type[ctypes.Structure]:
    """The parameters of a kernel on which no macro depends, read from its source."""
    return kernel_params(source_of(name))


class KernelVariant(NamedTuple):
    """A kernel with its compile-time parameters.

    Attributes:
        name: of the source, and of the kernel in it without a prefix.
        macros: with which it is compiled, ``NAME=VALUE``.
        threads: of a block.
        shared_bytes: dynamic shared memory of a block.
    """

    name: str
    macros: tuple[str, ...] = ()
    threads: int = 256
    shared_bytes: int = 0

    @property
    def build_args(self) -> tuple[str, tuple[str, ...]]:
        """Path of the source, relative to the source folder, and macros: what `build.build` takes."""
        return source_of(self.name), self.macros

    @property
    def params(self) -> type[ctypes.Structure]:
        """Its parameters, as its source describes them."""
        return kernel_params(*self.build_args)

    def load(self, device: torch.device) -> Kernel:
        """The kernel on a device, compiled on first use."""
        return loaded(self, device)


@cache
def loaded(variant: KernelVariant, device: torch.device) -> Kernel:
    """See `KernelVariant.load`."""
    return _load(device, *variant)


def _load(device: torch.device, name: str, macros: tuple[str, ...], threads: int, shared_bytes: int) -> Kernel:
    image = hopper_build.build(source_of(name), macros)
    return hopper_driver.load_kernel(image, f"ffa_{name}", threads, shared_bytes, device)


def _head_dims(dims: tuple[int, int]) -> tuple[str, str]:
    return f"HEAD_DIM={dims[0]}", f"HEAD_DIM_V={dims[1]}"


def _optional(**macros: bool) -> tuple[str, ...]:
    """Macros that are defined as 1 or not at all."""
    return tuple(f"{name}=1" for name, is_defined in macros.items() if is_defined)


@cache
def forward(
    dtype: torch.dtype,
    dims: tuple[int, int],
    tile: tuple[int, int],
    softcap: bool,
    stream_kv: bool = False,
    captured: bool = False,
) -> KernelVariant:
    """Attention forward.

    Args:
        dtype, dims: of the tensors.
        tile: one of `FORWARD_TILES`.
        softcap: logits are capped.
        stream_kv: some keys are fetched while it runs.
        captured: the mask's numbers are read from memory, see `changing_mask`.
    """
    (rows, keys), stages, query_stages = tile, _TALL_STAGES if tile[0] > 128 else _STAGES, 2 if _has_room(dims) else 1
    macros = (
        *_head_dims(dims), f"GROUPS={rows // 64}", f"BLOCK_N={keys}", f"STAGES={stages}", f"Q_STAGES={query_stages}",
        f"STAGED={int(_has_room(dims))}", element(dtype), f"SOFTCAP={int(softcap)}",
        *_optional(STREAM_KV=stream_kv, CAPTURED=captured),
    )  # fmt: skip
    tiles = rows * query_stages * dims[0] + stages * keys * sum(dims)  # q, k, v
    return KernelVariant("forward", macros, 128 + 2 * rows, 2 * tiles + stages * 8 * rows + _SPARE_BYTES)


def _has_room(dims: tuple[int, int]) -> bool:
    """Whether shared memory has room to stage the results of a tile of queries next to the next queries."""
    return max(dims) <= 128


@cache
def backward(
    dtype: torch.dtype,
    dims: tuple[int, int],
    softcap: bool,
    adds_dq: bool,
    stream_kv: bool = False,
    captured: bool = False,
) -> KernelVariant:
    """Attention backward of `WHOLE_DIMS`: dk and dv, and with ``adds_dq`` sums of dq; others as of `forward`."""
    splits, holds = splits_stats(dtype, dims, softcap, adds_dq), adds_dq and dims[0] == 64
    stages = _STAGES + holds  # of queries, and buffers of dS; `holds`: see kHold
    macros = (
        *_head_dims(dims), f"STAGES={stages}", element(dtype), f"SOFTCAP={int(softcap)}", f"ADD_DQ={int(adds_dq)}",
        f"SPLIT_STATS={int(splits)}", *_optional(STREAM_KV=stream_kv, CAPTURED=captured),
    )  # fmt: skip
    tiles = (128 + 64 * stages) * sum(dims) + stages * 128 * 64  # k, v, q, dout, dS
    shared = 2 * tiles + stages * (512 + 1024) + _SPARE_BYTES
    shared += 4 * 2 * 128 * dims[0] if holds else 4 * 64 * dims[0]  # staging of dk and dv, or of dq
    shared += (stages * 2 + 4) * 1024 if splits else stages * 512
    return KernelVariant("backward", macros, 384, shared)


def splits_stats(dtype: torch.dtype, dims: tuple[int, int], softcap: bool, adds_dq: bool) -> bool:
    """Whether the backward kernel takes row statistics as bf16 terms, 16 bytes a row (SPLIT_STATS)."""
    return adds_dq and not softcap and dims in ((64, 64), (128, 128)) and dtype == torch.bfloat16


@cache
def backward_keys(dtype: torch.dtype, dims: tuple[int, int], softcap: bool, captured: bool = False) -> KernelVariant:
    """Attention backward of `PART_TILES`: dk and dv; ``captured`` as of `forward`."""
    keys, queries = PART_TILES[dims]
    macros = (
        *_head_dims(dims), f"WIDTH={queries}", element(dtype), f"SOFTCAP={int(softcap)}", f"STAGES={_STAGES}",
        *_optional(CAPTURED=captured),
    )  # fmt: skip
    tiles = (keys + _STAGES * queries) * sum(dims) + keys * queries  # k and v, q and dout, P
    return KernelVariant("backward_keys", macros, 384, 2 * tiles + _STAGES * 8 * queries + _SPARE_BYTES)


@cache
def backward_queries(
    dtype: torch.dtype, dims: tuple[int, int], softcap: bool, stream_kv: bool = False, captured: bool = False
) -> KernelVariant:
    """Attention backward: dq; ``stream_kv`` and ``captured`` as of `forward`."""
    (stages, stages_v), width, staged = _QUERIES_STAGES[dims], QUERIES_WIDTH[dims], _has_room(dims)
    macros = (
        *_head_dims(dims), f"WIDTH={width}", element(dtype), f"SOFTCAP={int(softcap)}", f"STAGES={stages}",
        f"STAGES_V={stages_v}", f"STAGED={int(staged)}", *_optional(STREAM_KV=stream_kv, CAPTURED=captured),
    )  # fmt: skip
    tiles = 128 * sum(dims) + width * (stages * dims[0] + stages_v * dims[1])
    tiles += 128 * dims[0] if staged else 0  # staging of dq
    return KernelVariant("backward_queries", macros, 384, 2 * tiles + stages * 1024 + _SPARE_BYTES)


def preprocess(captured: bool = False) -> KernelVariant:
    """Row statistics of the backward, of a given delta; ``captured`` as of `forward`."""
    return KernelVariant("preprocess", _optional(CAPTURED=captured))


def preprocess_delta(dtype: torch.dtype, head_dim_v: int, captured: bool = False) -> KernelVariant:
    """The same kernel if it also computes delta, of an output of this dtype."""
    macros = "DELTA=1", f"HEAD_DIM_V={head_dim_v}", element(dtype), *_optional(CAPTURED=captured)
    return KernelVariant("preprocess", macros)


def postprocess_keys(
    dtype: torch.dtype, head_dim: int, stream_kv: bool = False, captured: bool = False
) -> KernelVariant:
    """dk and dv from their sums; ``stream_kv`` and ``captured`` as of `forward`."""
    optional = _optional(STREAM_KV=stream_kv, CAPTURED=captured)
    return KernelVariant("postprocess_keys", (f"HEAD_DIM={head_dim}", element(dtype), *optional))


def postprocess_dq(dtype: torch.dtype, head_dim: int, concurrent: bool = False) -> KernelVariant:
    """dq from its sums; ``concurrent``: it runs while another kernel sends dk and dv."""
    return KernelVariant("postprocess_dq", (f"HEAD_DIM={head_dim}", element(dtype), *_optional(CONCURRENT=concurrent)))


def row_delta(dtype: torch.dtype, head_dim_v: int) -> KernelVariant:
    """``rowsum(dout * out)``."""
    return KernelVariant("row_delta", (f"HEAD_DIM_V={head_dim_v}", element(dtype)))


def common_kernels() -> list[KernelVariant]:
    """The kernels that most models use, deterministic or not; wheels contain them precompiled."""
    found = [preprocess()]
    for dtype, dim in itertools.product((torch.bfloat16, torch.float16), (64, 128)):
        dims = (dim, dim)
        for stream_kv in (False, True):
            found += [forward(dtype, dims, tile, False, stream_kv) for tile in FORWARD_TILES[dims]]
            found += [
                backward(dtype, dims, False, True, stream_kv),
                backward(dtype, dims, False, False, stream_kv),
                backward_queries(dtype, dims, False, stream_kv),
                postprocess_keys(dtype, dim, stream_kv),
                postprocess_dq(dtype, dim, stream_kv),
            ]
        found += [preprocess_delta(dtype, dim), row_delta(dtype, dim)]
    return found
