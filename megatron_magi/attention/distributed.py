"""Distributed attention: forward and backward execute the schedule of a plan, without decisions of their own."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist

from megatron_magi.attention.call_cache import CachedCall, CallTemplate, living
from megatron_magi.attention.call_signature import (
    AttentionCall,
    check_inputs,
    check_sinks,
    check_static,
    describe_row,
    verifies,
)
from megatron_magi.attention.collective_args import cleared, joined_cast, plan_casts
from megatron_magi.attention.fused_comm import is_alone, pays, program_of, stage_program
from megatron_magi.attention.head_groups import check_groups, check_options, from_groups, sink_of_groups, to_groups
from megatron_magi.attention.sink import reduce_dsink
from megatron_magi.attention.travel import travel_args
from megatron_magi.backends.base import Backend
from megatron_magi.backends.readings import check_reading, reading_of_forward
from megatron_magi.checks import flag, renamed
from megatron_magi.comm.agreement import told
from megatron_magi.comm.collective_checks import CallLog, NoCalls, calls_of
from megatron_magi.comm.group_collective import GroupCastArgs, group_cast, group_reduce, make_room
from megatron_magi.comm.groups import Group, group_of
from megatron_magi.comm.row_layout import RowLayout
from megatron_magi.comm.transport import FOR_CAPTURES
from megatron_magi.config import MagiConfig
from megatron_magi.cuda.layout import Layout
from megatron_magi.operands.finite import require_finite
from megatron_magi.operands.merge import accumulate_dtype, row_products, sink_gradient
from megatron_magi.operands.meta import AttnForwardMeta
from megatron_magi.operands.options import AttnOptions, make_options, written_out
from megatron_magi.operands.passes import BackwardInputs
from megatron_magi.ops.derivatives import once_differentiable, refuse_tangents
from megatron_magi.ops.slice_passes import backward_pass, choose_for, forward_pass, refusal, resolve_impl
from megatron_magi.plan import RankPlan, StepKind
from megatron_magi.runtime.lru import LruCache
from megatron_magi.runtime.no_compile import outside_graphs
from megatron_magi.runtime.upload import together
from megatron_magi.variables import NATIVE_COLLECTIVES

_DEFAULTS = MagiConfig()
_PLAIN = (float, int, bool, str)
_MOST_CALLS = 64
"""Most calls that are cached with a plan, and most templates; trainers have a few."""
_keeping = threading.Lock()
"""Held while these change: threads may share a plan, and all keys share templates."""


@outside_graphs
def distributed_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rank_plan: RankPlan,
    group: Group,
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
        group: the context-parallel group, or a mesh; may be None when the plan is for one rank.
        config: implementation choices; defaults when None.
        sink: logits that take part in the softmax without a value: ``[num_sinks, num_heads_q]``
            (layout ``sh``, the same on all ranks) or ``[num_rows, num_sinks, num_heads_q]``
            (``ssh``). With ``sh`` the gradient is the sum over this rank's rows only, unless
            ``config.comm.dsink_all_reduce`` says otherwise.
        softmax_scale: ``head_dim ** -0.5`` when None.
        softcap: ``softcap * tanh(logit / softcap)`` when positive.
        return_max_logits: also the largest logit of each head over the rows that this rank computes: its own, except
            those that other ranks compute (`RankPlan.moves`), and its guests.

    Returns:
        ``(out, meta)``: out ``[num_rows, num_heads_q, head_dim_v]`` in q's dtype;
        ``meta.lse`` ``[num_rows, num_heads_q]`` and ``meta.max_logits`` ``[num_heads_q]``, not
        differentiable. Rows that see no key: out 0, lse -inf.

    Raises:
        ValueError: shapes, dtypes or the group do not fit the plan; with ``config.attend.sanity_check`` a row is
            not finite, in the backward too.
        RuntimeError: the ranks disagree in what they call or in its options, or another rank has raised an error.
    """
    return attend(q, k, v, rank_plan, group, config, sink, sink_layout, softmax_scale, softcap, return_max_logits)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rank_plan: RankPlan,
    group: Group,
    config: MagiConfig | None,
    sink: torch.Tensor | None,
    sink_layout: str,
    softmax_scale: float | None,
    softcap: float,
    return_max_logits: bool,
) -> tuple[torch.Tensor, AttnForwardMeta]:
    """`distributed_attention`, for callers that are outside of compiled graphs already: leaving one takes time."""
    config = _DEFAULTS if config is None else config
    if not isinstance(config, MagiConfig):
        raise ValueError(f"config: expected a MagiConfig or None, got {type(config).__name__}")
    if not isinstance(rank_plan, RankPlan):
        found = type(rank_plan).__name__
        raise ValueError(f"rank_plan: expected a RankPlan, as plan.for_rank(cp_rank) returns it, got {found}")
    group, groups = group_of(group), rank_plan.head_groups
    if groups > 1:
        with told(group, verifies(config)):
            check_groups(q, k, v, rank_plan)
            check_sinks(sink, sink_layout, q)
        if sink is not None:
            sink = sink_of_groups(sink, sink_layout, q.shape[0], groups)
        q, k, v = (to_groups(x, groups) for x in (q, k, v))
        sink_layout = "ssh"
    out, meta = _attend_rows(
        q, k, v, rank_plan, group, config, sink, sink_layout, softmax_scale, softcap, return_max_logits
    )
    if groups > 1:
        out, meta = from_groups(out, groups), AttnForwardMeta(lse=from_groups(meta.lse, groups), max_logits=None)
    return out, meta


def _attend_rows(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rank_plan: RankPlan,
    group: dist.ProcessGroup | None,
    config: MagiConfig,
    sink: torch.Tensor | None,
    sink_layout: str,
    softmax_scale: float | None,
    softcap: float,
    return_max_logits: bool,
) -> tuple[torch.Tensor, AttnForwardMeta]:
    """`distributed_attention` of the rows of the plan."""
    with _calls(group, rank_plan.cp_size, config) as calls:
        refuse_tangents(q, k, v, sink)
        q, k, v, sink = written_out(q, k, v, sink)
        flag(return_max_logits, "return_max_logits")
        key = _key(q, k, v, sink, group, config, sink_layout, softmax_scale, softcap, return_max_logits)
        known = rank_plan.runtime.calls
        call = known.get(key)
        if call is not None:
            _agree(calls, call.record, (q, k, v, sink), call, rank_plan)
        else:
            check_inputs(q, k, v, rank_plan, group)
            check_sinks(sink, sink_layout, q)
            check_options(rank_plan, config, return_max_logits)
            more = group, config, sink_layout, softmax_scale, softcap, return_max_logits
            with together(q.device):
                call = _make_call(_template(key, rank_plan, q, k, v, sink, *more), rank_plan)
                _agree(calls, call.record, (q, k, v, sink), call, rank_plan)
                _make_room(q, k, v, call, rank_plan)
                if call.program is not None:
                    call.program.prepare_forward(q, k, v, sink, return_max_logits)
            _keep(known, key, call)
        if call.record.gradient:
            out, lse, max_logits = _DistributedAttention.apply(q, k, v, sink, call, rank_plan)
        else:
            reading_of_forward(rank_plan.bands[0], has_gradients=False)
            with torch.no_grad():
                (out, lse, max_logits), *_ = _attend_everywhere(q, k, v, sink, call)
    return out, AttnForwardMeta(lse=lse, max_logits=max_logits)


def _key(q, k, v, sink, group, config: MagiConfig, *options: object) -> tuple | None:
    """Cache key of calls that differ only in addresses and content of their tensors; None if there is none."""
    for t in (q, k, v) if sink is None else (q, k, v, sink):
        if not isinstance(t, torch.Tensor):
            return None
    for option in options:
        if option is not None and type(option) not in _PLAIN:
            return None
    # The cached call keeps the configuration alive, so that its id stays unique.
    return (
        None if group is None else ref(group), id(config), options,
        torch.is_grad_enabled(), torch.are_deterministic_algorithms_enabled(),
        q.shape, q.stride(), q.dtype, q.device, q.requires_grad,
        k.shape, k.stride(), k.dtype, k.device, k.requires_grad,
        v.shape, v.stride(), v.dtype, v.device, v.requires_grad,
        sink if sink is None else (sink.shape, sink.stride(), sink.dtype, sink.device, sink.requires_grad),
    )  # fmt: skip


def _keep(known: dict[tuple, Any], key: tuple | None, value: Any) -> None:
    """Keeps a value for calls with the same key, as the last one in the order of the dictionary; the first ones go."""
    if key is None:
        return
    with _keeping:
        known.pop(key, None)
        while len(known) >= _MOST_CALLS:
            del known[next(iter(known))]
        known[key] = value


def _template(key: tuple | None, plan: RankPlan, *of_call: Any) -> CallTemplate:
    """That of calls with other masks, if there is one; ``of_call``: arguments of `_make_template`."""
    shared = plan.runtime.templates
    if shared is None or plan.moves is not None:  # passes may differ in the number of guests
        return _make_template(*of_call)
    template = None if key is None else shared.get(key)
    if template is None:
        template = _make_template(*of_call)
    _keep(shared, key, template)  # so that those used longest ago go first
    return template


def _no_group() -> None:
    """Replaces a weak reference to the group, for one rank."""


def _make_template(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sink: torch.Tensor | None,
    group: dist.ProcessGroup | None,
    config: MagiConfig,
    sink_layout: str,
    softmax_scale: float | None,
    softcap: float,
    return_max_logits: bool,
) -> CallTemplate:
    options = make_options(q, softmax_scale, softcap, config.attend.deterministic, 0)
    record = AttentionCall.of(
        "attention", q, k, v, sink,
        sink_layout=sink_layout, softmax_scale=options.softmax_scale, softcap=options.softcap,
        max_logits=return_max_logits, sanity_check=config.attend.sanity_check,
    )  # fmt: skip
    backend = resolve_impl(config.attend.impl, q, v, options)
    makers = tuple(LruCache(0) if backend.programs is None else backend.programs.new_makers() for _ in range(2))
    return CallTemplate(
        (Layout.of(q), Layout.of(k), Layout.of(v)), _no_group if group is None else ref(group), config,
        backend, options.softmax_scale, options.softcap,
        options.deterministic, sink_layout, return_max_logits, record,
        makers, {}, [],
    )  # fmt: skip


def _make_call(template: CallTemplate, plan: RankPlan) -> CachedCall:
    (q, _, v), config = template.layouts, template.config
    attend = config.attend
    # If nothing is fetched, no collective runs concurrently with attention.
    margins = (attend.forward_sm_margin, attend.backward_sm_margin) if plan.degree else (0, 0)
    of_call = q, template.softmax_scale, template.softcap, template.deterministic
    options = [make_options(*of_call, margin) for margin in margins]
    backend = _backend_for(plan, template, options[0])
    casts = plan_casts(plan, q.device)
    check_static(plan, backend, attend.sanity_check)
    dims = q.shape[2], v.shape[2]
    program, programs = None, backend.programs
    if is_alone(plan, dims, programs) or pays(plan, dims, programs, config.comm.impl):
        assert programs is not None
        group, makers = partial(living, template.group_ref), template.makers[bool(casts)]
        program = program_of(plan, programs, config.comm.impl, q.device, group, makers)
    return CachedCall(
        template=template,
        schedule=plan.schedule,
        bands=plan.bands,
        casts=casts,
        plan_hash=plan.plan_hash,
        cp_size=plan.cp_size,
        group_ref=template.group_ref,
        config=config,
        backend=backend,
        forward_options=options[0],
        backward_options=options[1],
        sink_layout=template.sink_layout,
        return_max_logits=template.return_max_logits,
        record=template.record,
        backward_record=template.record._replace(operation="attention backward", gradient=False),
        stages=tuple(
            None
            if programs is None
            else stage_program(plan, stage, count, programs, template.makers_of(bool(casts), stage))
            for stage, count in enumerate([plan.num_rows, *(cast.num_recv for cast in casts)])
        ),
        travel=travel_args(plan, q.device),
        program=program,
        stage_tables=plan.runtime.keep_stage_tables,
        tail=plan.runtime.tail,
        comm_impl=config.comm.impl if plan.runtime.tail is None else FOR_CAPTURES,
    )


def _backend_for(plan: RankPlan, template: CallTemplate, options: AttnOptions) -> Backend:
    """The backend of the template, or the next that takes the masks of this plan.

    Raises:
        ValueError: of several ranks: the one that is asked for by name does not take the call. It would say so itself,
            but then keys are under way, which the next call would receive.
    """
    backend, (q, _, v) = template.backend, template.layouts
    is_named = template.config.attend.impl != "auto"
    if plan.runtime.tail is not None or (is_named and plan.cp_size == 1):
        return backend
    tensors = q.device, q.dtype, (q.shape[2], v.shape[2])
    reason = refusal(backend, options, plan.bands)
    if is_named:
        reason = backend.why_not(*tensors) or reason
        if reason is not None:
            raise ValueError(reason)
    if reason is None:
        return backend
    found = choose_for("auto", *tensors, options, plan.bands)
    assert found.programs is None or found is backend, "ranks may choose different backends, in stages alone"
    return found


def make_calls_ready(plan: RankPlan, like: RankPlan) -> None:
    """Prepares the launches of a plan, for the calls that were made with an earlier plan.

    Collective if those calls are: memory for the rows of both passes is allocated on all ranks first. After that, ranks
    may prepare different passes, so preparation must not communicate. Calls make whatever was not prepared.

    Args:
        plan: on its device, not called yet.
        like: plan of an earlier batch, whose calls ran on the current stream.
    """
    if (plan.num_rows, plan.cp_size) != (like.num_rows, like.cp_size) or plan.runtime.tail is not None:
        return
    if plan.moves is not None or like.moves is not None:
        return  # passes differ in the number of guests too
    known = plan.runtime.calls
    for key, earlier in list(like.runtime.calls.items()):
        if key not in known and (plan.cp_size == 1 or earlier.group_ref() is not None):
            call = known[key] = _make_call(earlier.template, plan)
            _make_room(*call.template.layouts, call, plan)
            if call.backend.programs is not None:
                call.make_ready()


def _make_room(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: CachedCall, plan: RankPlan) -> None:
    """Lets collectives allocate the memory for all stages of both passes, before the step waits for any of them."""
    if call.travel is not None:
        wide, dims = accumulate_dtype(q.dtype), (q.shape[1:], (q.shape[1], v.shape[2]))
        of_queries = RowLayout.make(dims[:1], (q.dtype,))
        of_results = RowLayout.make((dims[1], q.shape[1:2]), (q.dtype, wide))
        with renamed("impl", f"comm.impl ({NATIVE_COLLECTIVES})"):
            for casts, layout in (((call.travel.there,), of_queries), ((call.travel.back,), of_results)):
                make_room(casts, layout, None, call.group, call.comm_impl)
    of_keys, of_gradients = (
        RowLayout.make((k.shape[1:], v.shape[1:]), (dtype, dtype)) for dtype in (k.dtype, _partial_dtype(k, call))
    )
    # During capture, the backward may be captured later, when memory can no longer grow.
    back = of_gradients if call.record.gradient or call.tail is not None else None
    joined = joined_cast(plan, k.device) if call.program is not None and plan.degree else None
    casts = call.casts if joined is None else tuple(dict.fromkeys((*call.casts, joined)))
    rows = [cast.most for cast in casts if isinstance(cast, GroupCastArgs) and not cast.is_static]
    most = [max(counts) for counts in zip(*rows, strict=True)] if len(rows) == len(casts) and None not in rows else []
    room = call.template.room
    if most and room and all(count <= known for count, known in zip(most, room, strict=True)):
        return
    with renamed("impl", f"comm.impl ({NATIVE_COLLECTIVES})"):
        is_made = make_room(casts, of_keys, back, call.group, call.comm_impl)
    if is_made and most:
        room[:] = [max(counts) for counts in zip(most, room or most, strict=True)]


def _partial_dtype(k: torch.Tensor, call: CachedCall) -> torch.dtype:
    """Dtype of the gradients of fetched keys."""
    return accumulate_dtype(k.dtype) if call.config.comm.backward_high_precision_reduce else k.dtype


def _calls(group: dist.ProcessGroup | None, cp_size: int, config: MagiConfig) -> CallLog | NoCalls:
    return calls_of(group, cp_size, verifies(config))


def _agree(
    calls: CallLog | NoCalls,
    record: AttentionCall,
    qkv_sink: tuple,
    call: CachedCall,
    plan: RankPlan,
    dout: torch.Tensor | None = None,
) -> None:
    """Before anything is sent: compares calls, and with ``sanity_check`` checks that tensors are finite."""
    if record.sanity_check:
        tensors = dict(zip(("q", "k", "v", "sink", "dout"), (*qkv_sink, dout), strict=True))
        require_finite(tensors, describe_row(plan))
    calls.agree(record, call.plan_hash, always=record.sanity_check)


class _DistributedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q, k, v, sink, call: CachedCall, plan: RankPlan):
        wants_rest = sink is not None and ctx.needs_input_grad[3] and call.travel is None
        rest = _Rest() if wants_rest and call.accumulates else None
        (out, lse, max_logits), of_all, saved_keys = _attend_everywhere(q, k, v, sink, call, rest)
        ctx.call, ctx.plan, ctx.reading = call, plan, reading_of_forward(plan.bands[0], has_gradients=True)
        ctx.has_rest = rest is not None and rest.of_out is not None
        if ctx.has_rest:
            saved_keys = (rest.of_out, *saved_keys)
        ctx.set_materialize_grads(False)
        q, out_of_all, lse_of_all = of_all
        ctx.save_for_backward(q, k, v, sink, out_of_all, lse_of_all, *saved_keys)
        # One call for both: a second one would replace the first.
        ctx.mark_non_differentiable(*(t for t in (lse, max_logits) if t is not None))
        return out, lse, max_logits

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, saved, dout, _dlse, _dmax_logits):
        q, k, v, sink, out, lse, *saved_keys = saved
        call: CachedCall = ctx.call
        rest = saved_keys.pop(0) if ctx.has_rest else None
        travel, num_rows = call.travel, ctx.plan.num_rows
        if dout is None:
            # Nothing here depends on the output, but this rank must take part for the gradients of other ranks' keys.
            dout = torch.zeros_like(out[:num_rows])
        with _calls(call.group, call.cp_size, call.config) as calls:
            read = check_reading(ctx.plan.bands[0], ctx.reading)
            _agree(calls, call.backward_record, (q[:num_rows], k, v, sink), call, ctx.plan, dout)
            wants_sink = sink is not None and ctx.needs_input_grad[3]
            if travel is not None:
                (dout,) = travel.to_hosts([dout.contiguous()], call.group, call.comm_impl)
            grads = _backward_at_once(dout, (q, k, v), out, lse, call, wants_sink and travel is None, read)
            if grads is not None:
                *grads, delta = grads
                if wants_sink and travel is not None:  # kernels know nothing of rows that others computed
                    delta = call.backend.row_delta(dout, out)
            elif call.backend.takes_out and not wants_sink:
                delta = None
            else:
                delta = call.backend.row_delta(dout, out)
            dsink = None
            if wants_sink:  # of this rank's rows, wherever they were computed
                of_sink = delta if rest is None else delta + row_products(dout, rest)
                dsink = reduce_dsink(sink_gradient(sink, lse[:num_rows], of_sink[:num_rows]), call)
            if grads is None:
                call.know_stages()
                grads = _Backward(dout, q, k, v, out, lse, delta, saved_keys, call, read).run()
            dq, dk, dv = _narrow(grads, q.dtype)
            if travel is not None:
                (dq,) = travel.to_homes([dq], call.group, call.comm_impl)
        return dq, dk, dv, dsink, None, None


class _Rest:
    """What rounding takes off the output of stages, which are merged in fp32; kept for the gradient of a sink.

    That is a sum over rows of products of the output, whose rounding would be its largest error.
    """

    of_out: torch.Tensor | None = None

    def note(self, wide: torch.Tensor, narrow: torch.Tensor) -> None:
        """Keeps the rest in the dtype of ``narrow``; none if both have one dtype."""
        if wide.dtype != narrow.dtype:
            self.of_out = (wide - narrow).to(narrow.dtype)


def _attend_everywhere(
    q, k, v, sink, call: CachedCall, rest: _Rest | None = None
) -> tuple[tuple, tuple, Sequence[torch.Tensor]]:
    """As `_attend`, of this rank's rows, some of which other ranks may compute.

    Returns:
        ``(found, of_all, saved_keys)``: output, lse and largest logits; q, output and lse of this rank's rows and its
        guests.
    """
    travel = call.travel
    if travel is None:
        found, saved_keys = _attend(q, k, v, sink, call, rest)
        return found, (q, *found[:2]), saved_keys
    of_rows = [q, sink] if sink is not None and call.sink_layout == "ssh" else [q]
    q, *of_rows = travel.to_hosts(of_rows, call.group, call.comm_impl)
    (out, lse, max_logits), saved_keys = _attend(q, k, v, of_rows[0] if of_rows else sink, call)
    cleared([out], travel.tail)  # delta of rows that hold nothing must be finite
    home = travel.to_homes([out, lse], call.group, call.comm_impl)
    return (*home, max_logits), (q, out, lse), saved_keys


def _attend(q, k, v, sink, call: CachedCall, rest: _Rest | None = None) -> tuple[tuple, Sequence[torch.Tensor]]:
    """Output, lse and largest logits, and the fetched keys and values that the backward uses."""
    if call.program is not None:
        found = call.program.forward(q, k, v, sink, call.forward_options, call.return_max_logits)
        if found is not None:
            return found, ()
    walk = _Forward(q, k, v, sink, call)
    return walk.run(rest), walk.saved_keys


class _Forward:
    """One forward pass: partial results of the stages are merged into ``out`` and ``lse``."""

    def __init__(self, q, k, v, sink, call: CachedCall) -> None:
        self._q, self._k, self._v, self._sink, self._call = q, k, v, sink, call
        self._schedule = call.schedule
        self._fetches: dict[int, Any] = {}
        self._out: torch.Tensor | None = None
        self._lse: torch.Tensor | None = None
        self._max_logits: torch.Tensor | None = None
        self.saved_keys: list[torch.Tensor] = []

    def run(self, rest: _Rest | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        self._call.know_stages()
        for step in self._schedule.forward:
            if step.kind is StepKind.FETCH:
                self._fetches[step.stage] = _fetch(self._k, self._v, step.stage, self._call)
            else:
                assert step.kind is StepKind.ATTEND, f"a forward schedule cannot {step.kind}"
                self._attend(step.stage)
        assert self._out is not None and self._lse is not None and not self._fetches
        out = self._out.to(self._q.dtype)
        if rest is not None:
            rest.note(self._out, out)
        return out, self._lse, self._max_logits

    def _attend(self, stage: int) -> None:
        k, v = (self._k, self._v) if stage == 0 else cleared(self._fetches.pop(stage).wait(), self._call.tail)
        if stage and stage == self._schedule.saved_stage:
            self.saved_keys = [k, v]
        call = self._call
        self._out, self._lse, max_logits = forward_pass(
            (self._q, k, v), self._call.bands[stage], call.forward_options, call.backend,
            self._sink if stage == 0 else None,  # in one stage only: it is one term of the denominator
            call.return_max_logits,
            accumulate_dtype(self._q.dtype) if call.accumulates else self._q.dtype,
            None if self._out is None else (self._out, self._lse),
            **call.hints(stage),
        )  # fmt: skip
        if max_logits is not None:
            seen = self._max_logits
            self._max_logits = max_logits if seen is None else torch.maximum(seen, max_logits)


def _backward_at_once(dout, qkv, out, lse, call: CachedCall, wants_delta: bool, read) -> tuple | None:
    """Gradients and delta in one launch over all stages; None if stages must be run."""
    if call.program is None:
        return None
    dtype = _partial_dtype(qkv[1], call) if call.casts else qkv[1].dtype
    return call.program.backward(dout, qkv, out, lse, call.backward_options, dtype, wants_delta, read)


class _Backward:
    """One backward pass: dq is local; dk and dv of fetched keys are sent back to their owners."""

    def __init__(self, dout, q, k, v, out, lse, delta, saved_keys, call: CachedCall, read) -> None:
        self._dout, self._q, self._k, self._v = dout, q, k, v
        self._lse, self._delta, self._call = lse, delta, call
        self._saved_keys = saved_keys
        self._schedule = call.schedule
        self._fetches: dict[int, Any] = {}
        self._partial: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._reduces: list[Any] = []
        self._dq: torch.Tensor | None = None
        self._dk: torch.Tensor | None = None
        self._dv: torch.Tensor | None = None
        # If several partial sums are added to these gradients, they are fp32 until the end.
        self._wide = accumulate_dtype(q.dtype) if call.accumulates else q.dtype
        self._is_local_done = False  # once True, only reductions add to dk and dv
        self._shared: dict[str, Any] = {"out": out} if call.backend.takes_out else {}
        if read is not None:
            self._shared["read"] = read
        if call.sums_meet:
            self._shared["shared"] = call.backend.shared_sums(len(call.bands))
            self._dq = torch.empty_like(q, memory_format=torch.contiguous_format)

    def run(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        for step in self._schedule.backward:
            if step.kind is StepKind.FETCH:
                self._fetches[step.stage] = _fetch(self._k, self._v, step.stage, self._call)
            elif step.kind is StepKind.ATTEND:
                self._attend(step.stage)
            else:
                self._reduce(step.stage)
        # Waited for in the order of the schedule, so that sums have a fixed order.
        for handle in self._reduces:
            handle.wait()
        assert self._dq is not None and self._dk is not None and self._dv is not None
        assert not self._fetches and not self._partial
        return self._dq, self._dk, self._dv

    def _attend(self, stage: int) -> None:
        call = self._call
        if stage == 0:
            k, v = self._k, self._v
            grad_dtype = self._wide
            # The first gradients are written, not added, so that nothing has to be zeroed.
            is_first = self._dq is None or (call.sums_meet and self._dk is None)
            into = (None, None) if is_first else self._own_gradients()
        else:
            saved = stage == self._schedule.saved_stage
            k, v = self._saved_keys if saved else cleared(self._fetches.pop(stage).wait(), call.tail)
            grad_dtype = _partial_dtype(k, call)
            is_first, into = False, (None, None)
        if not is_first and self._dq is None:
            self._dq = _zeros(self._q, self._wide)
        self._dq, dk, dv = backward_pass(
            BackwardInputs(self._q, k, v, self._dout, self._lse, self._delta), call.bands[stage],
            call.backward_options, call.backend, (self._dq, *into), grad_dtype, **call.hints(stage), **self._shared,
        )  # fmt: skip
        if stage:
            self._partial[stage] = (dk, dv)
        else:
            self._dk, self._dv, self._is_local_done = dk, dv, True

    def _own_gradients(self) -> tuple[torch.Tensor, torch.Tensor]:
        """dk and dv of this rank's keys, accumulated so far."""
        if self._dk is None or self._dv is None:
            self._dk, self._dv = _zeros(self._k, self._wide), _zeros(self._v, self._wide)
        return self._dk, self._dv

    def _reduce(self, stage: int) -> None:
        if len(self._reduces) > 1:
            self._reduces.pop(0).wait()  # at most two in flight, to bound the memory of buffers
        call = self._call
        while self._is_local_done and any(handle.adds_late for handle in self._reduces):
            self._reduces.pop(0).wait()  # else both would add to dk and dv concurrently, on different streams
        handle = group_reduce(
            list(self._partial.pop(stage)),
            call.casts[stage - 1],
            call.group,
            into=list(self._own_gradients()),
            impl=call.comm_impl,
            at_once=self._is_local_done,
            kept=True,
        )
        self._reduces.append(handle)


def _fetch(k: torch.Tensor, v: torch.Tensor, stage: int, call: CachedCall) -> Any:
    return group_cast([k, v], call.casts[stage - 1], call.group, impl=call.comm_impl, kept=True)


def _zeros(like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros_like(like, dtype=dtype, memory_format=torch.contiguous_format)


def _narrow(grads: Sequence[torch.Tensor], dtype: torch.dtype) -> Sequence[torch.Tensor]:
    """Converts the gradients to a dtype, in one launch."""
    wide = [grad for grad in grads if grad.dtype != dtype]
    if not wide:
        return grads
    narrow = [torch.empty_like(grad, dtype=dtype) for grad in wide]
    torch._foreach_copy_(narrow, wide)
    left = iter(narrow)
    return tuple(grad if grad.dtype == dtype else next(left) for grad in grads)
