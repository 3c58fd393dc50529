"""The kernels: forward; gradients of keys and values; gradient of queries. Nothing is added atomically.

A program computes one tile of rows for one head, over the passes of its tile (`megatron_magi.backends.tiles.tiles`):
first the blocks of a pass that all rows see, then those in which each row has an interval of its own. Logits and lse
are in base 2 inside. Numbers of a mask are plain arguments, so a new mask compiles nothing.

Backward: with p = exp(s - lse), dv = p^T dout, dp = dout v^T, ds = p * (dp - delta), dq = ds k, dk = ds^T q
(FlashAttention-2, https://arxiv.org/abs/2307.08691).
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _rows(base, row, past, stride, ROWS: tl.constexpr, D: tl.constexpr, PAD: tl.constexpr, CUT: tl.constexpr):
    """Rows from ``row`` on of a matrix ``[past, D]``, as ``[ROWS, PAD]``; with ``CUT`` zeros from row ``past`` on."""
    i, j = tl.arange(0, ROWS), tl.arange(0, PAD)
    places = base + tl.cast(row, tl.int64) * stride + (i[:, None] * stride + j[None, :])
    if CUT:
        there = (row + i < past)[:, None]
        if D != PAD:
            there = there & (j < D)[None, :]
        return tl.load(places, mask=there, other=0.0)
    if D != PAD:
        return tl.load(places, mask=(j < D)[None, :], other=0.0)
    return tl.load(places)


@triton.jit
def _block(
    of, head, row, past, stride, ROWS: tl.constexpr, D: tl.constexpr, PAD: tl.constexpr, CUT: tl.constexpr,
    DESCRIBED: tl.constexpr,
):  # fmt: skip
    """`_rows` of a head; ``of`` is a descriptor of all heads, which gives 0 past the last row and element, or begins
    with that head."""
    if DESCRIBED:
        found = of.load([row, head, 0]).reshape([ROWS, PAD])
    else:
        found = _rows(of, row, past, stride, ROWS, D, PAD, CUT)
    return found


@triton.jit
def _of_head(of, head, stride, DESCRIBED: tl.constexpr):
    """What `_block` reads of a head."""
    if not DESCRIBED:
        of += tl.cast(head, tl.int64) * stride
    return of


@triton.jit
def _add_rows(
    base, row, past, stride, value, ROWS: tl.constexpr, D: tl.constexpr, PAD: tl.constexpr, ADDS: tl.constexpr
):
    """Writes ``[ROWS, PAD]`` to rows from ``row`` on, up to ``past``; ``ADDS``: adds to what is there."""
    i, j = tl.arange(0, ROWS), tl.arange(0, PAD)
    places = base + tl.cast(row, tl.int64) * stride + (i[:, None] * stride + j[None, :])
    there = (row + i < past)[:, None] & (j < D)[None, :]
    if ADDS:
        value += tl.load(places, mask=there, other=0.0).to(tl.float32)
    tl.store(places, value.to(base.dtype.element_ty), mask=there)


@triton.jit
def _tanh(x):
    small = x * (1 - x * x * 0.33333334)  # where the difference below would be rounding; its error is 2/15 x^5
    return tl.where(tl.abs(x) < 0.03125, small, 1 - 2 / (tl.exp2(x * (2 * LOG2_E)) + 1))


@triton.jit
def _dot(a, b, PRECISION: tl.constexpr):
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def _pass(passes, i):
    """First column, blocks, and first and past-the-last block that all rows see."""
    at = passes + 8 * i
    return tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)


@triton.jit
def _bounds(bounds, i, ROWS: tl.constexpr):
    """First and past-the-last column of each row in a pass."""
    at = bounds + tl.cast(i, tl.int64) * (2 * ROWS) + 2 * tl.arange(0, ROWS)
    return tl.load(at), tl.load(at + 1)


@triton.jit
def _attend(
    acc, total, largest, q, k, v, head, k_stride, v_stride, column, num_keys, low, high, scale, cap,
    DK: tl.constexpr, DV: tl.constexpr, PAD_K: tl.constexpr, PAD_V: tl.constexpr, COLUMNS: tl.constexpr,
    MASKED: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr, DESCRIBED: tl.constexpr,
):  # fmt: skip
    """One block of keys: the sums of exp2(logit - largest) * v and of exp2(logit - largest), and the largest logit."""
    keys = _block(k, head, column, num_keys, k_stride, COLUMNS, DK, PAD_K, MASKED, DESCRIBED)
    logits = _dot(q, tl.trans(keys), PRECISION)
    if CAPPED:
        logits = _tanh(logits * scale) * cap
    if MASKED:
        columns = (column + tl.arange(0, COLUMNS))[None, :]
        logits = tl.where((columns >= low[:, None]) & (columns < high[:, None]), logits, float("-inf"))
    # The scale is positive: it is multiplied to the maximum, and to logits together with the subtraction.
    factor = 1.0 if CAPPED else scale
    found = tl.maximum(largest, tl.max(logits, 1) * factor)
    shift = found
    if MASKED:  # a row may have seen nothing yet
        shift = tl.where(found == float("-inf"), 0.0, found)
    p = tl.exp2(logits * factor - shift[:, None])
    kept = tl.exp2(largest - shift)
    values = _block(v, head, column, num_keys, v_stride, COLUMNS, DV, PAD_V, MASKED, DESCRIBED)
    acc = acc * kept[:, None] + _dot(p.to(values.dtype), values, PRECISION)
    return acc, total * kept + tl.sum(p, 1), found


@triton.jit
def _weight(lse, most):
    """exp2(lse - most); of an infinite ``most`` only infinite terms have weight."""
    infinite = most == float("inf")
    shift = tl.where(infinite | (most == float("-inf")), 0.0, most)
    return tl.where(infinite, tl.where(lse == float("inf"), 1.0, 0.0), tl.exp2(lse - shift))


@triton.jit
def _merged(
    acc, result, out, lse, sink, row, past, head, out_row, sink_row, sink_head,
    DV: tl.constexpr, PAD_V: tl.constexpr, ROWS: tl.constexpr, HAS_SINK: tl.constexpr, MERGES: tl.constexpr,
):  # fmt: skip
    """Output and lse, in base 2, of a result together with sinks and with a result over other keys that is there."""
    rows = row + tl.arange(0, ROWS)
    there = rows < past
    most = result
    if HAS_SINK:
        of_sink = tl.load(sink + tl.cast(rows, tl.int64) * sink_row + head * sink_head, mask=there, other=0.0)
        of_sink = of_sink.to(tl.float32) * LOG2_E
        most = tl.maximum(most, of_sink)
    if MERGES:
        before = tl.load(lse, mask=there, other=0.0).to(tl.float32) * LOG2_E
        most = tl.maximum(most, before)
    weight = _weight(result, most)
    sum_of = weight
    if HAS_SINK:
        sum_of += _weight(of_sink, most)
    if MERGES:
        weight_before = _weight(before, most)
        sum_of += weight_before
    none, infinite = most == float("-inf"), most == float("inf")
    sum_of = tl.where(none, 1.0, sum_of)
    acc = acc * (weight / sum_of)[:, None]
    if MERGES:  # a result without weight is dropped, not multiplied by 0: it may be NaN
        old = _rows(out, row, past, out_row, ROWS, DV, PAD_V, True)
        share = (weight_before / sum_of)[:, None]
        acc += tl.where(share > 0, old.to(tl.float32), 0.0) * share
    lse_of_all = tl.where(none, float("-inf"), tl.where(infinite, float("inf"), most + tl.log2(sum_of)))
    return acc, lse_of_all


@triton.jit(do_not_specialize=["num_rows", "num_keys", "num_heads"])
def forward_kernel(
    q, k, v, out, lse, row_max, sink, tiles, passes, bounds, num_rows, num_keys, num_heads,
    q_row, q_head, k_row, k_head, v_row, v_head, out_row, out_head, lse_row, lse_head, sink_row, sink_head,
    scale, cap,
    GROUP: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, PAD_K: tl.constexpr, PAD_V: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, CAPPED: tl.constexpr, HAS_SINK: tl.constexpr, MERGES: tl.constexpr,
    KEEPS_MAX: tl.constexpr, PRECISION: tl.constexpr, DESCRIBED: tl.constexpr,
):  # fmt: skip
    """Program i: tile i // num_heads, the longest first, of head i % num_heads.

    ``scale``: of q @ k to logits in base 2; if ``CAPPED``, to the argument of tanh, and ``cap`` is the factor of that.
    ``MERGES``: out and lse hold a result over other keys. ``row_max`` is like lse. ``DESCRIBED``: k and v,
    ``[num_keys, heads, dim]``, are descriptors of blocks.
    """
    tile, head = tl.program_id(0) // num_heads, tl.program_id(0) % num_heads
    row, begin = tl.load(tiles + 4 * tile), tl.load(tiles + 4 * tile + 1)
    end, past = tl.load(tiles + 4 * tile + 2), row + tl.load(tiles + 4 * tile + 3)
    key_head = head // GROUP
    k_at, v_at = _of_head(k, key_head, k_head, DESCRIBED), _of_head(v, key_head, v_head, DESCRIBED)
    query = _rows(q + tl.cast(head, tl.int64) * q_head, row, past, q_row, ROWS, DK, PAD_K, True)
    acc = tl.zeros([ROWS, PAD_V], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    for i in range(begin, end):
        first, count, full, past_full = _pass(passes, i)
        for block in range(full, past_full):
            acc, total, largest = _attend(
                acc, total, largest, query, k_at, v_at, key_head, k_row, v_row, first + block * COLUMNS, num_keys, 0, 0,
                scale, cap, DK, DV, PAD_K, PAD_V, COLUMNS, False, CAPPED, PRECISION, DESCRIBED,
            )  # fmt: skip
        low, high = _bounds(bounds, i, ROWS)
        for other in range(count - past_full + full):
            block = tl.where(other < full, other, other + past_full - full)
            acc, total, largest = _attend(
                acc, total, largest, query, k_at, v_at, key_head, k_row, v_row, first + block * COLUMNS, num_keys, low,
                high, scale, cap, DK, DV, PAD_K, PAD_V, COLUMNS, True, CAPPED, PRECISION, DESCRIBED,
            )  # fmt: skip
    rows = row + tl.arange(0, ROWS)
    there = rows < past
    at = tl.cast(rows, tl.int64) * lse_row + head * lse_head
    if KEEPS_MAX:
        tl.store(row_max + at, largest * LN_2, mask=there)
    seen = total > 0
    acc = acc / tl.where(seen, total, 1.0)[:, None]
    result = tl.where(seen, largest + tl.log2(tl.where(seen, total, 1.0)), float("-inf"))
    if HAS_SINK or MERGES:
        acc, result = _merged(
            acc, result, out + tl.cast(head, tl.int64) * out_head, lse + at, sink, row, past, head, out_row, sink_row,
            sink_head, DV, PAD_V, ROWS, HAS_SINK, MERGES,
        )  # fmt: skip
    tl.store(lse + at, (result * LN_2).to(lse.dtype.element_ty), mask=there)
    _add_rows(out + tl.cast(head, tl.int64) * out_head, row, past, out_row, acc, ROWS, DV, PAD_V, False)


@triton.jit
def _grad_queries(
    dq, q, dout, lse, delta, k, v, head, k_stride, v_stride, column, num_keys, low, high, scale, cap,
    DK: tl.constexpr, DV: tl.constexpr, PAD_K: tl.constexpr, PAD_V: tl.constexpr, COLUMNS: tl.constexpr,
    MASKED: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr, DESCRIBED: tl.constexpr,
):  # fmt: skip
    """One block of keys: dq without ``softmax_scale``."""
    keys = _block(k, head, column, num_keys, k_stride, COLUMNS, DK, PAD_K, MASKED, DESCRIBED)
    values = _block(v, head, column, num_keys, v_stride, COLUMNS, DV, PAD_V, MASKED, DESCRIBED)
    logits = _dot(q, tl.trans(keys), PRECISION) * scale
    if DESCRIBED:  # before the softmax: a wait less
        dp = _dot(dout, tl.trans(values), PRECISION)
    if CAPPED:
        bent = _tanh(logits)
        logits = bent * cap
    p = tl.exp2(logits - lse[:, None])
    if MASKED:
        columns = (column + tl.arange(0, COLUMNS))[None, :]
        p = tl.where((columns >= low[:, None]) & (columns < high[:, None]), p, 0.0)
    if not DESCRIBED:
        dp = _dot(dout, tl.trans(values), PRECISION)
    ds = p * (dp - delta[:, None])
    if CAPPED:
        ds = ds * (1 - bent * bent)
    return dq + _dot(ds.to(keys.dtype), keys, PRECISION)


@triton.jit(do_not_specialize=["num_rows", "num_keys", "num_heads", "room"])
def query_gradient_kernel(
    q, k, v, dout, lse, delta, dq, tiles, passes, bounds, num_rows, num_keys, num_heads, room,
    q_row, q_head, k_row, k_head, v_row, v_head, dout_row, dout_head, dq_row, dq_head, scale, cap, softmax_scale,
    GROUP: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, PAD_K: tl.constexpr, PAD_V: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, CAPPED: tl.constexpr, ADDS: tl.constexpr, PRECISION: tl.constexpr,
    DESCRIBED: tl.constexpr,
):  # fmt: skip
    """As `forward_kernel`, of dq. ``lse``, in base 2, and ``delta`` are ``[num_heads, num_rows]`` (`row_kernels`), with
    ``room`` elements from one head to the next."""
    tile, head = tl.program_id(0) // num_heads, tl.program_id(0) % num_heads
    row, begin = tl.load(tiles + 4 * tile), tl.load(tiles + 4 * tile + 1)
    end, past = tl.load(tiles + 4 * tile + 2), row + tl.load(tiles + 4 * tile + 3)
    key_head = head // GROUP
    k_at, v_at = _of_head(k, key_head, k_head, DESCRIBED), _of_head(v, key_head, v_head, DESCRIBED)
    query = _rows(q + tl.cast(head, tl.int64) * q_head, row, past, q_row, ROWS, DK, PAD_K, True)
    grad = _rows(dout + tl.cast(head, tl.int64) * dout_head, row, past, dout_row, ROWS, DV, PAD_V, True)
    rows = row + tl.arange(0, ROWS)
    there = rows < past
    at = tl.cast(head, tl.int64) * room + rows
    row_lse = tl.load(lse + at, mask=there, other=0.0)
    row_delta = tl.load(delta + at, mask=there, other=0.0)
    acc = tl.zeros([ROWS, PAD_K], tl.float32)
    for i in range(begin, end):
        first, count, full, past_full = _pass(passes, i)
        for block in range(full, past_full):
            acc = _grad_queries(
                acc, query, grad, row_lse, row_delta, k_at, v_at, key_head, k_row, v_row, first + block * COLUMNS,
                num_keys, 0, 0, scale, cap, DK, DV, PAD_K, PAD_V, COLUMNS, False, CAPPED, PRECISION, DESCRIBED,
            )  # fmt: skip
        low, high = _bounds(bounds, i, ROWS)
        for other in range(count - past_full + full):
            block = tl.where(other < full, other, other + past_full - full)
            acc = _grad_queries(
                acc, query, grad, row_lse, row_delta, k_at, v_at, key_head, k_row, v_row, first + block * COLUMNS,
                num_keys, low, high, scale, cap, DK, DV, PAD_K, PAD_V, COLUMNS, True, CAPPED, PRECISION, DESCRIBED,
            )  # fmt: skip
    into = dq + tl.cast(head, tl.int64) * dq_head
    _add_rows(into, row, past, dq_row, acc * softmax_scale, ROWS, DK, PAD_K, ADDS)


@triton.jit
def _grad_keys(
    dk, dv, keys, values, q, dout, lse, delta, q_stride, dout_stride, head, column, num_rows, low, high, scale,
    cap, DK: tl.constexpr, DV: tl.constexpr, PAD_K: tl.constexpr, PAD_V: tl.constexpr, COLUMNS: tl.constexpr,
    MASKED: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr, DESCRIBED: tl.constexpr,
):  # fmt: skip
    """One block of queries: dk without ``softmax_scale``, and dv; matrices are transposed, ``[keys, queries]``."""
    columns = column + tl.arange(0, COLUMNS)
    query = _block(q, head, column, num_rows, q_stride, COLUMNS, DK, PAD_K, MASKED, DESCRIBED)
    grad = _block(dout, head, column, num_rows, dout_stride, COLUMNS, DV, PAD_V, MASKED, DESCRIBED)
    if DESCRIBED:
        row_lse = lse.load([head, column]).reshape([COLUMNS])
        row_delta = delta.load([head, column]).reshape([COLUMNS])
    else:
        if MASKED:
            row_lse = tl.load(lse + columns, mask=columns < num_rows, other=0.0)
            row_delta = tl.load(delta + columns, mask=columns < num_rows, other=0.0)
        else:
            row_lse = tl.load(lse + columns)
            row_delta = tl.load(delta + columns)
    logits = _dot(keys, tl.trans(query), PRECISION) * scale
    if DESCRIBED:  # before the softmax: a wait less
        dp = _dot(values, tl.trans(grad), PRECISION)
    if CAPPED:
        bent = _tanh(logits)
        logits = bent * cap
    p = tl.exp2(logits - row_lse[None, :])
    if MASKED:
        p = tl.where((columns[None, :] >= low[:, None]) & (columns[None, :] < high[:, None]), p, 0.0)
    dv += _dot(p.to(grad.dtype), grad, PRECISION)
    if not DESCRIBED:
        dp = _dot(values, tl.trans(grad), PRECISION)
    ds = p * (dp - row_delta[None, :])
    if CAPPED:
        ds = ds * (1 - bent * bent)
    dk += _dot(ds.to(query.dtype), query, PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=["num_rows", "num_heads", "room"])
def key_gradient_kernel(
    q, k, v, dout, lse, delta, dk, dv, tiles, passes, bounds, num_rows, num_heads, room,
    q_row, q_head, k_row, k_head, v_row, v_head, dout_row, dout_head, dk_row, dk_head, dv_row, dv_head,
    scale, cap, softmax_scale,
    GROUP: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, PAD_K: tl.constexpr, PAD_V: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, CAPPED: tl.constexpr, ADDS: tl.constexpr, PRECISION: tl.constexpr,
    DESCRIBED: tl.constexpr,
):  # fmt: skip
    """Program i: tile i // num_heads of keys, of key head i % num_heads, over all query heads of its group.

    ``DESCRIBED``: q and dout, ``[num_rows, heads, dim]``, and lse and delta, ``[heads, num_rows]``, are descriptors of
    blocks; passes begin at multiples of 16 bytes of lse and delta.
    """
    tile, head = tl.program_id(0) // num_heads, tl.program_id(0) % num_heads
    row, begin = tl.load(tiles + 4 * tile), tl.load(tiles + 4 * tile + 1)
    end, past = tl.load(tiles + 4 * tile + 2), row + tl.load(tiles + 4 * tile + 3)
    keys = _rows(k + tl.cast(head, tl.int64) * k_head, row, past, k_row, ROWS, DK, PAD_K, True)
    values = _rows(v + tl.cast(head, tl.int64) * v_head, row, past, v_row, ROWS, DV, PAD_V, True)
    of_keys = tl.zeros([ROWS, PAD_K], tl.float32)
    of_values = tl.zeros([ROWS, PAD_V], tl.float32)
    for member in range(GROUP):
        query_head = head * GROUP + member
        q_at, dout_at = _of_head(q, query_head, q_head, DESCRIBED), _of_head(dout, query_head, dout_head, DESCRIBED)
        lse_at, delta_at = _of_head(lse, query_head, room, DESCRIBED), _of_head(delta, query_head, room, DESCRIBED)
        for i in range(begin, end):
            first, count, full, past_full = _pass(passes, i)
            for block in range(full, past_full):
                of_keys, of_values = _grad_keys(
                    of_keys, of_values, keys, values, q_at, dout_at, lse_at, delta_at, q_row, dout_row, query_head,
                    first + block * COLUMNS, num_rows, 0, 0, scale, cap,
                    DK, DV, PAD_K, PAD_V, COLUMNS, False, CAPPED, PRECISION, DESCRIBED,
                )  # fmt: skip
            low, high = _bounds(bounds, i, ROWS)
            for other in range(count - past_full + full):
                block = tl.where(other < full, other, other + past_full - full)
                of_keys, of_values = _grad_keys(
                    of_keys, of_values, keys, values, q_at, dout_at, lse_at, delta_at, q_row, dout_row, query_head,
                    first + block * COLUMNS, num_rows, low, high, scale, cap,
                    DK, DV, PAD_K, PAD_V, COLUMNS, True, CAPPED, PRECISION, DESCRIBED,
                )  # fmt: skip
    into = dk + tl.cast(head, tl.int64) * dk_head
    _add_rows(into, row, past, dk_row, of_keys * softmax_scale, ROWS, DK, PAD_K, ADDS)
    _add_rows(dv + tl.cast(head, tl.int64) * dv_head, row, past, dv_row, of_values, ROWS, DV, PAD_V, ADDS)
