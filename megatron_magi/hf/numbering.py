"""Layers and rotary embeddings that derive something from the number of a row or from how many rows there are.

In a shard rows are some of the sequence's, in another order; in a pack they are those of several documents.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor

_COUNTING = {"arange", "cumsum", "linspace"}
"""Functions that number rows."""

_TUNED = ("attn_temperature_tuning", "attn_scale", "floor_scale", "use_rope")
"""Attributes of layers whose queries grow with the number of their row (Llama 4)."""


def check_ropes(model_config: Any) -> None:
    """Raises ValueError for rotary embeddings that depend on the largest position, of which a rank has its own."""
    text = model_config.get_text_config() if hasattr(model_config, "get_text_config") else model_config
    ropes = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    one = any(isinstance(ropes.get(name), str) for name in ("rope_type", "type"))
    for rope in [ropes] if one else [r for r in ropes.values() if isinstance(r, dict)]:
        kind = rope.get("rope_type", rope.get("type")) or ""
        if "dynamic" in kind or kind == "longrope":
            raise ValueError(f"rope_type: {kind} looks at the largest position, of which a rank has its own")


def is_tuned(module: torch.nn.Module) -> bool:
    """Whether a layer scales queries by the number of their row."""
    known = all(hasattr(module, name) for name in _TUNED)
    return known and bool(module.attn_temperature_tuning) and not module.use_rope


def check_counting(module: torch.nn.Module) -> None:
    """Raises ValueError for a layer that numbers the rows of a shard in a way that is not known here."""
    if not all(hasattr(module, name) for name in _TUNED) and _counts_rows(type(module)):
        raise ValueError(
            f"model: {type(module).__name__} numbers its rows by code of its own, and a rank has only some of a "
            "sequence's; it cannot be used under context parallelism"
        )


def renumbered(module: torch.nn.Module, query: Tensor, positions: Tensor) -> Tensor:
    """Queries as `is_tuned` layers would have scaled them at other numbers than those of the rows.

    ``query`` ``[batch_size, num_heads, q_length, head_dim]``, ``positions`` ``[batch_size, q_length]``.
    """
    rows = torch.arange(query.shape[2], device=query.device)[None]
    factor = _temperature(module, positions) / _temperature(module, rows)
    scaled = query.to(torch.promote_types(query.dtype, torch.float32)) * factor[:, None, :, None]
    return scaled.to(query.dtype)


def reaches_a_higher_temperature(module: torch.nn.Module, num_rows: int) -> bool:
    """Whether any row is scaled at all."""
    return num_rows >= module.floor_scale


def _temperature(module: Any, numbers: Tensor) -> Tensor:
    return torch.log1p(torch.floor((numbers.float() + 1.0) / module.floor_scale)) * module.attn_scale + 1.0


@functools.cache
def _counts_rows(kind: type[torch.nn.Module]) -> bool:
    """Whether the code of a layer's forward numbers rows, without a look at the positions it could be given."""
    names: set[str] = set()
    for code in _codes(inspect.unwrap(kind.forward), kind, set()):
        names.update(code.co_names, code.co_varnames, (x for x in code.co_consts if isinstance(x, str)))
    return not names.isdisjoint(_COUNTING) and "position_ids" not in names


def _codes(function: Any, kind: type, seen: set[CodeType]) -> Iterator[CodeType]:
    """The code of a function and of the functions of its file and methods of its class that it calls."""
    function = inspect.unwrap(function) if callable(function) else function
    if not isinstance(function, FunctionType) or function.__code__ in seen:
        return
    inside = [function.__code__]
    while inside:
        code = inside.pop()
        seen.add(code)
        yield code
        inside += [x for x in code.co_consts if isinstance(x, CodeType)]
        for name in code.co_names:
            for called in (function.__globals__.get(name), getattr(kind, name, None)):
                if getattr(called, "__module__", None) == function.__module__:
                    yield from _codes(called, kind, seen)
