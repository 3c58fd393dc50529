"""Sparse attention on Hopper GPUs: the kernels ``csrc/attention/sm90/sparse_*``.

Takes fp16 and bf16, head dims 64 and 128. Lists are read on the device alone.
"""

from __future__ import annotations

import logging
from functools import cache

import torch
from torch import Tensor

from megatron_magi.cuda import build, driver
from megatron_magi.cuda.driver import Kernel
from megatron_magi.cuda.launch import Launch, prepared
from megatron_magi.ops.hopper.kernels import element
from megatron_magi.ops.hopper.sparse_params import (
    SparseBackwardParams,
    SparseForwardParams,
    SparseListsParams,
    SparseTiles,
)
from megatron_magi.ops.hopper.support import (
    LOG2_E,
    check_support,
    current_stream,
    grid_size,
    kernels_exist,
    loadable,
    why_not,
    work_counter,
)
from megatron_magi.ops.sparse_pattern import SparsePattern, num_blocks

logger = logging.getLogger(__name__)

DIMS = ((64, 64), (128, 128))
_PLACES = 128  # of a tile: queries times heads
_BEHIND_ALL = 1 << 30
_STEP, _KEY_STEP = 128, 64  # keys of a step, forward and backward
_LISTS_OF_BLOCK = 8  # of the kernel that makes lists


@cache
def _kernel(device: torch.device, name: str, defines: tuple[str, ...], threads: int, shared_bytes: int) -> Kernel:
    image = build.build(f"attention/sm90/{name}.cu", defines)
    return driver.load_kernel(image, f"ffa_{name}", threads, shared_bytes, device)


def is_supported(q: Tensor, v: Tensor) -> bool:
    """Whether both passes take tensors like these."""
    return kernels_exist(q.device, q.dtype, (q.shape[2], v.shape[2]), DIMS)


def say_why_not(q: Tensor, v: Tensor) -> None:
    """Logs why tensors on a GPU are left to the definition, each reason once."""
    _warn_once(q.device, q.dtype, (q.shape[2], v.shape[2]))


@cache
def _warn_once(device: torch.device, dtype: torch.dtype, dims: tuple[int, int]) -> None:
    reason = why_not(device, dtype, dims, DIMS)
    logger.warning("sparse attention falls back to the dense definition, slow and large: %s", reason)


class _Lists:
    """Lists as the kernels read them: int32, with what stands for a mask made of it on the device."""

    def __init__(self, pattern: SparsePattern) -> None:
        self.pattern = pattern
        self.offsets: Tensor | None = None
        self.counts: Tensor | None = None
        if pattern.is_mask:
            self.entries, self.counts = lists_of_mask(pattern.tensors[0])
        else:
            entries = pattern.tensors[-1].to(torch.int32)
            self.entries = entries if entries.stride(-1) == 1 else entries.contiguous()
        if len(pattern.tensors) == 2:
            self.offsets = pattern.tensors[0].to(torch.int32).contiguous()

    def point(self, tiles: SparseTiles) -> None:
        """Sets the addresses of the lists."""
        tiles.entries, tiles.width = self.entries.data_ptr(), self.entries.shape[-1]
        if self.offsets is None:
            tiles.head_step, tiles.list_step, _ = self.entries.stride()
        tiles.offsets = 0 if self.offsets is None else self.offsets.data_ptr()
        tiles.counts = 0 if self.counts is None else self.counts.data_ptr()


def lists_of_mask(mask: Tensor) -> tuple[Tensor, Tensor]:
    """``(entries, counts)``, int32 ``[lists, rows, columns]`` and ``[lists, rows]``, of a mask bool of that shape."""
    lists, rows, columns = mask.shape
    entries = torch.empty((lists, rows, max(columns, 1)), dtype=torch.int32, device=mask.device)
    if not columns or not lists * rows:
        return entries, torch.zeros((lists, rows), dtype=torch.int32, device=mask.device)
    counts = torch.empty((lists, rows), dtype=torch.int32, device=mask.device)
    head_stride, row_stride, column_stride = mask.stride()

    def make() -> Launch:
        params = SparseListsParams(
            head_stride=head_stride, row_stride=row_stride, column_stride=column_stride,
            num_rows=rows, num_columns=columns, num_lists=lists * rows,
        )  # fmt: skip
        kernel = _kernel(mask.device, "sparse_lists", (), 256, 0)
        return Launch(kernel, num_blocks(lists * rows, _LISTS_OF_BLOCK), params)

    launch = prepared(("sparse_lists", mask.device, mask.shape, mask.stride()), make)
    with launch.lock:
        params = launch.params
        params.mask, params.entries, params.counts = mask.data_ptr(), entries.data_ptr(), counts.data_ptr()
        launch.fire(current_stream(mask.device))
    return entries, counts


def heads_of_tile(group: int) -> int:
    """Heads of a group whose rows share a tile: the largest power of two that divides the group, and fits."""
    return min(group & -group, _PLACES)


def _tiles(q: Tensor, k: Tensor, pattern: SparsePattern, stream: int) -> SparseTiles:
    num_rows, heads_kv = q.shape[0], k.shape[1]
    group = q.shape[1] // heads_kv
    heads = heads_of_tile(group)
    query_blocks, block_tiles = num_blocks(num_rows, pattern.q_block), num_blocks(pattern.q_block, _PLACES // heads)
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


def _query_box(t: Tensor, group: int) -> tuple[Tensor, int, int]:
    heads = min(heads_of_tile(group), 64)
    return t, 64 // heads, heads


def _indexed(pattern: SparsePattern) -> int:
    return int(pattern.k_block == 1)


def forward_macros(dtype: torch.dtype, dim: int, indexed: int) -> tuple[str, ...]:
    """What a forward kernel is compiled for."""
    return f"HEAD_DIM={dim}", f"INDEXED={indexed}", element(dtype)


def backward_macros(dtype: torch.dtype, dim: int, indexed: int) -> tuple[str, ...]:
    """What a backward kernel is compiled for."""
    return forward_macros(dtype, dim, indexed)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: SparsePattern,
    softmax_scale: float,
    *,
    sink_lse: Tensor | None,
    return_max_logits: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """``(out, lse, max_logits)`` of checked arguments; see `sparse_reference.forward`.

    Raises:
        ValueError: the device, dtype or head dims are not supported.
    """
    check_support(q, (q.shape[2], v.shape[2]), DIMS)
    num_rows, num_heads, dim = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty((num_rows, num_heads), dtype=torch.float32, device=q.device)
    max_logits = lse.new_full((num_heads,), -torch.inf) if return_max_logits else None
    if sink_lse is not None:
        sink_lse = sink_lse.expand(num_rows, num_heads)
    if not num_rows or not k.shape[0]:
        lse.copy_(lse.new_tensor(-torch.inf) if sink_lse is None else sink_lse)
        return out.zero_(), lse, max_logits
    q, k, v = map(loadable, (q, k, v))
    stream, lists, indexed = current_stream(q.device), _Lists(pattern), _indexed(pattern)

    def make() -> Launch:
        params = SparseForwardParams(
            tiles=_tiles(q, k, pattern, stream),
            k_row=k.stride(0), k_head=k.stride(1), v_row=v.stride(0), v_head=v.stride(1),
            out_row=out.stride(0), out_head=out.stride(1), lse_row=lse.stride(0), lse_head=lse.stride(1),
            scale_log2=softmax_scale * LOG2_E, logit_scale=softmax_scale,
        )  # fmt: skip
        if sink_lse is not None:
            params.sink_row, params.sink_head = sink_lse.stride()
        shared = 2 * dim * (2 * _PLACES + 4 * _STEP) + 1024
        kernel = _kernel(q.device, "sparse_forward", forward_macros(q.dtype, dim, indexed), 384, shared)
        maps = (_query_box(q, num_heads // k.shape[1]), (k, 64), (v, 64))
        return Launch(kernel, grid_size(q.device, params.tiles.num_items, 0), params, maps)

    key = (
        "sparse_forward", q.device, stream, q.dtype, softmax_scale, indexed, pattern.q_block, pattern.k_block,
        pattern.causal, pattern.num_lists, q.shape, k.shape, q.stride(), k.stride(), v.stride(),
        None if sink_lse is None else sink_lse.stride(),
    )  # fmt: skip
    launch = prepared(key, make)
    with launch.lock:
        launch.point_maps(q.data_ptr(), k.data_ptr(), v.data_ptr())
        params = launch.params
        lists.point(params.tiles)
        params.keys, params.values = k.data_ptr(), v.data_ptr()
        params.out, params.lse = out.data_ptr(), lse.data_ptr()
        params.sink_lse = 0 if sink_lse is None else sink_lse.data_ptr()
        params.max_logits = 0 if max_logits is None else max_logits.data_ptr()
        launch.fire(stream)
    return out, lse, max_logits


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    pattern: SparsePattern,
    softmax_scale: float,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """``(dq, dk, dv)``; see `sparse_reference.backward`.

    Raises:
        ValueError: the device, dtype or head dims are not supported; deterministic results are asked for.
    """
    check_support(q, (q.shape[2], v.shape[2]), DIMS)
    if deterministic:
        raise ValueError(
            "deterministic: the sparse kernels add gradients of keys in no fixed order; use impl 'reference'"
        )
    num_rows, num_heads, dim = q.shape
    num_keys, heads_kv = k.shape[:2]
    if not num_rows or not num_keys:
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    q, k, v, dout = (loadable(t) for t in (q, k, v, dout.to(q.dtype)))
    stream, lists, indexed = current_stream(q.device), _Lists(pattern), _indexed(pattern)
    sum_rows = num_blocks(num_keys, _KEY_STEP) * _KEY_STEP
    sums = torch.zeros((2, heads_kv, sum_rows, dim), dtype=torch.float32, device=q.device)

    def make() -> Launch:
        params = SparseBackwardParams(
            tiles=_tiles(q, k, pattern, stream),
            k_row=k.stride(0), k_head=k.stride(1), v_row=v.stride(0), v_head=v.stride(1),
            lse_row=lse.stride(0), lse_head=lse.stride(1), delta_row=delta.stride(0), delta_head=delta.stride(1),
            dq_row=dq.stride(0), dq_head=dq.stride(1), sum_rows=sum_rows,
            scale=softmax_scale, scale_log2=softmax_scale * LOG2_E,
        )  # fmt: skip
        # q and dout, two stages of k and v, twice P and dS
        shared = 2 * (2 * _PLACES * dim + 4 * _KEY_STEP * dim + 4 * _PLACES * _KEY_STEP) + 2048
        kernel = _kernel(q.device, "sparse_backward", backward_macros(q.dtype, dim, indexed), 384, shared)
        group = num_heads // heads_kv
        maps = (_query_box(q, group), (k, 64), (v, 64), _query_box(dout, group))
        return Launch(kernel, grid_size(q.device, params.tiles.num_items, 0), params, maps)

    key = (
        "sparse_backward", q.device, stream, q.dtype, softmax_scale, indexed, pattern.q_block, pattern.k_block,
        pattern.causal, pattern.num_lists, q.shape, k.shape, q.stride(), k.stride(), v.stride(), dout.stride(),
        lse.stride(), delta.stride(),
    )  # fmt: skip
    launch = prepared(key, make)
    with launch.lock:
        launch.point_maps(q.data_ptr(), k.data_ptr(), v.data_ptr(), dout.data_ptr())
        params = launch.params
        lists.point(params.tiles)
        params.keys, params.values = k.data_ptr(), v.data_ptr()
        params.lse, params.delta, params.dq = lse.data_ptr(), delta.data_ptr(), dq.data_ptr()
        params.dk_sums, params.dv_sums = sums[0].data_ptr(), sums[1].data_ptr()
        launch.fire(stream)
    return dq, _finished(sums[0], k, softmax_scale), _finished(sums[1], v, 1.0)


def _finished(sums: Tensor, like: Tensor, factor: float) -> Tensor:
    """A gradient of keys, of its sums as the kernel has them: 2t, 2t + 1, 2t + 8, 2t + 9 of 16 columns together."""
    grad = torch.empty(like.shape, dtype=like.dtype, device=like.device)
    ordered = sums[:, : like.shape[0]].unflatten(2, (-1, 4, 2, 2)).permute(1, 0, 2, 4, 3, 5)
    torch.mul(ordered, factor, out=grad.view(ordered.shape))
    return grad
