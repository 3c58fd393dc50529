"""`flex_flash_attn_func`: attention over slices given as range tensors, as users of MagiAttention know it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from megatron_magi.checks import flag
from megatron_magi.operands.meta import AttnForwardMeta
from megatron_magi.operands.options import check_qkv, check_sink, check_tensor, make_options
from megatron_magi.ops.mask_tensors import HostRanges, ranges_of_arrays, ranges_of_tensors
from megatron_magi.ops.slice_attention import attend
from megatron_magi.ops.slice_operator import slice_attention_traced
from megatron_magi.ops.slice_passes import SliceCall
from megatron_magi.ops.sparse_attention import GivenOptions, attend_pattern
from megatron_magi.ops.sparse_ranges import sparse_pattern_of

RangesLike = Tensor | Sequence[Sequence[int]] | None
TypesLike = Tensor | Sequence[int] | None


def flex_flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_ranges: RangesLike = None,
    k_ranges: RangesLike = None,
    attn_type_map: TypesLike = None,
    *,
    sink: Tensor | None = None,
    sink_layout: str = "sh",
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    deterministic: bool = False,
    sm_margin: int = 0,
    disable_fwd_atomic_reduction: bool = False,
    disable_bwd_dkv_atomic_reduction: bool = False,
    ref_block_size: tuple[int, int] | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    auto_range_merge: bool = False,
    swap_ab: bool = False,
    pack_gqa: bool = False,
    cat_gqa: bool = False,
    sparse_load: bool = False,
    swap_bwd_qk_loop: bool = False,
    return_max_logits: bool = False,
    sanity_check: bool = False,
    impl: str = "auto",
) -> tuple[Tensor, AttnForwardMeta]:
    """Computes attention: queries ``q_ranges[i]`` see keys ``k_ranges[i]`` as type ``attn_type_map[i]``. Autograd.

    Args:
        q: ``[num_tokens_q, num_heads_q, head_dim]``, fp16, bf16, fp32 or fp64, any strides.
        k: ``[num_tokens_k, num_heads_kv, head_dim]``; num_heads_kv divides num_heads_q.
        v: ``[num_tokens_k, num_heads_kv, head_dim_v]``. All of q, k, v must be finite, padding too.
        q_ranges, k_ranges: ``[n, 2]`` half-open ranges, int tensors on any device or nested
            lists. Ranges may repeat as long as no (query, key) pair is in two slices. Both None:
            one slice of all queries and keys. Tensors on a GPU are copied to the host once, and again only
            when they were changed (see `megatron_magi.ops.mask_tensors.DeviceRanges`). In a function that is
            compiled give tensors: lists are constants of the graph, each new one means compiling again.
        attn_type_map: ``[n]`` of 0 full, 1 causal (bottom-right), 2 inverse causal (top-left),
            3 both; all full when None.
        sink: logits without a value in the denominator, any float dtype, ``[num_sinks,
            num_heads_q]`` with ``sink_layout="sh"``, ``[num_tokens_q, num_sinks, num_heads_q]`` with
            ``"ssh"``. Its gradient comes in its own dtype.
        softmax_scale: ``1 / sqrt(head_dim)`` when None.
        softcap: 0 for none, else logits become ``softcap * tanh(logit / softcap)``.
        deterministic: bitwise repeatable results.
        sm_margin: streaming multiprocessors left to communication, for kernels that can.
        return_max_logits: fill ``meta.max_logits``.
        sanity_check: see `megatron_magi.slice_attention`.
        impl: ``auto`` or the name of an implementation, which never falls back.
        disable_fwd_atomic_reduction, disable_bwd_dkv_atomic_reduction, ref_block_size,
            max_seqlen_q, max_seqlen_k, auto_range_merge, swap_ab, pack_gqa, cat_gqa, sparse_load,
            swap_bwd_qk_loop: accepted so that existing calls run. They tune a kernel in
            MagiAttention; here the implementation decides by itself, so they are unnecessary and
            change no result. Ranges that are a mask of blocks go to the kernels of `block_sparse_attention`
            where these fill their tiles better (see `megatron_magi.ops.sparse_ranges`).

    Returns:
        ``(out, meta)``: out ``[num_tokens_q, num_heads_q, head_dim_v]`` in the dtype of q;
        ``meta.lse`` ``[num_tokens_q, num_heads_q]`` and ``meta.max_logits`` ``[num_heads_q]``, fp32
        (fp64 for fp64 inputs). Tokens in no slice get out 0, lse -inf (or the sink's).

    Raises:
        ValueError: an argument, named in the message, has a wrong shape, dtype or value; two
            slices cover a common (query, key) pair (both are named).
    """
    if not isinstance(sink_layout, str) or sink_layout not in ("sh", "ssh"):
        raise ValueError(f"sink_layout: expected 'sh' or 'ssh', got {sink_layout!r}")
    if (q_ranges is None) != (k_ranges is None):
        raise ValueError("q_ranges, k_ranges: give both or none")
    flag(deterministic, "deterministic")
    flag(return_max_logits, "return_max_logits")
    for name, x in (("q", q), ("k", k), ("v", v), *([] if sink is None else [("sink", sink)])):
        check_tensor(name, x)
    if sink is not None and sink.ndim != len(sink_layout):
        raise ValueError(f"sink: layout {sink_layout!r} has {len(sink_layout)} dimensions, got {list(sink.shape)}")
    if q_ranges is None or k_ranges is None:
        q_ranges, k_ranges = [(0, q.shape[0])], [(0, k.shape[0])]
    ranges = {"q_ranges": q_ranges, "k_ranges": k_ranges}
    if attn_type_map is not None:
        ranges["attn_type_map"] = attn_type_map
    if torch.compiler.is_compiling():
        return slice_attention_traced(
            q, k, v, [_as_tensor(name, x) for name, x in ranges.items()],
            sink=sink, softmax_scale=softmax_scale, softcap=softcap, return_max_logits=return_max_logits,
            deterministic=deterministic, sm_margin=sm_margin, sanity_check=sanity_check, impl=impl,
        )  # fmt: skip
    check_qkv(q, k, v)
    if sink is not None:
        check_sink(sink, q)
    options = make_options(q, softmax_scale, softcap, deterministic, sm_margin, sanity_check)
    on_host = _on_host(ranges, q.shape[0], k.shape[0])
    pattern = sparse_pattern_of(on_host, q, k, v, options) if impl in ("auto", "ffa") else None
    if pattern is not None:
        given = GivenOptions(sink, softmax_scale, return_max_logits, deterministic, sanity_check, "ffa")
        return attend_pattern(q, k, v, pattern, given)
    return attend(q, k, v, sink, SliceCall(on_host.mask.bands, options, impl, return_max_logits))


def _on_host(ranges: dict[str, RangesLike | TypesLike], num_rows: int, num_keys: int) -> HostRanges:
    if all(isinstance(x, Tensor) for x in ranges.values()):
        return ranges_of_tensors(list(ranges.values()), num_rows, num_keys)
    return ranges_of_arrays([_as_array(name, x) for name, x in ranges.items()], num_rows, num_keys)


def _as_tensor(name: str, values: RangesLike | TypesLike) -> Tensor:
    """The values as an input of a compiled graph."""
    if isinstance(values, Tensor):
        return values
    if isinstance(values, np.ndarray):
        return torch.from_numpy(values)
    items = [list(item) if isinstance(item, Iterable) else item for item in values]
    for item in items:
        for number in item if isinstance(item, list) else [item]:
            # These the tensor would round.
            if isinstance(number, (bool, float)):  # not a union, which Dynamo of torch 2.8 cannot read
                raise ValueError(f"{name}: expected integers, got {number!r}")
    return torch.tensor(items, dtype=torch.int64, device="cpu")


def _as_array(name: str, values: Tensor | Iterable) -> np.ndarray:
    if isinstance(values, Tensor):
        if values.is_meta:
            raise ValueError(f"{name}: expected integers, got a tensor on the meta device")
        return values.numpy(force=True)
    if isinstance(values, np.ndarray):
        return values
    if not isinstance(values, Iterable) or isinstance(values, str | bytes):
        raise ValueError(f"{name}: expected a tensor or a list, got {values!r}")
    items = [tuple(item) if isinstance(item, Iterable) else item for item in values]
    if len({len(item) if isinstance(item, tuple) else 0 for item in items}) > 1:
        raise ValueError(f"{name}: expected entries of one length, got {items}")
    return np.array(items, dtype=None if items else np.int64)
