"""Row operations on GPUs: our CUDA kernels if supported, else Triton kernels. See `megatron_magi.comm.rows`."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from megatron_magi.comm import rows
from megatron_magi.comm.impl import cuda_rows, triton_rows
from megatron_magi.comm.impl.triton_rows import merge_rows
from megatron_magi.comm.row_layout import RowLayout
from megatron_magi.comm.rows import Arrivals

__all__ = ["add_rows", "merge_rows", "pack_rows", "unpack_rows"]


def pack_rows(tensors: Sequence[Tensor], index: Tensor | None, layout: RowLayout, buffer: Tensor) -> None:
    """See `megatron_magi.comm.rows.pack_rows`."""
    if cuda_rows.runs_on(buffer.device):
        cuda_rows.pack_rows(tensors, index, layout, buffer)
    else:
        rows.pack_rows(tensors, index, layout, buffer, triton_rows.gather_rows)


def unpack_rows(buffer: Tensor, index: Tensor | None, layout: RowLayout) -> list[Tensor]:
    """See `megatron_magi.comm.rows.unpack_rows`."""
    if cuda_rows.runs_on(buffer.device):
        return cuda_rows.unpack_rows(buffer, index, layout)
    return rows.unpack_rows(buffer, index, layout, triton_rows.gather_rows)


def add_rows(buffer: Tensor, layout: RowLayout, arrivals: Arrivals, into: Sequence[Tensor]) -> None:
    """See `megatron_magi.comm.rows.add_rows`."""
    if cuda_rows.runs_on(buffer.device) and cuda_rows.can_add(layout, into):
        cuda_rows.add_rows(buffer, layout, arrivals, into)
    else:
        rows.add_rows(buffer, layout, arrivals, into, triton_rows.sum_rows)
