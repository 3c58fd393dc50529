"""Batches and lengths of packed sequences."""

from __future__ import annotations

import torch

from megatron_magi.mask.documents import int_at_least


def compute_pad_size(total_seqlen_q: int, cp_size: int, chunk_size: int) -> int:
    """Tokens that fill a sequence up to a multiple of ``chunk_size * cp_size``.

    A key computes its own padding (``key.pad_size``); this is for code that wants to know it before.

    Raises:
        ValueError: ``cp_size`` or ``chunk_size`` is not positive, or a number is no integer.
    """
    cp_size, chunk_size = int_at_least(cp_size, "cp_size", 1), int_at_least(chunk_size, "chunk_size", 1)
    return -int_at_least(total_seqlen_q, "total_seqlen_q", 0) % (cp_size * chunk_size)


def squash_batch_dim(x: torch.Tensor) -> torch.Tensor:
    """``[batch_size, seqlen, ...]`` to ``[batch_size * seqlen, ...]``: sequences one after the other."""
    return x.flatten(0, 1)


def infer_varlen_mask_from_batch(
    batch_size: int, seq_len: int, device: torch.device | str = "cuda"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cumulative lengths of equally long sequences, for queries and keys, int32 ``[batch_size + 1]`` each."""
    cu_seqlens = torch.arange(batch_size + 1, dtype=torch.int32, device=device) * seq_len
    return cu_seqlens, cu_seqlens


full_attention_to_varlen_attention = infer_varlen_mask_from_batch
"""Older name of `infer_varlen_mask_from_batch`."""
