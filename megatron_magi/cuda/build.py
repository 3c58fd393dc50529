"""Compiles the kernels with NVRTC, which every CUDA build of torch brings; or finds them compiled.

A cubin has a name by its content: the sources, the options and the compiler's version. It is looked for in the
package, where building a wheel may have put it, and then in a cache on disk. A file lock lets one process of many
compile; an atomic rename makes the result visible whole. A digest at the end of each file tells which are damaged (cut
off by a full disk, edited, renamed); these are compiled again. Where the cache is and how to compile is the one thing
that operations take from the environment: it changes no result, and no caller is there to ask.
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
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import cache
from pathlib import Path

from megatron_magi import envs
from megatron_magi.cuda.target import DEFAULT_TARGET
from megatron_magi.variables import WORKSPACE

logger = logging.getLogger(__name__)

_DIGEST_BYTES = hashlib.sha256().digest_size
_INCLUDE = re.compile(r'^#include "([^"]+)"$', re.MULTILINE)
_CACHES_SINCE = 12, 9
"""The first NVRTC that, where there is a driver, may take its result from a cache, without the assembler's report."""
_SERIALISED = ("C7510", "C7512", "C7514", "C7515", "C7519", "C7520", "wgmma.mma_async instructions are serialized")


def source_root() -> Path:
    """Folder of the CUDA sources: next to the package in a checkout, inside it when installed."""
    package = Path(__file__).resolve().parents[1]
    for root in (package / "csrc", package.parent / "csrc"):
        if (root / "common" / "ptx.cuh").exists():
            return root
    raise FileNotFoundError(f"the CUDA sources of megatron_magi are missing: no csrc folder in or next to {package}")


def default_cache_dir() -> Path:
    """The default folder of cubins.

    Raises:
        ValueError: a variable of the environment is malformed, or the user has no home directory.
    """
    workspace = envs.load_build().workspace
    try:
        return Path("~" if workspace is None else workspace).expanduser() / ".cache" / "megatron_magi"
    except RuntimeError as error:
        raise ValueError(f"{WORKSPACE}: {error} Set it to a folder in which compiled kernels can be kept") from None


def prebuilt_dir() -> Path:
    """Folder of the cubins that came with the package; need not be there."""
    return Path(__file__).resolve().parents[1] / "prebuilt"


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


def cubin_name(source: str, defines: tuple[str, ...], debug: bool = False, target: str = DEFAULT_TARGET) -> str:
    """File name of a cubin: another one for other sources, macros, options or another compiler."""
    text = flatten_source(source_root() / source)
    key = "\0".join([text, *_options(defines, debug, target), str(_nvrtc_version())])
    return f"{Path(source).stem}-{hashlib.sha256(key.encode()).hexdigest()[:24]}.cubin"


def build(
    source: str,
    defines: tuple[str, ...],
    cache_dir: Path | None = None,
    *,
    target: str = DEFAULT_TARGET,
    level: int = logging.WARNING,
) -> bytes:
    """A cubin, compiled unless it came with the package or is cached.

    Args:
        source: path below `source_root`.
        defines: macros, ``NAME=VALUE``.
        cache_dir: folder of the cubins; `default_cache_dir` when None.
        target: the compiler's name of an architecture.
        level: at which it is logged that a kernel is compiled for the cache.

    Raises:
        RuntimeError: the compiler reports an error, or that it serialised matrix products.
        ValueError: a variable of the environment is malformed.
    """
    settings = envs.load_build()
    name = cubin_name(source, defines, settings.debug, target)
    if not settings.force_jit and (image := _read(prebuilt_dir() / name)) is not None:
        return image
    if not settings.use_cache:
        logger.warning("compiling %s (%s) for %s, not kept", source, " ".join(defines), target)
        return _compile(source, defines, settings, target)
    file = (default_cache_dir() if cache_dir is None else cache_dir) / name
    if (image := _read(file)) is not None:
        return image
    try:
        return _compile_once(file, source, defines, settings, target, level)
    except OSError as error:
        logger.warning("%s cannot be written (%s): %s is compiled for this process alone", file.parent, error, source)
        return _compile(source, defines, settings, target)


def build_all(
    kernels: Iterable[tuple[str, tuple[str, ...]]],
    jobs: int,
    cache_dir: Path | None = None,
    target: str = DEFAULT_TARGET,
) -> None:
    """Compiles into the cache what is neither there nor came with the package; says so in one line.

    Compiles nothing where there is no cache, or, with a notice, where it cannot be written to.

    Args:
        kernels: source and macros of each.
        jobs: how many are compiled at a time.
        cache_dir, target: as for `build`.

    Raises:
        RuntimeError: the compiler reports an error.
        OSError: there is no compiler.
        ValueError: a variable of the environment is malformed.
    """
    settings = envs.load_build()
    if not settings.use_cache:
        return
    folder = default_cache_dir() if cache_dir is None else cache_dir
    places = [folder] if settings.force_jit else [prebuilt_dir(), folder]
    missing = []
    for source, defines in dict.fromkeys(kernels):
        name = cubin_name(source, defines, settings.debug, target)
        if all(_read(place / name, notice=False) is None for place in places):
            missing.append((source, defines))
    if not missing:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        logger.warning("%s cannot be written (%s): kernels are compiled when they are first used", folder, error)
        return
    jobs = min(jobs, len(missing))
    logger.warning("compiling %d kernels for %s, %d at a time, kept in %s", len(missing), target, jobs, folder)
    with ThreadPoolExecutor(jobs) as pool:
        for _ in pool.map(lambda kernel: build(*kernel, cache_dir, target=target, level=logging.INFO), missing):
            pass


def _compile_once(
    file: Path, source: str, defines: tuple[str, ...], settings: envs.BuildSettings, target: str, level: int
) -> bytes:
    """Compiles into ``file``, or waits for the process that does."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with open(file.with_suffix(".lock"), "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:  # some mounts of network file systems have no locks
            logger.info("%s: no lock (%s), other processes may compile %s too", file.parent, error, source)
        if (image := _read(file, notice=False)) is not None:
            return image
        # By default a warning, so that it is seen: a step of a training run stands still for it.
        logger.log(level, "compiling %s (%s) for %s, kept in %s", source, " ".join(defines), target, file.parent)
        start = time.perf_counter()
        image = _compile(source, defines, settings, target, file.with_suffix(".cu"))
        try:
            _write_cubin(file, image)
        except OSError as error:
            logger.warning("%s cannot be written (%s): %s is kept for this process alone", file.parent, error, source)
        logger.info("compiled %s in %.1f s", source, time.perf_counter() - start)
    return image


def _compile(
    source: str, defines: tuple[str, ...], settings: envs.BuildSettings, target: str, kept_source: Path | None = None
) -> bytes:
    if not settings.debug:
        image, report = compile_kernel(source, defines, target=target)
    else:
        if kept_source is not None:  # profilers and debuggers show it
            _write(kept_source, flatten_source(source_root() / source).encode())
        image, report = compile_kernel(source, defines, debug=True, name=str(kept_source or source), target=target)
    if settings.verbose or settings.debug:
        logger.warning("%s: %s\n%s", source, " ".join(_options(defines, settings.debug, target)), report.strip())
    return image


def _digest(name: str, image: bytes) -> bytes:
    """Digest of a cubin and its name, so that a file under the name of another kernel does not match."""
    return hashlib.sha256(name.encode() + b"\0" + image).digest()


def _write_cubin(target: Path, image: bytes) -> None:
    """The cubin and, behind it, its digest: readers of ELF files ignore what follows the sections."""
    _write(target, image + _digest(target.name, image))


def _read(file: Path, *, notice: bool = True) -> bytes | None:
    """The cubin that `_write_cubin` put there; None, with a notice, where a file is damaged or cannot be read."""
    try:
        data = file.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        if notice:
            logger.warning("%s cannot be read (%s) and is not used", file, error)
        return None
    image, digest = data[:-_DIGEST_BYTES], data[-_DIGEST_BYTES:]
    if digest == _digest(file.name, image):
        return image
    if notice:
        logger.warning("%s is damaged (it does not match its digest) and is not used", file)
    return None


def _write(target: Path, data: bytes) -> None:
    """Makes a file appear whole, or not at all."""
    with tempfile.NamedTemporaryFile(dir=target.parent, delete=False) as file:
        try:
            file.write(data)
            file.flush()
            os.chmod(file.name, 0o644)
            os.replace(file.name, target)
        except BaseException:
            os.unlink(file.name)
            raise


def compile_into(
    folder: Path, kernels: Iterable[tuple[str, tuple[str, ...]]], jobs: int, target: str = DEFAULT_TARGET
) -> list[Path]:
    """Compiles kernels into a folder under the names by which `build` finds them; those that are there whole stay.

    Args:
        folder: made if it is not there.
        kernels: source and macros of each.
        jobs: how many are compiled at a time.
        target: the compiler's name of an architecture.

    Returns:
        The files, in the order of the kernels.

    Raises:
        RuntimeError: the compiler reports an error.
        OSError: there is no compiler, or the folder cannot be written to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files = {folder / cubin_name(*kernel, target=target): kernel for kernel in kernels}
    missing = {file: kernel for file, kernel in files.items() if _read(file) is None}

    def make(file: Path) -> str:
        source, defines = missing[file]
        _write_cubin(file, compile_kernel(source, defines, target=target)[0])
        return f"{source} ({' '.join(defines)})"

    with ThreadPoolExecutor(max(1, jobs)) as pool:
        futures = [pool.submit(make, file) for file in missing]
        try:
            for number, future in enumerate(as_completed(futures), start=1):
                logger.warning("compiled %d of %d: %s", number, len(futures), future.result())
        except BaseException:
            # An error, or Ctrl-C: those that are being compiled are finished and kept, no other begins.
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return list(files)


@cache
def _nvrtc() -> ctypes.CDLL:
    """NVRTC from torch's own CUDA packages, else from the system."""
    spec = importlib.util.find_spec("nvidia")
    for base in spec.submodule_search_locations or () if spec else ():
        for library in sorted(Path(base).glob("*/lib/libnvrtc.so.*")):
            for builtins in library.parent.glob("libnvrtc-builtins.so.*"):
                ctypes.CDLL(str(builtins))  # NVRTC looks for them by name, where they may not be found
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


def _options(defines: tuple[str, ...], debug: bool, target: str) -> list[str]:
    options = [
        f"--gpu-architecture={target}",
        "--std=c++17",
        "--ptxas-options=-v",
        *(f"-D{d}" for d in defines),
    ]
    return [*options, "--generate-line-info"] if debug else options


def compile_kernel(
    source: str,
    defines: tuple[str, ...],
    *,
    debug: bool = False,
    name: str | None = None,
    target: str = DEFAULT_TARGET,
) -> tuple[bytes, str]:
    """Compiles without the cache; needs no GPU.

    Args:
        source: path below `source_root`.
        defines: macros, ``NAME=VALUE``.
        debug: with line information, which costs no speed.
        name: path of the flattened source that line information refers to.
        target: the compiler's name of an architecture.

    Returns:
        ``(image, report)``: the cubin, and what the assembler says of registers, stack and spills.

    Raises:
        RuntimeError: the compiler reports an error, or that it serialised matrix products.
    """
    nvrtc, program = _nvrtc(), ctypes.c_void_p()
    text, name = flatten_source(source_root() / source), name or source
    _check(nvrtc.nvrtcCreateProgram(ctypes.byref(program), text.encode(), name.encode(), 0, None, None), "program")
    options = _options(defines, debug, target)
    if _nvrtc_version() >= _CACHES_SINCE:  # what is looked for below would not be found
        options.append("--no-cache")
    array = (ctypes.c_char_p * len(options))(*(o.encode() for o in options))
    try:
        status = nvrtc.nvrtcCompileProgram(program, len(options), array)
        report = _text(program, nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog).decode(errors="replace")
        if status or any(word in report for word in _SERIALISED):
            raise RuntimeError(f"compiling {source} with {' '.join(defines)} failed for {target}:\n{report}")
        return _text(program, nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN), report
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _text(program: ctypes.c_void_p, size_of, read) -> bytes:
    size = ctypes.c_size_t()
    _check(size_of(program, ctypes.byref(size)), "size")
    memory = ctypes.create_string_buffer(size.value)
    _check(read(program, memory), "result")
    return memory.raw[: size.value]
