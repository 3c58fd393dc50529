"""Tile plans on the device, made once for a mask and kept."""

from __future__ import annotations

import hashlib
import heapq
import weakref
from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from megatron_magi.ops.hopper import tiles as hopper_tiles
from megatron_magi.ops.hopper.tiles import TilePlan

_MAX_PLANS = 256
_plans: OrderedDict[tuple, DevicePlan] = OrderedDict()
_digests: dict[int, tuple[weakref.ref, bytes]] = {}


@dataclass(frozen=True, eq=False)
class DevicePlan:
    """A `TilePlan` in device memory.

    Attributes:
        memory: one int32 tensor that holds all tables.
        tiles, passes, bounds, turns: their addresses; turns is valid if it was asked for.
        num_tiles: tiles of one head.
        num_blocks: blocks of one head.
        costs: blocks of each tile, falling.
        splits: answers of `group_splits`.
    """

    memory: Tensor
    tiles: int
    passes: int
    bounds: int
    turns: int
    num_tiles: int
    num_blocks: int
    costs: tuple[int, ...]
    splits: dict[tuple[int, int, int], int] = field(default_factory=dict)


def content_digest(bands: np.ndarray) -> bytes:
    """Digest of a table; remembered for tables that cannot be written to."""
    known = _digests.get(id(bands))
    if known is not None and known[0]() is bands:
        return known[1]
    digest = hashlib.blake2b(np.ascontiguousarray(bands).tobytes(), digest_size=16).digest()
    if not bands.flags.writeable and bands.base is None:
        key = id(bands)
        _digests[key] = (weakref.ref(bands, lambda _: _digests.pop(key, None)), digest)
    return digest


def device_plan(key: tuple, device: torch.device, make) -> DevicePlan:
    """The plan that ``make()`` returns (with whether it needs turns), unless one with this key is kept."""
    full_key = (*key, device.index)
    plan = _plans.get(full_key)
    if plan is None:
        plan = _upload(*make(), device)
        _plans[full_key] = plan
        if len(_plans) > _MAX_PLANS:
            _plans.popitem(last=False)
    else:
        _plans.move_to_end(full_key)
    return plan


def _upload(plan: TilePlan, with_turns: bool, device: torch.device) -> DevicePlan:
    turns = hopper_tiles.block_turns(plan) if with_turns else np.zeros(0, dtype=np.int32)
    parts = [plan.tiles.reshape(-1), plan.passes.reshape(-1), plan.bounds.reshape(-1), turns]
    memory = torch.from_numpy(np.concatenate([*parts, np.zeros(4, dtype=np.int32)])).to(device)
    addresses = memory.data_ptr() + 4 * np.cumsum([0] + [len(p) for p in parts[:-1]])
    tiles, passes, bounds, turns_at = addresses.tolist()
    return DevicePlan(
        memory, tiles, passes, bounds, turns_at, len(plan.tiles), plan.num_blocks, tuple(plan.tiles[:, 3].tolist())
    )


def forward_plan(bands: np.ndarray, num_rows: int, num_keys: int, block_n: int, device) -> DevicePlan:
    """Plan of 128-row tiles over blocks of ``block_n`` keys."""

    def make() -> tuple[TilePlan, bool]:
        return hopper_tiles.plan_tiles(bands, num_rows, num_keys, 128, block_n), False

    return device_plan(("forward", content_digest(bands), num_rows, num_keys, block_n), device, make)


def backward_plan(
    bands: np.ndarray, num_rows: int, num_keys: int, ordered: bool, device, tile_keys: int = 128
) -> DevicePlan:
    """Plan of tiles of keys over blocks of 64 queries: that of the transposed mask. ``ordered``: with turns."""

    def make() -> tuple[TilePlan, bool]:
        return hopper_tiles.plan_tiles(hopper_tiles.transpose(bands), num_keys, num_rows, tile_keys, 64), ordered

    return device_plan(("backward", content_digest(bands), num_rows, num_keys, ordered, tile_keys), device, make)


# Cost of a backward item beside its blocks, in blocks: loading keys, writing gradients; or adding them in fp32.
_ITEM_COST, _SPLIT_ITEM_COST = 6, 14
# With so many items a processor, none needs to be split.
_ENOUGH_ITEMS = 8


def group_splits(plan: DevicePlan, num_heads_kv: int, group: int, num_sms: int) -> int:
    """Parts that the query heads of a group are dealt to in the backward pass, so that no processor idles.

    Parts of a group add their dk and dv in fp32, so a group is split only for a gain.
    """
    key = (num_heads_kv, group, num_sms)
    if key not in plan.splits:
        plan.splits[key] = _best_splits(plan.costs, num_heads_kv, group, max(1, num_sms))
    return plan.splits[key]


def _best_splits(costs: tuple[int, ...], num_heads_kv: int, group: int, num_sms: int) -> int:
    best, shortest = 1, float("inf")
    for splits in (n for n in range(1, group + 1) if group % n == 0):
        extra = _ITEM_COST if splits == 1 else _SPLIT_ITEM_COST
        items = [c * (group // splits) + extra for c in costs for _ in range(num_heads_kv * splits)]
        if len(items) > _ENOUGH_ITEMS * num_sms:
            return best if splits > 1 else 1
        time = _makespan(items, num_sms)
        if time < 0.98 * shortest:
            best, shortest = splits, time
    return best


def _makespan(items: list[int], num_sms: int) -> int:
    """When the last of the processors is done, if each takes the next item whenever it is free."""
    busy = [0] * num_sms
    for cost in items:
        heapq.heapreplace(busy, busy[0] + cost)
    return max(busy)
