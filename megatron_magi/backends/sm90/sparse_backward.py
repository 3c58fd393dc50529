"""Backward of sparse attention over blocks of keys on Hopper GPUs; of single keys: `sparse_single_keys`.

For blocks of 128 keys one kernel may compute all gradients along lists of queries, with dq accumulated in fp32 sums.
Otherwise, and in deterministic mode, dq is computed by tiles along lists of keys, and dk and dv by that kernel without
dq.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_magi.backends.sm90 import sparse_kernels as kernels
from megatron_magi.backends.sm90 import tuning
from megatron_magi.backends.sm90.kernels import element
from megatron_magi.backends.sm90.kernels import params as params_of
from megatron_magi.backends.sm90.sparse_lists import Lists, lists_of_queries
from megatron_magi.backends.sm90.support import LOG2_E, grid_size, launch_counter, sm_count
from megatron_magi.cuda.launch import Launch, prepared
from megatron_magi.cuda.streams import current_stream
from megatron_magi.operands.sparse_pattern import SparsePattern, num_blocks

Tensors = tuple[Tensor, Tensor, Tensor, Tensor]
"""q, k, v and dout."""

_UNIT = 16  # places of a piece of the sums of dq
_TEAMS = {64: 2, 128: 1}  # teams of the kernel along lists of queries, by keys of a block
_LEAST_STEPS, _SUM_HEADS = {64: 32, 128: 64}, 2  # of parts of long lists, by keys of a block
_LEAST_STEPS_OF_FEW = 4  # of parts of few lists
_ZEROING_BLOCKS = 2048


@dataclass(frozen=True)
class _Rows:
    """Layout of queries for the kernel along lists of queries: query heads in packs, whose rows share tiles.

    Attributes:
        q_block: queries of a block.
        heads, packs: query heads of a pack, packs of all query heads.
        stats_block, stats_rows: rows of statistics of a block of queries, padded to a multiple of 16 bytes; and of a
            pack, with one more tile, for reads of the last tile after the last row.
        block_units, units: units of 16 places of sums of dq, of a block of queries and of a pack; the last tile may
            add zeros after its own.
    """

    q_block: int
    heads: int
    packs: int
    stats_block: int
    stats_rows: int
    block_units: int
    units: int

    @property
    def log2_heads(self) -> int:
        return self.heads.bit_length() - 1


def _rows_of(q: Tensor, k: Tensor, q_block: int) -> _Rows:
    """The layout of queries q in blocks of ``q_block``."""
    num_rows, num_heads, _ = q.shape
    heads, blocks = kernels.heads_of_tile(num_heads // k.shape[1], 2), num_blocks(num_rows, q_block)
    aligned = max(1, 4 // heads)  # rows of 16 bytes
    stats_block, block_units = num_blocks(q_block, aligned) * aligned, num_blocks(q_block * heads, _UNIT)
    return _Rows(
        q_block, heads, num_heads // heads, stats_block, blocks * stats_block + kernels.PIECE,
        block_units, blocks * block_units + kernels.PIECE // _UNIT,
    )  # fmt: skip


@dataclass(frozen=True)
class _Parts:
    """Parts of lists in the kernel along lists of queries.

    Attributes:
        count: most parts of a list.
        window: blocks of queries of a part.
        least_steps: average steps of a part, at least; shorter lists have fewer parts.
        sum_heads: key heads that have their own memory for partial sums.
    """

    count: int = 1
    window: int = 0
    least_steps: int = 0
    sum_heads: int = 0


def _parts_of(q: Tensor, k: Tensor, pattern: SparsePattern, rows: _Rows) -> _Parts:
    """The number of parts: by the bytes that a key head reads, or for few lists one for each team of warpgroups;
    limited by the steps of the longest possible list.
    """
    heads_kv, teams = k.shape[1], sm_count(q.device) * _TEAMS[pattern.k_block]
    of_bytes = num_blocks(4 * q.numel() // heads_kv, tuning.SPARSE_PART_BYTES)
    of_teams = teams // (heads_kv * num_blocks(k.shape[0], pattern.k_block))
    few = of_teams > of_bytes
    least = _LEAST_STEPS_OF_FEW if few else _LEAST_STEPS[pattern.k_block]
    entries = pattern.tensors[-1]
    num_lists = pattern.num_lists if entries.ndim == 3 else 1
    # A mask has a block of keys once for each block of queries; entries of lists may all be the same.
    longest = entries.shape[1] if pattern.is_mask else entries.numel() // num_lists
    steps = rows.packs // heads_kv * num_blocks(pattern.q_block * rows.heads, kernels.PIECE)
    blocks = num_blocks(q.shape[0], pattern.q_block)
    window = num_blocks(blocks, max(1, min(max(of_bytes, of_teams), longest * steps // least)))
    sum_heads = 0 if window == blocks else heads_kv if few else min(heads_kv, _SUM_HEADS)
    return _Parts(num_blocks(blocks, window), window, least, sum_heads)


def may_add_dq(q: Tensor, k: Tensor, pattern: SparsePattern) -> bool:
    """Whether one kernel can compute all gradients and is faster: for blocks of 128 keys, if blocks of queries fill its
    tiles and the sums of dq of a key head stay in the L2 cache.
    """
    group = q.shape[1] // k.shape[1]
    fills = kernels.heads_of_tile(group, 2) * pattern.q_block >= kernels.PIECE
    num_bytes = 4 * q.numel()
    stay = num_bytes <= tuning.MOST_SPARSE_DQ_BYTES and num_bytes // k.shape[1] <= tuning.MOST_SPARSE_DQ_BYTES_OF_HEAD
    return pattern.k_block == 2 * kernels.PIECE and fills and stay


def backward_by_tiles(
    tensors: Tensors, lse: Tensor, delta: Tensor, pattern: SparsePattern, lists_of_rows: Lists, softmax_scale: float
) -> Tensor:
    """dq of q, k, v, dout, which TMA can load, and a pattern of blocks."""
    q, k, *_ = tensors
    stream = current_stream(q.device)
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)

    def make() -> Launch:
        params = params_of("sparse_backward_queries")(
            tiles=kernels.cut_tiles(q, k, pattern),
            lse_row=lse.stride(0), lse_head=lse.stride(1), delta_row=delta.stride(0), delta_head=delta.stride(1),
            dq_row=dq.stride(0), dq_head=dq.stride(1), scale=softmax_scale, scale_log2=softmax_scale * LOG2_E,
        )  # fmt: skip
        kernel = kernels.backward_queries_kernel(q.device, q.dtype, q.shape[2])
        return Launch(kernel, grid_size(q.device, params.tiles.num_items), params, kernels.boxes(*tensors))

    counter = launch_counter(q.device, stream)
    launch = prepared(_key("sparse_backward_queries", tensors, (lse, delta), pattern, softmax_scale, stream), make)
    with launch.lock:
        launch.point_maps(*(t.data_ptr() for t in tensors))
        params = launch.params
        lists_of_rows.point(params.tiles, counter)
        params.lse, params.delta, params.dq = lse.data_ptr(), delta.data_ptr(), dq.data_ptr()
        launch.fire(stream)
    return dq


def backward_by_keys(
    tensors: Tensors,
    lse: Tensor,
    delta: Tensor,
    pattern: SparsePattern,
    lists_of_rows: Lists | None,
    softmax_scale: float,
    adds_dq: bool,
) -> tuple[Tensor | None, Tensor, Tensor]:
    """``(dq, dk, dv)`` of q, k, v, dout, which TMA can load, and a pattern of blocks; dq is None unless ``adds_dq``.

    ``lists_of_rows``: the lists of the pattern; not used for a mask.
    """
    q, k, v, _ = tensors
    (num_rows, _, dim), (num_keys, heads_kv) = q.shape, k.shape[:2]
    stream, rows = current_stream(q.device), _rows_of(q, k, pattern.q_block)
    lists = lists_of_queries(pattern, lists_of_rows, num_rows, num_keys)
    dk, dv = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (k, v))
    pieces = num_blocks(num_keys, pattern.k_block)
    parts = _Parts() if adds_dq else _parts_of(q, k, pattern, rows)
    # Memory for dk and dv of tiles of 64 keys that wait for the next part, and four counters of each.
    waiting = parts.sum_heads * pieces * pattern.k_block // kernels.PIECE
    part_sums = torch.empty(2 * waiting * kernels.PIECE * dim, dtype=torch.float32, device=q.device)
    num_sums = rows.packs * rows.units * _UNIT * dim if adds_dq else 4 * waiting
    sums = torch.empty(num_sums, dtype=torch.float32, device=q.device)  # of dq; else counters of finished parts
    stats = _packed_stats(lse, delta, rows, sums, stream)

    def make() -> Launch:
        tiles = kernels.cut_tiles(q, k, pattern)
        tiles.num_items = parts.count * heads_kv * pieces
        params = params_of("sparse_backward_keys")(
            tiles=tiles, stats_rows=rows.stats_rows, stats_block=rows.stats_block,
            units=rows.units, block_units=rows.block_units,
            dk_row=dk.stride(0), dk_head=dk.stride(1), dv_row=dv.stride(0), dv_head=dv.stride(1),
            parts=parts.count, window=parts.window, least_steps=parts.least_steps, sum_heads=parts.sum_heads,
            scale=softmax_scale, scale_log2=softmax_scale * LOG2_E,
        )  # fmt: skip
        kernel = kernels.backward_keys_kernel(q.device, q.dtype, dim, pattern.k_block, adds_dq)
        grid = grid_size(q.device, tiles.num_items)
        return Launch(kernel, grid, params, kernels.boxes(*tensors))

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
    return _finished_dq(sums, q, rows, softmax_scale, stream) if adds_dq else None, dk, dv


def _key(name: str, tensors: tuple, stats: tuple, pattern: SparsePattern, *rest: object) -> tuple:
    q, k, _, _ = tensors
    return (
        name, q.device, q.dtype, q.shape, k.shape, *(t.stride() for t in (*tensors, *stats)),
        pattern.q_block, pattern.k_block, pattern.causal, pattern.num_lists, *rest,
    )  # fmt: skip


def _packed_stats(lse: Tensor, delta: Tensor, rows: _Rows, sums: Tensor, stream: int) -> Tensor:
    """lse times log2 e, and delta, fp32 ``[2, packs, stats_rows, heads]``. Sums are zeroed."""
    num_rows, num_heads = lse.shape
    stats = torch.empty((2, rows.packs, rows.stats_rows, rows.heads), dtype=torch.float32, device=lse.device)
    count = rows.stats_rows * num_heads

    def make() -> Launch:
        params = params_of("sparse_preprocess")(
            lse_row=lse.stride(0), lse_head=lse.stride(1), delta_row=delta.stride(0), delta_head=delta.stride(1),
            count=count, num_rows=num_rows, rows=rows.stats_rows, query_block=rows.q_block,
            stats_block=rows.stats_block, log2_heads=rows.log2_heads, num_sums=sums.numel() // 4,
        )  # fmt: skip
        kernel = kernels.small_kernel(lse.device, "sparse_preprocess")
        return Launch(kernel, min(_ZEROING_BLOCKS, num_blocks(max(count, sums.numel() // 4), 256)), params)

    launch = prepared(
        ("sparse_preprocess", lse.device, lse.shape, lse.stride(), delta.stride(), rows, sums.numel()), make
    )
    with launch.lock:
        params = launch.params
        params.lse, params.delta = lse.data_ptr(), delta.data_ptr()
        params.lse_out, params.delta_out = stats[0].data_ptr(), stats[1].data_ptr()
        params.sums = sums.data_ptr()
        launch.fire(stream, overlaps=True)
    return stats


def _finished_dq(sums: Tensor, q: Tensor, rows: _Rows, softmax_scale: float, stream: int) -> Tensor:
    """dq from its sums."""
    num_rows, _, dim = q.shape
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)

    def make() -> Launch:
        params = params_of("sparse_postprocess_dq")(
            dq_row=dq.stride(0), dq_head=dq.stride(1), num_rows=num_rows, units=rows.units,
            block_units=rows.block_units, query_block=rows.q_block, log2_heads=rows.log2_heads, scale=softmax_scale,
        )  # fmt: skip
        defines = (f"HEAD_DIM={dim}", element(q.dtype))
        kernel = kernels.small_kernel(q.device, "sparse_postprocess_dq", defines)
        return Launch(kernel, rows.packs * num_blocks(rows.units, 4), params)

    launch = prepared(("sparse_postprocess_dq", q.device, q.dtype, q.shape, rows, softmax_scale), make)
    with launch.lock:
        launch.params.sums, launch.params.dq = sums.data_ptr(), dq.data_ptr()
        launch.fire(stream)
    return dq
