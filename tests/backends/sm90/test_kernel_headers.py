"""Headers of the kernels say all that they need: each compiles alone, in any place of a list of includes."""

from __future__ import annotations

import re

import pytest

from megatron_magi.cuda import build

pytest.importorskip("nvidia", reason="needs NVRTC, which CUDA builds of torch bring")

HEADERS = [path.relative_to(build.source_root()).as_posix() for path in sorted(build.source_root().rglob("*.cuh"))]
SWITCHES = {"CAPTURED", "STREAM_KV"}
"""Macros that headers read; they choose fields of parameters, and are 0 where they are not given."""


def without_comments(text: str) -> str:
    return re.sub(r"//.*", "", text)


@pytest.mark.parametrize("header", HEADERS)
def test_a_header_compiles_alone_and_without_macros(monkeypatch, header):
    options = build._options
    monkeypatch.setattr(build, "_options", lambda *args: [*options(*args), "--fdevice-syntax-only"])
    build.compile_kernel(header, ())


@pytest.mark.parametrize("header", HEADERS)
def test_a_header_declares_what_its_templates_use(header):
    """The compiler does not look into templates that nothing instantiates."""
    path = build.source_root() / header
    text, own = without_comments(build.flatten_source(path)), without_comments(path.read_text())
    constants = set(re.findall(r"(?<!::)\b(k[A-Z]\w*)\b", text))
    assert [name for name in constants if not re.search(rf"\b(\w+ {name}\b(?! ?\()|{name} =[^=])", text)] == []
    types = set(re.findall(r"\b(T|Unit|From|Into|Sum)\b", own))
    assert [name for name in types if not re.search(rf"\b(typename|class|using) {name}\b", own)] == []


@pytest.mark.parametrize("header", HEADERS)
def test_a_header_reads_no_macro_of_one_kernel_and_defines_none_that_another_reads(header):
    text = without_comments((build.source_root() / header).read_text())
    assert set(re.findall(r"^#(?:if|ifndef|ifdef|elif) (\w+)", text, re.MULTILINE)) <= SWITCHES
    given = set(re.findall(r"^#define (\w+) ", text, re.MULTILINE)) - {"DEVICE", "kInfinity"}
    assert given <= SWITCHES
