"""Distributed attention: forward and backward walk the schedule of a plan and decide nothing."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from megatron_magi.attention.calls import AttentionCall, describe_row
from megatron_magi.attention.runtime import plan_casts
from megatron_magi.comm.calls import CallLog, NoCalls, calls_of
from megatron_magi.comm.group_collective import GroupCastArgs, group_cast, group_reduce
from megatron_magi.config import MagiConfig
from megatron_magi.ops.finite import require_finite
from megatron_magi.ops.merge import accumulate_dtype, sink_gradient
from megatron_magi.ops.meta import AttnForwardMeta
from megatron_magi.ops.options import AttnOptions, check_qkv, check_sink, check_tensor, make_options
from megatron_magi.ops.slice_attention import backward_pass, forward_pass, resolve_impl, row_delta
from megatron_magi.plan import RankPlan, StepKind


@dataclass(frozen=True, eq=False)
class _Call:
    """What one call of the operator fixes besides its tensors."""

    plan: RankPlan
    casts: tuple[GroupCastArgs, ...]
    group: dist.ProcessGroup | None
    config: MagiConfig
    module: ModuleType  # the implementation
    forward_options: AttnOptions
    backward_options: AttnOptions
    sink_layout: str
    return_max_logits: bool


@torch.compiler.disable
def distributed_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rank_plan: RankPlan,
    group: dist.ProcessGroup | None,
    *,
    config: MagiConfig | None = None,
    sink: torch.Tensor | None = None,
    sink_layout: str = "sh",
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    return_max_logits: bool = False,
) -> tuple[torch.Tensor, AttnForwardMeta]:
    """Attention of this rank's queries over all keys that the mask shows them.

    Collective over ``group``: every rank calls it, with the plans of its own rank made from
    the same mask. Differentiable in q, k, v and sink.

    Args:
        q: ``[num_rows, num_heads_q, head_dim]``, the rows of this rank's shard. Like k and v finite, padding
            rows too.
        k: ``[num_rows, num_heads_kv, head_dim]``, likewise.
        v: ``[num_rows, num_heads_kv, head_dim_v]``, likewise.
        rank_plan: ``plan.for_rank(cp_rank)``.
        group: the context-parallel group; may be None when the plan is for one rank.
        config: implementation choices; defaults when None.
        sink: logits that take part in the softmax without a value: ``[num_sinks, num_heads_q]``
            (layout ``sh``, the same on all ranks) or ``[num_rows, num_sinks, num_heads_q]``
            (``ssh``). With ``sh`` the gradient is the sum over this rank's rows only, unless
            ``config.comm.dsink_all_reduce`` says otherwise.
        softmax_scale: ``head_dim ** -0.5`` when None.
        softcap: ``softcap * tanh(logit / softcap)`` when positive.
        return_max_logits: also the largest logit of each head over this rank's rows.

    Returns:
        ``(out, meta)``: out ``[num_rows, num_heads_q, head_dim_v]`` in q's dtype;
        ``meta.lse`` ``[num_rows, num_heads_q]`` and ``meta.max_logits`` ``[num_heads_q]``, not
        differentiable. Rows that see no key: out 0, lse -inf.

    Raises:
        ValueError: shapes, dtypes or the group do not fit the plan; with ``config.attend.sanity_check`` a row is
            not finite, in the backward too.
        RuntimeError: the ranks disagree in what they call or in its options, or another rank has raised an error.
    """
    config = MagiConfig() if config is None else config
    with _calls(group, rank_plan, config) as calls:
        _check_inputs(q, k, v, rank_plan, group)
        _check_sink(sink, sink_layout, q)
        attend = config.attend
        # Where nothing is fetched, no collective runs beside attention.
        margins = (attend.forward_sm_margin, attend.backward_sm_margin) if rank_plan.degree else (0, 0)
        options = [make_options(q, softmax_scale, softcap, attend.deterministic, margin) for margin in margins]
        call = _Call(
            plan=rank_plan,
            casts=plan_casts(rank_plan, q.device),
            group=group,
            config=config,
            module=resolve_impl(attend.impl, q, v, options[0].deterministic),
            forward_options=options[0],
            backward_options=options[1],
            sink_layout=sink_layout,
            return_max_logits=return_max_logits,
        )
        _agree(calls, "attention", (q, k, v, sink), call)
        out, lse, max_logits = _DistributedAttention.apply(q, k, v, sink, call)
    return out, AttnForwardMeta(lse=lse, max_logits=max_logits)


def _calls(group: dist.ProcessGroup | None, plan: RankPlan, config: MagiConfig) -> CallLog | NoCalls:
    return calls_of(group, plan.cp_size, config.comm.verify or config.attend.sanity_check)


def _agree(
    calls: CallLog | NoCalls, operation: str, qkv_sink: tuple, call: _Call, dout: torch.Tensor | None = None
) -> None:
    """Before anything is sent: the ranks mean the same, and where that was asked for tensors are finite."""
    checks = call.config.attend.sanity_check
    if checks:
        tensors = dict(zip(("q", "k", "v", "sink", "dout"), (*qkv_sink, dout), strict=True))
        require_finite(tensors, describe_row(call.plan))
    if isinstance(calls, NoCalls):
        return
    record = AttentionCall.of(
        operation,
        *qkv_sink,
        sink_layout=call.sink_layout,
        softmax_scale=call.forward_options.softmax_scale,
        softcap=call.forward_options.softcap,
        max_logits=call.return_max_logits,
        sanity_check=checks,
    )
    calls.agree(record, call.plan.plan_hash, always=checks)


def _check_inputs(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: RankPlan, group: dist.ProcessGroup | None
) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, x)
        if x.dim() != 3 or x.shape[0] != plan.num_rows:
            raise ValueError(
                f"{name}: expected [{plan.num_rows}, heads, dim], the rows of this rank's shard, got {list(x.shape)}"
            )
    check_qkv(q, k, v)
    if plan.cp_size == 1:
        return
    if group is None:
        raise ValueError(f"group: the plan is for {plan.cp_size} ranks, so a process group is needed")
    if group.size() != plan.cp_size or group.rank() != plan.cp_rank:
        raise ValueError(
            f"group: this process is rank {group.rank()} of {group.size()}, "
            f"the plan is for rank {plan.cp_rank} of {plan.cp_size}"
        )


def _check_sink(sink: torch.Tensor | None, layout: str, q: torch.Tensor) -> None:
    dims = {"sh": 2, "ssh": 3}
    if layout not in dims:
        raise ValueError(f"sink_layout: expected one of {', '.join(dims)}, got {layout!r}")
    if sink is None:
        return
    check_tensor("sink", sink)
    if sink.dim() != dims[layout]:
        raise ValueError(
            f"sink: expected {dims[layout]} dimensions with sink_layout {layout!r}, got {list(sink.shape)}"
        )
    check_sink(sink, q)


class _DistributedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q, k, v, sink, call: _Call):
        walk = _Forward(q, k, v, sink, call)
        out, lse, max_logits = walk.run()
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, sink, out, lse, *walk.saved_keys)
        ctx.mark_non_differentiable(lse)
        if max_logits is not None:
            ctx.mark_non_differentiable(max_logits)
        return out, lse, max_logits

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout, _dlse, _dmax_logits):
        q, k, v, sink, out, lse, *saved_keys = ctx.saved_tensors
        call: _Call = ctx.call
        if dout is None:
            # Nothing depends on the output here, but other ranks' keys may need this rank to take part.
            dout = torch.zeros_like(out)
        with _calls(call.group, call.plan, call.config) as calls:
            _agree(calls, "attention backward", (q, k, v, sink), call, dout)
            delta = row_delta(dout, out, call.config.attend.impl, call.backward_options.deterministic)
            dsink = None
            if sink is not None and ctx.needs_input_grad[3]:
                dsink = _reduce_dsink(sink_gradient(sink, lse, delta), call)
            dq, dk, dv = _Backward(dout, q, k, v, lse, delta, saved_keys, call).run()
        return dq, dk, dv, dsink, None


class _Forward:
    """One forward pass: partial results of the stages are merged into ``out`` and ``lse``."""

    def __init__(self, q, k, v, sink, call: _Call) -> None:
        self._q, self._k, self._v, self._sink, self._call = q, k, v, sink, call
        self._plan = call.plan
        self._fetches: dict[int, Any] = {}
        self._out: torch.Tensor | None = None
        self._lse: torch.Tensor | None = None
        self._max_logits: torch.Tensor | None = None
        self.saved_keys: list[torch.Tensor] = []

    def run(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        for step in self._plan.schedule.forward:
            if step.kind is StepKind.FETCH:
                self._fetches[step.stage] = _fetch(self._k, self._v, step.stage, self._call)
            else:
                assert step.kind is StepKind.ATTEND, f"a forward schedule cannot {step.kind}"
                self._attend(step.stage)
        assert self._out is not None and self._lse is not None and not self._fetches
        return self._out.to(self._q.dtype), self._lse, self._max_logits

    def _attend(self, stage: int) -> None:
        k, v = (self._k, self._v) if stage == 0 else self._fetches.pop(stage).wait()
        if stage and stage == self._plan.schedule.saved_stage:
            self.saved_keys = [k, v]
        call = self._call
        self._out, self._lse, max_logits = forward_pass(
            self._q,
            k,
            v,
            self._plan.bands[stage],
            call.forward_options,
            call.module,
            self._sink if stage == 0 else None,  # once: it is one term of the denominator
            call.return_max_logits,
            accumulate_dtype(self._q.dtype) if self._plan.degree else self._q.dtype,
            None if self._out is None else (self._out, self._lse),
        )
        if max_logits is not None:
            seen = self._max_logits
            self._max_logits = max_logits if seen is None else torch.maximum(seen, max_logits)


class _Backward:
    """One backward pass: dq stays here; dk and dv of fetched keys travel back to their owners."""

    def __init__(self, dout, q, k, v, lse, delta, saved_keys, call: _Call) -> None:
        self._dout, self._q, self._k, self._v = dout, q, k, v
        self._lse, self._delta, self._call = lse, delta, call
        self._saved_keys = saved_keys
        self._plan = call.plan
        self._fetches: dict[int, Any] = {}
        self._partial: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._reduces: list[Any] = []
        self._dq: torch.Tensor | None = None
        self._dk: torch.Tensor | None = None
        self._dv: torch.Tensor | None = None
        # Partial sums meet in these gradients, if there are any, so they are kept wide until the end.
        self._wide = accumulate_dtype(q.dtype) if self._plan.degree else q.dtype
        self._is_local_done = False  # then only reductions add to dk and dv

    def run(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        for step in self._plan.schedule.backward:
            if step.kind is StepKind.FETCH:
                self._fetches[step.stage] = _fetch(self._k, self._v, step.stage, self._call)
            elif step.kind is StepKind.ATTEND:
                self._attend(step.stage)
            else:
                self._reduce(step.stage)
        # Waited for in the order of the schedule, so sums are formed in the same order each time.
        for handle in self._reduces:
            handle.wait()
        assert self._dq is not None and self._dk is not None and self._dv is not None
        assert not self._fetches and not self._partial
        return self._dq.to(self._q.dtype), self._dk.to(self._k.dtype), self._dv.to(self._v.dtype)

    def _attend(self, stage: int) -> None:
        call = self._call
        if stage == 0:
            k, v = self._k, self._v
            grad_dtype = self._wide
            # Nothing to add to yet: the gradients are written as they are, without zeros before.
            is_first = self._dq is None
            into = (None, None) if is_first else self._own_gradients()
        else:
            saved = stage == self._plan.schedule.saved_stage
            k, v = self._saved_keys if saved else self._fetches.pop(stage).wait()
            high_precision = call.config.comm.backward_high_precision_reduce
            grad_dtype = accumulate_dtype(k.dtype) if high_precision else k.dtype
            is_first, into = False, (None, None)
        if not is_first and self._dq is None:
            self._dq = _zeros(self._q, self._wide)
        self._dq, dk, dv = backward_pass(
            self._dout,
            (self._q, k, v),
            self._lse,
            self._delta,
            self._plan.bands[stage],
            call.backward_options,
            call.module,
            (self._dq, *into),
            grad_dtype,
        )
        if stage:
            self._partial[stage] = (dk, dv)
        else:
            self._dk, self._dv, self._is_local_done = dk, dv, True

    def _own_gradients(self) -> tuple[torch.Tensor, torch.Tensor]:
        """dk and dv of this rank's keys so far."""
        if self._dk is None or self._dv is None:
            self._dk, self._dv = _zeros(self._k, self._wide), _zeros(self._v, self._wide)
        return self._dk, self._dv

    def _reduce(self, stage: int) -> None:
        if len(self._reduces) > 1:
            self._reduces.pop(0).wait()  # at most two in flight: bounds the memory of the buffers
        call = self._call
        handle = group_reduce(
            list(self._partial.pop(stage)),
            call.casts[stage - 1],
            call.group,
            into=list(self._own_gradients()),
            impl=call.config.comm.impl,
            at_once=self._is_local_done,
        )
        self._reduces.append(handle)


def _fetch(k: torch.Tensor, v: torch.Tensor, stage: int, call: _Call) -> Any:
    return group_cast([k, v], call.casts[stage - 1], call.group, impl=call.config.comm.impl)


def _zeros(like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros_like(like, dtype=dtype, memory_format=torch.contiguous_format)


def _reduce_dsink(dsink: torch.Tensor, call: _Call) -> torch.Tensor:
    op = call.config.comm.dsink_all_reduce
    plan = call.plan
    if op == "none" or plan.cp_size == 1 or call.sink_layout != "sh":
        return dsink
    dist.all_reduce(dsink, op=dist.ReduceOp.SUM, group=call.group)
    return dsink / plan.cp_size if op == "avg" else dsink
