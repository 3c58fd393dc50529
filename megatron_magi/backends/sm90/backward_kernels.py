"""The kernels of the backward pass on Hopper GPUs: one for dk, dv and possibly dq; one for dk and dv; one for dq.

Each function prepares one of them: a launch for tensors of a layout, or its parameters that depend on the mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from megatron_magi.backends.sm90 import kernels as hopper_kernels
from megatron_magi.backends.sm90.choices import WHOLE_TILE
from megatron_magi.backends.sm90.params import (
    BackwardParams,
    BackwardPartParams,
    CapturedBackwardParams,
    CapturedBackwardPartParams,
    GatedBackwardParams,
    GatedBackwardPartParams,
)
from megatron_magi.backends.sm90.plan import DevicePlan, DeviceSchedule
from megatron_magi.backends.sm90.support import (
    COUNTER_BYTES,
    LOG2_E,
    grid_size,
    query_box,
    row_work,
    work_counter,
)
from megatron_magi.backends.tiles.tiles import UNIT
from megatron_magi.cuda.launch import Launch, Numbers, prepared
from megatron_magi.cuda.launch_list import Step
from megatron_magi.operands.options import AttnOptions

Inputs = tuple[Tensor, Tensor, Tensor, Tensor]
"""q, k, v, dout, as TMA can load them."""


class Steps(NamedTuple):
    """Kernels of a backward pass.

    Attributes:
        before: kernels before the one that waits for fetched keys.
        keys: the kernel that waits for keys, and the one that finishes their gradients.
        rest: the kernel that writes dq. The kernel that sends gradients of keys is launched before it, and runs
            concurrently.
        rest_is_apart: ``rest`` uses no results of ``keys``; the kernel between them may overlap ``keys``.
    """

    before: tuple[Step, ...]
    keys: tuple[Step, ...]
    rest: tuple[Step, ...]
    rest_is_apart: bool


class Common(NamedTuple):
    """Arguments common to the kernels of a pass.

    Attributes:
        inputs: q, k, v, dout.
        dims: head dims of the kernels; those of ``inputs`` may be smaller.
        stats_row: stride of the row statistics between heads.
        options: of the call.
        stream: raw handle.
        arriving: fetched keys and values, if there are any.
    """

    inputs: Inputs
    dims: tuple[int, int]
    stats_row: int
    options: AttnOptions
    stream: int
    arriving: Sequence[Tensor] = ()


def whole_launch(common: Common, adds_dq: bool, plan: DevicePlan, store: int, grads: tuple[Tensor, Tensor]) -> Launch:
    """Writes dk and dv, or adds to their sums if query heads are split; and adds to the sums of dq.

    Args:
        common: of the pass.
        adds_dq: False: dq is computed by `queries_launch`.
        plan: of the transposed mask, tiles as in `WHOLE_TILE`.
        store: how gradients are written, as the kernels number it.
        grads: dk and dv.
    """
    inputs, dims, stats_row, options, stream, arriving = common
    (q, k, v, dout), (dk, dv) = inputs, grads
    keys, queries = WHOLE_TILE

    def make() -> Launch:
        softcap, scale = options.softcap, options.softmax_scale
        kind = GatedBackwardParams if arriving else CapturedBackwardParams if plan.is_static else BackwardParams
        params = kind(
            counter=0 if plan.is_static else work_counter(q.device, stream).data_ptr(),
            dk_row=dk.stride(0), dk_head=dk.stride(1), dv_row=dv.stride(0), dv_head=dv.stride(1),
            group=q.shape[1] // plan.packed // k.shape[1], heads_kv=k.shape[1],
            stats_row=stats_row, units=stats_row // UNIT, store=store,
            scale=scale, scale_log2=(softcap or scale) * LOG2_E, softcap_factor=scale / softcap if softcap else 0.0,
            log2_packed=plan.log2_packed,
        )  # fmt: skip
        kernel = hopper_kernels.backward_kernel(
            q.device, q.dtype, dims, softcap > 0, adds_dq, bool(arriving), plan.is_static
        )
        of_keys = ((t, keys) for t in (k, v, *arriving))
        maps = (query_box(q, queries, plan), *of_keys, query_box(dout, queries, plan))
        return Launch(kernel, 1, params, maps)

    key = (
        "backward", bool(arriving), plan.is_static, q.device, stream, q.dtype, options, store, adds_dq, plan.packed,
        q.shape, k.shape[1:], v.shape[1:], *(t.stride() for t in (*inputs, *grads)),
    )  # fmt: skip
    return prepared(key, make)


def whole_numbers(common: Common, plan: DevicePlan, schedule: DeviceSchedule, seen: tuple[int, int]) -> Numbers:
    """The mask's parameters of `whole_launch`, without fetched keys.

    Args:
        common, plan: as there.
        schedule: the items of the plan.
        seen: of the mask, see `support.seen_rows`.
    """
    num_items = len(schedule.items)
    return Numbers(
        plan, grid_size(common.inputs[0].device, num_items, common.options.sm_margin), _mapped_rows(seen),
        tiles=plan.tiles, segments=plan.passes, bounds=plan.bounds, step=plan.host.step,
        items=schedule.items.data_ptr(), num_items=num_items, heads_inner=int(plan.host.heads_inner),
        **plan.fields(schedule=schedule),
    )  # fmt: skip


def keys_launch(common: Common, plan: DevicePlan, store: int, grads: tuple[Tensor, Tensor]) -> Launch:
    """Writes dk and dv, or adds to them.

    Args:
        common: without fetched keys.
        plan: of the transposed mask, tiles as in `PART_TILES`.
        store: how gradients are written, as the kernels number it.
        grads: dk and dv.
    """
    (q, k, v, dout), (dk, dv), options = common.inputs, grads, common.options
    keys, block = hopper_kernels.PART_TILES[common.dims]

    def make() -> Launch:
        num_heads = q.shape[1] // plan.packed
        params = _params(common, store, plan.is_static)
        params.num_heads, params.group, params.log2_packed = num_heads, num_heads // k.shape[1], plan.log2_packed
        params.dk_row, params.dk_head = dk.stride()[:2]
        params.dv_row, params.dv_head = dv.stride()[:2]
        kernel = hopper_kernels.backward_keys_kernel(
            q.device, q.dtype, common.dims, options.softcap > 0, plan.is_static
        )
        maps = (query_box(q, block, plan), (k, keys), (v, keys), query_box(dout, block, plan))
        return Launch(kernel, 1, params, maps)

    return prepared(_key("backward_keys", common, plan, store, grads), make)


def keys_numbers(common: Common, plan: DevicePlan, splits: int, seen: tuple[int, int]) -> Numbers:
    """The mask's parameters of `keys_launch`.

    Args:
        common, plan: as there.
        splits: splits of a group of query heads (packed heads count as one); with more than one, gradients are added.
        seen: of the mask, see `support.seen_rows`.
    """
    q, k, *_ = common.inputs
    grid = grid_size(q.device, plan.num_tiles * k.shape[1] * splits, common.options.sm_margin)
    return _numbers(plan, grid, seen, splits=splits, heads_inner=int(plan.host.heads_inner), **plan.fields())


def queries_launch(common: Common, plan: DevicePlan, store: int, grad: Tensor) -> Launch:
    """Writes dq, or adds to it; arguments as in `keys_launch`, ``plan``: tiles as in `query_tiles`.

    Hold `stream_lock` from the kernel for dk and dv on: this kernel starts before that one is complete, and assumes
    that the kernels before it are.
    """
    (q, k, v, dout), options, arriving = common.inputs, common.options, common.arriving
    block = hopper_kernels.QUERIES_WIDTH[common.dims]

    def make() -> Launch:
        params = _params(common, store, plan.is_static)
        if not plan.is_static:
            params.counter += COUNTER_BYTES  # the preceding kernel may still be using its counter
        params.dq_row, params.dq_head = grad.stride()[:2]
        kernel = hopper_kernels.backward_queries_kernel(
            q.device, q.dtype, common.dims, options.softcap > 0, bool(arriving), plan.is_static
        )
        of_keys = ((t, block) for t in (k, v, *arriving))
        stored = query_box(grad if grad.dtype == q.dtype else q, 16, plan)
        maps = (query_box(q, 64, plan), *of_keys, query_box(dout, 64, plan), stored)
        return Launch(kernel, 1, params, maps)

    name = "stream_kv backward_queries" if arriving else "backward_queries"
    return prepared(_key(name, common, plan, store, (grad,)), make)


def queries_numbers(common: Common, plan: DevicePlan, seen: tuple[int, int]) -> Numbers:
    """The mask's parameters of `queries_launch`, without fetched keys; ``seen``: see `support.seen_rows`."""
    q, k, v, _ = common.inputs
    work = row_work(plan, q.shape[1], hopper_kernels.QUERIES_WIDTH[common.dims], k, v)
    grid = grid_size(q.device, plan.num_tiles * work["num_heads"], common.options.sm_margin)
    return _numbers(plan, grid, seen, **work, **plan.fields(second=True))


def _mapped_rows(seen: tuple[int, int]) -> tuple[int, ...]:
    """Rows of the tensor maps of q, k, v and dout."""
    rows, keys = seen
    return rows, keys, keys, rows


def _params(
    common: Common, store: int, captured: bool
) -> BackwardPartParams | CapturedBackwardPartParams | GatedBackwardPartParams:
    """Parameters of both kernels besides a mask's numbers; addresses of tensors are set at launch."""
    softcap, scale = common.options.softcap, common.options.softmax_scale
    kind = (
        GatedBackwardPartParams if common.arriving else CapturedBackwardPartParams if captured else BackwardPartParams
    )
    return kind(
        counter=0 if captured else work_counter(common.inputs[0].device, common.stream).data_ptr(),
        stats_row=common.stats_row, store=store, scale=scale,
        scale_log2=(softcap or scale) * LOG2_E, softcap_factor=scale / softcap if softcap else 0.0,
    )  # fmt: skip


def _numbers(plan: DevicePlan, num_blocks: int, seen: tuple[int, int], **work: int) -> Numbers:
    return Numbers(
        plan, num_blocks, _mapped_rows(seen),
        tiles=plan.tiles, segments=plan.passes, bounds=plan.bounds, step=plan.host.step, num_tiles=plan.num_tiles,
        **work,
    )  # fmt: skip


def _key(name: str, common: Common, plan: DevicePlan, store: int, grads: Sequence[Tensor]) -> tuple:
    q, k, v, _ = common.inputs
    strides = tuple(t.stride() for t in (*common.inputs, *grads))
    shapes = q.shape, k.shape[1:], v.shape[1:]
    return name, plan.is_static, q.device, common.stream, q.dtype, common.options, plan.packed, store, *shapes, *strides
