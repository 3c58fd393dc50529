"""Ulysses: between two all-to-alls every rank has the whole sequence, and some of the heads."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from benchmarks._lib.baselines.base import Baseline, Block, Cluster, Unsupported, num_tokens, split, zigzag
from benchmarks._lib.baselines.ring import Grid, Walk
from benchmarks._lib.cases import Case
from megatron_magi.ops.slice_passes import row_delta


class Seats:
    """Who holds which of the tokens that the ranks of a group have together: consecutive parts."""

    def __init__(self, runs: np.ndarray, group: dist.ProcessGroup) -> None:
        self.group, self.size, rank = group, dist.get_world_size(group), dist.get_rank(group)
        parts = split(runs, self.size)
        self.own, self.rows = parts[rank], [num_tokens(part) for part in parts]
        self.num_own, self.num_all = self.rows[rank], sum(self.rows)

    def to_heads(self, *tensors: Tensor) -> list[Tensor]:
        """All tokens of an equal share of each tensor's heads."""
        n, dim = self.num_own, tensors[0].shape[2]
        packed = torch.cat([t.reshape(n, self.size, -1, dim).transpose(0, 1) for t in tensors], dim=2)
        found = packed.new_empty((self.num_all, *packed.shape[2:]))
        dist.all_to_all_single(found, packed.flatten(0, 1), self.rows, [n] * self.size, group=self.group)
        return list(found.split([t.shape[1] // self.size for t in tensors], dim=1))

    def to_tokens(self, *tensors: Tensor) -> list[Tensor]:
        """The inverse."""
        n, packed = self.num_own, torch.cat(tensors, dim=1)
        found = packed.new_empty((self.size * n, *packed.shape[1:]))
        dist.all_to_all_single(found, packed, [n] * self.size, self.rows, group=self.group)
        parts = found.view(self.size, n, *packed.shape[1:]).split([t.shape[1] for t in tensors], dim=2)
        return [part.transpose(0, 1).flatten(1, 2) for part in parts]


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q, k, v, seats: Seats):
        ctx.seats = seats
        return tuple(seats.to_heads(q, k, v))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads):
        return *ctx.seats.to_tokens(*grads), None


class _ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out, seats: Seats):
        ctx.seats = seats
        return seats.to_tokens(out)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout):
        return ctx.seats.to_heads(dout)[0], None


class Local(torch.autograd.Function):
    """Attention of all tokens that are here."""

    @staticmethod
    def forward(ctx: Any, q, k, v, block: Block, impl: str):
        out, lse = block.forward(q, k, v, q.dtype)
        ctx.block, ctx.impl = block, impl
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout):
        *qkv, out, lse = ctx.saved_tensors
        return *ctx.block.backward(dout, tuple(qkv), lse, row_delta(dout, out, ctx.impl), None), None, None


def _check_heads(num_heads_kv: int, size: int) -> None:
    if num_heads_kv % size:
        raise Unsupported(f"{num_heads_kv} key heads cannot be divided by {size} ranks")


class Ulysses(Baseline):
    """Every mask; up to as many ranks as there are key heads, which they divide."""

    def __init__(self, case: Case, cluster: Cluster, num_heads_kv: int, impl: str = "auto") -> None:
        _check_heads(num_heads_kv, cluster.num_ranks)
        self._seats = Seats(np.array([[0, case.length]]), cluster.group(cluster.table(cluster.num_ranks)))
        self._block, self._impl, self.runs = Block(case.mask.bands, impl), impl, self._seats.own

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = _ToHeads.apply(q, k, v, self._seats)
        return _ToTokens.apply(Local.apply(q, k, v, self._block, self._impl), self._seats)


class USP(Baseline):
    """Ulysses between neighbours, a ring of these groups; masks as the ring's. Takes a number that is no prime."""

    def __init__(self, case: Case, cluster: Cluster, num_heads_kv: int, impl: str = "auto") -> None:
        if cluster.num_rows == 1:
            raise Unsupported(f"{cluster.num_ranks} ranks are no groups of groups")
        table = cluster.table(cluster.num_ranks // cluster.num_rows)
        _check_heads(num_heads_kv, table.shape[1])
        self._walk = Walk(case, Grid.of(cluster, table.T), zigzag(case, len(table)), impl)
        self._seats = Seats(self._walk.runs, cluster.group(table))
        self.runs = self._seats.own

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = _ToHeads.apply(q, k, v, self._seats)
        return _ToTokens.apply(self._walk.attend(q, k, v), self._seats)
