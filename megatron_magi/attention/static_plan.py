"""Plans whose tables stay where they are, for attention that a CUDA graph has captured."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import replace

import torch

from megatron_magi.ops.hopper import static_plan as hopper_static
from megatron_magi.ops.hopper.static_plan import StaticMask, StaticMemory
from megatron_magi.plan import RankPlan


class StaticPlans:
    """Plans of a rank by name, such as one for each kind of layer, in device memory that stays.

    `distributed_attention` takes them as other plans, on one rank and with the Hopper kernels. A CUDA graph that has
    captured such calls is replayed for another microbatch after `load`. Kernels and tile shapes are chosen for the
    first plans; other masks get the same.

    Args:
        plans: of the first microbatch; on one rank.
        device: a Hopper GPU.
        headroom: how many times as long as the first tables those of other masks may be, at least 1.

    Attributes:
        plans: to be attended by, in eager mode or captured; run each call once before it is captured.
        facts: by plan and stage, what kernels and tile shapes were chosen by: `prepare_batch` of later microbatches
            takes them, so that all tables are there when `load` looks for them.

    Raises:
        ValueError: an argument, named in the message, is not as above.
    """

    def __init__(
        self, plans: Mapping[Hashable, RankPlan], device: torch.device | str, *, headroom: float = 2.0
    ) -> None:
        if not headroom >= 1:
            raise ValueError(f"headroom: expected at least 1, got {headroom}")
        for name, plan in plans.items():
            if plan.cp_size > 1:
                raise ValueError(f"plans: {name!r} is for {plan.cp_size} ranks, captured plans are for one")
        device = torch.device(device)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        memory = StaticMemory(device)
        self._masks = {
            name: StaticMask(plan.bands[0], plan.num_rows, plan.num_rows, device, memory, headroom)
            for name, plan in plans.items()
        }
        self.plans: dict[Hashable, RankPlan] = {
            name: replace(plan, bands=(self._masks[name].as_bands(),), runtime={}) for name, plan in plans.items()
        }

        self.facts = {name: (mask.facts,) for name, mask in self._masks.items()}

    def load(self, plans: Mapping[Hashable, RankPlan]) -> str | None:
        """Makes the static plans those of another microbatch, for what is queued on the current stream from now on.

        Copies on the device of tables that are there, if the microbatch was prepared (`PreparedBatch.to`); the host
        does not wait. Call it on the stream on which the graph runs.

        Args:
            plans: by the same names.

        Returns:
            None; or why they do not fit, a sentence: then nothing has changed, and the step is to run in eager mode.

        Raises:
            ValueError: names are others.
        """
        if plans.keys() != self.plans.keys():
            raise ValueError(f"plans: expected {', '.join(map(repr, self.plans))}, got {', '.join(map(repr, plans))}")
        for name, plan in plans.items():
            static = self.plans[name]
            if (plan.num_rows, plan.cp_size) != (static.num_rows, static.cp_size):
                return f"it has {plan.num_rows} rows on {plan.cp_size} ranks, not {static.num_rows} on {static.cp_size}"
        return hopper_static.load(list(self._masks.values()), [plans[name].bands[0] for name in self._masks])
