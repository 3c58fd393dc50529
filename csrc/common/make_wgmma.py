"""Writes wgmma.cuh: one wrapper a shape, element type and place of the first operand.

Usage: python csrc/common/make_wgmma.py | clang-format --assume-filename=wgmma.cuh > csrc/common/wgmma.cuh
"""

SHAPES = (32, 64, 96, 128, 192, 256)
TYPES = (("Bf16", "bf16"), ("Fp16", "f16"))

HEAD = """// Written by make_wgmma.py. Products of a warpgroup: d[64, N] (+)= a[64, 16] * b[16, N], fp32 accumulators.
// ss: both operands in shared memory; rs: the first in registers. TA, TB: 1 when the operand is read across its rows.
#pragma once

#include "ptx.cuh"

template <typename T, int N>
struct Wgmma;
"""


def wrap(items: list[str], indent: str, width: int = 118) -> str:
    lines, line = [], indent
    for item in items:
        if len(line) + len(item) + 1 > width:
            lines.append(line.rstrip())
            line = indent
        line += item + " "
    lines.append(line.rstrip())
    return "\n".join(lines)


def method(n: int, ptx_type: str, in_registers: bool) -> str:
    regs = n // 2
    accum = wrap([f"%{i}," for i in range(regs - 1)] + [f"%{regs - 1}"], "").split("\n")
    outputs = wrap([f'"+f"(d[{i}]),' for i in range(regs - 1)] + [f'"+f"(d[{regs - 1}])'], "          ")
    lines = ['"{\\n.reg .pred keep;\\n"']
    if in_registers:
        a = "{" + ", ".join(f"%{regs + i}" for i in range(4)) + "}"
        desc_b, keep, tail = regs + 4, regs + 5, f"keep, 1, 1, %{regs + 6};\\n}}"
        inputs = '"r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"(TB)'
        head = f"template <int TB>\n  static DEVICE void rs(float (&d)[{regs}], const u32* a, u64 b, int accumulate)"
    else:
        a = f"%{regs}"
        desc_b, keep, tail = regs + 1, regs + 2, f"keep, 1, 1, %{regs + 3}, %{regs + 4};\\n}}"
        inputs = '"l"(a), "l"(b), "r"(accumulate), "n"(TA), "n"(TB)'
        head = f"template <int TA, int TB>\n  static DEVICE void ss(float (&d)[{regs}], u64 a, u64 b, int accumulate)"
    lines.append(f'"setp.ne.b32 keep, %{keep}, 0;\\n"')
    lines.append(f'"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{ptx_type}.{ptx_type} {{"')
    lines += [f'"{line} "' for line in accum]
    lines.append(f'"}}, {a}, %{desc_b}, {tail}"')
    body = "\n        ".join(lines)
    return f"  {head} {{\n    asm volatile(\n        {body}\n        :\n{outputs}\n        : {inputs});\n  }}"


def main() -> None:
    print(HEAD)
    for name, ptx_type in TYPES:
        for n in SHAPES:
            print(f"template <>\nstruct Wgmma<{name}, {n}> {{")
            print(method(n, ptx_type, False))
            print(method(n, ptx_type, True))
            print("};\n")


if __name__ == "__main__":
    main()
