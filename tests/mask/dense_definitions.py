"""What the named masks mean, written out pair by pair: independent of slices and bands."""

import numpy as np

from megatron_magi.mask.dense import dense_bands


def document_pairs(seqlens_q, seqlens_k, sees):
    """bool ``[sum(seqlens_q), sum(seqlens_k)]``; ``sees(i, j, num_q, num_k)`` inside each document."""
    out = np.zeros((sum(seqlens_q), sum(seqlens_k)), dtype=bool)
    q0 = k0 = 0
    for num_q, num_k in zip(seqlens_q, seqlens_k, strict=True):
        for i in range(num_q):
            for j in range(num_k):
                out[q0 + i, k0 + j] = sees(i, j, num_q, num_k)
        q0, k0 = q0 + num_q, k0 + num_k
    return out


def sees_all(i, j, num_q, num_k):
    return True


def sees_causal(i, j, num_q, num_k):
    return j <= i + num_k - num_q


def sees_window(left, right, num_global):
    def sees(i, j, num_q, num_k):
        if left == right == -1:
            return True
        at = i + num_k - num_q
        if at < 0 or (right >= 0 and j > at + right):
            return False
        return left == -1 or j >= at - left or j < num_global

    return sees


def sees_blocks(block_size):
    def sees(i, j, num_q, num_k):
        return j // block_size <= i // block_size

    return sees


def count_cover(bands: np.ndarray, seqlen_q: int, seqlen_k: int) -> np.ndarray:
    """int64 ``[seqlen_q, seqlen_k]``: how many bands cover each pair."""
    out = np.zeros((seqlen_q, seqlen_k), dtype=np.int64)
    for i in range(len(bands)):
        out += dense_bands(bands[i : i + 1], seqlen_q, seqlen_k)
    return out
