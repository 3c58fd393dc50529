"""Checks of values that users give: each returns what was meant, or raises a ValueError that begins with the name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from numbers import Real
from typing import Any

import numpy as np

IntArrayLike = Sequence[int] | np.ndarray | Any
"""A list, a numpy array, or anything that converts to one, such as a tensor on any device."""

MAX_TOKENS = (1 << 31) - 1
"""Tokens of a sequence, and any other count: their products, which areas are, fit 64 bits."""


def instance(value: Any, name: str, *classes: type) -> None:
    """Raises ValueError unless ``value`` is an instance of one of ``classes``."""
    if not isinstance(value, classes):
        known = " or ".join(c.__name__ for c in classes)
        got = f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__
        raise ValueError(f"{name}: expected {known}, got {got}")


def flag(value: Any, name: str) -> bool:
    """``value``, which must be True or False.

    Raises:
        ValueError: anything else; ``"no"`` and 2 would count as True.
    """
    if value is not True and value is not False:
        raise ValueError(f"{name}: expected True or False, got {value!r}")
    return value


def int_array(values: IntArrayLike, name: str, ndim: int = 1) -> np.ndarray:
    """``values`` as int64 numpy; tensors are detached and copied to the CPU first.

    Raises:
        ValueError: not integers, or not of ``ndim`` dimensions.
    """
    if hasattr(values, "detach"):
        if getattr(values, "is_meta", False):
            raise ValueError(f"{name}: expected integers, got a tensor on the meta device")
        values = values.detach().cpu()
    elif isinstance(values, list | tuple) and bool in map(type, values):
        raise ValueError(f"{name}: expected integers, got {values!r}")
    try:
        array = np.asarray(values)
    except (ValueError, TypeError):
        raise ValueError(f"{name}: expected {ndim} dimension(s) of integers, got {values!r}") from None
    if array.size == 0 and array.ndim == ndim:
        return array.astype(np.int64)
    if array.dtype.kind not in "iu":
        raise ValueError(f"{name}: expected integers, got {array.dtype}")
    if array.dtype == np.uint64 and array.size and array.max() >= 1 << 63:
        raise ValueError(f"{name}: expected integers below 2**63, got {array.max()}")
    if array.ndim != ndim:
        raise ValueError(f"{name}: expected {ndim} dimension(s) of integers, got shape {list(array.shape)}")
    return array.astype(np.int64)


def integer(value: Any, name: str) -> int:
    """``value`` as int; a number with a fraction is refused, not cut off, and True is no number.

    Raises:
        ValueError: not an integer, nor an array or tensor of one.
    """
    try:
        if isinstance(value, bool) or "bool" in str(getattr(value, "dtype", "")):
            raise TypeError
        return int(value.__index__())
    except (AttributeError, TypeError):
        shape = getattr(value, "shape", ())
        got = f"a {type(value).__name__} of shape {list(shape)}" if len(shape) else repr(value)
        raise ValueError(f"{name}: expected an integer, got {got}") from None


def int_at_least(value: Any, name: str, least: int, most: int = MAX_TOKENS) -> int:
    """``value`` as int.

    Raises:
        ValueError: not an integer, smaller than ``least`` or larger than ``most``.
    """
    number = integer(value, name)
    if number < least:
        raise ValueError(f"{name}: expected at least {least}, got {number}")
    if number > most:
        raise ValueError(f"{name}: expected at most {most}, got {number}")
    return number


def number(value: Any, name: str, least: float) -> None:
    """Raises ValueError unless ``value`` is a finite number of at least ``least``."""
    if not isinstance(value, Real) or isinstance(value, bool) or not least <= value < float("inf"):
        raise ValueError(f"{name}: expected a finite number of at least {least}, got {value!r}")


def real(value: Any, name: str) -> float:
    """``value`` as float.

    Raises:
        ValueError: no number, nor a tensor or array of one without a gradient; True and strings are none.
    """
    if type(value) is float:
        return value
    try:
        # A parameter would get no gradient, and a number as a string is a mistake.
        is_bool = isinstance(value, bool) or "bool" in str(getattr(value, "dtype", ""))
        if is_bool or isinstance(value, str | bytes) or getattr(value, "requires_grad", False):
            raise TypeError
        return float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        what = f"a tensor of shape {list(value.shape)}" if hasattr(value, "detach") else repr(value)
        raise ValueError(f"{name}: expected a number, got {what}") from None


def check_local(x: Any, name: str) -> None:
    """Raises ValueError for a DTensor: a tensor stands for this rank's numbers alone."""
    if hasattr(x, "to_local"):
        raise ValueError(f"{name}: expected a plain tensor, got a {type(x).__name__}; give {name}.to_local()")


@contextmanager
def renamed(inside: str, outside: str) -> Iterator[None]:
    """A ValueError of the block that begins with the argument ``inside`` begins with ``outside`` instead."""
    try:
        yield
    except ValueError as error:
        if not str(error).startswith(f"{inside}:"):
            raise
        raise ValueError(f"{outside}:{str(error).removeprefix(inside + ':')}") from None
