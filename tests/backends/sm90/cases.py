"""Masks, inputs and references for the tests of the Hopper kernels."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
import torch

from megatron_magi.backends.reference import attention as reference
from megatron_magi.backends.sm90 import attention as hopper
from megatron_magi.backends.sm90 import choices as hopper_choices
from megatron_magi.backends.sm90 import program as hopper_program
from megatron_magi.mask import bands as bd
from megatron_magi.mask.dense import dense_bands
from megatron_magi.operands.options import AttnOptions, make_options
from megatron_magi.operands.passes import BackwardInputs, ForwardInputs, ForwardOutput, Gradients
from megatron_magi.runtime.lru import LruCache
from megatron_magi.testing.error_budget import assert_within_budget

FREE = bd.NO_DIAGONAL
NARROW_DIMS = [(96, 96), (80, 80), (16, 16), (128, 64), (40, 72), (160, 160), (192, 192), (192, 120)]
"""Head dims that kernels of wider ones take."""
SUM_OF_A_HEAD = 128**0.5
"""How large the sum of 128 products of two unit inputs is: its standard deviation."""


def table(rows) -> np.ndarray:
    return np.array(rows, dtype=np.int64).reshape(-1, 6)


def causal_documents(lengths) -> np.ndarray:
    ends = np.cumsum(lengths)
    return table([[e - n, e, e - n, e, -FREE, 1] for e, n in zip(ends.tolist(), lengths, strict=True)])


def random_bands(rng: np.random.Generator, num_rows: int, num_keys: int) -> np.ndarray:
    """Disjoint bands: random row cuts, in each random key intervals of all kinds, some left out."""
    rows = []
    cuts = np.unique(np.concatenate([[0, num_rows], rng.integers(0, num_rows + 1, rng.integers(0, 9))]))
    for q0, q1 in itertools.pairwise(cuts.tolist()):
        edges = np.unique(rng.integers(0, num_keys + 1, rng.integers(0, 6)))
        for k0, k1 in itertools.pairwise(edges.tolist()):
            kind = rng.integers(0, 5)
            d = int(rng.integers(k0 - q1, k1 - q0 + 1))
            width = int(rng.integers(1, 300))
            if kind < 4:
                rows.append([q0, q1, k0, k1, -FREE if kind < 2 else d, (FREE, d, FREE, d + width)[kind]])
    return table(rows)


MASKS = {
    "full": lambda m, n: table([[0, m, 0, n, -FREE, FREE]]),
    "causal": lambda m, n: table([[0, m, 0, n, -FREE, n - m + 1]]),
    "inverse_causal": lambda m, n: table([[0, m, 0, n, 0, FREE]]),
    "window": lambda m, n: table([[0, m, 0, n, -100, 1]]),
    "documents": lambda m, n: causal_documents([13] * (min(m, n) // 13)),
    "global_and_window": lambda m, n: table([[0, m, 0, min(30, n), -FREE, FREE], [0, m, min(30, n), n, -64, 1]]),
    "empty": lambda m, n: table([]),
    "one_token": lambda m, n: table([[m // 2, m // 2 + 1, n // 3, n // 3 + 1, -FREE, FREE]]),
}


@dataclass
class Inputs:
    """Tensors of one case, and the mask."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor
    bands: np.ndarray
    options: AttnOptions

    @property
    def visible(self) -> torch.Tensor:
        return torch.from_numpy(dense_bands(self.bands, self.q.shape[0], self.k.shape[0])).to(self.q.device)


def make_inputs(
    bands, num_rows, num_keys, *, heads=(16, 2), dims=(128, 128), dtype=torch.bfloat16, softcap=0.0, seed=0
) -> Inputs:
    generator = torch.Generator(device="cuda").manual_seed(seed)

    def draw(*shape):
        return torch.randn(shape, generator=generator, device="cuda").to(dtype)

    q, dout = draw(num_rows, heads[0], dims[0]), draw(num_rows, heads[0], dims[1])
    k, v = draw(num_keys, heads[1], dims[0]), draw(num_keys, heads[1], dims[1])
    return Inputs(q, k, v, dout, bands, make_options(q, None, softcap, False, 0))


def pack_heads(monkeypatch, most: int) -> None:
    """Has kernels whose tiles are rows pack so many heads of a group, or as many as divide it; whatever the mask."""
    monkeypatch.setattr(hopper_choices, "packed_heads", lambda _facts, _rows, group: math.gcd(group, most))
    monkeypatch.setattr(hopper_program, "_bound", LruCache(1 << 30))
    for name in ("_programs", "_makers"):
        monkeypatch.setattr(hopper, name, LruCache(1 << 30))


def poisoned(shape, dtype) -> torch.Tensor:
    return torch.full(shape, torch.nan, dtype=dtype, device="cuda")


def run_forward(x: Inputs, *, out=None, lse=None, sink_lse=None, out_dtype=None, return_max_logits=False):
    """``(out, lse, max_logits)`` of the kernels; outputs are poisoned before."""
    accumulate = out is not None
    shape = (*x.q.shape[:2], x.v.shape[2])
    out = poisoned(shape, out_dtype or x.q.dtype) if out is None else out
    lse = poisoned(shape[:2], torch.float32) if lse is None else lse
    top = torch.full(shape[1:2], -torch.inf, device="cuda") if return_max_logits else None
    hopper.forward(ForwardInputs(x.q, x.k, x.v, sink_lse), x.bands, x.options, ForwardOutput(out, lse, accumulate, top))
    return out, lse, top


def exact_forward(x: Inputs, sink_lse=None):
    """``(out, lse, max_logits)`` in fp64."""
    q, k, v = x.q.double(), x.k.double(), x.v.double()
    out, lse = q.new_empty((*q.shape[:2], v.shape[2])), q.new_empty(q.shape[:2])
    top = q.new_full(q.shape[1:2], -torch.inf)
    inputs = ForwardInputs(q, k, v, None if sink_lse is None else sink_lse.double())
    reference.forward(inputs, x.bands, x.options, ForwardOutput(out, lse, max_logits=top))
    return out, lse, top


def exact_backward(x: Inputs):
    """``(dq, dk, dv)`` in fp64, and the fp64 out and lse."""
    out, lse, _ = exact_forward(x)
    q, k, v, dout = x.q.double(), x.k.double(), x.v.double(), x.dout.double()
    grads = tuple(torch.empty_like(t) for t in (q, k, v))
    delta = (dout * out).sum(-1)
    reference.backward(BackwardInputs(q, k, v, dout, lse, delta), x.bands, x.options, Gradients(*grads))
    return grads


def run_backward(x: Inputs, out, lse, *, grads=None, grad_dtype=None):
    """``(dq, dk, dv)`` of the kernels; new ones are poisoned before."""
    accumulate = grads is not None
    if grads is None:
        grads = tuple(poisoned(t.shape, grad_dtype or t.dtype) for t in (x.q, x.k, x.v))
    delta = hopper.row_delta(x.dout, out)
    hopper.backward(
        BackwardInputs(x.q, x.k, x.v, x.dout, lse, delta), x.bands, x.options, Gradients(*grads, accumulate, accumulate)
    )
    return grads


def plain_attention(x: Inputs, sinks=None, *, from_out: bool = False):
    """``(out, dq, dk, dv)`` by torch operations in the dtype of q: how far rounding alone goes.

    With ``sinks``, ``[num_sinks, num_heads_q]`` or ``[num_rows, num_sinks, num_heads_q]``, also their gradient.
    ``from_out``: the backward knows of the forward its rounded output only, as one without a row of probabilities at
    hand does. The other way errors cancel where a sink and one key share a row.
    """
    leaves = [t.detach().clone().requires_grad_() for t in (x.q, x.k, x.v, *(() if sinks is None else (sinks,)))]
    repeats = x.q.shape[1] // x.k.shape[1]
    q, k, v = leaves[0].transpose(0, 1), *(t.repeat_interleave(repeats, 1).transpose(0, 1) for t in leaves[1:3])
    logits = (q @ k.transpose(1, 2)) * x.options.softmax_scale
    if x.options.softcap:
        logits = torch.tanh(logits / x.options.softcap) * x.options.softcap
    hidden = ~x.visible
    terms = [logits.masked_fill(hidden, -1e4).float()]
    if sinks is not None:
        terms.append(leaves[3].float().expand(q.shape[1], -1, -1).permute(2, 0, 1))
    terms = torch.cat(terms, -1)
    p = torch.exp(terms - terms.detach().logsumexp(-1, keepdim=True)) if from_out else torch.softmax(terms, -1)
    keys = p[..., : k.shape[1]].masked_fill(hidden, 0)
    out = (keys.to(x.q.dtype) @ v).transpose(0, 1)
    if not from_out:
        return out, *torch.autograd.grad(out, leaves, x.dout)
    mass = keys.sum(-1) + p[..., k.shape[1] :].sum(-1)
    delta = (x.dout.float() * out.detach().float()).sum(-1)
    return out, *torch.autograd.grad([out, mass.t()], leaves, [x.dout, -delta])


def assert_as_good(name: str, got: torch.Tensor, plain: torch.Tensor, exact: torch.Tensor) -> None:
    """The error is within the budget of low precision against plain torch operations in the same dtype.

    Where exact gradients cancel (a row that sees one key), plain operations may cancel too, by luck: terms are at least
    dP and delta of unit inputs. Random masks may have a single visible row, so largest elements are not compared.
    """
    terms = exact.double().abs().clamp_min(SUM_OF_A_HEAD)
    assert_within_budget(name, got, plain, exact, terms=terms, elementwise=False)
