"""Checks, which a CUDA compiler makes, that a struct lies in memory as Python describes it."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator


def _members(kind: type[ctypes.Structure], name: str = "", at: int = 0) -> Iterator[tuple[str, int]]:
    """Members of a struct and of structs in it, as C names them, with their offsets."""
    for field, of, *_ in kind._fields_:
        offset = at + getattr(kind, field).offset
        if issubclass(of, ctypes.Structure):
            yield from _members(of, f"{name}{field}.", offset)
        elif field != "pad":
            yield name + field, offset


def layout_checks(kind: type[ctypes.Structure]) -> str:
    """Static assertions, to be compiled behind the source that defines the struct."""
    name = kind.__name__
    checks = [
        f'static_assert(__INTADDR__(&static_cast<{name}*>(0)->{member}) == {offset}, "{member}");'
        for member, offset in _members(kind)
    ]
    # A member that only the source has would lie behind the last one described, before the spare bytes.
    end = kind.pad.offset if hasattr(kind, "pad") else ctypes.sizeof(kind)
    of_source = f"({end} + alignof({name}) - 1) / alignof({name}) * alignof({name})"
    checks.append(f'static_assert(sizeof({name}) == {of_source}, "size");')
    checks.append(f'static_assert(sizeof({name}) <= {ctypes.sizeof(kind)}, "room");')
    return "\n".join(checks)
