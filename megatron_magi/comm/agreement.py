"""A check that all ranks have the same value, such as a plan: a disagreement raises an error instead of a hang.

Calls are compared in `megatron_magi.comm.collective_checks`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from typing import NamedTuple
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
import torch.distributed as dist

from megatron_magi.comm.board import Board, Meeting
from megatron_magi.comm.collective_checks import CallLog, calls_of, log_of
from megatron_magi.comm.groups import all_gather_single, names_of, wait_awake
from megatron_magi.runtime.lasting import lasting

MAX_VALUES = 16
"""Values of a comparison; a rank sends all of them, so that ranks which compare others do not wait for each other."""


class _Comparison(NamedTuple):
    """Record by which ranks verify that they wait for the same comparison."""

    operation: str


class _Received:
    """What ranks send in a comparison; refers to no group, which may end before it.

    Args:
        done: in progress until then; None for one rank.
        values: int64 ``[num_ranks, at least MAX_VALUES]``, the last of them for a `Meeting`.
        call: its number.
    """

    def __init__(self, done: dist.Work | torch.cuda.Event | Board | None, values: torch.Tensor, call: int = 0) -> None:
        self.done, self.values, self.call = done, values, call
        self._failure: str | None = None

    def wait(self, log: CallLog) -> None:
        """Waits for all ranks; raises as `Agreement.wait`, and again if that failed before."""
        if self._failure is not None:
            raise RuntimeError(self._failure)
        if self.done is None:
            return
        try:
            self._await(log, self.done)
        except RuntimeError as error:
            self._failure = str(error)
            raise
        self.done = None

    def _await(self, log: CallLog, done: dist.Work | torch.cuda.Event | Board) -> None:
        if isinstance(done, Board):
            try:
                wait_awake(lambda: done.is_complete(self.call))
                log.wait(self.call, lambda: done.is_complete(self.call))
                self.values.copy_(torch.from_numpy(done.read(self.call)))
            finally:
                done.forget(self.call)
            return
        if isinstance(done, torch.cuda.Event):
            log.wait(self.call, done.query)
            return
        log.wait(self.call, done.is_completed)
        try:
            done.wait()
        except RuntimeError as error:
            text, note = log.explanation(self.call)
            if text is None and not note:
                raise
            raise RuntimeError(text or f"{note}: {error}") from error


class Agreement:
    """A comparison in progress; made by `start_agreement`."""

    def __init__(
        self,
        received: _Received,
        group: dist.ProcessGroup | None,
        names: tuple[str, ...],
        log: CallLog | None = None,
    ) -> None:
        self._received = received
        self._group = group
        self._names = names
        self._log = log

    def wait(self) -> None:
        """Waits for all ranks' values. The host blocks, but not for compute that is queued on the GPU.

        Raises:
            RuntimeError: the values differ; all ranks raise the same message. Or some ranks made another call, or did
                not take part within the group's timeout; the message names them.
        """
        self.values()
        names = (*self._names, *["values of other names"] * (MAX_VALUES - len(self._names)))
        columns = zip(names, self._received.values.T.tolist(), strict=False)
        differ = [_message(values, self._group, name) for name, values in columns if len(set(values)) > 1]
        if differ:
            raise RuntimeError("\n".join(differ))

    def values(self) -> list[int]:
        """Waits like `wait`, and returns the (first) values of all ranks, in their order, without comparing them."""
        if self._log is not None:
            self._received.wait(self._log)
        return self._received.values[:, 0].tolist()


class _First:
    """The first comparisons of a group, through which its ranks meet."""

    def __init__(self, meeting: Meeting) -> None:
        self.meeting = meeting
        self.last: _Received | None = None

    def board(self, log: CallLog, call: int) -> Board | None:
        """The board, once all ranks have it. Until it is known whether they will, waits for the comparison before, and
        once for all ranks to begin this one, ``call``.
        """
        meeting, last = self.meeting, self.last
        if last is not None and not meeting.is_over:
            self.last = None
            try:
                last.wait(log)
                meeting.learn(last.values[:, MAX_VALUES:].tolist())
            except RuntimeError:  # its own `wait` raises it
                meeting.give_up()
        if meeting.is_open:
            log.wait(call, meeting.is_settled)  # if it raises, the next comparison waits again
            meeting.settle()
        return meeting.board


_unread: WeakKeyDictionary[Board, WeakValueDictionary[int, _Received]] = WeakKeyDictionary()
"""Comparisons in progress, by their calls."""


def start_agreement(
    value: int, group: dist.ProcessGroup | None, what: str, others: Mapping[str, int] | None = None
) -> Agreement:
    """Starts comparing ``value`` over the group, by memory of the host if all ranks are on one, else by an all-gather
    of 168 bytes a rank; the first two times by the latter.

    Every rank of the group must call it, in the same order among its collectives.

    Args:
        value: 0 <= value < 2**63, for example a hash.
        group: the ranks; the default group when None. Without any, a single rank agrees with itself.
        what: what is compared, for the message, for example ``plan``.
        others: values that are compared with it, by what they are, in the same order on all ranks.

    Raises:
        ValueError: a value is out of bounds, or there are more than `MAX_VALUES`.
    """
    others = others or {}
    names, values = (what, *others), [value, *others.values()]
    for one in values:
        if not 0 <= one < 1 << 63:
            raise ValueError(f"value: expected 63 bits, got {one}")
    if len(values) > MAX_VALUES:
        raise ValueError(f"others: at most {MAX_VALUES - 1} can be compared, got {len(others)}")
    row = [*values, *[0] * (MAX_VALUES - len(values))]
    num_ranks = 1 if group is None and not dist.is_initialized() else dist.get_world_size(group)
    if num_ranks == 1:
        return Agreement(_Received(None, torch.tensor([row], dtype=torch.int64, device="cpu")), group, names)
    log = log_of(dist.group.WORLD if group is None else group)
    with log:
        call = log.begin(_Comparison(what))
        if log.comparisons is None:
            log.comparisons = _First(Meeting(log.rank, num_ranks, MAX_VALUES))
        first: _First = log.comparisons
        if (board := first.board(log, call)) is not None:
            return Agreement(_write(board, row, log, call), group, names, log)
        on_gpu, row = _needs_gpu(group), [*row, *first.meeting.numbers()]
        with lasting():
            mine = torch.tensor([row], dtype=torch.int64, device="cpu", pin_memory=on_gpu)
            found = torch.empty((num_ranks, len(row)), dtype=torch.int64, device="cpu", pin_memory=on_gpu)
        if on_gpu:
            done: dist.Work | torch.cuda.Event = _gather_aside(found, mine, group)
        else:  # the work keeps both tensors
            done = all_gather_single(found, mine, group=group, async_op=True)
        first.last = _Received(done, found, call)
        return Agreement(first.last, group, names, log)


def _write(board: Board, row: Sequence[int], log: CallLog, call: int) -> _Received:
    """Writes this rank's values where the others read them."""
    known = _unread.setdefault(board, WeakValueDictionary())
    for old in board.old(call):
        one = known.get(old)
        with suppress(RuntimeError):  # then its own `wait` raises it
            if one is not None:
                one.wait(log)
        board.forget(old)
    if not board.has_room(call):
        log.wait(call, lambda: board.has_room(call))
    board.write(call, row)
    with lasting():
        found = torch.empty((log.num_ranks, MAX_VALUES), dtype=torch.int64, device="cpu")
    made = known[call] = _Received(board, found, call)
    return made


@contextmanager
def told(group: dist.ProcessGroup | None, verify: bool = True) -> Iterator[None]:
    """Encloses code before a call on ``group``: reports an error in it to the ranks that wait in the call.

    Args:
        group: the ranks; None where there is no call, or one rank alone.
        verify: as of the call, see `megatron_magi.comm.collective_checks.calls_of`.
    """
    try:
        yield
    except Exception:
        if group is None:
            raise
        with calls_of(group, group.size(), verify):
            raise


def _gather_aside(values: torch.Tensor, mine: torch.Tensor, group: dist.ProcessGroup | None) -> torch.cuda.Event:
    """Gathers ``mine`` of all ranks into ``values``, both pinned, through the GPU; the event marks completion.

    On a stream of its own: neither the collective nor its result waits for compute that was
    queued before, which a read on the compute's stream would drain.
    """
    stream = _side_stream(torch.cuda.current_device())
    with torch.cuda.stream(stream):
        sent = mine.to(stream.device, non_blocking=True)
        received = torch.empty(values.shape, dtype=values.dtype, device=stream.device)
        # This makes the side stream wait for the collective, so the two tensors may be freed when this returns.
        all_gather_single(received, sent, group=group, async_op=True).wait()
        values.copy_(received, non_blocking=True)
        return stream.record_event()


@cache
def _side_stream(device: int) -> torch.cuda.Stream:
    """One for each device: the allocator has separate memory for each stream."""
    return torch.cuda.Stream(device)


def _needs_gpu(group: dist.ProcessGroup | None) -> bool:
    return "cpu" not in {entry.split(":")[0] for entry in dist.get_backend_config(group).split(",")}


def _message(values: list[int], group: dist.ProcessGroup | None, what: str) -> str:
    """Names the ranks that differ from the most common value; from that of the lowest rank in a tie."""
    counts = Counter(values)
    # max returns the first of equals, and values are in rank order.
    expected = max(values, key=lambda value: counts[value])
    world_ranks = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
    differ = ", ".join(
        f"{names_of([rank], world_ranks)} has {value:#018x}" for rank, value in enumerate(values) if value != expected
    )
    agree = [rank for rank, value in enumerate(values) if value == expected]
    return f"{what}: ranks disagree: {differ}; expected {expected:#018x}, as ranks {agree} of the group have"
