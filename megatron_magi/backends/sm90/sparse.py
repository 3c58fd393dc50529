"""Sparse attention on Hopper GPUs: the kernels ``csrc/attention/sm90/sparse_*``.

Takes fp16 and bf16, head dims 64 and 128. Lists are never copied to the host.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_magi.backends.base import check_support, with_output
from megatron_magi.backends.sm90 import sparse_kernels as kernels
from megatron_magi.backends.sm90 import sparse_single_keys
from megatron_magi.backends.sm90.kernels import params as params_of
from megatron_magi.backends.sm90.sparse_backward import backward_by_keys, backward_by_tiles, may_add_dq
from megatron_magi.backends.sm90.sparse_lists import lists_of
from megatron_magi.backends.sm90.support import (
    LOG2_E,
    in_dtype,
    kernels_exist,
    launch_counter,
    sm_count,
)
from megatron_magi.backends.sm90.support import why_not as why_no_kernels
from megatron_magi.cuda.launch import Launch, prepared
from megatron_magi.cuda.streams import current_stream
from megatron_magi.operands.passes import BackwardInputs, ForwardInputs
from megatron_magi.operands.sparse_pattern import SparsePattern


def why_not(device: torch.device, dtype: torch.dtype, dims: tuple[int, int]) -> str | None:
    """The reason why there are no kernels for such tensors; None if there are."""
    if not kernels_exist(device, dtype, kernels.DIMS[0]):
        return why_no_kernels(device, dtype, kernels.DIMS[0], "'reference', which takes the memory of dense logits")
    if dims in kernels.DIMS:
        return None
    known = " and ".join(str(dim) for dim, _ in kernels.DIMS)
    return f"q, v: sparse impl 'ffa' takes head dims {known}, got {dims[0]} (q, k) and {dims[1]} (v); use 'reference'"


def packed_heads(group: int) -> int:
    """Heads of a group whose rows share a tile."""
    return kernels.heads_of_tile(group, 2)


def forward(
    inputs: ForwardInputs, pattern: SparsePattern, softmax_scale: float, return_max_logits: bool = False
) -> tuple[Tensor, Tensor, Tensor | None]:
    """See `megatron_magi.backends.base.Sparse`."""
    q, k, v, out, lse, sink_lse = with_output(inputs, why_not)
    _, num_heads, dim = q.shape
    max_logits = lse.new_full((num_heads,), -torch.inf) if return_max_logits else None
    q, k, v = map(kernels.readable, (q, k, v))
    stream, lists, indexed = current_stream(q.device), lists_of(pattern), pattern.k_block == 1
    group = num_heads // k.shape[1]
    groups = kernels.forward_groups(group, pattern.q_block)

    def make() -> Launch:
        params = params_of("sparse_forward")(
            tiles=kernels.cut_tiles(q, k, pattern, groups),
            k_row=k.stride(0), k_head=k.stride(1), v_row=v.stride(0), v_head=v.stride(1),
            out_row=out.stride(0), out_head=out.stride(1), lse_row=lse.stride(0), lse_head=lse.stride(1),
            scale_log2=softmax_scale * LOG2_E, logit_scale=softmax_scale,
        )  # fmt: skip
        if sink_lse is not None:
            params.sink_row, params.sink_head = sink_lse.stride()
        kernel = kernels.forward_kernel(q.device, q.dtype, dim, groups, indexed)
        maps = (kernels.query_box(q, group), (k, kernels.PIECE), (v, kernels.PIECE))
        # With one consumer warpgroup two thread blocks share an SM.
        grid = min(params.tiles.num_items, sm_count(q.device) * (3 - groups))
        return Launch(kernel, grid, params, maps)

    key = (
        "sparse_forward", q.device, stream, q.dtype, softmax_scale, pattern.q_block, pattern.k_block,
        pattern.causal, pattern.num_lists, q.shape, k.shape, q.stride(), k.stride(), v.stride(),
        None if sink_lse is None else sink_lse.stride(),
    )  # fmt: skip
    launch, counter = prepared(key, make), launch_counter(q.device, stream)
    with launch.lock:
        launch.point_maps(q.data_ptr(), k.data_ptr(), v.data_ptr())
        params = launch.params
        lists.point(params.tiles, counter)
        params.keys, params.values = k.data_ptr(), v.data_ptr()
        params.out, params.lse = out.data_ptr(), lse.data_ptr()
        params.sink_lse = 0 if sink_lse is None else sink_lse.data_ptr()
        params.max_logits = 0 if max_logits is None else max_logits.data_ptr()
        launch.fire(stream)
    return out, lse, max_logits


def backward(
    inputs: BackwardInputs, pattern: SparsePattern, softmax_scale: float, deterministic: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """``(dq, dk, dv)`` of checked arguments; see `megatron_magi.backends.reference.sparse.backward`.

    Raises:
        ValueError: the device, dtype or head dims are not supported, or lists of blocks have 2^31 numbers or more.
    """
    q, k, v, dout, lse, delta = inputs
    check_support(why_not, q, v)
    tensors = tuple(kernels.readable(t) for t in (q, k, v, in_dtype(dout, q.dtype)))
    if pattern.k_block == 1:
        lists = lists_of(pattern)
        return sparse_single_keys.backward(tensors, lse, delta, pattern, lists, softmax_scale, deterministic)
    alone = not deterministic and may_add_dq(q, k, pattern)
    lists = None if alone and pattern.is_mask else lists_of(pattern)
    if alone:
        return backward_by_keys(tensors, lse, delta, pattern, lists, softmax_scale, adds_dq=True)
    dq = backward_by_tiles(tensors, lse, delta, pattern, lists, softmax_scale)
    return dq, *backward_by_keys(tensors, lse, delta, pattern, lists, softmax_scale, adds_dq=False)[1:]
