"""Router losses of experts for a sharded batch: the balance over the tokens of all ranks.

The loss that transformers adds for mixtures of experts (``load_balancing_loss_func``; Switch Transformer, equations 4
to 6) is a product of two sums over tokens, so no mean of ranks' losses is that of the batch. Models call it by its name
in their module; there it is wrapped, once a sharded batch meets the model, and adds up both sums over the ranks.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_magi.runtime.no_compile import outside_graphs

if TYPE_CHECKING:
    from megatron_magi.hf.shard import Shard

NAME = "load_balancing_loss_func"
"""What transformers calls the function, in each model's module."""

_COMMON = "transformers.models.mixtral.modeling_mixtral"
"""Whose function is taken by code for all models (TRL's)."""

_WRAPPED = "_megatron_magi_balance"


def wrap_balance(modules: Iterable[torch.nn.Module]) -> bool:
    """Wraps the function where code of these modules looks it up. Idempotent.

    Returns:
        Whether there is one that is known here.
    """
    is_known = False
    for module in modules:
        if hasattr(getattr(module, "config", None), "output_router_logits"):
            _wrap_in(vars(importlib.import_module(_COMMON)))
        forwards = [vars(one)["forward"] for one in type(module).__mro__ if "forward" in vars(one)]
        for forward in forwards:
            is_known |= _wrap_in(inspect.unwrap(forward).__globals__)
    return is_known


def _wrap_in(namespace: dict[str, Any]) -> bool:
    """Whether a function that is known here is in the namespace, where it is wrapped now."""
    function = namespace.get(NAME)
    if function is not None and not hasattr(function, _WRAPPED):
        function = namespace[NAME] = _wrapped(function)
    return getattr(function, _WRAPPED, False)


def _wrapped(original: Callable) -> Callable:
    is_known = _is_as_here(original)

    @functools.wraps(original)
    def balance(*args: Any, **kwargs: Any) -> Any:
        shard = next((x.magi_shard for x in (*args, *kwargs.values()) if hasattr(x, "magi_shard")), None)
        if shard is None:
            return original(*args, **kwargs)
        if not is_known:
            raise ValueError(
                f"output_router_logits: {original.__module__} has a router loss of its own, which is not known for a "
                "sharded batch"
            )
        given = inspect.signature(original).bind(*args, **kwargs)
        given.apply_defaults()
        logits, num_experts, top_k, _ = given.arguments.values()
        return _of_shard(logits, num_experts, top_k, shard) if isinstance(logits, tuple) else 0

    setattr(balance, _WRAPPED, is_known)
    return balance


class _Sums(NamedTuple):
    """Over layers and tokens: how often each expert was chosen, ``[num_experts]``, its probability, and tokens."""

    chosen: Tensor
    probs: Tensor
    tokens: Tensor

    @classmethod
    def of(cls, logits: tuple[Tensor, ...], num_experts: int, top_k: int, weights: Tensor) -> _Sums:
        """Of ``logits`` ``[..., num_experts]`` of each layer's rows; ``weights`` fp32 ``[num_rows]``, 0 for padding."""
        device = logits[0].device
        weights = weights.to(device)
        chosen, probs = (torch.zeros(num_experts, dtype=torch.float64, device=device) for _ in range(2))
        for layer in logits:
            of_rows = torch.softmax(layer.to(device).flatten(0, -2), dim=-1)
            experts = of_rows.topk(top_k, dim=-1).indices.flatten()
            chosen = chosen.index_add(0, experts, weights.repeat_interleave(top_k).double())
            probs = probs + (of_rows.float() * weights[:, None]).sum(0)
        return cls(chosen, probs, len(logits) * weights.sum(dtype=torch.float64))

    def loss(self, probs: Tensor) -> Tensor:
        """fp32, of the share that each expert was chosen with, times ``probs``."""
        return (len(probs) * (self.chosen * probs).sum() / self.tokens**2).float()


@outside_graphs
def _of_shard(logits: tuple[Tensor, ...], num_experts: int, top_k: int, shard: Shard) -> Tensor:
    """The batch's loss; its gradient is that by this rank's rows, times the number of ranks. Collective.

    As losses of ranks are averaged, or summed where the batch came with ``num_items_in_batch``: then divided by their
    number.
    """
    own = _Sums.of(logits, num_experts, top_k, shard.weights(logits[0].device))
    sums, num_ranks = own, 1 if shard.group is None else shard.group.size()
    if num_ranks > 1:
        joined = torch.cat([own.chosen, own.probs.detach(), own.tokens[None]])
        dist.all_reduce(joined, group=shard.group)
        sums = _Sums(joined[:num_experts], joined[num_experts:-1], joined[-1])
    by_rows = sums.loss(own.probs)
    shard.router_loss = sums.loss(sums.probs.detach()) + num_ranks * (by_rows - by_rows.detach())
    return shard.router_loss / (num_ranks if shard.is_summed else 1)


def _is_as_here(function: Callable) -> bool:
    """Whether a function computes for some numbers what is computed here."""
    draw = torch.Generator("cpu").manual_seed(0)
    logits = tuple(torch.randn(2, 9, 5, generator=draw, device="cpu", dtype=torch.float32))
    for weights in (torch.ones(9, device="cpu"), torch.arange(9, device="cpu").remainder(3).clamp(max=1).float()):
        sums = _Sums.of(logits, 5, 2, weights)
        padding = None if weights.all() else weights.view(3, 3)
        try:
            is_equal = torch.allclose(function(logits, 5, 2, padding), sums.loss(sums.probs), rtol=1e-5)
        except (TypeError, ValueError, RuntimeError, IndexError):
            return False
        if not is_equal:
            return False
    return list(inspect.signature(function).parameters) == ["gate_logits", "num_experts", "top_k", "attention_mask"]
