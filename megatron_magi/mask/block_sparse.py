"""Masks of blocks that are known on the host, as slices."""

from __future__ import annotations

from typing import Any

import numpy as np

from megatron_magi.checks import flag, int_at_least
from megatron_magi.mask.slices import AttnMask, MaskType, slice_table


def block_sparse(
    block_mask: Any,
    *,
    q_block_size: int,
    k_block_size: int,
    seqlen_q: int,
    seqlen_k: int | None = None,
    causal: bool = False,
) -> AttnMask:
    """Makes the mask in which blocks of queries see blocks of keys, for all heads, as `block_sparse_attention` does.

    Unlike lists on a device it can be planned, and so computed under context parallelism.

    Args:
        block_mask: bool ``[num_q_blocks, num_k_blocks]``, on the host.
        q_block_size, k_block_size: tokens of a block, at least 1; the last block may be short.
        seqlen_q, seqlen_k: tokens; ``seqlen_k`` is ``seqlen_q`` when None.
        causal: of its blocks, query i sees keys up to ``i + seqlen_k - seqlen_q``.

    Raises:
        ValueError: an argument, named in the message, is wrong; the mask is on a device.
    """
    seqlen_q = int_at_least(seqlen_q, "seqlen_q", 0)
    seqlen_k = seqlen_q if seqlen_k is None else int_at_least(seqlen_k, "seqlen_k", 0)
    q_block, k_block = int_at_least(q_block_size, "q_block_size", 1), int_at_least(k_block_size, "k_block_size", 1)
    if getattr(getattr(block_mask, "device", None), "type", "cpu") != "cpu":
        raise ValueError(
            f"block_mask: is on {block_mask.device}, but masks are planned on the host, under context parallelism too; "
            "give block_mask.cpu(), or on one device use block_sparse_attention, which reads it there"
        )
    blocks = np.asarray(block_mask)
    shape = (-(-seqlen_q // q_block), -(-seqlen_k // k_block))
    if blocks.dtype != np.bool_ or blocks.shape != shape:
        raise ValueError(f"block_mask: expected bool {list(shape)}, got {blocks.dtype} {list(blocks.shape)}")
    steps = np.diff(np.pad(blocks, ((0, 0), (1, 1))).astype(np.int8), axis=1)
    (row, first), (_, past) = np.nonzero(steps == 1), np.nonzero(steps == -1)
    q0, q1 = row * q_block, np.minimum((row + 1) * q_block, seqlen_q)
    k0, k1 = first * k_block, np.minimum(past * k_block, seqlen_k)
    if not flag(causal, "causal"):
        return AttnMask(slice_table(q0, q1, k0, k1, MaskType.FULL), seqlen_q, seqlen_k)
    ahead = seqlen_k - seqlen_q
    last = np.minimum(k1 - ahead, q1)  # queries from here on see all keys; those before see key by key more
    parts = [
        slice_table(np.maximum(q0, k0 - ahead), last, k0, np.minimum(k1, last + ahead), MaskType.CAUSAL),
        slice_table(np.maximum(q0, last), q1, k0, k1, MaskType.FULL),
    ]
    table = np.concatenate(parts)
    return AttnMask(table[(table[:, 0] < table[:, 1]) & (table[:, 2] < table[:, 3])], seqlen_q, seqlen_k)
