"""Checks of arguments that the public functions share. Cheap: they look at types and shapes, never at content."""

from __future__ import annotations

from numbers import Real
from typing import Any

import torch

from megatron_magi.checks import check_local


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


def check_pad_value(value: Any, dtype: torch.dtype) -> None:
    """Raises ValueError unless ``value`` is a number that a tensor of ``dtype`` can hold, and not NaN."""
    if not isinstance(value, Real) or (isinstance(value, bool) and dtype is not torch.bool):
        raise ValueError(f"pad_value: expected a number, got {value!r}")
    if value == 0:
        return
    if dtype is torch.bool:
        if value != 1:
            raise ValueError(f"pad_value: expected True or False for {dtype}, got {value!r}")
    elif dtype.is_floating_point or dtype.is_complex:
        _check_float(value, dtype)
    elif not torch.iinfo(dtype).min <= value <= torch.iinfo(dtype).max or value != int(value):
        raise ValueError(f"pad_value: expected a whole number that fits {dtype}, got {value!r}")


def _check_float(value: Any, dtype: torch.dtype) -> None:
    if value != value:
        raise ValueError("pad_value: NaN in padding rows would reach others, as attention multiplies hidden rows by 0")
    if dtype.itemsize == 1:
        _check_byte(value, dtype)
        return
    largest = torch.finfo(dtype).max
    if abs(value) > largest and abs(value) != float("inf"):
        raise ValueError(f"pad_value: expected at most {largest:g} for {dtype}, got {value!r}")


def _check_byte(value: Any, dtype: torch.dtype) -> None:
    """`_check_float` of FP8 and FP4: some have no infinity or no sign, and some nothing that torch fills in."""
    try:
        held = torch.tensor([value], dtype=dtype, device="cpu").float().item()
    except (RuntimeError, OverflowError):
        held = float("nan")
    if held != held or abs(held) == float("inf") != abs(value) or held * value < 0:
        raise ValueError(f"pad_value: expected a number that fits {dtype}, got {value!r}")
