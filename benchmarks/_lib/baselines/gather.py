"""All-gather: every rank gets all keys and values and computes in one call; gradients are summed and scattered."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from benchmarks._lib.baselines.base import (
    Baseline,
    Block,
    Cluster,
    Unsupported,
    bands_between,
    num_tokens,
    split,
    zigzag,
)
from benchmarks._lib.cases import Case
from megatron_magi.comm.groups import all_gather_single, reduce_scatter_single
from megatron_magi.ops.slice_passes import row_delta


class AllGather(Baseline):
    """Every mask; tokens are spread in zigzag where that is defined, else evenly in order."""

    def __init__(self, case: Case, cluster: Cluster, num_heads_kv: int, impl: str = "auto") -> None:
        del num_heads_kv
        try:
            parts = zigzag(case, cluster.num_ranks)
        except Unsupported:
            parts = split(np.array([[0, case.length]]), cluster.num_ranks)
        self.runs, self.impl = parts[cluster.rank], impl
        # Shards lie one after the other, each as long as the longest, as they are gathered.
        self.num_ranks, self.rows = cluster.num_ranks, max(map(num_tokens, parts))
        tables = [bands_between(case.mask, self.runs, keys, i * self.rows) for i, keys in enumerate(parts)]
        self.block = Block(np.concatenate(tables), impl)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _AllGather.apply(q, k, v, self)

    def gather(self, x: Tensor) -> Tensor:
        """The rows of all ranks."""
        if len(x) < self.rows:
            x = torch.cat([x, x.new_zeros((self.rows - len(x), *x.shape[1:]))])
        everything = x.new_empty((self.num_ranks * self.rows, *x.shape[1:]))
        all_gather_single(everything, x.contiguous())
        return everything

    def scatter(self, grad: Tensor, num_rows: int) -> Tensor:
        """The sum over ranks of this rank's rows."""
        own = grad.new_empty((self.rows, *grad.shape[1:]))
        reduce_scatter_single(own, grad)
        return own[:num_rows]


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q, k, v, way: AllGather):
        out, lse = way.block.forward(q, way.gather(k), way.gather(v), q.dtype)
        ctx.way = way
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout):
        way, (q, k, v, out, lse) = ctx.way, ctx.saved_tensors
        delta = row_delta(dout, out, way.impl)
        dq, dk, dv = way.block.backward(dout, (q, way.gather(k), way.gather(v)), lse, delta, None)
        return dq, way.scatter(dk, len(k)), way.scatter(dv, len(v)), None
