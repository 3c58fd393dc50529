"""Plans by content, so that layers and repeated batches share one."""

from __future__ import annotations

from collections import OrderedDict

from megatron_magi.config import MagiConfig
from megatron_magi.mask import AttnMask
from megatron_magi.plan.plan import Plan, make_plan
from megatron_magi.plan.types import Dispatch


class PlanCache:
    """The ``max_size`` most recently used plans. Owned by whoever plans; there is no global one.

    Raises:
        ValueError: ``max_size`` is below 1.
    """

    def __init__(self, max_size: int = 64) -> None:
        if max_size < 1:
            raise ValueError(f"max_size: expected at least 1, got {max_size}")
        self._max_size = max_size
        self._plans: OrderedDict[tuple, Plan] = OrderedDict()

    def __len__(self) -> int:
        return len(self._plans)

    def get(self, mask: AttnMask, config: MagiConfig, cp_size: int, dispatch: Dispatch | None = None) -> Plan:
        """The plan of these arguments, made if it is not there (see `make_plan`)."""
        key = (mask, config, cp_size, None if dispatch is None else dispatch.digest)
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = make_plan(mask, config, cp_size, dispatch)
            if len(self._plans) > self._max_size:
                self._plans.popitem(last=False)
        else:
            self._plans.move_to_end(key)
        return plan
