"""The number of remote stages: that with the shortest step, predicted from areas and rows.

This model is simpler than that of `predict`, which compares dispatches: it has the rates that a user of MagiAttention
gives (`compat/cost_factors.py`), otherwise those of the GPU, and is all that a plan needs to choose a degree.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from megatron_magi.backends.costs import DEFAULT, kernel_costs_of
from megatron_magi.config import CostModel, OverlapConfig
from megatron_magi.cost_model import Rates

BACKWARD_WORK = 2.5
"""Ratio of operations of the backward to those of the forward: five matrix products instead of two."""


def stage_costs(cost: CostModel, rates: Rates | None = None) -> CostModel:
    """``cost`` with the rates that it leaves open: those of a GPU, `DEFAULT` if None, and of the kernels on it."""
    rates = rates or DEFAULT
    kernels = kernel_costs_of(rates.device)
    of_gpu = {
        "tflops": kernels.stage_tflops,
        "gbytes_per_s": rates.gbytes_per_s,
        "stage_latency_us": kernels.stage_latency_us,
    }
    return replace(cost, **{name: rate for name, rate in of_gpu.items() if getattr(cost, name) is None})


def choose_degree(
    local_area: np.ndarray,
    remote_area: np.ndarray,
    remote_rows: np.ndarray,
    config: OverlapConfig,
    rates: Rates | None = None,
) -> int:
    """Number of remote stages with the shortest predicted step of the slowest rank, forward and backward.

    Args:
        local_area, remote_area: visible pairs with own and with fetched keys, ``[cp_size]``.
        remote_rows: rows that each rank fetches, ``[cp_size]``.
        config: ``cost`` has the shape of the attention.
        rates: of the GPU, see `stage_costs`.
    """
    return int(choose_degrees(local_area[None], remote_area[None], remote_rows[None], config, rates)[0])


def choose_degrees(
    local_area: np.ndarray, remote_area: np.ndarray, remote_rows: np.ndarray, config: OverlapConfig, rates: Rates | None
) -> np.ndarray:
    """`choose_degree` of several dispatches, int64 ``[num_dispatches]``; arguments ``[num_dispatches, cp_size]``."""
    fetches = remote_rows.any(axis=1)
    if config.degree is not None or not fetches.any():
        return np.where(fetches, max(config.degree or 0, 1), 0)
    found = step_us(local_area, remote_area, remote_rows, config.max_degree, stage_costs(config.cost, rates))
    return np.where(fetches, 1 + np.argmin(found, axis=0), 0)


def step_us(
    local_area: np.ndarray, remote_area: np.ndarray, remote_rows: np.ndarray, max_degree: int, cost: CostModel
) -> np.ndarray:
    """Predicted time of a step with 1, 2, ... ``max_degree`` stages, ``[max_degree, ...]``; see `choose_degree`.

    Arguments are ``[..., cp_size]``.

    ``cost`` has all rates (`stage_costs`).

    Fetches run one stage ahead of the compute, in order. In the backward a stage's gradients are sent when it is
    computed and take as long as its keys; those of the last stage are exposed.
    """
    degree = np.arange(1, max_degree + 1).reshape(-1, *[1] * remote_rows.ndim)
    # Both passes at once, as ``[2, max_degree, ...]``.
    work = np.array([1.0, BACKWARD_WORK]).reshape(2, *[1] * (remote_rows.ndim + 1))
    travel, attend, local = cost.fetch_us(remote_rows / degree), cost.attend_us(remote_area / degree), local_area
    computed = _pass_us(work * cost.attend_us(local), work * attend, travel, degree, cost.stage_latency_us)
    # Gradients of a stage take as long as its keys, and are back before those of the next are computed.
    return computed[0].max(axis=-1) + (computed[1] + travel).max(axis=-1)


def _pass_us(
    local: np.ndarray, attend: np.ndarray, travel: np.ndarray, degree: np.ndarray, latency: float
) -> np.ndarray:
    """Microseconds of passes for each degree and rank until the last stage is computed, ``[2, max_degree, ...]``.

    Args:
        local: time of own keys.
        attend, travel: time to compute one stage; to fetch its keys.
        degree: number of stages, ``[max_degree, ..., 1]``.
        latency: fixed cost of a stage.
    """
    computed, fetched = np.broadcast_to(local + latency, attend.shape), travel
    for stage in range(1, len(degree) + 1):
        start, is_there = np.maximum(computed, fetched), stage <= degree
        # The next fetch is issued when the previous stage has been launched.
        fetched = np.maximum(fetched, computed) + travel
        computed = np.where(is_there, start + attend + latency, computed)
    return computed
