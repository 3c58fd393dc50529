"""Steps of ranks in profile mode, which a process takes from its environment when it imports the package."""

from __future__ import annotations

import os
from typing import Any


def steps(
    rank: int,
    num_ranks: int,
    num_tokens: int,
    num_steps: int,
    heads: tuple[int, int, int],
    head_dim: int,
    **options: Any,
) -> tuple[list[tuple], int]:
    """Forwards and backwards of a rank, the first of which is not recorded: the recorded rows, and the rank's area."""
    os.environ["MAGI_ATTENTION_PROFILE_MODE"] = "1"
    import torch
    import torch.distributed as dist

    from megatron_magi import make_plan, profiling
    from megatron_magi.attention import distributed_attention
    from megatron_magi.mask.builders import causal

    plan = make_plan(causal(num_tokens), cp_size=num_ranks).for_rank(rank)
    q, k, v = (torch.randn(plan.num_rows, n, head_dim, **options, requires_grad=True) for n in heads)
    for i in range(1 + num_steps):
        if i == 1:
            profiling.reset()
        distributed_attention(q, k, v, plan, dist.group.WORLD)[0].sum().backward()
    return [tuple(row) for row in profiling.rows()], plan.area
