"""Headers of the kernels say all that they need: each compiles alone, in any place of a list of includes."""

from __future__ import annotations

import re

import pytest

from megatron_magi.cuda import build

pytest.importorskip("nvidia", reason="needs NVRTC, which CUDA builds of torch bring")

HEADERS = [path.relative_to(build.source_root()).as_posix() for path in sorted(build.source_root().rglob("*.cuh"))]
SWITCHES = {"CAPTURED", "STREAM_KV"}
"""Macros that headers read; they choose fields of parameters, and are 0 where they are not given."""


@pytest.mark.parametrize("header", HEADERS)
def test_a_header_compiles_alone_and_without_macros(monkeypatch, header):
    options = build._options
    monkeypatch.setattr(build, "_options", lambda *args: [*options(*args), "--fdevice-syntax-only"])
    build.compile_kernel(header, ())


@pytest.mark.parametrize("header", HEADERS)
def test_a_header_reads_no_macro_of_one_kernel_and_defines_none_that_another_reads(header):
    text = re.sub(r"//.*", "", (build.source_root() / header).read_text())
    assert set(re.findall(r"^#(?:if|ifndef|ifdef|elif) (\w+)", text, re.MULTILINE)) <= SWITCHES
    given = set(re.findall(r"^#define (\w+) ", text, re.MULTILINE)) - {"DEVICE", "kInfinity"}
    assert given <= SWITCHES
