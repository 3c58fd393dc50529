"""Asking the other ranks about a call that takes long or has failed."""

from __future__ import annotations

import json
import logging
import time
from collections import Counter
from collections.abc import Iterable
from typing import Any, Protocol

from megatron_magi.comm import timeouts
from megatron_magi.comm.store_channel import StoreChannel

logger = logging.getLogger(__name__)

Answers = dict[int, dict[str, Any]]
"""Answers about a call by rank of the group: ``fields`` and ``begun``, or the error text in ``failed``."""


class Log(Protocol):
    """The methods of the log of calls that an inquiry uses."""

    def operation(self, call: int) -> str:
        """Name of this rank's operation in a call."""

    def names(self, ranks: Iterable[int]) -> str:
        """Ranks in words."""

    def conclude(self, call: int, text: str, *, ends: bool) -> str:
        """Makes ``text`` the error that all ranks raise; returns the text of another rank that was first, if any."""


class Inquiry:
    """Asks all ranks of a group for their records of a call.

    Args:
        log: names the call and the ranks, and makes all ranks raise conclusions.
        channel: for questions and answers; this rank has already answered.
        call: number of the call.
        began: when this rank started to wait for it, by `time.monotonic`.
        timeout_s: how long it waits for the others.
        has_failed: the call has failed on this rank, so failures of others are no difference.
    """

    def __init__(
        self, log: Log, channel: StoreChannel, call: int, began: float, timeout_s: float, has_failed: bool = False
    ) -> None:
        self._log, self._channel, self._call = log, channel, call
        self._began, self._timeout_s, self._has_failed = began, timeout_s, has_failed
        self.answers: Answers = {}
        self._last = 0.0
        self._differ_since: float | None = None
        self._has_warned = False
        channel.ask(call)

    @property
    def missing(self) -> list[int]:
        """Ranks that have not answered."""
        return [rank for rank in range(self._channel.size) if rank not in self.answers]

    def look(self) -> bool:
        """Whether the call is known to be the same on all ranks.

        Raises:
            RuntimeError: it is not, or ranks did not answer in time.
        """
        now = time.monotonic()
        if now - self._last < max(timeouts.BUSY_S, timeouts.BUSY_S * self._channel.size / 100):
            return False
        self._last = now
        if (text := self._channel.conclusion(self._call)) is not None:
            raise RuntimeError(text)
        self._channel.answers(self._call, self.answers)
        text = self._difference()
        if text is None:
            if self.missing:
                self._warn(now - self._began)
            return not self.missing
        self._differ_since = now if self._differ_since is None else self._differ_since
        # The message is better with all answers, but one may never arrive.
        if not self.missing or now - self._differ_since >= timeouts.ASK_S:
            self._raise(text)
        return False

    def _difference(self) -> str | None:
        """How the answers differ; None if they agree."""
        told = {r: a for r, a in self.answers.items() if not (self._has_failed and "fields" in a)}
        if failure := failure_text(self._log, self._call, told):
            return failure
        fields = {rank: self.answers[rank]["fields"] for rank in sorted(self.answers)}
        texts = {rank: json.dumps(f) for rank, f in fields.items()}
        counts = Counter(texts.values())
        first = max(texts, key=lambda rank: counts[texts[rank]])  # in a tie, that of the lowest rank
        expected = fields[first]
        differ = [
            f"{self._log.names([rank])} has {_differences(found, expected)}"
            for rank, found in fields.items()
            if found != expected
        ]
        if not differ:
            return None
        agree = [rank for rank in fields if fields[rank] == expected]
        return f"{expected['operation']}: ranks disagree: {'; '.join(differ)}, as ranks {agree} of the group have"

    def _warn(self, waited: float) -> None:
        operation, names = self._log.operation(self._call), self._log.names(self.missing)
        if waited >= self._timeout_s:
            self._raise(f"{operation}: {names} did not arrive within {self._timeout_s:g} s")
        if waited >= timeouts.WARN_S and not self._has_warned:
            self._has_warned = True
            logger.warning("%s: waiting for %s for %.0f s", operation, names, waited)

    def _raise(self, text: str) -> None:
        ends = any(answer.get("begun") for answer in self.answers.values())
        raise RuntimeError(self._log.conclude(self._call, text, ends=ends))


def failure_text(log: Log, call: int, answers: Answers) -> str | None:
    """Which ranks have raised which error in a call, None if none has."""
    failed = [f"{log.names([rank])} {a['failed']}" for rank, a in sorted(answers.items()) if "failed" in a]
    return f"{log.operation(call)}: {'; '.join(failed)}" if failed else None


def _differences(found: dict[str, str], expected: dict[str, str]) -> str:
    """Text of how two records differ; only the operation, if that differs."""
    if found["operation"] != expected["operation"]:
        return f"operation {found['operation']} instead of {expected['operation']}"
    names = [name for name in {**expected, **found} if found.get(name) != expected.get(name)]
    return " and ".join(f"{name} {found.get(name)} instead of {expected.get(name)}" for name in names)
