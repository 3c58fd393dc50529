"""What communication is measured against: the attention of a plan over its keys, which are all there."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from baselines.base import Block, start_dq
from megatron_magi.ops.merge import accumulate_dtype
from megatron_magi.ops.slice_attention import row_delta
from megatron_magi.plan import RankPlan


class Alone:
    """Stage by stage, as the plan says; its keys lie one stage behind the other.

    Attributes:
        num_keys: of all stages.
    """

    def __init__(self, plan: RankPlan, impl: str = "auto") -> None:
        self.impl, self.blocks = impl, [Block(bands, impl) for bands in plan.bands]
        self.bounds = list(accumulate((plan.num_rows, *(t.num_recv for t in plan.transfers)), initial=0))
        self.num_keys = self.bounds[-1]

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of the rows of the plan; k and v: ``[num_keys, num_heads_kv, head_dim]``."""
        return _Alone.apply(q, k, v, self)

    def stages(self, k: Tensor, v: Tensor) -> list[tuple[Block, Tensor, Tensor]]:
        """Attention, keys and values of those that have keys."""
        return [
            (block, k[a:b], v[a:b]) for block, (a, b) in zip(self.blocks, pairwise(self.bounds), strict=True) if b > a
        ]


class _Alone(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q, k, v, alone: Alone):
        stages, result = alone.stages(k, v), None
        dtype = q.dtype if len(stages) == 1 else accumulate_dtype(q.dtype)
        for block, *keys in stages:
            if len(block.bands):
                result = block.forward(q, *keys, dtype, result)
        assert result is not None, "a rank whose tokens see nothing"
        out, lse = result[0].to(q.dtype), result[1]
        ctx.alone = alone
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout):
        alone, (q, k, v, out, lse) = ctx.alone, ctx.saved_tensors
        stages, delta = alone.stages(k, v), row_delta(dout, out, alone.impl)
        some = [(block, keys) for block, *keys in stages if len(block.bands)]
        dq, sums = start_dq((q, k, v), [block for block, _ in some], [len(keys[0]) for _, keys in some], alone.impl)
        parts = []
        for block, *keys in stages:
            if len(block.bands):
                dq, *grads = block.backward(dout, (q, *keys), lse, delta, dq, **sums)
            else:
                grads = [torch.zeros_like(x) for x in keys]
            parts.append(grads)
        assert dq is not None
        return dq.to(q.dtype), *(torch.cat(grads) for grads in zip(*parts, strict=True)), None
