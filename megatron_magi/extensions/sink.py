"""A sink joins the attention of any kernel that returns its lse, and whose backward takes out and lse.

A sink adds a term to each row's denominator and nothing to its output. So the output is scaled and the lse grows, and
the kernel's own backward is exact once it is given both: it computes the probabilities as ``exp(logits - lse)``, and
``rowsum(dout * out)`` from the scaled output.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from megatron_magi.operands.merge import accumulate_dtype, merge_sink_, row_products, sink_gradient, sink_lse
from megatron_magi.operands.options import check_tensor, written_out
from megatron_magi.ops.derivatives import once_differentiable
from megatron_magi.runtime.no_compile import refuse_transforms
from megatron_magi.runtime.results import unviewed

Tensors = tuple[Tensor | None, ...]


class Kernel(Protocol):
    """Attention without a sink.

    Of a dataclass tensors in its fields (masks, lengths of sequences) are saved for the backward as q, k and v are; any
    other object keeps what its backward reads in ``kept``, or as it was in the forward.

    Shapes: q ``[..., seqlen_q, num_heads_q, head_dim]``; k, v ``[..., seqlen_k, num_heads_kv, ...]``; out like q with
    the head dim of v; lse ``[..., num_heads_q, seqlen_q]``, natural log. Rows that see nothing: out 0, lse inf of
    either sign.
    """

    empty_lse: float
    """What the backward expects for a row that sees nothing, inf or -inf."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensors]:
        """``(out, lse, kept)``: fresh tensors, and what the backward needs besides."""
        ...

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, kept: Tensors
    ) -> tuple[Tensor, Tensor, Tensor]:
        """``(dq, dk, dv)``, from ``exp(logits - lse)`` and ``rowsum(dout * out)``."""
        ...


def attention_with_sink(
    kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None = None, sink_layout: str = "sh"
) -> tuple[Tensor, Tensor]:
    """Attention of a kernel with a sink in the denominator of each row. Differentiable.

    Args:
        kernel: the attention, for tensors of these shapes.
        q, k, v: see `Kernel`.
        sink: logits without a value, ``[num_sinks, num_heads_q]`` with ``sink_layout="sh"``, ``[..., seqlen_q,
            num_sinks, num_heads_q]`` with "ssh"; None for the kernel's attention as it is.
        sink_layout: see ``sink``.

    Returns:
        ``(out, lse)`` as `Kernel` has them, the sink in both; rows that see nothing have the sink's lse, -inf without
        one. Gradients do not flow through lse. There may be no queries, no keys and no batch.

    Raises:
        ValueError: the sink is no tensor of floats on the device of q, or its shape does not fit.
    """
    refuse_transforms("attention")
    if sink_layout not in ("sh", "ssh"):
        raise ValueError(f"sink_layout: expected 'sh' or 'ssh', got {sink_layout!r}")
    if sink is not None:
        check_tensor("sink", sink)
        num_heads = q.shape[-2]
        fits = [-1, num_heads] if sink_layout == "sh" else [*q.shape[:-2], -1, num_heads]
        if sink.ndim != len(fits) or any(n not in (-1, have) for n, have in zip(fits, sink.shape, strict=True)):
            raise ValueError(f"sink: expected shape {fits}, -1 for any number of sinks, got {list(sink.shape)}")
        if not sink.dtype.is_floating_point or sink.device != q.device:
            raise ValueError(f"sink: expected floats on the device of q, {q.device}, got {sink.dtype} on {sink.device}")
    q, k, v, sink = written_out(q, k, v, sink)
    # Kernels divide by numbers of tokens, or read the first one.
    return _WithSink.apply(kernel if q.numel() and k.numel() else _NO_PAIRS, q, k, v, sink)


@dataclass(frozen=True)
class _NoPairs:
    """The `Kernel` for tensors without queries or without keys."""

    empty_lse: float = -torch.inf

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensors]:
        lse_shape = (*q.shape[:-3], q.shape[-2], q.shape[-3])
        lse = q.new_full(lse_shape, -torch.inf, dtype=accumulate_dtype(q.dtype))
        return q.new_zeros((*q.shape[:-1], v.shape[-1])), lse, ()

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, kept: Tensors
    ) -> tuple[Tensor, Tensor, Tensor]:
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)


_NO_PAIRS = _NoPairs()


def check_tensors(q: Tensor, k: Tensor, v: Tensor, of_heads: int = -2) -> None:
    """Raises ValueError, naming the argument, unless all are tensors of as many dimensions, dtype and device as q.

    And unless they have heads, along dimension ``of_heads``, and a head dim.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, x)
        if (x.ndim, x.dtype, x.device) != (q.ndim, q.dtype, q.device) or x.ndim < 3:
            raise ValueError(
                f"{name}: expected {max(q.ndim, 3)} dimensions, {q.dtype} on {q.device}, as q has, "
                f"got {list(x.shape)}, {x.dtype} on {x.device}"
            )
        if not x.shape[of_heads] or not x.shape[-1]:
            raise ValueError(f"{name}: heads and head_dim must be positive, got {list(x.shape)}")


def kernel_module(name: str, needed: str) -> ModuleType:
    """A module that is installed apart; ``needed`` says by whom and what.

    Raises:
        ImportError: it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(f"{name}: {needed}") from error


def _apart(kernel: Any) -> tuple[list[Tensor], Callable[[Tensors], Kernel]]:
    """The tensors in a kernel's fields, and what makes it of them again, which holds none."""
    if not is_dataclass(kernel):
        return [], lambda _: kernel
    values, spec = tree_flatten([getattr(kernel, field.name) for field in fields(kernel)])
    at = [i for i, value in enumerate(values) if isinstance(value, Tensor)]
    tensors, others, kind = [values[i] for i in at], list(values), type(kernel)
    for i in at:
        others[i] = None

    def again(saved: Tensors) -> Kernel:
        whole = list(others)
        for i, tensor in zip(at, saved, strict=True):
            whole[i] = tensor
        return kind(*tree_unflatten(whole, spec))

    return tensors, again


class _WithSink(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        out, lse, kept = kernel.forward(q, k, v)
        lse = lse.masked_fill(lse == torch.inf, -torch.inf)
        if sink is not None:
            rows = lse.transpose(-1, -2).contiguous()
            merge_sink_(out, rows, sink_lse(sink, rows.dtype))
            lse = rows.transpose(-1, -2).contiguous()
        out, lse = unviewed(out), unviewed(lse)  # kernels transpose what they have computed
        # Saved by autograd, which tells if they are changed before the backward, as where lengths are read into place.
        tensors, ctx.kernel_of = _apart(kernel)
        ctx.num_tensors = len(tensors)
        ctx.save_for_backward(q, k, v, sink, out, lse, *tensors, *kept)
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, saved: Tensors, dout: Tensor, _dlse: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sink, out, lse, *others = saved
        kernel, kept = ctx.kernel_of(tuple(others[: ctx.num_tensors])), tuple(others[ctx.num_tensors :])
        dsink = None
        if sink is not None and ctx.needs_input_grad[4]:
            rows, delta = lse.transpose(-1, -2), row_products(dout, out)
            flat = sink if sink.ndim == 2 else sink.flatten(0, -3)
            dsink = sink_gradient(flat, rows.flatten(0, -2), delta.flatten(0, -2).to(rows.dtype)).view(sink.shape)
        lse = lse.masked_fill(lse == -torch.inf, kernel.empty_lse)
        return None, *kernel.backward(dout, q, k, v, out, lse, kept), dsink
