"""The kernels of attention over lists: forward; gradients of queries, and of keys and values; a mask made a list.

Tiles hold rows of several query heads of a key head: place i of a block of queries is head ``i % GROUP`` of its query
``i // GROUP``. What a list names is loaded key by key, and what it does not name is masked. ``K_BLOCK`` is the number
of keys that an entry of a list stands for, 1 where it is a single key. Formulas as in `kernels`; nothing is added
atomically.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_magi.backends.triton.kernels import LN_2, LOG2_E, _dot, _weight


@triton.jit
def lists_of_mask_kernel(
    mask, entries, counts, num_rows, num_columns, list_step, row_step, column_step, COLUMNS: tl.constexpr
):
    """Program i: the columns that are set in row ``i % num_rows`` of list ``i // num_rows``, and how many."""
    i = tl.cast(tl.program_id(0), tl.int64)
    mask += i // num_rows * list_step + i % num_rows * row_step
    found = 0
    for first in range(0, num_columns, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        places = mask + tl.cast(column, tl.int64) * column_step
        is_set = tl.load(places, mask=column < num_columns, other=0).to(tl.int32) != 0
        ones = is_set.to(tl.int32)
        tl.store(entries + i * num_columns + found + tl.cumsum(ones, 0) - 1, column, mask=is_set)
        found += tl.sum(ones, 0)
    tl.store(counts + i, found)


@triton.jit
def _load(places, there, D: tl.constexpr, PAD: tl.constexpr):
    """Rows that begin at these places, ``[len(places), PAD]``; zeros where there are none."""
    j = tl.arange(0, PAD)
    seen = there[:, None]
    if D != PAD:
        seen = seen & (j < D)[None, :]
    return tl.load(places[:, None] + j[None, :], mask=seen, other=0.0)


@triton.jit
def _store(places, there, value, D: tl.constexpr, PAD: tl.constexpr):
    """Writes ``[len(places), PAD]`` to rows that begin at these places, where there are any."""
    j = tl.arange(0, PAD)
    to = places.dtype.element_ty
    tl.store(places[:, None] + j[None, :], value.to(to), mask=there[:, None] & (j < D)[None, :])


@triton.jit
def _span(spans, list_of_head, num_lists, num_blocks, block):
    """Begin and end of the list of a block, of a key head; 1 list is that of all heads."""
    which = tl.where(num_lists == 1, 0, list_of_head)
    at = spans + 2 * (tl.cast(which, tl.int64) * num_blocks + block)
    return tl.load(at), tl.load(at + 1)


@triton.jit
def _length(begin, end):
    return tl.cast(tl.maximum(end - begin, 0), tl.int32)


@triton.jit
def _places(block, part, q_block, num_rows, head, GROUP: tl.constexpr, ROWS: tl.constexpr):
    """Queries and query heads of a part of a block of queries, int64, and which there are."""
    place = part * ROWS + tl.arange(0, ROWS)
    query = block * q_block + place // GROUP
    there = (place < q_block * GROUP) & (query < num_rows)
    return tl.cast(query, tl.int64), tl.cast(head * GROUP + place % GROUP, tl.int64), there


@triton.jit
def _keys(entries, begin, end, step, num_keys, COLUMNS: tl.constexpr, K_BLOCK: tl.constexpr):
    """The keys of a step along a list, int64, and which there are: numbers that are none are passed over."""
    i = tl.arange(0, COLUMNS)
    if K_BLOCK == 1:
        at = begin + tl.cast(step, tl.int64) * COLUMNS + i
        key = tl.load(entries + at, mask=at < end, other=-1)
    else:
        block = tl.load(entries + begin + step // (K_BLOCK // COLUMNS))
        is_one = (block >= 0) & (block < tl.cdiv(num_keys, K_BLOCK))
        key = tl.where(is_one, block * K_BLOCK + step % (K_BLOCK // COLUMNS) * COLUMNS + i, -1)
    there = (key >= 0) & (key < num_keys)
    return tl.cast(tl.where(there, key, 0), tl.int64), there


@triton.jit
def _num_steps(begin, end, COLUMNS: tl.constexpr, K_BLOCK: tl.constexpr):
    """Steps of ``COLUMNS`` keys along a list."""
    length = _length(begin, end)
    return tl.cdiv(length, COLUMNS) if K_BLOCK == 1 else length * (K_BLOCK // COLUMNS)


@triton.jit
def _seen(row, key, there, shift, CAUSAL: tl.constexpr):
    """Which rows see which keys, bool ``[rows, keys]``; ``there``: which keys, as ``[1, keys]``."""
    seen = there
    if CAUSAL:
        seen = there & (key <= row + shift)
    return seen


@triton.jit
def _with_sink(result, of_sink):
    """lse of keys and of sinks together, in base 2, and the weight of what was computed of the keys."""
    most = tl.maximum(result, of_sink)
    none, infinite = most == float("-inf"), most == float("inf")
    weight = _weight(result, most)
    sum_of = tl.where(none, 1.0, weight + _weight(of_sink, most))
    together = tl.where(none, float("-inf"), tl.where(infinite, float("inf"), most + tl.log2(sum_of)))
    return together, weight / sum_of


@triton.jit(do_not_specialize=["num_lists", "num_blocks", "num_rows", "num_keys", "num_heads", "q_block"])
def sparse_forward_kernel(
    q, k, v, out, lse, row_max, sink, entries, spans, num_lists, num_blocks, num_rows, num_keys, num_heads, q_block,
    q_row, q_head, k_row, k_head, v_row, v_head, out_row, out_head, lse_row, lse_head, sink_row, sink_head, scale,
    GROUP: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, PAD_K: tl.constexpr, PAD_V: tl.constexpr,
    ROWS: tl.constexpr, PARTS: tl.constexpr, COLUMNS: tl.constexpr, K_BLOCK: tl.constexpr, CAUSAL: tl.constexpr,
    HAS_SINK: tl.constexpr, KEEPS_MAX: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program i: part ``i % PARTS`` of a block of queries, of a key head; ``num_heads``: of keys.

    ``scale``: of q @ k to logits in base 2. ``spans``: int64, begin and end of each list in ``entries``. ``row_max`` is
    like lse.
    """
    part, head = tl.program_id(0) % PARTS, tl.program_id(0) // PARTS % num_heads
    block = tl.program_id(0) // PARTS // num_heads
    begin, end = _span(spans, head, num_lists, num_blocks, block)
    row, row_head, is_row = _places(block, part, q_block, num_rows, head, GROUP, ROWS)
    query = _load(q + row * q_row + row_head * q_head, is_row, DK, PAD_K)
    k += tl.cast(head, tl.int64) * k_head
    v += tl.cast(head, tl.int64) * v_head
    acc = tl.zeros([ROWS, PAD_V], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    for step in range(_num_steps(begin, end, COLUMNS, K_BLOCK)):
        key, there = _keys(entries, begin, end, step, num_keys, COLUMNS, K_BLOCK)
        keys = _load(k + key * k_row, there, DK, PAD_K)
        logits = _dot(query, tl.trans(keys), PRECISION) * scale
        seen = _seen(row[:, None], key[None, :], there[None, :], num_keys - num_rows, CAUSAL)
        logits = tl.where(seen, logits, float("-inf"))
        found = tl.maximum(largest, tl.max(logits, 1))
        shift = tl.where(found == float("-inf"), 0.0, found)
        p = tl.exp2(logits - shift[:, None])
        kept = tl.exp2(largest - shift)
        values = _load(v + key * v_row, there, DV, PAD_V)
        acc = acc * kept[:, None] + _dot(p.to(values.dtype), values, PRECISION)
        total = total * kept + tl.sum(p, 1)
        largest = found
    if KEEPS_MAX:
        tl.store(row_max + row * lse_row + row_head * lse_head, largest * LN_2, mask=is_row)
    has_seen = total > 0
    acc = acc / tl.where(has_seen, total, 1.0)[:, None]
    result = tl.where(has_seen, largest + tl.log2(tl.where(has_seen, total, 1.0)), float("-inf"))
    if HAS_SINK:
        of_sink = tl.load(sink + row * sink_row + row_head * sink_head, mask=is_row, other=0.0).to(tl.float32) * LOG2_E
        result, weight = _with_sink(result, of_sink)
        acc = acc * weight[:, None]
    tl.store(lse + row * lse_row + row_head * lse_head, result * LN_2, mask=is_row)
    _store(out + row * out_row + row_head * out_head, is_row, acc, DV, PAD_V)


@triton.jit
def _row_numbers(lse, delta, row, row_head, is_row, lse_row, lse_head, delta_row, delta_head):
    """lse in base 2, 0 of rows that see nothing, and delta."""
    of_row = tl.load(lse + row * lse_row + row_head * lse_head, mask=is_row, other=0.0)
    of_row = tl.where(of_row == float("-inf"), 0.0, of_row * LOG2_E)
    return of_row, tl.load(delta + row * delta_row + row_head * delta_head, mask=is_row, other=0.0)


@triton.jit(do_not_specialize=["num_lists", "num_blocks", "num_rows", "num_keys", "num_heads", "q_block"])
def sparse_query_gradient_kernel(
    q, k, v, dout, lse, delta, dq, entries, spans, num_lists, num_blocks, num_rows, num_keys, num_heads, q_block,
    q_row, q_head, k_row, k_head, v_row, v_head, dout_row, dout_head, lse_row, lse_head, delta_row, delta_head,
    dq_row, dq_head, scale, softmax_scale,
    GROUP: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, PAD_K: tl.constexpr, PAD_V: tl.constexpr,
    ROWS: tl.constexpr, PARTS: tl.constexpr, COLUMNS: tl.constexpr, K_BLOCK: tl.constexpr, CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """As `sparse_forward_kernel`, of dq."""
    part, head = tl.program_id(0) % PARTS, tl.program_id(0) // PARTS % num_heads
    block = tl.program_id(0) // PARTS // num_heads
    begin, end = _span(spans, head, num_lists, num_blocks, block)
    row, row_head, is_row = _places(block, part, q_block, num_rows, head, GROUP, ROWS)
    query = _load(q + row * q_row + row_head * q_head, is_row, DK, PAD_K)
    grad = _load(dout + row * dout_row + row_head * dout_head, is_row, DV, PAD_V)
    row_lse, row_delta = _row_numbers(lse, delta, row, row_head, is_row, lse_row, lse_head, delta_row, delta_head)
    k += tl.cast(head, tl.int64) * k_head
    v += tl.cast(head, tl.int64) * v_head
    acc = tl.zeros([ROWS, PAD_K], tl.float32)
    for step in range(_num_steps(begin, end, COLUMNS, K_BLOCK)):
        key, there = _keys(entries, begin, end, step, num_keys, COLUMNS, K_BLOCK)
        keys = _load(k + key * k_row, there, DK, PAD_K)
        values = _load(v + key * v_row, there, DV, PAD_V)
        p = tl.exp2(_dot(query, tl.trans(keys), PRECISION) * scale - row_lse[:, None])
        seen = _seen(row[:, None], key[None, :], there[None, :], num_keys - num_rows, CAUSAL)
        ds = tl.where(seen, p, 0.0) * (_dot(grad, tl.trans(values), PRECISION) - row_delta[:, None])
        acc += _dot(ds.to(keys.dtype), keys, PRECISION)
    _store(dq + row * dq_row + row_head * dq_head, is_row, acc * softmax_scale, DK, PAD_K)


@triton.jit
def _viewers(entries, begin, num_places, step, q_block, num_rows, head, GROUP: tl.constexpr, COLUMNS: tl.constexpr):
    """Queries and query heads of a step along a list of blocks of queries, int64, and which there are."""
    place = tl.cast(step, tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    there = place < num_places
    block = tl.load(entries + begin + place // (q_block * GROUP), mask=there, other=0)
    query = tl.cast(block, tl.int64) * q_block + place % (q_block * GROUP) // GROUP
    return query, head * GROUP + place % GROUP, there & (query < num_rows)


@triton.jit(do_not_specialize=["num_lists", "num_blocks", "num_rows", "num_keys", "num_heads", "q_block"])
def sparse_key_gradient_kernel(
    q, k, v, dout, lse, delta, dk, dv, entries, spans, num_lists, num_blocks, num_rows, num_keys, num_heads, q_block,
    q_row, q_head, k_row, k_head, v_row, v_head, dout_row, dout_head, lse_row, lse_head, delta_row, delta_head,
    dk_row, dk_head, dv_row, dv_head, scale, softmax_scale,
    GROUP: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, PAD_K: tl.constexpr, PAD_V: tl.constexpr,
    ROWS: tl.constexpr, PARTS: tl.constexpr, COLUMNS: tl.constexpr, K_BLOCK: tl.constexpr, CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Program i: part ``i % PARTS`` of a block of keys, of a key head, over the list of blocks of queries that see it.

    Matrices are transposed, ``[keys, queries]``. Of a single key, which no other shares its list with, products are
    sums of elements.
    """
    part, head = tl.program_id(0) % PARTS, tl.program_id(0) // PARTS % num_heads
    block = tl.program_id(0) // PARTS // num_heads
    begin, end = _span(spans, head, num_lists, num_blocks, block)
    key = tl.cast(block, tl.int64) * K_BLOCK + part * ROWS + tl.arange(0, ROWS)
    is_key = key < num_keys
    head64 = tl.cast(head, tl.int64)
    keys = _load(k + key * k_row + head64 * k_head, is_key, DK, PAD_K)
    values = _load(v + key * v_row + head64 * v_head, is_key, DV, PAD_V)
    of_keys = tl.zeros([ROWS, PAD_K], tl.float32)
    of_values = tl.zeros([ROWS, PAD_V], tl.float32)
    num_places = tl.maximum(end - begin, 0) * (q_block * GROUP)  # of 64 bits: a list may name a block often
    for step in range(tl.cdiv(num_places, COLUMNS)):
        row, row_head, is_row = _viewers(entries, begin, num_places, step, q_block, num_rows, head, GROUP, COLUMNS)
        query = _load(q + row * q_row + row_head * q_head, is_row, DK, PAD_K)
        grad = _load(dout + row * dout_row + row_head * dout_head, is_row, DV, PAD_V)
        row_lse, row_delta = _row_numbers(lse, delta, row, row_head, is_row, lse_row, lse_head, delta_row, delta_head)
        if ROWS == 1:
            query, grad = query.to(tl.float32), grad.to(tl.float32)
            logits = tl.sum(query * keys.to(tl.float32), 1)[None, :]
            dp = tl.sum(grad * values.to(tl.float32), 1)[None, :]
        else:
            logits = _dot(keys, tl.trans(query), PRECISION)
            dp = _dot(values, tl.trans(grad), PRECISION)
        seen = _seen(row[None, :], key[:, None], is_row[None, :], num_keys - num_rows, CAUSAL)
        p = tl.where(seen, tl.exp2(logits * scale - row_lse[None, :]), 0.0)
        ds = p * (dp - row_delta[None, :])
        if ROWS == 1:
            of_values += tl.sum(tl.trans(p) * grad, 0)[None, :]
            of_keys += tl.sum(tl.trans(ds) * query, 0)[None, :]
        else:
            of_values += _dot(p.to(grad.dtype), grad, PRECISION)
            of_keys += _dot(ds.to(query.dtype), query, PRECISION)
    _store(dk + key * dk_row + head64 * dk_head, is_key, of_keys * softmax_scale, DK, PAD_K)
    _store(dv + key * dv_row + head64 * dv_head, is_key, of_values, DV, PAD_V)
