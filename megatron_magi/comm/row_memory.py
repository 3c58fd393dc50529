"""Rows as the kernels of ``csrc/group_collective`` see them: where they lie, and what can be added to what."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_magi.comm.row_layout import RowLayout

MOST_TENSORS = 4
"""Tensors of one launch."""
WIDEST = 16
"""Bytes of an access."""
ELEMENTS = {torch.bfloat16: "BFloat", torch.float16: "Half", torch.float32: "float", torch.float64: "double"}
"""Names of the types of rows that are added."""

Rows = tuple[int, int, int]
"""Rows in memory: address, bytes from one to the next, bytes of one."""


def with_rows(x: Tensor) -> Tensor:
    """The tensor, or a copy, with contiguous rows."""
    return x if x.is_contiguous() or x[0].is_contiguous() else x.contiguous()


def can_add(layout: RowLayout, into: Sequence[Tensor]) -> bool:
    """Whether rows of ``layout`` are added to ``into``: of equal dtypes and widths, of 16 or 32 bits, or all of 64."""
    partial, wide = layout.dtypes[0], into[0].dtype
    if len(into) > MOST_TENSORS or not {partial, wide} <= ELEMENTS.keys():
        return False
    equal = all(t == partial for t in layout.dtypes) and all(x.dtype == wide for x in into)
    return equal and (partial == torch.float64) == (wide == torch.float64)
