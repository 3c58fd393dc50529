"""Masks whose tables change in place in device memory, for launches captured in a CUDA graph.

A captured launch keeps its parameters. So tables are in buffers with room for more tiles than the first mask has, and
numbers that depend on the mask, such as the number of tiles, are also read from memory (`mask_numbers.cuh`). Loading
another mask copies its tables, which are prepared as for any call, on the device. Kernels and tile shapes are those of
the first mask: correct for every mask, and fast for similar ones.
"""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from megatron_magi.backends.base import ChangingBands, MaskSize, copy_tables, refuse_capture
from megatron_magi.backends.readings import Reading, Readings
from megatron_magi.backends.sm90 import mask_numbers as of_mask
from megatron_magi.backends.sm90 import plan as hopper_plan
from megatron_magi.backends.sm90.plan import DevicePlan, DeviceSchedule, HostPlan, Tiling
from megatron_magi.backends.sm90.schedule import most_items
from megatron_magi.backends.sm90.support import COUNTER_BYTES
from megatron_magi.cuda import driver
from megatron_magi.mask import bands as bd
from megatron_magi.runtime.lasting import lasting
from megatron_magi.runtime.upload import when_there

_NUMBERS = ("num_tiles", "num_items", "num_split", "step", "heads_inner", "num_arriving")
"""Fields of MaskNumbers (`mask_numbers.cuh`), in its order; the content follows, of two words."""
_NUMBERS_WORDS = 8
_CONTENT_BYTES = 4 * len(_NUMBERS)
_MOST_NUMBERS = 512
_SPARE_TILES = 64
"""Extra tiles, in addition to the headroom, as small masks differ more."""
_TILE_PASSES = 8
"""Passes for which there is room in each tile at least: documents and windows have 1 on average, random prefix trees of
2 to 500 nodes 1 to 3.4, binary ones of 511 nodes 5.
"""
_TILE_WORDS, _PASS_WORDS = 4, 8


class StaticMemory:
    """Numbers of masks on a device, and work counters of the launches that read them.

    Launches of one memory must not overlap: one graph, or graphs that are replayed on one stream.

    Args:
        device: of the launches.
    """

    @lasting()
    def __init__(self, device: torch.device) -> None:
        self._host = np.zeros((_MOST_NUMBERS, _NUMBERS_WORDS), dtype=np.int32)
        self._numbers = torch.zeros(_MOST_NUMBERS, _NUMBERS_WORDS, dtype=torch.int32, device=device)
        self._counters = torch.zeros(2 * COUNTER_BYTES, dtype=torch.uint8, device=device)
        self._failed = torch.zeros(1, dtype=torch.int32, device="cpu", pin_memory=device.type == "cuda")
        self._failed_here = self._failed.numpy()
        self._copies: weakref.WeakValueDictionary[tuple[int, int], Tensor] = weakref.WeakValueDictionary()
        self._num_used = 0

    def take(self) -> int:
        """Allocates a place for the numbers of a launch."""
        if self._num_used == _MOST_NUMBERS:
            raise RuntimeError(
                f"one StaticMemory has numbers of {_MOST_NUMBERS} launches; use another for further masks"
            )
        self._num_used += 1
        return self._num_used - 1

    def fields(self, place: int, second: bool) -> dict[str, int]:
        """Parameters of a launch that reads the numbers at a place."""
        numbers = self._numbers.data_ptr() + 4 * _NUMBERS_WORDS * place
        return {
            "numbers": numbers,
            "content": numbers + _CONTENT_BYTES,
            "failed": self._failed.data_ptr(),
            "counter": self._counters.data_ptr() + COUNTER_BYTES * second,
        }

    def set(self, place: int, numbers: Sequence[int], content: int) -> None:
        """Sets numbers on the host; `send` brings them to the device."""
        self._host[place, : len(_NUMBERS)] = numbers
        self._host[place, len(_NUMBERS) :].view(np.int64)[0] = content

    def capture(self) -> int:
        """See `megatron_magi.backends.base.ChangingMask`."""
        return driver.capture_of(self._numbers.device)

    def reading(self, place: int, content: int) -> Reading:
        """What a forward reads that is called now, if ``content`` was loaded at a place."""
        capture = self.capture()
        if not capture:
            return Reading(content)
        copy = self._copies.get((capture, place))
        if copy is None:  # once in a graph
            words = self._numbers[place, len(_NUMBERS) :]
            copy = self._copies[capture, place] = words.view(torch.int64).clone()
        return Reading(content, capture, copy)

    def take_failure(self) -> bool:
        """See `megatron_magi.backends.base.ChangingMemory`."""
        failed = bool(self._failed_here[0])
        if failed:
            self._failed_here[0] = 0
        return failed

    def send(self) -> None:
        """Queues the copy of all numbers on the current stream."""
        used = torch.from_numpy(self._host[: self._num_used].copy())
        if self._numbers.is_cuda:
            used = used.pin_memory()
        self._numbers[: self._num_used].copy_(used, non_blocking=True)


Refit = Callable[[int], Tiling]
"""The tiling of a mask of which so many keys arrive."""
Table = tuple[Tensor, Tensor]
"""A table of a mask, and the buffer that it is copied to, which may be longer."""


@dataclass(frozen=True, eq=False)
class _StaticPlan(DevicePlan):
    """Tables with room for those of other masks.

    Attributes:
        tiling: of the tiles.
        mask: the mask to which they belong.
        numbers: places of the numbers for all tiles, and for tiles that see something.
        of_schedule: likewise of schedules, by their key.
        longest: lengths of the longest tiles, passes and bounds of the samples.
    """

    is_static: ClassVar[bool] = True
    tiling: Tiling | None = None
    mask: weakref.ref[StaticMask] | None = None
    numbers: tuple[int, int] = (0, 0)
    of_schedule: dict[tuple, int] = field(default_factory=dict)
    longest: tuple[int, ...] = ()

    def hold_for_stream(self) -> None:
        """Does nothing: tables are loaded on the stream that reads them, and live as long as this object."""

    def fields(self, *, busy: bool = False, second: bool = False, schedule: DeviceSchedule | None = None):
        place = self.numbers[busy]
        if schedule is not None:
            place = next(self.of_schedule[key] for key, known in self.schedules.items() if known is schedule)
        return self._owner().memory.fields(place, second)

    def make_schedule(self, key: hopper_plan.ScheduleKey) -> DeviceSchedule:
        return self._owner().make_schedule(self, key)

    def _owner(self) -> StaticMask:
        mask = None if self.mask is None else self.mask()
        assert mask is not None, "the bands are kept by their mask"
        return mask


class StaticMask:
    """A mask whose tables are at fixed addresses.

    Launches with `bands` read them. The first calls, before a graph is captured, determine kernels and tables.

    Args: those of `megatron_magi.backends.base.Capture.mask`. With ``num_own`` the other keys arrive while the kernels
    run, and bands are indexed as described in `mask_numbers`.

    Attributes:
        backend, facts, content, readings, device: see `megatron_magi.backends.base.ChangingMask`.
        digest: identifies this object, independent of its current mask.
        memory: as given.
    """

    def __init__(
        self,
        samples: Sequence[MaskSize],
        most_rows: int,
        most_keys: int,
        device: torch.device,
        memory: StaticMemory,
        headroom: float,
        num_own: int | None = None,
    ) -> None:
        typical = next((sample.bands for sample in samples if len(sample.bands)), samples[0].bands)
        self.backend, self.content, self.readings = "ffa", 0, Readings()
        self.digest, self.facts = os.urandom(16), hopper_plan.mask_facts(typical)
        self.memory, self._place = memory, memory.take()
        self._samples, self._now = samples, samples[0]
        self.device, self._headroom = device, headroom
        self._shape, self._num_own = (most_rows, most_keys), num_own
        self._plans: dict[Tiling, _StaticPlan] = {}
        self._refits: dict[Tiling, Refit] = {}

    @property
    def is_read(self) -> bool:
        """See `megatron_magi.backends.base.ChangingMask`."""
        return bool(self._plans)

    def as_bands(self) -> ChangingBands:
        """The bands that represent this mask in calls; they keep it alive."""
        num_rows, num_keys = self._shape
        ranges = [(0, num_keys)]
        if self._num_own is not None:
            first = of_mask.first_arriving(self._num_own)
            ranges = [(0, self._num_own), (first, first + num_keys - self._num_own)]
        everything = [[0, num_rows, *keys, -bd.NO_DIAGONAL, bd.NO_DIAGONAL] for keys in ranges]
        bands = np.array(everything, dtype=np.int64).view(ChangingBands)
        bands.mask = self
        bands.setflags(write=False)
        return bands

    @lasting()
    def plan(self, tiling: Tiling, refit: Refit) -> DevicePlan:
        """The tables of a tiling; made on first use, which must not be during capture.

        Args:
            tiling: of the most keys.
            refit: its counterpart for a mask of which fewer keys arrive.
        """
        if tiling not in self._plans:
            refuse_capture(self.device)
            self._refits[tiling] = refit
            source = self._source(tiling, self._now)
            places = self.memory.take(), self.memory.take()
            sources = self._sources(tiling)
            most = self._shape[tiling.is_backward]
            room, longest = _with_room(sources, tiling, self._headroom, most), _longest(sources)
            made = _StaticPlan(*room, tiling=tiling, mask=weakref.ref(self), numbers=places, longest=longest)
            self._plans[tiling] = made
            self._copy(self._tables(made, source))
        return self._plans[tiling]

    @lasting()
    def make_schedule(self, plan: _StaticPlan, key: hopper_plan.ScheduleKey) -> DeviceSchedule:
        """A schedule of a plan with room, for `_StaticPlan`."""
        refuse_capture(self.device)
        assert plan.tiling is not None
        source = self._source(plan.tiling, self._now)
        most_tiles, rows = _lengths(plan)[0] // _TILE_WORDS, self._shape[0] * plan.tiling.packed
        most = most_items(most_tiles, rows, *key)
        most_split = key[3] if key[1] > 1 else 0  # only query heads that share a key head are split
        made = DeviceSchedule(hopper_plan.schedule_of(source, *key).items.new_zeros(most, 4), most_split)
        plan.schedules[key], plan.of_schedule[key] = made, self.memory.take()
        self._copy(self._tables(plan, source))
        return made

    def shortage(self, mask: MaskSize) -> tuple[str, float] | None:
        """Why a mask does not fit, and the headroom with which it would; None if it fits."""
        found: list[tuple[str, float]] = []
        for plan, source in self._pairs(mask):
            parts = zip(("tiles", "passes", "bounds"), _lengths(source), _lengths(plan), plan.longest, strict=True)
            of_schedules = (
                ("items", len(hopper_plan.schedule_of(source, *key).items), len(made.items))
                for key, made in plan.schedules.items()
            )
            items = ((name, length, room, room / self._headroom) for name, length, room in of_schedules)
            for name, length, room, longest in (*parts, *items):
                if length > room:
                    needed = length / longest if longest else math.inf
                    found.append((f"its table of {name} is {length} long, there is room for {room}", needed))
        return (found[0][0], max(least for _, least in found)) if found else None

    def capture(self) -> int:
        """See `megatron_magi.backends.base.ChangingMask`."""
        return self.memory.capture()

    def reading(self) -> Reading:
        """See `megatron_magi.backends.base.ChangingMask`."""
        return self.memory.reading(self._place, self.content)

    def take(self, mask: MaskSize, content: int) -> list[Table]:
        """Sets the numbers of a mask that fits; returns the tables to copy."""
        self._now, self.content = mask, content
        self.memory.set(self._place, (0,) * len(_NUMBERS), content)
        tables = []
        for plan, source in self._pairs(mask):
            source.hold_for_stream()
            tables += self._tables(plan, source)
        return tables

    def _pairs(self, mask: MaskSize) -> list[tuple[_StaticPlan, DevicePlan]]:
        return [(plan, self._source(tiling, mask)) for tiling, plan in self._plans.items()]

    def _sources(self, tiling: Tiling) -> list[DevicePlan]:
        return [self._source(tiling, sample) for sample in self._samples]

    def _source(self, tiling: Tiling, mask: MaskSize) -> DevicePlan:
        """The plan to copy to the tables of a tiling; its tiles cover the rows or keys of the mask."""
        if self._num_own is not None:
            tiling = self._refits[tiling](mask.num_keys - self._num_own)
        elif tiling.is_backward:
            tiling = tiling._replace(num_rows=max(mask.num_keys, 1))
        if not tiling.is_backward:
            tiling = tiling._replace(num_rows=mask.num_rows)
        return hopper_plan.device_plan(mask.bands, tiling, self.device)

    def _tables(self, plan: _StaticPlan, source: DevicePlan) -> list[Table]:
        """Sets the numbers of a plan and its schedules, and returns its tables."""
        host = source.host
        num_arriving = 0 if self._num_own is None else self._now.num_keys - self._num_own
        common = host.step, int(host.heads_inner), num_arriving
        self.memory.set(plan.numbers[0], (host.num_tiles, 0, 0, *common), self.content)
        self.memory.set(plan.numbers[1], (int(np.count_nonzero(host.costs)), 0, 0, *common), self.content)
        tables = list(zip(_parts(source), _parts(plan), strict=True))
        for key, room in plan.schedules.items():
            made = hopper_plan.schedule_of(source, *key)
            numbers = host.num_tiles, len(made.items), made.num_split, *common
            self.memory.set(plan.of_schedule[key], numbers, self.content)
            tables.append((made.items.view(-1), room.items.view(-1)))
        return tables

    def _copy(self, tables: Sequence[Table]) -> None:
        """Queues the copies once the sources are there, which may be uploads that wait for others (`together`)."""

        def queue() -> None:
            copy_tables(tables)
            self.memory.send()

        when_there(queue)


def _parts(plan: DevicePlan) -> tuple[Tensor, Tensor, Tensor]:
    """Tiles, passes and bounds of a plan, int32 each."""
    return plan.memory.split(_lengths(plan))


def _lengths(plan: DevicePlan) -> tuple[int, int, int]:
    """Lengths of the parts that `_parts` returns."""
    _, passes, bounds = (offset // 4 for offset in plan.host.offsets)
    return passes, bounds - passes, plan.memory.shape[0] - bounds


def _longest(sources: Sequence[DevicePlan]) -> tuple[int, ...]:
    """The longest of each part."""
    return tuple(map(max, zip(*map(_lengths, sources), strict=True)))


def _with_room(sources: Sequence[DevicePlan], tiling: Tiling, headroom: float, most: int) -> tuple[HostPlan, Tensor]:
    """Allocates tables with headroom over these, of which none may see anything, and with tiles for ``most`` rows, or
    keys of a backward; makes a plan on the host.
    """
    host = sources[0].host
    tiles, passes = (n // words for n, words in zip(_longest(sources), (_TILE_WORDS, _PASS_WORDS), strict=False))
    rows = tiling.shape[0] if tiling.is_backward else tiling.shape[0] // tiling.packed
    tiles = max(tiles, -(-most // rows))
    most_tiles = math.ceil(tiles * headroom) + _SPARE_TILES
    most_passes = max(math.ceil(passes * headroom), _TILE_PASSES * tiles) + 2 * _SPARE_TILES
    sizes = _TILE_WORDS * most_tiles, _PASS_WORDS * most_passes, 2 * rows * most_passes + 4
    costs = np.ones(most_tiles, dtype=np.int64)
    costs[: host.num_tiles] = host.costs
    offsets = (0, 4 * sizes[0], 4 * (sizes[0] + sizes[1]))
    return replace(host, costs=costs, offsets=offsets), sources[0].memory.new_zeros(sum(sizes))
