"""The kernels of attention over lists of latent keys, the first ``DV`` elements of which are the values.

A tile has the query heads of one query, of one key head, or as many as fit. In the forward rows of q and kv are two
matrices, of ``DV`` and of the ``DR`` elements behind (none if that is 0), each filled up to a power of two, so that a
key is loaded once for its logits and its value. In the backward a tile as wide as a row would not fit beside another:
p and ds of some queries are written to memory, and what is multiplied by them is computed in tiles of ``WIDTH``
elements. Formulas as in `kernels`. ``scale``: of q @ kv to logits in base 2.
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


@triton.jit
def _tile(places, there, first, D: tl.constexpr, WIDTH: tl.constexpr):
    """Elements from ``first`` on of rows that begin at these places, ``[len(places), WIDTH]``; zeros from ``D`` on."""
    j = first + tl.arange(0, WIDTH)
    return tl.load(places[:, None] + j[None, :], mask=there[:, None] & (j < D)[None, :], other=0.0)


@triton.jit(do_not_specialize=["num_keys", "num_heads", "topk"])
def latent_scores_kernel(
    q, kv, dout, lse, delta, probs, grads, entries, num_keys, num_heads, topk, entry_row, entry_list, score_step,
    q_row, q_head, kv_row, kv_head, dout_row, dout_head, lse_row, lse_head, delta_row, delta_head, scale,
    GROUP: tl.constexpr, DV: tl.constexpr, DR: tl.constexpr, PAD_R: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, PARTS: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """p and ds, see `kernels`, of a query, a part of the query heads of a key head, and a step of its list.

    Program i: part ``i % PARTS`` of step ``i // PARTS % cdiv(topk, COLUMNS)``. ``probs``, ``grads``: ``[queries,
    num_heads * GROUP, score_step]``, written for steps that have a key. Products are summed over ``WIDTH`` elements of
    rows at a time.
    """
    num_steps = tl.cdiv(topk, COLUMNS)
    i = tl.program_id(0)
    part, step = i % PARTS, i // PARTS % num_steps
    head, row = i // PARTS // num_steps % num_heads, tl.cast(i // PARTS // num_steps // num_heads, tl.int64)
    row_head, is_row = _heads(head, part, GROUP, ROWS)
    key, there = _listed(
        entries + row * entry_row + tl.cast(head, tl.int64) * entry_list, step, topk, num_keys, COLUMNS
    )
    if tl.max(there.to(tl.int32), 0) > 0:
        queries = q + row * q_row + row_head * q_head
        keys = kv + tl.cast(head, tl.int64) * kv_head + key * kv_row
        douts = dout + row * dout_row + row_head * dout_head
        logits = tl.zeros([ROWS, COLUMNS], tl.float32)
        dp = tl.zeros([ROWS, COLUMNS], tl.float32)
        for first in range(0, DV, WIDTH):
            values = tl.trans(_tile(keys, there, first, DV, WIDTH))
            logits += _dot(_tile(queries, is_row, first, DV, WIDTH), values, PRECISION)
            dp += _dot(_tile(douts, is_row, first, DV, WIDTH), values, PRECISION)
        if DR > 0:
            behind = tl.trans(_load(keys + DV, there, DR, PAD_R))
            logits += _dot(_load(queries + DV, is_row, DR, PAD_R), behind, PRECISION)
        row_lse, row_delta = _row_numbers(lse, delta, row, row_head, is_row, lse_row, lse_head, delta_row, delta_head)
        p = tl.where(there[None, :], tl.exp2(logits * scale - row_lse[:, None]), 0.0)
        ds = p * (dp - row_delta[:, None])
        at = _scores_at(row, row_head, step, num_heads * GROUP, score_step, COLUMNS)
        tl.store(probs + at, p.to(probs.dtype.element_ty), mask=is_row[:, None] & there[None, :])
        tl.store(grads + at, ds.to(grads.dtype.element_ty), mask=is_row[:, None] & there[None, :])


@triton.jit
def _scores_at(row, row_head, step, num_heads, score_step, COLUMNS: tl.constexpr):
    """Where p and ds of query heads and of a step are, ``[query heads, COLUMNS]``."""
    return ((row * num_heads + row_head) * score_step)[:, None] + (step * COLUMNS + tl.arange(0, COLUMNS))[None, :]


@triton.jit(do_not_specialize=["num_keys", "num_heads", "topk"])
def latent_query_gradient_kernel(
    kv, grads, dq, entries, num_keys, num_heads, topk, entry_row, entry_list, score_step, kv_row, kv_head,
    dq_row, dq_head, softmax_scale,
    GROUP: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr,
    COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq = ds @ kv of a query and a part of the query heads of a key head, ``WIDTH`` elements of rows in a program."""
    num_tiles: tl.constexpr = (D + WIDTH - 1) // WIDTH
    i = tl.program_id(0)
    first, part = i % num_tiles * WIDTH, i // num_tiles % PARTS
    head, row = i // num_tiles // PARTS % num_heads, tl.cast(i // num_tiles // PARTS // num_heads, tl.int64)
    row_head, is_row = _heads(head, part, GROUP, ROWS)
    entries += row * entry_row + tl.cast(head, tl.int64) * entry_list
    kv += tl.cast(head, tl.int64) * kv_head
    acc = tl.zeros([ROWS, WIDTH], tl.float32)
    for step in range(tl.cdiv(_end(entries, topk, num_keys), COLUMNS)):
        key, there = _listed(entries, step, topk, num_keys, COLUMNS)
        at = _scores_at(row, row_head, step, num_heads * GROUP, score_step, COLUMNS)
        ds = tl.load(grads + at, mask=is_row[:, None] & there[None, :], other=0.0)
        acc += _dot(ds, _tile(kv + key * kv_row, there, first, D, WIDTH), PRECISION)
    j = first + tl.arange(0, WIDTH)
    places = (dq + row * dq_row + row_head * dq_head)[:, None] + j[None, :]
    tl.store(places, (acc * softmax_scale).to(dq.dtype.element_ty), mask=is_row[:, None] & (j < D)[None, :])


@triton.jit(do_not_specialize=["num_keys", "num_heads", "topk"])
def latent_key_gradient_kernel(
    q, dout, probs, grads, dkv, entries, num_keys, num_heads, topk, entry_row, entry_list, score_step,
    q_row, q_head, dout_row, dout_head, softmax_scale,
    GROUP: tl.constexpr, DV: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    PARTS: tl.constexpr, COLUMNS: tl.constexpr, STORES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """ds^T @ q and p^T @ dout of a query and a step of its list over all query heads of a key head, ``WIDTH`` elements
    of rows in a program.

    The sum is added to ``dkv``, fp32 ``[num_keys, num_heads, D]``; with ``STORES`` it is written to ``dkv`` ``[queries,
    num_heads, topk, D]`` instead, for `latent_sum_kernel`.
    """
    num_tiles: tl.constexpr = (D + WIDTH - 1) // WIDTH
    num_steps = tl.cdiv(topk, COLUMNS)
    i = tl.program_id(0)
    first, step = i % num_tiles * WIDTH, i // num_tiles % num_steps
    head, row = i // num_tiles // num_steps % num_heads, tl.cast(i // num_tiles // num_steps // num_heads, tl.int64)
    key, there = _listed(
        entries + row * entry_row + tl.cast(head, tl.int64) * entry_list, step, topk, num_keys, COLUMNS
    )
    of_keys = tl.zeros([COLUMNS, WIDTH], tl.float32)
    of_values = tl.zeros([COLUMNS, WIDTH], tl.float32)
    has_any = tl.max(there.to(tl.int32), 0)
    for part in range(has_any * PARTS):
        row_head, is_row = _heads(head, part, GROUP, ROWS)
        at = _scores_at(row, row_head, step, num_heads * GROUP, score_step, COLUMNS)
        p = tl.load(probs + at, mask=is_row[:, None] & there[None, :], other=0.0)
        ds = tl.load(grads + at, mask=is_row[:, None] & there[None, :], other=0.0)
        of_values += _dot(
            tl.trans(p), _tile(dout + row * dout_row + row_head * dout_head, is_row, first, DV, WIDTH), PRECISION
        )
        of_keys += _dot(tl.trans(ds), _tile(q + row * q_row + row_head * q_head, is_row, first, D, WIDTH), PRECISION)
    at = key * num_heads + head
    if STORES:
        at = (row * num_heads + head) * topk + step * COLUMNS + tl.arange(0, COLUMNS)
    j = first + tl.arange(0, WIDTH)
    places, there = (dkv + at * D)[:, None] + j[None, :], there[:, None] & (j < D)[None, :]
    value = of_keys * softmax_scale + of_values
    if STORES:
        tl.store(places, value, mask=there)
    else:
        tl.atomic_add(places, value, mask=there, sem="relaxed")


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
