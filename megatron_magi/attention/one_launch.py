"""The forward in one launch over all stages: own keys, and behind them those of all stages, which arrive meanwhile."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

import numpy as np
import torch
import torch.distributed as dist

from megatron_magi.attention.runtime import joined_cast
from megatron_magi.comm.announced import announced_cast, may_announce
from megatron_magi.comm.group_collective import GroupCastArgs, group_reduce
from megatron_magi.mask import bands as bd
from megatron_magi.ops.hopper import gated, gated_backward
from megatron_magi.ops.hopper.kernels import WHOLE_DIMS, kernel_dims
from megatron_magi.ops.hopper.support import in_dtype, loadable
from megatron_magi.ops.impl import hopper
from megatron_magi.ops.merge import sink_lse
from megatron_magi.ops.options import AttnOptions
from megatron_magi.ops.slice_attention import forward_pass
from megatron_magi.plan import RankPlan
from megatron_magi.plan.types import own


@dataclass(frozen=True, eq=False)
class OneLaunch:
    """What the forward of a plan needs for it.

    Attributes:
        cast: brings the keys of all stages.
        bands: over all keys, as `gated` numbers them.
        impl: of the cast.
        memo, own_memo, backward_memo, own_backward_memo: where the kernels, with and without keys that arrive, remember
            what calls have in common.
    """

    cast: GroupCastArgs
    bands: np.ndarray
    impl: str
    memo: WeakValueDictionary = field(default_factory=WeakValueDictionary)
    own_memo: WeakValueDictionary = field(default_factory=WeakValueDictionary)
    backward_memo: WeakValueDictionary = field(default_factory=WeakValueDictionary)
    own_backward_memo: WeakValueDictionary = field(default_factory=WeakValueDictionary)

    @classmethod
    def of(cls, plan: RankPlan, impl: str, device: torch.device) -> OneLaunch:
        """For a plan with remote stages."""
        return cls(joined_cast(plan, device), joined_bands(plan), impl)

    def forward(
        self,
        group: dist.ProcessGroup | None,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sink: torch.Tensor | None,
        options: AttnOptions,
        return_max_logits: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None] | None:
        """Output, lse and largest logits; None, on all ranks, where rows do not travel so that a kernel can wait."""
        q, k, v = map(loadable, (q, k, v))
        arriving = announced_cast([k, v], self.cast, group, self.impl)
        if arriving is None:
            return None
        if not self.cast.num_recv or not q.shape[0]:
            gated.bring(arriving)  # others need this rank to take part
            return forward_pass(
                q, k, v, self.bands, options, hopper, sink, return_max_logits, q.dtype, memo=self.own_memo
            )  # fmt: skip
        shape = (*q.shape[:2], v.shape[2])
        out, lse = q.new_empty(shape), q.new_empty(shape[:2], dtype=torch.float32)
        max_logits = None
        if return_max_logits:
            max_logits = q.new_full((q.shape[1],), -torch.inf, dtype=torch.float32)
        if sink is not None:
            sink = sink_lse(sink, torch.float32).expand(shape[:2])
        gated.forward(
            q, k, v, arriving, self.bands, options,
            out=out, lse=lse, sink_lse=sink, max_logits=max_logits, memo=self.memo,
        )  # fmt: skip
        return out, lse, max_logits

    def backward(
        self,
        group: dist.ProcessGroup | None,
        dout: torch.Tensor,
        qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        lse: torch.Tensor,
        delta: torch.Tensor,
        options: AttnOptions,
        partial: torch.dtype,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
        """Gradients of q, in its dtype, and of k and v, in that which travels; None as in `forward`.

        Args:
            group: of the ranks.
            dout: of any float dtype.
            qkv: q, k and v.
            lse, delta: fp32 ``[num_rows, num_heads]``.
            options: of the call.
            partial: dtype of the parts that ranks have of gradients of k and v: those that travel, and this rank's own,
                to which they are added, in fp32, and rounded once.
        """
        q, k, v = map(loadable, qkv)
        arriving = announced_cast([k, v], self.cast, group, self.impl)
        if arriving is None:
            return None
        new = functools.partial(torch.empty_like, memory_format=torch.contiguous_format)
        dk, dv = (new(t, dtype=partial) for t in (k, v))
        later = [new(t, dtype=partial) for t in arriving.tensors]
        dout, dq = loadable(in_dtype(dout, q.dtype)), new(q)
        if self.cast.num_recv and q.shape[0]:
            gated_backward.backward(
                (q, k, v, dout), lse, delta, arriving, self.bands, options,
                grads=(dq, dk, dv), arriving_grads=later, memo=self.backward_memo,
            )  # fmt: skip
        else:
            gated.bring(arriving)  # others need this rank to take part
            hopper.backward(
                dout, q, k, v, lse, delta, self.bands, options,
                grads=(dq, dk, dv), accumulate=False, memo=self.own_backward_memo,
            )  # fmt: skip
        into = [dk, dv]
        group_reduce(later, self.cast, group, into=into, impl=self.impl, at_once=True).wait()
        return dq, dk, dv


def joined_bands(plan: RankPlan) -> np.ndarray:
    """The mask of a plan over own keys and those of all stages, read-only int64 ``[n, 6]``; made once a plan."""
    known = plan.runtime.get("joined bands")
    if known is None:
        firsts = np.cumsum([gated.first_arriving(plan.num_rows), *(t.num_recv for t in plan.transfers)])
        tables = [plan.bands[0], *(bd.shift_keys(table, at) for table, at in zip(plan.bands[1:], firsts, strict=False))]
        known = plan.runtime["joined bands"] = own(np.concatenate(tables))
    return known


def backward_pays(dims: tuple[int, int]) -> bool:
    """Whether the backward, too, is one launch where the forward is; ``dims``: of a head of q and k, and of v."""
    return dims in WHOLE_DIMS


def pays(plan: RankPlan, dims: tuple[int, int], impl: str) -> bool:
    """Whether the forward of a plan is to be one launch, and kernels and collectives can; the same on all ranks.

    Args:
        plan: of this rank.
        dims: of a head of q and k, and of v; narrower than those of the kernels, they take copies.
        impl: of the collectives.
    """
    if not plan.one_launch:
        return False
    if not plan.degree or plan.schedule.saved_stage is not None or plan.schedule.forward[-1].stage == 0:
        return False  # stages are kept, or are to follow each other without overlap
    if plan.transfers[0].levels is not None or kernel_dims(dims) != dims:
        return False
    return may_announce(plan.cp_size, impl)
