"""One backend for all tests of `ops` and `attention`: ``MAGI_TEST_IMPL=NAME pytest``, see CONTRIBUTING.md.

Whatever chooses a backend itself gets this one, also of those for lists of keys where it has such kernels, and tests
that name ``torch`` or ``reference`` name it. Tensors whose
dtype a test does not care for are of fp32 and, where there is a GPU, on it; kernels in Triton are interpreted where
there is none. A call that the backend refuses by name skips its test, with the reason.
"""

from __future__ import annotations

import importlib
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_magi.testing.spawn import RankError

VARIABLE = "MAGI_TEST_IMPL"
"""A variable of the environment, so that processes that tests start know it too."""

NAME = os.environ.get(VARIABLE) or None
_HERE = Path(__file__).parent
_RANK = re.compile(r"^rank \d+ of \d+: ", re.MULTILINE)
DTYPE = torch.float32 if NAME else torch.float64
DEVICE = "cuda" if NAME and torch.cuda.is_available() else "cpu"

if NAME == "triton" and DEVICE == "cpu":
    importlib.import_module("tests.backends.triton.interpreted")
if NAME:
    from megatron_magi.backends import registry

    if NAME not in registry.BACKENDS:
        raise ValueError(f"{VARIABLE}: expected one of {', '.join(registry.BACKENDS)}, got {NAME!r}")
    registry._FASTEST, registry._ANYWHERE = (NAME,), NAME
    if NAME in registry.SPARSE:
        registry._FASTEST_SPARSE, registry._FASTEST_LATENT, registry._DEFINITION = (NAME,), (NAME,), NAME


on_cpu = pytest.mark.usefixtures("tensors_on_the_cpu")
"""Marks tests of what is refused, or computed, for tensors of a CPU, whatever backend is forced."""

on_device_of_backend = pytest.mark.usefixtures("tensors_on_the_device")
"""Marks tests in `attention` that compute on one device and name none; in `ops` all do."""

free_choice = pytest.mark.skipif(NAME is not None, reason=f"about the choice of a backend; it is {NAME}")
"""Marks tests of what is chosen where nothing is forced."""

for_hopper = pytest.mark.skipif(NAME not in (None, "ffa"), reason=f"about the kernels for Hopper; it is {NAME}")
"""Marks tests of what no other backend has: launches over several stages, and their captures."""


def why_not(item: pytest.Item) -> str | None:
    """Why no backend computes a test: with GPUs there, ranks that have none are over CPUs.

    Such ranks are known by the fixture `ranks`, through which tests of these folders start them all.
    """
    if DEVICE == "cpu" or not {"ops", "attention"} & set(item.path.relative_to(_HERE).parts):
        return None
    is_over_cpus = "ranks" in getattr(item, "fixturenames", ()) and not item.get_closest_marker("gpu")
    return f"over CPUs, where {NAME} does not compute" if is_over_cpus else None


def impl(name: str) -> str:
    """The backend that a test names, or the one that it has to take."""
    return NAME or name


def impls(*names: str) -> tuple[str, ...]:
    """The backends that a test names, or the one that it has to take."""
    return (NAME,) if NAME else names


def is_interpreted() -> bool:
    """Whether kernels in Triton run on the CPU."""
    return NAME == "triton" and DEVICE == "cpu"


def looks_at_values() -> bool:
    """Whether a test has to ask for what is checked on a CPU alone otherwise: numbers in tensors (``sanity_check``)."""
    return DEVICE != "cpu"


def generator(seed: int) -> torch.Generator:
    """Random numbers for tensors of tests that name no device: on `DEVICE`, in tests that are `on_cpu` on the CPU."""
    return torch.Generator(torch.get_default_device()).manual_seed(seed)


def on_device(x: Any) -> Any:
    """What a test's list has made on the CPU, on `DEVICE`: a tensor, or those in a tuple or dict; all else stays."""
    if isinstance(x, dict):
        return {name: on_device(value) for name, value in x.items()}
    if isinstance(x, tuple):
        return tuple(map(on_device, x))
    return x.to(DEVICE) if getattr(x, "device", None) == torch.device("cpu") else x


def tolerance(exact: float) -> float:
    """Of results whose inputs have `DTYPE`, ``exact`` where that is fp64."""
    return 2e-5 if NAME else exact


def examples(number: int) -> dict[str, Any]:
    """Settings of hypothesis for ``number`` examples; few where each compiles kernels, or has them interpreted."""
    from hypothesis import Phase

    if NAME != "triton":
        return {"max_examples": number}
    return {"max_examples": max(1, number // 5), "phases": [Phase.explicit, Phase.reuse, Phase.generate]}


def multiplies_hidden_pairs() -> bool:
    """Whether NaN in a token that nothing sees may reach the result."""
    return NAME not in (None, "torch", "reference")


def refusal(error: BaseException | None) -> str | None:
    """What the backend says that it does not take, on all ranks that fail; None of any other error.

    Also where a test says that it expects another error.
    """
    if isinstance(error, AssertionError):
        error = error.__context__  # what `pytest.raises` has found instead
    if not NAME or not isinstance(error, (ValueError, RankError)):
        return None
    texts = _RANK.split(str(error))[1:] or [str(error)]
    said = [[line for line in text.splitlines() if f"impl {NAME!r} " in line and " use '" in line] for text in texts]
    return said[0][0] if said and all(said) else None
