"""Sparse attention under context parallelism: lists on the device that change with every layer and step.

Keys and values of all ranks are gathered once a call, and their gradients summed and scattered back, so no plan is made
and nothing is copied to the host. The key says which rank holds which tokens; its mask is not used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_magi.api import arguments
from megatron_magi.api.functions import runtime_of
from megatron_magi.api.key import DistAttnRuntimeKey
from megatron_magi.api.runtime import KeyRuntime
from megatron_magi.checks import flag, int_at_least, renamed
from megatron_magi.comm.agreement import told
from megatron_magi.comm.dispatch import undispatch
from megatron_magi.config import SinkReduction
from megatron_magi.operands.merge import accumulate_dtype
from megatron_magi.operands.meta import AttnForwardMeta
from megatron_magi.operands.sparse_pattern import num_blocks
from megatron_magi.ops.sparse_attention import block_sparse_attention, index_sparse_attention
from megatron_magi.runtime.no_compile import outside_graphs

Blocks = Tensor | tuple[Tensor, Tensor]


class Run(NamedTuple):
    """Consecutive tokens of a shard: its rows from ``row`` on are the tokens ``start`` to ``end`` of the sequence."""

    row: int
    start: int
    end: int


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

    Returns:
        ``(out, meta)`` as `calc_attn`; padding rows get out 0, lse -inf.

    Raises:
        ValueError: an argument, named in the message, is wrong.
        RuntimeError: the ranks' keys or calls disagree, or another rank raised an error in this call.
    """
    runtime = runtime_of(key)
    runs = _runs(runtime)
    with told(runtime.group, key.config.comm.verify):
        _check(q, k, v, runtime)
        flag(causal, "causal")
        q_block = int_at_least(q_block_size, "q_block_size", 1)
        k_block = int_at_least(k_block_size, "k_block_size", 1)
        _check_aligned(runs, q_block, key.mask.total_seqlen_q)
        _check_rows(blocks, num_blocks(_num_tokens(runs), q_block))
    k, v = _gathered(k, v, runtime, key)
    with told(runtime.group, key.config.comm.verify):
        options = _options(key, sink, runtime, softmax_scale, return_max_logits, impl)
        options |= {"q_block_size": q_block, "k_block_size": k_block, "causal": causal}
        parts = []
        # Without causality positions do not matter: all queries at once.
        for row, start, end in runs if causal else [Run(0, k.shape[0] - _num_tokens(runs), k.shape[0])]:
            rows = slice(row // q_block, num_blocks(row + end - start, q_block))
            seen = _blocks_of(blocks, rows, num_blocks(end, k_block))
            parts.append(block_sparse_attention(q[row : row + end - start], k[:end], v[:end], seen, **options))
    return _joined(parts, q.shape[0], runtime)


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
    impl: str = "auto",
) -> tuple[Tensor, AttnForwardMeta]:
    """`megatron_magi.index_sparse_attention` of this rank's queries over the keys of all ranks. Collective,
    differentiable.

    Args:
        indices: int ``[num_rows, num_heads_kv or 1, topk]``: for each row of this rank numbers of keys, counted over
            the whole sequence without padding; -1 is passed over. Lists of padding rows are not read.
        key: which rank holds which tokens (any), and ``attend.deterministic`` and ``attend.sanity_check``.
        q, k, v, sink, softmax_scale, return_max_logits, impl: as in `calc_block_sparse_attn`.

    Returns:
        ``(out, meta)`` as `calc_block_sparse_attn`.

    Raises:
        ValueError: an argument, named in the message, is wrong.
        RuntimeError: the ranks' keys or calls disagree, or another rank raised an error in this call.
    """
    runtime = runtime_of(key)
    num_tokens = _num_tokens(_runs(runtime))
    with told(runtime.group, key.config.comm.verify):
        _check(q, k, v, runtime)
        arguments.rows(indices, "indices", q.shape[0], "one list is needed for each row of this rank")
    k, v = _gathered(k, v, runtime, key)
    with told(runtime.group, key.config.comm.verify):
        options = _options(key, sink, runtime, softmax_scale, return_max_logits, impl)
        part = index_sparse_attention(q[:num_tokens], k, v, indices[:num_tokens], **options)
    return _joined([part], q.shape[0], runtime)


def _runs(runtime: KeyRuntime) -> tuple[Run, ...]:
    """The tokens of this rank without padding; at least one run, which may be empty."""
    runs, row = [], 0
    total = runtime.shard.dispatch.total_seqlen
    for start, end in runtime.shard.dispatch.ranges[runtime.cp_rank].tolist():
        if start < total:
            runs.append(Run(row, start, min(end, total)))
        row += end - start
    return tuple(runs) or (Run(0, 0, 0),)


def _num_tokens(runs: Sequence[Run]) -> int:
    """Rows of this rank that are no padding; padding comes last."""
    return sum(run.end - run.start for run in runs)


def _check(q: Any, k: Any, v: Any, runtime: KeyRuntime) -> None:
    num_rows = runtime.shard.dispatch.shard_lengths[runtime.cp_rank]
    for name, x in (("q", q), ("k", k), ("v", v)):
        if arguments.rows(x, name, num_rows, f"this rank has {num_rows}").dim() != 3:
            raise ValueError(f"{name}: expected [{num_rows}, num_heads, head_dim], got {list(x.shape)}")
    if k.dtype != v.dtype or k.shape[1] != v.shape[1]:
        raise ValueError(f"v: expected {k.dtype} and {k.shape[1]} heads as k has, got {v.dtype} and {v.shape[1]}")


def _check_aligned(runs: Sequence[Run], q_block: int, total_seqlen: int) -> None:
    if any(run.start % q_block or (run.end % q_block and run.end != total_seqlen) for run in runs):
        raise ValueError(
            f"q_block_size: this rank's tokens are not whole blocks of {q_block}; make the key with a chunk_size that "
            f"is a multiple of it"
        )


def _check_rows(blocks: Any, rows: int) -> None:
    """What ranks must find before any of them takes part in a collective; `block_sparse_attention` checks the rest."""
    lists = blocks[0] if isinstance(blocks, tuple) and blocks else blocks
    if not isinstance(lists, Tensor):
        raise ValueError(f"blocks: expected a tensor, or a tuple of two, got {type(blocks).__name__}")
    found = lists.shape[-1] - 1 if isinstance(blocks, tuple) else lists.shape[-2] if lists.dim() > 1 else None
    if found != rows:
        raise ValueError(f"blocks: expected {rows} blocks of queries, those of this rank's tokens, got {found}")


def _blocks_of(blocks: Blocks, rows: slice, columns: int) -> Blocks:
    """The lists of some blocks of queries, without blocks of keys from ``columns`` on."""
    if isinstance(blocks, tuple):
        offsets, entries = blocks
        return offsets[..., rows.start : rows.stop + 1], entries.where(entries < columns, -1)
    if blocks.dtype == torch.bool:
        return blocks[..., rows, :columns]
    lists = blocks[..., rows, :]
    return lists.where(lists < columns, -1)


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
        sink = _SinkOfRanks.apply(sink, runtime.group, key.config.comm.dsink_all_reduce)
    return {
        "sink": sink,
        "softmax_scale": softmax_scale,
        "return_max_logits": return_max_logits,
        "deterministic": attend.deterministic,
        "sanity_check": attend.sanity_check,
        "impl": impl,
    }


def _gathered(k: Tensor, v: Tensor, runtime: KeyRuntime, key: DistAttnRuntimeKey) -> tuple[Tensor, Tensor]:
    """Keys and values of the whole sequence, in its order, ``[total_seqlen, num_heads_kv, head_dim]``.

    Gradients are summed over the ranks in the dtype of k.
    """
    args = runtime.shard.undispatch_args(k.device)
    with renamed("x_local", "k"):
        both = undispatch(
            torch.cat([k, v], dim=-1), args, runtime.group, is_partial_grad=True, verify=key.config.comm.verify
        )
    found = both.split([k.shape[-1], v.shape[-1]], dim=-1)
    return found[0], found[1]


def _joined(
    parts: Sequence[tuple[Tensor, AttnForwardMeta]], num_rows: int, runtime: KeyRuntime
) -> tuple[Tensor, AttnForwardMeta]:
    """Results of runs one after the other, with rows for the padding; the largest logits over all ranks."""
    outs, metas = zip(*parts, strict=True)
    out, lse = torch.cat(outs), torch.cat([meta.lse for meta in metas])
    if len(out) < num_rows:
        out = torch.nn.functional.pad(out, (0, 0, 0, 0, 0, num_rows - len(out)))
        lse = torch.nn.functional.pad(lse, (0, 0, 0, num_rows - len(lse)), value=-torch.inf)
    largest = None
    if metas[0].max_logits is not None:
        largest = torch.stack([meta.max_logits for meta in metas]).amax(dim=0)
        if runtime.shard.dispatch.cp_size > 1:
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=runtime.group)
    assert lse.dtype == accumulate_dtype(out.dtype)
    return out, AttnForwardMeta(lse=lse, max_logits=largest)


class _SinkOfRanks(torch.autograd.Function):
    """The sink; its gradient is this rank's part, or the sum or mean of all (`CommConfig.dsink_all_reduce`)."""

    @staticmethod
    def forward(ctx: Any, sink: Tensor, group: dist.ProcessGroup, op: SinkReduction) -> Tensor:
        ctx.group, ctx.op = group, op
        return sink.view_as(sink)

    @staticmethod
    def backward(ctx: Any, dsink: Tensor) -> tuple[Tensor, None, None]:
        if ctx.op != "none":
            dsink = dsink.clone()
            dist.all_reduce(dsink, op=dist.ReduceOp.SUM, group=ctx.group)
            if ctx.op == "avg":
                dsink /= ctx.group.size()
        return dsink, None, None
