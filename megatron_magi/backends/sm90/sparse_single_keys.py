"""Backward of sparse attention over lists of single keys on Hopper GPUs.

One kernel computes dq, and what each query gives to dk and dv of each of its keys. It adds this to fp32 sums in memory,
or, where sums exceed the L2 cache and are read and written for most additions, stores it in 16 bits; then another
kernel adds it key by key in fp32, by lists of the places where a key is named. In the latter way the order of additions
can be fixed. Queries are then processed in parts, so that what is stored has bounded memory; sums wait between them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_magi.backends.sm90 import sparse_kernels as kernels
from megatron_magi.backends.sm90 import tuning
from megatron_magi.backends.sm90.kernels import element
from megatron_magi.backends.sm90.kernels import params as params_of
from megatron_magi.backends.sm90.sparse_lists import Lists
from megatron_magi.backends.sm90.support import LOG2_E, grid_size, launch_counter, sm_count
from megatron_magi.cuda.launch import Launch, prepared
from megatron_magi.cuda.streams import current_stream
from megatron_magi.operands.sparse_pattern import SparsePattern, num_blocks, sorted_into

_BLOCKS_OF_SM = 8  # of the kernel that turns lists
_KEYS_OF_BLOCK = 8  # of the kernel that adds
_FINISHED_ELEMENTS = 256 * 16  # of dk, of a block of the kernel that finishes sums
_SUM_BYTES = 8  # fp32 sums of dk and dv, of an element of k


@dataclass(frozen=True)
class _Form:
    """Of what queries give to keys.

    Attributes:
        packs: tiles of a query, of all key heads.
        places: of a list: its length, rounded up to steps of a kernel.
        rows: queries of a part.
    """

    packs: int
    places: int
    rows: int


def _form_of(q: Tensor, k: Tensor, width: int) -> _Form:
    """The form for lists of ``width`` keys; parts end with a wave of tiles."""
    (num_rows, num_heads, dim), heads_kv = q.shape, k.shape[1]
    packs = num_heads // kernels.heads_of_tile(num_heads // heads_kv, 2)
    places = max(1, num_blocks(width, kernels.PIECE)) * kernels.PIECE
    most = max(tuning.GIVEN_BYTES, tuning.GIVEN_OVER_SUMS * _SUM_BYTES * k.numel())
    rows = max(1, most // (2 * q.element_size() * dim * places * packs))
    if rows >= num_rows:
        return _Form(packs, places, num_rows)
    wave = sm_count(q.device)
    return _Form(packs, places, max(rows * packs // wave * wave // packs, min(rows, wave)))


def stores(q: Tensor, k: Tensor, width: int) -> bool:
    """Whether it is faster to store what queries with lists of ``width`` keys give to keys than to add it at once."""
    num_keys, _, dim = k.shape
    return (
        _SUM_BYTES * num_keys * dim > tuning.LEAST_STORED_SUM_BYTES
        and min(sm_count(q.device), q.shape[0]) * width < tuning.MOST_STORED_ADDITIONS * num_keys
    )


class _Call(NamedTuple):
    """A backward: its tensors, which TMA can load, and gradients to be written; rows and lists of all queries, or some.

    Attributes:
        lists: of the pattern, all of one length.
    """

    q: Tensor
    dout: Tensor
    lse: Tensor
    delta: Tensor
    dq: Tensor
    k: Tensor
    v: Tensor
    dk: Tensor
    dv: Tensor
    pattern: SparsePattern
    lists: Lists
    softmax_scale: float

    def of_rows(self, first: int, past: int) -> _Call:
        """That of the queries from ``first`` to ``past``."""
        rows = {name: getattr(self, name)[first:past] for name in ("q", "dout", "lse", "delta", "dq")}
        return self._replace(lists=Lists(self.lists.entries[:, first:past]), **rows)


def backward(
    tensors: tuple[Tensor, Tensor, Tensor, Tensor],
    lse: Tensor,
    delta: Tensor,
    pattern: SparsePattern,
    lists: Lists,
    softmax_scale: float,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """``(dq, dk, dv)`` of q, k, v, dout, which TMA can load.

    ``lists``: of the pattern, all of one length. With ``deterministic`` what queries give to a key is added in the
    order of the queries and their lists.
    """
    q, k, v, dout = tensors
    dq, dk, dv = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))
    call = _Call(q, dout, lse, delta, dq, k, v, dk, dv, pattern, lists, softmax_scale)
    if deterministic or stores(q, k, lists.entries.shape[-1]):
        _stored(call, deterministic)
    else:
        _added(call)
    return dq, dk, dv


def _added(call: _Call) -> None:
    """Computes the gradients with sums in memory."""
    k, dk, dv, softmax_scale = call.k, call.dk, call.dv, call.softmax_scale
    num_keys, heads, dim = k.shape
    sums = torch.zeros((2, heads, num_keys, dim), dtype=torch.float32, device=k.device)
    _attend(call, sums, None)

    def make() -> Launch:
        params = params_of("sparse_postprocess")(
            dk_row=dk.stride(0), dk_head=dk.stride(1), dv_row=dv.stride(0), dv_head=dv.stride(1),
            sum_rows=num_keys, num_rows=num_keys, heads=heads, scale=softmax_scale,
        )  # fmt: skip
        blocks = num_blocks(num_keys * heads * dim, _FINISHED_ELEMENTS)
        defines = f"HEAD_DIM={dim}", element(k.dtype)
        return Launch(kernels.small_kernel(k.device, "sparse_postprocess", defines), blocks, params)

    launch = prepared(("sparse_postprocess", k.device, k.dtype, k.shape, softmax_scale), make)
    with launch.lock:
        params = launch.params
        params.dk_sums, params.dv_sums = sums[0].data_ptr(), sums[1].data_ptr()
        params.dk, params.dv = dk.data_ptr(), dv.data_ptr()
        launch.fire(current_stream(k.device))


def _stored(call: _Call, deterministic: bool) -> None:
    """Computes the gradients without additions in memory."""
    q, k = call.q, call.k
    num_rows, dim = q.shape[0], q.shape[2]
    form = _form_of(q, k, call.lists.entries.shape[-1])
    given = torch.empty(form.packs * form.rows * form.places * 2 * dim, dtype=q.dtype, device=q.device)
    sums = torch.empty(0 if form.rows == num_rows else 2 * k.numel(), dtype=torch.float32, device=q.device)
    for first in range(0, num_rows, form.rows):
        past = min(num_rows, first + form.rows)
        part = call.of_rows(first, past)
        turned = (_sorted_places if deterministic else _places)(part.lists.entries, k.shape[0], form)
        _attend(part, given, form)
        _add(part, given, turned, sums, form, first > 0, past < num_rows)


def _attend(call: _Call, into: Tensor, form: _Form | None) -> None:
    """Writes dq, and what queries give to keys: adds it to sums, or with a form stores it.

    ``into``: sums, ``[2, num_heads_kv, num_keys, head_dim]``; or in 16 bits ``[packs, rows, places, 2, head_dim]``.
    """
    q, k, v, dout, lse, delta, dq = call.q, call.k, call.v, call.dout, call.lse, call.delta, call.dq
    pattern, lists, softmax_scale = call.pattern, call.lists, call.softmax_scale
    stream = current_stream(q.device)
    # Tiles that share few keys need not start together.
    together = form is None and lists.entries.shape[-1] >= k.shape[0] // 64

    def make() -> Launch:
        params = params_of("sparse_backward")(
            tiles=kernels.cut_tiles(q, k, pattern),
            k_row=k.stride(0), k_head=k.stride(1), v_row=v.stride(0), v_head=v.stride(1),
            lse_row=lse.stride(0), lse_head=lse.stride(1), delta_row=delta.stride(0), delta_head=delta.stride(1),
            dq_row=dq.stride(0), dq_head=dq.stride(1), sum_rows=k.shape[0],
            list_places=0 if form is None else form.places, scale=softmax_scale, scale_log2=softmax_scale * LOG2_E,
        )  # fmt: skip
        if not together:
            params.tiles.long_list = kernels.BEHIND_ALL
        kernel = kernels.backward_kernel(q.device, q.dtype, q.shape[2], form is not None)
        return Launch(kernel, grid_size(q.device, params.tiles.num_items), params, kernels.boxes(q, k, v, dout))

    counter = launch_counter(q.device, stream)
    key = (
        "sparse_backward", q.device, stream, q.dtype, q.shape, k.shape,
        *(t.stride() for t in (q, k, v, dout, lse, delta, dq)), pattern.num_lists, softmax_scale, form, together,
    )  # fmt: skip
    launch = prepared(key, make)
    with launch.lock:
        launch.point_maps(*(t.data_ptr() for t in (q, k, v, dout)))
        params = launch.params
        lists.point(params.tiles, counter)
        params.keys, params.values = k.data_ptr(), v.data_ptr()
        params.lse, params.delta, params.dq = lse.data_ptr(), delta.data_ptr(), dq.data_ptr()
        if form is None:
            params.dk_sums, params.dv_sums = into[0].data_ptr(), into[1].data_ptr()
        else:
            params.given = into.data_ptr()
        launch.fire(stream)


def _places(entries: Tensor, num_keys: int, form: _Form) -> tuple[Tensor, Tensor]:
    """For each key the places where lists ``[lists, rows, width]`` name it: ``row * form.places`` and the number in the
    list; in no order.

    Returns:
        ``(starts, places)``: int32 ``[lists * num_keys + 1]`` and ``[entries.numel()]``.
    """
    (num_lists, num_rows, width), device = entries.shape, entries.device
    stream = current_stream(device)
    ends = torch.zeros(num_lists * num_keys + 1, dtype=torch.int32, device=device)
    places = torch.empty(entries.numel(), dtype=torch.int32, device=device)

    def make(part: int) -> Launch:
        params = params_of("sparse_places")(
            head_step=entries.stride(0), list_step=entries.stride(1), width=width, list_places=form.places,
            num_lists=num_lists, num_rows=num_rows, num_keys=num_keys,
        )  # fmt: skip
        blocks = min(num_lists * num_rows, _BLOCKS_OF_SM * sm_count(device))
        return Launch(kernels.small_kernel(device, "sparse_places", (f"PART={part}",)), blocks, params)

    for part in range(2):
        key = ("sparse_places", part, device, entries.shape, entries.stride(), num_keys, form.places)
        launch = prepared(key, partial(make, part))
        with launch.lock:
            params = launch.params
            params.entries, params.ends, params.places = entries.data_ptr(), ends.data_ptr(), places.data_ptr()
            launch.fire(stream)
        if part == 0:
            ends = ends.cumsum(0, dtype=torch.int32)
    return ends, places


def _sorted_places(entries: Tensor, num_keys: int, form: _Form) -> tuple[Tensor, Tensor]:
    """As `_places`; those of a key ascend."""
    (num_lists, num_rows, width), device = entries.shape, entries.device
    first = num_keys * torch.arange(num_lists, device=device, dtype=torch.int32)
    keys = torch.where((entries >= 0) & (entries < num_keys), entries + first[:, None, None], num_lists * num_keys)
    order, starts = sorted_into(keys, num_lists * num_keys)
    order = order.int() % (num_rows * width)
    return starts.int(), order // width * form.places + order % width


def _add(
    call: _Call, given: Tensor, turned: tuple[Tensor, Tensor], sums: Tensor, form: _Form, reads: bool, writes: bool
) -> None:
    """Adds what queries gave to the sums, if it ``reads`` them; ``writes``: into them, else to dk and dv."""
    dk, dv, pattern, num_rows = call.dk, call.dv, call.pattern, len(call.q)
    num_keys, heads, dim = dk.shape

    def make() -> Launch:
        params = params_of("sparse_sums")(
            dk_row=dk.stride(0), dk_head=dk.stride(1), dv_row=dv.stride(0), dv_head=dv.stride(1),
            num_keys=num_keys, heads_kv=heads, list_heads=pattern.num_lists, packs=form.packs // heads,
            pack_places=num_rows * form.places, reads_sums=reads, writes_sums=writes,
        )  # fmt: skip
        kernel = kernels.small_kernel(dk.device, "sparse_sums", (f"HEAD_DIM={dim}", element(dk.dtype)))
        return Launch(kernel, num_blocks(num_keys * heads, _KEYS_OF_BLOCK), params)

    key = (
        "sparse_sums", dk.device, dk.dtype, dk.shape, pattern.num_lists, form, num_rows, reads, writes,
    )  # fmt: skip
    launch = prepared(key, make)
    with launch.lock:
        params = launch.params
        params.given, (params.starts, params.places) = given.data_ptr(), (t.data_ptr() for t in turned)
        params.sums, params.dk, params.dv = sums.data_ptr(), dk.data_ptr(), dv.data_ptr()
        launch.fire(current_stream(dk.device))
