"""Row operations as Triton kernels: the functions of `megatron_magi.comm.rows`, for GPUs.

No atomics anywhere: each output element is written by one program, in a fixed order of sums.
Offsets are 64-bit: rows times row length passes 2^31 at a million tokens.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from math import prod

import torch
import triton
import triton.language as tl

from megatron_magi.comm.rows import Arrivals, PartialRows, accumulator_dtype

_TILE = 2048
"""Elements a program handles at a time: enough for 16-byte accesses by all threads of 4 warps."""

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}

_TL_DTYPES = {
    torch.float32: tl.float32,
    torch.float64: tl.float64,
    torch.int8: tl.int8,
    torch.uint8: tl.uint8,
    torch.int16: tl.int16,
    torch.int32: tl.int32,
    torch.int64: tl.int64,
}


def gather_rows(source: torch.Tensor, index: torch.Tensor, out: torch.Tensor) -> None:
    """``out[i] = source[index[i]]``; see `megatron_magi.comm.rows.gather_rows`."""
    if out.numel() == 0:
        return
    # Bits are moved, not numbers: the widest integer that divides every row and stride serves all dtypes.
    source, out = _as_words(_flat_rows(source), _flat_rows(out))
    num_rows, width = out.shape
    block = min(triton.next_power_of_2(width), _TILE)
    block_rows = _TILE // block
    grid = (triton.cdiv(num_rows, block_rows), triton.cdiv(width, block))
    with _device_of(out):
        _gather_kernel[grid](
            source, index, out, num_rows, width, source.stride(0), out.stride(0), BLOCK_ROWS=block_rows, BLOCK=block
        )


def sum_rows(arriving: torch.Tensor, arrivals: Arrivals, into: torch.Tensor) -> None:
    """``into[row] += sum of its contributions``; see `megatron_magi.comm.rows.sum_rows`."""
    num_rows = arrivals.rows.numel()
    if num_rows == 0 or arriving.numel() == 0:
        return
    dtype = _TL_DTYPES[accumulator_dtype(into.dtype, arriving.dtype)]
    arriving, into = _flat_rows(arriving), _flat_rows(into)
    width = into.shape[1]
    block = min(triton.next_power_of_2(width), _TILE)
    with _device_of(into):
        _sum_kernel[num_rows, triton.cdiv(width, block)](
            arriving,
            arrivals.rows,
            arrivals.starts,
            arrivals.sources,
            into,
            width,
            arriving.stride(0),
            into.stride(0),
            DTYPE=dtype,
            BLOCK=block,
        )


def merge_rows(arriving: PartialRows, arrivals: Arrivals, into: PartialRows) -> None:
    """Merges partial attention results by their lse; see `megatron_magi.comm.rows.merge_rows`."""
    (arriving_out, arriving_lse), (out, lse) = arriving, into
    num_rows = arrivals.rows.numel()
    if num_rows == 0 or arriving_out.numel() == 0:
        return
    dtype = _TL_DTYPES[accumulator_dtype(out.dtype, lse.dtype)]
    num_heads, head_dim = out.shape[1:]
    strides = [_flat_rows(x).stride(0) for x in (arriving_out, arriving_lse, out, lse)]
    with _device_of(out):
        _merge_kernel[num_rows, num_heads](
            arriving_out,
            arriving_lse,
            arrivals.rows,
            arrivals.starts,
            arrivals.sources,
            out,
            lse,
            head_dim,
            *strides,
            DTYPE=dtype,
            BLOCK=triton.next_power_of_2(head_dim),
        )


def _flat_rows(x: torch.Tensor) -> torch.Tensor:
    """``[n, ...]`` as ``[n, width]`` with a last stride of 1; a view where rows are contiguous."""
    width = prod(x.shape[1:])
    if width == 1:
        return x.reshape(x.shape[0]).unsqueeze(1)
    x = x.reshape(x.shape[0], width)
    return x if x.stride(1) == 1 else x.contiguous()


def _as_words(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Views of ``[n, width]`` tensors of one dtype as the widest integers that fit all of them."""
    for size, dtype in _WORDS.items():
        lengths = [n * x.element_size() for x in tensors for n in (x.shape[1], x.stride(0), x.storage_offset())]
        if all(n % size == 0 for n in lengths) and all(x.data_ptr() % size == 0 for x in tensors):
            return [x.view(dtype) for x in tensors]
    raise AssertionError("a byte divides everything")


def _device_of(x: torch.Tensor) -> AbstractContextManager:
    """Launches go to the current device, which need not be that of the tensors."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


@triton.jit(do_not_specialize=["num_rows"])
def _gather_kernel(
    source, index, out, num_rows, width, source_stride, out_stride, BLOCK_ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_row = row < num_rows
    origin = tl.load(index + row, mask=is_row, other=0)
    mask = is_row[:, None] & (column < width)[None, :]
    value = tl.load(source + origin[:, None] * source_stride + column[None, :], mask=mask)
    tl.store(out + row[:, None] * out_stride + column[None, :], value, mask=mask)


@triton.jit
def _sum_kernel(
    arriving,
    rows,
    starts,
    sources,
    into,
    width,
    arriving_stride,
    into_stride,
    DTYPE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    # Loaded as int64, so offsets are 64-bit.
    address = into + tl.load(rows + at) * into_stride + column
    total = tl.load(address, mask=mask, other=0).to(DTYPE)
    for i in range(tl.load(starts + at), tl.load(starts + at + 1)):
        origin = tl.load(sources + i)
        total += tl.load(arriving + origin * arriving_stride + column, mask=mask, other=0).to(DTYPE)
    tl.store(address, total.to(into.dtype.element_ty), mask=mask)


@triton.jit
def _merge_kernel(
    arriving_out,
    arriving_lse,
    rows,
    starts,
    sources,
    out,
    lse,
    head_dim,
    arriving_out_stride,
    arriving_lse_stride,
    out_stride,
    lse_stride,
    DTYPE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0)
    head = tl.program_id(1)
    column = tl.arange(0, BLOCK)
    mask = column < head_dim
    row = tl.load(rows + at)
    lse_address = lse + row * lse_stride + head
    out_address = out + row * out_stride + head * head_dim + column
    minus_infinity = float("-inf")
    top = tl.load(lse_address).to(DTYPE)
    # A part that saw no key counts nothing, even if its output is not finite.
    weight = tl.where(top == minus_infinity, 0.0, 1.0).to(DTYPE)
    total = tl.load(out_address, mask=mask, other=0).to(DTYPE)
    total = tl.where(weight == 0, 0.0, total)
    for i in range(tl.load(starts + at), tl.load(starts + at + 1)):
        origin = tl.load(sources + i)
        part_lse = tl.load(arriving_lse + origin * arriving_lse_stride + head).to(DTYPE)
        part = tl.load(arriving_out + origin * arriving_out_stride + head * head_dim + column, mask=mask, other=0)
        # The maximum, NaN where either is: hardware's own drops NaN.
        new_top = tl.where((part_lse > top) | (part_lse != part_lse), part_lse, top)
        # Without inf - inf: a part without keys weighs 0, else the largest weighs 1.
        keep = tl.where(top == new_top, 1.0, tl.exp(top - new_top))
        keep = tl.where(top == minus_infinity, 0.0, keep)
        add = tl.where(part_lse == new_top, 1.0, tl.exp(part_lse - new_top))
        add = tl.where(part_lse == minus_infinity, 0.0, add)
        total = tl.where(keep == 0, 0.0, total * keep) + tl.where(add == 0, 0.0, part.to(DTYPE) * add)
        weight = weight * keep + add
        top = new_top
    # Weights are sums of exponentials: 0, positive, or NaN, which stays visible.
    merged = tl.where(weight == 0, 0.0, total / tl.where(weight == 0, 1.0, weight))
    tl.store(out_address, merged.to(out.dtype.element_ty), mask=mask)
    # log of 0 is -inf, and so is top then.
    tl.store(lse_address, (top + tl.log(weight)).to(lse.dtype.element_ty))
