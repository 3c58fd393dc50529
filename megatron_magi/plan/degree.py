"""How many remote stages: predicted from the sizes of a plan and the rates of the machine."""

from __future__ import annotations

import numpy as np

from megatron_magi.config import CostModel, OverlapConfig


def choose_degree(
    local_area: np.ndarray, remote_area: np.ndarray, remote_rows: np.ndarray, config: OverlapConfig
) -> int:
    """Number of remote stages with the shortest predicted forward pass of the slowest rank.

    Args:
        local_area, remote_area: visible pairs with own and with fetched keys, ``[cp_size]``.
        remote_rows: rows that each rank fetches, ``[cp_size]``.
    """
    if not remote_rows.any():
        return 0
    if config.degree is not None:
        return max(config.degree, 1)
    times = [
        float(forward_us(local_area, remote_area, remote_rows, degree, config.cost).max())
        for degree in range(1, config.max_degree + 1)
    ]
    return 1 + int(np.argmin(times))


def forward_us(
    local_area: np.ndarray, remote_area: np.ndarray, remote_rows: np.ndarray, degree: int, cost: CostModel
) -> np.ndarray:
    """Predicted forward time of each rank: fetches run one stage ahead of the compute, in order."""
    fetch = cost.fetch_us(remote_rows / degree)
    attend = cost.attend_us(remote_area / degree)
    computed = cost.attend_us(local_area) + cost.stage_latency_us
    fetched = fetch
    for stage in range(1, degree + 1):
        start = np.maximum(computed, fetched)
        if stage < degree:
            # The next fetch is issued when the stage before this one was launched.
            fetched = np.maximum(fetched, computed) + fetch
        computed = start + attend + cost.stage_latency_us
    return computed
