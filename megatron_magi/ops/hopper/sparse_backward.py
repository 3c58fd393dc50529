"""Backward of sparse attention on Hopper GPUs.

Of blocks of 128 keys all gradients may come from one kernel along lists of queries, in which dq is added to fp32 sums.
Else, and where results have to repeat bit by bit, dq is computed tile by tile along lists of keys, and dk and dv of
blocks by that kernel without dq. Of single keys dk and dv are added to fp32 sums beside dq, in no fixed order, or to
sums of integers, which need none.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_magi.cuda.launch import Launch, prepared
from megatron_magi.ops.hopper import sparse_kernels as kernels
from megatron_magi.ops.hopper import tuning
from megatron_magi.ops.hopper.kernels import element
from megatron_magi.ops.hopper.sparse_lists import Lists, lists_of_queries
from megatron_magi.ops.hopper.sparse_params import (
    SparseBackwardParams,
    SparseFinishDqParams,
    SparseFinishParams,
    SparseKeysParams,
    SparseStatsParams,
)
from megatron_magi.ops.hopper.support import LOG2_E, current_stream, grid_size, launch_counter
from megatron_magi.ops.sparse_pattern import SparsePattern, num_blocks

_UNIT = 16  # places, of the sums of dq
_ZEROING_BLOCKS = 2048
_FINISHED_ELEMENTS = 256 * 16  # of dk, of a block of the kernel that finishes it


def may_add_dq(q: Tensor, k: Tensor, pattern: SparsePattern) -> bool:
    """Whether one kernel computes all gradients, and is faster: of blocks of 128 keys, where blocks of queries fill its
    tiles and the sums of dq to which SMs add at a time, a key head's, stay in the L2 cache.
    """
    group = q.shape[1] // k.shape[1]
    fills = kernels.heads_of_tile(group, 2) * pattern.q_block >= kernels.PIECE
    num_bytes = 4 * q.numel()
    stay = num_bytes <= tuning.MOST_SPARSE_DQ_BYTES and num_bytes // k.shape[1] <= tuning.MOST_SPARSE_DQ_BYTES_OF_HEAD
    return pattern.k_block == 2 * kernels.PIECE and fills and stay


def backward_by_tiles(
    tensors: tuple[Tensor, Tensor, Tensor, Tensor],
    lse: Tensor,
    delta: Tensor,
    pattern: SparsePattern,
    lists_of_rows: Lists,
    softmax_scale: float,
    deterministic: bool,
) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
    """``(dq, (dk, dv))`` of q, k, v, dout, which TMA can load; of a pattern of blocks ``(dq, None)``."""
    q, k, v, dout = tensors
    (num_rows, num_heads, dim), (num_keys, heads_kv) = q.shape, k.shape[:2]
    stream, indexed = current_stream(q.device), pattern.k_block == 1
    dq = torch.empty((num_rows, num_heads, dim), dtype=q.dtype, device=q.device)
    sum_rows = num_blocks(num_keys, kernels.PIECE) * kernels.PIECE
    fixed = indexed and deterministic
    scales = _fixed_scales(tensors, delta) if fixed else None
    dtype = torch.int64 if fixed else torch.float32
    sums = torch.zeros((2, heads_kv, sum_rows if indexed else 0, dim), dtype=dtype, device=q.device)

    def make() -> Launch:
        params = SparseBackwardParams(
            tiles=kernels.cut_tiles(q, k, pattern),
            k_row=k.stride(0), k_head=k.stride(1), v_row=v.stride(0), v_head=v.stride(1),
            lse_row=lse.stride(0), lse_head=lse.stride(1), delta_row=delta.stride(0), delta_head=delta.stride(1),
            dq_row=dq.stride(0), dq_head=dq.stride(1), sum_rows=sum_rows,
            scale=softmax_scale, scale_log2=softmax_scale * LOG2_E,
        )  # fmt: skip
        group = num_heads // heads_kv
        maps = (
            kernels.query_box(q, group), (k, kernels.PIECE), (v, kernels.PIECE), kernels.query_box(dout, group),
        )  # fmt: skip
        if indexed:
            kernel = kernels.backward_kernel(q.device, q.dtype, dim, fixed)
        else:
            kernel = kernels.backward_queries_kernel(q.device, q.dtype, dim)
        return Launch(kernel, grid_size(q.device, params.tiles.num_items, 0), params, maps)

    counter = launch_counter(q.device, stream)
    launch = prepared(_key("sparse_backward", tensors, (lse, delta), pattern, softmax_scale, stream, fixed), make)
    with launch.lock:
        launch.point_maps(*(t.data_ptr() for t in tensors))
        params = launch.params
        lists_of_rows.point(params.tiles, counter)
        params.keys, params.values = k.data_ptr(), v.data_ptr()
        params.lse, params.delta, params.dq = lse.data_ptr(), delta.data_ptr(), dq.data_ptr()
        params.dk_sums, params.dv_sums = sums[0].data_ptr(), sums[1].data_ptr()
        params.fixed_scales = 0 if scales is None else scales.data_ptr()
        launch.fire(stream)
    return dq, _finished(sums, scales, k, v, softmax_scale, stream) if indexed else None


def _fixed_scales(tensors: tuple[Tensor, Tensor, Tensor, Tensor], delta: Tensor) -> Tensor:
    """Scales of integer sums of dk and dv, powers of two, which no sum can make overflow; fp32 ``[2]``.

    Weights are at most 1 and dS at most ``|dout| |v| + |delta|``. Where a tensor is not finite the scales are not,
    or 0, and so the gradients are not finite.
    """
    q, _, v, dout = tensors
    longest = [torch.linalg.vector_norm(t, dim=-1, dtype=torch.float32).amax() for t in (dout, v)]
    largest = [t.abs().amax().float() for t in (q, dout)]
    most = torch.stack([(longest[0] * longest[1] + delta.abs().amax()) * largest[0], largest[1]])
    return torch.exp2(torch.floor(61 - torch.log2(most * (q.shape[0] * q.shape[1]))).clamp_max(120))


def backward_by_keys(
    tensors: tuple[Tensor, Tensor, Tensor, Tensor],
    lse: Tensor,
    delta: Tensor,
    pattern: SparsePattern,
    lists_of_rows: Lists | None,
    softmax_scale: float,
    adds_dq: bool,
) -> tuple[Tensor | None, Tensor, Tensor]:
    """``(dq, dk, dv)`` of q, k, v, dout, which TMA can load, and a pattern of blocks; dq is None unless ``adds_dq``.

    ``lists_of_rows``: the lists of the pattern, which a mask does without.
    """
    q, k, v, dout = tensors
    (num_rows, num_heads, dim), (num_keys, heads_kv) = q.shape, k.shape[:2]
    group = num_heads // heads_kv
    stream = current_stream(q.device)
    lists = lists_of_queries(pattern, lists_of_rows, num_rows, num_keys)
    dk, dv = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (k, v))
    heads, blocks = kernels.heads_of_tile(group, 2), num_blocks(num_rows, pattern.q_block)
    unit = max(1, 4 // heads)  # rows of 16 bytes
    stats_block = num_blocks(pattern.q_block, unit) * unit
    block_units = num_blocks(pattern.q_block * heads, _UNIT)
    units = blocks * block_units + kernels.PIECE // _UNIT  # the last tile may add zeros behind its own
    packs = num_heads // heads
    lists_kv = heads_kv * num_blocks(num_keys, pattern.k_block)
    parts = 1 if adds_dq else max(1, num_blocks(4 * q.numel() // heads_kv, tuning.SPARSE_PART_BYTES))
    waiting = 2 * lists_kv * pattern.k_block // kernels.PIECE if parts > 1 else 0  # sums of a warpgroup
    part_sums = torch.empty(waiting * kernels.PIECE * dim, dtype=torch.float32, device=q.device)
    num_sums = packs * units * _UNIT * dim if adds_dq else 4 * waiting
    sums = torch.empty(num_sums, dtype=torch.float32, device=q.device)  # of dq; else the parts that are done
    stats = _packed_stats(lse, delta, heads, pattern.q_block, stats_block, sums, stream)

    def make() -> Launch:
        tiles = kernels.cut_tiles(q, k, pattern)
        tiles.num_items = parts * lists_kv
        params = SparseKeysParams(
            tiles=tiles, stats_rows=stats.shape[2], stats_block=stats_block, units=units, block_units=block_units,
            dk_row=dk.stride(0), dk_head=dk.stride(1), dv_row=dv.stride(0), dv_head=dv.stride(1),
            parts=parts, scale=softmax_scale, scale_log2=softmax_scale * LOG2_E,
        )  # fmt: skip
        maps = (
            kernels.query_box(q, group), (k, kernels.PIECE), (v, kernels.PIECE), kernels.query_box(dout, group),
        )  # fmt: skip
        kernel = kernels.backward_keys_kernel(q.device, q.dtype, dim, pattern.k_block, adds_dq)
        return Launch(kernel, grid_size(q.device, tiles.num_items, 0), params, maps)

    counter = launch_counter(q.device, stream)
    launch = prepared(_key("sparse_backward_keys", tensors, (), pattern, softmax_scale, stream, adds_dq, parts), make)
    with launch.lock:
        launch.point_maps(*(t.data_ptr() for t in tensors))
        params = launch.params
        lists.point(params.tiles, counter)
        params.lse, params.delta, params.dq_sums = stats[0].data_ptr(), stats[1].data_ptr(), sums.data_ptr()
        params.dk, params.dv = dk.data_ptr(), dv.data_ptr()
        params.part_sums, params.parts_done = part_sums.data_ptr(), sums.data_ptr()
        launch.fire(stream)
    dq = _finished_dq(sums, q, (heads, pattern.q_block, units, block_units), softmax_scale, stream) if adds_dq else None
    return dq, dk, dv


def _key(name: str, tensors: tuple, stats: tuple, pattern: SparsePattern, *rest: object) -> tuple:
    q, k, _, _ = tensors
    return (
        name, q.device, q.dtype, q.shape, k.shape, *(t.stride() for t in (*tensors, *stats)),
        pattern.q_block, pattern.k_block, pattern.causal, pattern.num_lists, *rest,
    )  # fmt: skip


def _packed_stats(
    lse: Tensor, delta: Tensor, heads: int, q_block: int, block: int, sums: Tensor, stream: int
) -> Tensor:
    """lse times log2 e, and delta, ``[2, packs, rows, heads]``: ``block`` rows for each ``q_block`` queries.

    Sums are zeroed. There is one tile more than that, for what the last tile reads behind the last row.
    """
    num_rows, num_heads = lse.shape
    rows = num_blocks(num_rows, q_block) * block + kernels.PIECE
    stats = torch.empty((2, num_heads // heads, rows, heads), dtype=torch.float32, device=lse.device)

    def make() -> Launch:
        params = SparseStatsParams(
            lse_row=lse.stride(0), lse_head=lse.stride(1), delta_row=delta.stride(0), delta_head=delta.stride(1),
            count=rows * num_heads, num_rows=num_rows, rows=rows, query_block=q_block, stats_block=block,
            log2_heads=heads.bit_length() - 1, num_sums=sums.numel() // 4,
        )  # fmt: skip
        kernel = kernels.small_kernel(lse.device, "sparse_stats")
        return Launch(kernel, min(_ZEROING_BLOCKS, num_blocks(max(rows * num_heads, sums.numel() // 4), 256)), params)

    key = ("sparse_stats", lse.device, lse.shape, lse.stride(), delta.stride(), heads, q_block, sums.numel())
    launch = prepared(key, make)
    with launch.lock:
        params = launch.params
        params.lse, params.delta = lse.data_ptr(), delta.data_ptr()
        params.lse_out, params.delta_out = stats[0].data_ptr(), stats[1].data_ptr()
        params.sums = sums.data_ptr()
        launch.fire(stream, overlaps=True)
    return stats


def _finished_dq(sums: Tensor, q: Tensor, cut: tuple[int, int, int, int], softmax_scale: float, stream: int) -> Tensor:
    """dq of its sums as the kernel has them; ``cut``: heads of a pack, rows of a block, units of a pack, of a block."""
    num_rows, num_heads, dim = q.shape
    heads, q_block, units, block_units = cut
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)

    def make() -> Launch:
        params = SparseFinishDqParams(
            dq_row=dq.stride(0), dq_head=dq.stride(1), num_rows=num_rows, units=units, block_units=block_units,
            query_block=q_block, log2_heads=heads.bit_length() - 1, scale=softmax_scale,
        )  # fmt: skip
        defines = (f"HEAD_DIM={dim}", element(q.dtype))
        kernel = kernels.small_kernel(q.device, "sparse_finish_dq", defines)
        return Launch(kernel, num_heads // heads * num_blocks(units, 4), params)

    launch = prepared(("sparse_finish_dq", q.device, q.dtype, q.shape, cut, softmax_scale), make)
    with launch.lock:
        launch.params.sums, launch.params.dq = sums.data_ptr(), dq.data_ptr()
        launch.fire(stream)
    return dq


def _finished(
    sums: Tensor, scales: Tensor | None, k: Tensor, v: Tensor, softmax_scale: float, stream: int
) -> tuple[Tensor, Tensor]:
    """dk and dv of their sums ``[2, num_heads_kv, sum_rows, head_dim]`` as the kernel has them; scales of integers."""
    dk, dv = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (k, v))
    num_keys, heads, dim = k.shape

    def make() -> Launch:
        params = SparseFinishParams(
            dk_row=dk.stride(0), dk_head=dk.stride(1), dv_row=dv.stride(0), dv_head=dv.stride(1),
            sum_rows=sums.shape[2], num_rows=num_keys, heads=heads, scale=softmax_scale,
        )  # fmt: skip
        blocks = num_blocks(num_keys * heads * dim, _FINISHED_ELEMENTS)
        return Launch(kernels.finish_kernel(k.device, k.dtype, dim, scales is not None), blocks, params)

    launch = prepared(("sparse_finish", k.device, k.dtype, k.shape, softmax_scale, scales is None), make)
    with launch.lock:
        params = launch.params
        params.dk_sums, params.dv_sums = sums[0].data_ptr(), sums[1].data_ptr()
        params.dk, params.dv = dk.data_ptr(), dv.data_ptr()
        params.fixed_scales = 0 if scales is None else scales.data_ptr()
        launch.fire(stream)
    return dk, dv
