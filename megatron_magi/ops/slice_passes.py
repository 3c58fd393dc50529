"""One forward or backward pass over a table of bands, without autograd, by any implementation.

Tensors are ``thd``: q ``[num_rows, num_heads_q, head_dim]``, k ``[num_keys, num_heads_kv, head_dim]``,
v ``[num_keys, num_heads_kv, head_dim_v]``; num_heads_q is a multiple of num_heads_kv. lse, delta
and sums are fp32, fp64 for fp64 inputs. Rows that see no key get output 0 and lse -inf (or the
sink's lse), and zero gradients. Tensors must be finite, also in tokens that are in no visible pair: `ffa`
and the other kernels (`cudnn`, `triton`) multiply them by 0. `torch` and `reference` never read them.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron_magi.backends.base import Backend, Program
from megatron_magi.backends.registry import backend_that, choose, fastest, refusal
from megatron_magi.backends.registry import choose as choose_for
from megatron_magi.operands.merge import accumulate_dtype, row_products, sink_gradient, sink_lse
from megatron_magi.operands.options import (
    FLOAT_DTYPES,
    AttnOptions,
    check_bands,
    check_like,
    check_qkv,
    check_sink,
    make_options,
)
from megatron_magi.operands.passes import BackwardInputs, ForwardInputs, ForwardOutput, Gradients
from megatron_magi.profiling import profiled_backward, profiled_forward

__all__ = [
    "SliceCall",
    "attend",
    "attend_back",
    "backend_that",
    "backward_pass",
    "choose_for",
    "forward_pass",
    "program_of",
    "refusal",
    "resolve_impl",
    "row_delta",
    "slice_attention_backward",
    "slice_attention_forward",
    "table_backend",
    "why_not",
]


class SliceCall(NamedTuple):
    """Non-tensor arguments of attention over a mask, as one object: each argument of an autograd function costs host
    time.

    Attributes:
        bands: of the mask.
        options: of the call.
        impl: as in `slice_attention_forward`.
        return_max_logits: likewise.
    """

    bands: np.ndarray
    options: AttnOptions
    impl: str
    return_max_logits: bool


def resolve_impl(
    impl: str, q: Tensor, v: Tensor, options: AttnOptions | None = None, masks: Sequence[np.ndarray] = ()
) -> Backend:
    """The backend that computes attention of such tensors; see `megatron_magi.backends.registry.choose`."""
    return choose(impl, q.device, q.dtype, (q.shape[2], v.shape[2]), options, masks)


def why_not(impl: str, device: torch.device, dtype: torch.dtype, dims: tuple[int, int], instead: str) -> str | None:
    """The reason why an implementation does not take such tensors, which recommends ``instead``; None if it does."""
    return choose(impl, device, dtype, dims).why_not(device, dtype, dims, instead)


def table_backend(impl: str, device: torch.device, dtype: torch.dtype, dims: tuple[int, int]) -> Backend | None:
    """The backend that ``impl`` selects for such tensors, if it takes them and makes tables of masks on the host."""
    backend = fastest(device, dtype, dims) if impl == "auto" else choose(impl, device, dtype, dims)
    if backend is None or backend.tables is None or not backend.takes(device, dtype, dims):
        return None
    return backend


@torch.no_grad()
def slice_attention_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bands: np.ndarray,
    *,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    sink: Tensor | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    return_max_logits: bool = False,
    deterministic: bool = False,
    sm_margin: int = 0,
    impl: str = "auto",
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Computes one forward pass, without autograd.

    Args:
        q, k, v: see the module; fp16, bf16, fp32 or fp64, any strides; finite, hidden tokens too.
        bands: int64 ``[n, 6]`` (see `megatron_magi.mask.bands`), no two of which overlap.
        softmax_scale: factor of q @ k; ``1 / sqrt(head_dim)`` when None.
        softcap: 0 for none, else logits become ``softcap * tanh(logit / softcap)``.
        sink: logits without a value that join the denominator of this pass, any float dtype,
            ``[num_sinks, num_heads_q]`` or ``[num_rows, num_sinks, num_heads_q]``.
        out, lse: both or none; a result over other keys, into which this one is merged in place.
        out_dtype: dtype of a new output; that of q when None.
        return_max_logits: also return the largest visible logit of each head.
        deterministic: bitwise repeatable results; a forward always is.
        sm_margin: streaming multiprocessors left to communication; for kernels that can.
        impl: ``auto``, ``reference`` (dense), ``torch`` (blocked), ``ffa`` (Hopper kernels, bf16 and fp16), ``cudnn``
            (the cuDNN frontend, likewise) or ``triton`` (other GPUs). One that is named never falls back to another.

    Returns:
        ``(out, lse, max_logits)``: out ``[num_rows, num_heads_q, head_dim_v]``, lse ``[num_rows,
        num_heads_q]``, max_logits ``[num_heads_q]`` or None.

    Raises:
        ValueError: an argument, named in the message, has a wrong shape, dtype or value.
    """
    check_qkv(q, k, v)
    check_bands(bands, q.shape[0], k.shape[0])
    options = make_options(q, softmax_scale, softcap, deterministic, sm_margin)
    backend = resolve_impl(impl, q, v, options, (bands,))
    if (out is None) != (lse is None):
        raise ValueError("out, lse: give both, to merge into, or none")
    if out is None or lse is None:
        if out_dtype is not None and out_dtype not in FLOAT_DTYPES:
            raise ValueError(f"out_dtype: expected a floating-point dtype of 16 to 64 bits, got {out_dtype}")
        return forward_pass((q, k, v), bands, options, backend, sink, return_max_logits, out_dtype)
    shape = (*q.shape[:2], v.shape[2])
    check_like("out", out, shape, q.device)
    check_like("lse", lse, shape[:2], q.device)
    if out_dtype not in (None, out.dtype):
        raise ValueError(f"out_dtype: out is given and has dtype {out.dtype}, got {out_dtype}")
    return forward_pass((q, k, v), bands, options, backend, sink, return_max_logits, into=(out, lse))


@profiled_forward
def forward_pass(
    qkv: tuple[Tensor, Tensor, Tensor],
    bands: np.ndarray,
    options: AttnOptions,
    backend: Backend,
    sink: Tensor | None,
    return_max_logits: bool,
    out_dtype: torch.dtype | None = None,
    into: tuple[Tensor, Tensor] | None = None,
    **hints: object,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """`slice_attention_forward` of checked arguments, where no gradients are recorded; ``hints``: the backend's own."""
    q, k, v = qkv
    dtype = accumulate_dtype(q.dtype)
    if into is None:
        num_rows, num_heads, _ = q.shape
        out = q.new_empty(num_rows, num_heads, v.shape[2], dtype=out_dtype)
        lse = q.new_empty(num_rows, num_heads, dtype=dtype)
    else:
        out, lse = into
    if sink is not None:
        check_sink(sink, q)
        sink = sink_lse(sink, dtype)
    max_logits = q.new_full((q.shape[1],), -torch.inf, dtype=dtype) if return_max_logits else None
    inputs, output = ForwardInputs(q, k, v, sink), ForwardOutput(out, lse, into is not None, max_logits)
    with _no_autocast(q):
        backend.forward(inputs, bands, options, output, **hints)
    return out, lse, max_logits


_NOTHING = nullcontext()


@cache
def _has_autocast(device: str) -> bool:
    return torch.amp.is_autocast_available(device)


def _no_autocast(q: Tensor):
    """Disables autocast, which would change the dtype of matrix products."""
    casts = _has_autocast(device := q.device.type) and torch.is_autocast_enabled(device)
    return torch.autocast(device, enabled=False) if casts else _NOTHING


def program_of(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bands: np.ndarray,
    options: AttnOptions,
    impl: str,
) -> Program | None:
    """The prepared passes for a backward without those of its forward, if the backend has them."""
    programs = resolve_impl(impl, q, v, options, (bands,)).programs
    return None if programs is None else programs.of_tensors(q, k, v, bands, options)


def attend(
    q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, call: SliceCall
) -> tuple[tuple[Tensor, Tensor, Tensor | None], Program | None]:
    """`forward_pass` of a whole mask: output, lse and largest logits, and the prepared passes if there are any."""
    bands, options, impl, return_max_logits = call
    backend = resolve_impl(impl, q, v, options, (bands,))
    if backend.programs is not None:
        program = backend.programs.of_tensors(q, k, v, bands, options)
        if program is not None:
            return program.forward(q, k, v, sink, options, return_max_logits), program
    return forward_pass((q, k, v), bands, options, backend, sink, return_max_logits), None


def attend_back(
    dout: Tensor,
    qkv: tuple[Tensor, Tensor, Tensor],
    sink: Tensor | None,
    out: Tensor,
    lse: Tensor,
    call: SliceCall,
    program: Program | None,
    read: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of q, k, v and of the sink, None if not wanted; the backward of `attend`; ``read``: `check_reading`."""
    (q, k, v), (bands, options, impl, _) = qkv, call
    found = None
    if program is not None:
        found = program.backward(dout, qkv, out, lse, options, q.dtype, sink is not None)
    if found is not None:
        dq, dk, dv, delta = found
    else:
        backend = resolve_impl(impl, q, v, options, (bands,))
        delta = None if backend.takes_out and sink is None else row_delta(dout, out, impl)
        inputs, hints = BackwardInputs(q, k, v, dout, lse, delta), {"out": out} if backend.takes_out else {}
        if read is not None:
            hints["read"] = read
        dq, dk, dv = backward_pass(inputs, bands, options, backend, (None, None, None), q.dtype, **hints)
    if sink is None:
        return dq, dk, dv, None
    assert delta is not None
    return dq, dk, dv, sink_gradient(sink, lse, delta)


@torch.no_grad()
def slice_attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    bands: np.ndarray,
    *,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    dq: Tensor | None = None,
    dk: Tensor | None = None,
    dv: Tensor | None = None,
    grad_dtype: torch.dtype | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    impl: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes one backward pass. ``lse`` and ``delta`` are final: over all keys and sinks of a row.

    Args:
        dout: gradient of out, ``[num_rows, num_heads_q, head_dim_v]``, any float dtype.
        q, k, v, bands, softmax_scale, softcap, deterministic, sm_margin, impl: as in
            `slice_attention_forward`.
        lse: ``[num_rows, num_heads_q]``.
        delta: ``[num_rows, num_heads_q]``, see `row_delta`.
        dq, dk, dv: gradients that this pass is added to in place; new where None.
        grad_dtype: dtype of new gradients; that of q when None.

    Returns:
        ``(dq, dk, dv)`` with the shapes of q, k, v. The sink's gradient needs no pass: see
        `megatron_magi.operands.merge.sink_gradient`.

    Raises:
        ValueError: an argument, named in the message, has a wrong shape, dtype or value.
    """
    check_qkv(q, k, v)
    check_bands(bands, q.shape[0], k.shape[0])
    options = make_options(q, softmax_scale, softcap, deterministic, sm_margin)
    backend = resolve_impl(impl, q, v, options, (bands,))
    check_like("dout", dout, (*q.shape[:2], v.shape[2]), q.device)
    check_like("lse", lse, q.shape[:2], q.device)
    check_like("delta", delta, q.shape[:2], q.device)
    grad_dtype = q.dtype if grad_dtype is None else grad_dtype
    if grad_dtype not in FLOAT_DTYPES:
        raise ValueError(f"grad_dtype: expected a floating-point dtype of 16 to 64 bits, got {grad_dtype}")
    for name, given, like in (("dq", dq, q), ("dk", dk, k), ("dv", dv, v)):
        if given is not None:
            check_like(name, given, like.shape, q.device)
    inputs = BackwardInputs(q, k, v, dout, lse, delta)
    return backward_pass(inputs, bands, options, backend, (dq, dk, dv), grad_dtype)


@profiled_backward
def backward_pass(
    inputs: BackwardInputs,
    bands: np.ndarray,
    options: AttnOptions,
    backend: Backend,
    given: tuple[Tensor | None, Tensor | None, Tensor | None],
    grad_dtype: torch.dtype,
    **hints: object,
) -> tuple[Tensor, Tensor, Tensor]:
    """`slice_attention_backward` of checked arguments, without recording.

    ``given``: dq, dk and dv, where they are to be added to; ``hints``: the backend's own.
    """
    adds, adds_keys = given[0] is not None, given[1] is not None or given[2] is not None
    dq, dk, dv = (
        t.new_empty(*t.shape, dtype=grad_dtype) if g is None else g for t, g in zip(inputs[:3], given, strict=True)
    )
    for grad, before in ((dk, given[1]), (dv, given[2])):
        if adds_keys and before is None:
            grad.zero_()
    with _no_autocast(inputs.dout):
        backend.backward(inputs, bands, options, Gradients(dq, dk, dv, adds, adds_keys), **hints)
    return dq, dk, dv


def row_delta(dout: Tensor, out: Tensor, impl: str = "torch") -> Tensor:
    """Computes ``rowsum(dout * out)``, which the backward needs, ``[num_rows, num_heads_q]``.

    fp32, fp64 when both are. An output of 0 counts as 0 whatever its gradient is, so that
    garbage in the gradient of rows that see nothing stays there.

    Args:
        dout, out: ``[num_rows, num_heads_q, head_dim_v]``.
        impl: as in `slice_attention_forward`; an implementation may have a kernel for it.

    Raises:
        ValueError: there is no implementation of that name, or it does not take such tensors; shapes disagree.
    """
    check_like("out", out, out.shape, out.device)
    check_like("dout", dout, out.shape, out.device)
    if impl == "auto" and out.dtype.itemsize > 2:  # kernels do not support it, and torch is fast enough
        return row_products(dout, out)
    return resolve_impl(impl, out, out).row_delta(dout, out)
