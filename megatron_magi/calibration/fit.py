"""From measured times of kernels to the rates of the model that predicts them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from megatron_magi.config import CostModel
from megatron_magi.cost_model import Rates
from megatron_magi.mask import AttnMask
from megatron_magi.plan.chunks import ChunkedMask
from megatron_magi.plan.counts import count
from megatron_magi.plan.predict import kernels_us


def fit_kernels(
    masks: Sequence[AttnMask], forward_us: Sequence[float], backward_us: Sequence[float], rates: Rates, cost: CostModel
) -> Rates:
    """Fits the kernels' numbers in ``rates`` to measured times.

    Args:
        masks: on one GPU each.
        forward_us, backward_us: of each mask, in microseconds.
        rates: the rate of memory in them is taken as it is.
        cost: shape of the attention.
    """

    def predicted(which: int) -> Callable[..., np.ndarray]:
        def of(**changed: float) -> np.ndarray:
            now = replace(rates, **changed)
            found = []
            for mask in masks:
                rows = mask.total_seqlen_q
                counts = count(ChunkedMask(mask, np.array([0, rows]), 1), np.array([0]), 1)
                found.append(kernels_us(counts, rows, now, cost)[which])
            return np.array(found)

        return of

    tflops, tile, launch = _fit(predicted(0), forward_us, "forward_tflops", "tile_columns", "forward_us")
    rates = replace(rates, forward_tflops=tflops, tile_columns=tile, forward_us=launch)
    tflops, tile, launch = _fit(predicted(1), backward_us, "backward_tflops", "tile_rows", "backward_us")
    return replace(rates, backward_tflops=tflops, tile_rows=tile, backward_us=launch)


def _fit(
    predicted: Callable[..., np.ndarray], measured: Sequence[float], tflops: str, tile: str, launch: str
) -> tuple[float, float, float]:
    """The rate, the cost of a tile and that of a launch with the least relative errors, none of them negative.

    Predictions are linear in the reciprocal of the rate, in that times the tile, and in the launch.
    """
    wanted = np.array(measured)
    nothing = predicted(**{tflops: 1e30, tile: 0.0, launch: 0.0})  # what does not depend on the three
    columns = [
        predicted(**{tflops: 1.0, tile: 0.0, launch: 0.0}) - nothing,
        predicted(**{tflops: 1.0, tile: 1.0, launch: 0.0}) - predicted(**{tflops: 1.0, tile: 0.0, launch: 0.0}),
        predicted(**{tflops: 1e30, tile: 0.0, launch: 1.0}) - nothing,
    ]
    # The least squares over each set of columns whose parts are all positive: at most eight small problems.
    best, found = float("inf"), np.zeros(3)
    for used in ([0], [0, 1], [0, 2], [0, 1, 2]):
        table = np.stack([columns[i] for i in used], axis=1) / wanted[:, None]
        parts = np.linalg.lstsq(table, 1 - nothing / wanted, rcond=None)[0]
        error = float(np.square(table @ parts - (1 - nothing / wanted)).sum())
        if (parts >= 0).all() and parts[0] > 0 and error < best:
            best, found = error, np.zeros(3)
            found[used] = parts
    if not found[0]:
        raise RuntimeError(f"calibration: no rates explain these times: {list(measured)}")
    return float(1 / found[0]), float(found[1] / found[0]), float(found[2])
