"""Pictures of masks, dispatches and schedules. Colours are from a set that colour-blind readers can tell apart."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.patches import Patch

from megatron_magi.explain.sampled import sampled_mask
from megatron_magi.explain.timeline import Span, backward_timeline, forward_timeline
from megatron_magi.mask import AttnMask
from megatron_magi.plan import Plan
from megatron_magi.plan.types import StepKind

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#000000")
STYLE = {
    "font.size": 12,
    "axes.titlesize": 13,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.dpi": 100,
    "savefig.dpi": 150,
}
_HIDDEN = "#F2F2F2"
_SAMPLES = 1200
"""Queries and keys that a picture shows at most."""
_CHUNKS = 100
"""Chunks whose borders are drawn at most."""


def plot_mask(path: Path, plan: Plan, title: str) -> None:
    """Who sees what and who computes it: visible pairs in the colour of the query's rank."""
    mask, num_ranks = plan.mask, plan.dispatch.cp_size
    rank_of_row = np.empty(plan.dispatch.padded_seqlen, dtype=np.int64)
    for rank in range(num_ranks):
        rank_of_row[plan.dispatch.global_index(rank)] = rank
    queries, keys = _sample(mask.total_seqlen_q), _sample(mask.total_seqlen_k)
    rank_of_row = rank_of_row[queries]
    image = np.where(sampled_mask(mask, queries, keys), rank_of_row[:, None] + 1, 0)
    colours = [COLOURS[rank % len(COLOURS)] for rank in range(num_ranks)]
    areas = plan.stats().areas
    with plt.rc_context(STYLE):
        figure, (strip, axes) = plt.subplots(
            1, 2, figsize=(8.2, 7.6), width_ratios=(0.04, 1), sharey=True, layout="constrained"
        )
        palette = ListedColormap([_HIDDEN, *colours])
        extent = (0, mask.total_seqlen_k, mask.total_seqlen_q, 0)
        axes.imshow(image, cmap=palette, vmin=0, vmax=num_ranks, interpolation="nearest", aspect="auto", extent=extent)
        axes.tick_params(labelleft=False)
        axes.set_xlabel("key token")
        axes.set_title(title if num_ranks <= len(COLOURS) else f"{title} (ranks 0, {len(COLOURS)}, ... share a colour)")
        strip.imshow(rank_of_row[:, None] + 1, cmap=palette, vmin=0, vmax=num_ranks, aspect="auto",
                     extent=(0, 1, mask.total_seqlen_q, 0))  # fmt: skip
        strip.set_xticks([])
        strip.set_title("held by", fontsize=STYLE["font.size"] - 2)
        strip.set_ylabel("query token")
        if len(plan.dispatch.chunk_bounds) <= _CHUNKS:
            for bound in plan.dispatch.chunk_bounds[1:-1]:
                strip.axhline(bound, color="white", linewidth=0.8)
        if num_ranks <= len(COLOURS):
            labels = [f"rank {rank}: {100 * area / sum(areas):.1f} % of the pairs" for rank, area in enumerate(areas)]
            patches = [Patch(color=colour, label=label) for colour, label in zip(colours, labels, strict=True)]
            axes.legend(handles=patches, loc="upper right", frameon=False)
        figure.savefig(path)
        plt.close(figure)


def plot_shape(path: Path, mask: AttnMask) -> None:
    """The visible pairs of a mask alone, small."""
    queries, keys = _sample(mask.total_seqlen_q), _sample(mask.total_seqlen_k)
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(2.4, 2.4), layout="constrained")
        axes.imshow(sampled_mask(mask, queries, keys), cmap=ListedColormap([_HIDDEN, COLOURS[0]]), vmin=0, vmax=1,
                    interpolation="nearest", extent=(0, mask.total_seqlen_k, mask.total_seqlen_q, 0))  # fmt: skip
        axes.set_xticks([])
        axes.set_yticks([])
        axes.spines[:].set_visible(False)
        axes.set_xlabel("keys")
        axes.set_ylabel("queries")
        figure.savefig(path, dpi=80)
        plt.close(figure)


def plot_timeline(path: Path, plan: Plan) -> None:
    """What each rank computes and receives over time, forward and backward; see `timeline`."""
    with plt.rc_context({**STYLE, "font.size": 10, "axes.titlesize": 11}):
        height = 1.4 + 0.5 * plan.cp_size
        figure, panels = plt.subplots(1, 2, figsize=(12, height), width_ratios=(1, 2), sharey=True,
                                      layout="constrained")  # fmt: skip
        passes = (("forward", forward_timeline(plan)), ("backward", backward_timeline(plan)))
        for axes, (name, ranks) in zip(panels, passes, strict=True):
            for rank, spans in enumerate(ranks):
                for span in spans:
                    _draw_span(axes, rank, span)
            axes.set_title(f"{name} of one layer, without launch overheads")
            axes.set_xlabel("microseconds")
        panels[0].set_yticks(range(plan.cp_size), [f"rank {rank}" for rank in range(plan.cp_size)])
        panels[0].invert_yaxis()
        names = ("attention, own keys", "attention, fetched keys", "fetch k and v", "reduce dk and dv")
        figure.legend(handles=[Patch(color=c, label=n) for c, n in zip(COLOURS, names, strict=False)],
                      loc="outside lower center", ncols=4, frameon=False)  # fmt: skip
        figure.savefig(path, dpi=110)
        plt.close(figure)


def _draw_span(axes, rank: int, span: Span) -> None:
    kind, stage = span.step
    if kind is StepKind.ATTEND:
        place, colour = -0.2, COLOURS[min(stage, 1)]
    else:
        place, colour = 0.18, COLOURS[2 if kind is StepKind.FETCH else 3]
    axes.barh(
        rank + place, span.end - span.start, 0.34, left=span.start, color=colour, edgecolor="white", linewidth=0.6
    )


def _sample(total: int) -> np.ndarray:
    """Places spread evenly over ``[0, total)``, all of them where they are few."""
    if total <= _SAMPLES:
        return np.arange(total)
    return (np.arange(_SAMPLES) * 2 + 1) * total // (2 * _SAMPLES)
