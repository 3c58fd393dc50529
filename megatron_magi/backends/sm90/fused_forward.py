"""The forward in one launch over own keys and over fetched keys, which arrive while it runs.

Fetched keys are in separate tensors and have indices after this rank's own keys, from `first_arriving` on. The gap
between the two ensures that no block has both kinds.

The kernels of a pass depend on the mask only through numbers (`MaskNumbers`), which a worker process can compute, and
on the layout of the tensors. So the steps of a pass refer to these numbers by name, and steps that were made for one
mask are reused for others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from megatron_magi.backends.sm90 import plan as hopper_plan
from megatron_magi.backends.sm90 import tuning
from megatron_magi.backends.sm90.choices import (
    BackwardChoice,
    MaskFacts,
    Problem,
    RowTiles,
    forward_tiles,
    heads_together,
    late_blocks,
    make_problem,
    row_bytes,
)
from megatron_magi.backends.sm90.forward_kernel import make_launch
from megatron_magi.backends.sm90.plan import DevicePlan, HostPlan, ScheduleKey, Tiling
from megatron_magi.backends.sm90.support import check_support, seen_rows, sm_count
from megatron_magi.backends.tiles import tiles as hopper_tiles
from megatron_magi.cuda.arriving import Arriving
from megatron_magi.cuda.launch import MAX_BYTES, MAX_LAUNCHES, prepared
from megatron_magi.cuda.launch_list import Step
from megatron_magi.cuda.layout import Layout, Like
from megatron_magi.mask import bands as bd
from megatron_magi.operands.frozen import FrozenMemo
from megatron_magi.operands.options import AttnOptions
from megatron_magi.operands.passes import ForwardInputs, ForwardOutput
from megatron_magi.runtime.lru import LruCache, Use

_passes: LruCache[tuple, Pass] = LruCache(MAX_BYTES, MAX_LAUNCHES)
_seen: FrozenMemo[tuple[int, int, int]] = FrozenMemo()


class PassShape(NamedTuple):
    """What a pass depends on, apart from the mask and the layout of the tensors.

    Attributes:
        problem: shape; its keys are this rank's own and those that arrive.
        num_arriving: keys that arrive.
        num_sms: streaming multiprocessors of the GPU.
        sm_margin: streaming multiprocessors that it leaves free.
        deterministic: bitwise repeatable results.
    """

    problem: Problem
    num_arriving: int
    num_sms: int
    sm_margin: int
    deterministic: bool

    @property
    def num_own(self) -> int:
        """This rank's own keys, present when the kernel starts."""
        return self.problem.num_keys - self.num_arriving

    def grid(self, num_items: int) -> int:
        """Grid of a persistent kernel."""
        return max(1, min(num_items, self.num_sms - self.sm_margin))


class ForwardForm(NamedTuple):
    """What the steps of a forward depend on, apart from the mask's numbers.

    Attributes:
        tiles: tiles of queries.
        arrives: some keys arrive.
    """

    tiles: RowTiles
    arrives: bool


@dataclass(frozen=True, eq=False)
class MaskNumbers:
    """The kernel parameters of a pass that depend on the mask, computed without a device.

    Attributes:
        shape: of the pass.
        form: `ForwardForm` or `gated_backward.BackwardForm`.
        numbers: parameters of the kernels by name, all but addresses.
        tilings: tilings whose tables the kernels read, by the prefix of the names of their addresses.
        schedule: key of the schedule of the kernel for dk and dv, which reads the first tables; None in a forward.
    """

    shape: PassShape
    form: Any
    numbers: Mapping[str, int]
    tilings: Mapping[str, Tiling]
    schedule: ScheduleKey | None = None


class PassUse(NamedTuple):
    """How a pass is queued.

    Attributes:
        options: of the call.
        stream: raw handle.
        remembered: cache the pass, for other plans of an equal mask.
    """

    options: AttnOptions
    stream: int
    remembered: bool = True


def first_arriving(num_keys: int) -> int:
    """Index of the first fetched key, on a rank with ``num_keys`` own keys."""
    return num_keys + hopper_tiles.GAP


def seen_rows_and_keys(bands: np.ndarray, first: int) -> tuple[int, int, int]:
    """Numbers of queries, own keys and fetched keys up to the last that is in a visible pair; at least one of each.

    Results are cached by ``bands`` alone, so ``first``, the index of the first fetched key, must be the same for each
    call with a table.
    """
    seen = _seen.get(bands)
    if seen is None:
        arrives = bands[:, bd.K0] >= first
        row, own = seen_rows(bands[~arrives])
        last_row, later = seen_rows(bd.shift_keys(bands[arrives], -first))
        seen = max(row, last_row), own, later
        _seen.put(bands, seen)
    return seen


def row_tiling(problem: Problem, tiles: RowTiles, num_arriving: int, num_sms: int, products: float = 2.0) -> Tiling:
    """Tiles of queries; the last ``num_arriving`` of ``problem.num_keys`` keys are fetched.

    ``products``: matrix products that the kernel computes for a block.
    """
    if not num_arriving:
        return Tiling(False, problem.num_rows, *tiles)
    late = late_blocks(problem, num_arriving, tiles.shape, products)
    packs = heads_together(problem.num_keys, problem.num_heads_kv, row_bytes(problem)) * problem.group // tiles.packed
    lead = math.ceil(late * num_sms / packs)  # blocks of one head, or of one pack of heads
    first = first_arriving(problem.num_keys - num_arriving)
    return Tiling(False, problem.num_rows, *tiles, (first, num_arriving, math.ceil(late), lead))


def key_tiling(problem: Problem, choice: BackwardChoice, num_arriving: int, num_sms: int) -> Tiling:
    """Tiles of keys; the last ``num_arriving`` of ``problem.num_keys`` keys are fetched."""
    if not num_arriving:
        return Tiling(True, problem.num_keys, choice.shape, choice.packed)
    products = 5.0 if choice.adds_dq else 4.0
    late = late_blocks(problem, num_arriving, choice.shape, products)
    first = first_arriving(problem.num_keys - num_arriving)
    arriving = first, num_arriving, math.ceil(late), math.ceil(late * num_sms)
    return Tiling(True, first + num_arriving, choice.shape, choice.packed, arriving)


def seen_numbers(bands: np.ndarray, num_own: int, num_arriving: int) -> dict[str, int]:
    """Rows of each tensor up to the last that is in a visible pair, at least one, by the names of these numbers."""
    row, own, later = *seen_rows(bands), 1
    if num_arriving:
        row, own, later = seen_rows_and_keys(bands, first_arriving(num_own))
    return {"seen.rows": row, "seen.keys": own, "seen.later": later}


def row_numbers(name: str, plan: HostPlan, shape: PassShape, block: int) -> dict[str, int]:
    """Parameters of a kernel over tiles of rows, as numbers named ``name.PARAMETER``; see `support.row_work`."""
    problem = shape.problem
    of_row = row_bytes(problem)
    packs = problem.num_heads // plan.packed
    group = packs // problem.num_heads_kv
    together = heads_together(problem.num_keys, problem.num_heads_kv, of_row)
    return {
        f"{name}.step": plan.step, f"{name}.num_tiles": plan.num_tiles, f"{name}.num_heads": packs,
        f"{name}.group": group, f"{name}.head_section": together * group,
        f"{name}.log2_packed": plan.packed.bit_length() - 1,
        f"{name}.long_blocks": -(-tuning.L2_BYTES // (block * of_row)),
        f"{name}.grid": shape.grid(plan.num_tiles * packs),
    }  # fmt: skip


TABLES = ("tiles", "segments", "bounds", "step")
ROW_WORK = ("num_tiles", "num_heads", "group", "head_section", "log2_packed", "long_blocks")
GATE = {"arrival_barrier.num_rows": "later.num_rows", "arrival_barrier.part_rows": "later.part_rows"}
"""Parameters that depend on the mask: of all tiled kernels; of those over query tiles; of those that wait for keys."""


def forward_numbers(
    facts: MaskFacts, seen: Mapping[str, int], shape: PassShape, plan_of: Callable[[Tiling], HostPlan]
) -> MaskNumbers:
    """The mask's numbers for a forward.

    Args:
        facts: of the mask.
        seen: result of `seen_numbers`.
        shape: of the pass.
        plan_of: makes the plan of a tiling of the mask.
    """
    problem, tiles = shape.problem, forward_tiles(facts, shape.problem)
    tiling = row_tiling(problem, tiles, shape.num_arriving, shape.num_sms)
    numbers = {**seen, **row_numbers("rows", plan_of(tiling), shape, tiles.shape[1])}
    return MaskNumbers(shape, ForwardForm(tiles, shape.num_arriving > 0), numbers, {"rows": tiling})


def shape_of(inputs: Sequence[Like], num_arriving: int, options: AttnOptions, num_sms: int) -> PassShape:
    """Shape of a pass over q, k, v and ``num_arriving`` fetched keys, on a GPU with ``num_sms`` SMs."""
    q, k, v, *_ = inputs
    dims = q.shape[2], v.shape[2]
    problem = make_problem(q.shape[0], k.shape[0] + num_arriving, q.shape[1], k.shape[1], dims)
    return PassShape(problem, num_arriving, num_sms, options.sm_margin, options.deterministic)


class Pass:
    """A pass over one mask: its numbers, and its tables in device memory.

    Attributes:
        form: see `MaskNumbers`.
        numbers: those of `MaskNumbers`, and the addresses of the tables.
        plans: the tables, by the prefix of the names of their addresses.
        num_bytes: device memory that this keeps alive.
        lists: prepared calls that use this pass, by the object that made them; dropped with either of the two.
        use: of its entry in the cache; None if it is not cached.
    """

    def __init__(self, of_mask: MaskNumbers, bands: np.ndarray, q: Like, stream: int) -> None:
        self.form, self.numbers = of_mask.form, dict(of_mask.numbers)
        self.plans = {name: hopper_plan.device_plan(bands, t, q.device) for name, t in of_mask.tilings.items()}
        self.num_bytes = sum(plan.num_bytes for plan in self.plans.values())
        self.lists: WeakKeyDictionary[object, Any] = WeakKeyDictionary()
        self.use: Use | None = None
        if of_mask.schedule is not None:
            first = next(iter(self.plans))
            items = hopper_plan.schedule_of(self.plans[first], *of_mask.schedule).items  # the plan keeps its schedules
            self.numbers[f"{first}.items"] = items.data_ptr()
        for name, plan in self.plans.items():
            if not _is_of_stream(plan, stream):
                plan.hold_for_stream()
            begin, offsets = plan.memory.data_ptr(), plan.host.offsets
            for table, offset in zip(TABLES, offsets, strict=False):
                self.numbers[f"{name}.{table}"] = begin + offset


def _is_of_stream(plan: DevicePlan, stream: int) -> bool:
    """Whether all tables were copied on ``stream``, so that kernels on it need no event."""
    copies = [plan.ready, *(schedule.ready for schedule in tuple(plan.schedules.values()))]
    return all(ready is not None and ready.stream == stream for ready in copies)


def known_pass(
    passes: LruCache[tuple, Pass], tensors: tuple[Like | None, ...], of_arriving: tuple, bands: np.ndarray,
    use: PassUse, make: Callable[[], Pass],
) -> Pass:  # fmt: skip
    """The pass for tensors of this layout, from the cache; else made, and cached if ``use.remembered``."""
    if not use.remembered:
        return make()
    lie = [None if t is None else (t.dtype, tuple(t.shape), t.stride()) for t in tensors]
    name = (hopper_plan.content_digest(bands), tensors[0].device, use.options, use.stream, *of_arriving, *lie)
    known = passes.get(name)
    if known is None:
        known = make()
        known.use = Use(passes, name)
        passes.put(name, known, known.num_bytes)
    return known


def forward_pass(
    inputs: ForwardInputs,
    output: ForwardOutput,
    num_arriving: int,
    bands: np.ndarray,
    use: PassUse,
    known: MaskNumbers | None = None,
) -> Pass:
    """The forward pass over a mask.

    Args:
        inputs: tensors of the layout of the calls; q, k and v as TMA can load them, `sink_lse` fp32 of every row.
        output: likewise: ``out`` in the dtype of q, contiguous, ``lse`` fp32.
        num_arriving: fetched keys.
        bands: the mask, over keys indexed as described above.
        use: how it is launched.
        known: the mask's numbers, if prepared; ignored if they are of another shape.

    Raises:
        ValueError: the device, dtype or head dims are not supported.
    """
    q, _, v, _ = inputs
    check_support(q, (q.shape[2], v.shape[2]))

    def make() -> Pass:
        shape, found = shape_of(inputs, num_arriving, use.options, sm_count(q.device)), known
        if found is None or found.shape != shape:
            seen = seen_numbers(bands, shape.num_own, num_arriving)
            found = forward_numbers(
                hopper_plan.mask_facts(bands), seen, shape, lambda t: hopper_plan.device_plan(bands, t, q.device).host
            )
        return Pass(found, bands, q, use.stream)

    return known_pass(_passes, (*inputs, output.out, output.lse), (num_arriving,), bands, use, make)


def forward_step(
    inputs: ForwardInputs,
    output: ForwardOutput,
    arriving: Arriving | None,
    form: ForwardForm,
    use: PassUse,
    max_logits: bool,
) -> Step:
    """The attention kernel, to be launched right after the kernel that fetches keys, if there is one.

    Its addresses are ``q``, ``k``, ``v``, ``out``, ``lse``, ``sink`` and ``max_logits``, the last two if given, and
    those of the fetched keys; its numbers are those of a mask.

    Args:
        inputs, output: as of `forward_pass`.
        arriving: fetched keys and values; the number of rows is a number of the mask. If it is 0, the fetching kernel
            still publishes this rank's rows, concurrently with attention. None: own keys only.
        form: `Pass.form` of the masks that it serves.
        use: how it is launched.
        max_logits: fp32 ``[num_heads]``, initialized to -inf; updated.
    """
    q, k, v, sink_lse = inputs
    fields, numbers = {"out": ("out", 0), "lse": ("lse", 0)}, {n: f"rows.{n}" for n in (*TABLES, *ROW_WORK)}
    if sink_lse is not None:
        fields["sink_lse"] = ("sink", 0)
    if max_logits:
        fields["max_logits"] = ("max_logits", 0)
    places, later, values = (), (), {}
    if arriving is not None:
        places, later = arriving.places, tuple(Layout.of(t).with_rows(max(1, len(t))) for t in arriving.tensors)
        values, numbers = {"arrival_barrier": arriving.gate(first_arriving(k.shape[0]))}, {**numbers, **GATE}
    key = (
        "stream_kv forward", bool(later), q.device, use.stream, q.dtype, use.options, form.tiles, q.shape, k.shape[1:],
        v.shape[1:], q.stride(), k.stride(), v.stride(), None if sink_lse is None else sink_lse.stride(),
    )  # fmt: skip
    launch = prepared(key, lambda: make_launch(inputs, output, use.options, use.stream, form.tiles, arriving=later))
    return launch.step(
        fields, (("q", 0), ("k", 0), ("v", 0), *places, ("out", 0)),
        mapped=((q, "seen.rows"), (k, "seen.keys"), (v, "seen.keys"), *((t, "seen.later") for t in later)),
        values=values, numbers=numbers, num_blocks="rows.grid", overlaps=arriving is not None and arriving.overlaps,
    )  # fmt: skip
