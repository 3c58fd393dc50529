"""Structs of kernel parameters, read from the CUDA sources, which alone describe them."""

from __future__ import annotations

import ctypes
import re
from functools import cache

from megatron_magi.cuda.build import flatten_source, source_root

_KERNEL = re.compile(r"__global__[^{;]*?\(\s*const\s+__grid_constant__\s+(\w+)\s+\w+\s*\)", re.DOTALL)
_BODY = r"struct\s+(?:alignas\(\d+\)\s+)?{}\s*\{{(.*?)\n\}};"
_COMMENT = re.compile(r"//[^\n]*")
_MEMBER = re.compile(r"(?:const\s+)?(\w+)\s*(.*)", re.DOTALL)
_TYPES = {
    "int": ctypes.c_int32, "u32": ctypes.c_uint32, "i64": ctypes.c_int64, "float": ctypes.c_float,
    "TensorMap": ctypes.c_char * 128,
}  # fmt: skip
_SPARE_BYTES = 64
"""After the last member, as C fills up a struct whose first member, a tensor map, is aligned to 64 bytes."""


def kernel_params(source: str, macros: tuple[str, ...] = ()) -> type[ctypes.Structure]:
    """The parameters of the kernel of a source file: its members by name, in structs of their own where C has structs.

    Args:
        source: path relative to the folder of CUDA sources.
        macros: with which it is compiled, ``NAME=VALUE``; those that no ``#if`` of a struct names do not matter.
    """
    return _kernel_params(source, tuple(sorted(macro for macro in macros if macro.endswith("=1"))))


@cache
def _kernel_params(source: str, macros: tuple[str, ...]) -> type[ctypes.Structure]:
    text = _text(source)
    (name,) = set(_KERNEL.findall(text))
    return _struct(name, (*_members(text, name, macros), ("pad", ctypes.c_char * _SPARE_BYTES)))


@cache
def struct(source: str, name: str) -> type[ctypes.Structure]:
    """A struct of a header that is a member of parameters, the same class as there."""
    return _struct(name, _members(_text(source), name, ()))


@cache
def _text(source: str) -> str:
    return _COMMENT.sub("", flatten_source(source_root() / source))


@cache
def _struct(name: str, members: tuple[tuple[str, type], ...]) -> type[ctypes.Structure]:
    return type(name, (ctypes.Structure,), {"_fields_": list(members)})


def _members(text: str, name: str, macros: tuple[str, ...]) -> tuple[tuple[str, type], ...]:
    """Name and type of each member of a struct."""
    body = re.search(_BODY.format(name), text, re.DOTALL)
    assert body is not None, f"struct {name}"
    found: list[tuple[str, type]] = []
    for statement in _chosen(body.group(1), macros).split(";"):
        if not statement.strip():
            continue
        kind, declared = _MEMBER.fullmatch(statement.strip()).groups()
        for one in declared.split(","):
            member = one.strip()
            assert re.fullmatch(r"\*?\s*\w+", member), f"{name}: {statement.strip()}"
            is_pointer = member.startswith("*")
            found.append((member.lstrip("* "), ctypes.c_void_p if is_pointer else _type(text, kind, macros)))
    return tuple(found)


def _type(text: str, kind: str, macros: tuple[str, ...]) -> type:
    return _TYPES[kind] if kind in _TYPES else _struct(kind, _members(text, kind, macros))


def _chosen(body: str, macros: tuple[str, ...]) -> str:
    """The lines between ``#if NAME`` and ``#endif`` whose macro is 1, and those outside."""
    lines, kept = [], True
    for line in body.splitlines():
        condition = re.fullmatch(r"\s*#\s*if\s+(\w+)\s*", line)
        if condition is not None:
            assert kept, "structs of parameters do not nest conditions"
            kept = f"{condition.group(1)}=1" in macros
        elif re.fullmatch(r"\s*#\s*endif\s*", line):
            kept = True
        else:
            assert "#" not in line, line
            if kept:
                lines.append(line)
    return "\n".join(lines)
