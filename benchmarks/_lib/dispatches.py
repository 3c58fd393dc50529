"""Dispatches that are fixed, and counts of any."""

from __future__ import annotations

import numpy as np

from megatron_magi.mask import AttnMask
from megatron_magi.plan import Dispatch, cpp_solver, dispatch_from_chunks
from megatron_magi.plan.chunks import ChunkedMask
from megatron_magi.plan.counts import Counts, count


def zigzag(total_seqlen: int, cp_size: int) -> Dispatch:
    """Two chunks a rank, mirrored: what Megatron and TransformerEngine do for one causal document."""
    bounds = np.linspace(0, total_seqlen, 2 * cp_size + 1).astype(np.int64)
    rank = np.concatenate([np.arange(cp_size), np.arange(cp_size)[::-1]])
    return dispatch_from_chunks(total_seqlen, bounds, rank, cp_size)


def contiguous(total_seqlen: int, cp_size: int) -> Dispatch:
    """One piece a rank."""
    bounds = np.linspace(0, total_seqlen, cp_size + 1).astype(np.int64)
    return dispatch_from_chunks(total_seqlen, bounds, np.arange(cp_size), cp_size)


def count_dispatch(mask: AttnMask, dispatch: Dispatch, ranks_per_node: int) -> Counts:
    """Counts of a dispatch."""
    counts = cpp_solver.count if cpp_solver.available() else count
    return counts(ChunkedMask(mask, dispatch.chunk_bounds, dispatch.cp_size), dispatch.chunk_rank, ranks_per_node)
