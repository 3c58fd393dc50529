"""The architectures that kernels of the package are compiled for. Importing it does not import torch."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

TARGETS = {
    (8, 0): "sm_80",
    (8, 6): "sm_86",
    (8, 9): "sm_89",
    (9, 0): "sm_90a",
    (10, 0): "sm_100",
    (10, 3): "sm_103",
    (12, 0): "sm_120",
}
"""The compiler's name of an architecture, by compute capability: where kernels that copy and add rows run."""

DEFAULT_TARGET = "sm_90a"
"""What kernels for attention are compiled for, and all kernels on a machine without a GPU."""

PEER_CAPABILITIES = ((9, 0), (10, 0), (10, 3))
"""Where kernels that access the memory of other GPUs run. They copy in bulk and overlap launches, from 9.0 on, and use
196 KB of shared memory of an SM, of which 12.0 has 99 KB.
"""


@cache
def target_of(device: torch.device) -> str | None:
    """The architecture that kernels for a device are compiled for; None if there are none for it."""
    import torch  # compiling needs none

    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    return TARGETS.get(torch.cuda.get_device_capability(device))


def local_target() -> str:
    """The architecture of the current GPU; `DEFAULT_TARGET` if there is none, or no kernels for it."""
    import torch

    if not torch.cuda.is_available():
        return DEFAULT_TARGET
    return target_of(torch.device("cuda", torch.cuda.current_device())) or DEFAULT_TARGET


def target_named(name: str) -> str:
    """The architecture of a name: the compiler's, as ``sm_100``, or a compute capability, as ``10.0``.

    Raises:
        ValueError: there are no kernels for it.
    """
    known = dict(_names())
    if name not in known:
        choices = ", ".join(f"{target} ({major}.{minor})" for (major, minor), target in TARGETS.items())
        raise ValueError(f"arch: there are no kernels for {name!r}; expected one of {choices}")
    return known[name]


def _names() -> Iterable[tuple[str, str]]:
    for (major, minor), target in TARGETS.items():
        yield from ((name, target) for name in (target, f"sm_{major}{minor}", f"{major}.{minor}"))


def has_peer_kernels(target: str) -> bool:
    """Whether kernels that access the memory of other GPUs are compiled for an architecture."""
    return target in {TARGETS[capability] for capability in PEER_CAPABILITIES}


def capabilities(known: Iterable[tuple[int, int]] = TARGETS) -> str:
    """Compute capabilities in words."""
    *most, last = [f"{major}.{minor}" for major, minor in known]
    return f"{', '.join(most)} or {last}" if most else last
