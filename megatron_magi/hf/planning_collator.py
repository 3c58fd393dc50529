"""Planning in data loader workers, for models of transformers over several ranks: a collator around another."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import get_worker_info

from megatron_magi.api.make_key import planned_config
from megatron_magi.api.runtime import request_of
from megatron_magi.attention import AttnShape, PreparedBatch, prepare_batch
from megatron_magi.config import MagiConfig
from megatron_magi.hf.shard import PLANS, heads_of, masks_of
from megatron_magi.plan import Plan, make_plan, who_computes


class PlannedBatch:
    """The plans of a batch, for the ranks of a context-parallel group; made in a worker."""

    def __init__(self, plans: dict[Hashable, Plan], prepared: PreparedBatch) -> None:
        self._plans, self._prepared = plans, prepared
        self._device: torch.device | None = None  # where the tables are

    def to(self, *_device: object, **_options: object) -> PlannedBatch:
        """Itself, as loops that move all of a batch call it; `at_hand` copies to the device."""
        return self

    def pin_memory(self) -> PlannedBatch:
        """Called by data loaders that pin what workers send."""
        return PlannedBatch(self._plans, self._prepared.pin_memory())

    def at_hand(self, device: torch.device) -> Mapping[Hashable, Plan]:
        """The plans by what they were made of (`megatron_magi.api.runtime.request_of`), their tables on ``device``.

        Tables are copied once, however often a batch is used.
        """
        if device != self._device:
            self._prepared.to(device)
            for plan, of_rank in zip(self._plans.values(), self._prepared.plans.values(), strict=True):
                plan.take_rank_plan(of_rank)
            self._device = device
        return self._plans


@dataclass
class PlanAhead:
    """What batches are planned for; set when the model is known, which is after loaders are made.

    Attributes:
        model_config: the model's configuration.
        config: of keys, as they have it.
        cp_size, cp_rank: of the context-parallel group.
        shape: of the attention.
    """

    model_config: Any = None
    config: MagiConfig | None = None
    cp_size: int = 1
    cp_rank: int = 0
    shape: AttnShape | None = None

    def set_model(
        self, model: torch.nn.Module, dtype: torch.dtype, config: MagiConfig | None, cp_size: int, cp_rank: int
    ) -> None:
        """Sets all, in the process that trains: workers must not ask for GPUs.

        ``dtype``: of queries and keys.
        """
        heads = heads_of(model.config)
        self.config = planned_config(config, heads)
        self.model_config, self.cp_size, self.cp_rank = model.config, cp_size, cp_rank
        has_gpu = torch.cuda.is_available()
        device = torch.device("cuda", torch.cuda.current_device()) if has_gpu else torch.device("cpu")
        self.shape = AttnShape(*heads, heads[-1], dtype).kernels_for(device, self.config.attend.impl)

    def plan(self, batch: Mapping[str, Any]) -> PlannedBatch:
        """Plans all masks of a batch.

        Raises:
            ValueError: it cannot be sharded.
        """
        config, shape = self.config, self.shape
        assert config is not None and shape is not None
        first, *others = masks_of(self.model_config, batch)
        compute = who_computes(config.dispatch, is_given=False)
        plans: dict[Hashable, Plan] = {}
        dispatch = None
        for mask in (first, *others):
            plan = make_plan(mask, config, self.cp_size, dispatch, compute)
            plans[request_of(mask, config, self.cp_size, dispatch, compute)] = plan
            dispatch = plans[next(iter(plans))].dispatch
        rank_plans = {i: plan.for_rank(self.cp_rank) for i, plan in enumerate(plans.values())}
        return PlannedBatch(plans, prepare_batch(rank_plans, shape, config))


class PlanningCollator:
    """A collator that adds the plans of its batches where a worker runs it; where none does, the step plans.

    Args:
        collate: the collator of the user, or of the Trainer.
        ahead: what to plan for.
    """

    def __init__(self, collate: Callable[[Any], Any], ahead: PlanAhead) -> None:
        self.collate, self.ahead = collate, ahead

    def __call__(self, samples: Any) -> Any:
        """The batch of ``collate``, with its plans under `PLANS`."""
        batch = self.collate(samples)
        is_planned = get_worker_info() is not None and self.ahead.config is not None
        if is_planned and isinstance(batch, MutableMapping) and isinstance(batch.get("input_ids"), torch.Tensor):
            with suppress(ValueError):  # the step, which plans it then, raises this on all ranks
                batch[PLANS] = self.ahead.plan(batch)
        return batch
