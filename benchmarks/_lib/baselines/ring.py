"""Rings: keys and values go from rank to rank behind the attention of those that are there; gradients follow them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from benchmarks._lib.baselines.base import (
    Baseline,
    Block,
    Cluster,
    Unsupported,
    bands_between,
    exchange,
    num_tokens,
    start_dq,
    zigzag,
)
from benchmarks._lib.cases import Case
from megatron_magi.operands.merge import accumulate_dtype
from megatron_magi.ops.slice_passes import row_delta


class Transfer:
    """Tensors on their way to the next rank of a group, as those of the one before come."""

    def __init__(self, tensors: list[Tensor], rows: int, group: dist.ProcessGroup) -> None:
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        self._sent = tensors
        self._received, self._works = exchange(tensors, rows, (rank + 1) % size, (rank - 1) % size, group)

    def wait(self) -> list[Tensor]:
        """What has come."""
        for work in self._works:
            work.wait()
        self._sent = []
        return self._received


class Grid(NamedTuple):
    """Rings: of a row of ranks, one more of the same for gradients, and of a column where there are several rows."""

    inner: dist.ProcessGroup
    grads: dist.ProcessGroup
    outer: dist.ProcessGroup | None

    @classmethod
    def of(cls, cluster: Cluster, table: np.ndarray, has_columns: bool = False) -> Grid:
        """The rings of a table of ranks that this one is in."""
        return cls(cluster.group(table), cluster.group(table, 1), cluster.group(table.T) if has_columns else None)

    @property
    def num_inner(self) -> int:
        """Ranks of a row."""
        return dist.get_world_size(self.inner)

    @property
    def num_outer(self) -> int:
        """Rows."""
        return 1 if self.outer is None else dist.get_world_size(self.outer)


class Walk:
    """The way of keys around a grid: once around the row, then on by one in the column, as often as it has ranks.

    Args:
        grid: a single ring is a row of all ranks.
        parts: tokens of each rank of the grid, row by row.
    """

    def __init__(self, case: Case, grid: Grid, parts: list, impl: str) -> None:
        self.grid, self.impl = grid, impl
        self._at = 0 if grid.outer is None else dist.get_rank(grid.outer), dist.get_rank(grid.inner)
        self.runs = parts[self._at[0] * grid.num_inner + self._at[1]]
        self.num_keys = [num_tokens(part) for part in parts]
        self.blocks = [Block(bands_between(case.mask, self.runs, keys), impl) for keys in parts]

    def source(self, turn: int, step: int) -> int:
        """Whose keys are here."""
        row, column = (self._at[0] - turn) % self.grid.num_outer, (self._at[1] - step) % self.grid.num_inner
        return row * self.grid.num_inner + column

    def keys(self, kv: list[Tensor]) -> Iterator[tuple[int, int, list[Tensor]]]:
        """``(turn, step, [k, v])``; the next ones travel until the caller comes back."""
        grid = self.grid
        for turn in range(grid.num_outer):
            ahead = None
            if turn + 1 < grid.num_outer:
                ahead = Transfer(kv, self.num_keys[self.source(turn + 1, 0)], grid.outer)
            for step in range(grid.num_inner):
                near = None
                if step + 1 < grid.num_inner:
                    near = Transfer(kv, self.num_keys[self.source(turn, step + 1)], grid.inner)
                yield turn, step, kv
                if near is not None:
                    kv = near.wait()
            if ahead is not None:
                kv = ahead.wait()

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of this rank's tokens."""
        return _Walk.apply(q, k, v, self)


class _Walk(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q, k, v, walk: Walk):
        some = [i for i, block in enumerate(walk.blocks) if len(block.bands)]
        dtype = q.dtype if len(some) == 1 else accumulate_dtype(q.dtype)
        result = None
        for turn, step, kv in walk.keys([k.contiguous(), v.contiguous()]):
            source = walk.source(turn, step)
            if source in some:
                result = walk.blocks[source].forward(q, *kv, dtype, result)
        assert result is not None, "a rank whose tokens see nothing"
        out, lse = result[0].to(q.dtype), result[1]
        ctx.walk = walk
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout):
        walk, (q, k, v, out, lse) = ctx.walk, ctx.saved_tensors
        grid, delta = walk.grid, row_delta(dout, out, walk.impl)
        some = [i for i, block in enumerate(walk.blocks) if len(block.bands)]
        blocks, num_keys = ([x[i] for i in some] for x in (walk.blocks, walk.num_keys))
        dq, sums = start_dq((q, k, v), blocks, num_keys, walk.impl)
        following: Transfer | None = None  # gradients of the keys that are here, from the rank that had them before
        total: Transfer | None = None  # those of a whole turn, from the ranks of another row
        for turn, step, kv in walk.keys([k.contiguous(), v.contiguous()]):
            source, grads = walk.source(turn, step), None
            if source in some:
                dq, *grads = walk.blocks[source].backward(dout, (q, *kv), lse, delta, dq, **sums)
            if step:
                assert following is not None
                grads = _sum(grads, following.wait())
            elif grads is None:
                grads = [torch.zeros_like(x) for x in kv]
            if grid.num_inner > 1:
                following = Transfer(grads, walk.num_keys[walk.source(turn, step + 1)], grid.grads)
            if step + 1 == grid.num_inner:  # the turn is complete: its gradients are where its keys began it
                grads = following.wait() if following is not None else grads
                grads = grads if total is None else _sum(grads, total.wait())
                if grid.num_outer > 1:
                    total = Transfer(grads, walk.num_keys[walk.source(turn + 1, 0)], grid.outer)
        dk, dv = grads if total is None else total.wait()
        assert dq is not None
        return dq.to(q.dtype), dk, dv, None


def _sum(grads: list[Tensor] | None, others: list[Tensor]) -> list[Tensor]:
    if grads is not None:
        torch._foreach_add_(others, grads)
    return others


class Ring(Baseline):
    """One ring of all ranks; full and causal masks and documents."""

    def __init__(self, case: Case, cluster: Cluster, num_heads_kv: int, impl: str = "auto") -> None:
        del num_heads_kv
        self._walk = Walk(case, self._grid(cluster), zigzag(case, cluster.num_ranks), impl)
        self.runs = self._walk.runs

    def _grid(self, cluster: Cluster) -> Grid:
        return Grid.of(cluster, cluster.table(cluster.num_ranks))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self._walk.attend(q, k, v)


class DoubleRing(Ring):
    """Inner rings of neighbours, and an outer one of these rings; the same masks. Takes a number that is no prime."""

    def _grid(self, cluster: Cluster) -> Grid:
        if cluster.num_rows == 1:
            raise Unsupported(f"{cluster.num_ranks} ranks are no rings of rings")
        return Grid.of(cluster, cluster.table(cluster.num_ranks // cluster.num_rows), has_columns=True)
