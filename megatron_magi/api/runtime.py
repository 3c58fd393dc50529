"""The plans behind keys, and what is made of them on a device; one cache of both."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.distributed as dist

from megatron_magi.api.key import DistAttnRuntimeKey
from megatron_magi.calibration import with_present_rates
from megatron_magi.checks import renamed
from megatron_magi.comm.agreement import Agreement, start_agreement
from megatron_magi.comm.dispatch import UndispatchArgs
from megatron_magi.comm.group_collective import GroupCastArgs
from megatron_magi.comm.groups import exists
from megatron_magi.comm.roll import RollArgs, make_roll_args
from megatron_magi.config import MagiConfig
from megatron_magi.mask import AttnMask
from megatron_magi.plan import Dispatch, Plan, RankPlan, make_plan, who_computes
from megatron_magi.runtime.lru import LruCache
from megatron_magi.runtime.upload import current_device, upload

_INDEX_BYTES = 8
_MOST_CONFIGS = 64


def default_device(group: dist.ProcessGroup | None) -> torch.device:
    """Where tensors of a group live that come from no tensor: the GPU, unless the group is for CPUs."""
    device = current_device()
    if device.type == "cuda" and group is not None and "nccl" not in dist.get_backend_config(group):
        return torch.device("cpu")
    return device


def request_of(
    mask: AttnMask,
    config: MagiConfig,
    cp_size: int,
    dispatch: Dispatch | None,
    compute: Literal["home", "auto"],
) -> Hashable:
    """What a plan of a key is made of: arguments of `make_plan`."""
    return mask, config, cp_size, dispatch, compute


class ShardIndex:
    """Index tensors of this rank's shard, made on demand, once a device."""

    def __init__(self, dispatch: Dispatch, cp_rank: int) -> None:
        self.dispatch = dispatch
        self.cp_rank = cp_rank
        self._rows: dict[torch.device, torch.Tensor] = {}
        self._undispatch: dict[torch.device, UndispatchArgs] = {}
        self._rolls: dict[tuple[int, torch.device], RollArgs] = {}
        self._kept: dict[tuple, Any] = {}

    def kept(self, name: tuple, make: Callable[[], Any]) -> Any:
        """What ``make`` has made of the shard under a name; calls of it depend on the name and the shard alone."""
        if name not in self._kept:
            self._kept[name] = make()
        return self._kept[name]

    def rows(self, device: torch.device) -> torch.Tensor:
        """Global token of each row of the shard, int64 ``[num_rows]``."""
        if device not in self._rows:
            (self._rows[device],) = upload([self.dispatch.global_index(self.cp_rank)], device)
        return self._rows[device]

    def undispatch_args(self, device: torch.device) -> UndispatchArgs:
        """Arguments of `undispatch`."""
        if device not in self._undispatch:
            shards, total_seqlen = self.dispatch.global_indices(), self.dispatch.total_seqlen
            self._undispatch[device] = UndispatchArgs.build(shards, total_seqlen, self.cp_rank, device)
        return self._undispatch[device]

    def roll_args(self, shift: int, device: torch.device) -> RollArgs:
        """Arguments of `roll` by ``shift``."""
        if (shift, device) not in self._rolls:
            arrays = make_roll_args(self.dispatch.global_indices(), shift, self.dispatch.total_seqlen, self.cp_rank)
            self._rolls[shift, device] = RollArgs.build(arrays, device)
        return self._rolls[shift, device]


class KeyRuntime:
    """The plan of one key, as this rank carries it out."""

    def __init__(self, plan: Plan, group: dist.ProcessGroup | None, shard: ShardIndex | None = None) -> None:
        self.plan = plan
        self.group = group
        self.cp_rank = 0 if group is None else group.rank()
        self.shard = ShardIndex(plan.dispatch, self.cp_rank) if shard is None else shard
        self._pending: list[Agreement] = []
        self._waiting = threading.Lock()

    @property
    def rank_plan(self) -> RankPlan:
        """The part of this rank."""
        return self.plan.for_rank(self.cp_rank)

    @property
    def num_bytes(self) -> int:
        """Bytes of the index tensors once all of them are made, with one roll."""
        dispatch = self.plan.dispatch
        num_indices = dispatch.padded_seqlen + 4 * dispatch.shard_lengths[self.cp_rank]
        moves = self.rank_plan.moves
        for transfer in (*self.rank_plan.transfers, *(() if moves is None else (moves.there, moves.back))):
            num_indices += GroupCastArgs.num_indices(transfer.num_send, transfer.num_recv)
        return num_indices * _INDEX_BYTES

    def compare(self, others: Mapping[str, int] | None = None) -> None:
        """Starts comparing the plan, and ``others``, with the other ranks'; collective."""
        self._pending.append(start_agreement(self.plan.plan_hash, self.group, "plan", others))

    def agreed(self) -> KeyRuntime:
        """This runtime, once all ranks are known to have the same plan.

        Raises:
            RuntimeError: they have not; the message says which ranks differ.
        """
        if self._pending:
            with self._waiting:  # other threads may use the same key
                while self._pending:
                    self._pending[0].wait()
                    del self._pending[0]  # what has failed fails again
        return self


class RuntimeCache:
    """Runtimes by key, the most recently used ones. A key that was dropped is planned again.

    Args:
        max_bytes: of the index tensors of all runtimes. A mask over a million tokens takes some 50 MB.
    """

    def __init__(self, max_bytes: int = 1 << 30) -> None:
        self._runtimes: LruCache[DistAttnRuntimeKey, KeyRuntime] = LruCache(max_bytes)
        self._at_hand: Mapping[Hashable, Plan] = {}
        self._most_recent: dict[dist.ProcessGroup | None, DistAttnRuntimeKey] = {}
        self._configs: dict[MagiConfig, MagiConfig] = {}
        self._templates: dict[tuple, Any] = {}

    def __len__(self) -> int:
        return len(self._runtimes)

    @property
    def num_bytes(self) -> int:
        """Bytes of the index tensors of all runtimes, see `KeyRuntime.num_bytes`."""
        return self._runtimes.num_bytes

    def get(self, key: DistAttnRuntimeKey) -> KeyRuntime:
        """The runtime of ``key``, planned if it is not there.

        Raises:
            ValueError: ``key`` is no key.
        """
        if not isinstance(key, DistAttnRuntimeKey):
            raise ValueError(f"key: expected a DistAttnRuntimeKey, got {type(key).__name__}")
        runtime = self._runtimes.get(key)
        if runtime is None:
            runtime = self.planned(key)
            self._keep(key, runtime)
        return runtime

    def _keep(self, key: DistAttnRuntimeKey, runtime: KeyRuntime) -> None:
        """Keeps a runtime, whose calls share what they can with those of other masks."""
        self._runtimes.put(key, runtime, runtime.num_bytes)
        runtime.rank_plan.runtime.templates = self._templates

    def shared_config(self, config: MagiConfig) -> MagiConfig:
        """The configuration, as the object that keys of an equal one have: calls with them can share what they bind."""
        if len(self._configs) >= _MOST_CONFIGS:
            self._configs.clear()
        return self._configs.setdefault(config, config)

    def planned(self, key: DistAttnRuntimeKey) -> KeyRuntime:
        """The runtime of ``key``: that which is there, or a new one, which is not kept."""
        runtime = self._runtimes.get(key)
        if runtime is not None:
            return runtime
        shard = None if key.key_for_dispatch is None else self.get(key.key_for_dispatch).shard
        cp_size = 1 if key.cp_group is None else key.cp_group.size()
        dispatch = key.layout if shard is None else shard.dispatch
        first = key if key.key_for_dispatch is None else key.key_for_dispatch
        compute = who_computes(key.config.dispatch, first.layout is not None)
        request = key.mask, with_present_rates(key.config), cp_size, dispatch, compute
        plan = self._at_hand.get(request_of(*request)) if self._at_hand else None
        if plan is None:
            with renamed("cp_size", "cp_group_or_mesh"):
                plan = make_plan(*request)
        return KeyRuntime(plan, key.cp_group, shard)

    @contextmanager
    def plans_at_hand(self, plans: Mapping[Hashable, Plan]) -> Iterator[None]:
        """Keys that are made meanwhile take their plans from these, by `request_of`, where they are there."""
        before, self._at_hand = self._at_hand, plans
        try:
            yield
        finally:
            self._at_hand = before

    def register(
        self,
        key: DistAttnRuntimeKey,
        runtime: KeyRuntime,
        max_size: int,
        others: Mapping[str, int] | None = None,
    ) -> DistAttnRuntimeKey:
        """Keeps a key that was just made as its group's most recent one; the oldest go, and those of destroyed groups.
        Collective.

        Its plan begins to be compared with the other ranks', and meanwhile this rank's part of it is made.

        Args:
            key: on its group.
            runtime: of `planned`.
            max_size: number of keys that are kept.
            others: values that are compared with the plan, by name.

        Returns:
            ``key``.
        """
        for gone in [group for group in list(self._most_recent) if not exists(group)]:
            self.clear(gone)  # else its connections would stay open
        # Also when the plan was there already: on another rank the same call may bring a new one.
        if key.config.comm.verify and runtime.plan.cp_size > 1:
            runtime.compare(others)
        self._runtimes.max_items = max_size
        self._keep(key, runtime)
        self._most_recent[key.cp_group] = key
        return key

    def most_recent(self, group: dist.ProcessGroup | None) -> DistAttnRuntimeKey:
        """The key made last for ``group``.

        Raises:
            ValueError: none was.
        """
        if group not in self._most_recent:
            raise ValueError("cp_group: no key was made for this group")
        return self._most_recent[group]

    def clear(self, group: dist.ProcessGroup | None = None) -> None:
        """Drops the runtimes of ``group``, of all groups when None."""
        self._runtimes.drop(lambda key: group is None or key.cp_group == group)
        for known in [known for known in list(self._most_recent) if group is None or known == group]:
            self._most_recent.pop(known, None)
        of_group = [key for key, call in list(self._templates.items()) if group is None or call.group_ref() is group]
        for key in of_group:
            self._templates.pop(key, None)
