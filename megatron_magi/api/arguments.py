"""Checks of arguments that the public functions share. Cheap: they look at types and shapes, never at content."""

from __future__ import annotations

from numbers import Complex, Real
from typing import Any

import numpy as np
import torch

from megatron_magi.checks import check_local

Number = bool | int | float | complex


def tensor(x: Any, name: str, shape: str) -> torch.Tensor:
    """``x``, which must be a dense tensor of at least one dimension.

    Raises:
        ValueError: it is not; ``shape`` says what was expected.
    """
    if not isinstance(x, torch.Tensor):
        raise ValueError(f"{name}: expected a tensor {shape}, got {type(x).__name__}")
    check_local(x, name)
    if x.layout is not torch.strided or x.is_nested:
        raise ValueError(f"{name}: expected a dense tensor {shape}, got a sparse or nested one")
    if x.dim() == 0:
        raise ValueError(f"{name}: expected a tensor {shape}, got one without dimensions")
    return x


def rows(x: Any, name: str, num_rows: int, whose: str) -> torch.Tensor:
    """``x``, which must be a tensor with ``num_rows`` rows, of which ``whose`` says what they are.

    Raises:
        ValueError: it is not.
    """
    tensor(x, name, f"[{num_rows}, ...]")
    if x.shape[0] != num_rows:
        raise ValueError(f"{name}: {x.shape[0]} rows, {whose}")
    return x


def pad_number(value: Any, dtype: torch.dtype) -> Number:
    """`fill_number` of ``pad_value``, which may not be NaN."""
    number = fill_number(value, dtype, "pad_value")
    if number != number:
        raise ValueError("pad_value: NaN in padding rows would reach others, as attention multiplies hidden rows by 0")
    return number


def fill_number(value: Any, dtype: torch.dtype, name: str) -> Number:
    """``value`` as the number of Python's that a tensor of ``dtype`` is filled with; torch would cut or wrap some.

    Raises:
        ValueError: it is no number, or ``dtype`` cannot hold it.
    """
    kind = Complex if dtype.is_complex else Real
    if not isinstance(value, kind) or (isinstance(value, bool) and dtype is not torch.bool):
        raise ValueError(f"{name}: expected a number, got {value!r}")
    if isinstance(value, np.generic):
        value = value.item()  # numpy would compare in its own, narrower dtype
    if dtype is torch.bool:
        if value not in (0, 1):
            raise ValueError(f"{name}: expected True or False for {dtype}, got {value!r}")
        return bool(value)
    if dtype.is_complex:
        for part in (value.real, value.imag):
            _check_float(part, dtype, name)
        return complex(value)
    if dtype.is_floating_point:
        _check_float(value, dtype, name)
        return float(value)
    if not torch.iinfo(dtype).min <= value <= torch.iinfo(dtype).max or value != int(value):
        raise ValueError(f"{name}: expected a whole number that fits {dtype}, got {value!r}")
    return int(value)


def _check_float(value: Any, dtype: torch.dtype, name: str) -> None:
    if value == 0:
        return
    if dtype.itemsize == 1:
        _check_byte(value, dtype, name)
        return
    largest = torch.finfo(dtype).max
    if abs(value) > largest and abs(value) != float("inf"):
        raise ValueError(f"{name}: expected at most {largest:g} for {dtype}, got {value!r}")


def _check_byte(value: Any, dtype: torch.dtype, name: str) -> None:
    """`_check_float` of FP8 and FP4: some have no infinity or no sign, and some nothing that torch fills in."""
    try:
        held = torch.tensor([value], dtype=dtype, device="cpu").float().item()
    except (RuntimeError, OverflowError):
        held = None
    is_nan = value != value
    if held is None or (held != held) != is_nan or abs(held) == float("inf") != abs(value) or held * value < 0:
        raise ValueError(f"{name}: expected a number that fits {dtype}, got {value!r}")
