"""Checks of the options that attention kernels take: numbers and switches are meant as they are, or refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from megatron_magi.checks import flag, integer, real


def checked[Options: Any](options: Options) -> Options:
    """A named tuple of options with its numbers as int and float.

    Raises:
        ValueError: one, named in the message, is of another kind.
    """
    known = [name for name in options._fields if name in _CHECKS]
    return options._replace(**{name: _CHECKS[name](getattr(options, name), name) for name in known})


def length(value: Any, name: str) -> int | None:
    """``max_seqlen_q`` or ``max_seqlen_k`` as int; None where it is left to the kernel."""
    return None if value is None else integer(value, name)


def finite(value: Any, name: str) -> float:
    """``value`` as float; ValueError for all but a finite number."""
    number = real(value, name)
    if not math.isfinite(number):
        raise ValueError(f"{name}: expected a finite number, got {number}")
    return number


def _or_none(check: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
    return lambda value, name: None if value is None else check(value, name)


def _window(value: Any, name: str) -> tuple[int, int]:
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise ValueError(f"{name}: expected a pair (left, right), got {value!r}")
    return integer(value[0], name), integer(value[1], name)


_CHECKS: dict[str, Callable[[Any, str], Any]] = {
    "dropout_p": finite,
    "softmax_scale": _or_none(finite),
    "causal": flag,
    "window_size": _window,
    "attention_chunk": integer,
    "softcap": finite,
    "num_splits": integer,
    "pack_gqa": _or_none(flag),
    "deterministic": flag,
    "sm_margin": integer,
    "return_attn_probs": flag,
}
