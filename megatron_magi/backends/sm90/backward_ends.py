"""Kernels before and after the backward kernels: row statistics, zeros, and conversion of sums to gradients."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_magi.backends.sm90 import kernels as hopper_kernels
from megatron_magi.backends.sm90.choices import BackwardChoice
from megatron_magi.backends.sm90.kernels import if_captured
from megatron_magi.backends.sm90.params import (
    CapturedFinishKeysParams,
    CapturedPrepareParams,
    FinishKeysParams,
    FinishParams,
    GatedFinishKeysParams,
    PrepareDeltaParams,
    PrepareParams,
    RowDeltaParams,
)
from megatron_magi.backends.sm90.support import check_support, in_dtype, loadable
from megatron_magi.cuda.launch import Launch, prepared
from megatron_magi.cuda.streams import current_stream
from megatron_magi.operands.merge import row_products

_SUMS_ALIGNMENT = 32  # floats: a cache line
_FINISHED_ROWS = 64  # rows of a thread block of the kernel that finishes dq
_ZEROING_BLOCKS = 1024
_STATS_HEADS, _DELTA_HEADS = 32, 8  # heads (of 32 rows) of a thread block of the prepare kernel; if it computes delta
_DELTA_ELEMENTS = 8 * 256 * 4  # elements of out of a thread block of the kernel for delta


def row_delta(dout: Tensor, out: Tensor, memo: dict | None = None) -> Tensor:
    """``rowsum(dout * out)``, fp32 ``[num_rows, num_heads_q]``; for an fp32 ``out``, as in stages, computed by torch.

    ``memo`` caches the launch for calls that differ only in addresses, strides and the dtype of ``dout``.

    Raises:
        ValueError: the device or head dim is not supported.
    """
    if memo:
        known = memo.get((dout.dtype, dout.stride(), out.stride()))
        if known is not None and not (dout.data_ptr() | out.data_ptr()) % 16:
            return _fire_delta(known, dout, out)
    num_rows, num_heads, head_dim = out.shape
    if out.dtype.itemsize > 2:
        return row_products(dout, out)
    check_support(out, (head_dim, head_dim))
    given = dout, out
    dout, out = loadable(in_dtype(dout, out.dtype)), loadable(out)
    if not out.numel():
        return torch.empty((num_rows, num_heads), dtype=torch.float32, device=out.device)

    def make() -> Launch:
        params = RowDeltaParams(
            dout_row=dout.stride(0), dout_head=dout.stride(1), out_row=out.stride(0), out_head=out.stride(1),
            num_rows=num_rows, num_heads=num_heads,
        )  # fmt: skip
        defines = (f"HEAD_DIM_V={head_dim}", hopper_kernels.element(out.dtype))
        kernel = hopper_kernels.small_kernel(out.device, "row_delta", defines)
        lanes = 1 << (head_dim // 8 - 1).bit_length()
        return Launch(kernel, -(-num_rows * num_heads * lanes * 8 // _DELTA_ELEMENTS), params)

    launch = prepared(("row_delta", out.device, out.dtype, out.shape, dout.stride(), out.stride()), make)
    if memo is not None and given[0] is dout and given[1] is out:
        memo[dout.dtype, dout.stride(), out.stride()] = launch
    return _fire_delta(launch, dout, out)


def _fire_delta(launch: Launch, dout: Tensor, out: Tensor) -> Tensor:
    delta = out.new_empty(*out.shape[:2], dtype=torch.float32)
    with launch.lock:
        params = launch.params
        params.dout, params.out, params.delta = dout.data_ptr(), out.data_ptr(), delta.data_ptr()
        launch.fire(current_stream(out.device))
    return delta


def padded(num_rows: int, block: int) -> int:
    """Number of rows, padded for the reads of the last block."""
    return -(-num_rows // 32) * 32 + block


class RowMemory(NamedTuple):
    """Sizes of row statistics and of sums of dq, in fp32 numbers.

    Attributes:
        rows: rows of the statistics of a head, with padding.
        stats: size of lse, equal to that of -delta, over all heads.
        sums: size of the sums of dq.
        splits_stats: statistics are split into bf16 terms, see `kernels.splits_stats`.
    """

    rows: int
    stats: int
    sums: int
    splits_stats: bool

    @classmethod
    def of(
        cls, num_rows: int, num_heads: int, dims: tuple[int, int], dtype: torch.dtype, softcap: float,
        choice: BackwardChoice,
    ) -> RowMemory:  # fmt: skip
        """For tensors of ``dtype`` and the kernels of a choice; ``dims``: the head dims of these."""
        rows = padded(num_rows, choice.shape[1])
        splits = hopper_kernels.splits_stats(dtype, dims, softcap > 0, choice.adds_dq)
        stats = -(-num_heads * rows * (1 + splits) // _SUMS_ALIGNMENT) * _SUMS_ALIGNMENT
        return cls(rows, stats, num_heads * rows * dims[0] if choice.adds_dq else 0, splits)


def stats_launch(
    lse: Tensor,
    delta: Tensor,
    rows: int,
    packed: int,
    zeroes: bool,
    split: float = 0.0,
    of_delta: tuple[Tensor, Tensor] | None = None,
    numbers: int = 0,
) -> Launch:
    """Writes row statistics, fp32 ``[num_heads / packed, rows * packed]`` each; with ``zeroes`` also zeroes sums.

    Args:
        lse, delta: fp32 ``[num_rows, num_heads]``.
        rows: rows with padding.
        packed: heads that count as one, with their rows interleaved.
        split: writes 16 bytes a row instead of two numbers, as SPLIT_STATS of the backward kernel takes them for this
            scale of logits (times log2 e).
        numbers: address of a mask's numbers, if these are in memory; ``num_key_sums`` is then per tile.
        of_delta: dout and out, from which delta is computed.
    """
    num_rows, num_heads = lse.shape
    assert not (numbers and of_delta)
    strides, macros = {}, if_captured(numbers > 0)
    if of_delta is not None:
        dout, out = of_delta
        strides = {"dout_row": dout.stride(0), "dout_head": dout.stride(1),
                   "out_row": out.stride(0), "out_head": out.stride(1)}  # fmt: skip
        macros = hopper_kernels.delta_macros(out.dtype, out.shape[2])

    def make() -> Launch:
        kind = PrepareParams if of_delta is None else PrepareDeltaParams
        params = (partial(CapturedPrepareParams, numbers=numbers) if numbers else kind)(
            lse_row=lse.stride(0), lse_head=lse.stride(1), delta_row=delta.stride(0), delta_head=delta.stride(1),
            num_rows=num_rows, num_heads=num_heads, stats_row=rows * packed, log2_packed=packed.bit_length() - 1,
            split=-1.0 / split if split else 0.0,
            **strides,
        )  # fmt: skip
        blocks = rows // 32 * -(-num_heads // (_STATS_HEADS if of_delta is None else _DELTA_HEADS))
        blocks = max(blocks, _ZEROING_BLOCKS if zeroes else 1)
        return Launch(hopper_kernels.small_kernel(lse.device, "preprocess", macros), blocks, params)

    key = (
        "preprocess", numbers, lse.device, rows, packed, lse.shape, lse.stride(), delta.stride(), zeroes, split, macros,
        *strides.values(),
    )  # fmt: skip
    return prepared(key, make)


def finish_dq_launch(
    dq: Tensor, units: int, dtype: torch.dtype, scale: float, store: int, concurrent: bool = False
) -> Launch:
    """Writes scale times the sums, ``units`` of 16 rows a head, to dq, or adds them to it.

    ``concurrent``: runs concurrently with the preceding kernel on the stream, which started when the sums were
    complete.
    """
    num_rows, num_heads, head_dim = dq.shape

    def make() -> Launch:
        blocks = -(-num_rows // _FINISHED_ROWS)
        params = FinishParams(
            dq_row=dq.stride(0), dq_head=dq.stride(1), num_rows=num_rows, blocks=blocks,
            units=units, store=store, scale=scale,
        )  # fmt: skip
        defines = hopper_kernels.finish_dq_macros(dtype, head_dim, concurrent)
        return Launch(hopper_kernels.small_kernel(dq.device, "postprocess_dq", defines), num_heads * blocks, params)

    return prepared(("postprocess_dq", dq.device, dtype, store, scale, units, concurrent, dq.shape, dq.stride()), make)


def finish_keys_launch(
    dk: Tensor,
    dv: Tensor,
    dtype: torch.dtype,
    scale: float,
    store: int,
    stream_kv: bool = False,
    numbers: int = 0,
) -> Launch:
    """Writes the sums of the first tiles to dk (times scale) and dv, or adds them; 4 thread blocks a tile and key head.

    ``stream_kv``: some tiles are of fetched keys, with separate gradients; ``numbers``: address of a mask's numbers, if
    these are in memory; the grid may then be larger than needed.
    """
    heads_kv, dim = dk.shape[1:]

    def make() -> Launch:
        captured = partial(CapturedFinishKeysParams, numbers=numbers)
        kind = GatedFinishKeysParams if stream_kv else captured if numbers else FinishKeysParams
        params = kind(
            heads_kv=heads_kv, store=store, scale=scale,
            dk_row=dk.stride(0), dk_head=dk.stride(1), dv_row=dv.stride(0), dv_head=dv.stride(1),
        )  # fmt: skip
        defines = hopper_kernels.finish_keys_macros(dtype, dim, stream_kv, numbers > 0)
        return Launch(hopper_kernels.small_kernel(dk.device, "postprocess_keys", defines), 1, params)

    of_layout = store, scale, heads_kv, dim, dk.stride(), dv.stride()
    return prepared(("postprocess_keys", stream_kv, numbers, dk.device, dtype, *of_layout), make)
