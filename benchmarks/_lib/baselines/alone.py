"""What communication is measured against: the attention of a rank over its keys, which are all there, in one launch."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
from torch import Tensor

from benchmarks._lib.baselines.base import Block
from benchmarks._lib.baselines.ulysses import Local
from megatron_magi.mask import bands as bd
from megatron_magi.plan import RankPlan


class Alone:
    """Own keys, and behind them those of all stages.

    Attributes:
        num_keys: of all stages.
    """

    def __init__(self, plan: RankPlan, impl: str = "auto") -> None:
        *firsts, self.num_keys = accumulate((plan.num_rows, *(t.num_recv for t in plan.transfers)), initial=0)
        bands = [bd.shift_keys(table, first) for table, first in zip(plan.bands, firsts, strict=True)]
        self._block, self._impl = Block(np.concatenate(bands), impl), impl

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of the rows of the plan; k and v: ``[num_keys, num_heads_kv, head_dim]``."""
        return Local.apply(q, k, v, self._block, self._impl)
