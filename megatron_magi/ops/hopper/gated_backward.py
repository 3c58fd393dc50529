"""The backward over own keys and over keys that arrive while it runs, at once: what `backward` is to stages.

For head dims whose backward can be one kernel (`kernels.WHOLE_DIMS`). Keys are numbered as in `gated`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from torch import Tensor

from megatron_magi.cuda.arriving import Arriving
from megatron_magi.cuda.call_list import Place
from megatron_magi.cuda.launch import MAX_BYTES, MAX_LAUNCHES
from megatron_magi.lru import LruCache
from megatron_magi.ops.hopper import kernels as hopper_kernels
from megatron_magi.ops.hopper import plan as hopper_plan
from megatron_magi.ops.hopper.backward import SUMS_ALIGNMENT
from megatron_magi.ops.hopper.backward_ends import finish_dq_launch, finish_keys_launch, padded, stats_launch
from megatron_magi.ops.hopper.backward_kernels import Common, Inputs, Steps, queries_launch, whole_launch
from megatron_magi.ops.hopper.backward_targets import STORE_FLOAT, STORE_HALF
from megatron_magi.ops.hopper.choices import Problem, backward_choice, most_split_at_once, query_tiles
from megatron_magi.ops.hopper.gated import first_arriving, key_tiling, known_pass, row_tiling, seen_rows_and_keys
from megatron_magi.ops.hopper.support import LOG2_E, may_overlap, sm_count
from megatron_magi.ops.hopper.tiles import UNIT
from megatron_magi.ops.options import AttnOptions

_passes: LruCache[tuple, Pass] = LruCache(MAX_BYTES, MAX_LAUNCHES)


def backward_steps(
    inputs: Inputs,
    out: Tensor,
    lse: Tensor,
    arriving: Arriving,
    bands: np.ndarray,
    options: AttnOptions,
    *,
    grads: tuple[Tensor, Tensor, Tensor],
    arriving_grads: tuple[Tensor, Tensor],
    places: tuple[Place, Place],
    scratch: Place,
    delta: bool,
    sends: bool,
    stream: int,
    remembered: bool = True,
) -> tuple[Pass, Steps]:
    """The kernels that write all gradients; the first is queued right behind those that bring keys.

    They take the addresses ``q``, ``k``, ``v``, ``dout``, ``out``, ``lse``, ``dq``, ``dk``, ``dv``, and ``delta`` where
    it is wanted.

    Args:
        inputs: q, k, v, dout in one dtype, as TMA can read them, like those of the calls.
        out: the output, and fp32 ``[num_rows, num_heads]`` ``lse``, likewise.
        arriving: keys and values, at least one row.
        bands: the mask, over keys numbered as in `gated`.
        options: of the call.
        grads: likewise: dq in the dtype of q; dk and dv of own keys in it or in fp32; contiguous.
        arriving_grads: likewise, dk and dv of the others; ``places``: where they will be.
        scratch: where `Pass.num_scratch` bytes will be.
        delta: fp32 ``[num_rows, num_heads]``, contiguous, is written, too.
        sends: see `Steps.rest`.
        stream: raw handle.
        remembered: as in `gated.forward_step`.
    """
    q, k, v, _ = inputs

    def make() -> Pass:
        return Pass(inputs, out, lse, arriving.tensors, bands, options, grads, arriving_grads, stream)

    def key() -> tuple:
        return (
            hopper_plan.content_digest(bands), q.device, q.dtype, options, q.shape, k.shape, v.shape,
            len(arriving.tensors[0]), grads[1].dtype, arriving_grads[0].dtype, stream, out.stride(), lse.stride(),
            *(t.stride() for t in inputs),
        )  # fmt: skip

    known = known_pass(_passes, key, make) if remembered else make()
    return known, known.steps(inputs, arriving, places, scratch, delta, sends)


class Pass:
    """The kernels over tensors of one layout, for one mask, on one stream.

    Attributes:
        num_bytes: of device memory that is kept: the tile plans.
        num_scratch: bytes of memory that a call takes, aligned to 128.
        lists: as in `gated.Pass`.
    """

    def __init__(self, inputs, out, lse, keys: Sequence[Tensor], bands, options, grads, later, stream: int) -> None:
        q, k, v, dout = inputs
        (dq, dk, dv), (num_rows, num_heads, dim), device = grads, q.shape, q.device
        num_arriving, num_sms = len(keys[0]), max(1, sm_count(device) - options.sm_margin)
        dims = dim, v.shape[2]
        problem = Problem(num_rows, len(k) + num_arriving, num_heads, k.shape[1], dims, dims)
        choice = backward_choice(hopper_plan.mask_facts(bands), problem, options.deterministic)
        assert choice.whole
        group = problem.group // choice.packed
        plan = hopper_plan.device_plan(bands, key_tiling(problem, choice, num_arriving, num_sms), device)
        self._first, self._overlaps, self.num_bytes = first_arriving(len(k)), may_overlap(options), plan.num_bytes
        self.lists: WeakKeyDictionary[object, Any] = WeakKeyDictionary()
        rows = padded(num_rows, choice.shape[1])
        delta, scale = lse.new_empty(lse.shape), options.softmax_scale * LOG2_E
        is_split = hopper_kernels.splits_stats(q.dtype, problem.dims, options.softcap > 0, choice.adds_dq)
        self._stats = stats_launch(
            lse, delta, rows, choice.packed, choice.adds_dq, scale if is_split else 0.0, of_delta=(dout, out)
        )  # fmt: skip
        num_stats = rows * choice.packed
        self._num_stats = -(-num_heads * rows * (1 + is_split) // SUMS_ALIGNMENT) * SUMS_ALIGNMENT
        self._num_sums = num_heads * rows * dim if choice.adds_dq else 0
        # Sums of dk and dv lie in dq until it is written, if there is room.
        room = dq.numel() * dq.element_size()
        most = most_split_at_once(choice, problem, room)
        schedule = hopper_plan.schedule_of(plan, k.shape[1], group, num_sms, most, problem.is_narrow)
        self._num_key_sums = 2 * schedule.num_split * choice.shape[0] * k.shape[1] * dim
        self._in_dq = self._num_key_sums * 4 <= room
        self._store = STORE_HALF if later[0].dtype == q.dtype else STORE_FLOAT
        store = STORE_HALF if dk.dtype == q.dtype else STORE_FLOAT
        of_inputs = seen_rows_and_keys(bands, first_arriving(len(k)))
        seen = *of_inputs, of_inputs[0]
        common = Common(inputs, problem.dims, num_stats, seen, options, stream, keys)
        self._keys, self._keys_numbers = whole_launch(common, choice.adds_dq, plan, schedule, store, (dk, dv))
        self._finish_keys = self._finish_dq = self._queries = None
        if schedule.num_split:
            self._finish_keys = finish_keys_launch(dk, dv, q.dtype, options.softmax_scale, store, gated=True)
            self._tiles, self._finish_keys_blocks = plan.tiles, 4 * schedule.num_split * k.shape[1]
        if choice.adds_dq:
            self._finish_dq = finish_dq_launch(
                dq, num_stats // UNIT, q.dtype, options.softmax_scale, STORE_HALF, beside=True
            )  # fmt: skip
        else:
            tiles = query_tiles(problem, choice.packed)
            rows_plan = hopper_plan.device_plan(
                bands, row_tiling(problem, tiles, num_arriving, num_sms, products=3.0), device
            )
            self._queries, self._queries_numbers = queries_launch(common, rows_plan, STORE_HALF, dq)
            self.num_bytes += rows_plan.num_bytes
        self.num_scratch = 4 * (2 * self._num_stats + self._num_sums + (0 if self._in_dq else self._num_key_sums))

    def steps(
        self, inputs, arriving: Arriving, places: tuple[Place, Place], scratch: Place, delta: bool, sends: bool
    ) -> Steps:
        """The kernels, for tensors of the layout."""
        q, k, v, dout = inputs
        mapped, gate = (q, k, v, *arriving.tensors, dout), arriving.gate(self._first)
        (slot, begin), of = scratch, {name: (name, 0) for name in ("dout", "out", "lse", "delta", "dq", "dk", "dv")}
        stats, minus_delta = (slot, begin), (slot, begin + 4 * self._num_stats)
        sums = slot, begin + 8 * self._num_stats
        key_sums = of["dq"] if self._in_dq else (slot, sums[1] + 4 * self._num_sums)
        maps = (("q", 0), ("k", 0), ("v", 0), *arriving.places, of["dout"])
        of_rows = {"lse": stats, "delta": minus_delta}
        of_keys = {"dk": of["dk"], "dv": of["dv"], "dk_remote": places[0], "dv_remote": places[1]}
        gated = {"store_remote": self._store, "gate": gate}
        before = self._stats.step(
            {
                **{name: of[name] for name in ("dout", "out", "lse", *(("delta",) if delta else ()))},
                "lse_out": stats, "delta_out": minus_delta, "sums": sums, "key_sums": key_sums,
            },
            values={"num_sums": self._num_sums // 4, "num_key_sums": self._num_key_sums // 4, "beside": 1},
            overlaps=self._overlaps,
        )  # fmt: skip
        keys = [
            self._keys.step(
                {**of_rows, **of_keys, "dq": sums, "key_sums": key_sums}, maps,
                numbers=self._keys_numbers, mapped=mapped, values=gated, overlaps=arriving.overlaps,
            )
        ]  # fmt: skip
        if self._finish_keys is not None:
            keys.append(
                self._finish_keys.step(
                    {"sums": key_sums, **of_keys}, values={**gated, "tiles": self._tiles},
                    num_blocks=self._finish_keys_blocks, overlaps=self._overlaps,
                )
            )  # fmt: skip
        if self._finish_dq is not None:
            rest = self._finish_dq.step({"sums": sums, "dq": of["dq"]}, overlaps=self._overlaps and sends)
        else:
            rest = self._queries.step(
                {**of_rows, "dq": of["dq"]}, (*maps, of["dq"]),
                numbers=self._queries_numbers, mapped=mapped, values={"gate": gate}, overlaps=self._overlaps,
            )  # fmt: skip
        return Steps((before,), tuple(keys), (rest,), self._finish_dq is None and self._overlaps)
