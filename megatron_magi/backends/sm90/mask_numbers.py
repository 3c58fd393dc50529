"""The numbers of a mask on which the kernels of a pass depend, and its tables on the device.

The keys of a pass are this rank's own and, in one launch over all keys, those that are fetched while it runs. Fetched
keys are in separate tensors and have indices after this rank's own keys, from `first_arriving` on. The gap between the
two ensures that no block has both kinds.

The kernels depend on the mask only through numbers (`MaskNumbers`), which a worker process can compute. So the steps of
a pass refer to these numbers by name (`forward_steps`, `backward_steps`), and steps that were made for one mask are
reused for others.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch

from megatron_magi.backends.base import is_changing
from megatron_magi.backends.sm90 import plan as hopper_plan
from megatron_magi.backends.sm90 import tuning
from megatron_magi.backends.sm90.backward_targets import DIRECT, Targets
from megatron_magi.backends.sm90.choices import (
    BackwardChoice,
    MaskFacts,
    Problem,
    RowTiles,
    backward_choice,
    forward_tiles,
    heads_together,
    late_blocks,
    most_split,
    most_split_at_once,
    query_tiles,
    row_bytes,
)
from megatron_magi.backends.sm90.plan import DevicePlan, DeviceSchedule, HostPlan, ScheduleKey, Tiling
from megatron_magi.backends.sm90.schedule import Schedule, best_splits
from megatron_magi.backends.sm90.support import problem_of, sm_count
from megatron_magi.backends.tiles import tiles as hopper_tiles
from megatron_magi.cuda.layout import Like
from megatron_magi.mask import bands as bd
from megatron_magi.operands.frozen import FrozenMemo
from megatron_magi.operands.options import AttnOptions

_seen: FrozenMemo[Mapping[str, int]] = FrozenMemo()


class PassShape(NamedTuple):
    """What a pass depends on, apart from the mask and the layout of the tensors.

    Attributes:
        problem: shape; its keys are this rank's own and those that arrive.
        num_arriving: keys that arrive.
        num_sms: streaming multiprocessors of the GPU.
        sm_margin: streaming multiprocessors that it leaves free.
        deterministic: bitwise repeatable results.
        merges: a forward that changes nothing where a row sees none of these keys: it is merged into a result over
            other keys.
        captured: kernels read the numbers of the mask from memory (`changing_mask`).
    """

    problem: Problem
    num_arriving: int
    num_sms: int
    sm_margin: int
    deterministic: bool
    merges: bool = False
    captured: bool = False

    @property
    def num_own(self) -> int:
        """This rank's own keys, present when the kernel starts."""
        return self.problem.num_keys - self.num_arriving

    @property
    def free_sms(self) -> int:
        """Streaming multiprocessors that it may use."""
        return max(1, self.num_sms - self.sm_margin)

    def grid(self, num_items: int) -> int:
        """Grid of a persistent kernel."""
        return max(1, min(num_items, self.free_sms))


class ForwardForm(NamedTuple):
    """What the steps of a forward depend on, apart from the mask's numbers.

    Attributes:
        tiles: tiles of queries.
        arrives: some keys arrive.
        captured: as in `PassShape`.
    """

    tiles: RowTiles
    arrives: bool
    captured: bool = False


class BackwardForm(NamedTuple):
    """What the steps of a backward depend on, apart from the mask's numbers.

    Attributes:
        choice: kernels.
        arrives: some keys are fetched.
        splits: some tiles of keys are split by query head, so another kernel converts the sums of their dk and dv.
        sums_in_dq: these sums are in the memory of dq until dq is written.
        targets: memory that gradients are written to.
        captured: as in `PassShape`.
    """

    choice: BackwardChoice
    arrives: bool
    splits: bool
    sums_in_dq: bool
    targets: Targets = DIRECT
    captured: bool = False


@dataclass(frozen=True, eq=False)
class MaskNumbers:
    """The kernel parameters of a pass that depend on the mask, computed without a device; or with one.

    Attributes:
        shape: of the pass.
        form: of the steps.
        numbers: parameters of the kernels by name, all but addresses; with ``plans`` also these.
        tilings: tilings whose tables the kernels read, by the prefix of the names of their addresses.
        schedule: key of the schedule of the kernel for dk and dv, which reads the first tables; None in a forward.
        plans: the tables on a device, by the same prefix.
    """

    shape: PassShape
    form: ForwardForm | BackwardForm
    numbers: Mapping[str, int]
    tilings: Mapping[str, Tiling]
    schedule: ScheduleKey | None = None
    plans: Mapping[str, DevicePlan] = field(default_factory=dict)

    def on_device(self, plan_of: Callable[[Tiling], DevicePlan], stream: int) -> MaskNumbers:
        """The same with tables and their addresses.

        Args:
            plan_of: returns the plan of a tiling of the mask.
            stream: on which it is read; raw handle.
        """
        numbers, plans = dict(self.numbers), {name: plan_of(tiling) for name, tiling in self.tilings.items()}
        for name, plan in plans.items():
            schedule = None
            if self.schedule is not None and name == "keys":
                schedule = hopper_plan.schedule_of(plan, *self.schedule)  # the plan keeps it
                numbers["keys.items"] = schedule.items.data_ptr()
            if not _is_of_stream(plan, stream):
                plan.hold_for_stream()
            tables = {"tiles": plan.tiles, "segments": plan.passes, "bounds": plan.bounds}
            more = plan.fields(busy=self.shape.merges, second=name == "queries", schedule=schedule)
            numbers |= {f"{name}.{of_table}": number for of_table, number in {**tables, **more}.items()}
        return replace(self, numbers=numbers, plans=plans)


type Prepared = tuple[MaskNumbers | None, MaskNumbers | None]
"""The numbers of a mask for a forward and a backward, as far as a worker has found them."""


def first_arriving(num_keys: int) -> int:
    """Index of the first fetched key, on a rank with ``num_keys`` own keys."""
    return num_keys + hopper_tiles.GAP


def seen_numbers(bands: np.ndarray, num_own: int) -> dict[str, int]:
    """Rows of each tensor up to the last that is in a visible pair, at least one, by the names of these numbers.

    Results are cached by ``bands`` alone, so ``num_own``, this rank's own keys, must be the same for each call with a
    table that has fetched keys.
    """
    seen = _seen.get(bands)
    if seen is None:
        first = first_arriving(num_own)
        arrives = bands[:, bd.K0] >= first
        seen = {
            "seen.rows": int(bands[:, bd.Q1].max(initial=1)),
            "seen.keys": int(bands[~arrives, bd.K1].max(initial=1)),
            "seen.later": int(bands[arrives, bd.K1].max(initial=first + 1)) - first,
        }
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


def tilings_of(is_backward: bool, facts: MaskFacts, shape: PassShape) -> dict[str, Tiling]:
    """The tilings whose tables the kernels of a pass read, by the prefix of the names of their addresses."""
    problem, num_arriving = shape.problem, shape.num_arriving
    if not is_backward:
        return {"rows": row_tiling(problem, forward_tiles(facts, problem), num_arriving, shape.num_sms)}
    choice = backward_choice(facts, problem, shape.deterministic)
    found = {"keys": key_tiling(problem, choice, num_arriving, shape.free_sms)}
    if not choice.adds_dq:
        tiles = query_tiles(problem, choice.packed)
        found["queries"] = row_tiling(problem, tiles, num_arriving, shape.free_sms, products=3.0)
    return found


def row_numbers(name: str, plan: HostPlan, shape: PassShape, block: int) -> dict[str, int]:
    """Parameters of a kernel over tiles of rows, in blocks of ``block`` keys, as numbers named ``name.PARAMETER``.

    Packed heads count as one. A section of heads is whole groups whose keys and values fit in the L2 cache; tiles with
    more blocks than fit start together on all SMs (keep_together).
    """
    problem = shape.problem
    num_tiles = int(np.count_nonzero(plan.costs)) if shape.merges else plan.num_tiles  # those that see nothing are last
    of_row = row_bytes(problem)
    packs = problem.num_heads // plan.packed
    group = packs // problem.num_heads_kv
    together = heads_together(problem.num_keys, problem.num_heads_kv, of_row)
    return {
        f"{name}.step": plan.step, f"{name}.num_tiles": num_tiles, f"{name}.num_heads": packs,
        f"{name}.group": group, f"{name}.head_section": together * group,
        f"{name}.log2_packed": plan.packed.bit_length() - 1,
        f"{name}.long_blocks": -(-tuning.L2_BYTES // (block * of_row)),
        f"{name}.grid": shape.grid(num_tiles * packs),
    }  # fmt: skip


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
    tilings = tilings_of(False, facts, shape)
    tiling = tilings["rows"]
    numbers = {**seen, **row_numbers("rows", plan_of(tiling), shape, tiling.shape[1])}
    form = ForwardForm(RowTiles(tiling.shape, tiling.packed), shape.num_arriving > 0, shape.captured)
    return MaskNumbers(shape, form, numbers, tilings)


def items_key(choice: BackwardChoice, plan: HostPlan, shape: PassShape, room: int | None) -> ScheduleKey:
    """Key of the schedule of the kernel for dk and dv; ``plan``: of its tiling, ``room``: as in `most_split`."""
    problem = shape.problem
    most = (most_split_at_once if shape.num_arriving else most_split)(choice, problem, room)
    group = problem.group // choice.packed
    return hopper_plan.schedule_key(plan, problem.num_heads_kv, group, shape.free_sms, most, problem.is_narrow)


def backward_numbers(
    facts: MaskFacts,
    seen: Mapping[str, int],
    shape: PassShape,
    plan_of: Callable[[Tiling], HostPlan],
    schedule_of: Callable[[Tiling, ScheduleKey], Schedule | DeviceSchedule],
    targets_of: Callable[[int], tuple[Targets, int | None]] | None = None,
) -> MaskNumbers:
    """The mask's numbers for a backward; arguments as in `forward_numbers`.

    ``schedule_of``: returns a schedule of a tiling. ``targets_of``: returns, for a number of splits of the query heads
    of a group, where gradients are written, and how many bytes of the memory of dq can hold sums until dq is written,
    None if it is no such memory; when None the kernels write all gradients, contiguous and in the dtype of q.
    """
    problem = shape.problem
    choice, tilings = backward_choice(facts, problem, shape.deterministic), tilings_of(True, facts, shape)
    plan, splits = plan_of(tilings["keys"]), 1
    if not choice.whole and not shape.deterministic:
        splits = best_splits(plan.costs, problem.num_heads_kv, problem.group // choice.packed, shape.free_sms)
    targets, room = DIRECT, 2 * problem.num_rows * problem.num_heads * problem.dims[0]
    if targets_of is not None:
        targets, room = targets_of(splits)
    numbers = {**seen, "keys.step": plan.step, "keys.heads_inner": int(plan.heads_inner)}
    key, num_split, key_sums = None, 0, 0
    if choice.whole:
        key = items_key(choice, plan, shape, room)
        schedule = schedule_of(tilings["keys"], key)
        num_items, num_split = len(schedule.items), schedule.num_split
        tile_sums = 2 * choice.shape[0] * problem.num_heads_kv * problem.dims[0]
        key_sums = num_split * tile_sums
        # Of a captured launch, the kernel that zeroes sums reads the number of tiles from memory.
        zeroed = tile_sums if shape.captured else key_sums
        numbers |= {
            "keys.num_items": num_items, "keys.grid": shape.grid(num_items), "key_sums": key_sums,
            "key_sums.vectors": zeroed // 4, "postprocess_keys.grid": 4 * num_split * problem.num_heads_kv,
        }  # fmt: skip
    else:
        grid = shape.grid(plan.num_tiles * problem.num_heads_kv * splits)
        numbers |= {"keys.num_tiles": plan.num_tiles, "keys.splits": splits, "keys.grid": grid, "key_sums": 0}
    if "queries" in tilings:
        tiling = tilings["queries"]
        numbers |= row_numbers("queries", plan_of(tiling), shape, tiling.shape[1])
    sums_in_dq = room is not None and 4 * key_sums <= room
    form = BackwardForm(choice, shape.num_arriving > 0, num_split > 0, sums_in_dq, targets, shape.captured)
    return MaskNumbers(shape, form, numbers, tilings, key)


def pass_shape(inputs: Sequence[Like], num_arriving: int, options: AttnOptions, merges: bool = False) -> PassShape:
    """Shape of a pass over q, k, v and ``num_arriving`` fetched keys; ``merges`` as in `PassShape`."""
    q, k, v = inputs
    problem, num_sms = problem_of(q, k, v), sm_count(q.device)
    problem = problem._replace(num_keys=problem.num_keys + num_arriving)
    return PassShape(problem, num_arriving, num_sms, options.sm_margin, options.deterministic, merges)


def _is_of_stream(plan: DevicePlan, stream: int) -> bool:
    """Whether all tables were copied on ``stream``, so that kernels on it need no event."""
    copies = [plan.ready, *(schedule.ready for schedule in tuple(plan.schedules.values()))]
    return all(ready is not None and ready.stream == stream for ready in copies)


def _tiling_for(name: str, is_backward: bool, facts: MaskFacts, shape: PassShape, num_arriving: int) -> Tiling:
    """One of `tilings_of` for a mask of the same facts and own keys of which ``num_arriving`` keys arrive."""
    problem = shape.problem._replace(num_keys=shape.num_own + num_arriving)
    return tilings_of(is_backward, facts, shape._replace(problem=problem, num_arriving=num_arriving))[name]


def numbers_on_device(
    is_backward: bool,
    shape: PassShape,
    bands: np.ndarray,
    device: torch.device,
    stream: int,
    prepared: Prepared | None = None,
    targets_of: Callable[[int], tuple[Targets, int | None]] | None = None,
) -> MaskNumbers:
    """The numbers and tables of a mask for a pass.

    Args:
        is_backward: else a forward.
        shape: of the pass.
        bands: the mask, over keys indexed as described above.
        device, stream: where it is read.
        prepared: the mask's numbers; ignored if they are of another shape.
        targets_of: see `backward_numbers`.
    """
    shape = shape._replace(captured=is_changing(bands))

    @functools.cache  # each plan is looked up or made once
    def plan_of(tiling: Tiling) -> DevicePlan:
        if not is_changing(bands):
            return hopper_plan.device_plan(bands, tiling, device)
        made = tilings_of(is_backward, bands.mask.facts, shape)
        name = next(name for name, known in made.items() if known == tiling)
        return bands.mask.plan(tiling, functools.partial(_tiling_for, name, is_backward, bands.mask.facts, shape))

    def schedule_of(tiling: Tiling, key: ScheduleKey) -> DeviceSchedule:
        return hopper_plan.schedule_of(plan_of(tiling), *key)

    known = None if prepared is None else prepared[is_backward]
    if known is None or known.shape != shape:
        facts, seen = hopper_plan.mask_facts(bands), seen_numbers(bands, shape.num_own)
        found = facts, seen, shape, lambda tiling: plan_of(tiling).host
        known = backward_numbers(*found, schedule_of, targets_of) if is_backward else forward_numbers(*found)
    return known.on_device(plan_of, stream)
