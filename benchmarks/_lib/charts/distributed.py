"""Bar charts of distributed attention: rates of each way, by mask, tokens a GPU and pass."""

from __future__ import annotations

import csv
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks._lib.results import Row, read_results

COLORS = {
    "alone": "#dddddd", "magi": "#c8372d", "magi_stages": "#8f1f17", "magi_one_launch": "#e8743b",
    "magi_zigzag": "#e39a94", "magi_zigzag_travel": "#b5504a", "magi_contiguous": "#efc4bf",
    "magi_contiguous_travel": "#d17f79", "magi_zigzag_stages": "#f0cdb5", "ring": "#3b6fb6", "double_ring": "#7fa8d9",
    "all_gather": "#8c8c8c", "ulysses": "#5aa3a0", "usp": "#b8a13c", "subgroups": "#7d5a9e",
    "torch_ring": "#b8632f", "torch_all_gather": "#d99a6c", "torch_flex": "#5b7b3a",
    "torch_flex_head_tail": "#86a35f", "torch_flex_blocks": "#b3c896",
    "two_levels": "#6a4c93", "two_levels_native": "#a78bc9",
    "magi_zigzag_groups": "#7a2f2a", "magi_contiguous_groups": "#a4534e",
}  # fmt: skip
TITLES = {
    "alone": "magi, all keys local", "magi": "magi", "magi_stages": "magi, in stages",
    "magi_one_launch": "magi, one launch", "magi_zigzag": "magi, zigzag dispatch",
    "magi_zigzag_travel": "magi, zigzag, queries travel", "magi_contiguous": "magi, contiguous dispatch",
    "magi_contiguous_travel": "magi, contiguous, queries travel",
    "magi_zigzag_stages": "magi, zigzag, in stages", "ring": "ring, zigzag",
    "double_ring": "double ring", "all_gather": "all-gather", "ulysses": "Ulysses", "usp": "USP",
    "subgroups": "subgroups", "torch_ring": "PyTorch, ring", "torch_all_gather": "PyTorch, all-gather",
    "torch_flex": "PyTorch, flex", "torch_flex_head_tail": "PyTorch, flex, head and tail",
    "torch_flex_blocks": "PyTorch, flex, blocks",
    "two_levels": "magi, two levels", "two_levels_native": "magi, two levels, native",
    "magi_zigzag_groups": "magi, zigzag, groups of heads travel",
    "magi_contiguous_groups": "magi, contiguous, groups of heads travel",
}  # fmt: skip
MASKS = {
    "full": "full", "causal": "one causal document", "documents_8": "8 documents", "documents_64": "64 documents",
    "short_documents": "short documents", "window": "window of 1,024", "block_causal": "block causal",
}  # fmt: skip
PASSES = ("forward", "backward")
OWN = ("alone", "magi", "two_levels")
"""Beginnings of the names of what this package does; all others are other methods."""


def times_fastest(rates: Mapping[str, float]) -> float | None:
    """Rate of the default, ``magi``, over that of the fastest other method, of rates by way."""
    best = max((rate for way, rate in rates.items() if not way.startswith(OWN)), default=0.0)
    return rates["magi"] / best if best and "magi" in rates else None


def read_rows(paths: Sequence[str | Path]) -> tuple[dict[str, str], list[Row]]:
    """Where results come from, and the rows of all files, of one that is in several the last, by size, mask and way."""
    notes: dict[str, dict[str, None]] = {}
    found: dict[tuple, Row] = {}
    for path in paths:
        its_notes, rows = read_results(path)
        for name, value in its_notes.items():
            notes.setdefault(name, {})[value] = None
        found |= {(int(r["ranks"]), int(r["tokens_a_gpu"]), r["mask"], r["way"]): r for r in rows}
    masks, ways = (list(dict.fromkeys(key[i] for key in found)) for i in (2, 3))
    order = sorted(found, key=lambda key: (*key[:2], masks.index(key[2]), ways.index(key[3])))
    return {name: "; ".join(values) for name, values in notes.items()}, [found[key] for key in order]


def write_rows(path: str | Path, notes: Mapping[str, str], rows: Sequence[Row]) -> None:
    """Writes what `read_rows` read."""
    with open(path, "w", newline="") as file:
        file.writelines(f"# {name}: {value}\n" for name, value in notes.items())
        csv.writer(file, lineterminator="\n").writerows([list(rows[0]), *(list(row.values()) for row in rows)])


def draw(
    path: str | Path, source: str, rows: Sequence[Row], published: Mapping[tuple[int, int], Mapping[str, tuple]]
) -> None:
    """A panel for each number of GPUs and tokens, and pass; a group of bars for each mask.

    Args:
        published: for some numbers of GPUs and of tokens a GPU, by mask: rates of passes that others have published,
            shown as marks.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rows = [r for r in rows if r["forward_tflops_a_gpu"]]
    panels = list(dict.fromkeys((int(r["ranks"]), int(r["tokens_a_gpu"])) for r in rows))
    masks = [mask for mask in MASKS if any(r["mask"] == mask for r in rows)]
    ways = [way for way in TITLES if any(r["way"] == way for r in rows)]
    figure, axes = plt.subplots(
        2 * len(panels), 1, figsize=(max(8.0, 1.7 * len(masks)), 2.4 * 2 * len(panels)), squeeze=False,
        layout="constrained",
    )  # fmt: skip
    for axis, (ranks, tokens, which) in zip(axes[:, 0], [(*p, w) for p in panels for w in PASSES], strict=True):
        here = [r for r in rows if (int(r["ranks"]), int(r["tokens_a_gpu"])) == (ranks, tokens)]
        _draw_panel(axis, here, which, published.get((ranks, tokens), {}))
        axis.set_title(f"{which}, {tokens // 1024}k tokens a GPU, {ranks} GPUs", loc="left", fontsize=9)
    handles = [plt.Rectangle((0, 0), 1, 1, color=COLORS[way], label=TITLES[way]) for way in ways]
    if any(set(published.get(panel, {})) & set(masks) for panel in panels):
        label = "MagiAttention, published: 8 H100, 8k"
        handles.append(plt.Line2D([], [], color="black", ls="--", lw=1, label=label))
    figure.legend(handles=handles, loc="outside upper center", ncols=4, fontsize=8, frameon=False)
    brackets = "; in brackets magi's rate over that of the fastest other method" if "magi" in ways else ""
    text = f"64:8 heads of 128, bf16; visible pairs{brackets}. {source}"
    figure.supxlabel("\n".join(textwrap.wrap(text, int(15 * figure.get_figwidth()))), fontsize=6.5)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _draw_panel(axis, rows: Sequence[Row], which: str, published: Mapping[str, tuple]) -> None:
    found = {(r["mask"], r["way"]): float(r[f"{which}_tflops_a_gpu"]) for r in rows}
    masks = [mask for mask in MASKS if any(key[0] == mask for key in found)]
    most = max(sum(key[0] == mask for key in found) for mask in masks)
    width = 0.84 / most
    for x, mask in enumerate(masks):
        present = [way for way in TITLES if (mask, way) in found]
        ratio = times_fastest({way: found[mask, way] for way in present})
        for i, way in enumerate(present):
            left, rate = x + (i - (len(present) - 1) / 2) * width, found[mask, way]
            axis.bar(left, rate, width, color=COLORS[way])
            is_default = way == "magi" and ratio is not None
            text, weight = (f"{rate:.0f} ({ratio:.2f})", "bold") if is_default else (f"{rate:.0f}", "normal")
            axis.annotate(text, (left, rate), (0, 1.5), textcoords="offset points", ha="center", va="bottom",
                          fontsize=5.5, rotation=90, zorder=4, weight=weight,
                          bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.4})  # fmt: skip
        if mask in published:
            axis.plot([x - 0.45, x + 0.45], [published[mask][PASSES.index(which)]] * 2, color="black", ls="--", lw=1)
    axis.set_xticks(range(len(masks)), [MASKS[mask] for mask in masks], fontsize=8)
    axis.set_ylabel("TFLOP/s a GPU", fontsize=8)
    axis.margins(y=0.38)
    axis.grid(axis="y", lw=0.3)
    axis.set_axisbelow(True)
