"""Attention over lists of latent keys by the kernels in Triton. Lists are never copied to the host.

The gradient of keys is added up in fp32: atomically, or, to be bitwise repeatable, from parts that the queries of a
chunk leave in memory, which are added in the order of the queries.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_magi.backends.triton import support
from megatron_magi.backends.triton.attention import LOG2_E, latent_kernels, readable
from megatron_magi.backends.triton.tuning import Kernel, kind_of, latent_sizes, padded
from megatron_magi.operands.passes import BackwardInputs, ForwardInputs
from megatron_magi.operands.sparse_pattern import SparsePattern, num_blocks

PART_BYTES = 1 << 30
"""Memory for the parts of the gradient of keys in deterministic mode."""

_INSTEAD = "'reference', which is slow"
_MOST_BEHIND = 64
_MOST_VALUES = {torch.float16: 512, torch.bfloat16: 512, torch.float32: 128}
_DELTA_ROWS = 16


def why_not(device: torch.device, dtype: torch.dtype, dims: tuple[int, int]) -> str | None:
    """See `megatron_magi.backends.base.Latent`."""
    if (reason := support.why_not_device(device, _INSTEAD)) is not None:
        return reason
    if dtype not in _MOST_VALUES:
        return f"q: impl 'triton' takes fp16, bf16 and fp32, got {dtype}; use {_INSTEAD}"
    if dims[1] > _MOST_VALUES[dtype]:
        return f"dim_v: impl 'triton' takes up to {_MOST_VALUES[dtype]} in {dtype}, got {dims[1]}; use {_INSTEAD}"
    if dims[0] - dims[1] > _MOST_BEHIND:
        behind = f"{dims[0] - dims[1]} of head_dim {dims[0]}"
        return f"kv: impl 'triton' takes up to {_MOST_BEHIND} elements behind the values, got {behind}; use {_INSTEAD}"
    return None


def forward(
    inputs: ForwardInputs, pattern: SparsePattern, softmax_scale: float, return_max_logits: bool = False
) -> tuple[Tensor, Tensor, Tensor | None]:
    """``(out, lse, max_logits)`` of checked arguments; see `megatron_magi.backends.base.Latent`.

    Raises:
        ValueError: the device, dtype or head dims are not supported.
    """
    q, kv, v, sink_lse = inputs
    _check_support(q, v)
    num_rows, num_heads, _ = q.shape
    out = q.new_empty((num_rows, num_heads, v.shape[2]))
    lse = torch.empty((num_rows, num_heads), dtype=torch.float32, device=q.device)
    row_max = torch.empty_like(lse) if return_max_logits else lse
    sink = lse if sink_lse is None else sink_lse.expand(num_rows, num_heads)
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
    """``(dq, dkv)`` of checked arguments; see `megatron_magi.backends.base.Latent`.

    Raises:
        ValueError: the device, dtype or head dims are not supported.
    """
    q, kv, v, dout, lse, delta = inputs
    _check_support(q, v)
    if not q.shape[0] or not kv.shape[0]:
        return torch.zeros_like(q), torch.zeros_like(kv)
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    sums = torch.zeros(kv.shape, dtype=torch.float32, device=kv.device)
    tensors = (readable(q), readable(kv), readable(dout.to(q.dtype)), lse, delta)
    constants = _constants("query_gradient", q, kv, v)
    entries, numbers = _lists(pattern, kv)
    latent_kernels().latent_query_gradient_kernel[(q.shape[0] * kv.shape[1] * constants["PARTS"],)](
        *tensors, dq, entries, *numbers, *_strides(*tensors, dq), softmax_scale * LOG2_E, softmax_scale, **constants
    )
    if deterministic:
        _add_in_order(tensors, v, sums, pattern, softmax_scale)
    else:
        _key_gradient(tensors, v, sums, pattern, softmax_scale, stores=False)
    return dq, sums.to(kv.dtype)


def _key_gradient(
    tensors: tuple[Tensor, ...], v: Tensor, into: Tensor, pattern: SparsePattern, softmax_scale: float, *, stores: bool
) -> None:
    """Adds the gradient of keys to ``into``, or writes its parts there, as `latent_key_gradient_kernel` says."""
    q, kv = tensors[:2]
    constants = _constants("key_gradient", q, kv, v)
    entries, numbers = _lists(pattern, kv)
    steps = num_blocks(entries.shape[2], constants["COLUMNS"])
    if steps:
        latent_kernels().latent_key_gradient_kernel[(q.shape[0] * kv.shape[1] * steps,)](
            *tensors, into, entries, *numbers, *_strides(*tensors), softmax_scale * LOG2_E, softmax_scale,
            **constants, STORES=stores,
        )  # fmt: skip


def _add_in_order(
    tensors: tuple[Tensor, ...], v: Tensor, sums: Tensor, pattern: SparsePattern, softmax_scale: float
) -> None:
    """Adds the gradient of keys to ``sums``, query by query, over chunks whose parts fit `PART_BYTES`."""
    q, kv, *others = tensors
    (num_keys, heads_kv, dim), topk = kv.shape, pattern.tensors[0].shape[2]
    of_row = 4 * heads_kv * topk * dim
    step = max(1, PART_BYTES // max(1, of_row))
    parts = sums.new_empty((min(step, q.shape[0]), heads_kv, topk, dim))
    head = torch.arange(heads_kv, device=kv.device)[:, None]
    sum_of = torch.arange(num_keys * heads_kv + 1, device=kv.device)
    for first in range(0, q.shape[0], step):
        rows = slice(first, first + step)
        listed = pattern.tensors[0][:, rows]
        mine = (q[rows], kv, *(x[rows] for x in others))
        _key_gradient(mine, v, parts, SparsePattern((listed,), 1, 1, False), softmax_scale, stores=True)
        named = listed.transpose(0, 1).long()  # as parts, [rows, key heads, topk]
        place = torch.where(named < 0, num_keys * heads_kv, named * heads_kv + head)  # what is no key comes last
        place, order = torch.sort(place.flatten(), stable=True)
        latent_kernels().latent_sum_kernel[(num_keys * heads_kv,)](
            parts, sums, order, torch.searchsorted(place, sum_of), D=dim, PAD=padded(dim)
        )


def _check_support(q: Tensor, v: Tensor) -> None:
    if (reason := why_not(q.device, q.dtype, (q.shape[2], v.shape[2]))) is not None:
        raise ValueError(reason)


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


def _constants(kernel: Kernel, q: Tensor, kv: Tensor, v: Tensor) -> dict[str, Any]:
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
