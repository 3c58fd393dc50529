"""The keys that attention over lists sees under context parallelism: of all ranks, or those that are selected."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_magi.api.key import DistAttnRuntimeKey
from megatron_magi.api.runtime import KeyRuntime
from megatron_magi.attention.call_signature import verifies
from megatron_magi.backends.costs import DEFAULT
from megatron_magi.checks import renamed
from megatron_magi.comm.agreement import told
from megatron_magi.comm.collective_checks import calls_of
from megatron_magi.comm.dispatch import undispatch
from megatron_magi.comm.row_layout import resolved
from megatron_magi.comm.selected_rows import KeyPlaces, Requests, exchange_requests, fetch, watch_of
from megatron_magi.operands.selected_blocks import (
    BlockCall,
    BlockTables,
    PackedBlocks,
    Run,
    listed,
    packed_rows,
    renumbered,
)
from megatron_magi.operands.sparse_pattern import SparsePattern, num_blocks
from megatron_magi.plan.sparse_ways import SparseShape, ways_us
from megatron_magi.runtime.graph_capture import is_capturing

Fetch = Literal["auto", "all", "selected"]
OnOverflow = Literal["raise", "gather"]


@dataclass(frozen=True)
class FetchOptions:
    """Arguments of `calc_block_sparse_attn` about what is fetched.

    Raises:
        ValueError: one is wrong.
    """

    fetch: Fetch
    capacity: float | None
    on_overflow: OnOverflow

    def __post_init__(self) -> None:
        for name, known in (("fetch", get_args(Fetch)), ("on_overflow", get_args(OnOverflow))):
            value = getattr(self, name)
            if not isinstance(value, str) or value not in known:
                raise ValueError(f"{name}: expected one of {', '.join(known)}, got {value!r}")
        share = self.capacity
        is_number = isinstance(share, int | float) and not isinstance(share, bool)
        if share is not None and not (is_number and 0 < share <= 1):
            raise ValueError(f"capacity: expected a share of a rank's keys, above 0 and at most 1, got {share!r}")


class Way(NamedTuple):
    """How keys are fetched, the same on all ranks.

    Attributes:
        selected: only those that lists name.
        capacity: then, rows that a rank gets of each other.
        may_overflow: whether lists may name more.
    """

    selected: bool
    capacity: int
    may_overflow: bool


ALL_KEYS = Way(selected=False, capacity=0, may_overflow=False)


class Keys(NamedTuple):
    """Keys of a call, and which of its queries attend to which of them.

    Attributes:
        rows: of keys and values, ``[num_rows, num_heads_kv, dim]``.
        parts: calls over the first ``num_keys`` of these rows, with lists of their own.
        factor: of the results: 1, or NaN if rows did not fit; ``[]``. None where that cannot be.
    """

    rows: Tensor
    parts: list[BlockCall]
    factor: Tensor | None


def num_tokens(runs: tuple[Run, ...]) -> int:
    """Rows of this rank that are no padding; padding comes last."""
    return sum(run.end - run.start for run in runs)


def choose_way(
    pattern: SparsePattern, kv: Tensor, runtime: KeyRuntime, key: DistAttnRuntimeKey, options: FetchOptions
) -> Way:
    """The way that is asked for, or predicted to be faster; of shapes alone."""
    dispatch = runtime.shard.dispatch
    if dispatch.cp_size == 1 or not dispatch.total_seqlen or options.fetch == "all":
        return ALL_KEYS
    places = _places(runtime, kv.device)
    longest = max(places.num_keys)
    most = longest
    if not pattern.is_mask and len(pattern.tensors) == 1:
        rows = max(num_blocks(tokens, pattern.q_block) for tokens in places.num_keys)
        most = min(longest, rows * pattern.tensors[0].shape[2] * pattern.k_block)
    given = longest if options.capacity is None else math.ceil(options.capacity * longest)
    capacity = max(1, min(most, given))
    way = Way(selected=True, capacity=capacity, may_overflow=capacity < most)
    if options.fetch == "selected":
        return way
    row_bytes = kv.shape[1] * kv.shape[2] * kv.element_size()
    shape = SparseShape(
        dispatch.cp_size, dispatch.total_seqlen, longest, capacity, row_bytes, pattern.num_lists,
        _list_bytes(pattern, places.num_keys), pattern.k_block > 1,
    )  # fmt: skip
    predicted = ways_us(shape, key.config.dispatch.rates or DEFAULT)  # not calibrated ones, which may differ
    return way if predicted.selected < predicted.all_keys else ALL_KEYS


def _list_bytes(pattern: SparsePattern, num_keys: tuple[int, ...]) -> int:
    """Of the longest rank, as far as all know: for CSR nothing. Ranks may number keys in 4 bytes or 8: 4 for all."""
    if len(pattern.tensors) == 2:
        return 0
    lists, _, width = pattern.tensors[0].shape
    rows = max(num_blocks(tokens, pattern.q_block) for tokens in num_keys)
    return lists * rows * width * (1 if pattern.is_mask else 4)


def all_keys(kv: Tensor, runtime: KeyRuntime, key: DistAttnRuntimeKey) -> Tensor:
    """Keys and values of the whole sequence, in its order, ``[total_seqlen, num_heads_kv, dim]``. Collective.

    Gradients are summed over the ranks in the dtype of kv.
    """
    args = runtime.shard.undispatch_args(kv.device)
    with renamed("x_local", "k"):
        return undispatch(kv, args, runtime.group, is_partial_grad=True, verify=verifies(key.config))


def selected_keys(
    kv: Tensor,
    pattern: SparsePattern,
    runs: tuple[Run, ...],
    runtime: KeyRuntime,
    key: DistAttnRuntimeKey,
    way: Way,
    on_overflow: OnOverflow,
) -> Keys | None:
    """The keys that lists name, and the lists over these. Collective.

    Returns:
        None on all ranks if rows do not fit and that is asked for.

    Raises:
        RuntimeError: rows do not fit, in this call (on CPUs) or in an earlier one.
    """
    group, verify, device = runtime.group, verifies(key.config), kv.device
    places, tables = _places(runtime, device), None
    if pattern.k_block > 1:
        tables = _tables(runtime, runs, pattern, device)
    chosen = listed(pattern, places.num_tokens, tables.ends if tables is not None and pattern.causal else None)
    selected = chosen.repeat_interleave(pattern.k_block, 1)[:, : places.num_tokens]
    requests = _requested(selected, places, way, runtime, verify, on_overflow)
    if requests is None:
        return None
    factor = None
    if way.may_overflow:
        assert requests.most is not None
        # Where the host has not read the number, results are no numbers.
        factor = torch.where(requests.most > way.capacity, torch.nan, 1.0).to(kv.dtype)
    found = fetch(resolved(kv)[: places.num_own], requests, group, verify)
    if tables is None:
        num_rows, table = len(found), requests.source
        entries = renumbered(pattern.tensors[0], table)
        parts = [BlockCall(slice(0, num_tokens(runs)), num_rows, entries.transpose(0, 1))]
    else:
        columns = chosen.shape[1]
        most_listed = columns
        if not pattern.is_mask and len(pattern.tensors) == 1:
            most_listed = pattern.tensors[0].shape[1] * pattern.tensors[0].shape[2]
        packed = PackedBlocks.of(chosen, tables, tables.num_slots(way.capacity, most_listed))
        own = places.token[places.rank, : places.num_own].expand(requests.num_lists, -1)
        tokens = torch.cat([own, requests.fetched], 1)
        found = packed_rows(found, packed, requests.source, tokens)
        parts = packed.parts(pattern)
    return Keys(found, parts, factor)


class _RequestCall(NamedTuple):
    """What ranks must agree on to request keys."""

    operation: str
    num_lists: int
    capacity: int
    may_overflow: bool
    on_overflow: str


def _requested(
    selected: Tensor, places: KeyPlaces, way: Way, runtime: KeyRuntime, verify: bool, on_overflow: OnOverflow
) -> Requests | None:
    """`exchange_requests`, and what is done where rows do not fit."""
    group, device = runtime.group, selected.device
    assert group is not None
    with calls_of(group, places.num_ranks, verify) as calls:
        calls.agree(_RequestCall("requests", len(selected), way.capacity, way.may_overflow, on_overflow))
        requests = exchange_requests(selected, places, way.capacity, group, way.may_overflow)
    if requests.most is None:
        return requests
    longest = max(places.num_keys)
    if on_overflow == "gather":
        if is_capturing(device):
            raise ValueError("on_overflow: 'gather' reads a number on the host, which a CUDA graph cannot; use 'raise'")
        return None if int(requests.most) > way.capacity else requests
    if _host_reads(device):
        if int(requests.most) > way.capacity:
            raise RuntimeError(_overflow_text(int(requests.most), way.capacity, longest))
        return requests
    watch_of(group, device).note(requests)
    return requests


def _host_reads(device: torch.device) -> bool:
    """Whether the host reads numbers of the device without waiting."""
    return device.type == "cpu"


def raise_overflow(runtime: KeyRuntime, key: DistAttnRuntimeKey, device: torch.device) -> None:
    """Raises if rows did not fit in an earlier call on the group, as far as the host knows without waiting.

    Raises:
        RuntimeError: they did not.
    """
    if runtime.group is None or _host_reads(device) or is_capturing(device):
        return
    if not verifies(key.config):  # ranks learn of it at different times, and would not hear of each other's error
        return
    most = watch_of(runtime.group, device).take()
    if most:
        with told(runtime.group, verifies(key.config)):
            raise RuntimeError(f"in an earlier call, whose results are NaN: {_overflow_text(most)}")


def _overflow_text(most: int, capacity: int | None = None, longest: int | None = None) -> str:
    limits = "" if capacity is None else f", the capacity is {capacity} of {longest}"
    return (
        f"capacity: lists of a rank name {most} keys of another{limits}; give a larger capacity, or "
        "on_overflow='gather'"
    )


def selected_share(pattern: SparsePattern, runs: tuple[Run, ...], runtime: KeyRuntime, verify: bool) -> float:
    """The largest share of the longest rank's keys that lists of a rank name of another rank. Collective."""
    device = pattern.tensors[0].device
    if runtime.shard.dispatch.cp_size == 1 or not runtime.shard.dispatch.total_seqlen:
        return 0.0
    places, ends = _places(runtime, device), None
    if pattern.causal:
        ends = _tables(runtime, runs, pattern, device).ends
    chosen = listed(pattern, places.num_tokens, ends)
    selected = chosen.repeat_interleave(pattern.k_block, 1)[:, : places.num_tokens]
    marked = torch.nn.functional.pad(selected, (0, 1))[:, places.token]
    most = places.others(marked.sum(-1), 1).amax()
    all_reduce("share of keys", most, dist.ReduceOp.MAX, runtime.group, verify)
    return int(most) / max(places.num_keys)


class _ReduceCall(NamedTuple):
    """What ranks must agree on to reduce a tensor."""

    operation: str
    dtype: torch.dtype
    shape: tuple[int, ...]


def all_reduce(what: str, x: Tensor, op: Any, group: dist.ProcessGroup | None, verify: bool) -> None:
    """Reduces ``x`` in place over the ranks; those that wait hear of another one's error."""
    with calls_of(group, dist.get_world_size(group), verify) as calls:
        calls.agree(_ReduceCall(what, x.dtype, tuple(x.shape)))
        dist.all_reduce(x, op=op, group=group)


def _places(runtime: KeyRuntime, device: torch.device) -> KeyPlaces:
    """Tables of the runtime's dispatch, made once a device."""

    def make() -> KeyPlaces:
        dispatch = runtime.shard.dispatch
        return KeyPlaces.build(dispatch.global_indices(), dispatch.total_seqlen, runtime.cp_rank, device)

    return runtime.shard.kept(("places", device), make)


def _tables(runtime: KeyRuntime, runs: tuple[Run, ...], pattern: SparsePattern, device: torch.device) -> BlockTables:
    """Likewise, for a size of blocks."""
    blocks = pattern.q_block, pattern.k_block

    def make() -> BlockTables:
        dispatch = runtime.shard.dispatch
        indices, total = dispatch.global_indices(), dispatch.total_seqlen
        return BlockTables.build(indices, runtime.cp_rank, runs, total, blocks, pattern.causal, device)

    return runtime.shard.kept(("tables", *blocks, pattern.causal, device), make)


def poisoned(x: Tensor, factor: Tensor | None) -> Tensor:
    """``x`` times ``factor``."""
    return x if factor is None else x * factor.to(x.dtype)
