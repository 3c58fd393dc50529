"""Pictures of the demo. Colours are from a set that colour-blind readers can tell apart."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from megatron_magi.demo.report import Comparison
from megatron_magi.mask.dense import dense_mask
from megatron_magi.plan import Plan

_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#000000")
_STYLE = {
    "font.size": 12,
    "axes.titlesize": 13,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.dpi": 100,
    "savefig.dpi": 150,
}
_NOTHING_MASKED = "#F2F2F2"


def plot_losses(path: Path, comparison: Comparison) -> None:
    """Both loss curves, one drawn over the other, and their relative difference below."""
    steps = np.arange(1, len(comparison.stock.losses) + 1)
    with plt.rc_context(_STYLE):
        figure, (above, below) = plt.subplots(
            2, 1, figsize=(8, 6), sharex=True, height_ratios=(3, 1.4), layout="constrained"
        )
        above.plot(steps, comparison.stock.losses, color=_COLOURS[1], linewidth=6, label=comparison.names[0])
        above.plot(steps, comparison.magi.losses, color=_COLOURS[0], linewidth=1.8, label=comparison.names[1])
        above.set_ylabel("loss (nats a token)")
        above.set_title("Pretraining on the source of the Python standard library")
        above.legend(frameon=False)
        # Equal losses have no place on a logarithmic axis.
        floor = 1e-9
        below.semilogy(steps, np.maximum(comparison.differences, floor), ".", color=_COLOURS[0], markersize=5)
        below.axhline(comparison.tolerance, color=_COLOURS[5], linewidth=1.5, linestyle="--")
        below.annotate(
            f"allowed: {comparison.tolerance:.0e}",
            (steps[-1], comparison.tolerance),
            xytext=(0, -4),
            textcoords="offset points",
            ha="right",
            va="top",
            color=_COLOURS[5],
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


def plot_mask(path: Path, plan: Plan) -> None:
    """Who sees what and who computes it: visible pairs in the colour of the query's rank."""
    mask = plan.mask
    rank_of_row = np.empty(plan.dispatch.padded_seqlen, dtype=np.int64)
    for rank in range(plan.dispatch.cp_size):
        rank_of_row[plan.dispatch.global_index(rank)] = rank
    rank_of_row = rank_of_row[: mask.total_seqlen_q]
    image = np.where(dense_mask(mask), rank_of_row[:, None] + 1, 0)
    num_ranks = plan.dispatch.cp_size
    colours = [_COLOURS[rank % len(_COLOURS)] for rank in range(num_ranks)]
    areas = plan.stats().areas
    with plt.rc_context(_STYLE):
        figure, (strip, axes) = plt.subplots(
            1, 2, figsize=(8.2, 7.6), width_ratios=(0.04, 1), sharey=True, layout="constrained"
        )
        palette = ListedColormap([_NOTHING_MASKED, *colours])
        axes.imshow(image, cmap=palette, vmin=0, vmax=num_ranks, interpolation="nearest", aspect="auto")
        axes.tick_params(labelleft=False)
        axes.set_xlabel("key token")
        axes.set_title("One batch: each document attends to itself, causally")
        strip.imshow(rank_of_row[:, None] + 1, cmap=palette, vmin=0, vmax=num_ranks, aspect="auto")
        strip.set_xticks([])
        strip.set_ylabel("query token")
        for bound in plan.dispatch.chunk_bounds[1:-1]:
            strip.axhline(bound - 0.5, color="white", linewidth=0.8)
        labels = [f"rank {rank}: {100 * area / sum(areas):.1f} % of the area" for rank, area in enumerate(areas)]
        patches = [Patch(color=colour, label=label) for colour, label in zip(colours, labels, strict=True)]
        axes.legend(handles=patches, loc="upper right", frameon=False)
        figure.savefig(path)
        plt.close(figure)
