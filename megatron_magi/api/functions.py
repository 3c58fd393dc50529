"""The public functions: keys, dispatch, attention."""

from __future__ import annotations

import os
import warnings
from collections.abc import Hashable, Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from megatron_magi.api import arguments
from megatron_magi.api.key import DistAttnRuntimeKey
from megatron_magi.api.make_key import made_on_all_ranks, new_key, new_mask_key, values_to_compare
from megatron_magi.api.mask_types import GeneralAttnMaskType
from megatron_magi.api.masks import mask_from_ranges, mask_of_key
from megatron_magi.api.runtime import KeyRuntime, RuntimeCache, default_device
from megatron_magi.api.static_key import StaticKey
from megatron_magi.attention.call_signature import verifies
from megatron_magi.attention.distributed import attend
from megatron_magi.checks import IntArrayLike, flag, instance, integer, renamed
from megatron_magi.comm import dispatch as _dispatch
from megatron_magi.comm import roll as _roll
from megatron_magi.comm.agreement import told
from megatron_magi.comm.groups import Group, group_of
from megatron_magi.config import MagiConfig
from megatron_magi.operands.meta import AttnForwardMeta
from megatron_magi.plan import Layout, Plan
from megatron_magi.runtime.no_compile import outside_graphs

if TYPE_CHECKING:
    from megatron_magi.api.compat_names import DistAttnConfig

# Where frames between a caller and a function here come from: this package, and torch, see `outside_graphs`.
_OURS = tuple(str(folder) + os.sep for folder in (Path(__file__).parents[1], Path(torch.__file__).parent))
# The interface has keys without owners, so their plans live here: `clear_cache` empties it.
_RUNTIMES = RuntimeCache()


@outside_graphs
def magi_attn_flex_key(
    q_ranges: Iterable,
    k_ranges: Iterable,
    attn_mask_type: GeneralAttnMaskType,
    total_seqlen_q: int,
    total_seqlen_k: int,
    num_heads_q: int | None = None,
    num_heads_kv: int | None = None,
    head_dim: int | None = None,
    pad_size: int | None = None,
    chunk_size: int | None = None,
    cp_group_or_mesh: Group = None,
    dist_attn_config: DistAttnConfig | MagiConfig | None = None,
    is_same_source: bool = True,
    is_q_permutable: bool = True,
    is_k_permutable: bool = True,
    compare: Mapping[str, torch.Tensor | int] | None = None,
    layout: Layout | None = None,
    layout_cu_seqlens: IntArrayLike | None = None,
) -> DistAttnRuntimeKey:
    """Makes the key of any mask: queries ``q_ranges[i]`` see keys ``k_ranges[i]`` as ``attn_mask_type[i]``.

    Args:
        q_ranges, k_ranges: n half-open ranges each: `AttnRanges`, pairs, or an ``[n, 2]`` tensor.
            No (query, key) pair may be in two slices.
        attn_mask_type: ``"full"``, ``"causal"``, ``"inv_causal"``, ``"bi_causal"``, or
            `AttnMaskType`; one for each slice, or one for all.
        total_seqlen_q, total_seqlen_k: tokens of the sequence, without padding.
        num_heads_q, num_heads_kv, head_dim: shape of the attention, for the cost model only.
        pad_size: tokens of padding; computed when None, see ``key.pad_size``. A number is used exactly or
            refused: with it the length must divide by the number of ranks times ``chunk_size``. On one rank any number
            will do, 0 too, up to 65,536 or the length, whichever is more.
        chunk_size: tokens a chunk, the grain of load balance; chosen when None.
        cp_group_or_mesh: the ranks: a group, or a mesh of one or two dimensions. One rank when None. Of two dimensions
            the second is the ranks of a node: keys cross between nodes once (`CommConfig.ranks_per_node`). A mesh whose
            ranks are not in ascending order is one level.
        dist_attn_config: everything else; what it leaves open comes from the environment
            (`megatron_magi.envs`) and from defaults that adapt to the mask.
        is_same_source, is_q_permutable, is_k_permutable: must be True: queries and keys are the
            same tokens.
        compare: tensors that all ranks must hold alike (tokens, labels, positions), by name, at most 15. Their
            checksums are compared together with the plan. The host waits for tensors on a GPU: give those on the CPU,
            or in place of a tensor a number of 63 bits.
        layout: the tokens that each rank holds, see `given_dispatch`; chosen when None. Queries may then be computed
            by other ranks than those that hold them, where that is faster (``dispatch.queries`` of `MagiConfig`).
        layout_cu_seqlens: documents of the layout ``"zigzag_documents"``, int ``[num_documents + 1]``.

    Returns:
        A hashable key; equal arguments give equal keys, which share one plan.

    Raises:
        ValueError: an argument, named in the message, is wrong; two slices overlap (both are named).
    """
    flags = {"is_same_source": is_same_source, "is_q_permutable": is_q_permutable, "is_k_permutable": is_k_permutable}
    with made_on_all_ranks(cp_group_or_mesh, dist_attn_config):
        for name, value in flags.items():
            if value is not True:
                raise ValueError(f"{name}: only True is supported, queries and keys are the same tokens")
        mask = mask_from_ranges(q_ranges, k_ranges, attn_mask_type, total_seqlen_q, total_seqlen_k)
        shape = (num_heads_q, num_heads_kv, head_dim)
        given = (pad_size, chunk_size, cp_group_or_mesh, dist_attn_config, layout, layout_cu_seqlens)
        new = new_key(_RUNTIMES, mask, shape, *given)
        others = values_to_compare(new.key, compare)
    return _RUNTIMES.register(*new, others)


@outside_graphs
def magi_attn_varlen_key(
    cu_seqlens_q: IntArrayLike,
    cu_seqlens_k: IntArrayLike,
    num_heads_q: int | None = None,
    num_heads_kv: int | None = None,
    head_dim: int | None = None,
    pad_size: int | None = None,
    chunk_size: int | None = None,
    cp_group_or_mesh: Group = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    dist_attn_config: DistAttnConfig | MagiConfig | None = None,
    compare: Mapping[str, torch.Tensor | int] | None = None,
    layout: Layout | None = None,
) -> DistAttnRuntimeKey:
    """Makes the key of packed documents, full, causal or with a sliding window.

    Args:
        cu_seqlens_q, cu_seqlens_k, causal, window_size: see `infer_attn_mask_from_cu_seqlens`.
        num_heads_q, num_heads_kv, head_dim, pad_size, chunk_size, cp_group_or_mesh,
            dist_attn_config, compare: see `magi_attn_flex_key`.
        layout: see `magi_attn_flex_key`; the documents of ``"zigzag_documents"`` are those of ``cu_seqlens_q``.

    Raises:
        ValueError: an argument, named in the message, is wrong.
    """
    with made_on_all_ranks(cp_group_or_mesh, dist_attn_config):
        mask = mask_of_key(cu_seqlens_q, cu_seqlens_k, causal, window_size)
        shape = (num_heads_q, num_heads_kv, head_dim)
        bounds = cu_seqlens_q if isinstance(layout, str) and layout == "zigzag_documents" else None
        given = (pad_size, chunk_size, cp_group_or_mesh, dist_attn_config, layout, bounds)
        with renamed("layout_cu_seqlens", "cu_seqlens_q"):
            new = new_key(_RUNTIMES, mask, shape, *given)
        others = values_to_compare(new.key, compare)
    return _RUNTIMES.register(*new, others)


@outside_graphs
def magi_attn_flex_dispatch(
    x: torch.Tensor,
    *args: object,
    cp_group: Group = None,
    is_partial_grad: bool = False,
    **kwargs: object,
) -> tuple[torch.Tensor, DistAttnRuntimeKey]:
    """Deprecated: `magi_attn_flex_key` and `dispatch` in one call.

    Args:
        x: ``[total_seqlen, ...]``, the same on all ranks.
        *args, **kwargs: those of `magi_attn_flex_key`.
        cp_group: older name of ``cp_group_or_mesh``.
        is_partial_grad: see `dispatch`.

    Returns:
        ``(local_x, key)``.
    """
    return _dispatched(x, magi_attn_flex_key, args, kwargs, cp_group, is_partial_grad)


@outside_graphs
def magi_attn_varlen_dispatch(
    x: torch.Tensor,
    *args: object,
    cp_group: Group = None,
    is_partial_grad: bool = False,
    **kwargs: object,
) -> tuple[torch.Tensor, DistAttnRuntimeKey]:
    """Deprecated: `magi_attn_varlen_key` and `dispatch` in one call; see `magi_attn_flex_dispatch`."""
    return _dispatched(x, magi_attn_varlen_key, args, kwargs, cp_group, is_partial_grad)


@outside_graphs
def make_flex_key_for_new_mask_after_dispatch(
    q_ranges: Iterable,
    k_ranges: Iterable,
    attn_mask_type: GeneralAttnMaskType,
    key_for_dispatch: DistAttnRuntimeKey,
    num_heads_q: int | None = None,
    num_heads_kv: int | None = None,
    head_dim: int | None = None,
    dist_attn_config: DistAttnConfig | MagiConfig | None = None,
) -> DistAttnRuntimeKey:
    """Makes the key of another mask over tokens that are dispatched already, for hybrid attention.

    Args:
        q_ranges, k_ranges, attn_mask_type: see `magi_attn_flex_key`.
        key_for_dispatch: the key that the tensors were dispatched with.
        num_heads_q, num_heads_kv, head_dim: those of ``key_for_dispatch`` when None.
        dist_attn_config: that of ``key_for_dispatch`` when None. Its dispatch part has no effect.

    Raises:
        ValueError: an argument, named in the message, is wrong.
    """
    instance(key_for_dispatch, "key_for_dispatch", DistAttnRuntimeKey)
    total_seqlen = key_for_dispatch.mask.total_seqlen_q
    with made_on_all_ranks(key_for_dispatch.cp_group, dist_attn_config or key_for_dispatch.config):
        mask = mask_from_ranges(q_ranges, k_ranges, attn_mask_type, total_seqlen, total_seqlen)
        shape = (num_heads_q, num_heads_kv, head_dim)
        new = new_mask_key(_RUNTIMES, mask, shape, key_for_dispatch, dist_attn_config)
    return _RUNTIMES.register(*new)


@outside_graphs
def make_varlen_key_for_new_mask_after_dispatch(
    cu_seqlens_q: IntArrayLike,
    cu_seqlens_k: IntArrayLike,
    key_for_dispatch: DistAttnRuntimeKey,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    dist_attn_config: DistAttnConfig | MagiConfig | None = None,
) -> DistAttnRuntimeKey:
    """`make_flex_key_for_new_mask_after_dispatch` for a mask that is given by cumulative lengths.

    Args:
        cu_seqlens_q, cu_seqlens_k, causal, window_size: see `infer_attn_mask_from_cu_seqlens`.
        key_for_dispatch, dist_attn_config: see `make_flex_key_for_new_mask_after_dispatch`.
    """
    instance(key_for_dispatch, "key_for_dispatch", DistAttnRuntimeKey)
    total_seqlen = key_for_dispatch.mask.total_seqlen_q
    with made_on_all_ranks(key_for_dispatch.cp_group, dist_attn_config or key_for_dispatch.config):
        mask = mask_of_key(cu_seqlens_q, cu_seqlens_k, causal, window_size, total_seqlen)
        new = new_mask_key(_RUNTIMES, mask, (None, None, None), key_for_dispatch, dist_attn_config)
    return _RUNTIMES.register(*new)


@outside_graphs
def dispatch(
    x: torch.Tensor, key: DistAttnRuntimeKey, pad_value: float = 0.0, is_partial_grad: bool = False
) -> torch.Tensor:
    """Returns this rank's rows of a global tensor. Differentiable.

    Args:
        x: ``[total_seqlen, ...]`` without padding, the same on all ranks.
        key: who holds which rows.
        pad_value: what padding rows hold. For labels give the value that the loss ignores.
        is_partial_grad: the gradient of ``x`` is only this rank's part, zero in the rows of other ranks, to be
            summed over the ranks; nothing is sent for it. False: every rank gets the whole gradient, each row's
            from the rank that holds it. It is gathered, so the backward is collective: ``x`` must need a
            gradient on all ranks or on none, and all must run it.

    Returns:
        ``[num_rows, ...]``, the rows of this rank in the order of `get_position_ids`, its padding last.

    Raises:
        ValueError: ``x`` has another number of rows than the sequence has tokens, or its dtype cannot hold
            ``pad_value``.
        RuntimeError: the ranks' keys disagree, noticed here only where the gradient is to be gathered.
    """
    runtime = _RUNTIMES.get(key)
    total_seqlen, verify = key.mask.total_seqlen_q, verifies(key.config)
    gathers = is_partial_grad is not True and getattr(x, "requires_grad", False) and torch.is_grad_enabled()
    with told(runtime.agreed().group if gathers else None, verify):
        arguments.rows(x, "x", total_seqlen, f"the sequence has {total_seqlen} tokens")
        pad_value = arguments.pad_number(pad_value, x.dtype)
        flag(is_partial_grad, "is_partial_grad")
        if not gathers:
            return _dispatch.dispatch(x, runtime.shard.rows(x.device), pad_value=pad_value)
        args = runtime.shard.undispatch_args(x.device)
    return _dispatch.dispatch_replicated(x, args, runtime.group, pad_value=pad_value, verify=verify)


@outside_graphs
def undispatch(x: torch.Tensor, key: DistAttnRuntimeKey, is_partial_grad: bool = False) -> torch.Tensor:
    """Gathers the global tensor from all ranks' rows, without padding. Collective, differentiable.

    Args:
        x: ``[num_rows, ...]``, this rank's rows.
        key: who holds which rows.
        is_partial_grad: the gradient that arrives is only this rank's part, as each rank computes something
            else from the result; parts are summed over the ranks. False: all ranks compute the same, so each has
            the whole gradient and takes its rows of it.

    Returns:
        ``[total_seqlen, ...]``, the same on all ranks.

    Raises:
        ValueError: ``x`` has another number of rows than this rank's shard.
        RuntimeError: the ranks' keys or calls disagree, or another rank raised an error in this call.
    """
    runtime = _RUNTIMES.get(key).agreed()
    verify = verifies(key.config)
    with told(runtime.group, verify):
        arguments.tensor(x, "x", "[num_rows, ...]")
        flag(is_partial_grad, "is_partial_grad")
        args = runtime.shard.undispatch_args(x.device)
    with renamed("x_local", "x"):
        return _dispatch.undispatch(x, args, runtime.group, is_partial_grad=is_partial_grad, verify=verify)


@outside_graphs
def roll(x: torch.Tensor, shift: int, dim: int, key: DistAttnRuntimeKey) -> torch.Tensor:
    """Rolls the global sequence of a dispatched tensor, as `torch.roll` rolls a whole one. Collective, differentiable.

    Args:
        x: this rank's rows, ``num_rows`` of them along ``dim``.
        shift: places towards the end; negative towards the start. The last token's successor is
            the first; padding stays where it is.
        dim: dimension of the sequence.
        key: who holds which rows.

    Returns:
        A new tensor like ``x``. Only rows that change ranks travel.

    Raises:
        ValueError: ``x`` has no dimension ``dim``, or another number of rows than this rank's shard.
        RuntimeError: the ranks' keys or calls disagree, or another rank raised an error in this call.
    """
    runtime = _RUNTIMES.get(key).agreed()
    verify = verifies(key.config)
    with told(runtime.group, verify):
        arguments.tensor(x, "x", "of this rank's rows")
        # Shifts by whole sequences are none, and one shift has one plan.
        shift = integer(shift, "shift") % max(key.mask.total_seqlen_q, 1)
        args = runtime.shard.roll_args(shift, x.device)
    with renamed("x_local", "x"):
        return _roll.roll(x, args, runtime.group, dim=dim, impl=key.config.comm.impl, verify=verify)


@outside_graphs
def roll_simple(x: torch.Tensor, shift: int, dim: int, key: DistAttnRuntimeKey) -> torch.Tensor:
    """Does the same as `roll`; kept as a name of MagiAttention's."""
    return roll(x, shift, dim, key)


@outside_graphs
def calc_attn(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    key: DistAttnRuntimeKey | StaticKey,
    sink: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    return_max_logits: bool = False,
) -> tuple[torch.Tensor, AttnForwardMeta]:
    """Computes attention of this rank's queries over the keys of all ranks. Collective, differentiable.

    Args:
        q: ``[num_rows, num_heads_q, head_dim]``, this rank's rows.
        k: ``[num_rows, num_heads_kv, head_dim]``.
        v: ``[num_rows, num_heads_kv, head_dim_v]``.
        key: mask, ranks, configuration; of a `StaticKey` the mask that it was loaded with.
        sink: ``[num_sinks, num_heads_q]``, logits without a value, the same on all ranks. Its
            gradient is this rank's part; see ``MAGI_ATTENTION_DSINK_ALL_REDUCE_OP``.
        softmax_scale: ``head_dim ** -0.5`` when None.
        softcap: 0 for none.
        return_max_logits: fill ``meta.max_logits``.

    Returns:
        ``(out, meta)``: out ``[num_rows, num_heads_q, head_dim_v]``; ``meta.lse`` ``[num_rows,
        num_heads_q]`` of this rank's rows; ``meta.max_logits`` ``[num_heads_q]`` over all ranks'
        rows, the same everywhere, or None. Rows that see nothing: out 0, lse -inf.

    Raises:
        ValueError: shapes or dtypes do not fit.
        RuntimeError: the ranks' keys or calls disagree, or another rank raised an error in this call.
    """
    runtime = key if isinstance(key, StaticKey) else _RUNTIMES.get(key).agreed()
    out, meta = attend(
        q, k, v, runtime.rank_plan, runtime.group, key.config, sink, "sh", softmax_scale, softcap, return_max_logits
    )
    if meta.max_logits is not None and runtime.rank_plan.cp_size > 1:
        dist.all_reduce(meta.max_logits, op=dist.ReduceOp.MAX, group=runtime.group)
    return out, meta


@outside_graphs
def make_static_key(key: DistAttnRuntimeKey, headroom: float = 2.0) -> StaticKey:
    """Makes a key for `calc_attn` inside of a CUDA graph that is replayed with other masks.

    Capture calls with it once, after they have run once; before each replay ``static_key.load(key)`` brings the mask of
    a step. On Hopper GPUs; on several ranks for groups of one host whose keys have one remote stage
    (``OverlapConfig(degree=1)``). Collective over the group.

    Args:
        key: the first mask. Kernels and tile shapes are chosen for it; others get the same.
        headroom: how many times as long as the first mask's tables those of others may be, at least 1, and how many
            times as many rows may be fetched, with ``headroom - 1`` times a rank's own rows in addition. The same on
            all ranks.

    Raises:
        ValueError: an argument is not as above.
        RuntimeError: the ranks' keys disagree, or their ``headroom``.
    """
    instance(key, "key", DistAttnRuntimeKey)
    with renamed("plans", "key"):
        return StaticKey(key, _RUNTIMES, headroom)


@outside_graphs
def get_position_ids(key: DistAttnRuntimeKey) -> torch.Tensor:
    """Returns the global position of each row of this rank's shard, int64 ``[num_rows]``, as a new tensor.

    Padding rows repeat the position of the last token, so that tables as long as the sequence can be indexed
    with it. (To find them: ``dispatch(torch.ones(total_seqlen), key)`` is 0 there.) On the GPU where the group
    is for GPUs.
    """
    # A copy: callers may edit what they get, and the shard's own tensor decides who gets what.
    rows = _RUNTIMES.get(key).shard.rows(default_device(key.cp_group))
    return rows.clamp(max=max(key.mask.total_seqlen_q - 1, 0))


def padded_position_ids(key: DistAttnRuntimeKey) -> torch.Tensor:
    """`get_position_ids`, except that padding rows count on after the last token: over the ranks each number is there
    once."""
    return _RUNTIMES.get(key).shard.rows(default_device(key.cp_group)).clone()


@outside_graphs
def get_most_recent_key(cp_group: Group) -> DistAttnRuntimeKey:
    """Returns the key made last for a group. For code that cannot be given its key; nothing here uses it.

    Raises:
        ValueError: no key was made for the group.
    """
    return _RUNTIMES.most_recent(group_of(cp_group, "cp_group"))


@outside_graphs
def clear_cache(cp_group: Group = None) -> None:
    """Drops the plans of a group's keys, of all keys when None. Keys stay valid: they are planned again."""
    _RUNTIMES.clear(group_of(cp_group, "cp_group"))


def plans_at_hand(plans: Mapping[Hashable, Plan]) -> AbstractContextManager[None]:
    """Keys that are made meanwhile take plans that were made elsewhere; see `RuntimeCache.plans_at_hand`."""
    return _RUNTIMES.plans_at_hand(plans)


def runtime_of(key: DistAttnRuntimeKey) -> KeyRuntime:
    """The plan of a key, once all ranks are known to have the same.

    Raises:
        ValueError: ``key`` is no key.
        RuntimeError: the ranks' keys disagree.
    """
    return _RUNTIMES.get(key).agreed()


def _dispatched(x: torch.Tensor, make_key, args: tuple, kwargs: dict, cp_group: Group, is_partial_grad: bool):
    name = make_key.__name__
    warnings.warn(
        f"{name.replace('_key', '_dispatch')}: use {name} and dispatch",
        DeprecationWarning,
        skip_file_prefixes=_OURS,  # the warning is about the caller's line, or Python's default filter hides it
    )
    if cp_group is not None:
        if kwargs.get("cp_group_or_mesh") is not None:
            raise ValueError("cp_group: cp_group_or_mesh is given too")
        kwargs["cp_group_or_mesh"] = cp_group
    key = make_key(*args, **kwargs)
    return dispatch(x, key, is_partial_grad=is_partial_grad), key
