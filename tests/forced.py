"""One backend for all tests of `ops` and `attention`: ``MAGI_TEST_IMPL=NAME pytest``, see CONTRIBUTING.md.

Whatever chooses a backend itself gets this one, and tests that name ``torch`` or ``reference`` name it. Tensors whose
dtype a test does not care for are of fp32 and, where there is a GPU, on it; kernels in Triton are interpreted where
there is none. A call that the backend refuses by name skips its test, with the reason.
"""

from __future__ import annotations

import importlib
import os

import pytest
import torch

VARIABLE = "MAGI_TEST_IMPL"
"""A variable of the environment, so that processes that tests start know it too."""

NAME = os.environ.get(VARIABLE) or None
DTYPE = torch.float32 if NAME else torch.float64
DEVICE = "cuda" if NAME and torch.cuda.is_available() else "cpu"

if NAME == "triton" and DEVICE == "cpu":
    importlib.import_module("tests.backends.triton.interpreted")
if NAME:
    from megatron_magi.backends import registry

    if NAME not in registry.BACKENDS:
        raise ValueError(f"{VARIABLE}: expected one of {', '.join(registry.BACKENDS)}, got {NAME!r}")
    registry._FASTEST, registry._ANYWHERE = (NAME,), NAME


free_choice = pytest.mark.skipif(NAME is not None, reason=f"about the choice of a backend; it is {NAME}")
"""Marks tests of what is chosen where nothing is forced."""


def impls(*names: str) -> tuple[str, ...]:
    """The backends that a test names, or the one that it has to take."""
    return (NAME,) if NAME else names


def generator(seed: int) -> torch.Generator:
    """Random numbers for tensors on `DEVICE`, where tests that name no device make them."""
    return torch.Generator(DEVICE).manual_seed(seed)


def on_device(arguments: dict) -> dict:
    """Arguments that a test's list has made on the CPU, on `DEVICE`; those of other devices stay."""
    return {
        name: x.to(DEVICE) if getattr(x, "device", None) == torch.device("cpu") else x for name, x in arguments.items()
    }


def tolerance(exact: float) -> float:
    """Of results whose inputs have `DTYPE`, ``exact`` where that is fp64."""
    return 2e-5 if NAME else exact


def multiplies_hidden_pairs() -> bool:
    """Whether NaN in a token that nothing sees may reach the result."""
    return NAME not in (None, "torch", "reference")


def refusal(error: ValueError) -> str | None:
    """What the backend says that it does not take, None of any other error."""
    text = str(error)
    return text if NAME and f"impl {NAME!r} " in text and " use '" in text else None
