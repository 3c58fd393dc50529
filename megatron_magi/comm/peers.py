"""Memory shared by the ranks of one host: rendezvous, eligibility, allocation and mapping, and release.

Whether a group shares memory is decided once, from what every rank writes to the group's store.
"""

from __future__ import annotations

import ctypes
import json
import socket
import time
import weakref
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_magi.comm.groups import names_of, pause, store_of, timeout_s
from megatron_magi.comm.peer_tables import MAX_RANKS
from megatron_magi.comm.sm_budget import most_groups
from megatron_magi.cuda.params import struct
from megatron_magi.cuda.shared_memory import (
    SharedMemory,
    are_linked,
    close_memory,
    open_memory,
    read_words,
    write_word,
)
from megatron_magi.cuda.target import PEER_CAPABILITIES, capabilities

_PREFIX = "megatron_magi/native"
_NUM_SLOTS = 2
_SOURCE = "group_collective/peers.cuh"

RANKS_PER_GPU = 1
"""Most ranks of a group on one GPU: kernels that wait for other ranks need SMs of their own.

Tests set more, see `megatron_magi.testing.shared_gpus`: kernels of several processes have the GPU by turns.
"""

_LONGEST_PAUSE_S = 0.05  # between polls of a rank that waits for the others
_LEAVE_S = 0.5  # how long a leaving rank waits for the others to leave


def control_struct() -> type[ctypes.Structure]:
    """``Control`` of peers.cuh: what ranks tell each other in the memory that they share."""
    return struct(_SOURCE, "Control")


class Rendezvous:
    """All-gathers of values through the group's store, without a GPU.

    Args:
        group: the ranks.
        what: the purpose, for messages.
    """

    def __init__(self, group: dist.ProcessGroup, what: str = "native") -> None:
        self._what = what
        # A weak reference: the group owns the store, which may be a server with a port.
        self._group = weakref.ref(group)
        self.rank, self.size, self.timeout_s = group.rank(), group.size(), timeout_s(group)
        self._world_ranks = dist.get_process_group_ranks(group)
        prefix = dist.PrefixStore(_PREFIX, store_of(group))
        self._prefix = f"{_PREFIX}/{prefix.add(f'generation/{self.rank}', 1)}"
        self._count = 0

    def gather(self, value: Any) -> list[Any]:
        """``value``, which JSON can hold, of every rank, in the order of ranks.

        Raises:
            RuntimeError: ranks did not take part within the group's timeout; they are named.
        """
        group = self._group()
        if group is None:
            raise RuntimeError("group: does not exist any more")
        self._count += 1
        store = dist.PrefixStore(f"{self._prefix}/{self._count}", store_of(group))
        store.set(str(self.rank), json.dumps(value))
        keys = [str(rank) for rank in range(self.size)]
        began = time.monotonic()
        while not store.check(keys):
            waited = time.monotonic() - began
            if waited > self.timeout_s:
                absent = [rank for rank, key in enumerate(keys) if not store.check([key])]
                raise RuntimeError(f"{self._what}: {self.names(absent)} did not arrive within {self.timeout_s:g} s")
            pause(waited, _LONGEST_PAUSE_S)
        return [json.loads(store.get(key)) for key in keys]

    def names(self, ranks: list[int]) -> str:
        """Ranks in words."""
        return names_of(ranks, self._world_ranks)


class Shared:
    """Memory of every rank, mapped by every rank.

    Attributes:
        addresses: addresses of each rank's memory in this process.
    """

    def __init__(self, own: SharedMemory, addresses: list[int], rank: int, device: torch.device) -> None:
        self._own, self.addresses, self._rank, self._device = own, addresses, rank, device

    def close(self) -> None:
        """Unmaps the memory of the other ranks."""
        for rank, address in enumerate(self.addresses):
            if rank != self._rank:
                close_memory(address, self._device)

    def free(self) -> None:
        """Frees this rank's memory, which no other rank may have mapped."""
        self._own.free()


def share(rendezvous: Rendezvous, num_bytes: int, device: torch.device) -> tuple[Shared | None, str]:
    """Allocates and maps ``num_bytes`` on every rank, or on none; collective.

    Returns:
        The shared memory, or None and the reason.
    """
    own, error = None, ""
    try:
        own = _allocate(num_bytes, device)
    except RuntimeError as problem:
        error = str(problem)
    said = rendezvous.gather({"handle": None if own is None else own.handle.hex(), "error": error})
    addresses: list[int] = []
    if all(s["handle"] for s in said):
        try:
            for rank, s in enumerate(said):
                mine = rank == rendezvous.rank
                addresses.append(own.address if mine else open_memory(bytes.fromhex(s["handle"]), device))
        except RuntimeError as problem:
            error = str(problem)
        said = rendezvous.gather({"error": error})
    problems = [f"{rendezvous.names([rank])}: {s['error']}" for rank, s in enumerate(said) if s["error"]]
    if not problems:
        return Shared(own, addresses, rendezvous.rank, device), ""
    for rank, address in enumerate(addresses):
        if rank != rendezvous.rank:
            close_memory(address, device)
    if own is not None:
        own.free()
    return None, problems[0]


def _allocate(num_bytes: int, device: torch.device) -> SharedMemory:
    with suppress(RuntimeError):
        return SharedMemory(num_bytes, device)
    torch.cuda.empty_cache()  # return torch's cached memory to the driver
    return SharedMemory(num_bytes, device)


def refusal_of_host(
    rendezvous: Rendezvous, device: torch.device, num_groups: int = 0, is_captured: bool = False
) -> str | None:
    """The reason why the ranks of a group cannot access each other's memory; None if they can. Collective, and the same
    on all ranks.

    Args:
        num_groups: groups of this rank's GPU that already do so.
        is_captured: CUDA graphs contain launches of some of them.
    """
    properties = torch.cuda.get_device_properties(device)
    boot = Path("/proc/sys/kernel/random/boot_id")
    said = rendezvous.gather(
        {
            "host": [socket.gethostname(), boot.read_text() if boot.exists() else ""],
            "device": str(properties.uuid),
            "capability": [properties.major, properties.minor],
            "sms": properties.multi_processor_count,
            "groups": num_groups,
            "captured": is_captured,
        }
    )
    try:
        reason = refusal_of(said) or _refusal_of_links([s["device"] for s in said], device)
    except RuntimeError as error:
        reason = f"cannot ask for links: {error}"
    reasons = [r for r in rendezvous.gather(reason) if r]
    return reasons[0] if reasons else None


def refusal_of(said: list[dict[str, Any]]) -> str | None:
    """The part of `refusal_of_host` that follows from the gathered values."""
    if not 2 <= len(said) <= MAX_RANKS:
        return f"is for 2 to {MAX_RANKS} ranks, the group has {len(said)}"
    if any(s["host"] != said[0]["host"] for s in said):
        return "needs all ranks of the group on one host"
    if any(tuple(s["capability"]) not in PEER_CAPABILITIES for s in said):
        return f"needs GPUs of compute capability {capabilities(PEER_CAPABILITIES)}"
    if max(Counter(s["device"] for s in said).values()) > RANKS_PER_GPU:
        return "needs a GPU for each rank"
    most = min(most_groups(s["sms"]) for s in said)
    if max(s["groups"] for s in said) >= most:
        return f"serves at most {most} groups of a GPU"
    if any(s["captured"] for s in said):
        return "serves no other group of a GPU on which CUDA graphs hold launches for one, with its share of SMs"
    return None


def _refusal_of_links(devices: list[str], device: torch.device) -> str | None:
    seen = {str(torch.cuda.get_device_properties(i).uuid): i for i in range(torch.cuda.device_count())}
    if any(d not in seen for d in devices):
        return "needs the GPUs of all ranks visible to each (CUDA_VISIBLE_DEVICES)"
    if not all(seen[d] == device.index or are_linked(device.index, seen[d]) for d in devices):
        return "needs NVLink between all GPUs of the group"
    return None


class PeerMemory:
    """Memory that the kernels of one group share: flags, and slots for rows, which grow when a call needs more.

    Attributes:
        slot_bytes: size of a slot.
        generation: changes whenever the slots are reallocated.
        peers: ``Peers`` of peers.cuh; another object whenever the slots are reallocated.
        notice: int32 ``[8]`` in page-locked memory, ``Notice`` of peers.cuh.
    """

    def __init__(self, rendezvous: Rendezvous, control: Shared, device: torch.device) -> None:
        self._rendezvous, self._control, self._device = rendezvous, control, device
        self._data: Shared | None = None
        self._kept: list[Shared] = []  # slots of before, which CUDA graphs refer to
        self._forgotten: list[Shared] = []  # those of graphs that are gone
        self.slot_bytes = self.generation = 0
        self.notice = torch.zeros(8, dtype=torch.int32, device="cpu", pin_memory=True)
        self._owned = _Owned(rendezvous.rank, device, self.notice, control)
        self._finalizer = weakref.finalize(self, self._owned.leave)
        self._finalizer.atexit = False  # at exit the memory is freed with the process
        self.peers = struct(_SOURCE, "Peers")()

    @classmethod
    def make(cls, rendezvous: Rendezvous, device: torch.device) -> tuple[PeerMemory | None, str]:
        """Makes the memory, without slots yet; or None and the reason. Collective."""
        _give_back_what_all_have_left()
        control, reason = share(rendezvous, ctypes.sizeof(control_struct()), device)
        return (None, reason) if control is None else (cls(rendezvous, control, device), "")

    def grow(self, slot_bytes: int, keep: bool = False) -> str | None:
        """Reallocates the slots; returns the reason if not possible, else None. Collective; synchronizes the device.

        Args:
            slot_bytes: size of a slot; the largest that a rank gives.
            keep: the present slots stay as they are, for CUDA graphs, until `forget_kept`; also if there is no memory
                for others.
        """
        torch.cuda.synchronize(self._device)
        slot_bytes = max(self._rendezvous.gather(slot_bytes))  # no rank reads the old slots any more
        unused, self._forgotten = self._forgotten, []
        if self._data is not None and not keep:
            unused.append(self._data)
            self._data, self.slot_bytes = None, 0
        if unused:
            self._owned.data = [data for data in self._owned.data if data not in unused]
            for data in unused:
                data.close()
            self._rendezvous.gather(None)  # no rank has them mapped any more
            for data in unused:
                data.free()
        data, reason = share(self._rendezvous, _NUM_SLOTS * slot_bytes, self._device)
        if data is None:
            return reason
        if self._data is not None:
            self._kept.append(self._data)
        self._data = data
        self._owned.data.append(data)
        self.slot_bytes, self.generation = slot_bytes, self.generation + 1
        self.peers = struct(_SOURCE, "Peers")(
            data=tuple(self._data.addresses), control=tuple(self._control.addresses), notice=self.notice.data_ptr(),
            slot_bytes=slot_bytes, timeout_ns=int(self._rendezvous.timeout_s * 1e9), rank=self._rendezvous.rank,
            num_ranks=self._rendezvous.size,
        )  # fmt: skip
        return None

    def forget_kept(self) -> None:
        """No CUDA graph is left: what was kept for them is freed in the next `grow`. On all ranks."""
        self._forgotten += self._kept
        self._kept = []


class _Owned:
    """Memory that this rank shares with a group; freed when all ranks have left, as they may read it until then."""

    def __init__(self, rank: int, device: torch.device, notice: torch.Tensor, control: Shared) -> None:
        self._rank, self._device, self._notice, self._control = rank, device, notice, control
        self.data: list[Shared] = []

    def leave(self) -> None:
        """Waits for or stops this rank's kernels, and signals to the others that it no longer accesses their memory."""
        self._notice[0] = 1
        torch.cuda.synchronize(self._device)
        for data in self.data:
            data.close()
        for rank, address in enumerate(self._control.addresses):
            if rank != self._rank:
                write_word(address + control_struct().left.offset + 4 * self._rank, 1, self._device)
        self._control.close()
        _left.append(self)
        began = time.monotonic()
        while self in _left and time.monotonic() - began < _LEAVE_S:
            _give_back_what_all_have_left()
            time.sleep(0.01)

    def is_left_by_all(self) -> bool:
        """Whether no other rank has this rank's memory mapped."""
        addresses = self._control.addresses
        left = read_words(addresses[self._rank] + control_struct().left.offset, len(addresses), self._device)
        return all(has_left for rank, has_left in enumerate(left) if rank != self._rank)

    def free(self) -> None:
        """Frees this rank's memory."""
        for data in self.data:
            data.free()
        self._control.free()


_left: list[_Owned] = []
"""Memory of groups that this rank has left but others have not; freed at process exit at the latest."""


def _give_back_what_all_have_left() -> None:
    for owned in [owned for owned in _left if owned.is_left_by_all()]:
        _left.remove(owned)
        owned.free()
