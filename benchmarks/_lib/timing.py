"""Device time of several calls that are interleaved, each queued whole before the device begins with it."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Mapping

import torch

from benchmarks._lib.providers import Unavailable

_FIRST_DELAY_MS, _MAX_DELAY_MS = 1.0, 64.0
_CYCLES_PER_MS = 2_000_000  # no chip that is measured here has a faster clock
TURN_MS, _MOST_SAMPLES, _MOST_ROUNDS = 100.0, 16, 8
_FLUSH_BYTES = 128 << 20  # more than an L2 cache


class DeviceLost(Exception):
    """The GPU answers nothing any more: a kernel went wrong in a way that ends the process's use of it."""


def attempt[T](call: Callable[..., T], *args: object) -> tuple[T | None, str]:
    """``(result, "")``, or ``(None, what went wrong)``.

    Raises:
        DeviceLost: the GPU cannot be used any more.
        Unavailable: raised by the call.
    """
    try:
        return call(*args), ""
    except (Unavailable, DeviceLost):
        raise
    except Exception as error:  # noqa: BLE001  (a peer may fail in any way; the others are measured all the same)
        text = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    try:
        torch.cuda.synchronize()
    except RuntimeError as lost:
        raise DeviceLost(text) from lost
    return None, text


class Slots:
    """One call's samples.

    Before each, the L2 cache is flushed and the device kept busy for as long as the host takes to queue the call, as
    in a training step, where the host runs ahead. A sample where it was too slow for that makes the next delay longer.
    In a slot the call is repeated, and its first half not counted: a long call before it leaves the device at its limit
    of power, with lower clocks, a short one with higher.
    """

    def __init__(self, call: Callable[[], object], flush: torch.Tensor, turn_ms: float = TURN_MS) -> None:
        self._call, self._flush, self._delay_ms = call, flush, _FIRST_DELAY_MS
        self._samples: list[tuple[float, bool]] = []
        self._last_ms, self._turn_ms = 0.0, turn_ms

    def warm_up(self) -> float:
        """Milliseconds that a slot takes, about."""
        self._sample()  # whatever is made when it is first called is made
        while not self._sample()[1] and self._delay_ms < _MAX_DELAY_MS:
            pass
        return self._last_ms * self._count()

    def take(self) -> None:
        """A slot."""
        count = self._count()
        self._samples += [self._sample() for _ in range(count)][count // 2 :]

    def _count(self) -> int:
        return min(_MOST_SAMPLES, max(1, round(self._turn_ms / self._last_ms)))

    def _sample(self) -> tuple[float, bool]:
        """Milliseconds from where the device begins with the call to where it is done, and whether it was queued."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._flush.zero_()
        torch.cuda._sleep(int(self._delay_ms * _CYCLES_PER_MS))
        start.record()
        self._call()
        end.record()
        queued = not start.query()
        torch.cuda.synchronize()
        if not queued:
            self._delay_ms = min(4 * self._delay_ms, _MAX_DELAY_MS)
        self._last_ms = max(start.elapsed_time(end), 1e-3)
        return self._last_ms, queued

    def summary(self) -> tuple[float, bool]:
        """Median of the samples, and whether the host's time is in it, for all of them."""
        queued = [ms for ms, queued in self._samples if queued]
        return statistics.median(queued or [ms for ms, _ in self._samples]), not queued


def time_together(
    calls: Mapping[str, Callable[[], object]], seconds: float, turn_ms: float = TURN_MS
) -> tuple[dict[str, float | str], set[str]]:
    """Median device times in milliseconds by name, or the error of a call that fails; calls that wait for the device.

    Slots of the calls are interleaved, so that all have the same temperature, each round in another order, so that none
    always follows the hottest. A call that waits for the device cannot be queued: its time is that of the host too.
    """
    flush = torch.empty(_FLUSH_BYTES, dtype=torch.int8, device="cuda")
    slots = {name: Slots(call, flush, turn_ms) for name, call in calls.items()}
    failed: dict[str, float | str] = {}
    spent = 0.0
    for name, slot in slots.items():
        took, error = attempt(slot.warm_up)
        if error:
            failed[name] = error
        spent += took or 0.0
    rounds = max(2, min(_MOST_ROUNDS, int(1e3 * seconds / max(spent, 1e-3))))
    shuffled = random.Random(0)
    for _ in range(rounds):
        for name in shuffled.sample(list(slots), len(slots)):
            if name not in failed:
                _, error = attempt(slots[name].take)
                if error:
                    failed[name] = error
    found = {name: slot.summary() for name, slot in slots.items() if name not in failed}
    times: dict[str, float | str] = {name: ms for name, (ms, _) in found.items()}
    return times | failed, {name for name, (_, waits) in found.items() if waits}
