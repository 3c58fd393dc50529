"""Calls beside the stream of the caller: how they take turns with those on it, and are prepared; without a GPU."""

from __future__ import annotations

import functools
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron_magi.comm.impl import native
from megatron_magi.comm.row_layout import RowLayout
from megatron_magi.comm.row_memory import rows_of
from tests.comm.random_transfers import Transfers


class Stream:
    """That notes nothing."""

    def wait_stream(self, _other) -> None:
        """Nothing is queued."""

    def wait_event(self, _event) -> None:
        """Likewise."""


def test_a_call_that_was_waited_for_with_all_others_does_not_count_for_a_later_one(monkeypatch):
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 7, raising=False)
    mover = object.__new__(native.Native)
    mover._device, mover._side, mover._streams, mover._events = torch.device("cuda", 0), None, {7: Stream()}, []
    mover._last, mover._joins, mover._beside, mover._sends_beside = 7, 0, 1, False
    early = native._Done(object(), 0, mover)
    mover._join(Stream())
    assert not mover._beside
    mover._beside = 1  # a call that takes beside
    late = native._Done(object(), mover._joins, mover)
    early.wait()
    assert mover._beside == 1, "what comes next would not wait for the later call"
    late.wait()
    assert mover._beside == 0


def test_launches_are_prepared_once_for_calls_that_differ_in_addresses_alone(monkeypatch):
    rows = [[np.arange(4 * (i != j)) for j in range(2)] for i in range(2)]
    args = Transfers([4, 4], rows, [None] * 2).args(0, "cpu")
    mover = object.__new__(native.Native)
    mover._device, mover._started = torch.device("cuda", 0), SimpleNamespace(cuda_event=3)
    mover._memory, mover._flags = SimpleNamespace(generation=0, packed=b""), torch.zeros(1)
    mover._num_sms, made = 132, []
    monkeypatch.setattr(native, "_of_device", lambda _: [mover])
    monkeypatch.setattr(native, "kernel_of", lambda name, *_: SimpleNamespace(name=name, loads=4))
    monkeypatch.setattr(native, "Launch", lambda kernel, *_, **__: made.append(kernel.name) or object())
    x = [torch.zeros(4, 64) for _ in range(3)]
    layout = RowLayout.of(x[:1])
    own, other, out = (rows_of([t], layout.sizes) for t in x)

    def exchange(some, roles):
        return mover._exchanges(native._Exchange(native._CAST, (), roles), args, layout, some, out)

    first = exchange(own, native._BOTH)
    assert exchange(other, native._BOTH) is first and made == ["exchange"]
    assert len(exchange(own, native._APART)) == 2 and made == ["exchange"] * 3
    prepare = functools.partial(mover._prepare_announced, args, layout, own, out)
    assert len(mover._launches((native._ANNOUNCE,), args, own, out, prepare)) == 2
    assert made[3:] == ["publish_rows", "pull_bulk"]
    mover._memory.generation = 1
    assert exchange(own, native._BOTH) is not first


def test_a_capture_is_looked_for_on_the_gpu_of_the_group(monkeypatch):
    current = [1]

    class Device:
        def __init__(self, device: torch.device) -> None:
            self._index, self._before = device.index, current[0]

        def __enter__(self) -> None:
            current[0] = self._index

        def __exit__(self, *_) -> None:
            current[0] = self._before

    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "device", Device)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: current[0] == 0)
    for index in (0, 1):
        mover = object.__new__(native.Native)
        mover._device = torch.device("cuda", index)
        assert mover._captures() == (index == 0) and current == [1]


class Noted:
    """A stream, an event or a launch; what is done with it goes to a list."""

    def __init__(self, name: str, notes: list, raw: int = 0) -> None:
        self.name, self.cuda_stream, self._notes = name, raw, notes

    def wait_stream(self, other: Noted) -> None:
        self._notes.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: Noted) -> None:
        self._notes.append(f"{self.name} waits for {event.name}")

    def record(self, stream: Noted) -> None:
        self._notes.append(f"{self.name} on {stream.name}")

    def fire(self, raw: int, *_) -> None:
        self._notes.append(f"{self.name} on {('main', 'other', 'side')[raw]}")


@pytest.fixture
def few(monkeypatch):
    """What begins a call of few rows, or another; the number of the current stream in a list; and notes."""
    notes, current, captures = [], [0], [False]
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: current[0], raising=False)
    mover = object.__new__(native.Native)
    mover._device, mover._side, mover._few = torch.device("cuda", 0), Noted("side", notes, 2), lambda: None
    mover._streams = {i: Noted(name, notes, i) for i, name in enumerate(("main", "other"))}
    mover._last, mover._joins, mover._beside, mover._sends_beside = -1, 0, 0, False
    mover._ready, mover._lock = Noted("ready", notes), threading.RLock()
    mover._events, mover._room = [Noted("end", notes) for _ in range(9)], SimpleNamespace(stays=False)
    mover._captures = lambda: captures[0]
    mover._exchanges = lambda exchange, *_: tuple(Noted(("", "send", "take", "both")[r], notes) for r in exchange.roles)

    def begin(num_rows: int, width: int = 64):
        rows = [[np.arange(num_rows * (i != j)) for j in range(2)] for i in range(2)]
        args = Transfers([num_rows] * 2, rows, [None] * 2).args(0, "cpu")
        x = torch.zeros(num_rows, width)
        notes.clear()
        return mover.cast([x], args, RowLayout.of([x])).works[0]

    return SimpleNamespace(begin=begin, current=current, captures=captures, notes=notes, mover=mover)


def test_few_rows_are_taken_on_the_stream_that_waits_for_them_behind_what_is_under_way(few):
    work = few.begin(4)
    assert few.notes == ["send on main"]
    few.notes.clear()
    few.current[0] = 1
    work.wait()
    assert few.notes == ["other waits for main", "take on other"]
    large = few.begin(5000)
    large_is_read = few.begin(4)
    few.notes.clear()
    large_is_read.wait()
    assert few.notes == ["other waits for side", "take on other"]
    few.notes.clear()
    work.wait()
    large.wait()
    assert "take on other" not in few.notes, "once"


@pytest.mark.parametrize("num_rows", [4, 5000])
def test_few_rows_are_taken_beside_what_comes_when_another_call_begins(few, num_rows):
    work = few.begin(4)
    following = few.begin(num_rows)
    assert few.notes[:4] == ["ready on main", "side waits for ready", "take on side", "end on side"]
    assert few.mover._beside == 1 + (num_rows == 5000)
    few.notes.clear()
    work.wait()
    assert few.notes == ["main waits for end"]
    following.wait()
    assert few.mover._beside == 0


def test_few_rows_that_nobody_waits_for_are_taken_all_the_same(few):
    work = few.begin(4)
    del work
    assert few.notes == ["send on main", "take on main"]
    few.captures[0] = True
    work = few.begin(4)
    assert few.notes == ["send on main", "ready on main", "side waits for ready", "take on side", "end on side"]
    work.wait()
    assert few.notes[5:] == ["main waits for end"]


def test_whether_rows_are_few_is_decided_by_what_all_ranks_know(few, monkeypatch):
    monkeypatch.setattr(native, "FEW_BYTES", 1024)
    assert [type(few.begin(*n)) for n in ((4, 64), (5, 64), (4, 63), (4, 2))] == [
        native._Few, native._Done, native._Done, native._Few,
    ]  # fmt: skip


@pytest.mark.parametrize("num_groups", [1, 2])
def test_rows_are_read_beside_the_kernel_before_unless_other_groups_could_be_held_up(monkeypatch, num_groups):
    mover = object.__new__(native.Native)
    mover._device, mover._flags, mover._own_memory = None, torch.zeros(1), lambda: (0, 8, 16, 5)
    monkeypatch.setattr(native, "_of_device", lambda _: [mover] * num_groups)
    launch = SimpleNamespace(step=lambda places, overlaps=False: (places, overlaps))
    monkeypatch.setattr(mover, "_launches", lambda *_: (launch, launch), raising=False)
    x = [torch.zeros(4, 64)]
    made = mover.arriving(x, None, RowLayout.of(x), x, "sources", "places")
    assert made.steps == (("sources", False), ("places", num_groups == 1)) and made.overlaps == (num_groups == 1)
