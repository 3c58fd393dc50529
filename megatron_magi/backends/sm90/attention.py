"""Attention on Hopper GPUs: the kernels of ``csrc/attention/sm90``.

Takes fp16 and bf16; head dims (qk/v) 64/64, 128/128, 192/128 and 256/256, and any multiple of 8
with the kernels of the next larger of these: missing columns are read as zeros, and results are copied from wider
buffers. Row statistics and sums are fp32. Values must be finite, also of hidden tokens, which are multiplied by zero.
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron_magi.backends.base import is_changing
from megatron_magi.backends.sm90 import plan as hopper_plan
from megatron_magi.backends.sm90.backward import SharedSums, backward
from megatron_magi.backends.sm90.backward_ends import row_delta
from megatron_magi.backends.sm90.choices import forward_tiles
from megatron_magi.backends.sm90.forward_kernel import make_launch
from megatron_magi.backends.sm90.host_tables import masks_meet
from megatron_magi.backends.sm90.kernels import kernel_dims
from megatron_magi.backends.sm90.plan import Tiling
from megatron_magi.backends.sm90.program import LaunchProgram, Maker, new_makers
from megatron_magi.backends.sm90.support import (
    check_support,
    grid_size,
    in_dtype,
    kernels_exist,
    loadable,
    problem_of,
    row_work,
    seen_rows,
)
from megatron_magi.cuda.driver import fits_tensor_map
from megatron_magi.cuda.launch import MAX_BYTES, MAX_LAUNCHES, Numbers, prepared
from megatron_magi.cuda.layout import Layout
from megatron_magi.cuda.streams import current_stream
from megatron_magi.mask import bands as bd
from megatron_magi.operands.options import AttnOptions
from megatron_magi.operands.passes import ForwardInputs, ForwardOutput
from megatron_magi.runtime.lru import LruCache

__all__ = [
    "SharedSums",
    "backward",
    "forward",
    "one_launch",
    "row_delta",
    "sums_meet",
]

_passes: LruCache[tuple, _Pass] = LruCache(MAX_BYTES, MAX_LAUNCHES)
_MAX_BANDS_BYTES = 256 << 20  # of host memory
_one_launches: LruCache[tuple, LaunchProgram] = LruCache(_MAX_BANDS_BYTES, MAX_LAUNCHES)
_makers: LruCache[tuple, LruCache[tuple, Maker]] = LruCache(0, MAX_LAUNCHES)
_NOTHING_SEEN = np.zeros((0, bd.NUM_COLUMNS), dtype=np.int64)
_NOTHING_SEEN.setflags(write=False)


def one_launch(
    q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, bands: np.ndarray, options: AttnOptions, max_logits: bool
) -> LaunchProgram | None:
    """The prepared passes of calls like this one; None if the kernels cannot read the tensors in place.

    Arguments as of `megatron_magi.ops.slice_passes.slice_attention_forward`.
    """
    of_sink = None if sink is None else sink.dim()
    kind = q.shape, k.shape[1:], v.shape[2], q.dtype, q.device, options, of_sink, max_logits
    key = hopper_plan.content_digest(bands), k.shape[0], kind
    found = _one_launches.get(key)
    if found is None:
        dims = q.shape[2], v.shape[2]
        is_other = kernel_dims(dims) != dims or not kernels_exist(q.device, q.dtype, dims) or is_changing(bands)
        if is_other or not q.shape[0] or not k.shape[0]:
            return None
        makers = _makers.get(kind)
        if makers is None:
            makers = new_makers()
            _makers.put(kind, makers, 0)
        found = LaunchProgram(_unchanging(bands), k.shape[0], makers)
        _one_launches.put(key, found, found.bands.nbytes)  # device memory is owned and counted by its passes
    return found


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
    return_max_logits: bool = False,
    memo: MutableMapping | None = None,
) -> Tensor | None:
    """Writes attention over ``bands`` to ``output``, or merges it into that; see `slice_attention_forward`.

    ``memo`` caches the pass for calls that differ only in addresses and strides.

    Raises:
        ValueError: the device, dtype or head dims are not supported.
    """
    q, k, v, sink_lse = inputs
    (num_rows, num_heads, head_dim), device = q.shape, q.device
    max_logits = q.new_full((num_heads,), -torch.inf, dtype=torch.float32) if return_max_logits else None
    if num_rows == 0 or (output.accumulate and sink_lse is None and k.shape[0] == 0):
        return max_logits
    if sink_lse is not None:
        sink_lse = in_dtype(sink_lse, torch.float32).expand(num_rows, num_heads)
        inputs = ForwardInputs(q, k, v, sink_lse)
    if memo:  # most calls: tensors of the layout of an earlier call
        known = memo.get(_layout(current_stream(device), inputs, output))
        if known is not None and known.run(inputs, output, max_logits):
            return max_logits
    check_support(q, (head_dim, v.shape[2]))
    signature = _Signature(inputs, output, options, current_stream(device))
    known = _passes.get(signature.key(bands))
    if known is not None and known.run(inputs, output, max_logits):
        if memo is not None:
            memo[_layout(signature.stream, inputs, output)] = known
        return max_logits
    q, k, v = map(loadable, (q, k, v))
    if k.shape[0] == 0:  # tiles without keys compute zeros times the contents of a buffer
        k, v = q.new_zeros((1, *k.shape[1:])), q.new_zeros((1, *v.shape[1:]))
        bands = _NOTHING_SEEN
    inputs = ForwardInputs(q, k, v, sink_lse)
    written = _written(output, q.dtype, problem_of(q, k, v).forward_dims[1])
    known = _pass_of(_Signature(inputs, written, options, signature.stream), bands)
    fired = known.run(inputs, written, max_logits)
    assert fired
    if written.out is not output.out:
        output.out.copy_(written.out[..., : v.shape[2]])
    if written.lse is not output.lse:
        output.lse.copy_(written.lse)
    return max_logits


def _written(output: ForwardOutput, dtype: torch.dtype, columns: int) -> ForwardOutput:
    """What the kernel writes, ``columns`` wide: ``output``, or a wider buffer whose first columns are copied to it."""
    out, lse, accumulate = output
    if out.shape[2] != columns:
        wide = out.new_empty((*out.shape[:2], columns), dtype=dtype if out.dtype == dtype else torch.float32)
        if accumulate:
            wide[..., : out.shape[2]] = out
        out = wide
    elif out.dtype not in (dtype, torch.float32) or not fits_tensor_map(out):
        out = out.to(torch.float32, memory_format=torch.contiguous_format, copy=True)
    return ForwardOutput(out, in_dtype(lse, torch.float32), accumulate)


def _layout(stream: int, inputs: ForwardInputs, output: ForwardOutput) -> tuple:
    """What may differ between calls."""
    (q, k, v, _), (out, lse, _) = inputs, output
    return stream, q.stride(), k.stride(), v.stride(), out.stride(), lse.stride()


class _Signature(NamedTuple):
    """What a forward pass depends on, apart from its mask.

    Attributes:
        inputs, output: tensors of the layout of the calls, or the layouts; with a `sink_lse` for every row.
        options: of the calls.
        stream: raw handle.
    """

    inputs: ForwardInputs
    output: ForwardOutput
    options: AttnOptions
    stream: int

    def key(self, bands: np.ndarray) -> tuple:
        """Cache key of its pass over a mask: all that this depends on except addresses."""
        (q, k, v, sink_lse), (out, lse, accumulate), options, stream = self
        return (
            hopper_plan.content_digest(bands), q.device, stream, q.dtype, out.dtype, lse.dtype, options,
            accumulate, q.shape, v.shape, out.shape[2], q.stride(), k.stride(), v.stride(), out.stride(), lse.stride(),
            None if sink_lse is None else sink_lse.stride(),
        )  # fmt: skip

    def without_memory(self) -> _Signature:
        """The same with layouts instead of tensors."""
        (*qkv, sink_lse), (out, lse, accumulate), options, stream = self
        inputs = ForwardInputs(*map(Layout.of, qkv), None if sink_lse is None else Layout.of(sink_lse))
        return _Signature(inputs, ForwardOutput(Layout.of(out), Layout.of(lse), accumulate), options, stream)

    def make(self, bands: np.ndarray, num_keys: int) -> _Pass:
        """The pass over another mask with ``num_keys`` keys; for a signature without memory."""
        k, v = (t.with_rows(num_keys) for t in self.inputs[1:3])
        return _pass_of(self._replace(inputs=self.inputs._replace(k=k, v=v)), bands)


def _pass_of(signature: _Signature, bands: np.ndarray) -> _Pass:
    """The pass of a signature over a mask, from the cache or made."""
    key = signature.key(bands)
    known = _passes.get(key)
    if known is None:
        known = _Pass(signature.without_memory(), bands)
        _passes.put(key, known, known.plan.num_bytes)
    return known


class _Pass:
    """The kernel of a forward pass over tensors of one layout, on one stream.

    Attributes:
        plan: the tiles of the mask.
        make: makes a pass for another mask and number of keys.
    """

    def __init__(self, signature: _Signature, bands: np.ndarray) -> None:
        (q, k, v, sink_lse), (out, lse, accumulate), options, self._stream = signature
        self.make = signature.make
        num_rows, num_heads, _ = q.shape
        problem = problem_of(q, k, v)
        tiles = forward_tiles(hopper_plan.mask_facts(bands), problem)
        self.plan = plan = hopper_plan.device_plan(bands, Tiling(False, num_rows, *tiles), q.device)
        # Tiles that see nothing add nothing, and come last.
        adds_alone = accumulate and sink_lse is None
        num_tiles = int(np.count_nonzero(plan.host.costs)) if adds_alone else plan.num_tiles
        work = row_work(plan, num_heads, tiles.shape[1], k, v)
        grid = grid_size(q.device, num_tiles * work["num_heads"], options.sm_margin)
        rows, keys = seen_rows(bands)
        self._numbers = Numbers(
            plan, grid, (rows, keys, keys),
            tiles=plan.tiles, segments=plan.passes, bounds=plan.bounds, step=plan.host.step, num_tiles=num_tiles,
            **work, **plan.fields(busy=adds_alone),
        )  # fmt: skip
        key = (
            "forward", plan.is_static, q.device, self._stream, q.dtype, out.dtype, options, accumulate, *tiles,
            q.shape, k.shape[1:], v.shape[1:], q.stride(), k.stride(), v.stride(), out.stride(), lse.stride(),
            None if sink_lse is None else sink_lse.stride(),
        )  # fmt: skip
        self._launch = prepared(key, partial(make_launch, *signature, tiles, captured=plan.is_static))

    def run(self, inputs: ForwardInputs, output: ForwardOutput, max_logits: Tensor | None) -> bool:
        """Launches the kernel for tensors of the layout; False if an address is not aligned for a tensor map."""
        q, k, v, sink_lse = inputs
        addresses = q.data_ptr(), k.data_ptr(), v.data_ptr()
        out, launch = output.out.data_ptr(), self._launch
        if (addresses[0] | addresses[1] | addresses[2] | out) % 16:
            return False
        with launch.lock:
            launch.take(self._numbers, q, k, v)
            launch.point_maps(*addresses, out)
            params = launch.params
            params.out, params.lse = out, output.lse.data_ptr()
            params.sink_lse = 0 if sink_lse is None else sink_lse.data_ptr()
            params.max_logits = 0 if max_logits is None else max_logits.data_ptr()
            launch.fire(self._stream)
        return True


def sums_meet(q: Tensor, k: Tensor, v: Tensor, bands: Sequence[np.ndarray], num_keys: Sequence[int], options) -> bool:
    """Whether backward passes over several stages, with ``bands`` and ``num_keys`` of each, share the sums of dq."""
    if not kernels_exist(q.device, q.dtype, (q.shape[2], v.shape[2])):
        return False
    problems = [problem_of(q, k, v)._replace(num_keys=count) for count in num_keys]
    return masks_meet(bands, problems, options.deterministic)
