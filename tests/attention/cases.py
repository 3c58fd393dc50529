"""Masks and dense fp64 attention: what the distributed operator is held against."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch

from megatron_magi.config import AttendConfig, CommConfig, DispatchConfig, MagiConfig, OverlapConfig
from megatron_magi.mask import AttnMask
from megatron_magi.mask.builders import block_causal
from megatron_magi.mask.dense import dense_mask
from tests import forced

EXACT = forced.tolerance(1e-10)
"""Relative and absolute, of results of cases in their default dtype."""


@dataclass(frozen=True)
class Case:
    """One call of the operator: mask, shapes, options."""

    mask: AttnMask
    config: MagiConfig = field(default_factory=MagiConfig)
    num_heads_q: int = 4
    num_heads_kv: int = 2
    head_dim: int = 8
    head_dim_v: int = 8
    softcap: float = 0.0
    num_sinks: int = 0
    sink_layout: str = "sh"
    dtype: torch.dtype = forced.DTYPE
    seed: int = 0
    softmax_scale: float | None = None

    @property
    def scale(self) -> float:
        """Of logits: the one that is given, or the default."""
        return self.head_dim**-0.5 if self.softmax_scale is None else self.softmax_scale


def random_mask(seqlen: int, num_slices: int, seed: int) -> AttnMask:
    """Slices of all types, drawn until ``num_slices`` fit without overlap; some rows see nothing."""
    rng = np.random.default_rng(seed)
    kept: list[tuple[int, ...]] = []
    for _ in range(200):
        q, k = np.sort(rng.integers(0, seqlen + 1, 2)), np.sort(rng.integers(0, seqlen + 1, 2))
        try:
            AttnMask([*kept, (*q, *k, rng.integers(0, 4))], seqlen)
        except ValueError:
            continue
        kept.append((*q, *k, rng.integers(0, 4)))
        try:
            AttnMask(kept, seqlen)
        except ValueError:
            kept.pop()
        if len(kept) == num_slices:
            break
    return AttnMask(kept, seqlen)


def documents(lengths: list[int]) -> AttnMask:
    """Packed causal documents; a length of 0 is a document without tokens."""
    ends = np.cumsum(lengths)
    starts = ends - lengths
    return AttnMask(np.stack([starts, ends, starts, ends, np.ones_like(ends)], axis=1), int(ends[-1]))


def window(seqlen: int, left: int) -> AttnMask:
    """Causal sliding window of ``left + 1`` keys."""
    return AttnMask([(0, left, 0, left, 1), (left, seqlen, 0, seqlen, 3)], seqlen)


def variants() -> list[Case]:
    """What every number of ranks is tried with."""
    cases = [Case(random_mask(37, 4, seed), _config(degree=seed % 4, seed=seed), seed=seed) for seed in range(8)]
    cases += [
        Case(documents([3, 0, 17, 1, 1, 30, 9]), _config(degree=2)),
        Case(documents([64]), _config(degree=3, hide_tail_reduce=True), num_heads_kv=1),
        Case(documents([64]), _config(degree=1, hide_tail_reduce=True), num_heads_kv=4),
        Case(window(50, 7), _config(degree=2), head_dim_v=5, softmax_scale=0.8),
        Case(window(50, 7), _config(degree=0), softcap=1.5),
        Case(documents([20, 31]), _config(degree=2), num_sinks=1),
        Case(documents([20, 31]), _config(degree=1), num_sinks=3, softcap=2.0, softmax_scale=0.8),
        Case(random_mask(41, 3, 99), _config(degree=2), num_sinks=2, sink_layout="ssh"),
        Case(documents([40, 2, 9]), _config(degree=2, uneven=True)),
        Case(documents([2, 1]), _config(degree=None)),
        Case(AttnMask([], 12), _config(degree=None)),
        Case(AttnMask([], 12), _config(degree=None), num_sinks=1),
    ]
    return cases


def hopper_variants() -> list[Case]:
    """What the Hopper kernels are tried with: each mask with each degree of overlap, both head dims, every option."""
    masks = (documents([700, 1, 0, 300, 64, 37, 511]), window(1500, 200), block_causal(1400, 150))
    options = ({}, {"num_sinks": 4}, {"softcap": 2.0}, {"num_sinks": 2, "sink_layout": "ssh", "softcap": 5.0})
    cases = []
    for i, (mask, degree, dim) in enumerate(itertools.product(masks, (0, 1, 2), (64, 128))):
        overlap = OverlapConfig(degree=degree, hide_tail_reduce=i % 5 == 4)
        config = MagiConfig(overlap=overlap, attend=AttendConfig(impl="ffa"))
        heads = ((8, 2), (8, 1), (9, 3))[(i + i // 6) % 3]
        shape = {"num_heads_q": heads[0], "num_heads_kv": heads[1], "head_dim": dim, "head_dim_v": dim}
        cases.append(Case(mask, config, **shape, **options[(i + i // 2) % 4], dtype=torch.bfloat16, seed=i))
    return cases


def cudnn_variants() -> list[Case]:
    """`hopper_variants` for the backend cudnn, without what it lacks."""
    return [_by("cudnn", case) for case in hopper_variants() if not case.softcap]


def triton_variants() -> list[Case]:
    """Some of `hopper_variants` for the backend triton, with each mask, degree of overlap, head dim and option."""
    return [_by("triton", case) for case in hopper_variants()[::2]]


by_kernels = pytest.mark.parametrize(
    "variants",
    [pytest.param(hopper_variants, marks=pytest.mark.sm90, id="ffa"), pytest.param(triton_variants, id="triton")],
)
"""Gives a test on GPUs the variants of each backend whose kernels are our own."""


def _by(impl: str, case: Case) -> Case:
    return replace(case, config=replace(case.config, attend=AttendConfig(impl=impl)))


def _config(degree: int | None, hide_tail_reduce: bool = False, uneven: bool = False, seed: int = 0) -> MagiConfig:
    algorithm = ("auto", "affinity", "min_heap", "sorted_sequential", "zigzag", "sequential")[seed % 6]
    chunk_size = 1 if uneven else None
    return MagiConfig(
        dispatch=DispatchConfig(algorithm=algorithm, uneven_shard=uneven, chunk_size=chunk_size),
        overlap=OverlapConfig(degree=degree, hide_tail_reduce=hide_tail_reduce),
        attend=AttendConfig(impl=forced.impl("torch" if seed % 2 else "reference")),
        comm=CommConfig(impl="all_to_all" if seed % 2 else "reference"),
    )


def inputs(case: Case) -> dict[str, torch.Tensor]:
    """Global q, k, v, dout and, where the case has one, sink (large, so that it matters)."""
    g = torch.Generator("cpu").manual_seed(case.seed)
    n = case.mask.total_seqlen_q

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64, device="cpu")

    out = {
        "q": draw(n, case.num_heads_q, case.head_dim),
        "k": draw(n, case.num_heads_kv, case.head_dim),
        "v": draw(n, case.num_heads_kv, case.head_dim_v),
        "dout": draw(n, case.num_heads_q, case.head_dim_v),
    }
    if case.num_sinks:
        shape = (n,) if case.sink_layout == "ssh" else ()
        out["sink"] = 3.0 * draw(*shape, case.num_sinks, case.num_heads_q)
    return out


def dense_attention(case: Case, x: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """out, lse and gradients of plain masked softmax attention, by autograd, in the dtype of x."""
    leaves = {name: t.clone().requires_grad_(True) for name, t in x.items() if name != "dout"}
    group = case.num_heads_q // case.num_heads_kv
    k, v = leaves["k"].repeat_interleave(group, dim=1), leaves["v"].repeat_interleave(group, dim=1)
    logits = torch.einsum("qhd,khd->hqk", leaves["q"], k) * case.scale
    if case.softcap:
        logits = case.softcap * torch.tanh(logits / case.softcap)
    visible = torch.from_numpy(dense_mask(case.mask)).to(x["q"].device)
    weight = torch.where(visible, logits, -torch.inf)
    n = case.mask.total_seqlen_q
    terms = [weight]
    if "sink" in leaves:
        sink = leaves["sink"] if case.sink_layout == "ssh" else leaves["sink"][None].expand(n, -1, -1)
        terms.append(sink.permute(2, 0, 1))
    every = torch.cat(terms, dim=-1)
    lse = torch.logsumexp(every, dim=-1)
    # Rows that see nothing have lse -inf: keep them out of the exponent, they contribute 0.
    safe = torch.where(lse.isinf(), 0.0, lse)
    p = torch.where(visible, torch.exp(torch.where(visible, logits, 0.0) - safe[..., None]), 0.0)
    out = torch.einsum("hqk,khd->qhd", p, v)
    (out * x["dout"]).sum().backward()
    grads = {f"d{name}": torch.zeros_like(t) if t.grad is None else t.grad for name, t in leaves.items()}
    top = weight.amax(dim=(1, 2)) if n else torch.full((case.num_heads_q,), -torch.inf)
    return {"out": out.detach(), "lse": lse.detach().T, "max_logits": top.detach(), **grads}
