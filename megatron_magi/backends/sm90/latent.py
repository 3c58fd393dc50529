"""Attention over lists of latent keys on Hopper GPUs: the kernels ``csrc/attention/sm90/latent_*.cu``.

Takes fp16 and bf16 with the dims of MLA, 576 and 512, and any number of query heads; the best are multiples of 64 for
each key head. The backward adds what each query gives to the gradient of keys to fp32 sums in memory, in any order, or
stores it for `key_sums`, which can fix the order.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_magi.backends.base import check_support, with_output
from megatron_magi.backends.sm90 import tuning
from megatron_magi.backends.sm90.kernels import params as params_of
from megatron_magi.backends.sm90.key_sums import Form, add_stored, query_rows, storing_pays
from megatron_magi.backends.sm90.sparse_kernels import LATENT_DIMS, latent_backward_kernel, latent_kernel, readable
from megatron_magi.backends.sm90.sparse_lists import lists_of
from megatron_magi.backends.sm90.support import LOG2_E, in_dtype, kernels_exist, launch_counter, sm_count
from megatron_magi.backends.sm90.support import why_not as why_no_kernels
from megatron_magi.cuda.launch import Launch, prepared
from megatron_magi.cuda.streams import current_stream
from megatron_magi.operands.passes import BackwardInputs, ForwardInputs
from megatron_magi.operands.sparse_pattern import SparsePattern, num_blocks

_ANY_DIMS = (64, 64)
_HEADS = 64
"""Query heads of a tile."""
_BYTES_APART = 32 << 20
"""Sums of the gradient of keys up to which streaming multiprocessors begin items on their own. Where they are larger
and items begin together, their lists, which ascend, reach the same keys at about the same time."""
_TOGETHER = 128
"""Times 32 clocks for each block of 64 keys: as long an item waits for others to begin, about as long as it takes."""


_MOST_SHIFT = 10
"""Of P in fp16, whose largest power of two is 15."""


def why_not(device: torch.device, dtype: torch.dtype, dims: tuple[int, int]) -> str | None:
    """See `megatron_magi.backends.base.LatentPart`."""
    if not kernels_exist(device, dtype, _ANY_DIMS):
        return why_no_kernels(device, dtype, _ANY_DIMS, "'triton' or 'reference'")
    if dims != LATENT_DIMS:
        known = "{} with dim_v {}".format(*LATENT_DIMS)
        return f"kv: latent impl 'ffa' takes head_dim {known}, got {dims[0]} and {dims[1]}; use 'triton'"
    return None


def forward(
    inputs: ForwardInputs, pattern: SparsePattern, softmax_scale: float, return_max_logits: bool = False
) -> tuple[Tensor, Tensor, Tensor | None]:
    """See `megatron_magi.backends.base.LatentPart`."""
    q, kv, _, out, lse, sink_lse = with_output(inputs, why_not)
    max_logits = lse.new_full(lse.shape[1:], -torch.inf) if return_max_logits else None
    num_rows, num_heads, _ = q.shape
    q, kv = readable(q), readable(kv)
    entries = lists_of(pattern).entries

    def make() -> Launch:
        group = num_heads // kv.shape[1]
        parts = num_blocks(group, _HEADS)
        num_items = num_rows * kv.shape[1] * parts
        params = params_of("latent_forward")(
            entry_row=entries.stride(1), entry_list=entries.stride(0) if pattern.num_lists > 1 else 0,
            kv_row=kv.stride(0), kv_head=kv.stride(1), out_row=out.stride(0), out_head=out.stride(1),
            lse_row=lse.stride(0), lse_head=lse.stride(1), topk=entries.shape[2], num_keys=kv.shape[0],
            num_items=num_items, heads_kv=kv.shape[1], group=group, parts=parts,
            scale_log2=softmax_scale * LOG2_E, logit_scale=softmax_scale,
        )  # fmt: skip
        if sink_lse is not None:
            params.sink_row, params.sink_head = sink_lse.stride()
        grid = min(num_items, sm_count(q.device))
        return Launch(latent_kernel(q.device, q.dtype), grid, params, ((q, 1, _HEADS),))

    key = (
        "latent_forward", q.device, q.dtype, softmax_scale, pattern.num_lists, q.shape, q.stride(), kv.shape,
        kv.stride(), entries.shape, entries.stride(), None if sink_lse is None else sink_lse.stride(),
    )  # fmt: skip
    launch = prepared(key, make)
    with launch.lock:
        launch.point_maps(q.data_ptr())
        params = launch.params
        params.kv, params.entries = kv.data_ptr(), entries.data_ptr()
        params.out, params.lse = out.data_ptr(), lse.data_ptr()
        params.sink_lse = 0 if sink_lse is None else sink_lse.data_ptr()
        params.max_logits = 0 if max_logits is None else max_logits.data_ptr()
        launch.fire(current_stream(q.device))
    return out, lse, max_logits


def takes_backward(dtype: torch.dtype) -> bool:
    """See `megatron_magi.backends.base.LatentPart`. Small gradients in fp16 have not been tested on a GPU."""
    return dtype == torch.bfloat16


def backward(
    inputs: BackwardInputs, pattern: SparsePattern, softmax_scale: float, deterministic: bool
) -> tuple[Tensor, Tensor]:
    """``(dq, dkv)`` of checked arguments; see `megatron_magi.backends.base.LatentPart`."""
    q, kv, v, dout, lse, delta = inputs
    check_support(why_not, q, v)
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    q, kv, dout = readable(q), readable(kv), readable(in_dtype(dout, q.dtype))
    entries = lists_of(pattern).entries
    call = _Call(q, dout, lse, delta, dq, kv, entries, softmax_scale)
    if deterministic or _stores(q, kv, entries.shape[2]):
        dkv = torch.empty(kv.shape, dtype=q.dtype, device=q.device)

        def attend(first: int, past: int, given: Tensor, form: Form) -> None:
            _attend(call.of_rows(first, past), given, form)

        packs = kv.shape[1] * _parts(q, kv)
        add_stored((dkv,), entries, packs, tuning.GIVEN_LATENT_BYTES, deterministic, attend)
        return dq, dkv
    sums = torch.zeros((kv.shape[1], kv.shape[0], kv.shape[2]), dtype=torch.float32, device=kv.device)
    _attend(call, sums, None)
    return dq, _in_order(sums, q.dtype)


def _parts(q: Tensor, kv: Tensor) -> int:
    """Tiles of the query heads of a key head."""
    return num_blocks(q.shape[1] // kv.shape[1], _HEADS)


def _stores(q: Tensor, kv: Tensor, width: int) -> bool:
    """Whether it is faster to store what queries with lists of ``width`` keys give to keys than to add it at once.

    It is not where several tiles of a query give to the same keys: what the first one adds to is then in the L2 cache
    for the others.
    """
    runs = takes_backward(q.dtype)
    return runs and _parts(q, kv) == 1 and storing_pays(q.device, q.shape[0], kv.shape[0], kv.shape[2], width)


class _Call(NamedTuple):
    """A backward: its tensors, which TMA and gathering threads can load, and dq, which is written; rows and lists of
    all queries, or some.
    """

    q: Tensor
    dout: Tensor
    lse: Tensor
    delta: Tensor
    dq: Tensor
    kv: Tensor
    entries: Tensor
    softmax_scale: float

    def of_rows(self, first: int, past: int) -> _Call:
        """That of the queries from ``first`` to ``past``."""
        return self._replace(entries=self.entries[:, first:past], **query_rows(self, first, past))


def _attend(call: _Call, into: Tensor, form: Form | None) -> None:
    """Writes dq, and what queries give to keys: adds it to sums, or with a form stores it.

    ``into``: sums, ``[num_heads_kv, num_keys, head_dim]``, whose columns are in the order of the kernel; or in 16 bits
    ``[packs, rows, places, head_dim]``.
    """
    q, dout, lse, delta, dq, kv, entries, softmax_scale = call
    num_lists = entries.shape[0]
    shift = _shift(q.dtype, softmax_scale)

    def make() -> Launch:
        parts = _parts(q, kv)
        num_items = q.shape[0] * kv.shape[1] * parts
        params = params_of("latent_backward")(
            entry_row=entries.stride(1), entry_list=entries.stride(0) if num_lists > 1 else 0,
            kv_row=kv.stride(0), kv_head=kv.stride(1), lse_row=lse.stride(0), lse_head=lse.stride(1),
            delta_row=delta.stride(0), delta_head=delta.stride(1), dq_row=dq.stride(0), dq_head=dq.stride(1),
            topk=entries.shape[2], num_keys=kv.shape[0], num_items=num_items, heads_kv=kv.shape[1],
            group=q.shape[1] // kv.shape[1], parts=parts, scale=softmax_scale, scale_log2=softmax_scale * LOG2_E,
            shift=shift, unit=2.0**-shift,
        )  # fmt: skip
        if form is not None:
            params.list_places, params.pack_places = form.places, q.shape[0] * form.places
        elif into.nbytes > _BYTES_APART:
            params.together = _TOGETHER
        kernel = latent_backward_kernel(q.device, q.dtype, form is not None)
        grid = min(num_items, sm_count(q.device))
        return Launch(kernel, grid, params, ((q, 1, _HEADS), (dout, 1, _HEADS)))

    key = (
        "latent_backward", q.device, q.dtype, softmax_scale, num_lists, q.shape, q.stride(), kv.shape, kv.stride(),
        entries.shape, entries.stride(), dout.stride(), lse.stride(), delta.stride(), form,
    )  # fmt: skip
    stream = current_stream(q.device)
    launch, counter = prepared(key, make), launch_counter(q.device, stream)
    with launch.lock:
        launch.point_maps(q.data_ptr(), dout.data_ptr())
        params = launch.params
        params.kv, params.entries = kv.data_ptr(), entries.data_ptr()
        params.lse, params.delta = lse.data_ptr(), delta.data_ptr()
        params.dq, params.counter = dq.data_ptr(), counter.data_ptr()
        if form is None:
            params.sums = into.data_ptr()
        else:
            params.given = into.data_ptr()
        launch.fire(stream)


def _shift(dtype: torch.dtype, softmax_scale: float) -> int:
    """Powers of two that P and dS times the softmax scale have in addition, so that in fp16 dS has about the size that
    it has without that scale.
    """
    if dtype != torch.float16 or not softmax_scale:
        return 0
    return min(_MOST_SHIFT, max(0, -math.frexp(abs(softmax_scale))[1] + 1))


def _in_order(sums: Tensor, dtype: torch.dtype) -> Tensor:
    """The gradient of keys, ``[keys, key heads, dim]``, of sums ``[key heads, keys, dim]`` whose columns are in the
    order of the kernel: in every 16, 0, 1, 8, 9 come first, then 2, 3, 10, 11 and so on.
    """
    heads, num_keys, dim = sums.shape
    dkv = torch.empty((num_keys, heads, dim), dtype=dtype, device=sums.device)
    dkv.view(num_keys, heads, dim // 16, 2, 4, 2).copy_(
        sums.view(heads, num_keys, -1, 4, 2, 2).transpose(3, 4).transpose(0, 1)
    )
    return dkv
