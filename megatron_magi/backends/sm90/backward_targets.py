"""Where the backward kernels write gradients: directly if possible, else to buffers that are copied or added."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_magi.cuda.driver import fits_tensor_map
from megatron_magi.cuda.layout import Layout
from megatron_magi.operands.passes import Gradients

STORE_HALF, STORE_FLOAT, ADD_FLOAT, ADD_HALF = range(4)
"""How kernels write gradients: Store of csrc/attention/sm90."""


class Target(NamedTuple):
    """Memory that a gradient is written to.

    Attributes:
        columns: columns of a separate buffer; 0: the gradient itself is written.
        dtype: of the buffer.
        is_zeroed: the buffer is zeroed first, as kernels add to it.
        is_added: the buffer is added to the gradient; else copied.
    """

    columns: int = 0
    dtype: torch.dtype = torch.float32
    is_zeroed: bool = False
    is_added: bool = False

    def layout(self, grad: Layout) -> Layout:
        """Layout of `buffer`."""
        return grad.new_empty((*grad.shape[:2], self.columns), self.dtype) if self.columns else grad

    def buffer(self, grad: Tensor) -> Tensor:
        """The tensor that the kernels write to."""
        if self.columns:
            grad = torch.empty((*grad.shape[:2], self.columns), dtype=self.dtype, device=grad.device)
        return grad.zero_() if self.is_zeroed else grad


class Targets(NamedTuple):
    """The memory that the gradients of a pass are written to.

    Attributes:
        dq, dk, dv: target of each gradient.
        store_dq: how dq is stored.
        store_keys: how dk and dv are stored.
    """

    dq: Target
    dk: Target
    dv: Target
    store_dq: int
    store_keys: int

    @classmethod
    def of(cls, grads: Gradients, dims: tuple[int, int], dtype: torch.dtype, splits: int) -> Targets:
        """For gradients.

        Args:
            grads: of a pass.
            dims: head dims of the kernels; those of the gradients may be less.
            dtype: of q.
            splits: splits of a group of query heads; with more than one, their dk and dv are added.
        """
        store_dq, dq = _query_target(grads.dq, dims[0], dtype, grads.accumulate_dq)
        store_keys, dk, dv = _key_targets((grads.dk, grads.dv), dims, dtype, grads.accumulate_keys, splits)
        return cls(dq, dk, dv, store_dq, store_keys)

    @property
    def are_gradients(self) -> bool:
        """Whether the kernels write all gradients directly, with nothing to do before or after."""
        return not any(target.columns or target.is_zeroed for target in self[:3])

    def room_in_dq(self, grads: Gradients) -> int | None:
        """Bytes of the memory of dq, if it can hold other data until dq is written."""
        dq = self.dq.layout(grads.dq)
        is_free = self.store_dq in (STORE_HALF, STORE_FLOAT) and not grads.accumulate_dq
        is_plain = dq.is_contiguous() and dq.data_ptr() % 16 == 0
        return dq.numel() * dq.element_size() if is_free and is_plain else None

    def layouts(self, grads: Gradients) -> list[Layout]:
        """Layouts of `buffers`."""
        return [target.layout(grad) for target, grad in zip(self[:3], grads[:3], strict=True)]

    def buffers(self, grads: Gradients) -> list[Tensor]:
        """The tensors that the kernels write dq, dk and dv to."""
        return [target.buffer(grad) for target, grad in zip(self[:3], grads[:3], strict=True)]

    def finish(self, grads: Gradients, buffers: Sequence[Tensor], has_dq: bool = True) -> None:
        """Copies or adds what the kernels have written; without ``has_dq`` dk and dv only."""
        for target, buffer, grad in zip(self[:3], buffers, grads[:3], strict=True):
            if target.columns and (has_dq or grad is not grads.dq):
                computed = buffer[..., : grad.shape[2]]
                grad.copy_(grad + computed if target.is_added else computed)


DIRECT = Targets(Target(), Target(), Target(), STORE_HALF, STORE_HALF)
"""The kernels write all gradients, in the dtype of q."""


def _query_target(grad: Layout, columns: int, dtype: torch.dtype, adds: bool) -> tuple[int, Target]:
    """How dq is stored, and where to; ``columns``: those that the kernels write."""
    if grad.shape[2] != columns and grad.dtype == dtype and not adds:
        return STORE_HALF, Target(columns, dtype)
    if grad.shape[2] != columns or grad.dtype not in (dtype, torch.float32) or not fits_tensor_map(grad):
        return STORE_FLOAT, Target(columns, is_added=adds)
    if grad.dtype == torch.float32:
        return ADD_FLOAT if adds else STORE_FLOAT, Target()
    return ADD_HALF if adds else STORE_HALF, Target()


def _key_targets(
    grads: tuple[Layout, Layout], dims: tuple[int, int], dtype: torch.dtype, adds: bool, splits: int
) -> tuple[int, Target, Target]:
    """How dk and dv are stored, and where to; ``dims``: columns that the kernels write."""
    fits = all(g.shape[2] != dim or fits_tensor_map(g) for g, dim in zip(grads, dims, strict=True))
    if splits == 1 and not adds and fits and grads[0].dtype == grads[1].dtype in (dtype, torch.float32):
        wide = (Target() if g.shape[2] == d else Target(d, g.dtype) for g, d in zip(grads, dims, strict=True))
        return STORE_FLOAT if grads[0].dtype == torch.float32 else STORE_HALF, *wide
    return ADD_FLOAT, *(_sum_target(g, dim, adds) for g, dim in zip(grads, dims, strict=True))


def _sum_target(grad: Layout, columns: int, adds: bool) -> Target:
    """Target of fp32 sums: the gradient itself if it can hold them, else a zeroed buffer."""
    if grad.shape[2] == columns and grad.dtype == torch.float32 and fits_tensor_map(grad):
        return Target(is_zeroed=not adds)
    return Target(columns, is_zeroed=True, is_added=adds)
