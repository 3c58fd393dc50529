"""The kernels that attention of a model can use under any mask, to compile them ahead of time."""

from __future__ import annotations

import math

import torch

from megatron_magi.backends.sm90 import kernels
from megatron_magi.backends.sm90.cost import KERNELS
from megatron_magi.backends.sm90.kernels import source_of


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
    wide, forward_dims = kernels.kernel_dims(dims), kernels.kernel_dims(dims, backward=False)
    assert wide is not None and forward_dims is not None, f"head dims {dims}"
    whole = wide in kernels.WHOLE_DIMS
    found = [] if stream_kv else [kernels.preprocess(), kernels.row_delta(dtype, dims[1])]
    tiles = kernels.FORWARD_TILES[forward_dims]
    found += [kernels.forward(dtype, forward_dims, tile, softcap, stream_kv) for tile in tiles]
    if whole and stream_kv:
        found.append(kernels.preprocess_delta(dtype, wide[1]))
    if whole and not deterministic:
        found.append(kernels.backward(dtype, wide, softcap, True, stream_kv))
        found.append(kernels.postprocess_dq(dtype, wide[0], stream_kv))
        if group > 1:  # only query heads that share a key head are split
            found.append(kernels.postprocess_keys(dtype, wide[0], stream_kv))
    packs = math.gcd(group, KERNELS.most_packed_heads) > 1
    if whole and (deterministic or packs or wide[0] == 128):  # as in `choices.sums_pay`
        found.append(kernels.backward(dtype, wide, softcap, False, stream_kv))
        found.append(kernels.backward_queries(dtype, wide, softcap, stream_kv))
    if not whole and not stream_kv:
        found += [kernels.backward_keys(dtype, wide, softcap), kernels.backward_queries(dtype, wide, softcap)]
    return [variant.build_args for variant in found]
