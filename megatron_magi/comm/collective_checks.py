"""Verification of collective calls: ranks that disagree about a call raise an error instead of hanging or mixing data.

Each rank numbers its calls on a group and keeps a record of each: operation, dtype, widths, options. A record that
follows the previous one for the first time is compared with those of the other ranks before anything is sent; later
this costs a set lookup, without communication or waiting for a GPU.

So one rank may compare a call while others, for which it is not new, are already in its collective. On each rank a
thread polls the group's store once a second and answers such questions with the rank's own record. If records differ,
or a rank has raised an error in a call that others take part in, the thread aborts the group's communication, and all
ranks raise the same message. All ranks are asked in the same way when a collective fails.

Not detected at once: ranks use two different records for one call, each of which has followed the previous one before.
``always=True`` detects this, as it compares every call.
"""

from __future__ import annotations

import atexit
import hashlib
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from enum import Enum
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
import torch.utils.checkpoint

from megatron_magi.comm import timeouts
from megatron_magi.comm.groups import abort, names_of, pause, timeout_s
from megatron_magi.comm.inquiry import Inquiry, failure_text
from megatron_magi.comm.store_channel import StoreChannel

logger = logging.getLogger(__name__)

_NOT_ERRORS = (getattr(torch.utils.checkpoint, "_StopRecomputationError", ()),)
"""Raised by activation checkpointing, on all ranks, when it has recomputed enough."""
_NUM_RECORDS = 1024
_MAX_KNOWN = 4096
_MOST_FAILURES = 5


class Guard(Protocol):
    """Communication of a group that does not run in its process group."""

    def failure(self) -> str | None:
        """Its error, or None."""

    def stop(self) -> None:
        """Aborts it permanently."""


class _Phase(Enum):
    """The phase of this rank's last call."""

    CHECKING = 1  # its own arguments
    COMPARING = 2  # them with other ranks'
    RUNNING = 3
    OVER = 4


class _Alarm(NamedTuple):
    """The reason to abort a call for its participants: a conclusion, or the error of ``rank``."""

    call: int
    text: str
    rank: int | None = None


class CallLog:
    """The calls on one group. ``with log:`` encloses a call, in which `agree` precedes all communication.

    If a call raises on one rank only, the others raise too.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = weakref.ref(group)
        self._world_ranks = dist.get_process_group_ranks(group)
        self._timeout_s = timeout_s(group)
        self._channel = StoreChannel(group)
        self.comparisons: Any = None  # of `megatron_magi.comm.agreement`
        self._count = 0
        self._phase = _Phase.OVER
        self._records: deque[tuple[int, NamedTuple, int]] = deque(maxlen=_NUM_RECORDS)
        self._failures: set[int] = set()
        self._answering = threading.Lock()  # held while answering, so that no answer overwrites an error
        self._unsettled: int | None = None  # the last failed call, until it is known whether the others failed too
        self._broken: str | None = None
        self._known: set[tuple[NamedTuple | None, NamedTuple]] = set()
        self._last: NamedTuple | None = None
        self._voted: tuple[int, str] | None = None
        self._questions: set[int] = set()
        self._alarms: dict[_Alarm, float | None] = {}
        self._lingers_until = 0.0
        self._stop = threading.Event()
        crowd = max(1.0, dist.get_world_size() / 1000)  # all ranks of a job share one store
        self._longest_pause_s = 0.05 * crowd
        watched = weakref.ref(self), self._stop, timeouts.LOOK_S * crowd
        self._thread = threading.Thread(target=_watch, args=watched, daemon=True)
        self._thread.start()

    @property
    def rank(self) -> int:
        """This rank of the group."""
        return self._channel.rank

    @property
    def num_ranks(self) -> int:
        """Size of the group."""
        return self._channel.size

    def __enter__(self) -> CallLog:
        if self._unsettled is not None:
            self._settle(self._unsettled)
        if self._broken is not None:
            raise RuntimeError(self._broken)
        self._phase = _Phase.CHECKING  # before the number, or the thread would see a new call that is already over
        self._count += 1
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        try:
            if isinstance(error, Exception) and not isinstance(error, _NOT_ERRORS):
                self._fail(error)
        finally:
            self._phase = _Phase.OVER

    def agree(self, record: NamedTuple, plan: int = 0, always: bool = False) -> None:
        """Records this call; compares it with the other ranks' if it follows the last one for the first time.

        Args:
            record: equal on all ranks if they agree; the first field is ``operation``. Kept.
            plan: identifies what else they must agree on; a change of it alone causes no comparison.
            always: compare in any case.

        Raises:
            RuntimeError: the ranks disagree, or some did not take part within the group's timeout.
        """
        self._records.append((self._count, record, plan))
        step = (self._last, record)
        if always or step not in self._known:
            self._compare(record, plan)
            if len(self._known) >= _MAX_KNOWN:
                self._known.clear()
            self._known.add(step)
        self._last = record
        self._phase = _Phase.RUNNING

    def begin(self, record: NamedTuple) -> int:
        """Replaces `agree` in a call that is itself a comparison; returns its number, for `wait`."""
        self._records.append((self._count, record, 0))
        return self._count

    def wait(self, call: int, done: Callable[[], bool], *, alike_is_done: bool = False) -> None:
        """Polls ``done()``, which must not block, until it is true; asks the other ranks if that takes long.

        Args:
            call: number of the call.
            done: polled.
            alike_is_done: also return when all ranks have answered that the call is the same.

        Raises:
            RuntimeError: the ranks disagree, or some did not take part within the group's timeout.
        """
        began = time.monotonic()
        inquiry: Inquiry | None = None
        while not done():
            waited = time.monotonic() - began
            if self._broken is not None:
                raise RuntimeError(self._broken)
            if waited >= timeouts.ASK_S:
                inquiry = inquiry or self._inquire(call, began)
                if inquiry.look() and alike_is_done:
                    break
            pause(waited, self._longest_pause_s)
        self._channel.clear(call)

    def explanation(self, call: int) -> tuple[str | None, str]:
        """Explains a failed collective: how ranks disagree, or None; and which ranks are absent or failed too."""
        inquiry = self._inquire(call, time.monotonic(), has_failed=True)
        end = time.monotonic() + timeouts.EXPLAIN_S
        while self._broken is None and time.monotonic() < end:
            try:
                if inquiry.look():
                    break
            except dist.DistError:
                raise
            except RuntimeError as error:
                return str(error), ""
            time.sleep(timeouts.BUSY_S)
        if absent := self.names(inquiry.missing):
            return self._broken, f"{self.operation(call)}: {absent} did not take part"
        return self._broken, failure_text(self, call, inquiry.answers) or ""

    def _inquire(self, call: int, began: float, has_failed: bool = False) -> Inquiry:
        self.tell(call)
        return Inquiry(self, self._channel, call, began, self._timeout_s, has_failed)

    def _compare(self, record: NamedTuple, plan: int) -> None:
        call = self._count
        self._phase = _Phase.COMPARING
        digest = hashlib.blake2b(repr((record, plan)).encode(), digest_size=8).hexdigest()
        if self._channel.vote(call, digest):
            # All ranks have voted, so none reads the entries of the previous comparison any more.
            if self._voted is not None:
                self._channel.forget(*self._voted)
            self._channel.clear(call)
        else:
            self.wait(call, lambda: self._channel.is_agreed(call), alike_is_done=True)
        self._voted = (call, digest)

    def _fail(self, error: Exception) -> None:
        """Reports this rank's error to the others, or raises theirs if that is the cause."""
        call, phase = self._count, self._phase
        answer = {"begun": True} if phase is _Phase.RUNNING else {}
        if phase is _Phase.RUNNING and (type(error) is RuntimeError or isinstance(error, dist.DistError)):
            with suppress(dist.DistError):  # the store failed: no rank can be asked
                text, note = self.explanation(call)
                if text is not None:
                    self._broken = text
                    raise RuntimeError(text) from error
                if note:
                    error.add_note(note)
                answer = self._own_answer(call)  # other ranks that failed in the same way may still be asking
        self._unsettled = call
        text = f"raised {type(error).__name__}: {error}"
        with suppress(RuntimeError):
            self._lingers_until = time.monotonic() + 2 * timeouts.LOOK_S
            with self._answering:
                self._failures.add(call)
                self._channel.answer(call, {**answer, "failed": text})
            if phase is not _Phase.COMPARING:  # in a comparison the error is a conclusion, which the others know
                self._channel.post({"kind": "failed", "call": call, "text": text})

    def _settle(self, call: int) -> None:
        """Before the next call: waits until all ranks have failed in this one, else call numbers would diverge."""
        began = time.monotonic()
        failed: dict[int, dict[str, Any]] = {}
        while self._broken is None and len(failed) < self._channel.size:
            found = dict(failed)
            self._channel.answers(call, found)
            failed = {rank: answer for rank, answer in found.items() if "failed" in answer}
            waited = time.monotonic() - began
            if waited > self._timeout_s:
                others = [rank for rank in range(self._channel.size) if rank not in failed]
                text = f"{self.operation(call)}: {self.names(others)} did not fail as others did"
                self.conclude(call, text, ends=True)
            pause(waited, self._longest_pause_s)
        self._unsettled = None

    # The methods below are also called by the thread.

    def has_begun(self, call: int) -> bool:
        """Whether this rank takes or took part in a call, beyond comparing it."""
        if call in self._failures or call > self._count:
            return False
        return call < self._count or self._phase in (_Phase.RUNNING, _Phase.OVER)

    def tell(self, call: int) -> None:
        """Posts this rank's record of a call, if it is still kept and the call has not failed here."""
        with self._answering:
            if call not in self._failures and (told := self._own_answer(call)):
                self._channel.answer(call, told)

    def _own_answer(self, call: int) -> dict[str, Any]:
        for number, record, plan in reversed(list(self._records)):  # the other thread may append
            if number == call:
                fields = {name: str(value) for name, value in record._asdict().items()}
                return {"fields": {**fields, "plan": f"{plan:#018x}"}, "begun": self.has_begun(call)}
        return {}

    def look(self) -> bool:
        """Processes events of other ranks; returns whether some remain to be handled soon."""
        if self._broken is None and (text := next(filter(None, (g.failure() for g in self._guards())), None)):
            self._end(self._count, text)
        for event in self._channel.unread():
            if event["kind"] == "question":
                self._questions.add(event["call"])
            elif event["kind"] == "failed":
                self._alarms[_Alarm(event["call"], event["text"], event["rank"])] = None
            elif event["ends"] and event["call"] in self._failures:
                # This rank has raised already, but can no longer communicate with the others.
                self._broken = event["text"]
                self._abort()
            else:
                self._alarms[_Alarm(event["call"], event["text"])] = None
        self._questions -= self._failures  # their error is already posted as the answer
        for call in [call for call in self._questions if self.has_begun(call)]:
            self.tell(call)
            self._questions.remove(call)
        for alarm, since in list(self._alarms.items()):
            if alarm.call in self._failures or self._broken is not None:
                del self._alarms[alarm]
            elif self.has_begun(alarm.call):
                now = time.monotonic()
                self._alarms[alarm] = since = now if since is None else since
                if alarm.rank is None:
                    self._end(alarm.call, alarm.text)
                elif now - since >= timeouts.GRACE_S:
                    self._end(alarm.call, failure_text(self, alarm.call, {alarm.rank: {"failed": alarm.text}}))
        return bool(self._questions or self._alarms)

    def _end(self, call: int, text: str) -> None:
        """Concludes a call and aborts communication, so that this rank raises wherever it is."""
        logger.error(self.conclude(call, text, ends=True))
        self._abort()

    def _guards(self) -> list[Guard]:
        group = self._group()
        return [] if group is None else _guards.get(group, [])

    def _abort(self) -> None:
        group = self._group()
        for guard in self._guards():
            guard.stop()
        if group is not None:
            abort(group)

    def conclude(self, call: int, text: str, *, ends: bool) -> str:
        """Makes ``text`` the error that all ranks raise; returns the text of another rank that was first, if any.

        Args:
            ends: some rank has started to communicate in the call, so the group cannot be used any more.
        """
        text = self._channel.conclude(call, text)
        self._channel.post({"kind": "conclusion", "call": call, "text": text, "ends": ends})
        self._lingers_until = time.monotonic() + 2 * timeouts.LOOK_S
        if ends:
            self._broken = text
        return text

    def close(self) -> None:
        """Ends the thread, after leaving others time to read, as the store may end with this process."""
        time.sleep(max(0.0, self._lingers_until - time.monotonic()))
        self._stop.set()
        self._thread.join(2 * timeouts.LOOK_S)

    def operation(self, call: int) -> str:
        """Name of this rank's operation in a call."""
        return next((record[0] for number, record, _ in list(self._records) if number == call), "call")

    def names(self, ranks: Iterable[int]) -> str:
        """Ranks in words."""
        return names_of(ranks, self._world_ranks)


class NoCalls:
    """Replaces a `CallLog` for a single rank, and without verification."""

    def __enter__(self) -> NoCalls:
        return self

    def __exit__(self, *_error: object) -> None:
        pass

    def agree(self, record: NamedTuple, plan: int = 0, always: bool = False) -> None:
        """Does nothing."""


_NO_CALLS = NoCalls()
_logs: weakref.WeakKeyDictionary[dist.ProcessGroup, CallLog] = weakref.WeakKeyDictionary()
"""One for each living group, as all callers share the numbering of calls."""

_guards: weakref.WeakKeyDictionary[dist.ProcessGroup, list[Guard]] = weakref.WeakKeyDictionary()


def add_guard(group: dist.ProcessGroup, guard: Guard) -> None:
    """Ties ``guard`` to the log of a group: its failure aborts the group, and an abort of the group stops it."""
    _guards.setdefault(group, []).append(guard)


def calls_of(group: dist.ProcessGroup | None, num_ranks: int, verify: bool = True) -> CallLog | NoCalls:
    """The log of calls on a group; one that does nothing for a single rank, or without ``verify``.

    Args:
        group: the ranks; the default group when None.
        num_ranks: number of ranks that take part.
    """
    if num_ranks == 1 or not verify:
        return _NO_CALLS
    group = dist.group.WORLD if group is None else group
    return _NO_CALLS if group is None else log_of(group)


def log_of(group: dist.ProcessGroup) -> CallLog:
    """The log of a group of several ranks."""
    log = _logs.get(group)
    if log is None:
        log = _logs[group] = CallLog(group)
    return log


@atexit.register
def _close_logs() -> None:
    for log in list(_logs.values()):
        log.close()


def _watch(log_ref: weakref.ref[CallLog], stop: threading.Event, interval_s: float) -> None:
    """Main function of the thread of a log. It ends with the log, or with the store."""
    busy, failures = False, 0
    while not stop.wait(timeouts.BUSY_S if busy else interval_s):
        log = log_ref()
        if log is None or not dist.is_initialized():
            return
        try:
            busy, failures = log.look(), 0
        except RuntimeError:
            failures += 1
            if failures == _MOST_FAILURES:
                logger.debug("the store is gone, as it is when a job ends", exc_info=True)
                return
        del log
