"""What is read from a cubin is what the compiler reports, and this is always asked for."""

from __future__ import annotations

import re

import pytest

from megatron_magi.cuda import build
from tests.cuda.cubins import Resources, resources

pytest.importorskip("nvidia", reason="needs NVRTC, which CUDA builds of torch bring")

SOURCE = """
__shared__ int shared[SHARED];
extern "C" __global__ void __launch_bounds__(THREADS) kernel(int* x, const int* y) {
  int many[80];
#pragma unroll
  for (int i = 0; i < 80; ++i) many[i] = y[i * 64];
  __syncthreads();
  shared[y[0] % SHARED] = y[1];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 80; ++i) x[i * 64] = many[i] * shared[0];
}
"""
REPORT = r"(\d+) bytes stack frame, (\d+) bytes spill stores.*?Used (\d+) registers.*?(\d+) bytes smem"


@pytest.mark.parametrize("target", ["sm_80", "sm_90a", "sm_120"])
@pytest.mark.parametrize("threads", [64, 1024])
def test_resources_of_a_cubin_are_those_of_the_report(monkeypatch, target: str, threads: int) -> None:
    monkeypatch.setattr(build, "flatten_source", lambda _path: SOURCE)
    image, report = build.compile_kernel("common/ptx.cuh", (f"THREADS={threads}", "SHARED=300"), target=target)
    frame, spilled, registers, shared = map(int, re.search(REPORT, report, re.DOTALL).groups())
    found = resources(image)
    assert found == Resources(registers, frame, spilled, shared)
    assert found.shared_bytes == 1200 and (spilled > 0) == (threads == 1024)


@pytest.mark.parametrize(("version", "passed"), [((12, 8), False), ((12, 9), True), ((13, 0), True)])
def test_nvrtc_takes_nothing_from_a_cache_whose_entries_have_no_report(monkeypatch, version, passed) -> None:
    given: list[bytes] = []
    nvrtc = build._nvrtc()
    compile_program = nvrtc.nvrtcCompileProgram

    class Watched:
        def __getattr__(self, name: str) -> object:
            return getattr(nvrtc, name)

        def nvrtcCompileProgram(self, program, count, options) -> int:
            given.extend(options)
            return compile_program(program, count, options)

    name = build.cubin_name("attention/sm90/preprocess.cu", ())
    monkeypatch.setattr(build, "_nvrtc", Watched)
    monkeypatch.setattr(build, "flatten_source", lambda _path: 'extern "C" __global__ void kernel() {}')
    monkeypatch.setattr(build, "_nvrtc_version", lambda: version)
    _, report = build.compile_kernel("common/ptx.cuh", ())
    assert (b"--no-cache" in given) == passed and "registers" in report
    monkeypatch.undo()
    assert build.cubin_name("attention/sm90/preprocess.cu", ()) == name
