"""Public names that come from `megatron_magi.compat`, which nothing imports: it is loaded when one of them is used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_magi.compat import *  # noqa: F403, `api` exports every name of its `__all__`


def compat_name(name: str) -> Any:
    """What ``name`` is in `megatron_magi.compat`."""
    return getattr(importlib.import_module("megatron_magi.compat"), name)
