"""The kernel that shows what racecheck makes of barriers, without a GPU."""

from __future__ import annotations

import pytest

from megatron_magi.cuda import build

pytest.importorskip("nvidia", reason="needs NVRTC, which CUDA builds of torch bring")


@pytest.mark.parametrize("mode", range(6))
def test_it_compiles(mode):
    image, _ = build.compile_kernel("../benchmarks/sanitize/ring.cu", (f"MODE={mode}",))
    assert len(image) > 1000
