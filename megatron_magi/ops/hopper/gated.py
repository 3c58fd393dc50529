"""The forward over own keys and over keys that arrive while it runs, in one launch.

Arriving keys have numbers of their own behind this rank's, from `first_arriving` on, and lie in tensors of their own.
The gap keeps tiles from blocks of both.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from torch import Tensor

from megatron_magi.cuda.arriving import Arriving
from megatron_magi.cuda.call_list import Step
from megatron_magi.cuda.launch import MAX_BYTES, MAX_LAUNCHES, Launch, Numbers, prepared
from megatron_magi.lru import LruCache
from megatron_magi.mask import bands as bd
from megatron_magi.ops.frozen import FrozenMemo
from megatron_magi.ops.hopper import kernels as hopper_kernels
from megatron_magi.ops.hopper import plan as hopper_plan
from megatron_magi.ops.hopper import tiles as hopper_tiles
from megatron_magi.ops.hopper.choices import (
    BackwardChoice,
    Problem,
    RowTiles,
    forward_tiles,
    heads_together,
    late_blocks,
    row_bytes,
)
from megatron_magi.ops.hopper.params import GatedForwardParams
from megatron_magi.ops.hopper.plan import Tiling
from megatron_magi.ops.hopper.support import (
    LOG2_E,
    grid_size,
    query_box,
    row_work,
    seen_rows,
    sm_count,
    work_counter,
)
from megatron_magi.ops.options import AttnOptions

_passes: LruCache[tuple, Pass] = LruCache(MAX_BYTES, MAX_LAUNCHES)
_seen: FrozenMemo[tuple[int, int, int, int, int]] = FrozenMemo()


def first_arriving(num_keys: int) -> int:
    """Number of the first key that arrives, where this rank has so many of its own."""
    return num_keys + hopper_tiles.GAP


def seen_rows_and_keys(bands: np.ndarray, first: int) -> tuple[int, int, int, int, int]:
    """Rows of q, k, v and of the keys and values that arrive up to the last that is seen, at least one of each.

    ``first``: the same whenever this is asked of a table.
    """
    seen = _seen.get(bands)
    if seen is None:
        arrives = bands[:, bd.K0] >= first
        row, own = seen_rows(bands[~arrives])
        last_row, later = seen_rows(bd.shift_keys(bands[arrives], -first))
        seen = max(row, last_row), own, own, later, later
        _seen.put(bands, seen)
    return seen


def remember_seen(bands: np.ndarray, seen: tuple[int, int, int, int, int]) -> None:
    """Keeps what `seen_rows_and_keys` answers for a table that cannot be written to."""
    _seen.put(bands, seen)


def row_tiling(problem: Problem, tiles: RowTiles, num_arriving: int, num_sms: int, products: float = 2.0) -> Tiling:
    """Tiles of queries where the last ``num_arriving`` of ``problem.num_keys`` keys arrive."""
    late = late_blocks(problem, num_arriving, tiles.shape, products)
    packs = heads_together(problem.num_keys, problem.num_heads_kv, row_bytes(problem)) * problem.group // tiles.packed
    lead = math.ceil(late * num_sms / packs)  # blocks of one head, or of packed ones
    first = first_arriving(problem.num_keys - num_arriving)
    return Tiling(False, problem.num_rows, *tiles, (first, num_arriving, math.ceil(late), lead))


def key_tiling(problem: Problem, choice: BackwardChoice, num_arriving: int, num_sms: int) -> Tiling:
    """Tiles of keys, likewise."""
    products = 5.0 if choice.adds_dq else 4.0
    late = late_blocks(problem, num_arriving, choice.shape, products)
    first = first_arriving(problem.num_keys - num_arriving)
    arriving = first, num_arriving, math.ceil(late), math.ceil(late * num_sms)
    return Tiling(True, first + num_arriving, choice.shape, choice.packed, arriving)


def forward_step(
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
    max_logits: bool,
    stream: int,
    remembered: bool = True,
) -> tuple[Pass, Step]:
    """The kernel that writes attention, to be queued right behind those that bring the arriving keys.

    It takes the addresses ``q``, ``k``, ``v``, ``out``, ``lse``, ``sink`` and ``max_logits``, the last two where there
    are any, and those of the arriving keys.

    Args:
        q, k, v: tensors that TMA can read (`support.loadable`), like those of the calls.
        arriving: keys and values, at least one row.
        bands: the mask, over keys numbered as above.
        options: of the call.
        out: likewise, in the dtype of q, contiguous; ``lse`` in fp32.
        sink_lse: likewise, fp32 ``[num_rows, num_heads]``, or None.
        max_logits: fp32 ``[num_heads]``, -inf, is updated.
        stream: raw handle.
        remembered: other plans of this mask find the pass, which keeps its tables until it is forgotten.

    Returns:
        The step, and what keeps the tables it reads.
    """

    def make() -> Pass:
        return Pass(q, k, v, arriving, bands, options, out, lse, sink_lse, stream)

    def key() -> tuple:
        return (
            hopper_plan.content_digest(bands), q.device, q.dtype, options, q.shape, k.shape, v.shape,
            len(arriving.tensors[0]), stream, q.stride(), k.stride(), v.stride(),
            None if sink_lse is None else sink_lse.stride(),
        )  # fmt: skip

    known = known_pass(_passes, key, make) if remembered else make()
    return known, known.step((q, k, v), arriving, sink_lse is not None, max_logits)


def known_pass[P: Any](passes: LruCache[tuple, P], key: Callable[[], tuple], make: Callable[[], P]) -> P:
    """The pass that is remembered under a key, made when it is first asked for."""
    name = key()
    known = passes.get(name)
    if known is None:
        known = make()
        passes.put(name, known, known.num_bytes)
    return known


class Pass:
    """A kernel over tensors of one layout, for one mask, on one stream.

    Attributes:
        num_bytes: of device memory that is kept: the tile plan.
        lists: calls that it is part of, by who makes them; they go with either.
    """

    def __init__(self, q, k, v, arriving: Arriving, bands, options, out, lse, sink_lse, stream: int) -> None:
        dims, num_rows, num_heads = (q.shape[2], v.shape[2]), *q.shape[:2]
        num_arriving = arriving.tensors[0].shape[0]
        problem = Problem(num_rows, k.shape[0] + num_arriving, num_heads, k.shape[1], dims, dims)
        processors = sm_count(q.device)
        tiles = forward_tiles(hopper_plan.mask_facts(bands), problem)
        tiling = row_tiling(problem, tiles, num_arriving, processors)
        tile, packed = tiling.shape, tiling.packed
        plan = hopper_plan.device_plan(bands, tiling, q.device)
        work = row_work(plan, num_heads, tile[1], k, v, num_arriving)
        self.lists: WeakKeyDictionary[object, Any] = WeakKeyDictionary()
        self.num_bytes, self._first = plan.num_bytes, first_arriving(k.shape[0])
        self._numbers = Numbers(
            plan, grid_size(q.device, plan.num_tiles * work["num_heads"], options.sm_margin),
            seen_rows_and_keys(bands, self._first),
            tiles=plan.tiles, passes=plan.passes, bounds=plan.bounds, step=plan.host.step, num_tiles=plan.num_tiles,
            **work,
        )  # fmt: skip

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

    def step(self, qkv: tuple[Tensor, Tensor, Tensor], arriving: Arriving, has_sink: bool, max_logits: bool) -> Step:
        """The kernel, for tensors of the layout."""
        fields = {"out": ("out", 0), "lse": ("lse", 0)}
        if has_sink:
            fields["sink_lse"] = ("sink", 0)
        if max_logits:
            fields["max_logits"] = ("max_logits", 0)
        return self._launch.step(
            fields, (("q", 0), ("k", 0), ("v", 0), *arriving.places, ("out", 0)),
            numbers=self._numbers, mapped=(*qkv, *arriving.tensors),
            values={"gate": arriving.gate(self._first)}, overlaps=arriving.overlaps,
        )  # fmt: skip
