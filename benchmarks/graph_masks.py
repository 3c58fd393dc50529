"""Masks of microbatches for `run_gpu_graphs.py`, as text for ``--magi-mask``."""

from __future__ import annotations

from megatron_magi.mask import AttnMask, builders
from megatron_magi.mask.microbatch import Microbatch

_EVERY = 23
"""So rare are stripes."""


def documents_rarely_stripes(batch: Microbatch) -> AttnMask:
    """Causal documents; in few microbatches stripes of keys, whose tables are many times as long."""
    total = batch.batch_size * batch.seqlen
    if int(batch.tokens.sum()) % _EVERY:
        return builders.varlen(batch.cu_seqlens, causal=True)
    return AttnMask([(0, total, at, at + 10, 0) for at in range(0, total - 10, max(total // 100, 20))], total)


def plan_as_captured(_workdir: str) -> None:
    """Has a trainer of this process plan as for a graph: one remote stage, and no single launch."""
    from megatron_magi.mcore import settings

    settings.captures = lambda _args: True
