"""The groups of one rank in a group of several nodes, and their destruction."""

from __future__ import annotations

import weakref
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from uuid import uuid4

import torch.distributed as dist

from megatron_magi.comm.collective_checks import Guard, add_guard
from megatron_magi.comm.groups import abort, timeout_s
from megatron_magi.comm.peers import Rendezvous


@dataclass(frozen=True, eq=False)
class NodeGroups:
    """The groups of one rank inside its node and between nodes; a `Guard` of the whole group.

    Attributes:
        near, relay: two groups of the ranks of this node, as relayed rows wait for other nodes and own rows do not.
        far: the ranks with the same local rank in all nodes.
        guards: guards of these groups, queried when something fails.
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
"""One for each group and node size, made on first use."""


def nodes_of(group: dist.ProcessGroup, ranks_per_node: int) -> NodeGroups:
    """The groups of this rank, if every ``ranks_per_node`` consecutive ranks of ``group`` share a node.

    Collective over ``group`` the first time; other ranks need not take part.

    Raises:
        ValueError: the ranks are no whole number of nodes.
        RuntimeError: a rank did not take part within the group's timeout.
    """
    made = _known.setdefault(group, {})
    if ranks_per_node not in made:
        if group.size() % ranks_per_node:
            raise ValueError(f"ranks_per_node: {group.size()} ranks are no whole number of nodes of {ranks_per_node}")
        ranks, rank = dist.get_process_group_ranks(group), group.rank()
        name = Rendezvous(group, "ranks_per_node").gather(uuid4().hex)[0]
        first = rank - rank % ranks_per_node
        node, places = ranks[first : first + ranks_per_node], ranks[rank % ranks_per_node :: ranks_per_node]
        backend, timeout = dist.get_backend_config(group), timedelta(seconds=timeout_s(group))
        near, relay, far = (
            _new_group(some, f"{name}-{part}-{some[0]}", backend, timeout)
            for part, some in (("near", node), ("relay", node), ("far", places))
        )
        made[ranks_per_node] = groups = NodeGroups(near, relay, far, [])
        weakref.finalize(group, _end, near, relay, far).atexit = False
        add_guard(group, groups)
    return made[ranks_per_node]


def _new_group(ranks: list[int], name: str, backend: str, timeout: timedelta) -> dist.ProcessGroup:
    """A group that is created by its own ranks only, without the other ranks of the job.

    Torch names such a group by its ranks and by the number of groups this rank is in. But ranks may be in different
    numbers of groups, and a group that is created again would find entries of the last one in the store. If the default
    group is bound to a device, torch splits its communicator, in which all ranks of the job would have to take part.
    """
    world, c10d = dist.group.WORLD, dist.distributed_c10d
    assert world is not None
    bound, name_of = world.bound_device_id, c10d._process_group_name
    world.bound_device_id, c10d._process_group_name = None, lambda *_, **__: name
    try:
        return dist.new_group(ranks, timeout=timeout, backend=backend, use_local_synchronization=True)
    finally:
        world.bound_device_id, c10d._process_group_name = bound, name_of


def _end(*groups: dist.ProcessGroup) -> None:
    """Destroys the node groups of a destroyed group."""
    for group in groups:
        with suppress(Exception):  # they may already be destroyed
            dist.destroy_process_group(group)
