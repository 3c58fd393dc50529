"""Kernels of collectives that are compiled ahead for an architecture."""

from __future__ import annotations

import torch

from megatron_magi.comm import peer_kernels
from megatron_magi.comm.impl import cuda_rows
from megatron_magi.cuda.target import has_peer_kernels

_UNIT = 16
"""Bytes of an access: rows of heads are multiples of it."""


def row_kernels(target: str) -> list[tuple[str, tuple[str, ...]]]:
    """Source and macros of the kernels that move and add rows of heads in 16 bits, as far as an architecture has them.

    Args:
        target: the compiler's name of the architecture.
    """
    found = [cuda_rows.gather_source(_UNIT)]
    for partial in (torch.bfloat16, torch.float16):
        wide = torch.float32
        found.append(cuda_rows.sum_source(partial, wide, _UNIT // wide.itemsize))
        if has_peer_kernels(target):
            found += peer_kernels.needed_kernels(partial, wide)
    return list(dict.fromkeys(found))
