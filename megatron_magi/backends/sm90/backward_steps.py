"""The kernels of a backward pass, as steps of a list of launches. In launch order:

1. ``preprocess``: lse and delta in the layout of the next kernels, and zeros in memory that they add to.
2. ``backward``: dk and dv, and sums of dq in device memory if that is faster. For wide heads ``backward_keys``: dk, dv.
3. ``postprocess_keys``: dk and dv of tiles whose query heads were split, from their sums.
4. ``postprocess_dq``: dq from its sums; or ``backward_queries``, which computes dq without sums.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import NamedTuple

from megatron_magi.backends.sm90 import kernels as hopper_kernels
from megatron_magi.backends.sm90.choices import WHOLE_TILE
from megatron_magi.backends.sm90.kernels import KernelVariant
from megatron_magi.backends.sm90.mask_numbers import BackwardForm, first_arriving
from megatron_magi.backends.sm90.support import (
    COUNTER_BYTES,
    LOG2_E,
    WAITING,
    of_rows,
    of_tables,
    work_counter,
)
from megatron_magi.backends.tiles.tiles import UNIT
from megatron_magi.cuda.arriving import Arriving
from megatron_magi.cuda.launch_list import Map, Place, Step
from megatron_magi.cuda.layout import Like
from megatron_magi.operands.options import AttnOptions
from megatron_magi.operands.passes import BackwardInputs, Gradients

_SUMS_ALIGNMENT = 32  # floats: a cache line
_POSTPROCESS_ROWS = 64  # rows of a thread block of the kernel that finishes dq
_ZEROING_BLOCKS = 1024
_STATS_HEADS = 32  # heads (of 32 rows) of a thread block of the preprocess kernel
_DELTA_HEADS = 8  # likewise if it computes delta
OF_FETCHED: tuple[Place, Place] = ("scratch", "later.dk"), ("scratch", "later.dv")
"""Where dk and dv of fetched keys are written."""
_STATS, _MINUS_DELTA, _SUMS = ("stats", "at.stats"), ("stats", "at.minus_delta"), ("stats", "at.sums")


class Part(NamedTuple):
    """Which of several passes over the same queries, that add to the same sums of dq, a backward is.

    Attributes:
        is_first: it computes row statistics and zeroes the sums of dq.
        is_last: it writes dq.
    """

    is_first: bool = True
    is_last: bool = True


WHOLE = Part()
"""The only pass."""


class BackwardSteps:
    """The kernels that write all gradients, and the communication around them.

    Hold `stream_lock` while they are queued: each assumes that the kernels before the one before it are complete. Their
    addresses are ``q``, ``k``, ``v``, ``dout``, ``out`` or ``delta``, ``lse``, ``dq``, ``dk``, ``dv``, ``stats`` and
    ``scratch``, with ``out`` also ``delta`` if wanted, and ``read`` of masks that change. Their numbers are those of a
    mask and of `scratch`.

    Args:
        inputs: tensors of the layout of the calls, or the layouts: q, k, v and dout in one dtype, as TMA can load them,
            lse and delta fp32.
        out: the output, of which delta is computed, which is contiguous; None if delta is given.
        grads: what the kernels write dq, dk and dv to.
        form: of the masks that they serve.
        options: of the calls.
        stream: raw handle.
        fetching: the kernel that fetches keys and publishes this rank's, launched right before them; None if no rank
            fetches any.
        returning: the kernel that sends gradients of fetched keys (`OF_FETCHED`) back; None if none does.
        part: which of several passes.
        wants_delta: also write delta.
    """

    def __init__(
        self,
        inputs: BackwardInputs,
        out: Like | None,
        grads: Gradients,
        form: BackwardForm,
        options: AttnOptions,
        stream: int,
        fetching: Arriving | None = None,
        returning: Step | None = None,
        part: Part = WHOLE,
        wants_delta: bool = False,
    ) -> None:
        self._inputs, self._out, self._grads, self._form, self._options = inputs, out, grads, form, options
        self._fetching, self._returning, self._part, self._wants_delta = fetching, returning, part, wants_delta
        self._arriving = fetching if form.arrives else None
        q, choice = inputs.q, form.choice
        dims = hopper_kernels.kernel_dims((q.shape[2], inputs.v.shape[2]))
        assert dims is not None
        num_rows, num_heads, _ = q.shape
        self._dims = dims
        self._splits_stats = hopper_kernels.splits_stats(q.dtype, dims, options.softcap > 0, choice.adds_dq)
        # Row statistics have padding for the reads of the last block.
        self._rows = -(-num_rows // 32) * 32 + choice.shape[1]
        self._stats_row = self._rows * choice.packed
        words = num_heads * self._rows * (1 + self._splits_stats)
        self._stats_bytes = 4 * -(-words // _SUMS_ALIGNMENT) * _SUMS_ALIGNMENT
        self._num_sums = num_heads * self._rows * dims[0] if choice.adds_dq else 0
        self._counter = 0 if form.captured else work_counter(q.device, stream).data_ptr()
        # Not with an SM margin, whose SMs the blocks of a dependent kernel would occupy while they wait.
        self._overlaps = not options.sm_margin
        self._of_keys: dict[str, Place] = {"dk": ("dk", 0), "dv": ("dv", 0)}
        if self._arriving is not None:
            self._of_keys |= zip(("dk_remote", "dv_remote"), OF_FETCHED, strict=True)
        self._of_stats = {"lse": _STATS, "delta": _MINUS_DELTA}
        self._key_sums = ("dq", 0) if form.sums_in_dq else ("scratch", "at.key_sums")

    def scratch(self, key_sums: int, begin: int) -> dict[str, int]:
        """Byte offsets of statistics and sums in the memory of a call, by name, and its size, ``num_scratch``.

        All but the first of several passes have statistics and sums of dq in the memory of that.

        Args:
            key_sums: the mask's number of this name.
            begin: first free byte, a multiple of 128.
        """
        minus_delta, sums = begin + self._stats_bytes, begin + 2 * self._stats_bytes
        end = sums + 4 * self._num_sums if self._part.is_first else begin
        size = end if self._form.sums_in_dq else end + 4 * key_sums
        return {
            "at.stats": begin, "at.minus_delta": minus_delta, "at.sums": sums, "at.key_sums": end, "num_scratch": size,
        }  # fmt: skip

    def steps(self) -> list[Step]:
        """All of them, in their order."""
        form, found = self._form, [] if self._fetching is None else [self._fetching.step]
        if self._part.is_first or form.splits:
            found.append(self._preprocess())
        found.append(self._whole() if form.choice.whole else self._parts_of_keys())
        if form.splits:
            found.append(self._postprocess_keys())
        returning = [] if self._returning is None else [self._returning]
        if form.choice.adds_dq:
            return [*found, *returning, *([self._postprocess_dq()] if self._part.is_last else [])]
        if returning and self._overlaps:  # the kernel for dq uses no results of the kernels of keys
            if not self._fetching.overlaps:  # it would occupy its SMs until the other ranks arrive
                return [*found, self._queries(), *returning]
            returning[0] = returning[0]._replace(overlaps=True)
        return [*found, *returning, self._queries()]

    def _preprocess(self) -> Step:
        """Row statistics, fp32 ``[num_heads / packed, rows * packed]`` each, and zeros in memory for sums."""
        (*_, dout, lse, delta), out = self._inputs, self._out
        packed, captured, adds_dq = self._form.choice.packed, self._form.captured, self._form.choice.adds_dq
        num_rows, num_heads = lse.shape
        scale = self._options.softmax_scale * LOG2_E
        kernel, heads = hopper_kernels.preprocess(captured), _STATS_HEADS
        if out is not None:
            kernel, heads = hopper_kernels.preprocess_delta(out.dtype, out.shape[2], captured), _DELTA_HEADS
        params = kernel.params(
            lse_row=lse.stride(0), lse_head=lse.stride(1), delta_row=delta.stride(0), delta_head=delta.stride(1),
            num_rows=num_rows, num_heads=num_heads, stats_row=self._stats_row, log2_packed=packed.bit_length() - 1,
            split=-1.0 / scale if self._splits_stats else 0.0,
            num_sums=self._num_sums // 4 if self._part.is_first else 0, concurrent=int(self._fetching is not None),
        )  # fmt: skip
        given = ["lse", "delta"]
        if out is not None:
            params.dout_row, params.dout_head, params.out_row, params.out_head = *dout.stride()[:2], *out.stride()[:2]
            given = ["lse", "dout", "out", *(["delta"] if self._wants_delta else [])]
        fields: dict[str, Place] = {name: (name, 0) for name in given}
        fields |= {"lse_out": _STATS, "delta_out": _MINUS_DELTA}
        numbers: dict[str, str] = {}
        if captured:
            numbers, fields["read"] = {"numbers": "keys.numbers", "failed": "keys.failed"}, ("read", 0)
        if adds_dq:
            fields |= {"sums": _SUMS, "key_sums": self._key_sums}
            numbers["num_key_sums"] = "key_sums.vectors"
        blocks = max(self._rows // 32 * -(-num_heads // heads), _ZEROING_BLOCKS if adds_dq else 1)
        kernel = kernel.load(lse.device)
        return Step(kernel, blocks, params, fields=fields, numbers=numbers, overlaps=self._overlaps)

    def _whole(self) -> Step:
        """Writes dk and dv, or adds to their sums if query heads are split; and adds to the sums of dq."""
        q, k, form = self._inputs.q, self._inputs.k, self._form
        kernel = hopper_kernels.backward(
            q.dtype, self._dims, self._options.softcap > 0, form.choice.adds_dq, form.arrives, form.captured
        )
        params = self._params(kernel, form.targets.store_keys, dk=self._grads.dk, dv=self._grads.dv)
        params.group, params.heads_kv = q.shape[1] // form.choice.packed // k.shape[1], k.shape[1]
        params.units = self._stats_row // UNIT
        keys, queries = WHOLE_TILE
        fields = {**self._of_stats, **self._of_keys, "dq": _SUMS, "key_sums": self._key_sums}
        numbers = {f: f"keys.{f}" for f in ("items", "num_items", "heads_inner")}
        overlaps = self._overlaps if self._arriving is None else self._arriving.overlaps
        return self._step(kernel, "keys", params, (queries, keys), fields, numbers, overlaps)

    def _parts_of_keys(self) -> Step:
        """Writes dk and dv, or adds to them, for head dims whose dq always has a kernel of its own."""
        q, k, form = self._inputs.q, self._inputs.k, self._form
        kernel = hopper_kernels.backward_keys(q.dtype, self._dims, self._options.softcap > 0, form.captured)
        params = self._params(kernel, form.targets.store_keys, dk=self._grads.dk, dv=self._grads.dv)
        num_heads = q.shape[1] // form.choice.packed
        params.num_heads, params.group = num_heads, num_heads // k.shape[1]
        keys, queries = hopper_kernels.PART_TILES[self._dims]
        numbers = {f: f"keys.{f}" for f in ("num_tiles", "splits", "heads_inner")}
        fields = {**self._of_stats, **self._of_keys}
        return self._step(kernel, "keys", params, (queries, keys), fields, numbers, self._overlaps)

    def _postprocess_keys(self) -> Step:
        """Writes the sums of the first tiles to dk (times the scale) and dv, or adds them."""
        (q, k, *_), (_, dk, dv, *_), form = self._inputs, self._grads, self._form
        store = form.targets.store_keys
        kernel = hopper_kernels.postprocess_keys(q.dtype, dk.shape[2], form.arrives, form.captured)
        params = kernel.params(
            heads_kv=k.shape[1], store=store, scale=self._options.softmax_scale, **_strides(dk=dk, dv=dv)
        )
        self._set_remote(params, store)
        numbers = {"tiles": "keys.tiles", **({"numbers": "keys.numbers"} if form.captured else {}), **self._waiting()}
        return Step(
            kernel.load(q.device), "postprocess_keys.grid", params, fields={"sums": self._key_sums, **self._of_keys},
            numbers=numbers, overlaps=self._overlaps,
        )  # fmt: skip

    def _postprocess_dq(self) -> Step:
        """Writes scale times the sums, or adds them."""
        q, dq, form, returns = self._inputs.q, self._grads.dq, self._form, self._returning is not None
        num_rows, num_heads, dim = dq.shape
        blocks = -(-num_rows // _POSTPROCESS_ROWS)
        # It may run concurrently with a kernel that sends dk and dv, which started when the sums were complete.
        kernel = hopper_kernels.postprocess_dq(q.dtype, dim, concurrent=form.arrives or returns)
        params = kernel.params(
            num_rows=num_rows, blocks=blocks, units=self._stats_row // UNIT, store=form.targets.store_dq,
            scale=self._options.softmax_scale, **_strides(dq=dq),
        )  # fmt: skip
        overlaps, fields = self._overlaps and (returns or not form.arrives), {"sums": _SUMS, "dq": ("dq", 0)}
        return Step(kernel.load(q.device), num_heads * blocks, params, fields=fields, overlaps=overlaps)

    def _queries(self) -> Step:
        """Writes dq, or adds to it. Starts before the kernel for dk and dv is complete."""
        q, dq, form = self._inputs.q, self._grads.dq, self._form
        kernel = hopper_kernels.backward_queries(
            q.dtype, self._dims, self._options.softcap > 0, form.arrives, form.captured
        )
        params = self._params(kernel, form.targets.store_dq, dq=dq)
        if not form.captured:
            params.counter += COUNTER_BYTES  # the preceding kernel may still be using its counter
        packed = form.choice.packed
        stored = Map(dq if dq.dtype == q.dtype else q, (16 // packed, packed), ("dq", 0))
        block, fields = hopper_kernels.QUERIES_WIDTH[self._dims], {**self._of_stats, "dq": ("dq", 0)}
        numbers = of_rows("queries", form.captured)
        return self._step(kernel, "queries", params, (64, block), fields, numbers, self._overlaps, stored)

    def _params(self, kernel: KernelVariant, store: int, **grads: Like) -> ctypes.Structure:
        """Parameters of a kernel that recomputes the logits, besides a mask's numbers."""
        softcap, scale = self._options.softcap, self._options.softmax_scale
        params = kernel.params(
            counter=self._counter, stats_row=self._stats_row, store=store, scale=scale,
            scale_log2=(softcap or scale) * LOG2_E, softcap_factor=scale / softcap if softcap else 0.0,
            log2_packed=self._form.choice.packed.bit_length() - 1, **_strides(**grads),
        )  # fmt: skip
        self._set_remote(params, store)
        return params

    def _set_remote(self, params: ctypes.Structure, store: int) -> None:
        if self._arriving is not None:
            self._arriving.set_barrier(params.arrival_barrier, first_arriving(len(self._inputs.k)))
            if hasattr(params, "store_remote"):
                params.store_remote = store

    def _waiting(self) -> Mapping[str, str]:
        return WAITING if self._arriving is not None else {}

    def _step(
        self, kernel: KernelVariant, name: str, params: ctypes.Structure, boxes: tuple[int, int],
        fields: dict[str, Place], numbers: dict[str, str], overlaps: bool, *stored: Map,
    ) -> Step:  # fmt: skip
        """The step of a kernel that recomputes the logits; ``boxes``: queries and keys of a box."""
        (q, k, v, dout, *_), packed, arriving = self._inputs, self._form.choice.packed, self._arriving
        of_queries, of_keys = (boxes[0] // packed, packed), (boxes[1],)
        maps = (
            Map(q, of_queries, ("q", 0), "seen.rows"), Map(k, of_keys, ("k", 0), "seen.keys"),
            Map(v, of_keys, ("v", 0), "seen.keys"), *(() if arriving is None else arriving.maps(*of_keys)),
            Map(dout, of_queries, ("dout", 0), "seen.rows"), *stored,
        )  # fmt: skip
        numbers = {**of_tables(name, self._form.captured), **numbers, **self._waiting()}
        kernel = kernel.load(q.device)
        return Step(kernel, f"{name}.grid", params, maps=maps, fields=fields, numbers=numbers, overlaps=overlaps)


def _strides(**tensors: Like) -> dict[str, int]:
    """Strides of tensors between rows and between heads, as the kernels name them."""
    return {f"{name}_{what}": t.stride(i) for name, t in tensors.items() for i, what in enumerate(("row", "head"))}
