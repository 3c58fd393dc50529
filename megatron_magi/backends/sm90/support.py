"""Helpers of the forward and backward passes on Hopper GPUs: support checks, streams, counters, tensor maps."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from megatron_magi.backends.sm90.choices import Problem, make_problem
from megatron_magi.backends.sm90.kernels import BACKWARD_DIMS, DIM_UNIT, kernel_dims
from megatron_magi.cuda.driver import fits_tensor_map
from megatron_magi.runtime.graph_capture import is_capturing

LOG2_E = 1.4426950408889634
COUNTER_BYTES = 128
"""A cache line, of which three words are used."""
_DTYPES = (torch.bfloat16, torch.float16)


def loadable(t: Tensor) -> Tensor:
    """The tensor if TMA can load it, else a contiguous copy."""
    return t if fits_tensor_map(t) else t.clone(memory_format=torch.contiguous_format)


def in_dtype(t: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor in a dtype; no host work if it already has it."""
    return t if t.dtype == dtype else t.to(dtype)


def kernels_exist(device: torch.device, dtype: torch.dtype, dims: tuple[int, int]) -> bool:
    """Whether there are kernels for such tensors."""
    return kernel_dims(dims) is not None and dtype in _DTYPES and _is_hopper(device)


def check_support(q: Tensor, dims: tuple[int, int]) -> None:
    """Raises ValueError, naming what would work, unless kernels for these tensors exist."""
    if not kernels_exist(q.device, q.dtype, dims):
        raise ValueError(why_not(q.device, q.dtype, dims))


def why_not(device: torch.device, dtype: torch.dtype, dims: tuple[int, int], instead: str = "'torch'") -> str:
    """The reason why there are no kernels for such tensors, and ``instead``, the implementation that would work."""
    if not _is_hopper(device):
        there = device.type == "cuda" and torch.cuda.is_available()  # a fake tensor may be on a device that is not
        where = torch.cuda.get_device_name(device) if there else device.type
        return f"impl: 'ffa' needs a Hopper GPU (compute capability 9.0), q is on {where}; use {instead}"
    if dtype not in _DTYPES:
        return f"q: impl 'ffa' takes bf16 and fp16, got {dtype}; use {instead}"
    most = max(map(max, BACKWARD_DIMS))
    return (
        f"q, v: impl 'ffa' takes head dims that are multiples of {DIM_UNIT} up to {most}, got {dims[0]} (q, k) and "
        f"{dims[1]} (v); use {instead}"
    )


@cache
def _is_hopper(device: torch.device) -> bool:
    is_there = device.type == "cuda" and torch.cuda.is_available()
    return is_there and torch.cuda.get_device_capability(device) == (9, 0)


@cache
def sm_count(device: torch.device) -> int:
    """Streaming multiprocessors of a device."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def grid_size(device: torch.device, num_items: int) -> int:
    """Grid of a persistent kernel."""
    return max(1, min(num_items, sm_count(device)))


def launch_counter(device: torch.device, stream: int) -> Tensor:
    """The `work_counter` of a stream. While capturing, a new one, which the graph sets to zero: graphs may be replayed
    in any order and concurrently.
    """
    if is_capturing(device):
        return torch.zeros(2 * COUNTER_BYTES, dtype=torch.uint8, device=device)
    return work_counter(device, stream)


@cache
def work_counter(device: torch.device, stream: int) -> Tensor:
    """Two counters of a stream, `COUNTER_BYTES` each, for persistent scheduling. Kernels of one stream run one after
    the other, and each resets its counter to zero. The kernel for dq, which overlaps another one, uses the second.
    """
    return torch.zeros(2 * COUNTER_BYTES, dtype=torch.uint8, device=device)


def problem_of(q: Tensor, k: Tensor, v: Tensor) -> Problem:
    """Shape of a pass over these tensors."""
    return make_problem(q.shape[0], k.shape[0], q.shape[1], k.shape[1], (q.shape[2], v.shape[2]))


WAITING = {"arrival_barrier.num_rows": "later.num_rows", "arrival_barrier.part_rows": "later.part_rows"}
"""Parameters that depend on the mask, of a kernel that waits for fetched keys, with the names of the numbers."""


def of_tables(name: str, captured: bool) -> dict[str, str]:
    """Parameters that depend on the mask, of every kernel that reads tables, with the names of the numbers.

    Args:
        name: prefix of these names.
        captured: the kernel reads the mask's numbers from memory, see `changing_mask`.
    """
    found = {f"plan.{field}": f"{name}.{field}" for field in ("tiles", "segments", "bounds", "step")}
    return {**found, "plan.numbers": f"{name}.numbers", "counter": f"{name}.counter"} if captured else found


def of_rows(name: str, captured: bool, waits: bool = False) -> dict[str, str]:
    """The same of a kernel over tiles of queries; ``waits``: for fetched keys."""
    fields = ("num_tiles", "num_heads", "group", "head_section", "log2_packed", "long_blocks")
    return {
        **of_tables(name, captured), **{field: f"{name}.{field}" for field in fields}, **(WAITING if waits else {})
    }  # fmt: skip
