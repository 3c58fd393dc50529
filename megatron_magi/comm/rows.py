"""Row operations in plain torch, on any device: the reference for the kernels.

`megatron_magi.comm.gpu_rows` has those that collectives call for GPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from megatron_magi.comm.row_layout import RowLayout


@dataclass(frozen=True, eq=False)
class Arrivals:
    """For each local row, which arriving rows are its contributions (compressed sparse rows).

    Rows are sorted by their number of contributions, most first, so the k-th contributions are
    those of a prefix of the rows; contributions of a row are in the order of their arrival,
    that is by source rank. Each row is written once: results do not depend on timing.

    Attributes:
        rows: distinct local rows, int64 ``[m]``.
        starts: int64 ``[m + 1]``; row i's contributions are ``sources[starts[i]:starts[i + 1]]``.
        sources: arriving rows, int64 ``[num_arriving]``.
        level_sizes: number of rows with more than k contributions, for each k.
    """

    rows: torch.Tensor
    starts: torch.Tensor
    sources: torch.Tensor
    level_sizes: tuple[int, ...]

    def level(self, k: int) -> torch.Tensor:
        """The k-th contribution of each row that has one, int64 ``[level_sizes[k]]``."""
        return self.sources[self.starts[: self.level_sizes[k]] + k]


def arrival_arrays(local_rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, tuple[int, ...]]:
    """The fields of `Arrivals` for arriving rows that belong to ``local_rows``, int64 ``[num_arriving]``."""
    order = np.argsort(local_rows, kind="stable")
    counts = np.bincount(local_rows)  # rows of a shard are few enough for this, which is faster than to sort or hash
    rows = np.flatnonzero(counts)
    if len(rows) == len(local_rows):  # each row has one, as on two ranks
        return rows, np.arange(len(rows) + 1), order, (len(rows),) if len(rows) else ()
    counts = counts[rows]
    first = np.cumsum(counts) - counts
    by_count = np.argsort(-counts, kind="stable")
    rows, first, counts = rows[by_count], first[by_count], counts[by_count]
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    within = np.arange(len(local_rows), dtype=np.int64) - np.repeat(starts[:-1], counts)
    sources = order[np.repeat(first, counts) + within]
    levels = tuple(int((counts > k).sum()) for k in range(int(counts.max(initial=0))))
    return rows.astype(np.int64), starts, sources.astype(np.int64), levels


def gather_rows(source: torch.Tensor, index: torch.Tensor, out: torch.Tensor) -> None:
    """``out[i] = source[index[i]]``.

    Args:
        source: ``[num_rows, ...]``.
        index: int64 ``[n]``.
        out: ``[n, ...]`` of the same dtype.
    """
    out.copy_(source.index_select(0, index))


def accumulator_dtype(into: torch.dtype, partial: torch.dtype) -> torch.dtype:
    """The dtype in which contributions are summed: at least fp32 for floating-point and complex tensors."""
    dtype = torch.promote_types(into, partial)
    is_float = dtype.is_floating_point or dtype.is_complex
    return torch.promote_types(dtype, torch.float32) if is_float else dtype


def sum_rows(arriving: torch.Tensor, arrivals: Arrivals, into: torch.Tensor) -> None:
    """``into[row] += sum of its contributions``, one after the other, rounded once at the end.

    Args:
        arriving: ``[num_arriving, ...]``.
        into: ``[num_rows, ...]``, changed in place.
    """
    dtype = accumulator_dtype(into.dtype, arriving.dtype)
    total = into.index_select(0, arrivals.rows).to(dtype)
    for k, size in enumerate(arrivals.level_sizes):
        total[:size] += arriving.index_select(0, arrivals.level(k)).to(dtype)
    into.index_copy_(0, arrivals.rows, total.to(into.dtype))


def pack_rows(
    tensors: Sequence[torch.Tensor],
    index: torch.Tensor | None,
    layout: RowLayout,
    buffer: torch.Tensor,
    gather: Callable[..., None] = gather_rows,
) -> None:
    """Row i of ``buffer`` is row ``index[i]`` of all tensors; row i itself without an index.

    Args:
        tensors: ``[num_rows, ...]`` each.
        index: int64 ``[n]`` or None.
        layout: of the tensors.
        buffer: uint8 ``[n, layout.row_bytes]``.
        gather: `gather_rows`, or another implementation of it.
    """
    for x, view in zip(tensors, layout.views(buffer), strict=True):
        if index is None:
            view.copy_(x)
        else:
            gather(x, index, view)


def unpack_rows(
    buffer: torch.Tensor, index: torch.Tensor | None, layout: RowLayout, gather: Callable[..., None] = gather_rows
) -> list[torch.Tensor]:
    """The tensors in a buffer, whose row i is row ``index[i]`` of it: new ones, or views without an index."""
    views = layout.views(buffer)
    if index is None:
        return views
    ordered = [torch.empty(view.shape, dtype=view.dtype, device=view.device) for view in views]
    for view, x in zip(views, ordered, strict=True):
        gather(view, index, x)
    return ordered


class PartialRows(NamedTuple):
    """Partial results of attention.

    Attributes:
        out: ``[num_rows, num_heads, head_dim]``.
        lse: ``[num_rows, num_heads]``.
    """

    out: torch.Tensor
    lse: torch.Tensor


def add_rows(
    buffer: torch.Tensor,
    layout: RowLayout,
    arrivals: Arrivals,
    into: Sequence[torch.Tensor],
    add: Callable[..., None] = sum_rows,
) -> None:
    """`sum_rows`, or ``add``, another implementation of it, of each tensor in a buffer."""
    for view, x in zip(layout.views(buffer), into, strict=True):
        add(view, arrivals, x)


def merge_rows(arriving: PartialRows, arrivals: Arrivals, into: PartialRows) -> None:
    """Merges partial attention results by their log-sum-exp, in place.

    A part whose lse is -inf has seen no key: it is ignored, whatever its output contains. A
    row without any other part gets output 0 and lse -inf. NaN in any other part propagates.
    A part with lse inf, from an infinite sink, has weight 1.

    Args:
        arriving: the parts, ``num_arriving`` rows.
        into: rows that they are merged into.
    """
    (arriving_out, arriving_lse), (out, lse) = arriving, into
    dtype = accumulator_dtype(out.dtype, lse.dtype)
    top = lse.index_select(0, arrivals.rows).to(dtype)
    weight, total = torch.ones_like(top), out.index_select(0, arrivals.rows).to(dtype)
    for k, size in enumerate(arrivals.level_sizes):
        index = arrivals.level(k)
        part_lse = arriving_lse.index_select(0, index).to(dtype)
        new_top = torch.maximum(top[:size], part_lse)
        keep, add = _weight(top[:size], new_top), _weight(part_lse, new_top)
        part = _weighted(arriving_out.index_select(0, index).to(dtype), add)
        total[:size] = _weighted(total[:size], keep) + part
        weight[:size] = weight[:size] * keep + add
        top[:size] = new_top
    merged = torch.where(weight.unsqueeze(-1) == 0, 0.0, total / weight.unsqueeze(-1))
    out.index_copy_(0, arrivals.rows, merged.to(out.dtype))
    lse.index_copy_(0, arrivals.rows, (top + torch.log(weight)).to(lse.dtype))


def _weight(lse: torch.Tensor, top: torch.Tensor) -> torch.Tensor:
    """``exp(lse - top)`` for ``lse <= top``, without inf - inf: 0 where lse is -inf, else 1 where both are equal."""
    return torch.where(lse == -torch.inf, 0.0, torch.where(lse == top, 1.0, torch.exp(lse - top)))


def _weighted(part: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``part * weight``, 0 where the weight is 0 even if the part is not finite; NaN where it is NaN."""
    weight = weight.unsqueeze(-1)
    return torch.where(weight == 0, 0.0, part * weight)
