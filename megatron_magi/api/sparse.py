"""Sparse attention under context parallelism: lists on the device that change with every layer and step.

No plan is made of lists, and nothing of them is copied to the host. Keys and values are fetched once a call, those of
all ranks or those that lists name, and their gradients returned. The key says which rank holds which tokens; its mask
is not used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_magi.api import arguments
from megatron_magi.api.finite import check_finite, with_finite_gradient
from megatron_magi.api.functions import runtime_of
from megatron_magi.api.key import DistAttnRuntimeKey
from megatron_magi.api.runtime import KeyRuntime
from megatron_magi.api.sparse_keys import (
    FetchOptions,
    Keys,
    all_keys,
    all_reduce,
    choose_way,
    num_tokens,
    poisoned,
    raise_overflow,
    selected_keys,
    selected_share,
)
from megatron_magi.attention.call_signature import AttentionCall, check_sinks, verifies
from megatron_magi.checks import flag, int_at_least
from megatron_magi.comm.agreement import told
from megatron_magi.comm.collective_checks import calls_of
from megatron_magi.config import SinkReduction
from megatron_magi.operands.merge import accumulate_dtype
from megatron_magi.operands.meta import AttnForwardMeta
from megatron_magi.operands.options import make_options
from megatron_magi.operands.selected_blocks import BlockCall, Run
from megatron_magi.operands.sparse_pattern import (
    SparsePattern,
    block_pattern,
    check_numbers,
    index_pattern,
    num_blocks,
)
from megatron_magi.ops.latent_attention import check_operands, latent_sparse_attention
from megatron_magi.ops.sparse_attention import block_sparse_attention, index_sparse_attention
from megatron_magi.runtime.no_compile import outside_graphs

Blocks = Tensor | tuple[Tensor, Tensor]


@outside_graphs
def calc_block_sparse_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    blocks: Blocks,
    key: DistAttnRuntimeKey,
    *,
    q_block_size: int,
    k_block_size: int,
    causal: bool = False,
    sink: Tensor | None = None,
    softmax_scale: float | None = None,
    return_max_logits: bool = False,
    fetch: str = "auto",
    capacity: float | None = None,
    on_overflow: str = "raise",
    impl: str = "auto",
) -> tuple[Tensor, AttnForwardMeta]:
    """`megatron_magi.block_sparse_attention` of this rank's queries over the keys of all ranks. Collective,
    differentiable.

    Args:
        q: ``[num_rows, num_heads_q, head_dim]``, this rank's rows.
        k, v: ``[num_rows, num_heads_kv, head_dim]``, likewise.
        blocks: of this rank's blocks of queries, in the order of its rows: the numbers of the blocks of keys, counted
            over the whole sequence without padding; a mask, lists or CSR as `block_sparse_attention` takes them.
            Blocks that are padding alone are left out: ``num_q_blocks`` is that of this rank's tokens.
        key: which rank holds which tokens, and ``attend.deterministic`` and ``attend.sanity_check``. Its chunks begin
            at multiples of ``q_block_size``.
        causal: of the listed keys, a query sees those up to its own position in the sequence. It takes one launch for
            each run of consecutive tokens that the rank holds: few chunks are fastest.
        sink: ``[num_sinks, num_heads_q]``, the same on all ranks; its gradient is as in `calc_attn`.
        q_block_size, k_block_size, softmax_scale, impl: as in `block_sparse_attention`.
        return_max_logits: fill ``meta.max_logits``.
        fetch: ``all``: the keys and values of all ranks; ``selected``: those that this rank's lists name, of each key
            head its own (with CSR the union over key heads); ``auto``: which of both is predicted to be faster
            (`megatron_magi.plan.sparse_ways`) by shapes, the lists' length, ``capacity`` and the rates of the GPU.
        capacity: the share of a rank's keys (of the rank that holds most) that the lists of another rank may name,
            above 0 and at most 1; it bounds what ``selected`` sends. None: all that the lists could name, by their
            length; masks and CSR: all keys. `selected_key_share` measures it. The same on all ranks, as are all
            arguments here and the length of lists.
        on_overflow: if lists of a rank name more. ``raise``: a RuntimeError on all ranks. On GPUs, where the host does
            not wait for the number, out and lse are NaN on all ranks, and a later call on the group raises. ``gather``:
            all ranks fetch all keys in this call, for which the host waits for the number; not in CUDA graphs.

    Returns:
        ``(out, meta)`` as `calc_attn`; padding rows get out 0, lse -inf. Differentiable once.

    Raises:
        ValueError: an argument, named in the message, is wrong.
        RuntimeError: the ranks' keys or calls disagree, another rank raised an error in this call, or lists named more
            keys than ``capacity``.
    """
    runtime = runtime_of(key)
    runs = _runs(runtime)
    with told(runtime.group, verifies(key.config)):
        _check(q, k, v, runtime)
        options = FetchOptions(fetch, capacity, on_overflow)
        pattern = _block_pattern(q, k, blocks, runs, key, (q_block_size, k_block_size), causal)
        operation = f"sparse attention, blocks of {pattern.q_block}x{pattern.k_block}, causal={causal}"
        call = _call(operation, (q, k, v), sink, key, softmax_scale, return_max_logits)
        check_finite(runtime, key.config, q=q, k=k, v=v, sink=sink)
        kv = torch.cat([k, v], dim=-1)
    _agree(call, runtime, key)
    keys = _keys(kv, pattern, runs, runtime, key, options)
    with told(runtime.group, verifies(key.config)):
        k, v = keys.rows.split([k.shape[-1], v.shape[-1]], dim=-1)
        given = _options(key, sink, runtime, softmax_scale, return_max_logits, impl)
        given |= {"q_block_size": pattern.q_block, "k_block_size": pattern.k_block, "causal": causal}
        parts = [
            block_sparse_attention(q[part.rows], k[: part.num_keys], v[: part.num_keys], part.blocks, **given)
            for part in keys.parts
        ]
    return _joined(parts, q.shape[0], runtime, key, keys.factor)


@outside_graphs
def calc_index_sparse_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    key: DistAttnRuntimeKey,
    *,
    sink: Tensor | None = None,
    softmax_scale: float | None = None,
    return_max_logits: bool = False,
    fetch: str = "auto",
    capacity: float | None = None,
    on_overflow: str = "raise",
    impl: str = "auto",
) -> tuple[Tensor, AttnForwardMeta]:
    """`megatron_magi.index_sparse_attention` of this rank's queries over the keys of all ranks. Collective,
    differentiable.

    Args:
        indices: int ``[num_rows, num_heads_kv or 1, topk]``: for each row of this rank numbers of keys, counted over
            the whole sequence without padding; -1 is passed over. Lists of padding rows are not read.
        key: which rank holds which tokens (any), and ``attend.deterministic`` and ``attend.sanity_check``.
        q, k, v, sink, softmax_scale, return_max_logits, fetch, capacity, on_overflow, impl: as in
            `calc_block_sparse_attn`.

    Returns:
        ``(out, meta)`` as `calc_block_sparse_attn`.

    Raises:
        ValueError, RuntimeError: as `calc_block_sparse_attn`.
    """
    runtime = runtime_of(key)
    runs = _runs(runtime)
    with told(runtime.group, verifies(key.config)):
        _check(q, k, v, runtime)
        options = FetchOptions(fetch, capacity, on_overflow)
        pattern = _index_pattern(q, k, indices, runs, key)
        call = _call("sparse attention", (q, k, v), sink, key, softmax_scale, return_max_logits)
        check_finite(runtime, key.config, q=q, k=k, v=v, sink=sink)
        kv = torch.cat([k, v], dim=-1)
    _agree(call, runtime, key)
    keys = _keys(kv, pattern, runs, runtime, key, options)
    with told(runtime.group, verifies(key.config)):
        k, v = keys.rows.split([k.shape[-1], v.shape[-1]], dim=-1)
        given = _options(key, sink, runtime, softmax_scale, return_max_logits, impl)
        (part,) = keys.parts
        result = index_sparse_attention(q[part.rows], k, v, part.blocks, **given)
    return _joined([result], q.shape[0], runtime, key, keys.factor)


@outside_graphs
def calc_latent_sparse_attn(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    key: DistAttnRuntimeKey,
    *,
    softmax_scale: float,
    dim_v: int = 512,
    sink: Tensor | None = None,
    return_max_logits: bool = False,
    fetch: str = "auto",
    capacity: float | None = None,
    on_overflow: str = "raise",
    impl: str = "auto",
) -> tuple[Tensor, AttnForwardMeta]:
    """`megatron_magi.latent_sparse_attention` of this rank's queries over the keys of all ranks. Collective,
    differentiable.

    Args:
        q: ``[num_rows, num_heads_q, head_dim]``, this rank's rows.
        kv: ``[num_rows, num_heads_kv, head_dim]``, likewise; its first ``dim_v`` elements are the values.
        indices: as in `calc_index_sparse_attn`.
        key: which rank holds which tokens (any), and ``attend.deterministic`` and ``attend.sanity_check``.
        softmax_scale, dim_v: as in `latent_sparse_attention`.
        sink, return_max_logits, fetch, capacity, on_overflow, impl: as in `calc_block_sparse_attn`.

    Returns:
        ``(out, meta)`` as `calc_block_sparse_attn`; out ``[num_rows, num_heads_q, dim_v]``.

    Raises:
        ValueError, RuntimeError: as `calc_block_sparse_attn`.
    """
    runtime = runtime_of(key)
    runs = _runs(runtime)
    with told(runtime.group, verifies(key.config)):
        _check_dense(runtime, q=q, kv=kv)
        options = FetchOptions(fetch, capacity, on_overflow)
        pattern = _index_pattern(q, kv, indices, runs, key)
        dim_v = check_operands(q, kv, dim_v, softmax_scale)
        qkv = q, kv, kv[..., :dim_v]
        call = _call("latent sparse attention", qkv, sink, key, softmax_scale, return_max_logits)
        check_finite(runtime, key.config, q=q, kv=kv, sink=sink)
    _agree(call, runtime, key)
    keys = _keys(kv, pattern, runs, runtime, key, options)
    with told(runtime.group, verifies(key.config)):
        given = _options(key, sink, runtime, softmax_scale, return_max_logits, impl)
        (part,) = keys.parts
        result = latent_sparse_attention(q[part.rows], keys.rows, part.blocks, dim_v=dim_v, **given)
    return _joined([result], q.shape[0], runtime, key, keys.factor)


@outside_graphs
def selected_key_share(
    lists: Blocks,
    key: DistAttnRuntimeKey,
    *,
    num_heads_kv: int,
    q_block_size: int | None = None,
    k_block_size: int | None = None,
    causal: bool = False,
) -> float:
    """The largest share of a rank's keys that the lists of another rank name: what ``capacity`` has to hold.
    Collective.

    The host waits for the device: call it now and then, not in each layer, and leave a margin for lists that change.

    Args:
        lists: ``blocks`` of `calc_block_sparse_attn`, or ``indices`` of `calc_index_sparse_attn` where block sizes are
            None.
        key: which rank holds which tokens.
        num_heads_kv: key heads.
        q_block_size, k_block_size, causal: as in `calc_block_sparse_attn`.

    Returns:
        Rows over those of the rank that holds most, 0 to 1, the same on all ranks; 0 on one rank.

    Raises:
        ValueError: an argument, named in the message, is wrong.
        RuntimeError: the ranks' calls disagree, or another rank raised an error in this call.
    """
    runtime = runtime_of(key)
    runs = _runs(runtime)
    with told(runtime.group, verifies(key.config)):
        first = lists[0] if isinstance(lists, tuple) and lists else lists
        if not isinstance(first, Tensor):
            raise ValueError(f"lists: expected a tensor, or a tuple of two, got {type(lists).__name__}")
        rows = runtime.shard.dispatch.shard_lengths[runtime.cp_rank]
        q, k = (first.new_empty((rows, heads, 0)) for heads in (1, int_at_least(num_heads_kv, "num_heads_kv", 1)))
        if q_block_size is None:
            pattern = _index_pattern(q, k, lists, runs, key)
        else:
            pattern = _block_pattern(q, k, lists, runs, key, (q_block_size, k_block_size), causal)
    return selected_share(pattern, runs, runtime, verifies(key.config))


def _block_pattern(
    q: Tensor, k: Tensor, blocks: Any, runs: Sequence[Run], key: DistAttnRuntimeKey, sizes: tuple[Any, Any], causal: Any
) -> SparsePattern:
    """The checked lists of this rank's blocks of queries over the keys of the whole sequence."""
    q_block, k_block = int_at_least(sizes[0], "q_block_size", 1), int_at_least(sizes[1], "k_block_size", 1)
    _check_aligned(runs, q_block, key.mask.total_seqlen_q)
    _check_rows(blocks, num_blocks(num_tokens(runs), q_block))
    whole = _shape_of_all(k, key)
    pattern = block_pattern(blocks, q[: num_tokens(runs)], whole, q_block, k_block, causal)
    return _looked_at(pattern, key)


def _index_pattern(q: Tensor, k: Tensor, indices: Any, runs: Sequence[Run], key: DistAttnRuntimeKey) -> SparsePattern:
    """Likewise of single keys."""
    arguments.rows(indices, "indices", q.shape[0], "one list is needed for each row of this rank")
    tokens = num_tokens(runs)
    return _looked_at(index_pattern(indices[:tokens], q[:tokens], _shape_of_all(k, key)), key)


def _shape_of_all(k: Tensor, key: DistAttnRuntimeKey) -> Tensor:
    """Keys of the sequence, without memory."""
    return torch.empty((key.mask.total_seqlen_q, *k.shape[1:]), dtype=k.dtype, device="meta")


def _looked_at(pattern: SparsePattern, key: DistAttnRuntimeKey) -> SparsePattern:
    if key.config.attend.sanity_check:
        check_numbers(pattern, key.mask.total_seqlen_q)
    return pattern


def _keys(
    kv: Tensor,
    pattern: SparsePattern,
    runs: tuple[Run, ...],
    runtime: KeyRuntime,
    key: DistAttnRuntimeKey,
    options: FetchOptions,
) -> Keys:
    """The keys that this rank's queries need. Collective.

    Args:
        kv: this rank's rows of keys and values, ``[num_rows, num_heads_kv, dim]``.
        pattern, runs: lists of this rank's queries, and its tokens.
        runtime, key: which rank holds which tokens.
        options: how keys are fetched.
    """
    with told(runtime.group, verifies(key.config)):
        way = choose_way(pattern, kv, runtime, key, options)
    raise_overflow(runtime, key, kv.device)
    if way.selected:
        found = selected_keys(kv, pattern, runs, runtime, key, way, options.on_overflow)
        if found is not None:
            return found
    rows = all_keys(kv, runtime, key)
    if pattern.k_block == 1:
        return Keys(rows, [BlockCall(slice(0, num_tokens(runs)), len(rows), pattern.tensors[0].transpose(0, 1))], None)
    # Without causality positions do not matter: all queries at once.
    parts = []
    for row, start, end in runs if pattern.causal else [Run(0, len(rows) - num_tokens(runs), len(rows))]:
        q_blocks = slice(row // pattern.q_block, num_blocks(row + end - start, pattern.q_block))
        seen = _blocks_of(pattern, q_blocks, num_blocks(end, pattern.k_block))
        parts.append(BlockCall(slice(row, row + end - start), end, seen))
    return Keys(rows, parts, None)


def _runs(runtime: KeyRuntime) -> tuple[Run, ...]:
    """The tokens of this rank without padding; at least one run, which may be empty."""
    runs, row = [], 0
    total = runtime.shard.dispatch.total_seqlen
    for start, end in runtime.shard.dispatch.ranges[runtime.cp_rank].tolist():
        if start < total:
            runs.append(Run(row, start, min(end, total)))
        row += end - start
    return tuple(runs) or (Run(0, 0, 0),)


def _check(q: Any, k: Any, v: Any, runtime: KeyRuntime) -> None:
    _check_dense(runtime, q=q, k=k, v=v)
    if k.dtype != v.dtype or k.shape[1] != v.shape[1]:
        raise ValueError(f"v: expected {k.dtype} and {k.shape[1]} heads as k has, got {v.dtype} and {v.shape[1]}")


def _check_dense(runtime: KeyRuntime, **tensors: Any) -> None:
    """Tensors of this rank's rows, by name."""
    num_rows = runtime.shard.dispatch.shard_lengths[runtime.cp_rank]
    for name, x in tensors.items():
        if arguments.rows(x, name, num_rows, f"this rank has {num_rows}").dim() != 3:
            raise ValueError(f"{name}: expected [{num_rows}, num_heads, head_dim], got {list(x.shape)}")


def _check_aligned(runs: Sequence[Run], q_block: int, total_seqlen: int) -> None:
    if any(x % q_block for run in runs for x in (run.row, run.start, 0 if run.end == total_seqlen else run.end)):
        raise ValueError(
            f"q_block_size: this rank's tokens are not whole blocks of {q_block}; make the key with a chunk_size that "
            f"is a multiple of it, or with a layout of whole blocks, a short one last"
        )


def _check_rows(blocks: Any, rows: int) -> None:
    """What ranks must find before any of them takes part in a collective; `block_sparse_attention` checks the rest."""
    lists = blocks[0] if isinstance(blocks, tuple) and blocks else blocks
    if not isinstance(lists, Tensor):
        raise ValueError(f"blocks: expected a tensor, or a tuple of two, got {type(blocks).__name__}")
    found = lists.shape[-1] - 1 if isinstance(blocks, tuple) else lists.shape[-2] if lists.dim() > 1 else None
    if found != rows:
        raise ValueError(f"blocks: expected {rows} blocks of queries, those of this rank's tokens, got {found}")


def _blocks_of(pattern: SparsePattern, rows: slice, columns: int) -> Blocks:
    """The lists of some blocks of queries, without blocks of keys from ``columns`` on."""
    if pattern.is_mask:
        return pattern.tensors[0][:, rows, :columns]
    if len(pattern.tensors) == 2:
        offsets, entries = pattern.tensors
        return offsets[:, rows.start : rows.stop + 1], entries.where(entries < columns, -1)
    lists = pattern.tensors[0][:, rows]
    return lists.where(lists < columns, -1)


def _call(
    operation: str,
    qkv: tuple[Tensor, Tensor, Tensor],
    sink: Tensor | None,
    key: DistAttnRuntimeKey,
    softmax_scale: float | None,
    return_max_logits: bool,
) -> AttentionCall:
    """What ranks must agree on; raises ValueError for options that are wrong."""
    attend, q = key.config.attend, qkv[0]
    check_sinks(sink, "sh", q)
    return AttentionCall.of(
        operation,
        *qkv,
        sink,
        sink_layout="sh",
        softmax_scale=make_options(q, softmax_scale, 0.0, attend.deterministic, 0).softmax_scale,
        softcap=0.0,
        max_logits=flag(return_max_logits, "return_max_logits"),
        sanity_check=attend.sanity_check,
    )


def _agree(call: AttentionCall, runtime: KeyRuntime, key: DistAttnRuntimeKey) -> None:
    """Raises RuntimeError where ranks call with other options, before anything is sent."""
    with calls_of(runtime.group, runtime.shard.dispatch.cp_size, verifies(key.config)) as calls:
        calls.agree(call, always=call.sanity_check)


def _options(
    key: DistAttnRuntimeKey,
    sink: Tensor | None,
    runtime: KeyRuntime,
    softmax_scale: float | None,
    return_max_logits: bool,
    impl: str,
) -> dict[str, Any]:
    """Arguments of the attention of one rank that do not depend on its lists."""
    attend, cp_size = key.config.attend, runtime.shard.dispatch.cp_size
    if isinstance(sink, Tensor) and cp_size > 1:
        sink = _SinkOfRanks.apply(sink, runtime.group, key.config.comm.dsink_all_reduce, verifies(key.config))
    return {
        "sink": sink,
        "softmax_scale": softmax_scale,
        "return_max_logits": return_max_logits,
        "deterministic": attend.deterministic,
        "impl": impl,
    }


def _joined(
    parts: Sequence[tuple[Tensor, AttnForwardMeta]],
    num_rows: int,
    runtime: KeyRuntime,
    key: DistAttnRuntimeKey,
    factor: Tensor | None,
) -> tuple[Tensor, AttnForwardMeta]:
    """Results of runs one after the other, with rows for the padding; the largest logits over all ranks."""
    outs, metas = zip(*parts, strict=True)
    out, lse = poisoned(torch.cat(outs), factor), poisoned(torch.cat([meta.lse for meta in metas]), factor)
    if len(out) < num_rows:
        out = torch.nn.functional.pad(out, (0, 0, 0, 0, 0, num_rows - len(out)))
        lse = torch.nn.functional.pad(lse, (0, 0, 0, num_rows - len(lse)), value=-torch.inf)
    largest = None
    if metas[0].max_logits is not None:
        largest = torch.stack([meta.max_logits for meta in metas]).amax(dim=0)
        if runtime.shard.dispatch.cp_size > 1:
            all_reduce("largest logits", largest, dist.ReduceOp.MAX, runtime.group, verifies(key.config))
    assert lse.dtype == accumulate_dtype(out.dtype)
    return with_finite_gradient(out, runtime, key.config), AttnForwardMeta(lse=lse, max_logits=largest)


class _SinkOfRanks(torch.autograd.Function):
    """The sink; its gradient is this rank's part, or the sum or mean of all (`CommConfig.dsink_all_reduce`)."""

    @staticmethod
    def forward(ctx: Any, sink: Tensor, group: dist.ProcessGroup, op: SinkReduction, verify: bool) -> Tensor:
        ctx.group, ctx.op, ctx.verify = group, op, verify
        return sink.view_as(sink)

    @staticmethod
    def backward(ctx: Any, dsink: Tensor) -> tuple[Tensor, None, None, None]:
        if ctx.op != "none":
            dsink = dsink.clone()
            all_reduce("gradient of the sink", dsink, dist.ReduceOp.SUM, ctx.group, ctx.verify)
            if ctx.op == "avg":
                dsink /= ctx.group.size()
        return dsink, None, None, None
