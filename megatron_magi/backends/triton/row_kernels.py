"""Kernels of the backward beside its products: sums of rows; lse and delta by head, as its other kernels read them."""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_magi.backends.triton.kernels import LOG2_E, _rows


@triton.jit(do_not_specialize=["num_rows", "num_heads"])
def row_delta_kernel(
    dout, out, delta, num_rows, num_heads, dout_row, dout_head, out_row, out_head, delta_row, delta_head,
    DV: tl.constexpr, PAD_V: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """rowsum(dout * out) of ``ROWS`` rows of one head; an output of 0 counts as 0 whatever its gradient is."""
    row, head = tl.program_id(0) // num_heads * ROWS, tl.cast(tl.program_id(0) % num_heads, tl.int64)
    result = _rows(out + head * out_head, row, num_rows, out_row, ROWS, DV, PAD_V, True).to(tl.float32)
    grad = _rows(dout + head * dout_head, row, num_rows, dout_row, ROWS, DV, PAD_V, True).to(tl.float32)
    found = tl.sum(tl.where(result == 0, 0.0, grad * result), 1)
    rows = row + tl.arange(0, ROWS)
    tl.store(delta + tl.cast(rows, tl.int64) * delta_row + head * delta_head, found, mask=rows < num_rows)


@triton.jit(
    do_not_specialize=[
        "num_rows", "num_heads", "head_blocks", "room", "lse_row", "lse_head", "delta_row", "delta_head",
    ]
)  # fmt: skip
def by_head_kernel(
    lse, delta, out_lse, out_delta, num_rows, num_heads, head_blocks, room, lse_row, lse_head, delta_row, delta_head,
    ROWS: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Writes lse, in base 2 and 0 of rows that see nothing, and delta by head, ``room`` elements from head to head."""
    rows = tl.program_id(0) // head_blocks * ROWS + tl.arange(0, ROWS)
    heads = tl.program_id(0) % head_blocks * HEADS + tl.arange(0, HEADS)
    there = (rows < num_rows)[:, None] & (heads < num_heads)[None, :]
    i, j = tl.cast(rows, tl.int64)[:, None], tl.cast(heads, tl.int64)[None, :]
    row_lse = tl.load(lse + i * lse_row + j * lse_head, mask=there, other=0.0).to(tl.float32)
    row_lse = tl.where(row_lse == float("-inf"), 0.0, row_lse * LOG2_E)
    row_delta = tl.load(delta + i * delta_row + j * delta_head, mask=there, other=0.0).to(tl.float32)
    tl.store(out_lse + j * room + i, row_lse, mask=there)
    tl.store(out_delta + j * room + i, row_delta, mask=there)
