"""A mask at some of its pairs, without a matrix of all of them."""

from __future__ import annotations

import numpy as np

from megatron_magi.mask import AttnMask
from megatron_magi.mask import bands as bd


def sampled_mask(mask: AttnMask, queries: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Which of the given keys the given queries see.

    Args:
        mask: of any size.
        queries, keys: int64 ``[m]`` and ``[n]``, ascending.

    Returns:
        bool ``[m, n]``.
    """
    seen = np.zeros((len(queries), len(keys)), dtype=bool)
    table = mask.bands
    rows = np.searchsorted(queries, table[:, (bd.Q0, bd.Q1)])
    columns = np.searchsorted(keys, table[:, (bd.K0, bd.K1)])
    for band, (r0, r1), (c0, c1) in zip(table, rows, columns, strict=True):
        diagonal = keys[None, c0:c1] - queries[r0:r1, None]
        seen[r0:r1, c0:c1] |= (diagonal >= band[bd.D_LO]) & (diagonal < band[bd.D_HI])
    return seen
