"""The kernels that attention of a model can use under any mask, to compile them ahead of time."""

from __future__ import annotations

import math

import torch

from megatron_magi.backends.sm90 import kernels as hopper_kernels
from megatron_magi.backends.sm90.cost import KERNELS
from megatron_magi.backends.sm90.kernels import element, source_of


def needed_kernels(
    dtype: torch.dtype,
    dims: tuple[int, int],
    group: int,
    *,
    deterministic: bool,
    softcap: bool = False,
    stream_kv: bool = False,
    captured: bool = False,
) -> list[tuple[str, tuple[str, ...]]]:
    """Sources and macros of all kernels that `choices` can choose, forward and backward.

    Args:
        dtype: of q, k and v.
        dims: head dims of queries and keys, and of values, for which there are kernels.
        group: query heads of a key head.
        deterministic: every backward is bitwise repeatable.
        softcap: logits are capped.
        stream_kv: only kernels that wait for fetched keys.
        captured: only kernels that read a mask's numbers from memory.
    """
    if captured:
        plain = needed_kernels(dtype, dims, group, deterministic=deterministic, softcap=softcap, stream_kv=stream_kv)
        same = {source_of("row_delta"), source_of("postprocess_dq")}
        return [(source, (*macros, "CAPTURED=1")) for source, macros in plain if source not in same]
    found: list[tuple[str, tuple[str, ...]]] = []
    if not stream_kv:
        found += [("preprocess", ()), ("row_delta", (f"HEAD_DIM_V={dims[1]}", element(dtype)))]
    wide, forward = hopper_kernels.kernel_dims(dims), hopper_kernels.kernel_dims(dims, backward=False)
    assert wide is not None and forward is not None, f"head dims {dims}"
    dims = wide
    found += [
        ("forward", hopper_kernels.forward_macros(dtype, forward, tile, softcap, stream_kv))
        for tile in hopper_kernels.FORWARD_TILES[forward]
    ]
    whole = dims in hopper_kernels.WHOLE_DIMS
    if whole and stream_kv:
        found.append(("preprocess", hopper_kernels.delta_macros(dtype, dims[1])))
    if whole and not deterministic:
        found.append(("backward", hopper_kernels.backward_macros(dtype, dims, softcap, True, stream_kv)))
        found.append(("postprocess_dq", hopper_kernels.postprocess_dq_macros(dtype, dims[0], stream_kv)))
        if group > 1:  # only query heads that share a key head are split
            found.append(("postprocess_keys", hopper_kernels.postprocess_keys_macros(dtype, dims[0], stream_kv)))
    packs = math.gcd(group, KERNELS.most_packed_heads) > 1
    if whole and (deterministic or packs or dims[0] == 128):  # as in `choices.sums_pay`
        found.append(("backward", hopper_kernels.backward_macros(dtype, dims, softcap, False, stream_kv)))
        found.append(("backward_queries", hopper_kernels.queries_macros(dtype, dims, softcap, stream_kv)))
    if not whole and not stream_kv:
        found.append(("backward_keys", hopper_kernels.keys_macros(dtype, dims, softcap)))
        found.append(("backward_queries", hopper_kernels.queries_macros(dtype, dims, softcap)))
    return [(source_of(name), macros) for name, macros in found]
