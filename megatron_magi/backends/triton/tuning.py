"""Sizes of tiles, warps and stages of the kernels, by kind of GPU.

A kind is what bounds the choice: the shared memory that a thread block may use, and whether a warpgroup multiplies
matrices from shared memory (compute capability 9.0) or each warp from registers. Sizes decide speed, never results.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

Kernel = Literal["forward", "query_gradient", "key_gradient"]
LatentKernel = Literal["forward", "scores", "query_gradient", "key_gradient"]
Kind = Literal["small", "medium", "large", "hopper"]

SHARED_BYTES: dict[Kind, int] = {"small": 99 << 10, "medium": 163 << 10, "large": 227 << 10, "hopper": 227 << 10}
"""Shared memory of a thread block, by kind (CUDA C++ Programming Guide, technical specifications)."""

ALIGNMENT = 16
"""Bytes of which addresses and strides of what a descriptor describes are multiples, but the last dimension's."""
ALIGNED_ROWS = ALIGNMENT // 4
"""Rows of lse and delta, fp32 by head, of which passes over queries begin at a multiple if blocks are described."""

NARROW = 2048
"""Keys that queries see on average, up to which a mask is narrow: at 960 small tiles gain, at 4,096 and 8,192 not."""

_KINDS: dict[tuple[int, int], Kind] = {
    (8, 0): "medium",
    (8, 6): "small",
    (8, 7): "medium",
    (8, 9): "small",
    (9, 0): "hopper",
    (10, 0): "large",
    (10, 3): "large",
    (12, 0): "small",
    (12, 1): "small",
}


def kind_of_capability(capability: tuple[int, int]) -> Kind:
    """The kind of a compute capability; the smallest of one that is not known."""
    return _KINDS.get(capability, "small")


def kind_of(device: torch.device) -> Kind:
    """The kind of a GPU; the smallest of GPUs that are not NVIDIA's, and of CPUs, on which kernels are interpreted."""
    if device.type != "cuda" or torch.version.hip is not None:
        return "small"
    return kind_of_capability(torch.cuda.get_device_capability(device))


class Sizes(NamedTuple):
    """Of one kernel.

    Attributes:
        rows: of a tile: queries, or keys for their gradients.
        columns: of a block: keys, or queries.
        warps: of a program.
        stages: blocks that are loaded at a time.
        described: whether blocks are loaded by the tensor memory accelerator, by descriptors, instead of by threads.
    """

    rows: int
    columns: int
    warps: int
    stages: int
    described: bool = False


def padded(dim: int) -> int:
    """The power of two, at least 16, that a head dim is filled up to."""
    return max(16, 1 << (dim - 1).bit_length())


def sizes(
    kernel: Kernel, kind: Kind, dims: tuple[int, int], itemsize: int, *, capped: bool = False, narrow: bool = False
) -> Sizes:
    """The sizes of a kernel.

    Args:
        dims: head dims of q and k, and of v.
        itemsize: bytes of an element.
        capped: with softcap, which decides warps alone: tables of a mask serve calls with and without it.
        narrow: queries see few keys, see `NARROW`.
    """
    width = _width(dims)
    found = (_FP32 if itemsize == 4 else _SIZES[kind])[kernel][width]
    if itemsize == 2 and all(dim * itemsize % ALIGNMENT == 0 for dim in dims):
        found = _DESCRIBED.get((kind, kernel, width), found)
        found = _NARROW.get((kind, kernel, width), found) if narrow else found
    if capped and itemsize == 2:
        found = found._replace(warps=_CAPPED_WARPS.get((kind, kernel, width), found.warps))
    return found


def _width(dims: tuple[int, int]) -> int:
    """Head dims filled up to one of those of the tables below."""
    dim = max(map(padded, dims))
    return 64 if dim <= 64 else 128 if dim <= 128 else 256


def sparse_sizes(kernel: Kernel, dims: tuple[int, int], itemsize: int, places: int) -> Sizes:
    """The sizes of a kernel of attention over lists; other arguments as of `sizes`.

    Args:
        places: rows of a block, of all heads that share it; no more are computed together, but 16, the fewest of a
            product.
    """
    found = (_SPARSE_FP32 if itemsize == 4 else _SPARSE)[kernel][_width(dims)]
    return found._replace(rows=min(found.rows, padded(places)))


def latent_sizes(kernel: LatentKernel, kind: Kind, itemsize: int, group: int) -> Sizes:
    """The sizes of a kernel of attention over lists of latent keys: ``rows`` are query heads, ``columns`` keys.

    Args:
        itemsize: bytes of an element.
        group: query heads of a key head; no more are computed together, but 16, the fewest of a product.
    """
    found = (_LATENT_FP32 if itemsize == 4 else _LATENT[kind])[kernel]
    return found._replace(rows=min(found.rows, padded(group)))


# By head dim, filled up to 64, 128 or 256.
_FP32: dict[Kernel, dict[int, Sizes]] = {
    # Exact products of fp32 use no tensor cores. Registers bound the tile, on every GPU alike: these are sizes that
    # spill few of them; they are not timed.
    "forward": {64: Sizes(64, 32, 8, 1), 128: Sizes(32, 16, 8, 1), 256: Sizes(16, 16, 4, 1)},
    "query_gradient": {64: Sizes(64, 32, 8, 1), 128: Sizes(32, 32, 4, 1), 256: Sizes(16, 16, 4, 1)},
    "key_gradient": {64: Sizes(32, 32, 8, 1), 128: Sizes(32, 32, 8, 1), 256: Sizes(16, 16, 4, 1)},
}
_SMALL: dict[Kernel, dict[int, Sizes]] = {
    # Of 99 KB: q, and two stages of k and v.
    "forward": {64: Sizes(128, 64, 4, 2), 128: Sizes(128, 32, 4, 2), 256: Sizes(64, 32, 8, 1)},
    "query_gradient": {64: Sizes(64, 64, 4, 2), 128: Sizes(64, 32, 4, 2), 256: Sizes(32, 32, 4, 1)},
    "key_gradient": {64: Sizes(64, 64, 4, 2), 128: Sizes(64, 32, 8, 2), 256: Sizes(32, 32, 8, 1)},
}
_LARGE: dict[Kernel, dict[int, Sizes]] = {
    "forward": {64: Sizes(128, 64, 4, 3), 128: Sizes(128, 64, 8, 3), 256: Sizes(64, 32, 4, 2)},
    "query_gradient": {64: Sizes(128, 64, 8, 2), 128: Sizes(128, 64, 8, 2), 256: Sizes(64, 32, 4, 1)},
    "key_gradient": {64: Sizes(128, 64, 8, 2), 128: Sizes(64, 32, 8, 2), 256: Sizes(32, 32, 8, 1)},
}
_HOPPER: dict[Kernel, dict[int, Sizes]] = {
    # One warpgroup has 64 rows of a tile.
    "forward": {64: Sizes(128, 64, 4, 3), 128: Sizes(128, 128, 8, 3), 256: Sizes(128, 64, 8, 2)},
    "query_gradient": {64: Sizes(64, 32, 4, 3), 128: Sizes(128, 64, 8, 3), 256: Sizes(64, 32, 4, 2)},
    "key_gradient": {64: Sizes(64, 64, 4, 3), 128: Sizes(64, 32, 4, 3), 256: Sizes(32, 32, 8, 1)},
}
_SIZES: dict[Kind, dict[Kernel, dict[int, Sizes]]] = {
    "small": _SMALL, "medium": _LARGE, "large": _LARGE, "hopper": _HOPPER,
}  # fmt: skip
_DESCRIBED: dict[tuple[Kind, Kernel, int], Sizes] = {
    # Loads by threads need addresses, for which 64 rows and 64 columns leave no registers. Not measured on "large".
    ("hopper", "query_gradient", 64): Sizes(64, 64, 4, 3, described=True),
    ("hopper", "key_gradient", 64): Sizes(64, 64, 4, 3, described=True),
    ("hopper", "key_gradient", 128): Sizes(64, 64, 4, 2, described=True),
}
_NARROW: dict[tuple[Kind, Kernel, int], Sizes] = {
    # 0.80 to 0.89 (forward) and 0.92 to 0.98 of the time with 128 rows, of which fewer share their keys.
    ("hopper", "forward", 128): Sizes(64, 64, 4, 3, described=True),
    ("hopper", "query_gradient", 128): Sizes(64, 64, 4, 2, described=True),
}
_CAPPED_WARPS: dict[tuple[Kind, Kernel, int], int] = {
    # With 4 warps, the fastest without softcap, 296 bytes of registers a thread are spilled, with 8 none.
    ("hopper", "key_gradient", 128): 8,
}

# Of lists: they fit the smallest kind, and are not timed. Columns divide 64, the smallest block of keys.
_SPARSE: dict[Kernel, dict[int, Sizes]] = {
    "forward": {64: Sizes(64, 64, 4, 2), 128: Sizes(64, 32, 4, 2), 256: Sizes(64, 32, 8, 1)},
    "query_gradient": {64: Sizes(64, 64, 4, 2), 128: Sizes(64, 32, 4, 2), 256: Sizes(32, 32, 8, 1)},
    "key_gradient": {64: Sizes(64, 64, 8, 2), 128: Sizes(64, 32, 8, 2), 256: Sizes(32, 32, 8, 1)},
}
_SPARSE_FP32: dict[Kernel, dict[int, Sizes]] = _FP32 | {
    "query_gradient": {64: Sizes(64, 32, 8, 1), 128: Sizes(32, 32, 8, 1), 256: Sizes(16, 16, 4, 1)},
}

# Of latent keys, of up to 512 elements and 64 behind: they spill few registers and are not timed. In the backward tiles
# are of 128 elements of a row; see `latent_kernels`.
_LATENT: dict[Kind, dict[LatentKernel, Sizes]] = {
    "small": {
        "forward": Sizes(64, 16, 8, 2), "scores": Sizes(64, 64, 4, 2), "query_gradient": Sizes(64, 64, 4, 3),
        "key_gradient": Sizes(32, 64, 8, 2),
    },
    "medium": {
        "forward": Sizes(64, 32, 8, 2), "scores": Sizes(128, 64, 8, 3), "query_gradient": Sizes(64, 64, 4, 3),
        "key_gradient": Sizes(64, 64, 8, 2),
    },
    "large": {
        "forward": Sizes(64, 32, 8, 2), "scores": Sizes(128, 64, 8, 3), "query_gradient": Sizes(128, 64, 8, 3),
        "key_gradient": Sizes(64, 64, 8, 2),
    },
    "hopper": {
        "forward": Sizes(64, 64, 8, 2), "scores": Sizes(128, 128, 8, 3), "query_gradient": Sizes(128, 64, 8, 3),
        "key_gradient": Sizes(64, 64, 8, 2),
    },
}  # fmt: skip
_LATENT_FP32: dict[LatentKernel, Sizes] = {
    "forward": Sizes(16, 16, 8, 1), "scores": Sizes(32, 32, 4, 1), "query_gradient": Sizes(32, 32, 4, 1),
    "key_gradient": Sizes(16, 32, 8, 1),
}  # fmt: skip
