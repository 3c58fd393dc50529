"""The Triton row kernels do what plain torch does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu_memory import needs_gigabytes

ROOT = Path(__file__).parents[2]


def test_row_kernels_equal_torch_in_the_interpreter():
    pytest.importorskip("triton", reason="Triton is not installed")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.comm.row_kernel_checks"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"check_{name} passed" for name in ("gather", "sum", "merge")]


@pytest.mark.gpu
@pytest.mark.parametrize("check", ["check_gather", "check_sum", "check_merge"])
def test_row_kernels_equal_torch_on_a_gpu(check):
    from tests.comm import row_kernel_checks

    getattr(row_kernel_checks, check)("cuda")


@pytest.mark.gpu
def test_row_kernels_reach_rows_beyond_two_to_the_31_elements():
    from tests.comm import row_kernel_checks

    needs_gigabytes(10)
    row_kernel_checks.check_long_offsets("cuda")
