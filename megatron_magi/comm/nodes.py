"""The groups of one rank in a group of several nodes, and what ends them."""

from __future__ import annotations

import weakref
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from megatron_magi.comm.calls import Guard, add_guard
from megatron_magi.comm.groups import abort, timeout_s
from megatron_magi.comm.peers import Meeting


@dataclass(frozen=True, eq=False)
class NodeGroups:
    """A `Guard` of the whole group.

    Attributes:
        near, relay: the ranks of this node, twice, as what is handed on waits for other nodes and the rest does not.
        far: the ranks that have this one's place in their nodes.
        guards: of what serves these groups, asked for when something fails.
    """

    near: dist.ProcessGroup
    relay: dist.ProcessGroup
    far: dist.ProcessGroup
    guards: list[Guard]

    def failure(self) -> str | None:
        """See `Guard`."""
        return next((text for guard in self.guards if (text := guard.failure()) is not None), None)

    def stop(self) -> None:
        """See `Guard`."""
        for guard in self.guards:
            guard.stop()
        for group in (self.near, self.relay, self.far):
            abort(group)


_known: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[int, NodeGroups]] = weakref.WeakKeyDictionary()
"""One a group and size of nodes, made when it is first asked for."""


def nodes_of(group: dist.ProcessGroup, ranks_per_node: int) -> NodeGroups:
    """The groups of this rank, where each ``ranks_per_node`` neighbours of ``group`` share a node.

    Collective over ``group`` the first time; other ranks need not take part.

    Raises:
        ValueError: the ranks are no whole number of nodes.
        RuntimeError: a rank did not come within the time-out of the group, or the ranks are in different numbers of
            process groups.
    """
    made = _known.setdefault(group, {})
    if ranks_per_node not in made:
        if group.size() % ranks_per_node:
            raise ValueError(f"ranks_per_node: {group.size()} ranks are no whole number of nodes of {ranks_per_node}")
        ranks, rank = dist.get_process_group_ranks(group), group.rank()
        # Groups that are made without the other ranks of the job are known by their ranks and this number.
        counts = Meeting(group, "ranks_per_node").gather(len(dist.distributed_c10d._world.pg_names))
        if len(set(counts)) > 1:
            raise RuntimeError(f"ranks_per_node: ranks of the group have made different numbers of groups: {counts}")
        first = rank - rank % ranks_per_node
        node, places = ranks[first : first + ranks_per_node], ranks[rank % ranks_per_node :: ranks_per_node]
        backend, timeout = dist.get_backend_config(group), timedelta(seconds=timeout_s(group))
        near, relay, far = (
            dist.new_group(some, timeout=timeout, backend=backend, use_local_synchronization=True)
            for some in (node, node, places)
        )
        made[ranks_per_node] = groups = NodeGroups(near, relay, far, [])
        weakref.finalize(group, _end, near, relay, far).atexit = False
        add_guard(group, groups)
    return made[ranks_per_node]


def _end(*groups: dist.ProcessGroup) -> None:
    """Gives back what the groups of a group hold that is gone."""
    for group in groups:
        with suppress(Exception):  # the job may have ended all of them
            dist.destroy_process_group(group)
