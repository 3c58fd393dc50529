"""Objects on their way between processes."""

from __future__ import annotations

import multiprocessing
import os
import pickle
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler

import numpy as np
import pytest
import torch

from megatron_magi.runtime import shm_transport
from megatron_magi.runtime.shm_transport import Parcel, Sendable
from megatron_magi.runtime.upload import pack


class Pair(Sendable[tuple]):
    """Two things."""

    def _pinned(self, parts: tuple) -> tuple:
        raise AssertionError("what has arrived is pinned as it is")


def test_what_is_packed_is_what_is_opened() -> None:
    strided = torch.arange(12).view(3, 4).t()
    value = {
        "a": torch.arange(5), "empty": torch.zeros(0, 3), "turned": strided, "flags": torch.tensor([True, False]),
        "half": torch.ones(2, dtype=torch.bfloat16), "twice": [strided, strided],
        "packed": pack([np.arange(7), np.ones((2, 2), dtype=np.float32)]),
    }  # fmt: skip
    arrays = [
        np.arange(3), np.arange(6, dtype=np.int32).reshape(2, 3).T, np.array([True, False]), np.float32([[1.5]]),
        np.array(7), np.arange(2, dtype=np.int16), np.array([1.0]), np.zeros((0, 6), dtype=np.int64),
    ]  # fmt: skip
    value["arrays"] = arrays
    got = pickle.loads(pickle.dumps(Parcel.of(value))).open()
    for array, expected in zip(got["arrays"], arrays, strict=True):
        assert (array.dtype, array.shape) == (expected.dtype, expected.shape) and np.array_equal(array, expected)
    for name in ("a", "empty", "turned", "flags", "half"):
        assert got[name].dtype == value[name].dtype and torch.equal(got[name], value[name]), name
    assert all(torch.equal(x, strided) for x in got["twice"])
    assert [x.tolist() for x in got["packed"].to("cpu")] == [x.tolist() for x in value["packed"].to("cpu")]


def test_it_is_opened_once_and_by_who_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    opened, stock = [], Parcel.open
    monkeypatch.setattr(Parcel, "open", lambda parcel: opened.append(parcel) or stock(parcel))
    inner = Pair((torch.arange(3), "inner"))
    got = pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(Pair((inner, torch.arange(4)))))))
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda x: x.clone())
    got = got.pin_memory()
    assert opened == []
    assert got.parts[1].tolist() == [0, 1, 2, 3] and got.parts is got.parts and len(opened) == 1
    assert got.parts[0].parts[0].tolist() == [0, 1, 2] and len(opened) == 2


def test_all_tensors_lie_in_the_block_that_was_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its storage is what the allocator of page-locked memory knows, also for tensors of what lay inside."""
    pinned: list[torch.Tensor] = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda x: pinned.append(x.clone()) or pinned[-1])
    inner = Pair((torch.arange(300), pack([np.arange(40)])))
    got = pickle.loads(pickle.dumps(Pair((inner, torch.ones(50))))).pin_memory()
    (block,) = pinned
    (rows, packed), ones = got.parts[0].parts, got.parts[1]
    assert {t.untyped_storage().data_ptr() for t in (rows, packed.buffer, ones)} == {block.untyped_storage().data_ptr()}


def _send_all(connection: Connection, sizes: list[int]) -> None:
    for size in sizes:
        connection.send(Parcel.of([torch.arange(size), size]))
        connection.recv()
    connection.send(len(shm_transport._sent))
    connection.recv()


def _received(connection: Connection) -> object:
    assert connection.poll(60), "nothing was sent"
    return connection.recv()


def test_processes_share_the_memory_and_keep_none_that_has_arrived() -> None:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    sizes = [3, 0, 200_000, 7, 50_000]
    sender = context.Process(target=_send_all, args=(there, sizes), daemon=True)
    sender.start()
    try:
        files, got = len(os.listdir("/proc/self/fd")), []
        for _ in sizes:
            got.append(_received(here))
            here.send(None)
        assert _received(here) == 1  # the last one is closed when the next is sent
        here.send(None)
    finally:
        sender.join(30)
    for size, arrived in zip(sizes, got, strict=True):
        rows, number = arrived.open()
        assert number == size and torch.equal(rows, torch.arange(size))
    del got, arrived, rows
    assert len(os.listdir("/proc/self/fd")) == files


def test_a_sender_that_has_ended_is_named() -> None:
    data = bytes(ForkingPickler.dumps(Parcel.of(torch.arange(3))))
    (sent,) = [shm_transport._sent.pop()]
    sent.memory.close()
    os.close(sent.file)
    with pytest.raises(RuntimeError, match=f"a parcel from process {os.getpid()} did not arrive"):
        pickle.loads(data)


def test_arrays_of_all_kinds_keep_their_content_and_are_copied_once():
    arrays = [
        np.arange(5, dtype=np.int64), np.zeros((0, 4), dtype=np.int32), np.array([True, False, True]),
        np.random.default_rng(0).normal(size=(3, 7)).astype(np.float32), np.array(7), np.arange(12).reshape(3, 4).T,
    ]  # fmt: skip
    packed = pickle.loads(pickle.dumps(pack(arrays)))
    assert packed.num_bytes % 16 == 0 and all(place.offset % 16 == 0 for place in packed.places)
    tensors = packed.to("cpu")
    for array, tensor in zip(arrays, tensors, strict=True):
        assert tensor.shape == array.shape and np.array_equal(tensor.numpy(), array)
    assert len({t.untyped_storage().data_ptr() for t in tensors}) == 1
