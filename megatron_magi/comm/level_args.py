"""Which rows are sent where in a group of several nodes: rows that several ranks of a node need are sent to it once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch

from megatron_magi.comm.cast_args import CastFacts, CastTables, GroupCastArgs
from megatron_magi.comm.rows import Arrivals, arrival_arrays
from megatron_magi.runtime.upload import upload


class LevelFacts(NamedTuple):
    """The part of `LevelTables` that stays on the host when its arrays are on a device.

    Attributes:
        ranks_per_node, near, far, relay: see `LevelArgs`.
        level_sizes: of the arrivals, see `Arrivals`.
        num_arrays: number of these arrays.
    """

    ranks_per_node: int
    near: CastFacts
    far: CastFacts
    relay: CastFacts
    level_sizes: tuple[int, ...]
    num_arrays: int


class LevelTables(NamedTuple):
    """The arrays of `LevelArgs`, on the CPU."""

    ranks_per_node: int
    near: CastTables
    far: CastTables
    relay: CastTables
    near_rows: np.ndarray
    relay_rows: np.ndarray

    def arrays(self) -> tuple[LevelFacts, list[np.ndarray]]:
        """All index arrays, and the rest; see `LevelArgs.from_uploaded`."""
        facts, found = [], []
        for tables in (self.near, self.far, self.relay):
            fact, arrays = tables.arrays()
            facts.append(fact)
            found += arrays
        *arrivals, sizes = arrival_arrays(np.concatenate([self.near.send_index, self.far.send_index]))
        found += [self.near_rows, self.relay_rows, *arrivals]
        return LevelFacts(self.ranks_per_node, *facts, sizes, len(found)), found


@dataclass(frozen=True, eq=False)
class LevelArgs:
    """Arguments of `group_cast` in two levels, as one rank sees them. A node is ``ranks_per_node`` consecutive ranks.

    Attributes:
        near: own rows, to the ranks of this node.
        far: own rows, once to each other node, to the rank with the same local rank.
        relay: rows received by ``far``, to the ranks of this node.
        near_rows, relay_rows: buffer row of each row received by ``near`` and by ``relay``, int64; together all rows.
        arrivals: rows that come back for own rows, first those of ``near``, then those of ``far``.
        ways: see `GroupCastArgs`.
    """

    ranks_per_node: int
    near: GroupCastArgs
    far: GroupCastArgs
    relay: GroupCastArgs
    near_rows: torch.Tensor
    relay_rows: torch.Tensor
    arrivals: Arrivals
    ways: WeakKeyDictionary[Any, dict] = field(default_factory=WeakKeyDictionary, repr=False)

    @classmethod
    def from_uploaded(cls, facts: LevelFacts, moved: Sequence[torch.Tensor]) -> LevelArgs:
        """Makes arguments from arrays that are on their device; ``moved``: `LevelTables.arrays` as tensors."""
        left = iter(moved)
        parts = [
            GroupCastArgs.from_uploaded(part, [next(left) for _ in range(part.num_arrays)])
            for part in (facts.near, facts.far, facts.relay)
        ]
        near_rows, relay_rows, *arrivals = left
        return cls(facts.ranks_per_node, *parts, near_rows, relay_rows, Arrivals(*arrivals, facts.level_sizes))

    @classmethod
    def build(cls, tables: LevelTables, device: torch.device | str = "cpu") -> LevelArgs:
        """Makes arguments from arrays on the CPU, which it copies to ``device``."""
        facts, arrays = tables.arrays()
        return cls.from_uploaded(facts, upload(arrays, device))

    @property
    def device(self) -> torch.device:
        """The device of the tensors that are moved."""
        return self.near_rows.device

    @property
    def num_ranks(self) -> int:
        """Ranks of the group."""
        return self.near.num_ranks * self.far.num_ranks

    @property
    def num_recv(self) -> int:
        """Rows this rank receives, without those that it relays."""
        return self.near.num_recv + self.relay.num_recv

    @cached_property
    def num_rows_min(self) -> int:
        """Smallest number of local rows that are enough."""
        return max(self.near.num_rows_min, self.far.num_rows_min)

    most: None = None  # no bounds common to all ranks: each part has its own

    def rows_away(self, rank: int) -> tuple[int, int]:
        """Rows that rank ``rank`` sends to other ranks in a cast, and receives from others."""
        parts = ((self.near, rank % self.ranks_per_node), (self.relay, rank % self.ranks_per_node))
        away = [part.rows_away(place) for part, place in (*parts, (self.far, rank // self.ranks_per_node))]
        return sum(sent for sent, _ in away), sum(received for _, received in away)

    def rows_far(self, rank: int) -> tuple[int, int]:
        """The part of `rows_away` that crosses nodes."""
        return self.far.rows_away(rank // self.ranks_per_node)
