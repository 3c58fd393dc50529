"""Attention over lists of latent keys by the kernels in Triton. Lists are never copied to the host.

The backward keeps p and ds of some queries in memory, from which it computes both gradients. That of keys is added up
in fp32: atomically, or, to be bitwise repeatable, from parts of these queries, in their order.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_magi.backends.base import check_support, with_output
from megatron_magi.backends.triton import support
from megatron_magi.backends.triton.attention import LOG2_E, latent_kernels, readable
from megatron_magi.backends.triton.tuning import LatentKernel, kind_of, latent_sizes, padded
from megatron_magi.operands.passes import BackwardInputs, ForwardInputs
from megatron_magi.operands.sparse_pattern import SparsePattern, num_blocks, sorted_into

CHUNK_BYTES = 1 << 30
"""Memory for what the backward keeps of the queries that are computed together."""

_INSTEAD = "'reference', which is slow"
_MOST_BEHIND = 64
_MOST_VALUES = 512
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_DELTA_ROWS = 16
_DEPTH, _WIDTH = 64, 128
"""Elements of rows that are multiplied, and that are computed, at a time in the backward."""


def why_not(device: torch.device, dtype: torch.dtype, dims: tuple[int, int]) -> str | None:
    """See `megatron_magi.backends.base.Latent`."""
    if (reason := support.why_not_device(device, _INSTEAD)) is not None:
        return reason
    if dtype not in _DTYPES:
        return f"q: impl 'triton' takes fp16, bf16 and fp32, got {dtype}; use {_INSTEAD}"
    if dims[1] > _MOST_VALUES:
        return f"dim_v: impl 'triton' takes up to {_MOST_VALUES}, got {dims[1]}; use {_INSTEAD}"
    if dims[0] - dims[1] > _MOST_BEHIND:
        behind = f"{dims[0] - dims[1]} of head_dim {dims[0]}"
        return f"kv: impl 'triton' takes up to {_MOST_BEHIND} elements behind the values, got {behind}; use {_INSTEAD}"
    return None


def forward(
    inputs: ForwardInputs, pattern: SparsePattern, softmax_scale: float, return_max_logits: bool = False
) -> tuple[Tensor, Tensor, Tensor | None]:
    """See `megatron_magi.backends.base.Latent`."""
    q, kv, v, out, lse, sink_lse = with_output(inputs, why_not)
    num_rows, num_heads, _ = q.shape
    row_max = torch.empty_like(lse) if return_max_logits else lse
    sink = lse if sink_lse is None else sink_lse
    if not num_rows or not kv.shape[0]:
        lse.copy_(sink) if sink_lse is not None else lse.fill_(-torch.inf)
        return out.zero_(), lse, lse.new_full((num_heads,), -torch.inf) if return_max_logits else None
    q, kv = readable(q), readable(kv)
    constants = _constants("forward", q, kv, v)
    entries, numbers = _lists(pattern, kv)
    latent_kernels().latent_forward_kernel[(num_rows * kv.shape[1] * constants["PARTS"],)](
        q, kv, out, lse, row_max, sink, entries, *numbers, *_strides(q, kv, out, lse, sink), softmax_scale * LOG2_E,
        **constants, HAS_SINK=sink_lse is not None, KEEPS_MAX=return_max_logits,
    )  # fmt: skip
    return out, lse, row_max.amax(0) if return_max_logits else None


def row_delta(dout: Tensor, out: Tensor) -> Tensor:
    """See `megatron_magi.backends.base.Latent`.

    Raises:
        ValueError: the device is not supported.
    """
    if (reason := support.why_not_device(out.device, _INSTEAD)) is not None:
        raise ValueError(reason)
    num_rows, num_heads, dim_v = out.shape
    delta = torch.empty((num_rows, num_heads), dtype=torch.float32, device=out.device)
    if num_rows:
        dout, out = readable(dout), readable(out)
        parts = num_blocks(num_heads, _DELTA_ROWS)
        latent_kernels().latent_delta_kernel[(num_rows * parts,)](
            dout, out, delta, num_heads, *_strides(dout, out, delta),
            DV=dim_v, PAD_V=padded(dim_v), ROWS=_DELTA_ROWS, PARTS=parts,
        )  # fmt: skip
    return delta


def backward(
    inputs: BackwardInputs, pattern: SparsePattern, softmax_scale: float, deterministic: bool
) -> tuple[Tensor, Tensor]:
    """``(dq, dkv)`` of checked arguments; see `megatron_magi.backends.base.Latent`."""
    q, kv, v, dout, lse, delta = inputs
    check_support(why_not, q, v)
    if not q.shape[0] or not kv.shape[0]:
        return torch.zeros_like(q), torch.zeros_like(kv)
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    sums = torch.zeros(kv.shape, dtype=torch.float32, device=kv.device)
    tensors = (readable(q), readable(kv), readable(dout.to(q.dtype)), lse, delta)
    (num_rows, num_heads, dim), (_, heads_kv, _), topk = q.shape, kv.shape, pattern.tensors[0].shape[2]
    of_scores = num_heads * _score_step(topk) * 2 * q.element_size()
    of_row = of_scores + (4 * heads_kv * topk * dim if deterministic else 0)
    step = min(num_rows, max(1, CHUNK_BYTES // max(1, of_row)))
    scores = q.new_empty((2, step, num_heads, _score_step(topk)))
    parts = sums.new_empty((step, heads_kv, topk, dim)) if deterministic else None
    for first in range(0, num_rows, step):
        rows = slice(first, first + step)
        mine = tuple(x if x is tensors[1] else x[rows] for x in tensors)
        part = SparsePattern.of_keys(pattern.tensors[0][:, rows])
        _chunk_gradients(mine, v, part, softmax_scale, scores, dq[rows], sums if parts is None else parts)
        if parts is not None:
            _add_in_order(parts, sums, part)
    return dq, sums.to(kv.dtype)


def _score_step(topk: int) -> int:
    """Elements between p, and ds, of heads: a multiple of 16 bytes."""
    return 64 * num_blocks(topk, 64)


def _chunk_gradients(
    tensors: tuple[Tensor, ...],
    v: Tensor,
    pattern: SparsePattern,
    softmax_scale: float,
    scores: Tensor,
    dq: Tensor,
    into: Tensor,
) -> None:
    """Writes dq of some queries, and adds the gradient of keys to ``into``, or, if that has four dimensions, writes its
    parts there.

    Args:
        tensors: q, kv, dout, lse and delta.
        scores: memory for p and ds.
    """
    q, kv, dout = tensors[:3]
    num_places, dim, kernels = q.shape[0] * kv.shape[1], q.shape[2], latent_kernels()
    entries, numbers = _lists(pattern, kv)
    topk, step = entries.shape[2], scores.shape[3]
    constants = _constants("scores", q, kv, v)
    del constants["PAD_V"]
    if topk:
        grid = num_places * num_blocks(topk, constants["COLUMNS"]) * constants["PARTS"]
        kernels.latent_scores_kernel[(grid,)](
            *tensors, *scores, entries, *numbers, step, *_strides(*tensors), softmax_scale * LOG2_E, **constants,
            WIDTH=min(_DEPTH, padded(v.shape[2])),
        )  # fmt: skip
    width = min(_WIDTH, padded(dim))
    tiles, others = num_blocks(dim, width), {"D": dim, "WIDTH": width}
    constants = _constants("query_gradient", q, kv, v)
    for name in ("DV", "DR", "PAD_V", "PAD_R"):
        del constants[name]
    kernels.latent_query_gradient_kernel[(num_places * constants["PARTS"] * tiles,)](
        kv, scores[1], dq, entries, *numbers, step, *_strides(kv, dq), softmax_scale, **constants, **others
    )
    constants = _constants("key_gradient", q, kv, v)
    for name in ("DR", "PAD_V", "PAD_R"):
        del constants[name]
    if topk:
        kernels.latent_key_gradient_kernel[(num_places * num_blocks(topk, constants["COLUMNS"]) * tiles,)](
            q, dout, *scores, into, entries, *numbers, step, *_strides(q, dout), softmax_scale, **constants, **others,
            STORES=into.ndim == 4,
        )  # fmt: skip


def _add_in_order(parts: Tensor, sums: Tensor, pattern: SparsePattern) -> None:
    """Adds parts of the gradient of keys, ``[queries, num_heads_kv, topk, head_dim]``, to ``sums``, query by query."""
    (num_keys, heads_kv, dim), listed = sums.shape, pattern.tensors[0]
    head = torch.arange(heads_kv, device=sums.device)[:, None]
    named = listed.transpose(0, 1).long()  # as parts, [queries, key heads, topk]
    place = torch.where(named < 0, num_keys * heads_kv, named * heads_kv + head)  # what is no key comes last
    order, bounds = sorted_into(place, num_keys * heads_kv)
    latent_kernels().latent_sum_kernel[(num_keys * heads_kv,)](parts, sums, order, bounds, D=dim, PAD=padded(dim))


def _strides(*tensors: Tensor) -> list[int]:
    """Of rows and heads of each."""
    return [stride for x in tensors for stride in x.stride()[:2]]


def _lists(pattern: SparsePattern, kv: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """``entries`` ``[lists, rows, topk]``, and ``num_keys`` to ``entry_list`` of the kernels."""
    entries = pattern.tensors[0]
    if entries.stride(2) != 1:
        entries = entries.contiguous()
    of_list = entries.stride(0) if pattern.num_lists > 1 else 0
    return entries, (kv.shape[0], kv.shape[1], entries.shape[2], entries.stride(1), of_list)


def _constants(kernel: LatentKernel, q: Tensor, kv: Tensor, v: Tensor) -> dict[str, Any]:
    """What a kernel is compiled for."""
    group, dim_v, behind = q.shape[1] // kv.shape[1], v.shape[2], q.shape[2] - v.shape[2]
    found = latent_sizes(kernel, kind_of(q.device), q.element_size(), group)
    return {
        "GROUP": group,
        "DV": dim_v,
        "DR": behind,
        "PAD_V": padded(dim_v),
        "PAD_R": padded(max(behind, 1)),
        "ROWS": found.rows,
        "PARTS": num_blocks(group, found.rows),
        "COLUMNS": found.columns,
        "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32",
        "num_warps": found.warps,
        "num_stages": found.stages,
    }
