"""Attention over lists of keys by the kernels in Triton. Lists are never copied to the host.

Gradients of keys are summed over lists of the queries that see them, so they are always bitwise repeatable.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_magi.backends.base import check_support, with_output
from megatron_magi.backends.triton import support
from megatron_magi.backends.triton.attention import LOG2_E, readable, sparse_kernels
from megatron_magi.backends.triton.sparse_lists import lists_of, lists_of_queries
from megatron_magi.backends.triton.tuning import Kernel, Sizes, padded, sparse_sizes
from megatron_magi.operands.passes import BackwardInputs, ForwardInputs
from megatron_magi.operands.sparse_pattern import SparsePattern, num_blocks

_INSTEAD = "'reference', which takes the memory of dense logits"
_KEY_ELEMENTS = 32 * 128
"""Of queries that are loaded at a time for a single key."""


def why_not(device: torch.device, dtype: torch.dtype, dims: tuple[int, int]) -> str | None:
    """See `megatron_magi.backends.base.Sparse`."""
    return support.why_not(device, dtype, dims, _INSTEAD)


def packed_heads(group: int) -> int:
    """Ranges of a mask are left to the dense kernels: which are faster for them was not measured."""
    del group
    return 1


def forward(
    inputs: ForwardInputs, pattern: SparsePattern, softmax_scale: float, return_max_logits: bool = False
) -> tuple[Tensor, Tensor, Tensor | None]:
    """See `megatron_magi.backends.base.Sparse`."""
    q, k, v, out, lse, sink_lse = with_output(inputs, why_not)
    row_max = torch.empty_like(lse) if return_max_logits else lse
    sink = lse if sink_lse is None else sink_lse
    q, k, v, lists = readable(q), readable(k), readable(v), lists_of(pattern)
    grid, constants = _shape("forward", q, k, v, pattern)
    sparse_kernels().sparse_forward_kernel[grid](
        q, k, v, out, lse, row_max, sink, lists.entries, lists.spans, *_numbers(q, k, pattern, lists.spans),
        *_strides(q, k, v, out), *lse.stride(), *sink.stride(), softmax_scale * LOG2_E,
        **constants, HAS_SINK=sink_lse is not None, KEEPS_MAX=return_max_logits,
    )  # fmt: skip
    return out, lse, row_max.amax(0) if return_max_logits else None


def backward(
    inputs: BackwardInputs, pattern: SparsePattern, softmax_scale: float, deterministic: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """``(dq, dk, dv)`` of checked arguments; see `megatron_magi.backends.base.Sparse`."""
    del deterministic
    q, k, v, dout, lse, delta = inputs
    check_support(why_not, q, v)
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    q, k, v, dout = (readable(x) for x in (q, k, v, dout.to(q.dtype)))
    common = (q, k, v, dout, lse, delta)
    strides = _strides(*common)
    scales = softmax_scale * LOG2_E, softmax_scale
    lists = lists_of(pattern)
    grid, constants = _shape("query_gradient", q, k, v, pattern)
    sparse_kernels().sparse_query_gradient_kernel[grid](
        *common, dq, lists.entries, lists.spans, *_numbers(q, k, pattern, lists.spans),
        *strides, *_strides(dq), *scales, **constants,
    )  # fmt: skip
    lists = lists_of_queries(pattern, lists, q.shape[0], k.shape[0])
    grid, constants = _shape("key_gradient", q, k, v, pattern)
    sparse_kernels().sparse_key_gradient_kernel[grid](
        *common, dk, dv, lists.entries, lists.spans, *_numbers(q, k, pattern, lists.spans),
        *strides, *_strides(dk, dv), *scales, **constants,
    )  # fmt: skip
    return dq, dk, dv


def _strides(*tensors: Tensor) -> list[int]:
    """Of rows and heads of each."""
    return [stride for x in tensors for stride in x.stride()[:2]]


def _numbers(q: Tensor, k: Tensor, pattern: SparsePattern, spans: Tensor) -> tuple[int, ...]:
    """``num_lists`` to ``q_block`` of the kernels."""
    return pattern.num_lists, spans.shape[1], q.shape[0], k.shape[0], k.shape[1], pattern.q_block


def sizes_of(kernel: Kernel, dims: tuple[int, int], itemsize: int, places: int) -> Sizes:
    """The sizes of a kernel, ``places`` as of `sparse_sizes`; a single key is a tile of its own."""
    if kernel == "key_gradient" and places == 1:
        return Sizes(1, min(64, _KEY_ELEMENTS // padded(max(dims))), 4, 1)
    return sparse_sizes(kernel, dims, itemsize, places)


def _shape(
    kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, pattern: SparsePattern
) -> tuple[tuple[int], dict[str, Any]]:
    """The grid of a kernel, and what it is compiled for."""
    dims, group, of_keys = (q.shape[2], v.shape[2]), q.shape[1] // k.shape[1], kernel == "key_gradient"
    places = pattern.k_block if of_keys else pattern.q_block * group
    found = sizes_of(kernel, dims, q.element_size(), places)
    parts = num_blocks(places, found.rows)
    blocks = num_blocks(k.shape[0], pattern.k_block) if of_keys else num_blocks(q.shape[0], pattern.q_block)
    return (blocks * parts * k.shape[1],), {
        "GROUP": group,
        "DK": dims[0],
        "DV": dims[1],
        "PAD_K": padded(dims[0]),
        "PAD_V": padded(dims[1]),
        "ROWS": found.rows,
        "PARTS": parts,
        "COLUMNS": found.columns,
        "K_BLOCK": pattern.k_block,
        "CAUSAL": pattern.causal,
        "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32",
        "num_warps": found.warps,
        "num_stages": found.stages,
    }
