"""The router of experts with padding: three places where megatron-core 0.19.2 counts padded rows wrongly.

Dispatch may leave padding at the end of some ranks' shards, which Megatron's own trainer never has.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core.transformer.moe import router

from megatron_magi.mcore import seams

_COUNTS = "core.transformer.moe.router:get_tokens_per_expert_and_token_count"
_BIAS = "core.transformer.moe.router:TopKRouter._apply_expert_bias"


def install() -> None:
    """Makes Megatron's router leave padding out of its counts. Idempotent; nothing changes without padding."""
    seams.put(_COUNTS, count_tokens)
    seams.put(_BIAS, apply_expert_bias)


def count_tokens(
    routing_map: torch.Tensor, reduce_group: dist.ProcessGroup, topk: int | None = None, with_padding_mask: bool = False
) -> tuple:
    """Tokens of each expert, tokens of this rank, and tokens of all ranks.

    Megatron scales a load balancing loss per token by this rank's count times the number of ranks. With a
    padding mask (moe_utils.py:271) its count is by mistake that of all ranks, as the reduction is in place. Here
    it is the mean over ranks: ranks that hold different numbers of tokens have to scale alike.

    Args:
        routing_map: ``[num_tokens, num_experts]``, all False on padding.
        reduce_group: ranks over which tokens are counted.
        topk: experts a token.
        with_padding_mask: there may be padding, on this rank or another.
    """
    counts = seams.original(_COUNTS)(routing_map, reduce_group, topk=topk, with_padding_mask=with_padding_mask)
    if not with_padding_mask:
        return counts
    tokens_per_expert, _, num_tokens = counts
    return tokens_per_expert, num_tokens / reduce_group.size(), num_tokens


def apply_expert_bias(
    self: router.TopKRouter, routing_map: torch.Tensor, padding_mask: torch.Tensor | None = None
) -> None:
    """Counts the tokens of each expert for the update of its bias.

    Megatron (router.py:738) meets ``[num_tokens, num_experts]`` with a mask ``[num_tokens]``.
    """
    seams.original(_BIAS)(self, routing_map, padding_mask if padding_mask is None else padding_mask.unsqueeze(-1))
