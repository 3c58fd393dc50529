"""Which tensors the kernels take, on which machines."""

from __future__ import annotations

import importlib.util
import shutil
import sys
import sysconfig
from functools import cache
from pathlib import Path

import torch

_MOST_DIM = 256
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_LEAST_CAPABILITY = (8, 0)


def why_not(device: torch.device, dtype: torch.dtype, dims: tuple[int, int], instead: str = "'torch'") -> str | None:
    """See `megatron_magi.backends.base.Backend.why_not`."""
    if (reason := why_not_device(device, instead)) is not None:
        return reason
    if dtype not in _DTYPES:
        return f"q: impl 'triton' takes fp16, bf16 and fp32, got {dtype}; use {instead}"
    if max(dims) > _MOST_DIM:
        return f"q: impl 'triton' takes head dims up to {_MOST_DIM}, got {dims[0]} and {dims[1]}; use {instead}"
    return None


def why_not_device(device: torch.device, instead: str) -> str | None:
    """The reason why kernels do not run on a device; None if they do."""
    if importlib.util.find_spec("triton") is None:
        return f"q: impl 'triton' needs the package triton (pip install triton); use {instead}"
    if device.type != "cuda" and not _is_interpreted():
        return f"q: impl 'triton' computes on GPUs, got a tensor on {device.type}; use {instead}"
    if device.type == "cuda" and not torch.cuda.is_available():  # a fake tensor may be on a device that is not
        return f"q: impl 'triton' computes on GPUs, and there is none; use {instead}"
    if device.type == "cuda" and torch.version.hip is None:
        capability = torch.cuda.get_device_capability(device)
        if capability < _LEAST_CAPABILITY:
            least, found = ("{}.{}".format(*x) for x in (_LEAST_CAPABILITY, capability))
            return f"q: impl 'triton' needs compute capability {least}, this GPU has {found}; use {instead}"
    if device.type == "cuda" and (missing := _missing_of_compiler()):
        return f"q: impl 'triton' needs {missing}, with which Triton builds what launches kernels; use {instead}"
    return None


@cache
def _missing_of_compiler() -> str | None:
    """What is not there of what Triton builds its launcher with; None if all is."""
    from triton import knobs

    if knobs.build.impl is not None:
        return None
    if not any(map(shutil.which, ("gcc", "clang", "cc"))):
        return "a C compiler"
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")
    if not (Path(sysconfig.get_paths(scheme=scheme)["include"]) / "Python.h").exists():
        return "Python's headers (Python.h)"
    return None


def _is_interpreted() -> bool:
    """Whether Triton interprets kernels on the CPU, as it was told before it was imported; for tests."""
    triton = sys.modules.get("triton")
    return triton is not None and bool(triton.knobs.runtime.interpret)
