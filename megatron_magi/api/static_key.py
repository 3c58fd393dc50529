"""Keys for attention that a CUDA graph has captured."""

from __future__ import annotations

from megatron_magi.api.key import DistAttnRuntimeKey
from megatron_magi.api.runtime import RuntimeCache, default_device
from megatron_magi.attention import StaticPlans
from megatron_magi.comm.agreement import told
from megatron_magi.config import MagiConfig
from megatron_magi.plan import RankPlan


class StaticKey:
    """A key for `calc_attn` that stands for the key loaded last; made by `make_static_key`.

    Attributes:
        config: of the first key, and of all.
    """

    def __init__(self, key: DistAttnRuntimeKey, runtimes: RuntimeCache, headroom: float) -> None:
        self.config: MagiConfig = key.config
        self._key, self._runtimes = key, runtimes
        runtime = runtimes.get(key).agreed()
        self.group = runtime.group
        self._static = StaticPlans(
            {"mask": runtime.rank_plan}, default_device(runtime.group), runtime.group, headroom=headroom
        )

    @property
    def rank_plan(self) -> RankPlan:
        """The part of this rank."""
        return self._static.plans["mask"]

    def load(self, key: DistAttnRuntimeKey) -> str | None:
        """Makes this stand for another key, for what is queued on the current stream from now on.

        Collective over the group: all ranks load, or none. Call it on the stream on which the graph runs.

        Args:
            key: of the same group, configuration and number of tokens.

        Returns:
            None; or why its plan does not fit, and what to make the static key with: then nothing has changed, and
            the step is to run in eager mode, with ``key`` itself.

        Raises:
            ValueError: the group or the configuration is another.
            RuntimeError: the ranks' keys disagree, another rank raised an error in this call, or a rank timed out
                in an earlier one; or a graph has run a backward after another mask had been loaded than its forward
                read, and its gradients are NaN.
        """
        with told(self.group):
            runtime = self._runtimes.get(key)
            if (key.cp_group, key.config) != (self._key.cp_group, self.config):
                raise ValueError("key: its group and configuration must be those of the first key")
        return self._static.load({"mask": runtime.agreed().rank_plan})
