"""Several masks over one dispatch, for layers with different masks."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable

from megatron_magi.config import MagiConfig
from megatron_magi.mask import AttnMask
from megatron_magi.plan.plan import Plan, make_plan, who_computes
from megatron_magi.plan.types import Dispatch, RankPlan


class PlanSet[Key: Hashable]:
    """The plans of one microbatch: one for each mask, all with the dispatch of the first.

    Args:
        make_mask: the mask of a key.
        keys: masks that are made now; plans are made on first use, except that of the first key,
            which decides the dispatch. Masks of other keys are made on demand.
        config: how to plan.
        cp_rank: this rank.
        cp_size: number of ranks.
        dispatch: of tokens whose owners are given (`given_dispatch`); that of the first plan when None. Where queries
            are computed is chosen for each mask (`DispatchConfig.queries`).
    """

    def __init__(
        self,
        make_mask: Callable[[Key], AttnMask],
        keys: Iterable[Key],
        config: MagiConfig,
        cp_rank: int,
        cp_size: int,
        dispatch: Dispatch | None = None,
    ) -> None:
        self._make_mask = make_mask
        self._masks = {key: make_mask(key) for key in keys}
        self._config = config
        self._cp_rank = cp_rank
        self._primary = next(iter(self._masks))
        primary = self._masks[self._primary]
        self._compute = who_computes(config.dispatch, dispatch is not None)
        self._plans: dict[Key, Plan] = {self._primary: make_plan(primary, config, cp_size, dispatch, self._compute)}

    @property
    def config(self) -> MagiConfig:
        """How the plans were made and are executed."""
        return self._config

    @property
    def plan(self) -> Plan:
        """The plan that decided the dispatch."""
        return self._plans[self._primary]

    @property
    def dispatch(self) -> Dispatch:
        """The dispatch that all plans share."""
        return self.plan.dispatch

    @property
    def fingerprint(self) -> int:
        """63 bits that ranks compare: the first plan and all masks made so far."""
        value = self.plan.plan_hash
        for mask in list(self._masks.values())[1:]:
            value = (value * 31 + int.from_bytes(mask.digest[:7])) % (1 << 63)
        return value

    def of(self, key: Key) -> RankPlan:
        """This rank's plan for the mask of ``key``; made on first use."""
        if key not in self._plans:
            if key not in self._masks:
                self._masks[key] = self._make_mask(key)
            self._plans[key] = make_plan(
                self._masks[key], self._config, self.dispatch.cp_size, self.dispatch, self._compute
            )
        return self._plans[key].for_rank(self._cp_rank)
