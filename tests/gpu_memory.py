"""Tests that need much device memory."""

from __future__ import annotations

import pytest
import torch


def needs_gigabytes(count: int) -> None:
    """Skips the test where other processes have left less of the GPU's memory."""
    if torch.cuda.mem_get_info()[0] < count << 30:
        pytest.skip(f"needs {count} GB of free GPU memory")
