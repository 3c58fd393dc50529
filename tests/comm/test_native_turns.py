"""Calls beside the stream of the caller: how they take turns with those on it, and are prepared; without a GPU."""

from __future__ import annotations

import functools
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron_magi.comm.impl import native
from megatron_magi.comm.movement import SentRows
from megatron_magi.comm.row_layout import RowLayout
from megatron_magi.comm.row_memory import rows_of
from megatron_magi.cuda.arriving import StepRows
from megatron_magi.cuda.params import struct
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


def test_calls_that_have_all_been_waited_for_are_not_waited_for_again(monkeypatch):
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 7, raising=False)
    mover = object.__new__(native.Native)
    mover._device, mover._side, mover._streams, mover._events = torch.device("cuda", 0), None, {7: Stream()}, []
    mover._last, mover._joins, mover._beside, mover._sends_beside = 7, 0, 2, True
    mover._lock, mover._notice = threading.Lock(), bytes(5)
    monkeypatch.setattr(native, "is_capturing", lambda device: device != mover._device)
    queued = []
    calls = SimpleNamespace(queue=lambda *_: queued.append(mover._joins))
    first, second = (native._Done(object(), 0, mover) for _ in range(2))
    first.wait()
    second.wait()
    mover.queue(calls, 7)
    mover._join_senders(Stream())
    assert mover._joins == 0 and queued == [0]
    mover._beside = 1
    mover.queue(calls, 7)
    assert queued == [0, 1]


def test_calls_in_a_graph_wait_for_those_beside_them_which_are_made_part_of_it_first(monkeypatch):
    """A graph can not wait for a stream of which it knows nothing."""
    done, current = [], Stream()
    current.wait_stream = lambda other: done.append(("wait", other))
    side = SimpleNamespace(wait_event=lambda event: done.append(("fork", event)))
    mover = object.__new__(native.Native)
    mover._device, mover._side, mover._streams = torch.device("cuda", 0), side, {9: current}
    mover._ready = SimpleNamespace(record=lambda stream: done.append(("record", stream)))
    mover._last, mover._joins, mover._beside, mover._sends_beside = 7, 0, 1, False
    mover._lock, mover._notice, mover._room = threading.Lock(), bytes(5), SimpleNamespace(stays=False)
    monkeypatch.setattr(native, "is_capturing", lambda _device: True)
    mover.queue(SimpleNamespace(queue=lambda *_: done.append(("queue", None))), 9)
    assert done == [("record", current), ("fork", mover._ready), ("wait", side), ("queue", None)]
    assert not mover._beside and mover._room.stays


def test_rows_are_sent_after_calls_that_send_and_have_not_been_waited_for(monkeypatch):
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 7, raising=False)
    mover = object.__new__(native.Native)
    mover._device, mover._side, mover._streams, mover._events = torch.device("cuda", 0), None, {7: Stream()}, []
    mover._last, mover._joins, mover._beside, mover._sends_beside = 7, 0, 2, True
    mover.await_event(object(), 0)
    mover._join_senders(Stream())
    assert mover._joins == 1 and not mover._beside, "the other call may send"
    mover._beside = 1  # a call that does not
    mover._join_senders(Stream())
    assert mover._joins == 1


def test_launches_are_prepared_once_for_calls_that_differ_in_addresses_alone(monkeypatch):
    rows = [[np.arange(4 * (i != j)) for j in range(2)] for i in range(2)]
    args = Transfers([4, 4], rows, [None] * 2).args(0, "cpu")
    mover = object.__new__(native.Native)
    mover._device, mover._started = torch.device("cuda", 0), SimpleNamespace(cuda_event=3)
    mover._memory = SimpleNamespace(generation=0, peers=struct("group_collective/peers.cuh", "Peers")())
    mover._flags = torch.zeros(1)
    mover._num_sms, made = 132, []
    monkeypatch.setattr(native, "_of_device", lambda _: [mover])
    monkeypatch.setattr(native, "kernel_of", lambda name, *_: SimpleNamespace(name=name))
    monkeypatch.setattr(native, "PeerLaunch", lambda kernel, *_, **__: made.append(kernel.name) or object())
    x = [torch.zeros(4, 64) for _ in range(3)]
    layout = RowLayout.of(x[:1])
    own, other, out = (rows_of([t], layout.sizes) for t in x)

    def exchange(some, roles):
        return mover._exchanges(native._Exchange(native._CAST, (), roles), args, layout, some, out)

    first = exchange(own, native._BOTH)
    assert exchange(other, native._BOTH) is first and made == ["put_rows"]
    assert len(exchange(own, native._APART)) == 2 and made == ["put_rows"] * 3
    prepare = functools.partial(mover._prepare_get, args, layout, own, out)
    assert len(mover._launches((native._GET,), args, own, out, prepare)) == 1
    assert made[3:] == ["get_rows"]
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
        assert native.is_capturing(torch.device("cuda", index)) == (index == 0) and current == [1]


@pytest.mark.parametrize("is_waited_for", [False, True])
def test_nothing_is_sent_beside_sums_that_are_under_way(monkeypatch, is_waited_for):
    """They take more SMs than a kernel that sends leaves."""
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 7, raising=False)
    monkeypatch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(record=lambda _: None))
    mover = object.__new__(native.Native)
    mover._device, mover._side, mover._streams = torch.device("cuda", 0), Stream(), {7: Stream()}
    mover._side.cuda_stream = 8
    mover._last, mover._joins, mover._beside, mover._sends_beside, mover._events = -1, 0, 0, False, []
    mover._ready, mover._lock = SimpleNamespace(record=lambda _: None), threading.Lock()
    monkeypatch.setattr(native, "is_capturing", lambda device: device != mover._device)
    mover._exchanges = lambda *_: [SimpleNamespace(fire=lambda *_: None)] * 2
    x = [torch.zeros(4, 64)]
    work, _ = mover._run(native._ADD, SentRows(x, None, RowLayout.of(x)), [], (torch.float32, torch.float32))
    if is_waited_for:
        work.wait()
    following, _ = mover._run(native._CAST, SentRows(x, None, RowLayout.of(x)), [])
    assert mover._joins == (not is_waited_for) and mover._beside == 1
    following.wait()


@pytest.mark.parametrize("num_groups", [1, 2])
def test_attention_starts_beside_the_kernel_that_brings_rows_unless_other_groups_could_be_held_up(
    monkeypatch, num_groups
):
    mover = object.__new__(native.Native)
    mover._device, mover._flags, mover._rendezvous = None, torch.zeros(1), SimpleNamespace(rank=1)
    of_ranks = struct("group_collective/peers.cuh", "Peers")(control=(8, 64), notice=16, timeout_ns=5)
    mover._memory = SimpleNamespace(peers=of_ranks)
    monkeypatch.setattr(native, "_of_device", lambda _: [mover] * num_groups)
    launch = SimpleNamespace(step=lambda *lists: lists)
    monkeypatch.setattr(mover, "_launches", lambda *_: (launch,), raising=False)
    x = [torch.zeros(4, 64)]
    made = mover.arriving(StepRows(x, x, "sources", "places"), None, RowLayout.of(x))
    assert made.step == ("sources", "places") and made.overlaps == (num_groups == 1)
    assert (made.notice, made.timeout_ns) == (16, 5) and 64 < made.broken < made.call
