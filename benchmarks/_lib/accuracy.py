"""Whether an implementation computes the mask that it is timed on: rows against fp64, keys against another.

Each row is judged alone, by its own size, as a single wrong row is what is looked for. The error budget of the tests
(`megatron_magi.testing.error_budget`) judges whole tensors against a reference in the same precision; of long
sequences there is none. So the tolerances here are wider, and say nothing of precision.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from benchmarks._lib.providers import Problem
from megatron_magi.mask import AttnMask

TOLERANCE = 0.03
"""Largest error of a row, as a share of its own norm; bf16 attention is off by less than a hundredth."""
FLOOR = 0.02
"""And of rows whose exact value is small or 0, as a share of the median norm."""


@dataclass(frozen=True)
class Sample:
    """Rows that are computed exactly.

    Attributes:
        rows: int64 ``[num_rows]``, query rows, and keys that are compared between implementations.
        heads: query heads.
        out, dq: fp64 ``[num_rows, num_heads, dim]``.
        dq_terms: fp64 ``[num_rows, num_heads]``, norm of what dq would be if none of its terms cancelled.
        dq_rounding: fp64, likewise, the most by which dq is off because ``delta = dout * out`` is of an output that is
            rounded to the dtype of q: delta may be small where dout and values are almost orthogonal, its rounding is
            not. Dense attention in that dtype has this error too.
    """

    rows: Tensor
    heads: tuple[int, ...]
    out: Tensor
    dq: Tensor
    dq_terms: Tensor
    dq_rounding: Tensor


def sample_rows(mask: AttnMask, count: int = 24) -> np.ndarray:
    """Rows where masks go wrong: both sides of the bounds of slices, and some drawn at random; int64, sorted."""
    rng, length = np.random.default_rng(0), mask.total_seqlen_q
    bounds = np.unique(mask.table[:, :2])
    near = rng.choice(bounds, min(len(bounds), count // 3), replace=False)
    rows = np.concatenate([[0, 1, length - 1], near - 1, near, rng.integers(0, length, count // 3)])
    return np.unique(np.clip(rows, 0, length - 1))


def visible_keys(mask: AttnMask, rows: np.ndarray) -> np.ndarray:
    """bool ``[len(rows), total_seqlen_k]``."""
    seen = np.zeros((len(rows), mask.total_seqlen_k), dtype=bool)
    for q0, q1, k0, k1, d_lo, d_hi in mask.bands.tolist():
        first, last = np.searchsorted(rows, (q0, q1))
        for i in range(first, last):
            seen[i, max(k0, rows[i] + d_lo) : max(0, min(k1, rows[i] + d_hi))] = True
    return seen


def exact_sample(problem: Problem) -> Sample:
    """Output and gradient of the queries in fp64, for sampled rows and the first and last head."""
    shape, device = problem.shape, problem.q.device
    picked = sample_rows(problem.case.mask)
    seen = torch.from_numpy(visible_keys(problem.case.mask, picked)).to(device)
    rows = torch.from_numpy(picked).to(device)
    heads = tuple(sorted({0, shape.num_heads_q - 1}))
    unit = torch.finfo(problem.q.dtype).eps / 2
    outs, dqs, terms, roundings = [], [], [], []
    for head in heads:
        kv_head = head * shape.num_heads_kv // shape.num_heads_q
        q, dout = problem.q[rows, head].double(), problem.dout[rows, head].double()
        k, v = problem.k[:, kv_head].double(), problem.v[:, kv_head].double()
        scale = shape.head_dim**-0.5
        p = torch.softmax((q @ k.T * scale).masked_fill(~seen, -torch.inf), 1)
        p = torch.where(seen.any(1, keepdim=True), p, 0)
        out = p @ v
        dp, delta = dout @ v.T, (dout * out).sum(1, keepdim=True)
        outs.append(out)
        dqs.append((p * (dp - delta)) @ k * scale)
        terms.append(((p * (dp.abs() + delta.abs())) @ k.abs() * scale).norm(dim=-1))
        roundings.append(unit * (dout * out).abs().sum(1) * (p @ k * scale).norm(dim=-1))
    return Sample(rows, heads, *(torch.stack(x, 1) for x in (outs, dqs, terms, roundings)))


def mismatch(sample: Sample, results: Sequence[Tensor], trusted: Sequence[Tensor] | None) -> str:
    """What is wrong with ``(out, dq, dk, dv)``, an empty text if nothing is.

    Args:
        sample: exact rows.
        results: ``[num_tokens, num_heads, dim]`` each.
        trusted: dk and dv of an implementation that passed, at the sampled keys; None where there is none.
    """
    checks = [(name, results[i][sample.rows][:, list(sample.heads)], exact)
              for i, (name, exact) in enumerate((("out", sample.out), ("dq", sample.dq)))]  # fmt: skip
    if trusted is not None:
        checks += zip(("dk", "dv"), key_gradients(sample, results), trusted, strict=True)
    for name, got, want in checks:
        error, norm = (got.double() - want.double()).norm(dim=-1), want.double().norm(dim=-1)
        over = error - TOLERANCE * norm - FLOOR * norm.median()
        if name == "dq":  # short documents: large terms that cancel leave their rounding
            over -= FLOOR * sample.dq_terms + sample.dq_rounding
        if not bool(torch.isfinite(error).all()):
            return f"wrong: {name} is not finite"
        if float(over.max()) > 0:
            at, head = divmod(int(over.argmax()), over.shape[1])
            off, size = float(error[at, head]), float(norm[at, head])
            return f"wrong: {name} of token {int(sample.rows[at])} is off by {off:.3g}, its norm is {size:.3g}"
    return ""


def key_gradients(sample: Sample, results: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """dk and dv at the sampled tokens."""
    return results[2][sample.rows].clone(), results[3][sample.rows].clone()
