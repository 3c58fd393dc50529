"""Lists of prepared kernels: the walk in C++ queues what that in Python queues."""

from __future__ import annotations

import ctypes
import struct
import threading
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from megatron_magi.cuda import driver, launch_list
from megatron_magi.cuda.driver import Kernel, LaunchConfig
from megatron_magi.cuda.launch_list import LaunchList, Map, Step
from megatron_magi.cuda.layout import Layout

WORDS = 20  # of parameters: a tensor map, and four
LAUNCH = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64, ctypes.POINTER(ctypes.c_uint64), ctypes.c_void_p
)
MOVE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64)


class Driver:
    """Notes what it is told: kernels with their parameters, and tensor maps that were moved."""

    def __init__(self) -> None:
        self.told, self.refusals, self.refused_moves, self.inside = [], [], [], []

    def launch(self, config, function, pointers, _extra):
        if self.refusals:
            status = self.refusals.pop(0)
            if status:
                return status
        config = LaunchConfig.from_address(config)
        words = (ctypes.c_uint64 * WORDS).from_address(pointers[0])
        self.told.append((function, config.grid[0], config.stream, config.num_attributes, tuple(words)))
        return 0

    def move(self, at, address):
        if self.refused_moves:
            return self.refused_moves.pop(0)
        self.told.append(("move", address))
        ctypes.c_uint64.from_address(at).value = 2 * address
        return 0

    @contextmanager
    def context(self, context):
        self.inside.append(context)
        yield


@pytest.fixture(params=["python", "native"])
def told(monkeypatch, request):
    """A driver that is told, by either walk."""
    if request.param == "python":
        monkeypatch.setattr(launch_list, "_library", lambda: None)
    elif not launch_list.available():
        pytest.skip("not built")
    found = Driver()
    launch, move = LAUNCH(found.launch), MOVE(found.move)
    addresses = [ctypes.cast(function, ctypes.c_void_p).value for function in (launch, move)]
    monkeypatch.setattr(driver, "entry_points", lambda: tuple(addresses))
    library = SimpleNamespace(
        cuLaunchKernelEx=lambda config, function, pointers, _: found.launch(
            config, function.value, ctypes.cast(pointers, ctypes.POINTER(ctypes.c_uint64)), None
        ),
        cuTensorMapReplaceAddress=found.move,
        cuGetErrorString=lambda *_: None,
    )
    monkeypatch.setattr(driver, "_libcuda", lambda: library)
    monkeypatch.setattr(driver, "_in_context", found.context)
    found.kept = launch, move
    return found


class Words(ctypes.Structure):
    _fields_ = [("words", ctypes.c_uint64 * WORDS)]


def words(number, changed=None):
    """Parameters of a step, in which some words are changed."""
    return tuple((changed or {}).get(i, 100 * number + i) for i in range(WORDS))


def step(number, fields=None, maps=()):
    kernel, params = Kernel(ctypes.c_void_p(number), 32, 0, context=number), Words(words(number))
    fields = {f"words.{i}": place for i, place in (fields or {}).items()}
    return Step(kernel, number, params, maps, fields, overlaps=number % 2 == 1)


def tensor(rows=3):
    return Layout.new((rows, 1, 64), torch.bfloat16, torch.device("cpu"))


@pytest.fixture(autouse=True)
def encoded(monkeypatch):
    """Rows of the tensor maps that are encoded, each of which begins with them and an address of 0."""
    found = []

    def encode(layout, *_box):
        found.append(layout.shape[0])
        return struct.pack("2Q", layout.shape[0], 0) + bytes(112)

    monkeypatch.setattr(driver, "tensor_map", encode)
    return found


def make():
    steps = [
        step(1, {0: ("a", 0), 1: ("b", 16)}),
        step(2),
        step(3, {16: ("b", 8), 18: ("a", -8)}, [Map(tensor(), (64,), ("b", 256))]),
    ]
    return LaunchList(steps, ("b", "a"), 77, threading.Lock())


def test_kernels_get_the_addresses_of_each_call(told):
    calls = make()
    for b, a in ((4096, 1 << 63), (4096, 512), (8192, 512)):
        calls.queue(b, a)
    behind = dict.fromkeys(range(1, 16), 0)
    first = [
        ("move", 4352), (1, 1, 77, 1, words(1, {0: 1 << 63, 1: 4112})), (2, 2, 77, 0, words(2)),
        (3, 3, 77, 1, words(3, {0: 8704, **behind, 16: 4104, 18: (1 << 63) - 8})),
    ]  # fmt: skip
    assert told.told[:4] == first
    assert told.told[4:7] == [
        (1, 1, 77, 1, words(1, {0: 512, 1: 4112})), first[2],
        (3, 3, 77, 1, words(3, {0: 8704, **behind, 16: 4104, 18: 504})),
    ], "not moved again"  # fmt: skip
    assert told.told[7] == ("move", 8448) and len(told.told) == 11


def test_a_kernel_of_another_context_is_queued_there_and_none_twice(told):
    calls = make()
    told.refusals = [0, 201]
    calls.queue(4096, 512)
    assert [entry[0] for entry in told.told] == ["move", 1, 2, 3] and told.inside == [2]
    calls.queue(4096, 512)
    assert [entry[0] for entry in told.told[4:]] == [1, 2, 3]


@pytest.mark.parametrize("refusals", [[0, 700], [0, 201, 700]])
def test_what_cuda_refuses_is_raised_and_the_next_call_begins_anew(told, refusals):
    calls = make()
    told.refusals = list(refusals)
    with pytest.raises(RuntimeError, match="kernel launch: CUDA error 700"):
        calls.queue(4096, 512)
    told.told.clear()
    calls.queue(4096, 512)
    assert [entry[0] for entry in told.told] == [1, 2, 3]


def test_a_map_that_could_not_be_moved_is_moved_by_the_next_call(told):
    calls = make()
    told.refused_moves = [1]
    with pytest.raises(RuntimeError, match="CUDA error 1,"):
        calls.queue(4096, 512)
    assert not told.told, "no kernel reads from where the map was"
    calls.queue(4096, 512)
    assert [entry[0] for entry in told.told] == ["move", 1, 2, 3]


def test_no_parameter_but_those_listed_is_written(told):
    # Behind the list of patches lie the addresses: as a patch, these would put 16 at byte 16 of the first parameters.
    make().queue(16, 0)
    assert told.told[1][-1] == words(1, {0: 0, 1: 32})


def test_a_kernel_that_is_timed_is_launched_by_python(told):
    launched = []
    timed = SimpleNamespace(threads=32, shared_bytes=0, launch=lambda *_: launched.append("timed"))
    calls = LaunchList([step(1)._replace(kernel=timed), step(2)], (), 0, threading.Lock())
    calls.queue()
    assert launched == ["timed"] and [entry[0] for entry in told.told] == [2]


class Params(ctypes.Structure):
    _fields_ = [
        ("map", ctypes.c_char * 128), ("tables", ctypes.c_uint64), ("at", ctypes.c_void_p), ("kept", ctypes.c_int32),
        ("count", ctypes.c_int32), ("rest", ctypes.c_uint64),
    ]  # fmt: skip


def test_a_copy_has_the_numbers_of_its_mask_and_the_first_those_of_its_own(told, encoded):
    kernel = Kernel(ctypes.c_void_p(1), 32, 0, context=1)
    first = Step(
        kernel, "grid", Params(kept=4, rest=5), [Map(tensor(), (64,), ("a", 0), "rows")], {"at": ("b", "begin")},
        {"tables": "tables", "count": "count"},
    )  # fmt: skip
    calls = LaunchList([first, step(2)], ("b", "a"), 77, threading.Lock())
    numbers = {"begin": 8, "tables": 1 << 40, "count": -3, "rows": 6, "grid": 9}
    one = calls.with_numbers(numbers)
    one.queue(4096, 512)
    expected = (1024, *[0] * 15, 1 << 40, 4104, 4 | (2**32 - 3) << 32, 5)
    assert told.told == [("move", 512), (1, 9, 77, 0, expected), (2, 2, 77, 0, words(2))]
    told.told.clear()
    other = one.with_numbers({**numbers, "tables": 3, "grid": 2})
    other.queue(4096, 512)
    assert encoded == [6] and told.told[0][:2] == (1, 2), "rows that are the same lie where they lay"
    told.told.clear()
    one.with_numbers({**numbers, "rows": 7}).queue(4096, 512)
    assert encoded == [6, 7] and told.told[0] == ("move", 512), "a map that is made anew lies nowhere"
    told.told.clear()
    one.queue(4096, 512)
    assert told.told[0] == (1, 9, 77, 0, expected)
