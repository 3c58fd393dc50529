"""Every Hopper kernel compiles for sm_90a, on any machine that has NVRTC, and hardly spills."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from megatron_magi import variables
from megatron_magi.backends.sm90 import kernels as hopper_kernels
from megatron_magi.backends.sm90.kernel_list import needed_kernels
from megatron_magi.cuda import build as hopper_build
from tests.cuda.cubins import resources

pytest.importorskip("nvidia", reason="needs NVRTC, which CUDA builds of torch bring")

# The producer has 24 registers (the forward's 32 to 56) and spills a few values; what consumers spill comes on top.
PRODUCER_SPILL_BYTES = 90
GATED_SPILL_BYTES = 120  # where it waits for keys
MOST_SHARED_BYTES = 227 << 10  # of a block on Hopper


def kernels(dims, dtype, softcap) -> list[hopper_kernels.KernelVariant]:
    """The attention kernels of these head dims."""
    found = [hopper_kernels.forward(dtype, dims, tile, softcap) for tile in hopper_kernels.FORWARD_TILES[dims]]
    if dims in hopper_kernels.BACKWARD_DIMS:
        found.append(hopper_kernels.backward_queries(dtype, dims, softcap))
    if dims in hopper_kernels.WHOLE_DIMS:
        found += [hopper_kernels.backward(dtype, dims, softcap, adds_dq) for adds_dq in (False, True)]
    elif dims in hopper_kernels.PART_TILES:
        found.append(hopper_kernels.backward_keys(dtype, dims, softcap))
    return found


def compile_all(wanted):
    """Each ``(source, macros)`` with what it takes; the compiler leaves the interpreter to other threads."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        images = pool.map(lambda kernel: hopper_build.compile_kernel(*kernel)[0], wanted)
        yield from zip(wanted, map(resources, images), strict=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("softcap", [False, True])
@pytest.mark.parametrize("dims", list(hopper_kernels.FORWARD_TILES))
def test_attention_kernels_fit_shared_memory_and_compile_without_serialised_products_or_large_spills(
    monkeypatch, dims, softcap, dtype
):
    found = kernels(dims, dtype, softcap)
    of_backward = 3 * (dims in hopper_kernels.WHOLE_DIMS) + 2 * (dims in hopper_kernels.PART_TILES)
    assert len(found) == len(hopper_kernels.FORWARD_TILES[dims]) + of_backward
    flatten = hopper_build.flatten_source
    check = '\nstatic_assert(sizeof(Shared) <= ASKED_BYTES, "shared memory");\n'
    monkeypatch.setattr(hopper_build, "flatten_source", lambda path: flatten(path) + check)
    assert all(kernel.shared_bytes <= MOST_SHARED_BYTES for kernel in found)
    wanted = [
        (hopper_kernels.source_of(kernel.name), (*kernel.macros, f"ASKED_BYTES={kernel.shared_bytes}"))
        for kernel in found
    ]
    for (source, macros), taken in compile_all(wanted):
        assert taken.spilled_bytes <= PRODUCER_SPILL_BYTES, f"{source} {macros}: {taken}"


@pytest.mark.parametrize("captured", [False, True])
def test_kernels_that_wait_for_keys_compile_like_those_that_do_not(captured):
    needed = needed_kernels(torch.bfloat16, (128, 128), 8, deterministic=False, stream_kv=True, captured=captured)
    for (source, _), taken in compile_all(needed):
        assert taken.spilled_bytes <= GATED_SPILL_BYTES, f"{source}: {taken}"
        assert "process" in source or taken.registers in (128, 168)


@pytest.mark.parametrize("dims", [(128, 128), (192, 128)])
def test_kernels_of_captured_launches_compile_like_those_that_are_told_of_a_mask(dims):
    needed = needed_kernels(torch.bfloat16, dims, 8, deterministic=False, captured=True)
    assert all("CAPTURED=1" in macros for _, macros in needed) and len(needed) > 3
    for (source, _), taken in compile_all(needed):
        assert taken.spilled_bytes <= PRODUCER_SPILL_BYTES, f"{source}: {taken}"
        assert source.endswith(("preprocess.cu", "postprocess_keys.cu")) or taken.registers in (128, 168)


@pytest.mark.parametrize("name", ["preprocess", "row_delta", "postprocess_dq", "postprocess_keys"])
def test_small_kernels_compile_without_spills(name):
    kinds = itertools.product((64, 128, 256), (torch.bfloat16, torch.float16))
    wanted = [
        (
            f"attention/sm90/{name}.cu",
            (f"HEAD_DIM={dim}", f"HEAD_DIM_V={dim}", hopper_kernels.element(dtype), "DELTA=1", "CONCURRENT=1"),
        )
        for dim, dtype in kinds
    ]
    for _, taken in compile_all(wanted):
        assert not taken.spilled_bytes


@pytest.fixture(autouse=True)
def no_settings_of_the_machine(monkeypatch, tmp_path):
    for name in variables.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(hopper_build, "prebuilt_dir", lambda: tmp_path / "prebuilt")


@pytest.fixture
def compiled(monkeypatch):
    """One entry for each kernel that is compiled: whether with line information."""
    made: list[bool] = []

    def compile_kernel(_source, _defines, *, debug=False, name=None, target=""):
        made.append(debug)
        return f"\x7fELF {len(made)}".encode(), "ptxas info: used 168 registers"

    monkeypatch.setattr(hopper_build, "compile_kernel", compile_kernel)
    return made


PREPARE = ("attention/sm90/preprocess.cu", ())


def test_the_workspace_is_where_kernels_are_kept(tmp_path, monkeypatch, compiled):
    monkeypatch.setenv("MAGI_ATTENTION_WORKSPACE_BASE", str(tmp_path))
    hopper_build.build(*PREPARE)
    assert [p.suffix for p in (tmp_path / ".cache" / "megatron_magi").glob("preprocess-*.cubin")] == [".cubin"]
    monkeypatch.delenv("MAGI_ATTENTION_WORKSPACE_BASE")
    monkeypatch.setenv("HOME", "/somewhere")
    assert hopper_build.default_cache_dir() == Path("/somewhere/.cache/megatron_magi")


def test_without_the_cache_nothing_is_read_and_nothing_written(tmp_path, monkeypatch, compiled):
    first = hopper_build.build(*PREPARE, tmp_path / "cache")
    before = sorted((tmp_path / "cache").iterdir())
    monkeypatch.setenv("MAGI_ATTENTION_NO_BUILD_CACHE", "1")
    assert hopper_build.build(*PREPARE, tmp_path / "cache") != first
    assert sorted((tmp_path / "cache").iterdir()) == before and len(compiled) == 2


def test_line_information_makes_another_kernel_with_its_source_beside_it(tmp_path, monkeypatch, compiled, caplog):
    hopper_build.build(*PREPARE, tmp_path)
    monkeypatch.setenv("MAGI_ATTENTION_BUILD_DEBUG", "1")
    hopper_build.build(*PREPARE, tmp_path)
    assert compiled == [False, True] and len(list(tmp_path.glob("*.cubin"))) == 2
    (source,) = tmp_path.glob("*.cu")
    assert "ffa_preprocess" in source.read_text()
    assert "--generate-line-info" in caplog.text and "168 registers" in caplog.text


def test_kernels_with_line_information_compile_and_name_their_source(tmp_path, monkeypatch):
    monkeypatch.setenv("MAGI_ATTENTION_BUILD_DEBUG", "1")
    image = hopper_build.build(*PREPARE, tmp_path)
    (source,) = tmp_path.glob("*.cu")
    assert source.name.encode() in image


def test_verbose_builds_log_options_and_report(tmp_path, monkeypatch, compiled, caplog):
    hopper_build.build(*PREPARE, tmp_path)
    assert "registers" not in caplog.text
    monkeypatch.setenv("MAGI_ATTENTION_BUILD_VERBOSE", "1")
    hopper_build.build("attention/sm90/preprocess.cu", ("A=1",), tmp_path)
    assert "--gpu-architecture=sm_90a" in caplog.text and "-DA=1" in caplog.text and "168 registers" in caplog.text


def test_kernels_that_came_with_the_package_are_used_unless_refused(tmp_path, monkeypatch, compiled, caplog):
    (target,) = hopper_build.compile_into(tmp_path / "prebuilt", [PREPARE], jobs=1)
    caplog.clear()
    image = hopper_build.build(*PREPARE, tmp_path / "cache")
    assert target.read_bytes().startswith(image) and image == b"\x7fELF 1"
    assert len(compiled) == 1 and not (tmp_path / "cache").exists() and not caplog.text
    hopper_build.build("attention/sm90/preprocess.cu", ("A=1",), tmp_path / "cache")
    monkeypatch.setenv("MAGI_ATTENTION_FORCE_JIT_BUILD", "1")
    assert hopper_build.build(*PREPARE, tmp_path / "cache") != image
    assert len(compiled) == 3


def test_a_changed_source_or_compiler_leaves_older_kernels_alone(tmp_path, monkeypatch, compiled):
    hopper_build.compile_into(tmp_path / "prebuilt", [PREPARE], jobs=1)
    flatten = hopper_build.flatten_source
    with monkeypatch.context() as patch:
        patch.setattr(hopper_build, "flatten_source", lambda path: flatten(path) + "// changed")
        hopper_build.build(*PREPARE, tmp_path / "cache")
    monkeypatch.setattr(hopper_build, "_nvrtc_version", lambda: (99, 0))
    hopper_build.build(*PREPARE, tmp_path / "cache")
    assert len(compiled) == 3


def test_kernels_compiled_ahead_stay_when_asked_for_again(tmp_path, compiled):
    kernels = [("attention/sm90/preprocess.cu", (f"A={i}",)) for i in range(5)]
    files = hopper_build.compile_into(tmp_path, kernels, jobs=3)
    assert hopper_build.compile_into(tmp_path, kernels[::-1], jobs=3) == files[::-1]
    assert len(compiled) == 5 and len(set(files)) == 5 and all(f.exists() for f in files)


def test_all_that_is_missing_is_compiled_for_the_cache_with_one_line(tmp_path, compiled, caplog, monkeypatch):
    kernels = [("attention/sm90/preprocess.cu", (f"A={i}",)) for i in range(4)]
    monkeypatch.setattr(hopper_build, "prebuilt_dir", lambda: tmp_path / "prebuilt")
    hopper_build.compile_into(tmp_path / "prebuilt", kernels[:1], jobs=1)
    hopper_build.build(*kernels[1], tmp_path / "cache")
    caplog.clear()
    for _ in range(2):
        hopper_build.build_all([*kernels, kernels[3]], 8, tmp_path / "cache")
        assert len(compiled) == 4
    assert [r.getMessage() for r in caplog.records if r.levelname == "WARNING"] == [
        f"compiling 2 kernels for sm_90a, 2 at a time, kept in {tmp_path / 'cache'}"
    ]
    more = [("attention/sm90/preprocess.cu", ("A=9",))]
    (tmp_path / "file").touch()
    hopper_build.build_all(more, 8, tmp_path / "file" / "cache")
    assert "cannot be written" in caplog.text and "compiled when they are first used" in caplog.text
    monkeypatch.setenv("MAGI_ATTENTION_NO_BUILD_CACHE", "1")
    hopper_build.build_all(more, 8, tmp_path / "cache")
    assert len(compiled) == 4


def test_a_kernel_of_many_that_does_not_compile_is_an_error(tmp_path):
    with pytest.raises(RuntimeError, match=r"compiling attention/sm90/preprocess\.cu with void=3 failed"):
        hopper_build.build_all([("attention/sm90/preprocess.cu", ("void=3",))], 2, tmp_path)


@pytest.mark.parametrize("ending", [RuntimeError, KeyboardInterrupt])
def test_kernels_compiled_ahead_end_at_an_error_or_ctrl_c_and_those_that_are_done_are_kept(
    tmp_path, monkeypatch, ending
):
    made = []

    def compile_kernel(_source, defines, **_):
        time.sleep(0.1)
        if defines == ("A=2",):
            raise ending
        made.append(defines)
        return b"\x7fELF kernel", ""

    monkeypatch.setattr(hopper_build, "compile_kernel", compile_kernel)
    kernels = [(PREPARE[0], (f"A={i}",)) for i in range(60)]
    with pytest.raises(ending):
        hopper_build.compile_into(tmp_path, kernels, jobs=1)
    assert 2 <= len(made) < 30 and len(list(tmp_path.glob("*.cubin"))) == len(made)


def test_a_user_without_a_home_directory_is_told_which_variable_to_set(tmp_path, monkeypatch, compiled):
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("os.getuid", lambda: 2**31 - 7)
    with pytest.raises(ValueError, match="MAGI_ATTENTION_WORKSPACE_BASE: Could not determine home directory"):
        hopper_build.build(*PREPARE)
    with monkeypatch.context() as without_cache:
        without_cache.setenv("MAGI_ATTENTION_NO_BUILD_CACHE", "1")
        hopper_build.build_all([PREPARE], 1)
        hopper_build.build(*PREPARE)
    monkeypatch.setenv("MAGI_ATTENTION_WORKSPACE_BASE", str(tmp_path))
    hopper_build.build(*PREPARE)


def test_a_malformed_variable_is_named_before_anything_is_compiled(tmp_path, monkeypatch, compiled):
    monkeypatch.setenv("MAGI_ATTENTION_BUILD_DEBUG", "yes")
    with pytest.raises(ValueError, match="MAGI_ATTENTION_BUILD_DEBUG: expected 0 or 1"):
        hopper_build.build(*PREPARE, tmp_path)
    assert not compiled


def test_a_built_kernel_is_read_back_from_the_cache(tmp_path: Path, monkeypatch):
    image = hopper_build.build("attention/sm90/preprocess.cu", (), tmp_path)
    monkeypatch.setattr(hopper_build, "compile_kernel", lambda *_, **__: pytest.fail("compiled again"))
    assert hopper_build.build("attention/sm90/preprocess.cu", (), tmp_path) == image
    assert [p.suffix for p in tmp_path.iterdir() if p.suffix != ".lock"] == [".cubin"]


DAMAGES = {
    "empty": lambda data: b"",
    "cut off": lambda data: data[:-1],
    "cut off within its digest": lambda data: data[:20],
    "edited": lambda data: data[:1] + b"X" + data[2:],
    "longer": lambda data: data + b"\0",
    "without a digest": lambda data: data[:-32],
}


@pytest.mark.parametrize("damage", list(DAMAGES))
def test_a_damaged_kernel_in_the_cache_is_compiled_anew_with_a_notice_and_replaced(tmp_path, compiled, caplog, damage):
    hopper_build.build(*PREPARE, tmp_path)
    (target,) = tmp_path.glob("*.cubin")
    target.write_bytes(DAMAGES[damage](target.read_bytes()))
    caplog.clear()
    assert hopper_build.build(*PREPARE, tmp_path) == b"\x7fELF 2"
    assert f"{target} is damaged" in caplog.text and "compiling attention/sm90/preprocess.cu" in caplog.text
    caplog.clear()
    assert hopper_build.build(*PREPARE, tmp_path) == b"\x7fELF 2"
    assert not caplog.text and len(compiled) == 2


def test_a_kernel_under_the_name_of_another_is_not_taken_for_it(tmp_path, compiled):
    hopper_build.build(*PREPARE, tmp_path)
    (first,) = tmp_path.glob("*.cubin")
    (tmp_path / hopper_build.cubin_name(PREPARE[0], ("A=1",))).write_bytes(first.read_bytes())
    assert hopper_build.build(PREPARE[0], ("A=1",), tmp_path) == b"\x7fELF 2"


def test_a_damaged_kernel_of_the_package_is_compiled_into_the_cache(tmp_path, compiled, caplog):
    (target,) = hopper_build.compile_into(tmp_path / "prebuilt", [PREPARE], jobs=1)
    target.write_bytes(target.read_bytes()[:-1])
    damaged = target.read_bytes()
    for _ in range(2):
        assert hopper_build.build(*PREPARE, tmp_path / "cache") == b"\x7fELF 2"
    assert f"{target} is damaged" in caplog.text and target.read_bytes() == damaged
    hopper_build.compile_into(tmp_path / "prebuilt", [PREPARE], jobs=1)  # as building the wheel again does
    assert hopper_build.build(*PREPARE, tmp_path / "cache") == b"\x7fELF 3"


def test_a_cached_kernel_that_can_be_neither_read_nor_replaced_is_compiled_for_the_process(tmp_path, compiled, caplog):
    (tmp_path / hopper_build.cubin_name(*PREPARE)).mkdir()
    assert hopper_build.build(*PREPARE, tmp_path) == b"\x7fELF 1" and len(compiled) == 1
    assert "cannot be read" in caplog.text and "kept for this process alone" in caplog.text
    assert sorted(p.suffix for p in tmp_path.iterdir()) == [".cubin", ".lock"], "a temporary file is left"


def test_a_full_disk_leaves_no_part_of_a_kernel(tmp_path, compiled, monkeypatch, caplog):
    def no_space(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(hopper_build.os, "replace", no_space)
        assert hopper_build.build(*PREPARE, tmp_path) == b"\x7fELF 1" and len(compiled) == 1
    assert "No space left on device" in caplog.text
    assert [p.suffix for p in tmp_path.iterdir()] == [".lock"]


def test_on_a_file_system_without_locks_kernels_are_kept_too(tmp_path, compiled, monkeypatch):
    def no_locks(*_):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(hopper_build.fcntl, "flock", no_locks)
    assert hopper_build.build(*PREPARE, tmp_path) == hopper_build.build(*PREPARE, tmp_path) and len(compiled) == 1


def test_an_error_in_a_source_is_shown_with_its_macros():
    with pytest.raises(RuntimeError, match="HEAD_DIM=96"):
        hopper_build.compile_kernel("attention/sm90/postprocess_dq.cu", ("HEAD_DIM=96", "DTYPE=NoSuchType"))


@pytest.mark.parametrize("damaged", [False, True])
def test_a_kernel_is_compiled_once_by_many_threads(tmp_path, monkeypatch, damaged) -> None:
    if damaged:
        (tmp_path / hopper_build.cubin_name(PREPARE[0], ("A=1",))).write_bytes(b"\x7fELF")
    compiled = []
    monkeypatch.setattr(hopper_build, "compile_kernel", lambda *_, **__: compiled.append(1) or (b"\x7fELF kernel", ""))
    images: list[bytes] = []

    def ask(macro: str) -> None:
        images.append(hopper_build.build("attention/sm90/preprocess.cu", (macro,), tmp_path))

    threads = [threading.Thread(target=ask, args=("A=1",)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert images == [b"\x7fELF kernel"] * 8 and len(compiled) == 1
    ask("A=2")
    assert len(compiled) == 2
    assert len(list(tmp_path.glob("*.cubin"))) == 2


def test_a_kernel_is_compiled_once_by_many_processes(tmp_path):
    """Each a fresh one, which has not imported torch."""
    code = """if True:
        import hashlib, pathlib, sys
        from megatron_magi.cuda import build
        compile_kernel, compiled = build.compile_kernel, []
        build.compile_kernel = lambda *args, **kwargs: compiled.append(1) or compile_kernel(*args, **kwargs)
        image = build.build("attention/sm90/preprocess.cu", (), pathlib.Path(sys.argv[1]))
        print(len(compiled), hashlib.sha256(image).hexdigest(), "torch" in sys.modules)
    """
    processes = [
        subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    said = [process.communicate(timeout=900)[0].split() for process in processes]
    assert sorted(count for count, *_ in said) == ["0", "0", "0", "1"]
    assert len({digest for _, digest, _ in said}) == 1
    assert {has_torch for *_, has_torch in said} == {"False"}


def test_without_a_folder_to_write_to_kernels_are_compiled_for_the_process(tmp_path, monkeypatch, caplog) -> None:
    monkeypatch.setattr(hopper_build, "compile_kernel", lambda *_, **__: (b"\x7fELF kernel", ""))
    blocked = tmp_path / "file"
    blocked.write_text("no folder")
    assert hopper_build.build("attention/sm90/preprocess.cu", (), blocked / "cache") == b"\x7fELF kernel"
    assert "compiled for this process alone" in caplog.text


def test_compiling_is_announced_and_a_cached_kernel_is_silent(tmp_path, monkeypatch, caplog) -> None:
    monkeypatch.setattr(hopper_build, "compile_kernel", lambda *_, **__: (b"\x7fELF kernel", ""))
    hopper_build.build("attention/sm90/preprocess.cu", (), tmp_path)
    assert "compiling attention/sm90/preprocess.cu" in caplog.text
    caplog.clear()
    hopper_build.build("attention/sm90/preprocess.cu", (), tmp_path)
    assert not caplog.text
