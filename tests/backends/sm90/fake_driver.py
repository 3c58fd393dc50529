"""The host side of the Hopper kernels on a machine without a GPU: kernels are named, not run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from megatron_magi.attention import call_cache
from megatron_magi.backends.sm90 import attention as hopper
from megatron_magi.backends.sm90 import (
    backward,
    backward_ends,
    fused_backward,
    fused_forward,
    kernels,
    program,
    support,
)
from megatron_magi.cuda import driver, launch, launch_list
from megatron_magi.runtime.lru import LruCache

USE_STREAMS = hopper, backward, backward_ends, program, call_cache
"""Modules that ask for the current stream."""


@contextmanager
def fake_driver(monkeypatch: pytest.MonkeyPatch, num_sms: int = 132) -> Iterator[list[str]]:
    """Lets CPU tensors pass for tensors on a Hopper GPU; yields the names of the kernels that are queued."""
    names: list[str] = []
    monkeypatch.setattr(support, "_is_hopper", lambda _device: True)
    for module in (support, backward, fused_forward, fused_backward):
        monkeypatch.setattr(module, "sm_count", lambda _device: num_sms)
    monkeypatch.setattr(driver.Kernel, "launch", lambda self, *_: names.append(self.handle))
    monkeypatch.setattr(driver, "tensor_map", lambda *_: bytes(128))
    monkeypatch.setattr(driver, "move_tensor_map", lambda *_: None)
    monkeypatch.setattr(kernels, "_load", lambda _d, name, _m, threads, size: driver.Kernel(name, threads, size))
    for module in USE_STREAMS:
        monkeypatch.setattr(module, "current_stream", lambda _device: 0)
    monkeypatch.setattr(launch_list, "_library", lambda: None)
    monkeypatch.setattr(launch, "_launches", LruCache(1 << 30))
    for module in (hopper, backward, fused_forward, fused_backward):
        monkeypatch.setattr(module, "_passes", LruCache(1 << 30))
    for name in ("_one_launches", "_makers"):
        monkeypatch.setattr(hopper, name, LruCache(1 << 30))
    known = (
        kernels.forward_kernel, kernels.backward_kernel, kernels.backward_keys_kernel,
        kernels.backward_queries_kernel, kernels.small_kernel,
    )  # fmt: skip
    for kernel in known:
        kernel.cache_clear()
    yield names
    for kernel in known:
        kernel.cache_clear()
