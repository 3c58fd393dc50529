"""Kernels compiled for GPUs that need not be there, and what they take of them."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from megatron_magi.backends.triton import kernels, latent_kernels, row_kernels, sparse, sparse_kernels
from megatron_magi.backends.triton.tuning import (
    Kernel,
    LatentKernel,
    Sizes,
    kind_of_capability,
    latent_sizes,
    padded,
    sizes,
)

_TYPES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
_DESCRIBED = {"k": "PAD_K", "v": "PAD_V"}, {"q": "PAD_K", "dout": "PAD_V"}
"""What is read by blocks of keys, and of queries, and to what a row is filled up."""
_FUNCTIONS = {
    "forward": kernels.forward_kernel,
    "query_gradient": kernels.query_gradient_kernel,
    "key_gradient": kernels.key_gradient_kernel,
}


class Usage(NamedTuple):
    """Bytes of shared memory of a thread block; registers, and bytes of them that are spilled, of a thread."""

    shared: int
    registers: int
    spilled: int


def usage(
    kernel: Kernel,
    capability: tuple[int, int],
    dims: tuple[int, int],
    dtype: torch.dtype,
    *,
    special: bool = False,
    found: Sizes | None = None,
) -> Usage:
    """Compiles a kernel.

    Args:
        special: with softcap, sink, merging and largest logits; gradients are added to.
        found: its sizes, in place of those of `tuning`.
    """
    found = found or sizes(kernel, kind_of_capability(capability), dims, dtype.itemsize, capped=special)
    constants = {
        "GROUP": 4, "DK": dims[0], "DV": dims[1], "PAD_K": padded(dims[0]), "PAD_V": padded(dims[1]),
        "ROWS": found.rows, "COLUMNS": found.columns, "PRECISION": "ieee" if dtype == torch.float32 else "tf32",
        "CAPPED": special, "HAS_SINK": special, "MERGES": special, "KEEPS_MAX": special, "ADDS": special,
        "DESCRIBED": found.described,
    }  # fmt: skip
    return _usage(_FUNCTIONS[kernel], constants, capability, dtype, found)


def row_usage(capability: tuple[int, int]) -> list[Usage]:
    """Compiles the kernels over rows."""
    room = Sizes(64, 1, 4, 3)
    return [
        _usage(row_kernels.row_delta_kernel, {"DV": 256, "PAD_V": 256, "ROWS": 64}, capability, torch.float32, room),
        _usage(row_kernels.by_head_kernel, {"ROWS": 64, "HEADS": 16}, capability, torch.float32, room),
    ]


def sparse_usage(
    kernel: Kernel, capability: tuple[int, int], dims: tuple[int, int], dtype: torch.dtype, k_block: int
) -> Usage:
    """Compiles a kernel of attention over lists, with all options and many heads of a key head."""
    places = k_block if kernel == "key_gradient" else 128
    found = sparse.sizes_of(kernel, dims, dtype.itemsize, places)
    constants = {
        "GROUP": 16, "DK": dims[0], "DV": dims[1], "PAD_K": padded(dims[0]), "PAD_V": padded(dims[1]),
        "ROWS": found.rows, "PARTS": -(-places // found.rows), "COLUMNS": found.columns, "K_BLOCK": k_block,
        "CAUSAL": k_block > 1, "PRECISION": "ieee" if dtype == torch.float32 else "tf32", "HAS_SINK": True,
        "KEEPS_MAX": True,
    }  # fmt: skip
    return _usage(getattr(sparse_kernels, f"sparse_{kernel}_kernel"), constants, capability, dtype, found)


def latent_usage(
    kernel: LatentKernel, capability: tuple[int, int], dims: tuple[int, int], dtype: torch.dtype, group: int,
    stores: bool, found: Sizes | None = None,
) -> Usage:  # fmt: skip
    """Compiles a kernel of attention over lists of latent keys, with all options.

    Args:
        dims: head dims of q and k, and of v.
        group: query heads of a key head.
        stores: parts of the gradient of keys are stored, not added.
        found: its sizes, in place of those of `tuning`.
    """
    found = found or latent_sizes(kernel, kind_of_capability(capability), dtype.itemsize, group)
    constants = {
        "GROUP": group, "D": dims[0], "DV": dims[1], "DR": dims[0] - dims[1], "PAD_V": padded(dims[1]),
        "PAD_R": padded(max(1, dims[0] - dims[1])), "WIDTH": 64 if kernel == "scores" else 128, "ROWS": found.rows,
        "PARTS": -(-group // found.rows), "COLUMNS": found.columns, "HAS_SINK": True, "KEEPS_MAX": True,
        "STORES": stores, "PRECISION": "ieee" if dtype == torch.float32 else "tf32",
    }  # fmt: skip
    return _usage(getattr(latent_kernels, f"latent_{kernel}_kernel"), constants, capability, dtype, found)


def latent_helpers_usage(capability: tuple[int, int]) -> list[Usage]:
    """Compiles the kernels of row sums, and of sums of parts, of heads of MLA."""
    delta = {"DV": 512, "PAD_V": 512, "ROWS": 16, "PARTS": 8}
    return [
        _usage(latent_kernels.latent_delta_kernel, delta, capability, torch.bfloat16, Sizes(16, 1, 4, 3)),
        _usage(latent_kernels.latent_sum_kernel, {"D": 576, "PAD": 1024}, capability, torch.float32, Sizes(1, 1, 4, 3)),
    ]


def mask_usage(capability: tuple[int, int]) -> Usage:
    """Compiles the kernel that makes lists of a mask."""
    return _usage(
        sparse_kernels.lists_of_mask_kernel, {"COLUMNS": 1024}, capability, torch.float32, Sizes(1, 1024, 4, 1)
    )


def _usage(
    function: Any, constants: dict[str, Any], capability: tuple[int, int], dtype: torch.dtype, found: Sizes
) -> Usage:
    """Compiles a function of Triton."""
    names = function.arg_names
    signature, attributes = {}, {}
    described = _descriptors("dk" in names, constants, dtype) if constants.get("DESCRIBED") else {}
    for i, name in enumerate(names):
        if name in constants:
            signature[name] = "constexpr"
        elif name in described:
            signature[name] = described[name]
        elif name in ("q", "k", "v", "kv", "dout", "out", "dq", "dk", "dv", "probs", "grads"):
            signature[name] = "*" + _TYPES[dtype]
            attributes[(i,)] = [["tt.divisibility", 16]]
        elif name == "mask":
            signature[name] = "*i8"
        elif name in ("lse", "row_max", "sink", "delta", "dkv", "parts", "out_lse", "out_delta"):
            signature[name] = "*fp32"
        elif name in ("spans", "order") or (name == "bounds" and "order" in names):
            signature[name] = "*i64"
            attributes[(i,)] = [["tt.divisibility", 16]]
        elif name in ("tiles", "passes", "bounds", "entries", "counts"):
            signature[name] = "*i32"
            attributes[(i,)] = [["tt.divisibility", 16]]
        elif name in ("scale", "cap", "softmax_scale"):
            signature[name] = "fp32"
        else:
            signature[name] = "i32"
            if name == "score_step" or (
                name.split("_")[-1] in ("row", "head") and name.split("_")[0] in ("q", "k", "v", "kv", "dout", "out")
            ):
                attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(
        function, signature, constexprs={(names.index(n),): v for n, v in constants.items() if n in names},
        attrs=attributes,
    )  # fmt: skip
    arch = 10 * capability[0] + capability[1]
    made = triton.compile(
        source,
        target=GPUTarget("cuda", arch, 32),
        options={"num_warps": found.warps, "num_stages": found.stages},
    )
    return Usage(made.metadata.shared, *_of_ptx(made.asm["ptx"]))


def _descriptors(of_keys: bool, constants: dict[str, Any], dtype: torch.dtype) -> dict[str, str]:
    """Types of arguments that are descriptors; ``of_keys``: of `key_gradient_kernel`."""
    columns, kind = constants["COLUMNS"], _TYPES[dtype]
    stats = dict.fromkeys(("lse", "delta"), f"tensordesc<fp32[1, {columns}]>") if of_keys else {}
    read = {name: f"tensordesc<{kind}[{columns}, 1, {constants[pad]}]>" for name, pad in _DESCRIBED[of_keys].items()}
    return read | stats


def _of_ptx(ptx: str) -> tuple[int, int]:
    """Registers and spilled bytes by the assembler that Triton brings."""
    from triton.backends.nvidia.compiler import get_ptxas

    target = re.search(r"^\.target\s+(\S+?)(,|$)", ptx, re.MULTILINE)
    assert target is not None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(ptx)
        tool = get_ptxas(int(re.sub(r"\D", "", target.group(1)))).path
        command = [tool, "-v", f"--gpu-name={target.group(1)}", str(path), "-o", str(path.with_suffix(".cubin"))]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers = max(int(n) for n in re.findall(r"Used (\d+) registers", told))
    return registers, sum(int(n) for n in re.findall(r"(\d+) bytes spill stores", told))
