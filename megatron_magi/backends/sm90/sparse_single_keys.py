"""Backward of sparse attention over lists of single keys on Hopper GPUs.

One kernel computes dq, and what each query gives to dk and dv of each of its keys. It adds this to fp32 sums in memory,
or, where sums exceed the L2 cache and are read and written for most additions, stores it for `key_sums`, which can fix
the order of additions.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megatron_magi.backends.sm90 import sparse_kernels as kernels
from megatron_magi.backends.sm90 import tuning
from megatron_magi.backends.sm90.kernels import element
from megatron_magi.backends.sm90.kernels import params as params_of
from megatron_magi.backends.sm90.key_sums import Form, add_stored, query_rows, storing_pays
from megatron_magi.backends.sm90.sparse_lists import Lists
from megatron_magi.backends.sm90.support import LOG2_E, grid_size, launch_counter
from megatron_magi.cuda.launch import Launch, prepared
from megatron_magi.cuda.streams import current_stream
from megatron_magi.operands.sparse_pattern import SparsePattern, num_blocks

_FINISHED_ELEMENTS = 256 * 16  # of dk, of a block of the kernel that finishes sums


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
        lists = Lists(self.lists.entries[:, first:past])
        return self._replace(lists=lists, **query_rows(self, first, past))


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
    (num_rows, num_heads, dim), (num_keys, heads_kv, _), width = q.shape, k.shape, lists.entries.shape[-1]
    if deterministic or storing_pays(q.device, num_rows, num_keys, 2 * dim, width):
        packs = num_heads // kernels.heads_of_tile(num_heads // heads_kv, 2)

        def attend(first: int, past: int, given: Tensor, form: Form) -> None:
            _attend(call.of_rows(first, past), given, form)

        add_stored((dv, dk), lists.entries, packs, tuning.GIVEN_BYTES, deterministic, attend)
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


def _attend(call: _Call, into: Tensor, form: Form | None) -> None:
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
