"""Blocked attention in plain torch, on any device: memory grows with the tokens, never with their square.

Walks the blocks of `megatron_magi.backends.blocked.block_plan`. Inside, tensors are head-major: the rows of a
block and the query heads of one key head are one matrix dimension, so grouped heads need no
copies of k and v. Inputs narrower than fp32 are multiplied as they are on CUDA, into fp32; on a CPU
they are widened first.

Both passes round logits in the same way before subtracting the maximum or lse, so that no probability exceeds 1,
however large logits are.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron_magi.backends.blocked.block_plan import BlockPlan, KeyChunk, RowBlock, Selection, block_plan
from megatron_magi.operands.merge import accumulate_dtype, write_result_
from megatron_magi.operands.options import AttnOptions
from megatron_magi.operands.passes import BackwardInputs, ForwardInputs, ForwardOutput, Gradients


@torch.no_grad()
def forward(inputs: ForwardInputs, bands: np.ndarray, options: AttnOptions, output: ForwardOutput) -> None:
    """Attention forward; arguments as of `reference.forward`."""
    q, k, v, sink_lse = inputs
    plan = block_plan(bands, q.shape[1], q.device)
    num_heads_kv, dtype = k.shape[1], accumulate_dtype(q.dtype)
    rows_q, rows_k, rows_v = _queries(q, num_heads_kv, options), _head_major(k), _head_major(v)
    result = torch.zeros((*rows_q.shape[:3], v.shape[2]), dtype=dtype, device=q.device)
    # The largest logit and the lse of each row.
    stats = torch.full((2, *rows_q.shape[:3], 1), -torch.inf, dtype=dtype, device=q.device)
    for block in plan.blocks:
        block_out, largest, block_lse = _attend(block, plan, rows_q, rows_k, rows_v, options)
        _put(result, block, block_out)
        _put(stats[1], block, block_lse)
        if output.max_logits is not None:
            _put(stats[0], block, largest)
    result = _rows(result)
    row_max, row_lse = (_rows(s)[..., 0] for s in stats)
    write_result_(output, result, row_lse, sink_lse)
    if output.max_logits is not None and len(row_max):
        output.max_logits.copy_(row_max.amax(dim=0))


@torch.no_grad()
def backward(inputs: BackwardInputs, bands: np.ndarray, options: AttnOptions, grads: Gradients) -> None:
    """Attention backward; arguments as of `reference.backward`."""
    q, k, v, dout, lse, delta = inputs
    plan = block_plan(bands, q.shape[1], q.device)
    num_heads_kv, dtype = k.shape[1], accumulate_dtype(q.dtype)
    tensors = _BackwardTensors(
        q=_queries(q, num_heads_kv, options),
        k=_head_major(k),
        v=_head_major(v),
        dout=_grouped(dout.to(q.dtype), num_heads_kv),
        lse=_grouped(lse[..., None].to(dtype), num_heads_kv),
        delta=_grouped(delta[..., None].to(dtype), num_heads_kv),
        dq=torch.zeros(_grouped_shape(q, num_heads_kv), dtype=dtype, device=q.device),
        dk=torch.zeros((num_heads_kv, k.shape[0], k.shape[2]), dtype=dtype, device=q.device),
        dv=torch.zeros((num_heads_kv, v.shape[0], v.shape[2]), dtype=dtype, device=q.device),
    )
    for block in plan.blocks:
        _attend_backward(block, plan, tensors, options)
    dq, dk, dv = _rows(tensors.dq), tensors.dk.transpose(0, 1), tensors.dv.transpose(0, 1)
    dq.mul_(options.softmax_scale)
    if not _is_wide(q):
        dk.mul_(options.softmax_scale)
    grads.put((dq, dk, dv))


class _BackwardTensors(NamedTuple):
    """Head-major: ``[num_heads_kv, num_rows, group, dim]``, keys ``[num_heads_kv, num_keys, dim]``; q of `_queries`."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    lse: Tensor
    delta: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


def _attend(
    block: RowBlock, plan: BlockPlan, q: Tensor, k: Tensor, v: Tensor, options: AttnOptions
) -> tuple[Tensor, Tensor, Tensor]:
    """Output, largest logit and lse of a block, ``[num_heads_kv, num_rows * group, dim or 1]``."""
    rows_q = _take(q, block.rows)
    out = largest = total = None
    for chunk in block.chunks:
        logits, _ = _logits(block, chunk, plan, rows_q, _take(k, chunk.keys), options)
        # A row may see nothing of this chunk: a finite maximum avoids -inf - -inf.
        new = logits.amax(dim=-1, keepdim=True).clamp_(min=torch.finfo(logits.dtype).min)
        if largest is not None:
            new = torch.maximum(new, largest)
        p = logits.sub_(new).exp_()
        chunk_total = p.sum(dim=-1, keepdim=True)
        chunk_out = _product(p.to(v.dtype), _take(v, chunk.keys))
        if largest is not None:
            keep = torch.exp(largest - new)
            chunk_total.addcmul_(total, keep)
            chunk_out.addcmul_(out, keep)
        out, largest, total = chunk_out, new, chunk_total
    return out.div_(total), largest, total.log().add_(largest)


def _attend_backward(block: RowBlock, plan: BlockPlan, t: _BackwardTensors, options: AttnOptions) -> None:
    rows_q, dout = _take(t.q, block.rows), _take(t.dout, block.rows)
    lse, delta = _take(t.lse, block.rows), _take(t.delta, block.rows)
    dq = None
    for chunk in block.chunks:
        keys = _take(t.k, chunk.keys)
        logits, capped = _logits(block, chunk, plan, rows_q, keys, options)
        p = logits.sub_(lse).exp_()
        dlogits = _product(dout, _take(t.v, chunk.keys).transpose(1, 2)).sub_(delta).mul_(p)
        if capped is not None:
            dlogits.mul_(capped.square_().neg_().add_(1))
        dlogits = dlogits.to(rows_q.dtype)
        _add_product(t.dv, chunk.keys, p.to(dout.dtype).transpose(1, 2), dout)
        _add_product(t.dk, chunk.keys, dlogits.transpose(1, 2), rows_q)
        chunk_dq = _product(dlogits, keys)
        dq = chunk_dq if dq is None else dq.add_(chunk_dq)
    _put(t.dq, block, dq)


def _logits(
    block: RowBlock, chunk: KeyChunk, plan: BlockPlan, rows_q: Tensor, keys: Tensor, options: AttnOptions
) -> tuple[Tensor, Tensor | None]:
    """Logits ``[num_heads_kv, num_rows * group, num_keys]`` in the accumulation dtype, -inf where hidden.

    With a cap also the hyperbolic tangent that it multiplies.
    """
    logits, capped = _product(rows_q, keys.transpose(1, 2)), None
    if not _is_wide(rows_q):
        logits.mul_(options.softmax_scale)
    if options.softcap:
        capped = logits.div_(options.softcap).tanh_()
        logits = capped * options.softcap
    mask = chunk.mask
    if mask is not None:
        hidden = mask.hidden(plan.columns, block.num_rows)
        by_row = logits.view(logits.shape[0], block.num_rows, -1, chunk.num_keys)
        by_row[..., mask.first : mask.last].masked_fill_(hidden[:, None], -torch.inf)
    return logits, capped


def _is_wide(t: Tensor) -> bool:
    """Whether the matrix products run in the accumulation dtype."""
    return t.device.type != "cuda" or t.dtype in (torch.float32, torch.float64)


def _grouped_shape(t: Tensor, num_heads_kv: int) -> tuple[int, int, int, int]:
    num_rows, num_heads_q, dim = t.shape
    return num_heads_kv, num_rows, num_heads_q // num_heads_kv, dim


def _grouped(t: Tensor, num_heads_kv: int) -> Tensor:
    """``[num_rows, num_heads_q, dim]`` as contiguous ``[num_heads_kv, num_rows, group, dim]``."""
    t = t.to(accumulate_dtype(t.dtype)) if _is_wide(t) else t
    return t.unflatten(1, (num_heads_kv, -1)).permute(1, 0, 2, 3).contiguous()


def _queries(q: Tensor, num_heads_kv: int, options: AttnOptions) -> Tensor:
    """`_grouped` queries; where products run in the accumulation dtype, times ``softmax_scale``."""
    rows_q = _grouped(q, num_heads_kv)
    return rows_q.mul(options.softmax_scale) if _is_wide(q) else rows_q


def _head_major(t: Tensor) -> Tensor:
    t = t.to(accumulate_dtype(t.dtype)) if _is_wide(t) else t
    return t.transpose(0, 1).contiguous()


def _rows(t: Tensor) -> Tensor:
    """The inverse of `_grouped`, as a new tensor or a view."""
    return t.permute(1, 0, 2, 3).flatten(1, 2)


def _take(t: Tensor, tokens: Selection) -> Tensor:
    """The tokens of a block; grouped heads join the rows: ``[num_heads_kv, tokens * group, dim]``."""
    t = t[:, tokens] if isinstance(tokens, slice) else t.index_select(1, tokens)
    return t.flatten(1, 2) if t.ndim == 4 else t


def _put(into: Tensor, block: RowBlock, value: Tensor) -> None:
    """Writes the rows of a block; every row is in one block only."""
    value = value.view(into.shape[0], block.num_rows, *into.shape[2:])
    if isinstance(block.rows, slice):
        into[:, block.rows] = value
    else:
        into.index_copy_(1, block.rows, value)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Batched ``a @ b``, summed and returned in the accumulation dtype."""
    if a.dtype == accumulate_dtype(a.dtype):
        return torch.bmm(a, b)
    return torch.bmm(a, b, out_dtype=torch.float32)


def _add_product(into: Tensor, tokens: Selection, a: Tensor, b: Tensor) -> None:
    """``into[:, tokens] += a @ b``. An index has no token twice, so the order of sums is fixed."""
    if not isinstance(tokens, slice):
        into.index_add_(1, tokens, _product(a, b))
    elif a.dtype == into.dtype:
        into[:, tokens].baddbmm_(a, b)
    else:
        into[:, tokens].add_(_product(a, b))
