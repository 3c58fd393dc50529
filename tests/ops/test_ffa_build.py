"""The Hopper kernels compile for sm_90a on any machine that has NVRTC, without serialised matrix products."""

from __future__ import annotations

import threading

import pytest
import torch

from megatron_magi.ops.hopper import build, driver
from megatron_magi.ops.impl import hopper

pytest.importorskip("nvidia", reason="needs NVRTC, which CUDA builds of torch bring")


def requested(monkeypatch, make) -> tuple[str, tuple[str, ...]]:
    """Source and macros of the kernel that ``make`` asks for."""
    seen = []
    monkeypatch.setattr(build, "build", lambda source, defines: seen.append((source, defines)) or b"")
    monkeypatch.setattr(driver, "load_kernel", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "device", lambda _: threading.Lock())
    make()
    return seen[0]


KERNELS = {
    "forward 64": lambda: hopper._forward_kernel.__wrapped__(None, torch.bfloat16, 64, 64, 128, False),
    "forward 128": lambda: hopper._forward_kernel.__wrapped__(None, torch.bfloat16, 128, 128, 128, False),
    "forward 128, wide": lambda: hopper._forward_kernel.__wrapped__(None, torch.bfloat16, 128, 128, 176, False),
    "forward 128, softcap": lambda: hopper._forward_kernel.__wrapped__(None, torch.float16, 128, 128, 128, True),
    "forward 192": lambda: hopper._forward_kernel.__wrapped__(None, torch.bfloat16, 192, 128, 128, False),
    "forward 256": lambda: hopper._forward_kernel.__wrapped__(None, torch.bfloat16, 256, 256, 64, False),
    "backward 64": lambda: hopper._backward_kernel.__wrapped__(None, torch.bfloat16, 64, 64, False),
    "backward 128": lambda: hopper._backward_kernel.__wrapped__(None, torch.float16, 128, 128, False),
    "prepare": lambda: hopper._small_kernel.__wrapped__(None, "prepare", ()),
    "finish_dq": lambda: hopper._small_kernel.__wrapped__(None, "finish_dq", ("HEAD_DIM=128", "DTYPE=Bf16")),
}


@pytest.mark.parametrize("name", KERNELS)
def test_every_kernel_compiles_without_serialised_products(monkeypatch, name) -> None:
    with monkeypatch.context() as patched:
        source, defines = requested(patched, KERNELS[name])
    # Raises on errors, and on the compiler's warning that it serialised the tensor cores' products.
    image = build._compile(build.flatten_source(build.source_root() / source), source, defines)
    assert image[:4] == b"\x7fELF"


def test_a_kernel_is_compiled_once_by_many_threads(tmp_path, monkeypatch) -> None:
    compiled = []
    monkeypatch.setattr(build, "_compile", lambda *_: compiled.append(1) or b"\x7fELF kernel")
    images: list[bytes] = []
    threads = [
        threading.Thread(target=lambda: images.append(build.build("attention/sm90/prepare.cu", ("A=1",), tmp_path)))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert images == [b"\x7fELF kernel"] * 8 and len(compiled) == 1
    build.build("attention/sm90/prepare.cu", ("A=2",), tmp_path)
    assert len(compiled) == 2
    assert len(list(tmp_path.glob("*.cubin"))) == 2


def test_broken_source_is_an_error_with_the_compiler_s_words() -> None:
    with pytest.raises(RuntimeError, match=r"(?s)compiling bad.cu .* failed:.*undefined_thing"):
        build._compile("int x = undefined_thing;", "bad.cu", ())


def test_without_a_folder_to_write_to_kernels_are_compiled_for_the_process(tmp_path, monkeypatch, caplog) -> None:
    monkeypatch.setattr(build, "_compile", lambda *_: b"\x7fELF kernel")
    blocked = tmp_path / "file"
    blocked.write_text("no folder")
    assert build.build("attention/sm90/prepare.cu", (), blocked / "cache") == b"\x7fELF kernel"
    assert "compiled for this process alone" in caplog.text


def test_compiling_is_announced_and_a_cached_kernel_is_silent(tmp_path, monkeypatch, caplog) -> None:
    monkeypatch.setattr(build, "_compile", lambda *_: b"\x7fELF kernel")
    build.build("attention/sm90/prepare.cu", (), tmp_path)
    assert "compiling attention/sm90/prepare.cu" in caplog.text
    caplog.clear()
    build.build("attention/sm90/prepare.cu", (), tmp_path)
    assert not caplog.text
