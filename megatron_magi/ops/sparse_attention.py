"""Attention in which each block of queries, or each query, sees the keys of a list of its own.

Tensors are ``thd`` as in `megatron_magi.ops.slice_passes`; values must be finite. Patterns are tensors on the
device of q, may differ from call to call and are never copied to the host.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_magi.backends.base import Sparse
from megatron_magi.backends.registry import SPARSE, choose_sparse
from megatron_magi.checks import flag
from megatron_magi.operands.finite import require_finite
from megatron_magi.operands.merge import accumulate_dtype, sink_gradient, sink_lse
from megatron_magi.operands.meta import AttnForwardMeta
from megatron_magi.operands.options import check_qkv, check_sink, make_options
from megatron_magi.operands.passes import BackwardInputs, ForwardInputs
from megatron_magi.operands.sparse_pattern import SparsePattern, block_pattern, check_numbers, index_pattern
from megatron_magi.ops.derivatives import refuse_second, refuse_tangents
from megatron_magi.ops.slice_passes import row_delta


def block_sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    blocks: Tensor | tuple[Tensor, Tensor],
    *,
    q_block_size: int,
    k_block_size: int,
    causal: bool = False,
    sink: Tensor | None = None,
    softmax_scale: float | None = None,
    return_max_logits: bool = False,
    deterministic: bool = False,
    sanity_check: bool = False,
    impl: str = "auto",
) -> tuple[Tensor, AttnForwardMeta]:
    """Attention in which each block of queries sees a list of blocks of keys. Autograd; can be compiled.

    Args:
        q: ``[num_tokens_q, num_heads_q, head_dim]``, fp16, bf16, fp32 or fp64. Hopper kernels take fp16 and bf16, those
            in Triton fp32 too.
        k, v: ``[num_tokens_k, num_heads_kv, head_dim]``; num_heads_kv divides num_heads_q. Hopper kernels take head_dim
            64 and 128. In Triton, up to 256, and in the definition values may have a head_dim of their own, which is
            then that of out.
        blocks: which blocks of keys a block of queries sees, for each key head or, with 1 list or without the first
            dimension, for all. One of three forms, on the device of q:

            - a mask, bool ``[num_heads_kv, num_q_blocks, num_k_blocks]``;
            - lists of one length, int ``[num_heads_kv, num_q_blocks, topk]``; -1 is passed over;
            - CSR, a tuple of offsets, int ``[num_heads_kv, num_q_blocks + 1]``, and numbers of blocks, int ``[n]``:
              those of block i lie at ``offsets[i]`` to ``offsets[i + 1]``. Offsets never fall, and lie in 0 to n.

            The order of a list is free. A block that a list names twice counts twice. Numbers behind the last block
            are a ValueError on a CPU and with ``sanity_check``, else passed over, as in compiled functions.
        q_block_size: queries of a block, 1 to 128. The last block may be short.
        k_block_size: keys of a block, 64 or 128. The last block may be short.
        causal: of the listed keys, query i sees those up to ``i + num_tokens_k - num_tokens_q``.
        sink: as in `megatron_magi.slice_attention`.
        softmax_scale: ``1 / sqrt(head_dim)`` when None.
        return_max_logits: fill ``meta.max_logits``.
        deterministic: bitwise repeatable gradients. In Triton, and of blocks of 64 keys, they always are; else it takes
            longer.
        sanity_check: look for NaN and inf in q, k, v, the sink (NaN alone) and the gradient of the output, and for
            numbers and offsets that are wrong: a pass over memory and a wait for the device each.
        impl: ``auto``, ``reference`` (dense; of single keys it computes the listed ones), ``ffa`` (Hopper kernels) or
            ``triton``; one that is named never falls back.

    Returns:
        ``(out, meta)``: out ``[num_tokens_q, num_heads_q, head_dim]`` in the dtype of q; ``meta.lse`` ``[num_tokens_q,
        num_heads_q]`` and ``meta.max_logits`` ``[num_heads_q]``, fp32 (fp64 for fp64 inputs). Queries that see nothing
        get out 0, lse -inf (or the sink's).

    Raises:
        ValueError: an argument, named in the message, has a wrong shape, dtype or value.
    """
    check_qkv(q, k, v)
    pattern = block_pattern(blocks, q, k, q_block_size, k_block_size, causal)
    options = GivenOptions(sink, softmax_scale, return_max_logits, deterministic, sanity_check, impl)
    return attend_pattern(q, k, v, pattern, options)


def index_sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    *,
    sink: Tensor | None = None,
    softmax_scale: float | None = None,
    return_max_logits: bool = False,
    deterministic: bool = False,
    sanity_check: bool = False,
    impl: str = "auto",
) -> tuple[Tensor, AttnForwardMeta]:
    """Attention in which each query sees a list of single keys. Autograd; can be compiled.

    Args:
        indices: int ``[num_tokens_q, num_heads_kv, topk]``, or ``[num_tokens_q, 1, topk]`` for all key heads: numbers
            of keys in any order; -1 is passed over. A key that a list names twice counts twice. Numbers behind the last
            key are a ValueError on a CPU and with ``sanity_check``, else passed over, as in compiled functions.
        q, k, v, sink, softmax_scale, return_max_logits, deterministic, sanity_check, impl: as in
            `block_sparse_attention`.

    Returns:
        ``(out, meta)`` as `block_sparse_attention`.

    Raises:
        ValueError: an argument, named in the message, has a wrong shape, dtype or value.
    """
    check_qkv(q, k, v)
    options = GivenOptions(sink, softmax_scale, return_max_logits, deterministic, sanity_check, impl)
    return attend_pattern(q, k, v, index_pattern(indices, q, k), options)


@dataclass(frozen=True)
class GivenOptions:
    """Arguments of `block_sparse_attention` that both functions have, not checked yet."""

    sink: Tensor | None
    softmax_scale: Any
    return_max_logits: bool
    deterministic: bool
    sanity_check: bool
    impl: str


def attend_pattern(
    q: Tensor, k: Tensor, v: Tensor, pattern: SparsePattern, given: GivenOptions
) -> tuple[Tensor, AttnForwardMeta]:
    """`block_sparse_attention` of checked tensors and a checked pattern.

    Raises:
        ValueError: an option, named in the message, is wrong.
    """
    scale, deterministic = settled(q, given, SPARSE, (q, k, v))
    out, lse, max_logits = _forward_operator(
        q, k, v, given.sink, list(pattern.tensors), pattern.q_block, pattern.k_block, pattern.causal,
        given.return_max_logits, scale, deterministic, given.sanity_check, given.impl,
    )  # fmt: skip
    return out, AttnForwardMeta(lse=lse, max_logits=max_logits if given.return_max_logits else None)


def settled(q: Tensor, given: GivenOptions, known: Collection[str], tensors: tuple[Tensor, ...]) -> tuple[float, bool]:
    """The scale, and whether gradients repeat, of checked options.

    Args:
        known: implementations there are.
        tensors: what the call is differentiable in, but for the sink.

    Raises:
        ValueError: an option, named in the message, is wrong.
    """
    sink, impl = given.sink, given.impl
    if sink is not None:
        check_sink(sink, q)
    for name in ("return_max_logits", "deterministic", "sanity_check"):
        flag(getattr(given, name), name)
    if not isinstance(impl, str) or impl not in ("auto", *known):
        raise ValueError(f"impl: {impl!r} is not available; use one of {', '.join(['auto', *known])}")
    scale, deterministic = given.softmax_scale, given.deterministic
    if torch.compiler.is_compiling():
        return 1.0 / math.sqrt(q.shape[-1]) if scale is None else float(scale), deterministic
    refuse_tangents(*tensors, sink)
    options = make_options(q, scale, 0.0, deterministic, 0)
    return options.softmax_scale, options.deterministic


def _kernels(impl: str, q: Tensor, v: Tensor) -> Sparse:
    """What computes: the implementation asked for, or for ``auto`` the best that takes such tensors."""
    return choose_sparse(impl, q.device, q.dtype, (q.shape[2], v.shape[2]))


def describe_row(_name: str, _row: int) -> str:
    """For `require_finite`, of a row: whether lists show it is not looked up."""
    return "it may be hidden or visible"


# Two operators, for torch.compile and for autograd. max_logits and dsink are empty if not requested, as operators
# cannot return None.
_PATTERN = "Tensor[] pattern, int q_block, int k_block, bool causal"
_OPTIONS = "float softmax_scale, bool deterministic, bool sanity_check, str impl"


@torch.library.custom_op(
    "megatron_magi::sparse_attention",
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, Tensor? sink, {_PATTERN}, bool return_max_logits, {_OPTIONS})"
    " -> (Tensor, Tensor, Tensor)",
)
def _forward_operator(
    q, k, v, sink, pattern, q_block, k_block, causal, return_max_logits,
    softmax_scale, deterministic, sanity_check, impl,
):  # fmt: skip
    dtype = accumulate_dtype(q.dtype)
    if sanity_check:
        check_numbers(SparsePattern(tuple(pattern), q_block, k_block, causal), k.shape[0])
        require_finite({"q": q, "k": k, "v": v, "sink": sink}, describe_row)
    scale = make_options(q, softmax_scale, 0.0, deterministic, 0).softmax_scale  # compiled functions check it here
    with torch.autocast(q.device.type, enabled=False):
        inputs = ForwardInputs(q, k, v, None if sink is None else sink_lse(sink, dtype))
        pattern = SparsePattern(tuple(pattern), q_block, k_block, causal)
        out, lse, max_logits = _kernels(impl, q, v).forward(inputs, pattern, scale, return_max_logits)
    # Compiled graphs rely on the strides that the operators' fakes have.
    return out.contiguous(), lse, lse.new_empty(0) if max_logits is None else max_logits


@_forward_operator.register_fake
def _(q, k, v, sink, pattern, q_block, k_block, causal, return_max_logits, *_options):
    dtype = accumulate_dtype(q.dtype)
    out, lse = q.new_empty((*q.shape[:2], v.shape[2])), q.new_empty(q.shape[:2], dtype=dtype)
    return out, lse, q.new_empty(q.shape[1] if return_max_logits else 0, dtype=dtype)


@torch.library.custom_op(
    "megatron_magi::sparse_attention_backward",
    mutates_args=(),
    schema=f"(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor? sink, Tensor out, Tensor lse, {_PATTERN}, {_OPTIONS})"
    " -> (Tensor, Tensor, Tensor, Tensor)",
)
def _backward_operator(
    dout, q, k, v, sink, out, lse, pattern, q_block, k_block, causal,
    softmax_scale, deterministic, sanity_check, impl,
):  # fmt: skip
    if sanity_check:
        require_finite({"dout": dout}, describe_row)
    deterministic = make_options(q, softmax_scale, 0.0, deterministic, 0).deterministic
    with torch.autocast(q.device.type, enabled=False):
        delta = row_delta(dout, out, "torch" if impl == "reference" else "auto")
        inputs = BackwardInputs(q, k, v, dout, lse, delta)
        pattern = SparsePattern(tuple(pattern), q_block, k_block, causal)
        dq, dk, dv = _kernels(impl, q, v).backward(inputs, pattern, softmax_scale, deterministic)
    dq, dk, dv = (grad.contiguous() for grad in (dq, dk, dv))
    return dq, dk, dv, lse.new_empty(0) if sink is None else sink_gradient(sink, lse, delta).contiguous()


@_backward_operator.register_fake
def _(dout, q, k, v, sink, out, lse, *_rest):
    dq, dk, dv = (t.new_empty(t.shape) for t in (q, k, v))
    return dq, dk, dv, lse.new_empty(0) if sink is None else sink.new_empty(sink.shape)


def _keep_for_backward(ctx, inputs, output):
    q, k, v, sink, pattern, q_block, k_block, causal, _, *options = inputs
    out, lse, _ = output
    ctx.save_for_backward(q, k, v, sink, out, lse, *pattern)
    ctx.numbers = (q_block, k_block, causal, *options)
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _operator_backward(ctx, dout, _dlse, _dmax_logits):
    q, k, v, sink, out, lse, *pattern = ctx.saved_tensors
    grads = (None,) * 4
    if dout is not None:
        grads = _backward_operator(dout, q, k, v, sink, out, lse, pattern, *ctx.numbers)
    return *grads[:3], None if sink is None else grads[3], [None] * len(pattern), *[None] * 8


_forward_operator.register_autograd(_operator_backward, setup_context=_keep_for_backward)
_backward_operator.register_autograd(refuse_second)
