"""Batches and lengths of packed sequences."""

from __future__ import annotations

import torch

from megatron_magi.api.arguments import tensor
from megatron_magi.checks import MAX_TOKENS, int_at_least


def squash_batch_dim(x: torch.Tensor) -> torch.Tensor:
    """``[batch_size, seqlen, ...]`` to ``[batch_size * seqlen, ...]``: sequences one after the other.

    Raises:
        ValueError: ``x`` is no tensor of two or more dimensions.
    """
    tensor(x, "x", "[batch_size, seqlen, ...]")
    if x.dim() < 2:
        raise ValueError(f"x: expected [batch_size, seqlen, ...], got shape {list(x.shape)}")
    return x.flatten(0, 1)


def infer_varlen_mask_from_batch(
    batch_size: int, seq_len: int, device: torch.device | str | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cumulative lengths of equally long sequences, for queries and keys, int32 ``[batch_size + 1]`` each, on the GPU
    if there is one and no device is given.

    Raises:
        ValueError: a number is no integer or negative, the tokens are too many for int32, or there is no
            such device.
    """
    batch_size, seq_len = int_at_least(batch_size, "batch_size", 0), int_at_least(seq_len, "seq_len", 0)
    if batch_size * seq_len > MAX_TOKENS:
        raise ValueError(f"batch_size: {batch_size} sequences of {seq_len} tokens are more than {MAX_TOKENS} tokens")
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        cu_seqlens = torch.arange(batch_size + 1, dtype=torch.int32, device=device) * seq_len
    except (RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"device: {str(error).splitlines()[0]}") from None
    return cu_seqlens, cu_seqlens


full_attention_to_varlen_attention = infer_varlen_mask_from_batch
"""Older name of `infer_varlen_mask_from_batch`."""
