"""Messages between the ranks of a group outside of its collectives: entries in the group's store.

Nothing here waits for an entry, so a rank can always read, whatever the others are doing.
"""

from __future__ import annotations

import json
import weakref
from collections import deque
from typing import Any

import torch.distributed as dist

from megatron_magi.comm.groups import store_of

_PREFIX = "megatron_magi/calls"


class StoreChannel:
    """The entries of one group, as one rank sees them.

    Raises:
        RuntimeError: from every method, when the store cannot be reached or the group is gone.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        # A weak reference: the group owns the store, which may be a server with a port.
        self._group = weakref.ref(group)
        self.rank, self.size = group.rank(), group.size()
        self._num_read = 0
        # A store may outlive its groups, and a new group may reuse the name of a destroyed one.
        prefix = dist.PrefixStore(_PREFIX, store_of(group))
        self._prefix = f"{_PREFIX}/{prefix.add(f'generation/{self.rank}', 1)}"
        self._left: deque[tuple[int, str]] = deque()  # entries of this rank, with the call they belong to

    def _store(self) -> dist.Store:
        return dist.PrefixStore(self._prefix, store_of(self._group()))

    def vote(self, call: int, digest: str) -> bool:
        """Adds this rank's vote that call number ``call`` has ``digest``; True if all ranks have voted for it."""
        store = self._store()
        if store.add(f"{call}/{digest}", 1) < self.size:
            return False
        store.set(f"{call}/agreed", "")
        return True

    def is_agreed(self, call: int) -> bool:
        """Whether all ranks have voted for the same digest."""
        return self._store().check([f"{call}/agreed"])

    def forget(self, call: int, digest: str) -> None:
        """Removes the entry of `vote` for a call that all ranks have finished."""
        store = self._store()
        for name in (digest, "agreed"):
            store.delete_key(f"{call}/{name}")

    def clear(self, call: int) -> None:
        """Removes this rank's answers about calls before ``call``, which all ranks have reached."""
        while self._left and self._left[0][0] < call:
            self._store().delete_key(self._left.popleft()[1])

    def answer(self, call: int, content: dict[str, Any]) -> None:
        """Posts this rank's answer about a call."""
        self._left.append((call, f"{call}/{self.rank}"))
        self._store().set(f"{call}/{self.rank}", json.dumps(content))

    def answers(self, call: int, known: dict[int, dict[str, Any]]) -> None:
        """Adds new answers of other ranks about a call to ``known``, by rank."""
        store = self._store()
        for rank in range(self.size):
            if rank not in known and store.check([f"{call}/{rank}"]):
                known[rank] = json.loads(store.get(f"{call}/{rank}"))

    def ask(self, call: int) -> None:
        """Asks all ranks to answer about a call when they reach it; one question serves all ranks that ask."""
        if self._store().add(f"{call}/asked", 1) == 1:
            self._left.append((call, f"{call}/asked"))
            self.post({"kind": "question", "call": call})

    def conclude(self, call: int, text: str) -> str:
        """Makes ``text`` the conclusion about a call unless another rank was first; returns the valid one."""
        return self._store().compare_set(f"{call}/conclusion", "", text).decode()

    def conclusion(self, call: int) -> str | None:
        """The conclusion about a call, or None."""
        store, key = self._store(), f"{call}/conclusion"
        return store.get(key).decode() if store.check([key]) else None

    def post(self, event: dict[str, Any]) -> None:
        """Posts an event to all ranks; see `unread`."""
        store = self._store()
        store.set(f"event/{store.add('events', 1)}", json.dumps({**event, "rank": self.rank}))

    def unread(self) -> list[dict[str, Any]]:
        """Events of other ranks that this method has not returned yet, in the order of `post`."""
        store, events = self._store(), []
        while store.check([f"event/{self._num_read + 1}"]):
            self._num_read += 1
            event = json.loads(store.get(f"event/{self._num_read}"))
            if store.add(f"read/{self._num_read}", 1) == self.size:
                store.delete_key(f"event/{self._num_read}")
                store.delete_key(f"read/{self._num_read}")
            if event["rank"] != self.rank:
                events.append(event)
        return events
