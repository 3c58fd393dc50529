"""Compiles the kernels: NVRTC, which every CUDA build of torch brings, or a cubin from the disk cache.

The cache is keyed by the sources, the options and the compiler's version. A file lock lets one process of many
compile; an atomic rename makes the result visible whole.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import importlib.util
import logging
import os
import re
import tempfile
import time
from functools import cache
from pathlib import Path

import megatron_magi

logger = logging.getLogger(__name__)

ARCHITECTURE = "sm_90a"
_INCLUDE = re.compile(r'^#include "([^"]+)"$', re.MULTILINE)
_SERIALISED = ("C7510", "C7512", "C7514", "C7515", "C7519", "C7520", "wgmma.mma_async instructions are serialized")


def source_root() -> Path:
    """Folder of the CUDA sources: beside the package in a checkout, inside it when installed."""
    package = Path(megatron_magi.__file__).resolve().parent
    for root in (package / "csrc", package.parent / "csrc"):
        if (root / "common" / "ptx.cuh").exists():
            return root
    raise FileNotFoundError(f"the CUDA sources of megatron_magi are missing: no csrc folder in or beside {package}")


def default_cache_dir() -> Path:
    """Where cubins are kept unless told otherwise."""
    return Path.home() / ".cache" / "megatron_magi"


@cache
def flatten_source(path: Path) -> str:
    """The source with its quoted includes pasted in once each: one text to compile and to hash."""
    seen: set[Path] = set()

    def paste(file: Path) -> str:
        file = file.resolve()
        if file in seen:
            return ""
        seen.add(file)
        text = file.read_text().replace("#pragma once", "")
        return _INCLUDE.sub(lambda m: paste(file.parent / m.group(1)), text)

    return paste(path)


def build(source: str, defines: tuple[str, ...], cache_dir: Path | None = None) -> bytes:
    """A cubin, compiled unless it is cached.

    Args:
        source: path below `source_root`.
        defines: macros, ``NAME=VALUE``.
        cache_dir: folder of the cubins; `default_cache_dir` when None.

    Raises:
        RuntimeError: the compiler reports an error, or that it serialised matrix products.
    """
    text = flatten_source(source_root() / source)
    key = "\0".join([text, *defines, ARCHITECTURE, str(_nvrtc_version())])
    digest = hashlib.sha256(key.encode()).hexdigest()[:24]
    folder = default_cache_dir() if cache_dir is None else cache_dir
    target = folder / f"{Path(source).stem}-{digest}.cubin"
    if target.exists():
        return target.read_bytes()
    try:
        return _compile_once(target, source, defines)
    except OSError as error:
        logger.warning("%s cannot be written (%s): %s is compiled for this process alone", folder, error, source)
        return compile_kernel(source, defines)[0]


def _compile_once(target: Path, source: str, defines: tuple[str, ...]) -> bytes:
    """Compiles into ``target``, or waits for the process that does."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(target.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if target.exists():
            return target.read_bytes()
        # A warning, so that it is seen: the first step of a training run stands still for it.
        logger.warning("compiling %s (%s) for %s, kept in %s", source, " ".join(defines), ARCHITECTURE, target.parent)
        start = time.perf_counter()
        image, _ = compile_kernel(source, defines)
        with tempfile.NamedTemporaryFile(dir=target.parent, delete=False) as file:
            file.write(image)
        os.replace(file.name, target)
        logger.info("compiled %s in %.1f s", source, time.perf_counter() - start)
    return image


@cache
def _nvrtc() -> ctypes.CDLL:
    """NVRTC from torch's own CUDA packages, else from the system."""
    spec = importlib.util.find_spec("nvidia")
    for base in spec.submodule_search_locations or () if spec else ():
        for library in sorted(Path(base).glob("*/lib/libnvrtc.so.*")):
            return ctypes.CDLL(str(library))
    return ctypes.CDLL("libnvrtc.so")


@cache
def _nvrtc_version() -> tuple[int, int]:
    major, minor = ctypes.c_int(), ctypes.c_int()
    _check(_nvrtc().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)), "version")
    return major.value, minor.value


def _check(status: int, what: str) -> None:
    if status:
        _nvrtc().nvrtcGetErrorString.restype = ctypes.c_char_p
        raise RuntimeError(f"NVRTC {what}: {_nvrtc().nvrtcGetErrorString(status).decode()}")


def compile_kernel(source: str, defines: tuple[str, ...]) -> tuple[bytes, str]:
    """Compiles without the cache; needs no GPU.

    Args:
        source: path below `source_root`.
        defines: macros, ``NAME=VALUE``.

    Returns:
        ``(image, report)``: the cubin, and what the assembler says of registers, stack and spills.

    Raises:
        RuntimeError: the compiler reports an error, or that it serialised matrix products.
    """
    nvrtc, program = _nvrtc(), ctypes.c_void_p()
    text = flatten_source(source_root() / source)
    _check(nvrtc.nvrtcCreateProgram(ctypes.byref(program), text.encode(), source.encode(), 0, None, None), "program")
    options = [f"--gpu-architecture={ARCHITECTURE}", "--std=c++17", "--ptxas-options=-v", *(f"-D{d}" for d in defines)]
    array = (ctypes.c_char_p * len(options))(*(o.encode() for o in options))
    try:
        status = nvrtc.nvrtcCompileProgram(program, len(options), array)
        report = _text(program, nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog).decode(errors="replace")
        if status or any(word in report for word in _SERIALISED):
            raise RuntimeError(f"compiling {source} with {' '.join(defines)} failed:\n{report}")
        return _text(program, nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN), report
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _text(program: ctypes.c_void_p, size_of, read) -> bytes:
    size = ctypes.c_size_t()
    _check(size_of(program, ctypes.byref(size)), "size")
    memory = ctypes.create_string_buffer(size.value)
    _check(read(program, memory), "result")
    return memory.raw[: size.value]
