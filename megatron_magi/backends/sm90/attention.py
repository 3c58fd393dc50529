"""Attention on Hopper GPUs: the kernels of ``csrc/attention/sm90``.

Takes fp16 and bf16; head dims (qk/v) 64/64, 128/128, 192/128 and 256/256, and any multiple of 8
with the kernels of the next larger of these: missing columns are read as zeros, and results are copied from wider
buffers. Row statistics and sums are fp32. Values must be finite, also of hidden tokens, which are multiplied by zero.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from megatron_magi.backends.base import is_changing
from megatron_magi.backends.sm90 import plan as hopper_plan
from megatron_magi.backends.sm90.host_tables import facts_meet
from megatron_magi.backends.sm90.kernels import kernel_dims
from megatron_magi.backends.sm90.program import MAX_LISTS, LaunchProgram, Maker, SharedSums, new_makers
from megatron_magi.backends.sm90.row_delta import row_delta
from megatron_magi.backends.sm90.support import check_support, in_dtype, kernels_exist, problem_of
from megatron_magi.mask import bands as bd
from megatron_magi.operands.options import AttnOptions
from megatron_magi.operands.passes import BackwardInputs, ForwardInputs, ForwardOutput, Gradients
from megatron_magi.runtime.lru import LruCache

__all__ = [
    "SharedSums",
    "backward",
    "forward",
    "one_launch",
    "row_delta",
    "sums_meet",
]

_MAX_BANDS_BYTES = 256 << 20  # of host memory
_programs: LruCache[tuple, LaunchProgram] = LruCache(_MAX_BANDS_BYTES, MAX_LISTS)
_makers: LruCache[tuple, LruCache[tuple, Maker]] = LruCache(0, MAX_LISTS)
_NOTHING_SEEN = np.zeros((0, bd.NUM_COLUMNS), dtype=np.int64)
_NOTHING_SEEN.setflags(write=False)


def one_launch(q: Tensor, k: Tensor, v: Tensor, bands: np.ndarray, options: AttnOptions) -> LaunchProgram | None:
    """The program of calls like this one; None if the kernels cannot read the tensors in place.

    Arguments as of `megatron_magi.ops.slice_passes.slice_attention_forward`.
    """
    dims = q.shape[2], v.shape[2]
    is_other = kernel_dims(dims) != dims or not kernels_exist(q.device, q.dtype, dims) or is_changing(bands)
    return None if is_other or not q.shape[0] or not k.shape[0] else _program_of(q, k, v, bands, options)


def _program_of(q: Tensor, k: Tensor, v: Tensor, bands: np.ndarray, options: AttnOptions) -> LaunchProgram:
    """The program of a mask and of tensors of these shapes, from the cache or new."""
    kind = q.shape, k.shape[1:], v.shape[2], q.dtype, q.device, options
    if is_changing(bands):  # their tables belong to their mask, which no cache may keep
        return LaunchProgram(bands, k.shape[0], _makers_of(kind), is_prepared=True)
    key = hopper_plan.content_digest(bands), k.shape[0], kind
    found = _programs.get(key)
    if found is None:
        found = LaunchProgram(_unchanging(bands), k.shape[0], _makers_of(kind))
        _programs.put(key, found, found.bands.nbytes)  # device memory is owned and counted by its launches
    return found


def _makers_of(kind: tuple) -> LruCache[tuple, Maker]:
    """What masks of tensors of these shapes share."""
    makers = _makers.get(kind)
    if makers is None:
        makers = new_makers()
        _makers.put(kind, makers, 0)
    return makers


def _unchanging(bands: np.ndarray) -> np.ndarray:
    """The table if it is immutable, else an immutable copy."""
    if bands.flags.writeable or bands.base is not None:
        bands = bands.copy()
        bands.setflags(write=False)
    return bands


def forward(
    inputs: ForwardInputs,
    bands: np.ndarray,
    options: AttnOptions,
    output: ForwardOutput,
    *,
    program: LaunchProgram | None = None,
) -> None:
    """Writes attention over ``bands`` to ``output``, or merges it into that; see `slice_attention_forward`.

    ``program``: of the mask and such calls; looked up when None.

    Raises:
        ValueError: the device, dtype or head dims are not supported.
    """
    q, k, v, sink_lse = inputs
    num_rows, num_heads, _ = q.shape
    if num_rows == 0 or (output.accumulate and sink_lse is None and k.shape[0] == 0):
        return
    check_support(q, (q.shape[2], v.shape[2]))
    if sink_lse is not None:
        inputs = inputs._replace(sink_lse=in_dtype(sink_lse, torch.float32).expand(num_rows, num_heads))
    if k.shape[0] == 0:  # tiles without keys compute zeros times the contents of a buffer
        k, v = q.new_zeros((1, *k.shape[1:])), q.new_zeros((1, *v.shape[1:]))
        inputs, bands, program = inputs._replace(k=k, v=v), _NOTHING_SEEN, None
    if program is None:
        program = _program_of(q, k, v, bands, options)
    written = output._replace(lse=in_dtype(output.lse, torch.float32))
    program.forward_stage(inputs, written, options)
    if written.lse is not output.lse:
        output.lse.copy_(written.lse)


def backward(
    inputs: BackwardInputs,
    bands: np.ndarray,
    options: AttnOptions,
    grads: Gradients,
    *,
    program: LaunchProgram | None = None,
    shared: SharedSums | None = None,
    read: Tensor | None = None,
) -> None:
    """Writes dq, dk, dv to ``grads``, or adds to them; see `slice_attention_backward`.

    Memory besides the gradients: an fp32 dq, and up to 16 MB for sums of dk and dv, which otherwise use the memory of
    dq until it is written. If dq is added to, or not contiguous, and a key head has at least four query heads, also an
    fp32 dk and dv. Wide heads, deterministic mode, and many queries that see few keys each need no fp32 dq; wide heads
    need an fp32 dk and dv if SMs would otherwise idle.

    ``program`` as in `forward`. With ``shared`` this is one of several passes, of which the last writes dq, whatever
    ``grads`` says. ``read`` as of `megatron_magi.backends.base.Program.backward`.

    Raises:
        ValueError: the device, dtype or head dims are not supported.
    """
    q, k, v, dout, lse, delta = inputs
    if q.shape[0] == 0 or k.shape[0] == 0:
        assert shared is None, "passes without rows or keys have no part in sums"
        for grad, adds in grads.tensors():
            if not adds:
                grad.zero_()
        return
    check_support(q, (q.shape[2], v.shape[2]))
    if program is None:
        program = _program_of(q, k, v, bands, options)
    dout, lse, delta = in_dtype(dout, q.dtype), in_dtype(lse, torch.float32), in_dtype(delta, torch.float32)
    program.backward_stage(BackwardInputs(q, k, v, dout, lse, delta), grads, options, shared, read)


def sums_meet(q: Tensor, k: Tensor, v: Tensor, bands: Sequence[np.ndarray], num_keys: Sequence[int], options) -> bool:
    """Whether backward passes over several stages, with ``bands`` and ``num_keys`` of each, share the sums of dq."""
    if not kernels_exist(q.device, q.dtype, (q.shape[2], v.shape[2])):
        return False
    problems = [problem_of(q, k, v)._replace(num_keys=count) for count in num_keys]
    return facts_meet(list(map(hopper_plan.mask_facts, bands)), problems, options.deterministic)
