"""A mask as a bool matrix: this defines what a mask means. For tests, pictures and small inputs."""

from __future__ import annotations

import numpy as np

from megatron_magi.mask.slices import AttnMask


def dense_mask(mask: AttnMask) -> np.ndarray:
    """Returns the mask as bool ``[total_seqlen_q, total_seqlen_k]``, True where the query sees the key."""
    return dense_bands(mask.bands_untightened, mask.total_seqlen_q, mask.total_seqlen_k)


def dense_bands(bands: np.ndarray, seqlen_q: int, seqlen_k: int) -> np.ndarray:
    """bool ``[seqlen_q, seqlen_k]`` of a table of bands, int64 ``[n, 6]``."""
    out = np.zeros((seqlen_q, seqlen_k), dtype=bool)
    for q0, q1, k0, k1, d_lo, d_hi in bands.tolist():
        q = np.arange(q0, q1)[:, None]
        k = np.arange(k0, k1)[None, :]
        diagonal = k - q
        out[q0:q1, k0:k1] |= (diagonal >= d_lo) & (diagonal < d_hi)
    return out
