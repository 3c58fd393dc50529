"""The kernels of attention over lists of latent keys, the first ``DV`` elements of which are the values.

A tile has the query heads of one query, of one key head, or as many as fit. Rows of q and kv are two matrices, of
``DV`` and of the ``DR`` elements behind (none if that is 0), each filled up to a power of two, so that a key is loaded
once for logits, values and gradients. Formulas as in `kernels`. ``scale``: of q @ kv to logits in base 2.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_magi.backends.triton.kernels import LN_2, LOG2_E, _dot
from megatron_magi.backends.triton.sparse_kernels import _load, _row_numbers, _store, _with_sink

_LOOK = tl.constexpr(1024)
"""Entries of a list that are looked at together."""


@triton.jit
def _place(PARTS: tl.constexpr, num_heads):
    """Query, key head, and part of its query heads, of a program."""
    i = tl.program_id(0)
    return tl.cast(i // (PARTS * num_heads), tl.int64), i // PARTS % num_heads, i % PARTS


@triton.jit
def _heads(head, part, GROUP: tl.constexpr, ROWS: tl.constexpr):
    """Query heads of a part of a key head's, int64, and which there are."""
    i = part * ROWS + tl.arange(0, ROWS)
    return tl.cast(head * GROUP + i, tl.int64), i < GROUP


@triton.jit
def _listed(entries, step, topk, num_keys, COLUMNS: tl.constexpr):
    """The keys of a step along a list, int64, and which there are: numbers that are none are passed over."""
    at = step * COLUMNS + tl.arange(0, COLUMNS)
    key = tl.load(entries + at, mask=at < topk, other=-1)
    there = (key >= 0) & (key < num_keys)
    return tl.cast(tl.where(there, key, 0), tl.int64), there


@triton.jit
def _end(entries, topk, num_keys):
    """Where a list ends: behind the last entry that is a key."""
    end = 0
    for first in range(0, topk, _LOOK):
        at = first + tl.arange(0, _LOOK)
        key = tl.load(entries + at, mask=at < topk, other=-1)
        end = tl.maximum(end, tl.max(tl.where((key >= 0) & (key < num_keys), at + 1, 0), 0))
    return end


@triton.jit
def _scores(query, query_behind, keys, keys_behind, DR: tl.constexpr, PRECISION: tl.constexpr):
    """``query @ keys^T`` of both parts."""
    found = _dot(query, tl.trans(keys), PRECISION)
    if DR > 0:
        found += _dot(query_behind, tl.trans(keys_behind), PRECISION)
    return found


@triton.jit
def _behind(places, there, DV: tl.constexpr, DR: tl.constexpr, PAD_R: tl.constexpr):
    """Elements of rows behind the first ``DV``; what is not used where there are none."""
    found = there
    if DR > 0:
        found = _load(places + DV, there, DR, PAD_R)
    return found


@triton.jit(do_not_specialize=["num_keys", "num_heads", "topk"])
def latent_forward_kernel(
    q, kv, out, lse, row_max, sink, entries, num_keys, num_heads, topk, entry_row, entry_list,
    q_row, q_head, kv_row, kv_head, out_row, out_head, lse_row, lse_head, sink_row, sink_head, scale,
    GROUP: tl.constexpr, DV: tl.constexpr, DR: tl.constexpr, PAD_V: tl.constexpr, PAD_R: tl.constexpr,
    ROWS: tl.constexpr, PARTS: tl.constexpr, COLUMNS: tl.constexpr, HAS_SINK: tl.constexpr, KEEPS_MAX: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Program i: part ``i % PARTS`` of the query heads of a key head, of a query; ``num_heads``: of keys.

    ``entry_row``, ``entry_list``: strides of ``entries``; ``entry_list`` is 0 where key heads share lists. ``row_max``
    is like lse.
    """
    row, head, part = _place(PARTS, num_heads)
    row_head, is_row = _heads(head, part, GROUP, ROWS)
    entries += row * entry_row + tl.cast(head, tl.int64) * entry_list
    kv += tl.cast(head, tl.int64) * kv_head
    query = _load(q + row * q_row + row_head * q_head, is_row, DV, PAD_V)
    query_behind = _behind(q + row * q_row + row_head * q_head, is_row, DV, DR, PAD_R)
    acc = tl.zeros([ROWS, PAD_V], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    for step in range(tl.cdiv(_end(entries, topk, num_keys), COLUMNS)):
        key, there = _listed(entries, step, topk, num_keys, COLUMNS)
        keys = _load(kv + key * kv_row, there, DV, PAD_V)
        keys_behind = _behind(kv + key * kv_row, there, DV, DR, PAD_R)
        logits = _scores(query, query_behind, keys, keys_behind, DR, PRECISION) * scale
        logits = tl.where(there[None, :], logits, float("-inf"))
        found = tl.maximum(largest, tl.max(logits, 1))
        shift = tl.where(found == float("-inf"), 0.0, found)
        p = tl.exp2(logits - shift[:, None])
        kept = tl.exp2(largest - shift)
        acc = acc * kept[:, None] + _dot(p.to(keys.dtype), keys, PRECISION)
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


@triton.jit(do_not_specialize=["num_heads"])
def latent_delta_kernel(
    dout, out, delta, num_heads, dout_row, dout_head, out_row, out_head, delta_row, delta_head,
    DV: tl.constexpr, PAD_V: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Program i: rowsum(dout * out) of part ``i % PARTS`` of the ``num_heads`` query heads of a query."""
    row = tl.cast(tl.program_id(0) // PARTS, tl.int64)
    head = tl.cast(tl.program_id(0) % PARTS * ROWS + tl.arange(0, ROWS), tl.int64)
    is_row = head < num_heads
    grad = _load(dout + row * dout_row + head * dout_head, is_row, DV, PAD_V).to(tl.float32)
    value = _load(out + row * out_row + head * out_head, is_row, DV, PAD_V).to(tl.float32)
    products = tl.sum(tl.where(value == 0, 0.0, grad * value), 1)
    tl.store(delta + row * delta_row + head * delta_head, products, mask=is_row)


@triton.jit(do_not_specialize=["num_keys", "num_heads", "topk"])
def latent_query_gradient_kernel(
    q, kv, dout, lse, delta, dq, entries, num_keys, num_heads, topk, entry_row, entry_list,
    q_row, q_head, kv_row, kv_head, dout_row, dout_head, lse_row, lse_head, delta_row, delta_head, dq_row, dq_head,
    scale, softmax_scale,
    GROUP: tl.constexpr, DV: tl.constexpr, DR: tl.constexpr, PAD_V: tl.constexpr, PAD_R: tl.constexpr,
    ROWS: tl.constexpr, PARTS: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """As `latent_forward_kernel`, of dq."""
    row, head, part = _place(PARTS, num_heads)
    row_head, is_row = _heads(head, part, GROUP, ROWS)
    entries += row * entry_row + tl.cast(head, tl.int64) * entry_list
    kv += tl.cast(head, tl.int64) * kv_head
    query = _load(q + row * q_row + row_head * q_head, is_row, DV, PAD_V)
    query_behind = _behind(q + row * q_row + row_head * q_head, is_row, DV, DR, PAD_R)
    grad = _load(dout + row * dout_row + row_head * dout_head, is_row, DV, PAD_V)
    row_lse, row_delta = _row_numbers(lse, delta, row, row_head, is_row, lse_row, lse_head, delta_row, delta_head)
    acc = tl.zeros([ROWS, PAD_V], tl.float32)
    acc_behind = tl.zeros([ROWS, PAD_R], tl.float32)
    for step in range(tl.cdiv(_end(entries, topk, num_keys), COLUMNS)):
        key, there = _listed(entries, step, topk, num_keys, COLUMNS)
        keys = _load(kv + key * kv_row, there, DV, PAD_V)
        keys_behind = _behind(kv + key * kv_row, there, DV, DR, PAD_R)
        logits = _scores(query, query_behind, keys, keys_behind, DR, PRECISION)
        p = tl.where(there[None, :], tl.exp2(logits * scale - row_lse[:, None]), 0.0)
        ds = (p * (_dot(grad, tl.trans(keys), PRECISION) - row_delta[:, None])).to(keys.dtype)
        acc += _dot(ds, keys, PRECISION)
        if DR > 0:
            acc_behind += _dot(ds, keys_behind, PRECISION)
    _store(dq + row * dq_row + row_head * dq_head, is_row, acc * softmax_scale, DV, PAD_V)
    if DR > 0:
        _store(dq + row * dq_row + row_head * dq_head + DV, is_row, acc_behind * softmax_scale, DR, PAD_R)


@triton.jit
def _put(places, there, value, D: tl.constexpr, PAD: tl.constexpr, STORES: tl.constexpr):
    """Writes ``[len(places), PAD]`` of fp32 to rows that begin at these places, or adds to them atomically."""
    j = tl.arange(0, PAD)
    places, there = places[:, None] + j[None, :], there[:, None] & (j < D)[None, :]
    if STORES:
        tl.store(places, value, mask=there)
    else:
        tl.atomic_add(places, value, mask=there, sem="relaxed")


@triton.jit(do_not_specialize=["num_keys", "num_heads", "topk"])
def latent_key_gradient_kernel(
    q, kv, dout, lse, delta, dkv, entries, num_keys, num_heads, topk, entry_row, entry_list,
    q_row, q_head, kv_row, kv_head, dout_row, dout_head, lse_row, lse_head, delta_row, delta_head, scale, softmax_scale,
    GROUP: tl.constexpr, DV: tl.constexpr, DR: tl.constexpr, PAD_V: tl.constexpr, PAD_R: tl.constexpr,
    ROWS: tl.constexpr, PARTS: tl.constexpr, COLUMNS: tl.constexpr, STORES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program i: step ``i % cdiv(topk, COLUMNS)`` of the list of a query and a key head, over all its query heads.

    What one query adds to the gradient of a key is added to ``dkv``,
    fp32 ``[num_keys, num_heads, DV + DR]``; with ``STORES`` it is written to ``dkv`` ``[queries, num_heads, topk,
    DV + DR]`` instead, for `latent_sum_kernel`.
    """
    num_steps = tl.cdiv(topk, COLUMNS)
    i = tl.program_id(0)
    step, head, row = i % num_steps, i // num_steps % num_heads, tl.cast(i // num_steps // num_heads, tl.int64)
    entries += row * entry_row + tl.cast(head, tl.int64) * entry_list
    key, there = _listed(entries, step, topk, num_keys, COLUMNS)
    keys = _load(kv + tl.cast(head, tl.int64) * kv_head + key * kv_row, there, DV, PAD_V)
    keys_behind = _behind(kv + tl.cast(head, tl.int64) * kv_head + key * kv_row, there, DV, DR, PAD_R)
    acc = tl.zeros([COLUMNS, PAD_V], tl.float32)
    acc_behind = tl.zeros([COLUMNS, PAD_R], tl.float32)
    has_any = tl.max(there.to(tl.int32), 0)
    for part in range(has_any * PARTS):
        row_head, is_row = _heads(head, part, GROUP, ROWS)
        query = _load(q + row * q_row + row_head * q_head, is_row, DV, PAD_V)
        query_behind = _behind(q + row * q_row + row_head * q_head, is_row, DV, DR, PAD_R)
        grad = _load(dout + row * dout_row + row_head * dout_head, is_row, DV, PAD_V)
        row_lse, row_delta = _row_numbers(lse, delta, row, row_head, is_row, lse_row, lse_head, delta_row, delta_head)
        logits = _scores(query, query_behind, keys, keys_behind, DR, PRECISION)
        p = tl.where(there[None, :], tl.exp2(logits * scale - row_lse[:, None]), 0.0)
        dp = _dot(grad, tl.trans(keys), PRECISION)
        ds = tl.trans((p * (dp - row_delta[:, None]) * softmax_scale).to(query.dtype))
        acc += _dot(tl.trans(p.to(grad.dtype)), grad, PRECISION)
        acc += _dot(ds, query, PRECISION)
        if DR > 0:
            acc_behind += _dot(ds, query_behind, PRECISION)
    at = key * num_heads + head
    if STORES:
        at = (row * num_heads + head) * topk + step * COLUMNS + tl.arange(0, COLUMNS)
    _put(dkv + at * (DV + DR), there, acc, DV, PAD_V, STORES)
    if DR > 0:
        _put(dkv + at * (DV + DR) + DV, there, acc_behind, DR, PAD_R, STORES)


@triton.jit
def latent_sum_kernel(parts, dkv, order, bounds, D: tl.constexpr, PAD: tl.constexpr):
    """Program i: adds rows ``order[bounds[i]]`` to ``order[bounds[i + 1]]`` of ``parts``, one by one, to row i of
    ``dkv``; both fp32 ``[..., D]``.
    """
    i = tl.cast(tl.program_id(0), tl.int64)
    begin, end = tl.load(bounds + i), tl.load(bounds + i + 1)
    j = tl.arange(0, PAD)
    there = (j < D) & (begin < end)
    acc = tl.load(dkv + i * D + j, mask=there, other=0.0)
    for at in range(begin, end):
        acc += tl.load(parts + tl.load(order + at) * D + j, mask=there, other=0.0)
    tl.store(dkv + i * D + j, acc, mask=there)
