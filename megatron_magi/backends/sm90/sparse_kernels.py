"""The sparse Hopper kernels by compile-time parameters, and their tiles of queries."""

from __future__ import annotations

import ctypes
from functools import cache

import torch
from torch import Tensor

from megatron_magi.backends.sm90 import tuning
from megatron_magi.backends.sm90.kernels import element
from megatron_magi.backends.sm90.support import loadable
from megatron_magi.cuda import build, driver
from megatron_magi.cuda.driver import Kernel
from megatron_magi.cuda.params import struct
from megatron_magi.operands.sparse_pattern import SparsePattern, num_blocks

DIMS = ((64, 64), (128, 128))
LATENT_DIMS = (576, 512)
PIECE = 64
"""Places (queries times heads) of a warpgroup; keys of a step of the backward, and of a box of keys."""
BEHIND_ALL = 1 << 30
"""More than there are keys, or queries."""


@cache
def _load(device: torch.device, name: str, defines: tuple[str, ...], threads: int, shared_bytes: int) -> Kernel:
    image = build.build(f"attention/sm90/{name}.cu", defines)
    return driver.load_kernel(image, f"ffa_{name}", threads, shared_bytes, device)


def forward_kernel(device: torch.device, dtype: torch.dtype, dim: int, groups: int, indexed: bool) -> Kernel:
    """Forward; ``groups``: 1 or 2 times 64 places a tile; ``indexed``: lists are of single keys."""
    defines = f"HEAD_DIM={dim}", f"GROUPS={groups}", f"INDEXED={int(indexed)}", element(dtype)
    # two stages of queries, of keys, of values; of single keys a third
    shared = (2 * dim * (6 + indexed) * PIECE + 1024) * groups
    return _load(device, "sparse_forward", defines, 128 * (groups + 1), shared)


def backward_kernel(device: torch.device, dtype: torch.dtype, dim: int, stored: bool) -> Kernel:
    """Backward of single keys: dq, and sums of dk and dv; ``stored``: instead, what each query gives to them."""
    defines = f"HEAD_DIM={dim}", f"STORED={int(stored)}", element(dtype)
    # q and dout, two stages of k and v; twice P and dS; barriers, indices
    shared = 2 * (8 * PIECE * dim + 8 * PIECE * PIECE) + 3072
    return _load(device, "sparse_backward", defines, 512, shared)


def backward_queries_kernel(device: torch.device, dtype: torch.dtype, dim: int) -> Kernel:
    """Backward of blocks: dq, by lists of keys."""
    shared = 2 * 14 * PIECE * dim + 1024  # q and dout, five stages of k and v
    return _load(device, "sparse_backward_queries", (f"HEAD_DIM={dim}", element(dtype)), 384, shared)


def backward_keys_kernel(device: torch.device, dtype: torch.dtype, dim: int, k_block: int, adds_dq: bool) -> Kernel:
    """Backward: dk and dv by lists of queries; with ``adds_dq``, for blocks of 128 keys, also sums of dq."""
    # Of blocks of 64 keys two teams of one warpgroup, else one team of two; stages of q and dout together.
    teams, stages = (2, 5) if k_block == PIECE else (1, 6 if adds_dq else 8)
    shared = teams * 2 * dim * (2 * k_block + stages * PIECE)
    if adds_dq:  # two buffers of dS of both warpgroups, and dQ of both
        shared += 2 * 4 * PIECE * PIECE + 4 * PIECE * dim
    shared += 3072  # row statistics, barriers
    defines = f"HEAD_DIM={dim}", f"K_BLOCK={k_block}", f"ADD_DQ={int(adds_dq)}", element(dtype)
    return _load(device, "sparse_backward_keys", defines, 384, shared)


def latent_kernel(device: torch.device, dtype: torch.dtype) -> Kernel:
    """Forward over lists of latent keys."""
    # q, two buffers of keys, P; row statistics and barriers
    shared = 2 * PIECE * (3 * LATENT_DIMS[0] + PIECE) + 2048
    return _load(device, "latent_forward", (element(dtype),), 384, shared)


def latent_backward_kernel(device: torch.device, dtype: torch.dtype, stored: bool) -> Kernel:
    """Backward over lists of latent keys: dq, and sums of the gradient of keys; ``stored``: instead, what each query
    gives to it.
    """
    # q, a buffer of keys, dout, P and dS; barriers
    shared = 2 * PIECE * (2 * LATENT_DIMS[0] + LATENT_DIMS[1] + 2 * PIECE) + 1024
    return _load(device, "latent_backward", (f"STORED={int(stored)}", element(dtype)), 512, shared)


def small_kernel(device: torch.device, name: str, defines: tuple[str, ...] = ()) -> Kernel:
    """One without tiles: 256 threads a block, no dynamic shared memory."""
    return _load(device, name, defines, 256, 0)


def heads_of_tile(group: int, groups: int) -> int:
    """Heads of a group whose rows share a tile: the largest power of two that divides the group, and fits."""
    return min(group & -group, groups * PIECE)


def forward_groups(group: int, q_block: int) -> int:
    """Consumer warpgroups of the forward: one where the queries of a block and their heads fill no more."""
    return 1 if heads_of_tile(group, 1) * q_block <= PIECE and group & -group <= PIECE else 2


def readable(t: Tensor) -> Tensor:
    """The tensor, or a copy that TMA and gathering threads, which use 32-bit strides, can read."""
    t = loadable(t)
    return t if t.stride(0) < 1 << 31 else t.contiguous()


def query_box(t: Tensor, group: int) -> tuple[Tensor, int, int]:
    """TMA box of a tensor of queries: the tensor, rows and heads."""
    heads = heads_of_tile(group, 1)
    return t, PIECE // heads, heads


def boxes(q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> tuple[tuple[Tensor, int] | tuple[Tensor, int, int], ...]:
    """TMA boxes of the tensors of a backward: the tensor, rows, and heads."""
    group = q.shape[1] // k.shape[1]
    return query_box(q, group), (k, PIECE), (v, PIECE), query_box(dout, group)


def cut_tiles(q: Tensor, k: Tensor, pattern: SparsePattern, groups: int = 2) -> ctypes.Structure:
    """The tiles of queries, and the parameters of the pattern except its lists."""
    num_rows, heads_kv = q.shape[0], k.shape[1]
    group = q.shape[1] // heads_kv
    heads = heads_of_tile(group, groups)
    query_blocks = num_blocks(num_rows, pattern.q_block)
    block_tiles = num_blocks(pattern.q_block, groups * PIECE // heads)
    packs = group // heads
    return struct("attention/sm90/sparse_tiles.cuh", "SparseTiles")(
        num_items=heads_kv * packs * query_blocks * block_tiles, query_blocks=query_blocks, block_tiles=block_tiles,
        packs=packs, heads_kv=heads_kv, list_heads=pattern.num_lists, query_block=pattern.q_block,
        key_block=pattern.k_block, key_blocks=num_blocks(k.shape[0], pattern.k_block),
        num_rows=num_rows, num_keys=k.shape[0],
        reach=k.shape[0] - num_rows + 1 if pattern.causal else BEHIND_ALL,
        log2_heads=heads.bit_length() - 1,
        # If keys and values exceed the L2 cache, tiles that share many keys start together on all SMs.
        long_list=k.shape[0] // 64 if k.shape[0] * 2 * k.shape[2] * k.element_size() > tuning.L2_BYTES else BEHIND_ALL,
    )  # fmt: skip
