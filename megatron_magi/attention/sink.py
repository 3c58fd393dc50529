"""The gradient of a sink over the ranks of a context-parallel group."""

from __future__ import annotations

import torch
import torch.distributed as dist

from megatron_magi.attention.call_cache import CachedCall


def reduce_dsink(dsink: torch.Tensor, call: CachedCall) -> torch.Tensor:
    """The gradient as ``comm.dsink_all_reduce`` asks for it: this rank's (``none``), the ranks' sum or their mean.

    A sink for each row (``ssh``) is this rank's alone, and its gradient is never reduced.

    Args:
        dsink: over this rank's rows (`megatron_magi.operands.merge.sink_gradient`). Changed where it is reduced.
    """
    op = call.config.comm.dsink_all_reduce
    if op == "none" or call.cp_size == 1 or call.sink_layout != "sh":
        return dsink
    dist.all_reduce(dsink, op=dist.ReduceOp.SUM, group=call.group)
    return dsink / call.cp_size if op == "avg" else dsink
