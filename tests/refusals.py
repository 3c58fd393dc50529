"""What a call is refused with, for functions that run in ranks and return it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def refusal(function: Callable[..., Any], *args: Any, **kwargs: Any) -> str | None:
    """The message of the ValueError that a call raises; None if it raises none."""
    return _message(ValueError, function, *args, **kwargs)


def error_of(function: Callable[..., Any], *args: Any, **kwargs: Any) -> str | None:
    """The message of the ValueError or RuntimeError that a call raises; None if it raises none."""
    return _message((ValueError, RuntimeError), function, *args, **kwargs)


def _message(errors: type[Exception] | tuple[type[Exception], ...], function: Callable[..., Any], *args, **kwargs):
    try:
        function(*args, **kwargs)
    except errors as error:
        return str(error)
    return None
