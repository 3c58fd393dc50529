"""Attention written once more, by softmax over a dense mask with autograd, and random inputs for it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import torch
from hypothesis import strategies as st

from megatron_magi.mask import AttnMask, MaskType
from megatron_magi.mask.dense import dense_bands, dense_mask
from tests import forced


def naive_attention(q, k, v, visible, *, softmax_scale=None, softcap=0.0, sink=None):
    """``(out, lse, max_logits)`` in the dtype of q, differentiable; ``visible`` bool ``[rows, keys]``."""
    repeats = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    scale = 1 / math.sqrt(q.shape[-1]) if softmax_scale is None else softmax_scale
    logits = torch.einsum("qhd,khd->qhk", q, k) * scale
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits.masked_fill(~visible[:, None], -torch.inf)
    columns = [logits]
    if sink is not None:
        sink = sink.to(q.dtype).expand(q.shape[0], *sink.shape[-2:])
        columns.append(sink.transpose(1, 2))
    everything = torch.cat(columns, dim=-1)
    lse = torch.logsumexp(everything, dim=-1)
    seen = (everything > -torch.inf).any(-1, keepdim=True)
    p = torch.softmax(torch.where(seen, everything, 0), dim=-1) * seen
    out = torch.einsum("qhk,khd->qhd", p[..., : k.shape[0]], v)
    return out, lse, logits.amax(dim=(0, 2))


@dataclass
class Case:
    """Tensors of one attention problem and what the naive formula makes of them."""

    mask: AttnMask
    num_heads_kv: int = 1
    group: int = 1
    head_dim: int = 4
    head_dim_v: int = 4
    softcap: float = 0.0
    sink: str | None = None
    num_sinks: int = 2
    dtype: torch.dtype = forced.DTYPE
    device: str = forced.DEVICE
    seed: int = 0
    softmax_scale: float | None = None
    tensors: dict = field(default_factory=dict)

    def __post_init__(self):
        generator = torch.Generator("cpu").manual_seed(self.seed)
        rows, keys, heads = self.mask.total_seqlen_q, self.mask.total_seqlen_k, self.num_heads_kv * self.group

        def normal(*shape):
            made = torch.randn(*shape, generator=generator, dtype=torch.float64, device="cpu")
            return made.to(self.device, self.dtype)

        self.q = normal(rows, heads, self.head_dim)
        self.k = normal(keys, self.num_heads_kv, self.head_dim)
        self.v = normal(keys, self.num_heads_kv, self.head_dim_v)
        self.dout = normal(rows, heads, self.head_dim_v)
        shape = {None: None, "sh": (self.num_sinks, heads), "ssh": (rows, self.num_sinks, heads)}[self.sink]
        # Large sinks of both signs: a small one hides its own omission.
        self.sinks = None if shape is None else normal(*shape).sign() * 3 + normal(*shape) / 4

    @property
    def visible(self):
        return torch.from_numpy(dense_mask(self.mask)).to(self.device)

    def leaves(self, dtype=None):
        """Fresh leaves of q, k, v and the sinks, if any."""
        tensors = [self.q, self.k, self.v] + ([] if self.sinks is None else [self.sinks])
        return [t.detach().to(dtype or self.dtype).clone().requires_grad_() for t in tensors]

    def run(self, attend, dtype=None):
        """``attend(q, k, v, sink) -> (out, lse, max_logits)``, then the gradients, as one dict."""
        leaves = self.leaves(dtype)
        out, lse, max_logits = attend(*leaves[:3], leaves[3] if len(leaves) > 3 else None)
        grads = torch.autograd.grad(out, leaves, self.dout.to(out.dtype))
        names = ("dq", "dk", "dv", "dsink")[: len(grads)]
        return {
            "out": out.detach(), "lse": lse.detach(), "max_logits": max_logits.detach(),
            **dict(zip(names, grads, strict=True)),
        }  # fmt: skip

    def expected(self, dtype=None):
        """The naive result, computed in ``dtype``."""
        visible, options = self.visible, {"softmax_scale": self.softmax_scale, "softcap": self.softcap}
        return self.run(lambda q, k, v, s: naive_attention(q, k, v, visible, **options, sink=s), dtype)

    def dsink_terms(self):
        """Sums of the absolute values of what the gradient of the sinks is a sum of, in fp64: rows cancel in it."""
        result = self.expected(torch.float64)
        share = torch.exp(self.sinks.double() - result["lse"][:, None])  # [rows, num_sinks, heads]
        per_row = share * (self.dout.double() * result["out"]).abs().sum(-1)[:, None]
        return per_row if self.sink == "ssh" else per_row.sum(0)


def assert_close(actual, expected, tolerance=forced.tolerance(1e-12)):  # noqa: B008
    """Every tensor of the two dicts, absolutely and relatively, with infinities in the same places."""
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            actual[name], value, rtol=tolerance, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )


def disjoint(rows, seqlen_q, seqlen_k):
    """The mask of those slices, in order, that share no pair with an earlier one."""
    kept, cover = [], np.zeros((seqlen_q, seqlen_k), dtype=bool)
    for row in rows:
        area = dense_bands(AttnMask([row], seqlen_q, seqlen_k).bands, seqlen_q, seqlen_k)
        if not (area & cover).any():
            kept.append(row)
            cover |= area
    return AttnMask(kept, seqlen_q, seqlen_k)


@st.composite
def masks(draw, longest=24, most_slices=8):
    """Random masks: all types, several slices a row, empty rows, single tokens, two lengths."""
    seqlen_q, seqlen_k = draw(st.integers(1, longest)), draw(st.integers(1, longest))
    queries = st.tuples(st.integers(0, seqlen_q), st.integers(0, seqlen_q)).map(sorted)
    keys = st.tuples(st.integers(0, seqlen_k), st.integers(0, seqlen_k)).map(sorted)
    row = st.tuples(queries, keys, st.sampled_from(list(MaskType))).map(lambda r: (*r[0], *r[1], int(r[2])))
    return disjoint(draw(st.lists(row, max_size=most_slices)), seqlen_q, seqlen_k)


def packed_causal(lengths):
    """Documents one after another, each causal."""
    ends = np.cumsum(lengths)
    starts = ends - lengths
    table = np.stack([starts, ends, starts, ends, np.full_like(ends, MaskType.CAUSAL)], axis=1)
    return AttnMask(table, int(ends[-1]))
