"""The clock of the attention benchmark, on a device that is pretended."""

from __future__ import annotations

import pytest
import torch

from benchmarks._lib import timing
from benchmarks._lib.timing import Slots, attempt, time_together


class Device:
    """Times in ms: the host queues a call in ``host``, the device runs it in ``run`` and idles as long as it must."""

    def __init__(self, monkeypatch, host: float, run: float) -> None:
        self.host, self.run, self.now, self.free, self.delays = host, run, 0.0, 0.0, []
        device = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                self.at = max(device.now, device.free)

            def query(self) -> bool:
                return self.at <= device.now

            def elapsed_time(self, end: Event) -> float:
                return end.at - self.at

        def busy(ms: float) -> None:
            device.free = max(device.now, device.free) + ms

        def sleep(cycles: int) -> None:
            device.delays.append(cycles / 2_000_000)
            busy(device.delays[-1])

        def synchronize() -> None:
            device.now = max(device.now, device.free)

        self.busy, self.synchronize = busy, synchronize
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "_sleep", sleep)
        monkeypatch.setattr(torch.cuda, "synchronize", synchronize)

    def call(self) -> None:
        """Queued only after the host's time."""
        self.now += self.host
        self.busy(self.run)

    def waiting_call(self) -> None:
        self.synchronize()
        self.call()


@pytest.mark.parametrize("host", [0.01, 0.9, 7.0])
def test_the_time_is_that_of_the_device_however_slow_the_host(monkeypatch, host):
    device = Device(monkeypatch, host, 0.25)
    slots = Slots(device.call, torch.zeros(1))
    assert slots.warm_up() == pytest.approx(16 * 0.25)
    for _ in range(2):
        slots.take()
    ms, waits = slots.summary()
    assert ms == pytest.approx(0.25) and not waits
    assert len(slots._samples) == 2 * 8, "16 calls a slot, the first half left out"
    assert device.delays[-1] > host


def test_a_call_that_waits_for_the_device_is_said_to(monkeypatch):
    device = Device(monkeypatch, 0.5, 0.25)
    slots = Slots(device.waiting_call, torch.zeros(1))
    slots.warm_up()
    slots.take()
    assert slots.summary() == (pytest.approx(0.75), True)
    assert max(device.delays) == 64.0, "it gives up to wait longer"


def test_a_long_call_is_made_once_a_turn(monkeypatch):
    device = Device(monkeypatch, 0.1, 150.0)
    slots = Slots(device.call, torch.zeros(1))
    assert slots.warm_up() == pytest.approx(150.0)
    slots.take()
    assert len(slots._samples) == 1 and slots.summary() == (pytest.approx(150.0), False)


def test_what_fails_is_said_and_costs_the_others_nothing(monkeypatch):
    device = Device(monkeypatch, 0.1, 0.25)
    monkeypatch.setattr(timing, "_FLUSH_BYTES", 1)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, dtype, device: empty(*size, dtype=dtype))

    def fail() -> None:
        raise RuntimeError("no kernel")

    times, waiting = time_together({"a": device.call, "b": fail, "c": device.waiting_call}, 0.1)
    assert times == {"a": pytest.approx(0.25), "b": "RuntimeError: no kernel", "c": pytest.approx(0.35)}
    assert waiting == {"c"}
    assert attempt(lambda: 3) == (3, "")
