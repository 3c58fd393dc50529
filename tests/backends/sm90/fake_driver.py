"""The host side of the Hopper kernels on a machine without a GPU: kernels are named, not run."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from megatron_magi.attention import call_cache
from megatron_magi.backends.sm90 import attention as hopper
from megatron_magi.backends.sm90 import host_tables, kernels, mask_numbers, program, row_delta, support
from megatron_magi.cuda import driver, launch, launch_list
from megatron_magi.runtime.lru import LruCache

USE_STREAMS = program, row_delta, call_cache
"""Modules that ask for the current stream."""


class Launched(list[str]):
    """Names of the kernels that were queued; ``params``: a copy of the last parameters of each, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.params: dict[str, ctypes.Structure] = {}


def kinds_of_params(monkeypatch: pytest.MonkeyPatch) -> dict[int, type[ctypes.Structure]]:
    """The struct of the parameters of each kernel that is prepared from now on, by the kernel's id."""
    found: dict[int, type[ctypes.Structure]] = {}
    kept, begin, begin_list = [], launch.Launch.__init__, launch_list.LaunchList.__init__

    def make_list(self, steps, *more) -> None:
        for step in steps:
            kept.append(step.kernel)
            found[id(step.kernel)] = type(step.params)
        begin_list(self, steps, *more)

    def make_single(self, kernel, num_blocks, params, maps=()) -> None:
        kept.append(kernel)
        found[id(kernel)] = type(params)
        begin(self, kernel, num_blocks, params, maps)

    monkeypatch.setattr(launch.Launch, "__init__", make_single)
    monkeypatch.setattr(launch_list.LaunchList, "__init__", make_list)
    return found


@contextmanager
def fake_driver(monkeypatch: pytest.MonkeyPatch, num_sms: int = 132) -> Iterator[Launched]:
    """Lets CPU tensors pass for tensors on a Hopper GPU; yields the names of the kernels that are queued."""
    launched, kinds = Launched(), kinds_of_params(monkeypatch)

    def note(kernel, _config, pointers) -> None:
        launched.append(kernel.handle)
        kind = kinds.get(id(kernel))  # not of kernels that tests bring
        if kind is not None:
            launched.params[kernel.handle] = kind.from_buffer_copy(ctypes.string_at(pointers[0], ctypes.sizeof(kind)))

    monkeypatch.setattr(support, "_is_hopper", lambda _device: True)
    for module in (support, host_tables, mask_numbers):
        monkeypatch.setattr(module, "sm_count", lambda _device: num_sms)
    monkeypatch.setattr(driver.Kernel, "launch", note)
    monkeypatch.setattr(driver, "tensor_map", lambda *_: bytes(128))
    monkeypatch.setattr(driver, "move_tensor_map", lambda *_: None)
    monkeypatch.setattr(kernels, "_load", lambda _d, name, _m, threads, size: driver.Kernel(name, threads, size))
    for module in USE_STREAMS:
        monkeypatch.setattr(module, "current_stream", lambda _device: 0)
    monkeypatch.setattr(launch_list, "_library", lambda: None)
    monkeypatch.setattr(launch, "_launches", LruCache(1 << 30))
    monkeypatch.setattr(program, "_bound", LruCache(1 << 30))
    for name in ("_programs", "_makers"):
        monkeypatch.setattr(hopper, name, LruCache(1 << 30))
    loaded = kernels.loaded
    loaded.cache_clear()
    yield launched
    loaded.cache_clear()
