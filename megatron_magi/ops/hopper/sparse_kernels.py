"""The sparse Hopper kernels by what they are compiled for, and how queries are cut into their tiles."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from megatron_magi.cuda import build, driver
from megatron_magi.cuda.driver import Kernel
from megatron_magi.ops.hopper.kernels import element
from megatron_magi.ops.hopper.sparse_params import SparseTiles
from megatron_magi.ops.hopper.support import work_counter
from megatron_magi.ops.sparse_pattern import SparsePattern, num_blocks

DIMS = ((64, 64), (128, 128))
PLACES = 128
"""Of a tile: queries times heads."""
PIECE = 64
"""Keys of a step of the backward, and of a box of keys."""
_FORWARD_STEP = 128
_BEHIND_ALL = 1 << 30


@cache
def _load(device: torch.device, name: str, defines: tuple[str, ...], threads: int, shared_bytes: int) -> Kernel:
    image = build.build(f"attention/sm90/{name}.cu", defines)
    return driver.load_kernel(image, f"ffa_{name}", threads, shared_bytes, device)


def forward_kernel(device: torch.device, dtype: torch.dtype, dim: int, indexed: bool) -> Kernel:
    """Forward; ``indexed``: lists are of single keys."""
    defines = f"HEAD_DIM={dim}", f"INDEXED={int(indexed)}", element(dtype)
    # two stages of q, k and v
    return _load(device, "sparse_forward", defines, 384, 2 * dim * (2 * PLACES + 4 * _FORWARD_STEP) + 1024)


def backward_kernel(device: torch.device, dtype: torch.dtype, dim: int, indexed: bool, adds_keys: bool) -> Kernel:
    """Backward: dq, and with ``adds_keys`` sums of dk and dv."""
    defines = f"HEAD_DIM={dim}", f"INDEXED={int(indexed)}", element(dtype), f"ADD_KEYS={int(adds_keys)}"
    # q and dout, two stages of k and v, twice P and dS
    tiles = 2 * PLACES * dim + 4 * PIECE * dim + 4 * PLACES * PIECE
    return _load(device, "sparse_backward", defines, 384, 2 * tiles + 2048)


def backward_keys_kernel(device: torch.device, dtype: torch.dtype, dim: int) -> Kernel:
    """Backward: dk and dv, by lists of queries."""
    # k and v, four stages of q and dout; two fp32 tiles that change hands; row statistics
    shared = 2 * 10 * PIECE * dim + 8 * PIECE * dim + 4 * 512 + 1024
    return _load(device, "sparse_backward_keys", (f"HEAD_DIM={dim}", element(dtype)), 384, shared)


def small_kernel(device: torch.device, name: str) -> Kernel:
    """A kernel without macros and shared memory."""
    return _load(device, name, (), 256, 0)


def heads_of_tile(group: int) -> int:
    """Heads of a group whose rows share a tile: the largest power of two that divides the group, and fits."""
    return min(group & -group, PLACES)


def query_box(t: Tensor, group: int) -> tuple[Tensor, int, int]:
    """What is loaded of a tensor of queries at once: the tensor, rows and heads."""
    heads = min(heads_of_tile(group), PIECE)
    return t, PIECE // heads, heads


def cut_tiles(q: Tensor, k: Tensor, pattern: SparsePattern, stream: int) -> SparseTiles:
    """The tiles of queries, and what a kernel has to know of the pattern beside its lists."""
    num_rows, heads_kv = q.shape[0], k.shape[1]
    group = q.shape[1] // heads_kv
    heads = heads_of_tile(group)
    query_blocks, block_tiles = num_blocks(num_rows, pattern.q_block), num_blocks(pattern.q_block, PLACES // heads)
    packs = group // heads
    return SparseTiles(
        counter=work_counter(q.device, stream).data_ptr(),
        num_items=heads_kv * packs * query_blocks * block_tiles, query_blocks=query_blocks, block_tiles=block_tiles,
        packs=packs, heads_kv=heads_kv, list_heads=pattern.num_lists, query_block=pattern.q_block,
        key_block=pattern.k_block, key_blocks=num_blocks(k.shape[0], pattern.k_block),
        num_rows=num_rows, num_keys=k.shape[0],
        reach=k.shape[0] - num_rows + 1 if pattern.causal else _BEHIND_ALL,
        log2_heads=heads.bit_length() - 1,
    )  # fmt: skip
