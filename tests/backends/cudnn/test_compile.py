"""The package's kernels for Blackwell, compiled without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_magi.backends.cudnn import support


@pytest.mark.skipif(not support._is_known(support.installed_version()), reason="needs nvidia-cudnn-frontend 1.32")
@pytest.mark.parametrize("arch", [100, 103])
@pytest.mark.parametrize("form", ["whole", "sequences"])
def test_passes_compile_for_gpus_that_are_not_there(arch, form):
    script = Path(__file__).with_name("compile_for.py")
    environment = {**os.environ, "FLEX_ATTENTION_ARCH": str(arch), "CUTE_DSL_ARCH": f"sm_{arch}a"}
    done = subprocess.run(
        [sys.executable, script, str(arch), form],
        env=environment, capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert f"compiled 9 passes for {arch}" in done.stdout
