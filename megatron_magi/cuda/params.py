"""Structs of kernel parameters, and of memory that kernels share, read from the CUDA sources that describe them."""

from __future__ import annotations

import ctypes
import re
from functools import cache

from megatron_magi.cuda.build import flatten_source, source_root

_KERNEL = re.compile(r"__global__[^{;]*?\(\s*const\s+__grid_constant__\s+(\w+)\s+\w+\s*\)", re.DOTALL)
_BODY = r"struct\s+(?:alignas\(\d+\)\s+)?{}\s*\{{(.*?)\n\}};"
_COMMENT = re.compile(r"//[^\n]*")
_MEMBERS = re.compile(r"(?:const\s+)?(\w+)\s*(.*)", re.DOTALL)
_NAME = re.compile(r"(\*?)\s*(\w+)((?:\[\w+\])*)")
_CONSTANT = r"\b{}\s*=\s*(\d+)(?:\s*<<\s*(\d+))?\s*[,;]"
_TYPES = {
    "int": ctypes.c_int32, "u32": ctypes.c_uint32, "i64": ctypes.c_int64, "u64": ctypes.c_uint64,
    "float": ctypes.c_float, "TensorMap": ctypes.c_char * 128,
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
    """A struct of a header, the same class as where it is a member of parameters."""
    return _struct(name, _members(_text(source), name, ()))


@cache
def _text(source: str) -> str:
    return _COMMENT.sub("", flatten_source(source_root() / source))


@cache
def _struct(name: str, members: tuple[tuple[str, type], ...]) -> type[ctypes.Structure]:
    # Without slots a member that the source does not have could be set, and the kernel would not see it.
    return type(name, (ctypes.Structure,), {"_fields_": list(members), "__slots__": ()})


def _members(text: str, name: str, macros: tuple[str, ...]) -> tuple[tuple[str, type], ...]:
    """Name and type of each member of a struct."""
    body = re.search(_BODY.format(name), text, re.DOTALL)
    assert body is not None, f"struct {name}"
    found: list[tuple[str, type]] = []
    for statement in _chosen(body.group(1), macros).split(";"):
        if not statement.strip():
            continue
        kind, declared = _MEMBERS.fullmatch(statement.strip()).groups()
        for one in declared.split(","):
            member = _NAME.fullmatch(one.strip())
            assert member is not None, f"{name}: {statement.strip()}"
            is_pointer, of_member, lengths = member.groups()
            of_kind = ctypes.c_void_p if is_pointer else _type(text, kind, macros)
            for length in reversed(re.findall(r"\w+", lengths)):
                of_kind = of_kind * _constant(text, length)
            found.append((of_member, of_kind))
    return tuple(found)


def _constant(text: str, name: str) -> int:
    """Value of a constant that is a number or a power of two."""
    value = re.search(_CONSTANT.format(name), text)
    assert value is not None, name
    return int(value.group(1)) << int(value.group(2) or 0)


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
