"""Attention by the kernels in Triton: launches over the tables of a mask."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_magi.backends.triton import support
from megatron_magi.backends.triton.tables import DeviceTables, Tiling, is_narrow, tables_of
from megatron_magi.backends.triton.tuning import ALIGNED_ROWS, ALIGNMENT, Kernel, Sizes, kind_of, padded, sizes
from megatron_magi.operands.merge import row_products
from megatron_magi.operands.options import AttnOptions
from megatron_magi.operands.passes import BackwardInputs, ForwardInputs, ForwardOutput, Gradients
from megatron_magi.operands.sparse_pattern import num_blocks

LOG2_E = math.log2(math.e)
_MOST_STRIDE = 1 << 21
"""Strides of rows up to here: offsets inside a block of 256 rows are of 32 bits."""
_ROWS, _HEADS = 64, 16
"""Rows, and heads, of a program of the kernels over rows."""


@cache
def kernels() -> ModuleType:
    """The kernels; imported when they are first used, as Triton is not everywhere."""
    from megatron_magi.backends.triton import kernels as module

    return module


@cache
def descriptors() -> Callable[..., Any]:
    """Makes descriptors of tensors, likewise."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor


@cache
def row_kernels() -> ModuleType:
    """Those over rows, likewise."""
    from megatron_magi.backends.triton import row_kernels as module

    return module


@cache
def sparse_kernels() -> ModuleType:
    """Those of attention over lists, likewise."""
    from megatron_magi.backends.triton import sparse_kernels as module

    return module


@cache
def latent_kernels() -> ModuleType:
    """Those of attention over lists of latent keys, likewise."""
    from megatron_magi.backends.triton import latent_kernels as module

    return module


@torch.no_grad()
def forward(inputs: ForwardInputs, bands: np.ndarray, options: AttnOptions, output: ForwardOutput) -> None:
    """See `megatron_magi.backends.base.Backend.forward`."""
    q, k, v, sink_lse = inputs
    _require(q.device, q.dtype, (q.shape[2], v.shape[2]))
    q, k, v = (readable(x) for x in (q, k, v))
    out, lse, merges, max_logits = output
    (num_rows, num_heads, _), num_keys = q.shape, k.shape[0]
    row_max = lse
    if max_logits is not None:
        row_max = torch.empty_strided(lse.shape, lse.stride(), dtype=torch.float32, device=q.device)
    found, tables = _launch("forward", q, k, v, bands, options)
    scale, cap = _logit_factors(options)
    sink = lse if sink_lse is None else sink_lse.expand(lse.shape)
    if tables is not None:
        (read_k, read_v), described = _read((k, v), found)
        kernels().forward_kernel[(tables.tiles.shape[0] * num_heads,)](
            q, read_k, read_v, out, lse, row_max, sink,
            tables.tiles, tables.passes, tables.bounds, num_rows, num_keys, num_heads,
            *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *out.stride()[:2], *lse.stride(), *sink.stride(),
            scale, cap, **_shape(q, k, v, found), CAPPED=bool(options.softcap), HAS_SINK=sink_lse is not None,
            MERGES=merges, KEEPS_MAX=max_logits is not None, DESCRIBED=described,
        )  # fmt: skip
    if max_logits is not None and num_rows:
        torch.amax(row_max, dim=0, out=max_logits)


@torch.no_grad()
def row_delta(dout: Tensor, out: Tensor) -> Tensor:
    """See `megatron_magi.backends.base.Backend.row_delta`; of an fp64 ``out``, which kernels do not take, by torch."""
    num_rows, num_heads, dim = out.shape
    if out.dtype == torch.float64:
        return row_products(dout, out)
    delta = torch.empty((num_rows, num_heads), dtype=torch.float32, device=out.device)
    if delta.numel():
        dout, out = readable(dout), readable(out)
        row_kernels().row_delta_kernel[(num_blocks(num_rows, _ROWS) * num_heads,)](
            dout, out, delta, num_rows, num_heads, *dout.stride()[:2], *out.stride()[:2], *delta.stride(),
            DV=dim, PAD_V=padded(dim), ROWS=_ROWS,
        )  # fmt: skip
    return delta


@torch.no_grad()
def backward(inputs: BackwardInputs, bands: np.ndarray, options: AttnOptions, grads: Gradients) -> None:
    """See `megatron_magi.backends.base.Backend.backward`."""
    q, k, v, dout, lse, delta = inputs
    _require(q.device, q.dtype, (q.shape[2], v.shape[2]))
    q, k, v, dout = (readable(x) for x in (q, k, v, dout.to(q.dtype)))
    num_rows, num_keys = q.shape[0], k.shape[0]
    scale, cap = _logit_factors(options)
    strides = [s for x in (q, k, v, dout) for s in x.stride()[:2]]
    lse, delta = _by_head(lse, delta)
    room = lse.stride(0)
    found, tables = _launch("query_gradient", q, k, v, bands, options)
    if tables is not None:
        (read_k, read_v), described = _read((k, v), found)
        kernels().query_gradient_kernel[(tables.tiles.shape[0] * q.shape[1],)](
            q, read_k, read_v, dout, lse, delta, grads.dq, tables.tiles, tables.passes, tables.bounds, num_rows,
            num_keys, q.shape[1], room, *strides, *grads.dq.stride()[:2], scale, cap, options.softmax_scale,
            **_shape(q, k, v, found), CAPPED=bool(options.softcap), ADDS=grads.accumulate_dq,
            DESCRIBED=described,
        )  # fmt: skip
    found, tables = _launch("key_gradient", q, k, v, bands, options)
    if tables is not None:
        (read_q, read_dout, *read_stats), described = _read((q, dout, lse, delta), found)
        kernels().key_gradient_kernel[(tables.tiles.shape[0] * k.shape[1],)](
            read_q, k, v, read_dout, *read_stats, grads.dk, grads.dv, tables.tiles, tables.passes, tables.bounds,
            num_rows, k.shape[1], room, *strides, *grads.dk.stride()[:2], *grads.dv.stride()[:2], scale, cap,
            options.softmax_scale, **_shape(q, k, v, found), CAPPED=bool(options.softcap),
            ADDS=grads.accumulate_keys, DESCRIBED=described,
        )  # fmt: skip


def _by_head(lse: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
    """lse, as kernels of the backward read it, and delta: fp32 ``[num_heads, num_rows]``; each head begins aligned."""
    num_rows, num_heads = lse.shape
    room = num_blocks(num_rows, ALIGNED_ROWS) * ALIGNED_ROWS
    made = [torch.empty((num_heads, room), dtype=torch.float32, device=lse.device) for _ in range(2)]
    if lse.numel():
        heads = num_blocks(num_heads, _HEADS)
        row_kernels().by_head_kernel[(num_blocks(num_rows, _ROWS) * heads,)](
            lse, delta, *made, num_rows, num_heads, heads, room, *lse.stride(), *delta.stride(),
            ROWS=_ROWS, HEADS=_HEADS,
        )  # fmt: skip
    return made[0][:, :num_rows], made[1][:, :num_rows]


def _read(tensors: Sequence[Tensor], found: Sizes) -> tuple[Sequence[Any], bool]:
    """What a kernel reads block by block, as it takes it: as descriptors or not, which is the second result."""
    described = found.described and all(x.numel() for x in tensors)
    return ([_descriptor(x, found.columns) for x in tensors] if described else tensors), described


def _descriptor(x: Tensor, columns: int) -> Any:
    """Of blocks of rows of ``[num_rows, num_heads, dim]``, or of lse or delta, ``[num_heads, num_rows]``.

    A tensor whose rows or heads are not aligned is copied.
    """
    if x.dim() == 2:
        return descriptors()(x, [*x.shape], [*x.stride()], [1, columns])
    units = [s * x.element_size() for s in x.stride()[:2]]
    if x.data_ptr() % ALIGNMENT or any(n <= 0 or n % ALIGNMENT for n in units):
        x = x.clone(memory_format=torch.contiguous_format)
    return descriptors()(x, [*x.shape], [*x.stride()], [columns, 1, padded(x.shape[2])])


@cache
def _require(device: torch.device, dtype: torch.dtype, dims: tuple[int, int]) -> None:
    """Raises ValueError for tensors that the kernels do not take; those that they take are looked at once."""
    if (reason := support.why_not(device, dtype, dims)) is not None:
        raise ValueError(reason)


def _launch(
    kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, bands: np.ndarray, options: AttnOptions
) -> tuple[Sizes, DeviceTables | None]:
    """Sizes of a kernel and the tables that it reads; None where it has nothing to write."""
    dims, capped = (q.shape[2], v.shape[2]), bool(options.softcap)
    narrow = is_narrow(bands, q.shape[0])
    found = sizes(kernel, kind_of(q.device), dims, q.element_size(), capped=capped, narrow=narrow)
    tiling = Tiling.of(kernel, found, q.shape[0], k.shape[0])
    if not tiling.num_rows:
        return found, None
    tables = tables_of(bands, tiling, q.device)
    tables.hold_for_stream()
    return found, tables


def _logit_factors(options: AttnOptions) -> tuple[float, float]:
    """``scale`` and ``cap`` of `forward_kernel`."""
    if options.softcap:
        return options.softmax_scale / options.softcap, options.softcap * LOG2_E
    return options.softmax_scale * LOG2_E, 0.0


def _shape(q: Tensor, k: Tensor, v: Tensor, found: Sizes) -> dict[str, Any]:
    """What kernels are compiled for."""
    dims = q.shape[2], v.shape[2]
    return {
        "GROUP": q.shape[1] // k.shape[1],
        "DK": dims[0],
        "DV": dims[1],
        "PAD_K": padded(dims[0]),
        "PAD_V": padded(dims[1]),
        "ROWS": found.rows,
        "COLUMNS": found.columns,
        "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32",
        "num_warps": found.warps,
        "num_stages": found.stages,
    }


def readable(x: Tensor) -> Tensor:
    """The tensor, or a copy that kernels can read: elements of a row next to each other, rows not too far apart."""
    return x if x.stride(2) == 1 and 0 <= x.stride(0) < _MOST_STRIDE else x.contiguous()
