"""Runs programs that interpret Triton's kernels, each in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def num_compared(program: str) -> int:
    """The number of cases that a program, which imports `tests.backends.triton.interpreted` first, compared: it prints
    ``compared`` and the number last.
    """
    root = Path(__file__).parents[3]
    done = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    word, number = done.stdout.split()[-2:]
    assert word == "compared"
    return int(number)
