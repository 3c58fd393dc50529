"""The backward in one launch over own keys and fetched keys, which arrive while it runs; `backward` runs stages.

For head dims whose backward can be one kernel (`kernels.WHOLE_DIMS`). Keys are indexed, and the mask's numbers are
separated from the rest, as in `fused_forward`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from megatron_magi.backends.sm90 import plan as hopper_plan
from megatron_magi.backends.sm90.backward_ends import RowMemory, finish_dq_launch, finish_keys_launch, stats_launch
from megatron_magi.backends.sm90.backward_kernels import Common, Inputs, Steps, queries_launch, whole_launch
from megatron_magi.backends.sm90.backward_targets import STORE_FLOAT, STORE_HALF
from megatron_magi.backends.sm90.choices import (
    BackwardChoice,
    MaskFacts,
    backward_choice,
    most_split,
    most_split_at_once,
    query_tiles,
)
from megatron_magi.backends.sm90.fused_forward import (
    GATE,
    ROW_WORK,
    TABLES,
    MaskNumbers,
    Pass,
    PassShape,
    PassUse,
    first_arriving,
    key_tiling,
    known_pass,
    row_numbers,
    row_tiling,
    seen_numbers,
    shape_of,
)
from megatron_magi.backends.sm90.plan import HostPlan, ScheduleKey, Tiling
from megatron_magi.backends.sm90.support import LOG2_E, may_overlap, sm_count
from megatron_magi.backends.tiles.tiles import UNIT
from megatron_magi.cuda.arriving import Arriving
from megatron_magi.cuda.launch import MAX_BYTES, MAX_LAUNCHES
from megatron_magi.cuda.launch_list import Place, Step
from megatron_magi.cuda.layout import Like
from megatron_magi.runtime.lru import LruCache

_passes: LruCache[tuple, Pass] = LruCache(MAX_BYTES, MAX_LAUNCHES)


class BackwardForm(NamedTuple):
    """What the steps of a backward depend on, apart from the mask's numbers.

    Attributes:
        choice: kernels.
        arrives: some keys are fetched.
        splits: some tiles of keys are split by query head, so another kernel converts the sums of their dk and dv.
        sums_in_dq: these sums are in the memory of dq until dq is written.
    """

    choice: BackwardChoice
    arrives: bool
    splits: bool
    sums_in_dq: bool


class BackwardTensors(NamedTuple):
    """Tensors of the layout of a backward's.

    Attributes:
        inputs: q, k, v, dout in one dtype, as TMA can load them.
        out: the output.
        lse: fp32 ``[num_rows, num_heads]``.
        grads: dq in the dtype of q; dk and dv, also those of fetched keys, in that dtype or fp32; all contiguous.
    """

    inputs: Inputs
    out: Like
    lse: Like
    grads: tuple[Like, Like, Like]


class Sent(NamedTuple):
    """The communication around a backward.

    Attributes:
        arriving: fetched keys, at least one; None if this rank fetches none.
        places: where dk and dv of these keys are written.
        moves: a kernel that transfers keys is launched right before the backward.
        returns: a kernel that sends ``places`` back is launched between `Steps.keys` and `Steps.rest`.
    """

    arriving: Arriving | None
    places: tuple[Place, Place]
    moves: bool
    returns: bool


def backward_numbers(
    facts: MaskFacts,
    seen: Mapping[str, int],
    shape: PassShape,
    plan_of: Callable[[Tiling], HostPlan],
    schedule_of: Callable[[Tiling, ScheduleKey], tuple[int, int]],
) -> MaskNumbers:
    """The mask's numbers for a backward; arguments as in `fused_forward.forward_numbers`.

    ``schedule_of``: returns the number of items of a schedule, and of tiles whose heads are split.
    """
    problem, num_arriving = shape.problem, shape.num_arriving
    num_sms = max(1, shape.num_sms - shape.sm_margin)
    choice = backward_choice(facts, problem, shape.deterministic)
    assert choice.whole
    # Sums of dk and dv are in the memory of dq until dq is written, if they fit.
    room = 2 * problem.num_rows * problem.num_heads * problem.dims[0]
    tiling = key_tiling(problem, choice, num_arriving, num_sms)
    most = (most_split_at_once if num_arriving else most_split)(choice, problem, room)
    plan, group = plan_of(tiling), problem.group // choice.packed
    key = hopper_plan.schedule_key(plan, problem.num_heads_kv, group, num_sms, most, problem.is_narrow)
    num_items, num_split = schedule_of(tiling, key)
    key_sums = 2 * num_split * choice.shape[0] * problem.num_heads_kv * problem.dims[0]
    numbers = {
        **seen, "keys.step": plan.step, "keys.num_items": num_items, "keys.heads_inner": int(plan.heads_inner),
        "keys.grid": shape.grid(num_items), "key_sums": key_sums, "key_sums.vectors": key_sums // 4,
        "finish_keys.grid": 4 * num_split * problem.num_heads_kv,
    }  # fmt: skip
    tilings = {"keys": tiling}
    if not choice.adds_dq:
        tiles = query_tiles(problem, choice.packed)
        tilings["queries"] = row_tiling(problem, tiles, num_arriving, num_sms, products=3.0)
        numbers |= row_numbers("queries", plan_of(tilings["queries"]), shape, tiles.shape[1])
    form = BackwardForm(choice, num_arriving > 0, num_split > 0, 4 * key_sums <= room)
    return MaskNumbers(shape, form, numbers, tilings, key)


def backward_pass(
    tensors: BackwardTensors, num_arriving: int, bands: np.ndarray, use: PassUse, known: MaskNumbers | None = None
) -> Pass:
    """The backward pass over a mask; arguments as of `fused_forward.forward_pass`."""
    q = tensors.inputs[0]

    def make() -> Pass:
        shape, found = shape_of(tensors.inputs, num_arriving, use.options, sm_count(q.device)), known
        if found is None or found.shape != shape:

            def plan_of(tiling: Tiling) -> hopper_plan.DevicePlan:
                return hopper_plan.device_plan(bands, tiling, q.device)

            def schedule_of(tiling: Tiling, key: ScheduleKey) -> tuple[int, int]:
                made = hopper_plan.schedule_of(plan_of(tiling), *key)
                return len(made.items), made.num_split

            seen = seen_numbers(bands, shape.num_own, num_arriving)
            facts = hopper_plan.mask_facts(bands)
            found = backward_numbers(facts, seen, shape, lambda tiling: plan_of(tiling).host, schedule_of)
        return Pass(found, bands, q, use.stream)

    of_grads = num_arriving, tensors.grads[1].dtype, tensors.out.stride(), tensors.lse.stride()
    return known_pass(_passes, tensors.inputs, of_grads, bands, use, make)


def _row_memory(tensors: BackwardTensors, form: BackwardForm, use: PassUse) -> RowMemory:
    q, _, v, _ = tensors.inputs
    num_rows, num_heads, dim = q.shape
    return RowMemory.of(num_rows, num_heads, (dim, v.shape[2]), q.dtype, use.options.softcap, form.choice)


def scratch_numbers(
    tensors: BackwardTensors, form: BackwardForm, use: PassUse, key_sums: int, begin: int
) -> tuple[dict[str, int], int]:
    """Byte offsets of statistics and sums in the scratch memory of a call, by name, and its size.

    Args:
        tensors, form, use: of the pass.
        key_sums: the mask's number of this name.
        begin: first free byte, a multiple of 128.
    """
    sizes = _row_memory(tensors, form, use)
    minus_delta = begin + 4 * sizes.stats
    sums = minus_delta + 4 * sizes.stats
    end = sums + 4 * sizes.sums
    found = {"at.stats": begin, "at.minus_delta": minus_delta, "at.sums": sums, "at.key_sums": end}
    return found, end if form.sums_in_dq else end + 4 * key_sums


def backward_steps(tensors: BackwardTensors, sent: Sent, known: Pass, use: PassUse, wants_delta: bool) -> Steps:
    """The kernels that write all gradients; the first is launched right after the kernel that fetches keys.

    Their addresses are ``q``, ``k``, ``v``, ``dout``, ``out``, ``lse``, ``dq``, ``dk``, ``dv``, ``scratch``, and
    ``delta`` if wanted; their numbers are those of a mask and of `scratch_numbers`.

    Args:
        tensors: tensors of the layout of the calls.
        sent: communication around them.
        known: of a mask of the form.
        use: how they are launched.
        wants_delta: also write delta, fp32 ``[num_rows, num_heads]``, contiguous.
    """
    return _Steps(tensors, sent, known, use).make(wants_delta)


class _Steps:
    """Makes the steps of a backward, in launch order."""

    def __init__(self, tensors: BackwardTensors, sent: Sent, known: Pass, use: PassUse) -> None:
        self._tensors, self._sent, self._known, self._use = tensors, sent, known, use
        q, k, v, dout = tensors.inputs
        self._form, self._sizes = known.form, _row_memory(tensors, known.form, use)
        later = () if sent.arriving is None else tuple(sent.arriving.tensors)
        num_stats = self._sizes.rows * self._form.choice.packed
        self._common = Common(tensors.inputs, (q.shape[2], v.shape[2]), num_stats, use.options, use.stream, later)
        self._store = STORE_HALF if tensors.grads[1].dtype == q.dtype else STORE_FLOAT
        self._overlaps = may_overlap(use.options)
        self._mapped = (
            (q, "seen.rows"), (k, "seen.keys"), (v, "seen.keys"), *((t, "seen.later") for t in later),
            (dout, "seen.rows"),
        )  # fmt: skip
        self._maps: tuple[Place, ...] = (("q", 0), ("k", 0), ("v", 0), ("dout", 0))
        self._gate, self._of_later, self._gate_numbers = {}, {}, {}
        if sent.arriving is not None:
            self._maps = (*self._maps[:3], *sent.arriving.places, ("dout", 0))
            self._gate = {"arrival_barrier": sent.arriving.gate(first_arriving(len(k)))}
            self._of_later = dict(zip(("dk_remote", "dv_remote"), sent.places, strict=True))
            self._gate_numbers = GATE
        self._of_rows = {"lse": ("scratch", "at.stats"), "delta": ("scratch", "at.minus_delta")}
        self._of_keys = {"dk": ("dk", 0), "dv": ("dv", 0), **self._of_later}
        self._key_sums = ("dq", 0) if self._form.sums_in_dq else ("scratch", "at.key_sums")

    def make(self, wants_delta: bool) -> Steps:
        """All of them."""
        keys = [self._keys()]
        if self._form.splits:
            keys.append(self._finish_keys())
        adds_dq = self._form.choice.adds_dq
        rest = self._finish_dq() if adds_dq else self._queries()
        before = self._prepare(wants_delta)
        return Steps((before,), tuple(keys), (rest,), not adds_dq and self._overlaps)

    def _prepare(self, wants_delta: bool) -> Step:
        (_, out, lse, _), dout = self._tensors, self._tensors.inputs[3]
        sizes, choice = self._sizes, self._form.choice
        scale = sizes.splits_stats * self._use.options.softmax_scale * LOG2_E
        launch = stats_launch(
            lse, lse.new_empty(lse.shape), sizes.rows, choice.packed, choice.adds_dq, scale, of_delta=(dout, out)
        )
        given = ("dout", "out", "lse", *(("delta",) if wants_delta else ()))
        return launch.step(
            {
                **{name: (name, 0) for name in given}, "sums": ("scratch", "at.sums"), "key_sums": self._key_sums,
                "lse_out": self._of_rows["lse"], "delta_out": self._of_rows["delta"],
            },
            values={"num_sums": sizes.sums // 4, "concurrent": int(self._sent.moves)},
            numbers={"num_key_sums": "key_sums.vectors"}, overlaps=self._overlaps,
        )  # fmt: skip

    def _keys(self) -> Step:
        known, arriving, choice = self._known, self._sent.arriving, self._form.choice
        dk, dv = self._tensors.grads[1:]
        launch = whole_launch(self._common, choice.adds_dq, known.plans["keys"], self._store, (dk, dv))
        store = {"store_remote": self._store, **self._gate} if arriving is not None else {}
        names = (*TABLES, "items", "num_items", "heads_inner")
        return launch.step(
            {**self._of_rows, **self._of_keys, "dq": ("scratch", "at.sums"), "key_sums": self._key_sums}, self._maps,
            mapped=self._mapped, values=store, numbers={**{n: f"keys.{n}" for n in names}, **self._gate_numbers},
            num_blocks="keys.grid", overlaps=self._overlaps if arriving is None else arriving.overlaps,
        )  # fmt: skip

    def _finish_keys(self) -> Step:
        dk, dv = self._tensors.grads[1:]
        stream_kv, dtype = self._form.arrives, self._tensors.inputs[0].dtype
        launch = finish_keys_launch(dk, dv, dtype, self._use.options.softmax_scale, self._store, stream_kv=stream_kv)
        return launch.step(
            {"sums": self._key_sums, **self._of_keys},
            values={"store_remote": self._store, **self._gate} if stream_kv else {},
            numbers={"tiles": "keys.tiles", **self._gate_numbers}, num_blocks="finish_keys.grid",
            overlaps=self._overlaps,
        )  # fmt: skip

    def _finish_dq(self) -> Step:
        sent, stream_kv = self._sent, self._form.arrives
        launch = finish_dq_launch(
            self._tensors.grads[0], self._common.stats_row // UNIT, self._tensors.inputs[0].dtype,
            self._use.options.softmax_scale, STORE_HALF, concurrent=stream_kv or sent.returns,
        )  # fmt: skip
        overlaps = self._overlaps and (sent.returns or not stream_kv)
        return launch.step({"sums": ("scratch", "at.sums"), "dq": ("dq", 0)}, overlaps=overlaps)

    def _queries(self) -> Step:
        launch = queries_launch(self._common, self._known.plans["queries"], STORE_HALF, self._tensors.grads[0])
        names = {name: f"queries.{name}" for name in (*TABLES, *ROW_WORK)}
        return launch.step(
            {**self._of_rows, "dq": ("dq", 0)}, (*self._maps, ("dq", 0)), mapped=self._mapped, values=self._gate,
            numbers={**names, **self._gate_numbers}, num_blocks="queries.grid", overlaps=self._overlaps,
        )  # fmt: skip
