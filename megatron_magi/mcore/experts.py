"""The router of experts with padding: places where megatron-core counts rows wrongly.

Dispatch may leave padding at the end of some ranks' shards, which Megatron's own trainer never has.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe import router

from megatron_magi.mcore import seams

_COUNTS = "core.transformer.moe.router:get_tokens_per_expert_and_token_count"
_BIAS = "core.transformer.moe.router:TopKRouter._apply_expert_bias"
_AUX_LOSS = "core.transformer.moe.router:TopKRouter.attach_and_log_load_balancing_loss"
_Z_LOSS = "core.transformer.moe.router:TopKRouter.apply_z_loss"


def install() -> None:
    """Makes Megatron's router leave padding out of its counts. Idempotent; nothing changes without padding."""
    z_loss = apply_z_loss_by_all_tokens if seams.needed(_AUX_LOSS) else apply_z_loss
    repaired = {_COUNTS: count_tokens, _BIAS: apply_expert_bias, _AUX_LOSS: attach_aux_loss, _Z_LOSS: z_loss}
    for target, function in repaired.items():
        if seams.needed(target):
            seams.put(target, function)


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


def attach_aux_loss(
    self: router.TopKRouter,
    activation: torch.Tensor,
    *args: Any,
    valid_token_count: int | torch.Tensor | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """Attaches a load balancing loss, whose weight per token is that of all ranks' tokens.

    Before 0.19 Megatron (router.py:491) takes this rank's tokens alone, but divides by those of all ranks: the loss
    then depends on the number of tensor- and context-parallel ranks. By its own caller the count is a keyword.

    Args:
        self: the router.
        activation: that the loss is attached to, ``[num_tokens, ...]``.
        *args, **kwargs: passed on.
        valid_token_count: without padding; the length of ``activation`` when None.
    """
    if self.calculate_per_token_loss:
        count = activation.shape[0] if valid_token_count is None else valid_token_count
        valid_token_count = count * self.tp_cp_group.size()
    return seams.original(_AUX_LOSS)(self, activation, *args, valid_token_count=valid_token_count, **kwargs)


def apply_z_loss_by_all_tokens(
    self: router.TopKRouter, logits: torch.Tensor, padding_mask: torch.Tensor | None = None
) -> torch.Tensor:
    """`apply_z_loss` also without padding, for releases that weigh it as `attach_aux_loss` says."""
    if padding_mask is None and self.calculate_per_token_loss:
        padding_mask = torch.zeros(logits.shape[0], dtype=torch.bool, device=logits.device)
    return apply_z_loss(self, logits, padding_mask)


def apply_z_loss(
    self: router.TopKRouter, logits: torch.Tensor, padding_mask: torch.Tensor | None = None
) -> torch.Tensor:
    """Logits with the z-loss attached, a mean over the tokens of all ranks.

    Megatron (router.py:639) makes a mean of each rank's mean, which padding makes another number: of the loss that is
    printed, and unless losses are per token also of its gradient.

    Args:
        self: the router.
        logits: ``[num_tokens, num_experts]``.
        padding_mask: ``[num_tokens]``, True on padding.
    """
    config = self.config
    is_applied = config.moe_z_loss_coeff is not None and self.training and torch.is_grad_enabled()
    if padding_mask is None or not is_applied:
        return seams.original(_Z_LOSS)(self, logits, padding_mask)
    num_tokens = (~padding_mask).sum()
    dist.all_reduce(num_tokens, group=self.tp_cp_group)
    squares = torch.logsumexp(logits, dim=-1).square()
    part = torch.where(padding_mask, 0.0, squares).sum() / num_tokens.clamp(min=1)
    # Per token, Megatron divides gradients by the number of tokens later.
    weight = config.moe_z_loss_coeff * (num_tokens if self.calculate_per_token_loss else 1)
    logits = router.MoEAuxLossAutoScaler.apply(logits, part * weight)
    num_depths = config.mtp_num_layers or 0
    is_repeated = self.is_mtp_layer and config.mtp_use_repeated_layer and num_depths
    # The tracker takes the mean over ranks. A layer of several depths is logged once for each.
    logged = part * self.tp_cp_group.size() / (num_depths if is_repeated else 1)
    number = self.layer_number + (config.num_layers if self.is_mtp_layer else 0)
    router.get_moe_metrics_tracker().record(
        "z_loss", logged, number, config.num_layers + num_depths, avg_group=self.tp_dp_cp_group
    )
    return logits
