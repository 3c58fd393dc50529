"""Every Hopper kernel compiles for sm_90a, on any machine that has NVRTC, and its report is clean."""

from __future__ import annotations

import itertools
import re
import threading
from pathlib import Path

import pytest
import torch

from megatron_magi.ops.hopper import build as hopper_build
from megatron_magi.ops.hopper import kernels as hopper_kernels

pytest.importorskip("nvidia", reason="needs NVRTC, which CUDA builds of torch bring")

# The producer has 24 registers and keeps a few values on the stack; what consumers spill comes on top.
PRODUCER_SPILL_BYTES = 160
# With softcap the slope of the cap takes 32 registers more than the backward has.
SOFTCAP_SPILL_BYTES = 512


def kernels(monkeypatch, dims, dtype, softcap) -> list[tuple[str, tuple[str, ...]]]:
    """Sources and macros of the attention kernels of these head dims."""
    seen: list[tuple[str, tuple[str, ...]]] = []
    monkeypatch.setattr(hopper_kernels, "_load", lambda _device, name, defines, *_: seen.append((name, defines)))
    hopper_kernels.forward_kernel.__wrapped__(None, dtype, dims, softcap)
    if dims in hopper_kernels.WIDE_TILES:
        hopper_kernels.backward_wide_keys_kernel.__wrapped__(None, dtype, dims, softcap)
        hopper_kernels.backward_wide_queries_kernel.__wrapped__(None, dtype, dims, softcap)
    else:
        for ordered in (False, True):
            hopper_kernels.backward_kernel.__wrapped__(None, dtype, dims, softcap, ordered)
    return seen


@pytest.mark.parametrize("softcap", [False, True])
@pytest.mark.parametrize("dims", list(hopper_kernels.FORWARD_WIDTH))
def test_attention_kernels_compile_without_serialised_products_or_large_spills(monkeypatch, dims, softcap):
    found = kernels(monkeypatch, dims, torch.bfloat16, softcap)
    assert len(found) == 3
    for name, defines in found:
        image, report = hopper_build.compile_kernel(f"attention/sm90/{name}.cu", defines)
        assert image[:4] == b"\x7fELF"
        spilled = int(re.search(r"(\d+) bytes spill stores", report).group(1))
        assert spilled <= (SOFTCAP_SPILL_BYTES if softcap else PRODUCER_SPILL_BYTES), f"{name} {defines}: {report}"


@pytest.mark.parametrize("name", ["prepare", "row_delta", "finish_dq"])
def test_small_kernels_compile_without_spills(name):
    for dim, dtype in itertools.product((64, 128, 256), (torch.bfloat16, torch.float16)):
        defines = (f"HEAD_DIM={dim}", f"HEAD_DIM_V={dim}", hopper_kernels.element(dtype))
        _, report = hopper_build.compile_kernel(f"attention/sm90/{name}.cu", defines)
        assert "0 bytes spill stores" in report


def test_a_built_kernel_is_read_back_from_the_cache(tmp_path: Path, monkeypatch):
    image = hopper_build.build("attention/sm90/prepare.cu", (), tmp_path)
    monkeypatch.setattr(hopper_build, "compile_kernel", lambda *_: pytest.fail("compiled again"))
    assert hopper_build.build("attention/sm90/prepare.cu", (), tmp_path) == image
    assert [p.suffix for p in tmp_path.iterdir() if p.suffix != ".lock"] == [".cubin"]


def test_an_error_in_a_source_is_shown_with_its_macros():
    with pytest.raises(RuntimeError, match="HEAD_DIM=96"):
        hopper_build.compile_kernel("attention/sm90/finish_dq.cu", ("HEAD_DIM=96", "DTYPE=NoSuchType"))


def test_a_kernel_is_compiled_once_by_many_threads(tmp_path, monkeypatch) -> None:
    compiled = []
    monkeypatch.setattr(hopper_build, "compile_kernel", lambda *_: compiled.append(1) or (b"\x7fELF kernel", ""))
    images: list[bytes] = []

    def ask(macro: str) -> None:
        images.append(hopper_build.build("attention/sm90/prepare.cu", (macro,), tmp_path))

    threads = [threading.Thread(target=ask, args=("A=1",)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert images == [b"\x7fELF kernel"] * 8 and len(compiled) == 1
    ask("A=2")
    assert len(compiled) == 2
    assert len(list(tmp_path.glob("*.cubin"))) == 2


def test_without_a_folder_to_write_to_kernels_are_compiled_for_the_process(tmp_path, monkeypatch, caplog) -> None:
    monkeypatch.setattr(hopper_build, "compile_kernel", lambda *_: (b"\x7fELF kernel", ""))
    blocked = tmp_path / "file"
    blocked.write_text("no folder")
    assert hopper_build.build("attention/sm90/prepare.cu", (), blocked / "cache") == b"\x7fELF kernel"
    assert "compiled for this process alone" in caplog.text


def test_compiling_is_announced_and_a_cached_kernel_is_silent(tmp_path, monkeypatch, caplog) -> None:
    monkeypatch.setattr(hopper_build, "compile_kernel", lambda *_: (b"\x7fELF kernel", ""))
    hopper_build.build("attention/sm90/prepare.cu", (), tmp_path)
    assert "compiling attention/sm90/prepare.cu" in caplog.text
    caplog.clear()
    hopper_build.build("attention/sm90/prepare.cu", (), tmp_path)
    assert not caplog.text
