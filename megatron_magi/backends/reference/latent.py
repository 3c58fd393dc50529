"""Reference attention over lists of latent keys, whose first elements are the values."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_magi.backends.reference import lists
from megatron_magi.operands.merge import row_products
from megatron_magi.operands.passes import BackwardInputs
from megatron_magi.operands.sparse_pattern import SparsePattern

forward = lists.forward
row_delta = row_products


def why_not(device: torch.device, dtype: torch.dtype, dims: tuple[int, int]) -> None:
    """It takes all tensors."""


def backward(
    inputs: BackwardInputs, pattern: SparsePattern, softmax_scale: float, deterministic: bool
) -> tuple[Tensor, Tensor]:
    """See `megatron_magi.backends.base.Latent.backward`."""
    del deterministic
    dq, dk, dv = lists.backward(inputs, pattern, softmax_scale)
    dk[..., : dv.shape[2]] += dv
    return dq, dk.to(inputs.k.dtype)
