"""Keys from what users pass: configuration resolved, plan made."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from megatron_magi import envs
from megatron_magi.api.configuration import HeadShape, KeyConfig, head_shape_of, magi_config, with_head_shape
from megatron_magi.api.key import DistAttnRuntimeKey
from megatron_magi.api.runtime import KeyRuntime, RuntimeCache
from megatron_magi.calibration import with_present_rates
from megatron_magi.checks import IntArrayLike, renamed
from megatron_magi.comm.agreement import MAX_VALUES, told
from megatron_magi.comm.checksum import checksums
from megatron_magi.comm.groups import Group, group_of
from megatron_magi.config import MagiConfig
from megatron_magi.mask import AttnMask
from megatron_magi.operands.options import check_tensor
from megatron_magi.plan import Dispatch, Layout, given_dispatch


class NewKey(NamedTuple):
    """A key that is planned, for `RuntimeCache.register`."""

    key: DistAttnRuntimeKey
    runtime: KeyRuntime
    max_size: int


@contextmanager
def made_on_all_ranks(cp_group_or_mesh: Group, given: KeyConfig | MagiConfig | None) -> Iterator[None]:
    """Around the making of a key: an error on one rank is one of the comparison in which the others wait for it."""
    verify = not isinstance(given, MagiConfig) or given.comm.verify
    with told(group_of(cp_group_or_mesh, "cp_group_or_mesh"), verify):
        yield


def new_key(
    runtimes: RuntimeCache,
    mask: AttnMask,
    shape: HeadShape,
    pad_size: int | None,
    chunk_size: int | None,
    cp_group_or_mesh: Group,
    given: KeyConfig | MagiConfig | None,
    layout: Layout | None = None,
    cu_seqlens: IntArrayLike | None = None,
) -> NewKey:
    """The key of ``mask``, planned by ``runtimes``; the other arguments are those of `magi_attn_flex_key`.

    Raises:
        ValueError: an argument, named in the message, is wrong.
    """
    environment = envs.load()
    shape = head_shape_of(*shape)
    config = magi_config(given, environment.default_config(), chunk_size, pad_size, shape)
    if cp_group_or_mesh is not None and config.comm.ranks_per_node is None:
        told = ranks_per_node_of(cp_group_or_mesh)
        nodes = environment.ranks_per_node(told, "cp_group_or_mesh of two dimensions, or CommConfig.ranks_per_node,")
        if nodes is not None:
            config = replace(config, comm=replace(config.comm, ranks_per_node=nodes))
    group = group_of(cp_group_or_mesh, "cp_group_or_mesh")
    held = _layout_of(layout, cu_seqlens, mask.total_seqlen_q, config, 1 if group is None else group.size())
    key = DistAttnRuntimeKey(mask, *shape, cp_group=group, config=config, layout=held)
    return _planned(runtimes, key, environment)


def planned_config(given: KeyConfig | MagiConfig | None, shape: HeadShape) -> MagiConfig:
    """The configuration with which keys over one group are planned, whose ``dist_attn_config`` is ``given``."""
    return with_present_rates(magi_config(given, envs.load().default_config(), None, None, head_shape_of(*shape)))


def new_mask_key(
    runtimes: RuntimeCache,
    mask: AttnMask,
    shape: HeadShape,
    key: DistAttnRuntimeKey,
    given: KeyConfig | MagiConfig | None,
) -> NewKey:
    """The key of ``mask`` over the tokens as ``key`` distributes them.

    Raises:
        ValueError: an argument, named in the message, is wrong.
    """
    environment = envs.load()
    shape = head_shape_of(*shape)
    # A shape that is not given is in the inherited configuration already.
    config = with_head_shape(key.config, shape)
    inherited = (key.num_heads_q, key.num_heads_kv, key.head_dim)
    shape = head_shape_of(*(old if new is None else new for new, old in zip(shape, inherited, strict=True)))
    if given is not None:
        config = magi_config(given, environment.default_config(), None, None, shape)
        nodes = key.config.comm.ranks_per_node
        config = replace(config, dispatch=key.config.dispatch, comm=replace(config.comm, ranks_per_node=nodes))
    # All masks over one dispatch share the key that made it, whichever of them was named.
    first = key if key.key_for_dispatch is None else key.key_for_dispatch
    new = DistAttnRuntimeKey(mask, *shape, cp_group=key.cp_group, config=config, key_for_dispatch=first)
    return _planned(runtimes, new, environment)


def ranks_per_node_of(cp_group_or_mesh: dist.ProcessGroup | DeviceMesh | None) -> int | None:
    """Ranks that share a node: those along the second dimension of a mesh of two; None where nothing says so.

    Nor does a mesh whose ranks do not rise along it: in its group, which is in the order of ranks, those of a node are
    no neighbours.
    """
    if not isinstance(cp_group_or_mesh, DeviceMesh) or cp_group_or_mesh.ndim != 2:
        return None
    ranks = cp_group_or_mesh.mesh.flatten().tolist()
    return cp_group_or_mesh.size(1) if ranks == sorted(ranks) else None


def _layout_of(
    layout: Layout | None, cu_seqlens: IntArrayLike | None, total_seqlen: int, config: MagiConfig, cp_size: int
) -> Dispatch | None:
    if layout is None:
        if cu_seqlens is not None:
            raise ValueError('layout_cu_seqlens: bounds of documents are for layout="zigzag_documents"')
        return None
    if config.dispatch.chunk_size is not None:
        raise ValueError(f"chunk_size: {config.dispatch.chunk_size}, but layout says who holds which tokens")
    with renamed("cu_seqlens", "layout_cu_seqlens"):
        return given_dispatch(layout, total_seqlen, cp_size, cu_seqlens=cu_seqlens, pad_size=config.dispatch.pad_size)


def values_to_compare(key: DistAttnRuntimeKey, compare: Mapping[str, Tensor | int] | None) -> dict[str, int]:
    """Checksums of the tensors in ``compare``, and its numbers; none where the key is not compared.

    Raises:
        ValueError: ``compare`` is no mapping, or is of something else, or of too many.
    """
    if compare is None:
        return {}
    if not isinstance(compare, Mapping) or len(compare) >= MAX_VALUES:
        got = list(compare) if isinstance(compare, Mapping) else compare
        raise ValueError(f"compare: expected a mapping from at most {MAX_VALUES - 1} names to tensors, got {got!r}")
    for name, value in compare.items():
        if isinstance(value, Tensor):
            check_tensor(f"compare: {name}", value)
            if value.is_meta:
                raise ValueError(f"compare: {name}: expected numbers, got a tensor on the meta device")
        elif not (isinstance(value, int) and 0 <= value < 1 << 63):
            raise ValueError(f"compare: expected tensors, or numbers of 63 bits, got {name}={value!r}")
    if key.cp_group is None or key.cp_group.size() == 1 or not key.config.comm.verify:
        return {}
    tensors = [x for x in compare.values() if isinstance(x, Tensor)]
    sums = iter(checksums(tensors, tensors[0].device).tolist() if tensors else ())
    return {name: next(sums) if isinstance(x, Tensor) else x for name, x in compare.items()}


def _planned(runtimes: RuntimeCache, key: DistAttnRuntimeKey, environment: envs.Environment) -> NewKey:
    """``key`` with its lengths filled in and its configuration shared, planned."""
    runtime = runtimes.planned(key)
    dispatch = runtime.plan.dispatch
    padding = dispatch.padded_seqlen - dispatch.total_seqlen
    config = runtimes.shared_config(key.config)
    key = replace(key, config=config, total_seqlen=dispatch.padded_seqlen, pad_size=padding)
    return NewKey(key, runtime, environment.plan_cache_size)
