"""What a kernel takes, read from its cubin: the compiler's report of it may be missing.

A cubin is an ELF file. Its section ``.nv.info`` is a list of attributes: format and code (a byte each), length (two
bytes), and so many bytes; those with a number for each function are pairs of a symbol's index and the number. An
instruction has 16 bytes since Volta, with the operation in its 12 lowest bits.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from typing import NamedTuple

_SIZED, _REGISTERS, _FRAME_BYTES = 4, 0x2F, 0x11  # EIFMT_SVAL, EIATTR_REGCOUNT, EIATTR_FRAME_SIZE
_RESERVED, _RESERVED_BYTES = ".nv.shared.reserved.0", 1024  # for the system, of each block, since Hopper
_STORE_LOCAL = 0x387  # STL, with registers
_STORED_BYTES = (1, 1, 2, 2, 4, 8, 16)  # by bits 73 to 75
_STORED_BYTES_BIT = 73


class Resources(NamedTuple):
    """What the only kernel of a cubin takes.

    Attributes:
        registers: of a thread.
        frame_bytes: of a thread's stack: arrays and spilled registers.
        spilled_bytes: what its stores of spilled registers write, each counted once wherever it stands.
        shared_bytes: static shared memory of a block, without what the system reserves.
    """

    registers: int
    frame_bytes: int
    spilled_bytes: int
    shared_bytes: int


def resources(image: bytes) -> Resources:
    """What a cubin of one kernel says."""
    assert image[:6] == b"\x7fELF\x02\x01", "64 bits, little-endian"
    sections = _sections(image)
    (code,) = (data for name, (_, data) in sections.items() if name.startswith(".text."))
    numbers = dict(_numbers(sections[".nv.info"][1]))
    shared = sum(size for name, (size, _) in sections.items() if re.match(r"\.nv\.shared\.(?!reserved\.)", name))
    if shared and _RESERVED in sections:  # which the kernel's own section begins with
        shared -= _RESERVED_BYTES
    return Resources(numbers[_REGISTERS], numbers[_FRAME_BYTES], _spilled(code), shared)


def _sections(image: bytes) -> dict[str, tuple[int, bytes]]:
    """Size and content of the sections by name; shared memory has a size alone."""
    (begin,), (size, count, names) = struct.unpack_from("<Q", image, 0x28), struct.unpack_from("<3H", image, 0x3A)
    headers = [struct.unpack_from("<2I4Q", image, begin + i * size) for i in range(count)]
    texts = headers[names][4]
    return {
        image[texts + name : image.index(b"\0", texts + name)].decode(): (length, image[at : at + length])
        for name, _, _, _, at, length in headers
    }


def _numbers(info: bytes) -> Iterator[tuple[int, int]]:
    """The attributes that are a number for each function: code and number."""
    at = 0
    while at < len(info):
        form, code, length = struct.unpack_from("<2BH", info, at)
        at += 4
        if form == _SIZED:
            if code in (_REGISTERS, _FRAME_BYTES):
                yield code, struct.unpack_from("<2I", info, at)[1]
            at += length


def _spilled(code: bytes) -> int:
    instructions = (int.from_bytes(code[i : i + 16], "little") for i in range(0, len(code), 16))
    return sum(_STORED_BYTES[one >> _STORED_BYTES_BIT & 7] for one in instructions if one & 0xFFF == _STORE_LOCAL)
