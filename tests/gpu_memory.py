"""Tests that need much device memory."""

from __future__ import annotations

import fcntl
import os
import tempfile
from pathlib import Path
from typing import TextIO

import pytest
import torch

_LOCK = Path(tempfile.gettempdir()) / f"megatron_magi_test_memory_{os.getuid()}.lock"
_held: list[TextIO] = []


def needs_gigabytes(count: int) -> None:
    """Skips the test where other processes have left less of the GPU's memory.

    One such test runs at a time, of all processes of pytest: two would find the same memory free.
    """
    lock = _LOCK.open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    if torch.cuda.mem_get_info()[0] < count << 30:
        lock.close()
        pytest.skip(f"needs {count} GB of free GPU memory")
    _held.append(lock)


def free_memory() -> None:
    """Frees what torch keeps of a large test's GPU memory, as other processes share the GPU, and lets the next run."""
    if torch.cuda.is_initialized() and torch.cuda.memory_reserved() > 2 << 30:
        torch.cuda.empty_cache()
    while _held:
        _held.pop().close()
