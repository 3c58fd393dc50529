"""The backward pass in parts on Hopper GPUs: one kernel for dk and dv, one for dq, without sums of dq in memory."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from megatron_magi.cuda.launch import Launch, prepared
from megatron_magi.ops.hopper import kernels as hopper_kernels
from megatron_magi.ops.hopper import plan as hopper_plan
from megatron_magi.ops.hopper.choices import query_tiles
from megatron_magi.ops.hopper.params import BackwardPartParams
from megatron_magi.ops.hopper.plan import DevicePlan, Tiling
from megatron_magi.ops.hopper.support import (
    COUNTER_BYTES,
    LOG2_E,
    grid_size,
    problem_of,
    query_box,
    row_work,
    work_counter,
)
from megatron_magi.ops.options import AttnOptions

Inputs = tuple[Tensor, Tensor, Tensor, Tensor]
"""q, k, v, dout, as the copy engine can read them."""


def keys_launch(
    inputs: Inputs,
    stats_row: int,
    bands: np.ndarray,
    options: AttnOptions,
    plan: DevicePlan,
    splits: int,
    store: int,
    grads: tuple[Tensor, Tensor],
    stream: int,
) -> Launch:
    """Writes dk and dv, or adds to them.

    Args:
        stats_row: from the row statistics of a head to those of the next.
        plan: of the transposed mask, tiles as in `PART_TILES`.
        splits: parts that the query heads of a group, those packed counted as one, are dealt to; with more than one,
            ``store`` adds.
        store: how gradients are written, as the kernels number it.
    """
    q, k, v, dout = inputs
    dk, dv = grads
    keys, block = hopper_kernels.PART_TILES[q.shape[2], v.shape[2]]

    def make() -> Launch:
        num_heads = q.shape[1] // plan.packed
        work = {"num_heads": num_heads, "group": num_heads // k.shape[1], "log2_packed": plan.log2_packed}
        params = _params(inputs, stats_row, options, plan, work, store, stream)
        params.splits, params.heads_inner = splits, int(plan.host.heads_inner)
        params.dk_row, params.dk_head = dk.stride()[:2]
        params.dv_row, params.dv_head = dv.stride()[:2]
        kernel = hopper_kernels.backward_keys_kernel(q.device, q.dtype, (q.shape[2], v.shape[2]), options.softcap > 0)
        grid = grid_size(q.device, plan.num_tiles * k.shape[1] * splits, options.sm_margin)
        maps = (query_box(q, block, plan), (k, keys), (v, keys), query_box(dout, block, plan))
        return Launch(kernel, grid, params, maps, plan=plan)

    return prepared((*_key("backward_keys", inputs, bands, options, store, grads), stream), make)


def queries_launch(
    inputs: Inputs,
    stats_row: int,
    packed: int,
    bands: np.ndarray,
    options: AttnOptions,
    store: int,
    grad: Tensor,
    stream: int,
) -> Launch:
    """Writes dq, or adds to it; arguments as in `keys_launch`, ``packed``: heads counted as one.

    Hold `stream_lock` from the kernel for dk and dv on: this one begins before that is complete, and takes it that the
    kernels before that are.
    """
    q, k, v, dout = inputs
    num_heads, dims = q.shape[1], (q.shape[2], v.shape[2])
    tiles = query_tiles(problem_of(q, k, v), packed)
    block = tiles.shape[1]

    def make() -> Launch:
        plan = hopper_plan.device_plan(bands, Tiling(False, q.shape[0], *tiles), q.device)
        params = _params(inputs, stats_row, options, plan, row_work(plan, num_heads, block, k, v), store, stream)
        params.counter += COUNTER_BYTES  # the kernel before may not have left its own
        params.dq_row, params.dq_head = grad.stride()[:2]
        kernel = hopper_kernels.backward_queries_kernel(q.device, q.dtype, dims, options.softcap > 0)
        grid = grid_size(q.device, plan.num_tiles * params.num_heads, options.sm_margin)
        stored = query_box(grad if grad.dtype == q.dtype else q, 16, plan)
        maps = (query_box(q, 64, plan), (k, block), (v, block), query_box(dout, 64, plan), stored)
        return Launch(kernel, grid, params, maps, plan=plan)

    return prepared((*_key("backward_queries", inputs, bands, options, store, (grad,)), stream), make)


def _params(
    inputs: Inputs,
    stats_row: int,
    options: AttnOptions,
    plan: DevicePlan,
    work: dict[str, int],
    store: int,
    stream: int,
) -> BackwardPartParams:
    """What both kernels are told, ``work`` of each beside; addresses of tensors come with the launch."""
    q = inputs[0]
    softcap, scale = options.softcap, options.softmax_scale
    return BackwardPartParams(
        tiles=plan.tiles, passes=plan.passes, bounds=plan.bounds, step=plan.host.step,
        counter=work_counter(q.device, stream).data_ptr(),
        num_tiles=plan.num_tiles, **work,
        stats_row=stats_row, store=store,
        scale=scale, scale_log2=(softcap or scale) * LOG2_E, softcap_factor=scale / softcap if softcap else 0.0,
    )  # fmt: skip


def _key(name: str, inputs: Inputs, bands: np.ndarray, options: AttnOptions, store: int, grads) -> tuple:
    q, _, v, _ = inputs
    strides = tuple(t.stride() for t in (*inputs, *grads))
    return name, hopper_plan.content_digest(bands), q.device, q.dtype, options, store, q.shape, v.shape, strides
