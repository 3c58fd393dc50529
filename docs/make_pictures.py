"""Draws the pictures of docs/how_it_works.md: ``python docs/make_pictures.py``."""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.patches import Patch, Rectangle

from megatron_magi.backends.tiles.tiles import plan_tiles
from megatron_magi.config import CostModel, MagiConfig, OverlapConfig
from megatron_magi.explain.arguments import add_arguments
from megatron_magi.explain.command import mask_of
from megatron_magi.explain.figures import COLOURS, STYLE, plot_mask, plot_timeline
from megatron_magi.mask import AttnMask, builders
from megatron_magi.mask.dense import dense_mask
from megatron_magi.plan import make_plan

IMAGES = Path(__file__).parent / "images"
BLOCK_M, BLOCK_N = 128, 64


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

    parser = argparse.ArgumentParser()
    add_arguments(parser)
    args = parser.parse_args(["--seqlen", "131072", "--cp-size", "8", "--random-documents", "64"])
    cost = CostModel(num_heads_q=args.num_heads_q, num_heads_kv=args.num_heads_kv, head_dim=args.head_dim)
    plan = make_plan(mask_of(args), MagiConfig(overlap=OverlapConfig(cost=cost)), cp_size=8)
    IMAGES.mkdir(exist_ok=True)
    plot_tiles(IMAGES / "tiles.png", builders.varlen(doc_lengths=[200, 90, 350], causal=True))
    plot_mask(IMAGES / "dispatch.png", plan, "64 packed documents, 128k tokens, 8 ranks")
    plot_timeline(IMAGES / "timeline.png", plan)


if __name__ == "__main__":
    main()
