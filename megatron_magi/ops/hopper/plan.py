"""Tile plans on the device, made once for a mask and kept."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_magi.lru import LruCache
from megatron_magi.mask import bands as bd
from megatron_magi.ops.frozen import FrozenMemo
from megatron_magi.ops.hopper import schedule as hopper_schedule
from megatron_magi.ops.hopper import tiles as hopper_tiles
from megatron_magi.ops.hopper.tiles import TilePlan

_MAX_PLANS = 256
_MAX_BYTES = 256 << 20  # of device memory
_MOST_PACKED = 8
_SHORT_ROWS = 4096  # of a document, on average; see docs/measured_facts.md
_plans: LruCache[tuple, DevicePlan] = LruCache(_MAX_BYTES, _MAX_PLANS)
_digests: FrozenMemo[bytes] = FrozenMemo()
_facts: LruCache[bytes, MaskFacts] = LruCache(_MAX_BYTES, _MAX_PLANS)


@dataclass(frozen=True, eq=False)
class DevicePlan:
    """A `TilePlan` in device memory.

    Attributes:
        starts: int32 ``[num_tiles]``, first row of each tile, on the host.
        costs: int64 ``[num_tiles]``, its blocks, on the host; tiles that see nothing come last.
        memory: one int32 tensor that holds all tables.
        tiles, passes, bounds: their addresses.
        step: columns from one block to the next.
        heads_inner: visit a block for all query heads of a group before the next block, not head by head.
        long_tile: blocks of a tile that is long, see `schedule.long_tile`.
        packed: query heads counted as one, see `packed_heads`; they share a tile of queries, or a block of them.
        splits: answers of `group_splits`.
        schedules: answers of `schedule_of`.
    """

    starts: NDArray[np.int32]
    costs: NDArray[np.int64]
    memory: Tensor
    tiles: int
    passes: int
    bounds: int
    step: int
    heads_inner: bool
    long_tile: int
    packed: int
    splits: dict[tuple[int, int, int], int] = field(default_factory=dict)
    schedules: dict[tuple, DeviceSchedule] = field(default_factory=dict)

    def hold_for_stream(self) -> None:
        """Once dropped, its memory is not used for anything else before what the current stream has queued is done.

        The host may be masks ahead of the device, on several streams.
        """
        for table in (self.memory, *(schedule.items for schedule in self.schedules.values())):
            if table.is_cuda:
                table.record_stream(torch.cuda.current_stream(table.device))

    @property
    def log2_packed(self) -> int:
        """Of `packed`, which is a power of two."""
        return self.packed.bit_length() - 1

    @property
    def num_tiles(self) -> int:
        """Tiles of one head."""
        return len(self.costs)


@dataclass(frozen=True, eq=False)
class DeviceSchedule:
    """A `schedule.Schedule` in device memory.

    Attributes:
        items: int32 ``[num_items, 4]``.
        num_apart: tiles whose query heads are apart.
    """

    items: Tensor
    num_apart: int


def content_digest(bands: np.ndarray) -> bytes:
    """Digest of a table; remembered for tables that cannot be written to."""
    digest = _digests.get(bands)
    if digest is None:
        digest = hashlib.blake2b(np.ascontiguousarray(bands).tobytes(), digest_size=16).digest()
        _digests.put(bands, digest)
    return digest


def _device_plan(key: tuple, device: torch.device, make: Callable[[], DevicePlan]) -> DevicePlan:
    """The plan that ``make()`` returns, unless one with this key is kept."""
    full_key = (*key, device.index)
    plan = _plans.get(full_key)
    if plan is None:
        plan = make()
        _plans.put(full_key, plan, plan.memory.nbytes)
    return plan


def _upload(plan: TilePlan, apart: tuple[float, float], packed: int, device: torch.device) -> DevicePlan:
    parts = [plan.tiles.reshape(-1), plan.passes.reshape(-1), plan.bounds.reshape(-1)]
    memory = torch.from_numpy(np.concatenate([*parts, np.zeros(4, dtype=np.int32)])).to(device)
    addresses = memory.data_ptr() + 4 * np.cumsum([0] + [len(p) for p in parts[:-1]])
    return DevicePlan(
        plan.tiles[:, 0].copy(), plan.costs, memory, *addresses.tolist(), step=plan.step,
        heads_inner=hopper_schedule.differ_in_length(*apart), long_tile=packed * hopper_schedule.long_tile(*apart),
        packed=packed,
    )  # fmt: skip


class MaskFacts(NamedTuple):
    """What choices between kernels depend on.

    Attributes:
        runs: runs of rows that are alike, such as those of a document.
        area: visible pairs.
    """

    runs: int
    area: int


def mask_facts(bands: np.ndarray) -> MaskFacts:
    """Facts of a mask, remembered."""
    digest = content_digest(bands)
    facts = _facts.get(digest)
    if facts is None:
        facts = MaskFacts(len(np.unique(bands[:, bd.Q0])), int(bd.areas(bands).sum()))
        _facts.put(digest, facts, 0)
    return facts


def packed_heads(facts: MaskFacts, num_rows: int, group: int) -> int:
    """How many heads of a group a tile or block of queries is of: 1, 2, 4 or 8, of as many times fewer rows.

    With several it takes less work where runs of rows that are alike are short: tiles end there too, and are half
    empty.
    """
    short = facts.runs > 1 and num_rows < _SHORT_ROWS * facts.runs
    return math.gcd(group, _MOST_PACKED) if short else 1


def forward_plan(
    bands: np.ndarray, num_rows: int, device: torch.device, shape: tuple[int, int], packed: int = 1
) -> DevicePlan:
    """Plan of tiles of rows over blocks of keys, ``shape``: rows times packed heads, 64 to a warpgroup, and keys."""
    places, keys = shape

    def make() -> DevicePlan:
        plan = hopper_tiles.plan_tiles(bands, num_rows, places // packed, keys, parts=places // 64)
        return _upload(plan, (0.0, 0.0), packed, device)

    return _device_plan(("forward", content_digest(bands), num_rows, shape, packed), device, make)


def backward_plan(
    bands: np.ndarray, num_keys: int, device: torch.device, shape: tuple[int, int] = (128, 64), packed: int = 1
) -> DevicePlan:
    """Plan of tiles of keys over blocks of queries, ``shape``: that of the transposed mask.

    Queries of heads that are packed are rows of one head, in turns: row i is query i / packed of head i % packed.
    """
    keys, queries = shape

    def make() -> DevicePlan:
        plan = hopper_tiles.plan_tiles(
            hopper_tiles.transpose(bands), num_keys, keys, queries // packed,
            align=hopper_tiles.UNIT // packed, hide_tail=True, parts=1 if keys == 64 else 2, packed=packed,
        )  # fmt: skip
        starts, ends = hopper_tiles.drift(plan)
        if ends < starts:
            plan = hopper_tiles.descending(plan)
        return _upload(hopper_tiles.pack_columns(plan, packed), (starts, ends), packed, device)

    return _device_plan(("backward", content_digest(bands), num_keys, shape, packed), device, make)


def schedule_of(plan: DevicePlan, heads_kv: int, group: int, num_sms: int, max_apart: int) -> DeviceSchedule:
    """Items of the backward in one kernel; see `schedule.make_schedule`."""
    max_apart = min(max_apart, plan.num_tiles)
    key = (heads_kv, group, num_sms, max_apart)
    if key not in plan.schedules:
        made = hopper_schedule.make_schedule(
            plan.starts, plan.costs, heads_kv, group, num_sms, max_apart=max_apart, long_tile=plan.long_tile
        )
        items = torch.from_numpy(made.items).to(plan.memory.device)
        plan.schedules[key] = DeviceSchedule(items, made.num_apart)
    return plan.schedules[key]


def group_splits(plan: DevicePlan, num_heads_kv: int, group: int, num_sms: int) -> int:
    """Parts that the query heads of a group are dealt to in the backward in parts, so that no processor idles.

    Parts of a group add their dk and dv in fp32, so a group is split only for a gain.
    """
    key = (num_heads_kv, group, num_sms)
    if key not in plan.splits:
        plan.splits[key] = hopper_schedule.best_splits(plan.costs, num_heads_kv, group, num_sms)
    return plan.splits[key]
