"""What `cudnn.flex_attention` lacks, in one table, by which calls go to the next backend or are refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import metadata
from types import ModuleType
from typing import NamedTuple

import numpy as np
import torch

from megatron_magi.mask.row_intervals import most_intervals
from megatron_magi.operands.frozen import FrozenMemo
from megatron_magi.operands.options import AttnOptions

PACKAGE = "nvidia-cudnn-frontend"
INSTALL = "pip install 'megatron-magi[cudnn]'"
_FIRST, _BEHIND = (1, 32), (1, 33)
"""Versions whose interface is known: it is experimental there. The extra ``cudnn`` in pyproject.toml has the same."""

HOPPER = (9, 0)
CAPABILITIES = (HOPPER, (10, 0), (10, 3))
BLACKWELL_MAJOR = 10
DTYPES = (torch.bfloat16, torch.float16)
DIM_UNIT, MOST_DIM = 8, 128
MOST_INTERVALS = 64
"""Most intervals of keys a row: its table takes ``8 n + 4`` bytes a row, and planning reads all of it for each tile."""

_known: FrozenMemo[int] = FrozenMemo()


class Ask(NamedTuple):
    """A call, or the tensors of calls.

    Attributes:
        where: the device in words.
        capability: of the GPU; None without one.
        found: installed version of the package, or None.
        dtype, dims: of q, k and v; head dims of q and k, and of v.
        group: query heads of a key head.
        softcap: of the call.
        intervals: most intervals of keys that a row sees.
    """

    where: str
    capability: tuple[int, int] | None
    found: str | None
    dtype: torch.dtype
    dims: tuple[int, int]
    group: int = 1
    softcap: float = 0.0
    intervals: int = 1


class Lack(NamedTuple):
    """A row of the table.

    Attributes:
        what: in a word.
        meets: whether a call needs it.
        reason: in words, without what to use instead.
    """

    what: str
    meets: Callable[[Ask], bool]
    reason: Callable[[Ask], str]


def _has_dims(ask: Ask) -> bool:
    return ask.dims in ((192, 128), (256, 256)) or all(d % DIM_UNIT == 0 and 0 < d <= MOST_DIM for d in ask.dims)


OF_TENSORS = (
    Lack(
        "GPU",
        lambda ask: ask.capability not in CAPABILITIES,
        lambda ask: f"impl: 'cudnn' needs a GPU of compute capability {_either(CAPABILITIES)}, q is on {ask.where}",
    ),
    Lack(
        "package",
        lambda ask: not _is_known(ask.found),
        lambda ask: f"impl: 'cudnn' needs {PACKAGE} {_span()}, {_installed(ask.found)} ({INSTALL})",
    ),
    Lack(
        "dtype",
        lambda ask: ask.dtype not in DTYPES,
        lambda ask: f"q: impl 'cudnn' takes bf16 and fp16, got {ask.dtype}",
    ),
    Lack(
        "head dims",
        lambda ask: not _has_dims(ask),
        lambda ask: (
            f"q, v: impl 'cudnn' takes head dims that are multiples of {DIM_UNIT} up to {MOST_DIM}, 192 with 128, and "
            f"256, got {ask.dims[0]} (q, k) and {ask.dims[1]} (v)"
        ),
    ),
    # Its backward on Hopper: sums over heads of a group need equal tiles of dk and dv, and shared memory has an end.
    Lack(
        "two head dims with groups on Hopper",
        lambda ask: ask.capability == HOPPER and ask.group > 1 and ask.dims[0] != ask.dims[1],
        lambda ask: (
            f"q, v: impl 'cudnn' takes different head dims on compute capability 9.0 with as many key heads as query "
            f"heads alone, got {ask.dims[0]} (q, k), {ask.dims[1]} (v) and {ask.group} query heads of a key head"
        ),
    ),
    Lack(
        "head dims that differ much on Hopper",
        lambda ask: ask.capability == HOPPER and 48 < ask.dims[0] <= 64 and ask.dims[1] > 96,
        lambda ask: (
            f"q, v: impl 'cudnn' takes head dims 56 and 64 of q and k with at most 96 of v on compute capability 9.0, "
            f"got {ask.dims[1]} (v)"
        ),
    ),
    # Its backward for them takes no gradient of the lse, by which delta over all keys is given here.
    Lack(
        "head dim 256 on Blackwell",
        lambda ask: ask.capability is not None and ask.capability[0] == BLACKWELL_MAJOR and ask.dims == (256, 256),
        lambda ask: f"q, v: impl 'cudnn' takes head dim 256 on compute capability 9.0 alone, q is on {ask.where}",
    ),
)
OF_CALLS = (
    Lack("softcap", lambda ask: ask.softcap > 0, lambda ask: f"softcap: impl 'cudnn' has none, got {ask.softcap:g}"),
    Lack(
        "masks of many intervals",
        lambda ask: ask.intervals > MOST_INTERVALS,
        lambda ask: (
            f"mask: impl 'cudnn' takes masks in which a row is in at most {MOST_INTERVALS} bands, got {ask.intervals}"
        ),
    ),
)
"""What it lacks of tensors, and of options and masks: the first row that applies is the reason."""


def why_not(
    device: torch.device, dtype: torch.dtype, dims: tuple[int, int], instead: str, group: int = 1
) -> str | None:
    """The reason why it does not take such tensors; None if it does."""
    reason = _of_tensors(Ask(*_where(device), installed_version(), dtype, dims, group))
    return None if reason is None else f"{reason}; use {instead}"


def why_not_call(options: AttnOptions, bands: np.ndarray | None, instead: str) -> str | None:
    """The reason why it does not compute such a call of tensors that it takes; None if it does."""
    intervals = 1 if bands is None else intervals_of(bands)
    ask = Ask("", None, None, DTYPES[0], (MOST_DIM, MOST_DIM), 1, options.softcap, intervals)
    reason = _first(OF_CALLS, ask)
    return None if reason is None else f"{reason}; use {instead}"


def intervals_of(bands: np.ndarray) -> int:
    """`most_intervals`, cached for read-only tables."""
    found = _known.get(bands)
    if found is None:
        found = most_intervals(bands)
        _known.put(bands, found)
    return found


@cache
def _of_tensors(ask: Ask) -> str | None:
    return _first(OF_TENSORS, ask)


def _first(table: tuple[Lack, ...], ask: Ask) -> str | None:
    return next((lack.reason(ask) for lack in table if lack.meets(ask)), None)


def _where(device: torch.device) -> tuple[str, tuple[int, int] | None]:
    if device.type != "cuda" or not torch.cuda.is_available():  # a fake tensor may be on a device that is not
        return device.type, None
    return _gpu(device)


@cache
def _gpu(device: torch.device) -> tuple[str, tuple[int, int]]:
    major, minor = torch.cuda.get_device_capability(device)
    return f"{torch.cuda.get_device_name(device)} ({major}.{minor})", (major, minor)


@cache
def installed_version() -> str | None:
    """The installed version of the package; None without it."""
    try:
        return metadata.version(PACKAGE)
    except metadata.PackageNotFoundError:
        return None


def _is_known(found: str | None) -> bool:
    if found is None:
        return False
    numbers = tuple(int(part) for part in found.split(".")[:2] if part.isdecimal())
    return _FIRST <= numbers < _BEHIND


def _span() -> str:
    return f"{_dotted(_FIRST)}.x"


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))


def _either(capabilities: tuple[tuple[int, int], ...]) -> str:
    *most, last = map(_dotted, capabilities)
    return f"{', '.join(most)} or {last}"


def _installed(found: str | None) -> str:
    return "which is not installed" if found is None else f"{found} is installed"


@cache
def library() -> ModuleType:
    """`cudnn.flex_attention`; importing it takes seconds.

    Raises:
        ImportError: it, or what it needs, is not installed; the message says how to install it.
    """
    try:
        from cudnn import flex_attention
    except ImportError as error:
        raise ImportError(f"impl: 'cudnn' cannot import cudnn.flex_attention ({error}); {INSTALL}") from error
    return flex_attention
