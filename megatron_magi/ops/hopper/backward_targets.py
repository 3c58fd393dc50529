"""Where the backward kernels write gradients: to these themselves where they can, else to memory that becomes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_magi.cuda.driver import fits_tensor_map
from megatron_magi.cuda.layout import Layout
from megatron_magi.ops.operands import Gradients

STORE_HALF, STORE_FLOAT, ADD_FLOAT, ADD_HALF = range(4)
"""How kernels write gradients: Store of csrc/attention/sm90."""


class Target(NamedTuple):
    """Memory that a gradient is written to.

    Attributes:
        columns: of memory of its own, which becomes the gradient; 0: the gradient itself.
        dtype: of that memory.
        is_zeroed: kernels add to it, and it begins with zeros.
        is_added: what is in memory of its own is added to the gradient; else copied.
    """

    columns: int = 0
    dtype: torch.dtype = torch.float32
    is_zeroed: bool = False
    is_added: bool = False

    def layout(self, grad: Layout) -> Layout:
        """Of `buffer`."""
        return grad.new_empty((*grad.shape[:2], self.columns), self.dtype) if self.columns else grad

    def buffer(self, grad: Tensor) -> Tensor:
        """What the kernels write to."""
        if self.columns:
            grad = torch.empty((*grad.shape[:2], self.columns), dtype=self.dtype, device=grad.device)
        return grad.zero_() if self.is_zeroed else grad


class Targets(NamedTuple):
    """The memory that the gradients of a pass are written to.

    Attributes:
        dq, dk, dv: of each.
        store_dq: how dq is written.
        store_keys: how dk and dv are.
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
            splits: kernels that share the query heads of a group, each of which adds its dk and dv where several do.
        """
        store_dq, dq = _query_target(grads.dq, dims[0], dtype, grads.accumulate_dq)
        store_keys, dk, dv = _key_targets((grads.dk, grads.dv), dims, dtype, grads.accumulate_keys, splits)
        return cls(dq, dk, dv, store_dq, store_keys)

    @property
    def are_gradients(self) -> bool:
        """Whether the kernels write the gradients themselves, and nothing is to be done before or after."""
        return not any(target.columns or target.is_zeroed for target in self[:3])

    def room_in_dq(self, grads: Gradients) -> int | None:
        """Bytes of what dq is written to, if other things can lie there until then."""
        dq = self.dq.layout(grads.dq)
        is_free = self.store_dq in (STORE_HALF, STORE_FLOAT) and not grads.accumulate_dq
        is_plain = dq.is_contiguous() and dq.data_ptr() % 16 == 0
        return dq.numel() * dq.element_size() if is_free and is_plain else None

    def layouts(self, grads: Gradients) -> list[Layout]:
        """Of `buffers`."""
        return [target.layout(grad) for target, grad in zip(self[:3], grads[:3], strict=True)]

    def buffers(self, grads: Gradients) -> list[Tensor]:
        """What the kernels write dq, dk and dv to."""
        return [target.buffer(grad) for target, grad in zip(self[:3], grads[:3], strict=True)]

    def finish(self, grads: Gradients, buffers: Sequence[Tensor], has_dq: bool = True) -> None:
        """Copies or adds what the kernels have written; without ``has_dq`` dk and dv only."""
        for target, buffer, grad in zip(self[:3], buffers, grads[:3], strict=True):
            if target.columns and (has_dq or grad is not grads.dq):
                computed = buffer[..., : grad.shape[2]]
                grad.copy_(grad + computed if target.is_added else computed)


def _query_target(grad: Layout, columns: int, dtype: torch.dtype, adds: bool) -> tuple[int, Target]:
    """How dq is written, and where to; ``columns``: of what the kernels write."""
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
    """How dk and dv are written, and where to; ``dims``: columns of what the kernels write."""
    fits = all(g.shape[2] != dim or fits_tensor_map(g) for g, dim in zip(grads, dims, strict=True))
    if splits == 1 and not adds and fits and grads[0].dtype == grads[1].dtype in (dtype, torch.float32):
        wide = (Target() if g.shape[2] == d else Target(d, g.dtype) for g, d in zip(grads, dims, strict=True))
        return STORE_FLOAT if grads[0].dtype == torch.float32 else STORE_HALF, *wide
    return ADD_FLOAT, *(_sum_target(g, dim, adds) for g, dim in zip(grads, dims, strict=True))


def _sum_target(grad: Layout, columns: int, adds: bool) -> Target:
    """Where fp32 sums go: the gradient itself if it can hold them, else a zeroed buffer."""
    if grad.shape[2] == columns and grad.dtype == torch.float32 and fits_tensor_map(grad):
        return Target(is_zeroed=not adds)
    return Target(columns, is_zeroed=True, is_added=adds)
