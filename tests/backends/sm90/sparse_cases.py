"""Patterns, inputs and references for the tests of sparse attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron_magi.backends.reference import sparse as sparse_reference
from megatron_magi.backends.sm90 import sparse as sparse_hopper
from megatron_magi.operands.passes import BackwardInputs, ForwardInputs
from megatron_magi.operands.sparse_pattern import SparsePattern, num_blocks
from tests.backends.sm90.cases import assert_as_good


@dataclass
class Case:
    """Tensors of one case, and the pattern."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor
    pattern: SparsePattern

    @property
    def scale(self) -> float:
        return self.q.shape[2] ** -0.5

    def forward(self, backend, sink_lse=None):
        """``(out, lse, max_logits)`` by the reference or the kernels."""
        inputs = ForwardInputs(self.q, self.k, self.v, sink_lse)
        return backend.forward(inputs, self.pattern, self.scale, return_max_logits=True)

    def backward(self, backend, out, lse, deterministic=False):
        """``(dq, dk, dv)`` by the same; ``out`` and ``lse`` are the forward's."""
        return backend.backward(self.backward_inputs(out, lse), self.pattern, self.scale, deterministic)

    def backward_inputs(self, out, lse) -> BackwardInputs:
        delta = (self.dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
        return BackwardInputs(self.q, self.k, self.v, self.dout, lse, delta)

    def cast(self, dtype: torch.dtype) -> Case:
        return Case(*(t.to(dtype) for t in (self.q, self.k, self.v, self.dout)), self.pattern)


def make_case(pattern, num_rows, num_keys, heads=(16, 2), dim=128, dtype=torch.bfloat16, seed=0) -> Case:
    generator = torch.Generator(device="cuda").manual_seed(seed)

    def draw(*shape):
        return torch.randn(shape, generator=generator, device="cuda").to(dtype)

    q, dout = draw(num_rows, heads[0], dim), draw(num_rows, heads[0], dim)
    return Case(q, draw(num_keys, heads[1], dim), draw(num_keys, heads[1], dim), dout, pattern)


def random_mask(generator, lists, num_rows, num_keys, q_block, k_block, density=0.5) -> torch.Tensor:
    """A mask of blocks in which some rows see nothing and some see all."""
    shape = (lists, num_blocks(num_rows, q_block), num_blocks(num_keys, k_block))
    mask = torch.rand(shape, generator=generator) < density
    kind = torch.randint(0, 6, shape[:2], generator=generator)
    mask[kind == 0] = False
    mask[kind == 1] = True
    return mask


def csr_of_mask(mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Offsets and numbers of blocks."""
    ends = mask.sum(-1).flatten().cumsum(0)
    offsets = torch.cat([ends.new_zeros(1), ends])
    rows = mask.shape[1]
    at = torch.arange(rows + 1) + rows * torch.arange(mask.shape[0])[:, None]
    return offsets[at].to(torch.int32), mask.nonzero()[:, 2].to(torch.int32)


def lists_with_gaps(mask: torch.Tensor, generator) -> torch.Tensor:
    """Lists of one length in random order, with -1 among them."""
    columns = torch.arange(mask.shape[2]).expand(mask.shape)
    entries = torch.where(mask, columns, -1)
    order = torch.rand(mask.shape, generator=generator).argsort(-1)
    return entries.gather(2, order).to(torch.int32)


def to_cuda(pattern: SparsePattern) -> SparsePattern:
    return SparsePattern(tuple(t.cuda() for t in pattern.tensors), pattern.q_block, pattern.k_block, pattern.causal)


def exact_forward(x: Case, sink_lse=None):
    x = x.cast(torch.float64)
    sink_lse = None if sink_lse is None else sink_lse.double()
    return x.forward(sparse_reference, sink_lse)


def exact_backward(x: Case):
    out, lse, _ = exact_forward(x)
    return x.cast(torch.float64).backward(sparse_reference, out, lse)


def plain_attention(x: Case):
    """``(out, dq, dk, dv)`` by torch operations in the dtype of q: how far rounding alone goes."""
    leaves = [t.detach().clone().requires_grad_() for t in (x.q, x.k, x.v)]
    group = x.q.shape[1] // x.k.shape[1]
    q, k, v = leaves[0].transpose(0, 1), *(t.repeat_interleave(group, 1).transpose(0, 1) for t in leaves[1:])
    counts = sparse_reference.multiplicity(x.pattern, x.q.shape[0], x.k.shape[0])
    counts = counts.repeat_interleave(x.q.shape[1] // counts.shape[0], 0)
    logits = ((q @ k.transpose(1, 2)) * x.scale).float() + counts.clamp_min(1).float().log()
    p = torch.softmax(logits.masked_fill(counts == 0, -1e4), -1).masked_fill(counts == 0, 0)
    out = (p.to(x.q.dtype) @ v).transpose(0, 1)
    return out, *torch.autograd.grad(out, leaves, x.dout)


def check_forward(x, sink_lse=None) -> None:
    out, lse, top = x.forward(sparse_hopper, sink_lse)
    want, want_lse, want_top = exact_forward(x, sink_lse)
    if sink_lse is None:
        assert_as_good("out", out, plain_attention(x)[0], want)
    else:
        plain = x.forward(sparse_reference, sink_lse)
        torch.testing.assert_close(out, plain[0], atol=2e-2, rtol=2e-2)
    empty = want_lse == -torch.inf
    assert bool((out[empty] == 0).all()) and bool((lse[empty] == -torch.inf).all())
    torch.testing.assert_close(lse[~empty].double(), want_lse[~empty], atol=2e-4, rtol=2e-4)
    torch.testing.assert_close(top.double(), want_top, atol=1e-3, rtol=1e-3)


def check_backward(x, deterministic=False) -> None:
    out, lse, _ = x.forward(sparse_hopper)
    grads = x.backward(sparse_hopper, out, lse, deterministic)
    for name, got, plain, want in zip(
        ("dq", "dk", "dv"), grads, plain_attention(x)[1:], exact_backward(x), strict=True
    ):
        assert_as_good(name, got, plain, want)
