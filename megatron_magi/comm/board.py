"""Values of all ranks of a group, in memory that they share: for groups whose ranks are on one host.

Reading and writing take microseconds and neither a collective nor the GPU, which may be busy. Entries have the numbers
of calls, which are the same on all ranks (`megatron_magi.comm.collective_checks`), so that ranks cannot mix them up.
"""

from __future__ import annotations

import mmap
import os
import platform
import secrets
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

import numpy as np

NUM_SLOTS = 1024
"""Entries that the memory holds: those of so many consecutive calls."""
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_WORD = 8
_READY, _GONE = 1, 2
_REFUSED = -1
"""In place of a token: this rank may not map the memory."""


class Board:
    """The shared memory, as one rank sees it; made by a `Meeting`.

    A rank does not write an entry before all ranks have read the one that it replaces. For that each tells the oldest
    call whose entries it still has to read.
    """

    def __init__(self, memory: np.ndarray, rank: int, num_ranks: int, num_values: int) -> None:
        self._rank, self._num_values = rank, num_values
        self._oldest, entries = memory[:num_ranks], memory[num_ranks:].reshape(NUM_SLOTS, num_ranks, 1 + num_values)
        self._calls, self._values = entries[:, :, 0], entries[:, :, 1:]
        self._unread: list[int] = []

    def has_room(self, call: int) -> bool:
        """Whether all ranks have read what an entry of ``call`` would replace. Tells them that this rank is there."""
        self._tell(call)
        replaced = int(self._calls[call % NUM_SLOTS, self._rank])  # 0 for nothing: numbers of calls begin at 1
        return not replaced or int(self._oldest.min()) > replaced

    def old(self, call: int) -> list[int]:
        """Calls that have to be read before an entry of ``call`` is written, so that ranks do not wait for this one."""
        return [one for one in self._unread if one <= call - NUM_SLOTS // 2]

    def write(self, call: int, values: Sequence[int]) -> None:
        """Writes this rank's entry, for which there is room."""
        slot = call % NUM_SLOTS
        self._values[slot, self._rank] = values
        self._calls[slot, self._rank] = call  # behind the values: stores of x86 are seen in their order
        self._unread.append(call)

    def is_complete(self, call: int) -> bool:
        """Whether all ranks have written their entry of a call."""
        return bool((self._calls[call % NUM_SLOTS] == call).all())

    def read(self, call: int) -> np.ndarray:
        """The values of all ranks, int64 ``[num_ranks, num_values]``, of a call that is complete; once."""
        found = self._values[call % NUM_SLOTS].copy()
        self.forget(call)
        return found

    def forget(self, call: int) -> None:
        """Ends the call without reading its entries."""
        if call in self._unread:
            self._unread.remove(call)
            self._tell(call + 1)

    def _tell(self, call: int) -> None:
        self._oldest[self._rank] = min((*self._unread, call))


class Meeting:
    """How the ranks of a group come to have a board: by numbers that travel with the first comparisons.

    The first one tells where the memory is, and the next that all ranks have mapped it. A rank may fail to receive the
    latter alone, so each then writes into the memory whether it has: there is a board if all have, and all ranks see
    the same. Ranks that are not on one host, or may not map the memory of another, never have a board.

    Args:
        rank: this rank of the group.
        num_ranks: its size.
        num_values: values of an entry of the board.

    Attributes:
        board: once all ranks have it.
        is_open: this rank has told the others that it has received all numbers, which say that all have the memory.
        is_over: it is known whether there will be a board.
    """

    def __init__(self, rank: int, num_ranks: int, num_values: int) -> None:
        self._shape, self.board = (rank, num_ranks, num_values), None
        self.is_open = self.is_over = False
        self._host, self._token, self._mapped, self._place = _host(), 0, 0, (0, 0)
        self._memory: np.ndarray | None = None
        self._close: Callable[[], object] | None = None
        if rank == 0 and self._host:
            self._create()

    def numbers(self) -> list[int]:
        """This rank's numbers: its host; a token of the memory that it has made, and of that which it has mapped; and
        where the first is, by process and descriptor.
        """
        return [self._host, self._token, self._mapped, *self._place]

    def learn(self, numbers: Sequence[Sequence[int]]) -> None:
        """Takes the numbers of all ranks."""
        _, token, _, process, descriptor = numbers[0]
        if not token or any(row[0] != self._host or row[2] == _REFUSED for row in numbers):
            self._end()
        elif all(row[2] == token for row in numbers):
            self._states[self._shape[0]] = _READY
            self.is_open = True
        elif self._mapped != token:
            self._map(token, process, descriptor)

    def give_up(self) -> None:
        """Tells the others that this rank has not received their numbers, and compares otherwise from now on."""
        if self._memory is not None:
            self._states[self._shape[0]] = _GONE
            self._end()

    def is_settled(self) -> bool:
        """Whether all ranks have told if they have received the numbers."""
        return bool(self._states.all())

    def settle(self) -> None:
        """Makes the board if all ranks have."""
        if (self._states == _READY).all():
            assert self._memory is not None
            self.board = Board(self._memory[1 + self._shape[1] :], *self._shape)
        self._end()

    def _end(self) -> None:
        self.is_open, self.is_over = False, True
        if self._close is not None:
            self._close()

    @property
    def _states(self) -> np.ndarray:
        assert self._memory is not None
        return self._memory[1 : 1 + self._shape[1]]

    @property
    def _num_words(self) -> int:
        _, num_ranks, num_values = self._shape
        return 1 + 2 * num_ranks + NUM_SLOTS * num_ranks * (1 + num_values)

    def _create(self) -> None:
        """Makes memory that has no name, so that nothing is left of it once no process has it."""
        with suppress(OSError, ValueError):
            descriptor = os.memfd_create("megatron_magi")
            self._close = weakref.finalize(self, os.close, descriptor)
            os.posix_fallocate(descriptor, 0, _WORD * self._num_words)  # else a lack of memory would be a signal
            self._memory = np.frombuffer(mmap.mmap(descriptor, _WORD * self._num_words), dtype=np.int64)
            self._memory[0] = self._token = self._mapped = secrets.randbits(62) | 1
            self._place = os.getpid(), descriptor

    def _map(self, token: int, process: int, descriptor: int) -> None:
        """Maps the memory of rank 0, if this process may."""
        self._mapped = _REFUSED
        with suppress(OSError, ValueError):
            own = os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
            try:
                memory = np.frombuffer(mmap.mmap(own, _WORD * self._num_words), dtype=np.int64)
            finally:
                os.close(own)
            if memory[0] == token:
                self._memory, self._mapped = memory, token


def _host() -> int:
    """A number of the host, as far as processes can find each other; 0 if unknown, or where stores may be seen in
    another order.
    """
    if platform.machine() != "x86_64":
        return 0
    try:
        text = f"{_BOOT.read_text()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return 0
    return int.from_bytes(blake2b(text.encode(), digest_size=7).digest(), "little")
