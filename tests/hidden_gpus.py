"""GPUs of this machine, hidden from tests that do not ask for one: they compute as on a machine without."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from megatron_magi import cpu_device
from megatron_magi.backends.sm90 import support
from megatron_magi.cuda.target import target_of
from tests import forced


def asks_for_gpus(item: pytest.Item) -> bool:
    """Whether a test needs a GPU, or a backend is forced that computes on one."""
    return forced.DEVICE == "cuda" or item.get_closest_marker("gpu") is not None


@contextmanager
def no_gpus() -> Iterator[None]:
    """This process says that it has no GPU, even if it has used one, and those that it starts see none."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        patch.setattr(torch.cuda, "is_available", lambda: False)
        patch.setattr(torch.cuda, "device_count", lambda: 0)
        # Processes of their own need it; here it would stay, and tests on GPUs follow.
        patch.setattr(cpu_device, "install", lambda *, force=False, real=cpu_device.install: force and real(force=True))
        _forget()
        try:
            yield
        finally:
            _forget()


def _forget() -> None:
    """What is known of a device, once for all calls."""
    target_of.cache_clear()
    support._is_hopper.cache_clear()
