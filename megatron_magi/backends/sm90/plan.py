"""Tile plans on the CPU and on the device, made once for a mask and cached."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from typing import ClassVar, NamedTuple
from weakref import WeakValueDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_magi.backends.base import Ready, is_changing, refuse_tables_in_graph
from megatron_magi.backends.sm90 import cpp_tables, tuning
from megatron_magi.backends.sm90 import schedule as hopper_schedule
from megatron_magi.backends.sm90.choices import MaskFacts
from megatron_magi.backends.sm90.schedule import Schedule
from megatron_magi.backends.tiles import cpp_tiles
from megatron_magi.backends.tiles import tiles as hopper_tiles
from megatron_magi.backends.tiles.tiles import TilePlan
from megatron_magi.mask import bands as bd
from megatron_magi.operands.frozen import FrozenMemo
from megatron_magi.runtime.lru import LruCache
from megatron_magi.runtime.upload import made_once, upload

_MAX_PLANS = 256
_MAX_BYTES = 256 << 20  # of device memory
_plans: LruCache[tuple, DevicePlan] = LruCache(_MAX_BYTES, _MAX_PLANS)
_prepared: WeakValueDictionary[tuple, DevicePlan] = (
    WeakValueDictionary()
)  # plans of prepared batches, as long as these live
_digests: FrozenMemo[bytes] = FrozenMemo()
_facts: LruCache[bytes, MaskFacts] = LruCache(0, _MAX_PLANS)


_NO_TABLE = np.empty(0, dtype=np.int32)
_NO_TABLE.setflags(write=False)

ScheduleKey = tuple[int, int, int, int, bool]
"""Arguments of `HostPlan.schedule`, on which a schedule depends."""


@dataclass(frozen=True, eq=False)
class HostPlan:
    """A `TilePlan` in the form that is copied to a device.

    Attributes:
        starts: int32 ``[num_tiles]``, first row of each tile.
        costs: int64 ``[num_tiles]``, blocks of each tile; tiles that see nothing come last.
        table: int32, the tables of tiles, passes and bounds one after the other.
        offsets: where these begin in ``table``, bytes.
        step: columns from one block to the next.
        heads_inner: process each block for all query heads of a group before the next block, not head by head.
        long_tile: blocks from which on a tile is long, see `schedule.long_tile`.
        packed: query heads that count as one, see `packed_heads`; they share a tile or a block of queries.
        arriving: see `Tiling`.
        planner: that makes schedules too, see `cpp_tiles.chosen`.
    """

    starts: NDArray[np.int32]
    costs: NDArray[np.int64]
    table: NDArray[np.int32]
    offsets: tuple[int, int, int]
    step: int
    heads_inner: bool
    long_tile: int
    packed: int
    arriving: tuple[int, int, int, int] | None = None
    planner: str = "auto"

    @classmethod
    def of(
        cls,
        plan: TilePlan,
        drift: tuple[float, float],
        packed: int,
        arriving: tuple[int, int, int, int] | None = None,
        planner: str = "auto",
    ) -> HostPlan:
        """Makes the plan from a tile plan; ``drift``: result of `hopper_tiles.drift`."""
        parts = [plan.tiles.reshape(-1), plan.passes.reshape(-1), plan.bounds.reshape(-1)]
        table = np.concatenate([*parts, np.zeros(4, dtype=np.int32)])
        of_tiles = plan.tiles[:, 0].copy(), plan.costs, table, len(plan.passes), plan.step
        return cls.made(*of_tiles, drift, packed, arriving, planner)

    @classmethod
    def made(
        cls,
        starts: NDArray[np.int32],
        costs: NDArray[np.int64],
        table: NDArray[np.int32],
        num_passes: int,
        step: int,
        drift: tuple[float, float],
        packed: int,
        arriving: tuple[int, int, int, int] | None,
        planner: str = "auto",
    ) -> HostPlan:
        """The plan of these tables, with ``num_passes`` passes; ``drift`` as of `of`."""
        of_tiles, of_passes = 16 * len(costs), 32 * num_passes
        return cls(
            starts, costs, table, (0, of_tiles, of_tiles + of_passes), step,
            heads_inner=hopper_schedule.differ_in_length(*drift), long_tile=packed * hopper_schedule.long_tile(*drift),
            packed=packed, arriving=arriving, planner=planner,
        )  # fmt: skip

    @property
    def num_tiles(self) -> int:
        """Tiles of one head."""
        return len(self.costs)

    def without_table(self) -> HostPlan:
        """The plan without its table, which is on a device."""
        return replace(self, table=_NO_TABLE)

    def schedule(self, heads_kv: int, group: int, num_sms: int, max_split: int, narrow: bool = False) -> Schedule:
        """Items of the backward in one kernel; see `schedule.make_schedule`."""
        long_tile = self.long_tile
        if group == 1 and max_split:  # the items of one head need no sums of dk and dv
            long_tile = min(long_tile, tuning.LONG_BLOCKS_UNEVEN)
        return hopper_schedule.make_schedule(
            self.starts, self.costs, heads_kv, group, num_sms,
            max_split=min(max_split, self.num_tiles), long_tile=long_tile, narrow=narrow,
            own=None if self.arriving is None else (self.arriving[0], self.arriving[-1]), planner=self.planner,
        )  # fmt: skip


@dataclass(frozen=True, eq=False)
class DevicePlan:
    """A `HostPlan` in device memory.

    Attributes:
        host: the same on the CPU, without its table.
        memory: int32 tensor that holds all tables.
        ready: completion of their copy; None if complete.
        charged_bytes: device memory that this plan keeps alive, if more than ``memory``.
        schedules: results of `schedule_of`.
    """

    host: HostPlan
    memory: Tensor
    ready: Ready | None = None
    charged_bytes: int | None = None
    schedules: dict[tuple, DeviceSchedule] = field(default_factory=dict)
    is_static: ClassVar[bool] = False  # kernels read the mask's numbers from memory, see `changing_mask`

    def make_schedule(self, key: ScheduleKey) -> DeviceSchedule:
        """The schedule of a `schedule_key`."""
        made = self.host.schedule(*key)
        return DeviceSchedule(upload([made.items], self.memory.device)[0], made.num_split)

    def fields(
        self, *, busy: bool = False, second: bool = False, schedule: DeviceSchedule | None = None
    ) -> dict[str, int]:
        """Further parameters of a launch.

        Args:
            busy: without tiles that see nothing.
            second: use the second counter, see `support.work_counter`.
            schedule: its work items; None if they are tiles.
        """
        del busy, second, schedule
        return {}

    def hold_for_stream(self) -> None:
        """Makes the current stream wait for the tables, and keeps their memory until work queued on it is complete.

        The host may be several masks ahead of the device, on several streams.

        Raises:
            RuntimeError: the stream is being captured: the graph would read the tables after they are freed.
        """
        if not self.memory.is_cuda:
            return
        refuse_tables_in_graph(self.memory.device, "ffa")
        current = torch.cuda.current_stream(self.memory.device)
        tables = [(self.memory, self.ready), *((s.items, s.ready) for s in tuple(self.schedules.values()))]
        tables = [(table, ready) for table, ready in tables if ready is None or ready.stream != current.cuda_stream]
        for event in {ready.event for _, ready in tables if ready is not None}:
            current.wait_event(event)
        for table, _ in tables:
            table.record_stream(current)

    @property
    def num_bytes(self) -> int:
        """Bytes of device memory, without schedules that were made later."""
        return self.memory.nbytes if self.charged_bytes is None else self.charged_bytes

    @property
    def tiles(self) -> int:
        """Address of the table of tiles."""
        return self.memory.data_ptr() + self.host.offsets[0]

    @property
    def passes(self) -> int:
        """Address of the table of passes."""
        return self.memory.data_ptr() + self.host.offsets[1]

    @property
    def bounds(self) -> int:
        """Address of the table of bounds."""
        return self.memory.data_ptr() + self.host.offsets[2]

    @property
    def num_tiles(self) -> int:
        """Tiles of one head."""
        return self.host.num_tiles


@dataclass(frozen=True, eq=False)
class DeviceSchedule:
    """A `schedule.Schedule` in device memory.

    Attributes:
        items: int32 ``[num_items, 4]``.
        num_split: tiles that are split by query head.
        ready: completion of their copy; None if complete.
    """

    items: Tensor
    num_split: int
    ready: Ready | None = None


class Tiling(NamedTuple):
    """The kind of tiles that a mask is cut into.

    Attributes:
        is_backward: tiles of keys over blocks of queries, of the transposed mask; else of queries over blocks of keys.
            Packed heads have interleaved rows: row i is query i / packed of head i % packed.
        num_rows: queries, or keys, that are divided into tiles.
        shape: size of a tile (of queries: rows times packed heads, 64 to a warpgroup), and of a block.
        packed: query heads that share a tile or block.
        arriving: if keys are fetched while the kernel runs: the arguments of `tiles.local_first`.
    """

    is_backward: bool
    num_rows: int
    shape: tuple[int, int]
    packed: int = 1
    arriving: tuple[int, int, int, int] | None = None


def make_host_plan(bands: np.ndarray, tiling: Tiling, planner: str = "auto") -> HostPlan:
    """The plan of a mask, on the CPU; ``planner``: see `cpp_tiles.chosen`."""
    is_backward, rows, shape, packed, arriving = tiling
    maker = cpp_tiles if cpp_tiles.chosen(planner) else hopper_tiles
    made = None if maker is hopper_tiles else cpp_tables.host_plan(bands, tiling)
    if made is not None:
        return HostPlan.made(*made, packed, arriving if is_backward else None, planner)
    plan_tiles = maker.plan_tiles
    if not is_backward:
        places, keys = shape
        plan = plan_tiles(bands, rows, places // packed, keys, parts=places // 64)
        if arriving is not None:
            plan = maker.local_first(plan, *arriving)
        return HostPlan.of(plan, (0.0, 0.0), packed, planner=planner)
    keys, queries = shape

    def plan_keys(bands: np.ndarray, num_keys: int) -> hopper_tiles.TilePlan:
        return plan_tiles(
            bd.transpose(bands), num_keys, keys, queries // packed,
            align=hopper_tiles.UNIT // packed, hide_tail=True, parts=1 if keys == 64 else 2, packed=packed,
        )  # fmt: skip

    if arriving is None:
        plan = plan_keys(bands, rows)
    else:
        first = arriving[0]
        arrives = bands[:, bd.K0] >= first
        own = plan_keys(bands[~arrives], first - hopper_tiles.GAP)
        plan = hopper_tiles.side_by_side(own, plan_keys(bd.shift_keys(bands[arrives], -first), rows - first), first)
    starts, ends = maker.drift(plan)
    if ends < starts:
        plan = hopper_tiles.descending(plan)
    return HostPlan.of(hopper_tiles.pack_columns(plan, packed), (starts, ends), packed, arriving, planner)


def content_digest(bands: np.ndarray) -> bytes:
    """Digest of a table; cached for read-only tables."""
    if is_changing(bands):
        return bands.mask.digest
    digest = _digests.get(bands)
    if digest is None:
        digest = hashlib.blake2b(np.ascontiguousarray(bands).tobytes(), digest_size=16).digest()
        _digests.put(bands, digest)
    return digest


def mask_facts(bands: np.ndarray) -> MaskFacts:
    """Facts of a mask, cached."""
    if is_changing(bands):
        return bands.mask.facts
    digest = content_digest(bands)
    facts = _facts.get(digest)
    if facts is None:
        if cpp_tiles.available():
            runs, area = cpp_tiles.runs_and_area(bands)
        else:
            runs, area = len(np.unique(bands[:, bd.Q0])), int(bd.areas(bands).sum())
        facts = MaskFacts(runs, area, _intervals(bands) if len(bands) > 2 * runs else 1.0)
        _facts.put(digest, facts, 0)
    return facts


def _intervals(bands: np.ndarray) -> float:
    """See `MaskFacts`; of bands with diagonals, those of their rectangles."""
    keys = bands[:, [bd.K0, bd.K1]]
    begun, ended = bands[:, bd.Q0], bands[:, bd.Q1]
    both = bd.merge_ranges(np.concatenate([keys, keys]), np.concatenate([begun, ended]))[0]

    def total(ranges: np.ndarray) -> int:
        return int((ranges[:, 1] - ranges[:, 0]).sum())

    # Keys at which one interval ends and another starts are in both, and count once in their union.
    seen = total(bd.merge_ranges(keys)[0])
    return (total(both) - total(keys)) / max(1, seen)


def remember(bands: np.ndarray, digest: bytes, facts: MaskFacts) -> None:
    """Caches digest and facts of a read-only table."""
    _digests.put(bands, digest)
    _facts.put(digest, facts, 0)


def device_plan(bands: np.ndarray, tiling: Tiling, device: torch.device) -> DevicePlan:
    """The plan of a mask on a device, from the cache or made."""
    assert not is_changing(bands), "its mask keeps the tables"
    key = (content_digest(bands), tiling, device.index)

    def make() -> DevicePlan:
        host = make_host_plan(bands, tiling)
        return DevicePlan(host.without_table(), upload([host.table], device)[0])

    plan = _prepared.get(key) or _plans.get(key)
    return plan or made_once(key, make, lambda made: _plans.put(key, made, made.memory.nbytes))


def keep(digest: bytes, tiling: Tiling, plan: DevicePlan) -> DevicePlan:
    """Registers a prepared plan with `device_plan`, for a mask with this digest.

    It is found as long as the caller keeps the returned object alive: this plan, or one that is already registered, to
    which missing schedules are added.
    """
    known = _prepared.setdefault((digest, tiling, plan.memory.device.index), plan)
    for key, schedule in plan.schedules.items():
        known.schedules.setdefault(key, schedule)
    return known


def schedule_key(plan: HostPlan, heads_kv: int, group: int, num_sms: int, max_split: int, narrow: bool) -> ScheduleKey:
    """The key of a schedule: the arguments of `HostPlan.schedule`."""
    return heads_kv, group, num_sms, min(max_split, plan.num_tiles), narrow


def schedule_of(
    plan: DevicePlan, heads_kv: int, group: int, num_sms: int, max_split: int, narrow: bool
) -> DeviceSchedule:
    """Items of the backward in one kernel, from the cache or made; see `HostPlan.schedule`."""
    key = schedule_key(plan.host, heads_kv, group, num_sms, max_split, narrow)
    # Other threads may have the plan. The last function refers to it, so its id is its own.
    return plan.schedules.get(key) or made_once(
        (id(plan), key), lambda: plan.make_schedule(key), lambda made: plan.schedules.setdefault(key, made)
    )
