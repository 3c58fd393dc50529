"""Draws the pictures of README.md and docs/how_it_works.md: ``python docs/make_pictures.py [FOLDER]``."""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.patches import Patch, Rectangle

from megatron_magi.backends.tiles.tiles import plan_tiles
from megatron_magi.config import CostModel, DispatchConfig, MagiConfig, OverlapConfig
from megatron_magi.explain.arguments import add_arguments
from megatron_magi.explain.command import mask_of
from megatron_magi.explain.figures import COLOURS, STYLE, plot_mask, plot_timeline
from megatron_magi.explain.sampled import sampled_mask
from megatron_magi.mask import AttnMask, builders
from megatron_magi.mask.dense import dense_mask
from megatron_magi.plan import Plan, make_plan

IMAGES = Path(__file__).parent / "images"
BLOCK_M, BLOCK_N = 128, 64
IDEA_LENGTHS = (2900, 700, 1500, 10400, 500, 2100, 3300, 11368)
"""Documents of the batch of the first picture: 32,768 tokens on four ranks."""
IDEA_RANKS = 4
IDEA_ROW_BYTES = 2 * 8 * 128 * 2
"""Of a key and its value: 8 heads of 128 in bf16."""


def idea() -> list[tuple[str, Plan, tuple[int, ...]]]:
    """Both sides of the first picture: name, plan, and rows of keys that each rank receives in a forward."""
    mask = builders.varlen(doc_lengths=IDEA_LENGTHS)
    zigzag = make_plan(mask, MagiConfig(dispatch=DispatchConfig(algorithm="zigzag")), cp_size=IDEA_RANKS)
    ours = make_plan(mask, MagiConfig(), cp_size=IDEA_RANKS)
    all_others = tuple(mask.total_seqlen_k - rows for rows in zigzag.stats().num_rows)
    return [
        ("zigzag; all keys and values go to all ranks", zigzag, all_others),
        ("megatron_magi; only those that are needed", ours, ours.stats().received_rows),
    ]


def plot_idea(path: Path) -> None:
    """The same batch on both sides: who computes what; under it the work of each rank, and what it receives."""
    with plt.rc_context({**STYLE, "font.size": 11}):
        figure, panels = plt.subplots(2, 2, figsize=(9.6, 6.9), height_ratios=(3.1, 1), layout="constrained")
        sides = idea()
        top = max(max(plan.stats().areas) / np.mean(plan.stats().areas) for _, plan, _ in sides)
        for (title, plan, received), (axes, bars) in zip(sides, panels.T, strict=True):
            _draw_ranks(axes, plan, title)
            _draw_work(bars, plan.stats().areas, received, top)
        handles = [Patch(color=COLOURS[rank], label=f"rank {rank}") for rank in range(IDEA_RANKS)]
        figure.legend(handles=handles, loc="outside upper center", ncols=IDEA_RANKS, frameon=False)
        figure.savefig(path, dpi=100)
        plt.close(figure)


def _draw_ranks(axes: plt.Axes, plan: Plan, title: str) -> None:
    """Visible pairs in the colour of the rank that has the query."""
    length = plan.mask.total_seqlen_q
    places = (np.arange(1024) * 2 + 1) * length // 2048
    rank_of_row = np.empty(plan.dispatch.padded_seqlen, dtype=np.int64)
    for rank in range(plan.cp_size):
        rank_of_row[plan.dispatch.global_index(rank)] = rank
    image = np.where(sampled_mask(plan.mask, places, places), rank_of_row[places][:, None] + 1, 0)
    palette = ListedColormap(["#F2F2F2", *COLOURS[: plan.cp_size]])
    axes.imshow(image, cmap=palette, vmin=0, vmax=plan.cp_size, interpolation="nearest", aspect="auto")
    axes.set(title=title, xlabel="key", ylabel="query", xticks=[], yticks=[])


def _draw_work(axes: plt.Axes, areas: tuple[int, ...], received: tuple[int, ...], top: float) -> None:
    """A bar for each rank: its pairs over the mean; beside it what it receives in a layer's forward."""
    work = np.array(areas) / np.mean(areas)
    axes.barh(range(len(areas)), work, color=COLOURS[: len(areas)], height=0.7)
    for rank, (share, rows) in enumerate(zip(work, received, strict=True)):
        label = f"{share:.2f} of the mean; {rows * IDEA_ROW_BYTES / 2**20:.0f} MiB received"
        axes.text(top + 0.06, rank, label, va="center", fontsize=10)
    axes.axvline(1, color="black", linewidth=0.8, linestyle=":")
    axes.set(xlim=(0, top + 1.25), xticks=(0, 0.5, 1), yticks=[], xlabel="attention of each rank, over the mean")
    axes.invert_yaxis()


def plot_tiles(path: Path, mask: AttnMask) -> None:
    """The tiles of rows and the blocks of keys that the forward kernel computes for a mask."""
    plan = plan_tiles(mask.bands, mask.total_seqlen_q, BLOCK_M, BLOCK_N)
    seen = dense_mask(mask)
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(6.6, 6.2), layout="constrained")
        axes.imshow(np.where(seen, 0.25, 0.0), cmap="Greys", vmin=0, vmax=1,
                    extent=(0, mask.total_seqlen_k, mask.total_seqlen_q, 0))  # fmt: skip
        for start, first, past, rows in plan.tiles.tolist():
            for number in range(first, past):
                begin, count = plan.passes[number, :2].tolist()
                for block in range(count):
                    left = begin + block * BLOCK_N
                    whole = seen[start : start + rows, left : left + BLOCK_N].all() and left + BLOCK_N <= seen.shape[1]
                    axes.add_patch(Rectangle((left, start), BLOCK_N, rows, facecolor=COLOURS[0 if whole else 1],
                                             alpha=0.45, edgecolor="white", linewidth=1.2))  # fmt: skip
            axes.axhline(start, color="black", linewidth=0.5, linestyle=":")
        axes.set_xlim(0, mask.total_seqlen_k)
        axes.set_xlabel("key")
        axes.set_ylabel("query (dotted: tiles)")
        axes.legend(handles=[Patch(color=COLOURS[0], alpha=0.45, label="block visible to all rows: no masking"),
                             Patch(color=COLOURS[1], alpha=0.45, label="block crossed by an edge: masked")],
                    loc="upper right", frameon=False, fontsize=10)  # fmt: skip
        figure.savefig(path, dpi=90)
        plt.close(figure)


def main() -> None:
    """Draws all of them."""
    import argparse

    folder = argparse.ArgumentParser(description=__doc__)
    folder.add_argument("folder", type=Path, nargs="?", default=IMAGES, help="where to draw; docs/images if not given")
    images = folder.parse_args().folder
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    args = parser.parse_args(["--seqlen", "131072", "--cp-size", "8", "--random-documents", "64"])
    cost = CostModel(num_heads_q=args.num_heads_q, num_heads_kv=args.num_heads_kv, head_dim=args.head_dim)
    plan = make_plan(mask_of(args), MagiConfig(overlap=OverlapConfig(cost=cost)), cp_size=8)
    images.mkdir(exist_ok=True)
    plot_idea(images / "idea.png")
    plot_tiles(images / "tiles.png", builders.varlen(doc_lengths=[200, 90, 350], causal=True))
    plot_mask(images / "dispatch.png", plan, "64 packed documents, 128k tokens, 8 ranks")
    plot_timeline(images / "timeline.png", plan)


if __name__ == "__main__":
    main()
