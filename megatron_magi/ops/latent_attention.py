"""Attention in which each query sees a list of single latent keys, whose first elements are the values (MLA).

Tensors are ``thd`` as in `megatron_magi.ops.sparse_attention`; values must be finite. Lists are tensors on the device
of q, may differ from call to call and are never copied to the host.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_magi.backends.base import Latent
from megatron_magi.backends.registry import LATENT, choose_latent
from megatron_magi.checks import int_at_least
from megatron_magi.operands.finite import require_finite
from megatron_magi.operands.merge import accumulate_dtype, sink_gradient, sink_lse
from megatron_magi.operands.meta import AttnForwardMeta
from megatron_magi.operands.options import FLOAT_DTYPES, check_tensor, make_options
from megatron_magi.operands.passes import BackwardInputs, ForwardInputs
from megatron_magi.operands.sparse_pattern import SparsePattern, check_numbers, index_pattern
from megatron_magi.ops.derivatives import refuse_second
from megatron_magi.ops.sparse_attention import GivenOptions, describe_row, settled


def latent_sparse_attention(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    *,
    softmax_scale: float,
    dim_v: int = 512,
    sink: Tensor | None = None,
    return_max_logits: bool = False,
    deterministic: bool = False,
    sanity_check: bool = False,
    impl: str = "auto",
) -> tuple[Tensor, AttnForwardMeta]:
    """Attention over lists of single keys whose first elements are the values: MLA with absorbed heads. Autograd; can
    be compiled.

    Logits are ``softmax_scale * q @ kv``, values ``kv[..., :dim_v]``. In DeepSeek's models with sparse attention q and
    kv have 576 elements, 512 of the latent and 64 with positions, all query heads share one head of kv, and out goes
    through the second half of the up-projection that q was absorbed with (DeepSeek-V2, arXiv 2405.04434, section 2.1.2;
    DeepSeek-V3.2-Exp, figure 1).

    Args:
        q: ``[num_tokens_q, num_heads_q, head_dim]``, fp16, bf16, fp32 or fp64. Kernels in Triton take all but fp64.
        kv: ``[num_tokens_k, num_heads_kv, head_dim]``, in the dtype of q; num_heads_kv divides num_heads_q.
        indices: int ``[num_tokens_q, num_heads_kv, topk]``, or ``[num_tokens_q, 1, topk]`` for all key heads: numbers
            of keys in any order; -1 is passed over, best at the end of a list. A key that a list names twice counts
            twice. Numbers behind the last key are a ValueError on a CPU and with ``sanity_check``, else passed over, as
            in compiled functions. Leave keys after a query out of its list: there is no other mask.
        softmax_scale: factor of the products. It has no default, as it belongs to the heads before absorption:
            ``1 / sqrt(192)`` in DeepSeek-V3, times what scaling of RoPE adds.
        dim_v: elements of kv that are the values, 1 to head_dim.
        sink: as in `megatron_magi.slice_attention`.
        return_max_logits: fill ``meta.max_logits``.
        deterministic: bitwise repeatable gradients. What each query gives to the gradient of kv is then kept, by
            ``triton`` in fp32, 1 GiB at a time, by ``ffa`` in bf16, 2 GiB or more, instead of being added atomically;
            the definition always repeats.
        sanity_check: look for NaN and inf in q, kv, the sink (NaN alone) and the gradient of the output, and for
            indices that are wrong: a pass over memory and a wait for the device each.
        impl: ``auto``, ``reference`` (the listed keys of some queries at a time), ``triton`` (head_dim up to 576, with
            dim_v up to 512 and up to 64 elements behind) or ``ffa`` (fp16 and bf16, head_dim 576 and dim_v 512, on
            Hopper; gradients in fp16 are those of ``triton``). ``auto`` on GPUs is the first of ``ffa``
            and ``triton`` that takes the tensors; one that is named never falls back.

    Returns:
        ``(out, meta)``: out ``[num_tokens_q, num_heads_q, dim_v]`` in the dtype of q; ``meta.lse`` ``[num_tokens_q,
        num_heads_q]`` and ``meta.max_logits`` ``[num_heads_q]``, fp32 (fp64 for fp64 inputs). Queries that see nothing
        get out 0, lse -inf (or the sink's). The gradient of kv is the sum of those of keys and values.

    Raises:
        ValueError: an argument, named in the message, has a wrong shape, dtype or value.
    """
    dim_v = check_operands(q, kv, dim_v, softmax_scale)
    pattern = index_pattern(indices, q, kv)
    given = GivenOptions(sink, softmax_scale, return_max_logits, deterministic, sanity_check, impl)
    scale, deterministic = settled(q, given, LATENT, (q, kv))
    out, lse, max_logits = _forward_operator(
        q, kv, sink, pattern.tensors[0], dim_v, return_max_logits, scale, deterministic, sanity_check, impl
    )
    return out, AttnForwardMeta(lse=lse, max_logits=max_logits if return_max_logits else None)


def check_operands(q: Tensor, kv: Tensor, dim_v: int, softmax_scale: float | None) -> int:
    """The checked ``dim_v``.

    Raises:
        ValueError: q, kv and dim_v do not fit together, or there is no scale.
    """
    if softmax_scale is None:
        raise ValueError("softmax_scale: expected a number, that of the heads before absorption, got None")
    for name, t in (("q", q), ("kv", kv)):
        check_tensor(name, t)
        if t.ndim != 3 or min(t.shape[1:]) < 1:
            raise ValueError(f"{name}: expected [num_tokens, num_heads, head_dim], got shape {list(t.shape)}")
        if t.dtype not in FLOAT_DTYPES:
            raise ValueError(f"{name}: expected a floating-point dtype of 16 to 64 bits, got {t.dtype}")
    if kv.dtype != q.dtype or kv.device != q.device:
        raise ValueError(f"kv: expected the dtype and device of q, {q.dtype} {q.device}, got {kv.dtype} {kv.device}")
    if kv.shape[2] != q.shape[2]:
        raise ValueError(f"kv: expected the head_dim of q, {q.shape[2]}, got {kv.shape[2]}")
    if q.shape[1] % kv.shape[1]:
        raise ValueError(f"q: expected num_heads_q to be a multiple of num_heads_kv, {kv.shape[1]}, got {q.shape[1]}")
    if int_at_least(dim_v, "dim_v", 1) > kv.shape[2]:
        raise ValueError(f"dim_v: expected at most the head_dim of kv, {kv.shape[2]}, got {dim_v}")
    return int(dim_v)


def _implementation(impl: str, q: Tensor, kv: Tensor, dim_v: int) -> Latent:
    if q.shape[0] and kv.shape[0]:
        return choose_latent(impl, q.device, q.dtype, (q.shape[2], dim_v))
    return LATENT["reference"]


# Two operators, for torch.compile and for autograd. max_logits and dsink are empty if not requested, as operators
# cannot return None. ``entries``: int [lists, num_tokens_q, topk].
_OPTIONS = "float softmax_scale, bool deterministic, bool sanity_check, str impl"


@torch.library.custom_op(
    "megatron_magi::latent_sparse_attention",
    mutates_args=(),
    schema=f"(Tensor q, Tensor kv, Tensor? sink, Tensor entries, int dim_v, bool return_max_logits, {_OPTIONS})"
    " -> (Tensor, Tensor, Tensor)",
)
def _forward_operator(q, kv, sink, entries, dim_v, return_max_logits, softmax_scale, deterministic, sanity_check, impl):
    dtype, pattern = accumulate_dtype(q.dtype), SparsePattern.of_keys(entries)
    if sanity_check:
        check_numbers(pattern, kv.shape[0])
        require_finite({"q": q, "kv": kv, "sink": sink}, describe_row)
    scale = make_options(q, softmax_scale, 0.0, deterministic, 0).softmax_scale  # compiled functions check it here
    with torch.autocast(q.device.type, enabled=False):
        inputs = ForwardInputs(q, kv, kv[..., :dim_v], None if sink is None else sink_lse(sink, dtype))
        kernels = _implementation(impl, q, kv, dim_v)
        out, lse, max_logits = kernels.forward(inputs, pattern, scale, return_max_logits)
    # Compiled graphs rely on the strides that the operators' fakes have.
    return out.contiguous(), lse.contiguous(), lse.new_empty(0) if max_logits is None else max_logits


@_forward_operator.register_fake
def _(q, kv, sink, entries, dim_v, return_max_logits, *_options):
    dtype = accumulate_dtype(q.dtype)
    out, lse = q.new_empty((*q.shape[:2], dim_v)), q.new_empty(q.shape[:2], dtype=dtype)
    return out, lse, q.new_empty(q.shape[1] if return_max_logits else 0, dtype=dtype)


@torch.library.custom_op(
    "megatron_magi::latent_sparse_attention_backward",
    mutates_args=(),
    schema="(Tensor dout, Tensor q, Tensor kv, Tensor? sink, Tensor out, Tensor lse, Tensor entries, int dim_v,"
    f" {_OPTIONS}) -> (Tensor, Tensor, Tensor)",
)
def _backward_operator(dout, q, kv, sink, out, lse, entries, dim_v, softmax_scale, deterministic, sanity_check, impl):
    if sanity_check:
        require_finite({"dout": dout}, describe_row)
    deterministic = make_options(q, softmax_scale, 0.0, deterministic, 0).deterministic
    with torch.autocast(q.device.type, enabled=False):
        kernels = _implementation(impl, q, kv, dim_v)
        delta = kernels.row_delta(dout, out)
        inputs = BackwardInputs(q, kv, kv[..., :dim_v], dout, lse, delta)
        dq, dkv = kernels.backward(inputs, SparsePattern.of_keys(entries), softmax_scale, deterministic)
    dsink = lse.new_empty(0) if sink is None else sink_gradient(sink, lse, delta).contiguous()
    return dq.contiguous(), dkv.contiguous(), dsink


@_backward_operator.register_fake
def _(dout, q, kv, sink, out, lse, *_rest):
    dq, dkv = (t.new_empty(t.shape) for t in (q, kv))
    return dq, dkv, lse.new_empty(0) if sink is None else sink.new_empty(sink.shape)


def _keep_for_backward(ctx, inputs, output):
    q, kv, sink, entries, dim_v, _, *options = inputs
    ctx.save_for_backward(q, kv, sink, *output[:2], entries)
    ctx.numbers = (dim_v, *options)
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _operator_backward(ctx, dout, _dlse, _dmax_logits):
    q, kv, sink, out, lse, entries = ctx.saved_tensors
    grads = (None,) * 3
    if dout is not None:
        grads = _backward_operator(dout, q, kv, sink, out, lse, entries, *ctx.numbers)
    return *grads[:2], None if sink is None else grads[2], *[None] * 7


_forward_operator.register_autograd(_operator_backward, setup_context=_keep_for_backward)
_backward_operator.register_autograd(refuse_second)
