"""Pictures of the demo."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.ticker import MaxNLocator

from megatron_magi.demo.report import Comparison
from megatron_magi.explain.figures import COLOURS, STYLE


def plot_losses(path: Path, comparison: Comparison) -> None:
    """Both loss curves, one drawn over the other, and their relative difference below."""
    steps = np.arange(1, len(comparison.stock.losses) + 1)
    with plt.rc_context(STYLE):
        figure, (above, below) = plt.subplots(
            2, 1, figsize=(8, 6), sharex=True, height_ratios=(3, 1.4), layout="constrained"
        )
        above.plot(steps, comparison.stock.losses, color=COLOURS[1], linewidth=6, label=comparison.names[0])
        above.plot(steps, comparison.magi.losses, color=COLOURS[0], linewidth=1.8, label=comparison.names[1])
        above.set_ylabel("loss (nats a token)")
        above.set_title("Pretraining on the source of the Python standard library")
        above.legend(frameon=False)
        # Equal losses have no place on a logarithmic axis.
        floor = 1e-9
        below.semilogy(steps, np.maximum(comparison.differences, floor), ".", color=COLOURS[0], markersize=5)
        below.axhline(comparison.tolerance, color=COLOURS[5], linewidth=1.5, linestyle="--")
        below.annotate(
            f"allowed: {comparison.tolerance:.0e}",
            (steps[-1], comparison.tolerance),
            xytext=(0, -4),
            textcoords="offset points",
            ha="right",
            va="top",
            color=COLOURS[5],
        )
        below.set_ylim(floor / 2, max(10 * comparison.tolerance, 2 * comparison.largest_difference))
        ticks = [floor, 1e-7, 1e-5, 1e-3]
        below.set_yticks(ticks, ["0", *(f"{tick:.0e}" for tick in ticks[1:])], minor=False)
        below.set_yticks([], minor=True)
        below.set_ylabel("relative\ndifference")
        below.set_xlabel("step")
        below.xaxis.set_major_locator(MaxNLocator(integer=True))
        figure.savefig(path)
        plt.close(figure)
