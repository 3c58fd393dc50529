"""What this machine runs on: attention, collectives, versions, and what is missing (``magi doctor``)."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import torch

from megatron_magi import envs
from megatron_magi.backends import registry
from megatron_magi.comm.peers import MAX_RANKS
from megatron_magi.cuda.shared_memory import are_linked
from megatron_magi.cuda.target import PEER_CAPABILITIES, capabilities, target_of
from megatron_magi.mcore.versions import untested
from megatron_magi.plan import cpp_solver

DIMS = ((64, 64), (128, 128), (192, 128), (256, 256))
"""Head dims, of q and k, and of v, for which attention is looked at."""

PACKAGES = {
    "numpy": None,
    "triton": "it comes with torch for CUDA: reinstall torch",
    "megatron-core": "pip install 'megatron-magi[megatron]'",
    "transformer-engine": "docs/megatron_reference.md says how",
    "nvidia-cudnn-frontend": "pip install 'megatron-magi[cudnn]'",
    "transformers": "pip install 'megatron-magi[hf]'",
    "accelerate": "pip install 'megatron-magi[hf]'",
}
"""Packages beside torch, and how to install those that are optional."""


class Gpu(NamedTuple):
    """A GPU of this machine."""

    index: int
    name: str
    capability: tuple[int, int]

    @property
    def device(self) -> torch.device:
        """The device."""
        return torch.device("cuda", self.index)


class Report(NamedTuple):
    """What was found.

    Attributes:
        text: for the user.
        problems: what is missing or wrong, each with what to do.
    """

    text: str
    problems: tuple[str, ...]


def examine() -> Report:
    """Looks at this machine; computes nothing on a GPU, and communicates with nobody."""
    gpus, problems, lines = _gpus(), [], []
    lines += ["Machine", *_indent(_machine(gpus, problems))]
    lines += ["Versions", *_indent(_versions(gpus, problems))]
    lines += ["Attention", *_indent(_attention(gpus, problems))]
    lines += ["Collectives", *_indent(_collectives(gpus))]
    lines += ["Planning", *_indent(_planning())]
    problems += [reading.problem for reading in envs.readings() if reading.problem]
    lines += ["Missing", *_indent(problems or ["nothing"])]
    return Report("\n".join(lines), tuple(problems))


def _indent(lines: Iterable[str]) -> list[str]:
    return [f"  {line}" for line in lines]


def _gpus() -> list[Gpu]:
    if not torch.cuda.is_available():
        return []
    return [
        Gpu(i, torch.cuda.get_device_name(i), torch.cuda.get_device_capability(i))
        for i in range(torch.cuda.device_count())
    ]


def has_nvidia_devices() -> bool:
    """Whether the system has NVIDIA GPUs, whether or not torch can use them."""
    return any(Path("/dev").glob("nvidia[0-9]*"))


def _machine(gpus: list[Gpu], problems: list[str]) -> list[str]:
    kinds: dict[tuple, list[int]] = {}
    for gpu in gpus:
        kinds.setdefault((gpu.name, gpu.capability), []).append(gpu.index)
    found = [
        f"{len(at)} x {name}, compute capability {capabilities([capability])}"
        for (name, capability), at in kinds.items()
    ]
    if gpus:
        return found
    if not has_nvidia_devices():
        return ["no GPU: everything runs on the CPU, for tests and small models"]
    why = "is built without CUDA" if torch.version.cuda is None else "cannot use them"
    problems.append(f"there are NVIDIA GPUs, but torch {torch.__version__} {why}: install a driver and torch that fit")
    return [f"GPUs that torch cannot use (it {why})"]


def installed(package: str) -> str | None:
    """The installed version of a package; None without it."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _versions(gpus: list[Gpu], problems: list[str]) -> list[str]:
    lines = [f"Python {platform.python_version()}", f"torch {torch.__version__}, CUDA {torch.version.cuda or 'none'}"]
    if gpus:
        lines.append(f"driver {driver_version() or 'unknown'}, NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}")
    for package, how in PACKAGES.items():
        found = installed(package)
        lines.append(f"{package} {found}" if found else f"{package}: not installed{f' ({how})' if how else ''}")
    if (found := installed("megatron-core")) is not None and (message := untested(found)):
        problems.append(message)
    if gpus and installed("triton") is None:
        problems.append(f"triton: not installed, {PACKAGES['triton']}")
    return lines


def driver_version() -> str | None:
    """The version of the NVIDIA driver; None if it does not say."""
    try:
        words = Path("/proc/driver/nvidia/version").read_text().split("\n")[0].split()
    except OSError:
        return None
    return next((word for word in words if word.count(".") in (1, 2) and word.replace(".", "").isdecimal()), None)


def _attention(gpus: list[Gpu], problems: list[str]) -> list[str]:
    if not gpus:
        return [f"{_on_cpu()}: correct, not fast"]
    lines = []
    for gpu in _one_of_each(gpus):
        by_name: dict[str, list[str]] = {}
        for dims in DIMS:
            chosen = registry.fastest(gpu.device, torch.bfloat16, dims)
            name = _on_cpu() if chosen is None else chosen.name
            by_name.setdefault(name, []).append("/".join(map(str, dict.fromkeys(dims))))
        for name, dims in by_name.items():
            lines.append(f"{gpu.name}: impl {name!r} for bf16 and head dims {', '.join(dims)}")
        for name, backend in registry.BACKENDS.items():
            reason = backend.why_not(gpu.device, torch.bfloat16, (128, 128), "another one")
            lines.append(f"  {name}: " + ("available" if reason is None else reason.rpartition("; use")[0]))
        problems += _missing_backends(gpu)
    return lines


def _on_cpu() -> str:
    return registry.choose("auto", torch.device("cpu"), torch.float32, (128, 128)).name


def _missing_backends(gpu: Gpu) -> list[str]:
    """Backends before the one that is chosen which would serve this GPU if what they need were installed."""
    found = []
    for backend in registry.faster_than_chosen(gpu.device, torch.bfloat16, (128, 128)):
        reason = backend.why_not(gpu.device, torch.bfloat16, (128, 128), "another one")
        if reason is not None and "pip install" in reason:
            found.append(f"{gpu.name}: {reason.rpartition('; use')[0]}")
    return found


def _one_of_each(gpus: list[Gpu]) -> list[Gpu]:
    return list({(gpu.name, gpu.capability): gpu for gpu in reversed(gpus)}.values())[::-1]


def _collectives(gpus: list[Gpu], linked: Callable[[int, int], bool] = are_linked) -> list[str]:
    if not gpus:
        return ["gloo, between CPUs"]
    rows = "kernels of this package" if target_of(gpus[0].device) is not None else "Triton"
    return [f"{_between(gpus, linked)}", f"rows are copied and added by {rows}"]


def _between(gpus: list[Gpu], linked: Callable[[int, int], bool]) -> str:
    """What moves rows between the GPUs, in words."""
    if len(gpus) == 1:
        return "one GPU: no collectives on this machine; NCCL between machines"
    others = [gpu for gpu in gpus if gpu.capability not in PEER_CAPABILITIES]
    if others:
        known = capabilities(PEER_CAPABILITIES)
        return f"NCCL: kernels over NVLink need compute capability {known}, {others[0].name} has another"
    if len(gpus) > MAX_RANKS:
        return f"kernels over NVLink in groups of at most {MAX_RANKS} ranks that are linked, else NCCL"
    try:
        pairs = [(a.index, b.index) for a in gpus for b in gpus if a.index < b.index]
        apart = next((pair for pair in pairs if not linked(*pair)), None)
    except RuntimeError as error:
        return f"NCCL: the driver does not say how GPUs are linked ({error})"
    if apart is not None:
        return f"NCCL: there is no NVLink between GPUs {apart[0]} and {apart[1]}"
    return "kernels of this package over NVLink; NCCL between machines"


def _planning() -> list[str]:
    if cpp_solver.available():
        return ["in C++"]
    return ["in Python, slower: the C++ planner is not built (reinstall the package where there is a C++ compiler)"]
