"""The forward over own keys and over keys that arrive while it runs, in one launch.

Arriving keys have numbers of their own behind this rank's, from `first_arriving` on, and lie in tensors of their own.
The gap keeps tiles from blocks of both.
"""

from __future__ import annotations

import math
from collections.abc import MutableMapping
from typing import NamedTuple

import numpy as np
from torch import Tensor

from megatron_magi.cuda.arriving import Arriving, GateParams, part_rows
from megatron_magi.cuda.launch import MAX_BYTES, MAX_LAUNCHES, Launch, Numbers, prepared
from megatron_magi.lru import LruCache
from megatron_magi.mask import bands as bd
from megatron_magi.ops.hopper import kernels as hopper_kernels
from megatron_magi.ops.hopper import plan as hopper_plan
from megatron_magi.ops.hopper import tiles as hopper_tiles
from megatron_magi.ops.hopper.choices import BackwardChoice, Problem, RowTiles, forward_tiles, late_blocks
from megatron_magi.ops.hopper.params import GatedForwardParams
from megatron_magi.ops.hopper.plan import Tiling
from megatron_magi.ops.hopper.support import (
    LOG2_E,
    current_stream,
    grid_size,
    query_box,
    row_work,
    seen_rows,
    sm_count,
    stream_lock,
    work_counter,
)
from megatron_magi.ops.options import AttnOptions

_passes: LruCache[tuple, _Pass] = LruCache(MAX_BYTES, MAX_LAUNCHES)


def first_arriving(num_keys: int) -> int:
    """Number of the first key that arrives, where this rank has so many of its own."""
    return num_keys + hopper_tiles.GAP


def seen_rows_and_keys(bands: np.ndarray, first: int) -> tuple[int, int, int, int, int]:
    """Rows of q, k, v and of the keys and values that arrive up to the last that is seen, at least one of each."""
    arrives = bands[:, bd.K0] >= first
    row, own = seen_rows(bands[~arrives])
    last_row, later = seen_rows(bd.shift_keys(bands[arrives], -first))
    return max(row, last_row), own, own, later, later


def row_tiling(problem: Problem, tiles: RowTiles, num_arriving: int, num_sms: int, products: float = 2.0) -> Tiling:
    """Tiles of queries where the last ``num_arriving`` of ``problem.num_keys`` keys arrive."""
    late = late_blocks(problem, num_arriving, tiles.shape, products)
    lead = math.ceil(late * num_sms * tiles.packed / problem.num_heads)  # blocks of one head, or of packed ones
    first = first_arriving(problem.num_keys - num_arriving)
    return Tiling(False, problem.num_rows, *tiles, (first, math.ceil(late), lead))


def key_tiling(problem: Problem, choice: BackwardChoice, num_arriving: int, num_sms: int) -> Tiling:
    """Tiles of keys, likewise."""
    products = 5.0 if choice.adds_dq else 4.0
    late = late_blocks(problem, num_arriving, choice.shape, products)
    first = first_arriving(problem.num_keys - num_arriving)
    arriving = first, math.ceil(late), math.ceil(late * num_sms)
    return Tiling(True, first + num_arriving, choice.shape, choice.packed, arriving)


class GateOf(NamedTuple):
    """What kernels are told of keys that arrive beside addresses: how many they are, and the number of the first."""

    num_rows: int
    first: int

    def of(self, arriving: Arriving) -> GateParams:
        """For a call."""
        return GateParams(
            arriving.call, arriving.arrived, arriving.broken, arriving.notice, 2 * arriving.timeout_ns,
            self.num_rows, part_rows(self.num_rows), self.first,
        )  # fmt: skip


def bring(arriving: Arriving) -> None:
    """Queues what brings keys, for which nothing here waits while it runs."""
    arriving.begin(current_stream(arriving.tensors[0].device))


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    arriving: Arriving,
    bands: np.ndarray,
    options: AttnOptions,
    *,
    out: Tensor,
    lse: Tensor,
    sink_lse: Tensor | None,
    max_logits: Tensor | None,
    memo: MutableMapping,
) -> None:
    """Queues what brings the arriving keys, and the kernel that writes attention to ``out`` and ``lse``.

    Args:
        q, k, v: tensors that TMA can read (`support.loadable`).
        arriving: keys and values, at least one row.
        bands: the mask, over keys numbered as above.
        options: of the call.
        out: in the dtype of q, contiguous; ``lse`` in fp32.
        sink_lse: fp32 ``[num_rows, num_heads]``, or None.
        max_logits: fp32 ``[num_heads]``, -inf, or None.
        memo: remembers how, for calls that differ in nothing but addresses and strides.
    """
    stream = current_stream(q.device)
    layout = stream, q.stride(), k.stride(), v.stride(), None if sink_lse is None else sink_lse.stride()
    known = memo.get(layout)
    if known is None:
        key = (
            hopper_plan.content_digest(bands), q.device, q.dtype, options, q.shape, k.shape, v.shape,
            arriving.tensors[0].shape[0], *layout,
        )  # fmt: skip
        known = _passes.get(key)
        if known is None:
            known = _Pass(q, k, v, arriving, bands, options, out, lse, sink_lse, stream)
            _passes.put(key, known, known.plan.num_bytes)
        memo[layout] = known
    known.run(q, k, v, arriving, out, lse, sink_lse, max_logits)


class _Pass:
    """The kernel over tensors of one layout, for one mask, on one stream."""

    def __init__(self, q, k, v, arriving: Arriving, bands, options, out, lse, sink_lse, stream: int) -> None:
        dims, num_rows, num_heads = (q.shape[2], v.shape[2]), *q.shape[:2]
        num_arriving = arriving.tensors[0].shape[0]
        problem = Problem(num_rows, k.shape[0] + num_arriving, num_heads, k.shape[1], dims)
        processors = sm_count(q.device)
        tiles = forward_tiles(hopper_plan.mask_facts(bands), problem)
        tiling = row_tiling(problem, tiles, num_arriving, processors)
        tile, packed = tiling.shape, tiling.packed
        self.plan = plan = hopper_plan.device_plan(bands, tiling, q.device)
        work = row_work(plan, num_heads, tile[1], k, v, num_arriving)
        self._stream, self._lock = stream, stream_lock(q.device, stream)
        self._numbers = Numbers(
            plan, grid_size(q.device, plan.num_tiles * work["num_heads"], options.sm_margin),
            seen_rows_and_keys(bands, first_arriving(k.shape[0])),
            tiles=plan.tiles, passes=plan.passes, bounds=plan.bounds, step=plan.host.step, num_tiles=plan.num_tiles,
            **work,
        )  # fmt: skip
        self._gate = GateOf(num_arriving, first_arriving(k.shape[0]))

        def make() -> Launch:
            softcap, scale = options.softcap, options.softmax_scale
            params = GatedForwardParams(
                counter=work_counter(q.device, stream).data_ptr(),
                out_row=out.stride(0), out_head=out.stride(1), lse_row=lse.stride(0), lse_head=lse.stride(1),
                logit_scale=softcap or scale,
                scale_log2=(softcap or scale) * LOG2_E, softcap_factor=scale / softcap if softcap else 0.0,
            )  # fmt: skip
            if sink_lse is not None:
                params.sink_row, params.sink_head = sink_lse.stride()
            kernel = hopper_kernels.forward_kernel(q.device, q.dtype, dims, tile, softcap > 0, gated=True)
            keys = ((t, tile[1]) for t in (k, v, *arriving.tensors))
            return Launch(kernel, 1, params, (query_box(q, 64, plan), *keys, query_box(out, 16, plan)))

        key = (
            "gated forward", q.device, stream, q.dtype, options, tile, packed, q.shape, k.shape[1:], v.shape[1:],
            q.stride(), k.stride(), v.stride(), None if sink_lse is None else sink_lse.stride(),
        )  # fmt: skip
        self._launch = prepared(key, make)

    def run(self, q, k, v, arriving: Arriving, out, lse, sink_lse, max_logits) -> None:
        """Queues both kernels, for tensors of the layout."""
        launch, new = self._launch, arriving.tensors
        with self._lock, launch.lock:
            launch.take(self._numbers, q, k, v, *new)
            launch.point_maps(*(t.data_ptr() for t in (q, k, v, *new, out)))
            params = launch.params
            params.out, params.lse = out.data_ptr(), lse.data_ptr()
            params.sink_lse = 0 if sink_lse is None else sink_lse.data_ptr()
            params.max_logits = 0 if max_logits is None else max_logits.data_ptr()
            params.gate = self._gate.of(arriving)
            arriving.begin(self._stream)
            launch.fire(self._stream, arriving.overlaps)
