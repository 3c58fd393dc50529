"""Bar charts of measured attention rates."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks._lib.cases import MASKS
from benchmarks._lib.results import Row

COLORS = {
    "cudnn": "#8c8c8c", "cudnn_flex": "#c9c9c9", "magi_cudnn": "#e39a92", "flex": "#b8a13c", "ffa": "#c8372d",
    "triton": "#e8743b", "fa3": "#3b6fb6", "fa4": "#5aa3a0", "magi": "#8a5fb0", "magi_gqa": "#b79ccf",
}  # fmt: skip
TITLES = {
    "cudnn": "cuDNN", "cudnn_flex": "cuDNN flex", "magi_cudnn": "magi (cuDNN)", "flex": "FlexAttention",
    "ffa": "magi (FFA)", "triton": "magi (Triton)", "fa3": "FlashAttention-3",
    "fa4": "FA4", "magi": "MagiAttention", "magi_gqa": "MagiAttention, GQA flags",
}  # fmt: skip
MASK_TITLES = {
    "full": "full", "causal": "causal", "varlen_full": "documents,\nfull", "varlen_causal": "documents,\ncausal",
    "window": "window of\n1,024", "block_causal": "documents,\nblock causal", "prefix_tree": "prefix tree",
    "short_causal": "short docs,\ncausal", "short_full": "short docs,\nfull", "many_ranges": "1,000 docs,\ncausal",
    "distant_ranges": "1,000 scattered\nkey ranges",
}  # fmt: skip


OVER_BARS = "over magi's bar its rate as a multiple of the fastest other library that has this mask"
OWN = ("magi_cudnn", "ffa", "triton")
"""What this package computes with; all others are other libraries."""
WITHOUT_INTERVALS = ("fa3", "fa4")
"""Providers that have variable lengths and windows, and no other masks."""


def combine(files: Sequence[tuple[Mapping[str, str], Sequence[Row]]]) -> tuple[dict[str, str], list[Row]]:
    """Rows and provenance of a chart of several files, as the first file alone would give them.

    A mask at a length is of one file: of the first among those in which most providers were measured. Only the shape
    and the lengths of the first file count.
    """

    def shape(row: Row) -> tuple[str, str]:
        return row.get("head_dim", "128"), row.get("heads", "64:8")

    lengths = {row["length"] for row in files[0][1]}
    cells: dict[tuple[str, str], tuple[int, list[Row]]] = {}
    for number, (_, rows) in enumerate(files):
        here: dict[tuple[str, str], list[Row]] = {}
        for row in rows:
            if shape(row) == shape(files[0][1][0]) and row["length"] in lengths:
                here.setdefault((row["mask"], row["length"]), []).append(row)
        for cell, found in here.items():
            if len(found) > len(cells.get(cell, (0, []))[1]):
                cells[cell] = number, found
    used = sorted({number for number, _ in cells.values()})
    names = dict.fromkeys(name for number in used for name in files[number][0])
    source = {name: ", ".join(dict.fromkeys(files[n][0][name] for n in used if name in files[n][0])) for name in names}
    return source, [row for _, found in cells.values() for row in found]


def times_fastest(rows: Sequence[Row], which: str) -> float | None:
    """Rate of ``ffa`` over that of the fastest other library in ``rows``, which are of one mask and length."""
    rates = {row["provider"]: float(row[f"{which}_tflops"]) for row in rows if row[f"{which}_tflops"]}
    best = max((rate for provider, rate in rates.items() if provider not in OWN), default=0.0)
    return rates["ffa"] / best if best and "ffa" in rates else None


def missing(provider: str, mask: str) -> str:
    """Why a provider has no bar."""
    no_mask = mask not in ("full", "causal") if provider == "cudnn" else False
    if provider in WITHOUT_INTERVALS:
        no_mask = not MASKS[mask](2048).plain
    return "no such mask" if no_mask else "not measured"


def draw(path: str | Path, rows: Sequence[Row], which: str, source: Mapping[str, str]) -> None:
    """One figure of a pass: a panel for each length, a group of bars for each mask, a bar for each provider.

    Args:
        path: of the PNG.
        rows: of a results file.
        which: ``forward`` or ``backward``.
        source: its provenance, for the line below the figure.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rows = [r for r in rows if r[f"{which}_tflops"]]
    lengths = sorted({int(r["length"]) for r in rows})
    masks = [m for m in MASK_TITLES if any(r["mask"] == m for r in rows)]
    providers = [p for p in TITLES if any(r["provider"] == p for r in rows)]
    width = max(7.0, 0.9 + len(masks) * (0.25 * len(providers) + 0.25))
    figure, panels = plt.subplots(max(1, len(lengths)), 1, figsize=(width, 0.9 + 2.7 * max(1, len(lengths))),
                                  squeeze=False, layout="constrained")  # fmt: skip
    for panel, length in zip(panels[:, 0], lengths, strict=False):
        _draw_panel(panel, [r for r in rows if int(r["length"]) == length], which, masks, providers)
        panel.set_title(f"{length:,} tokens", loc="left", fontsize=10)
    handles = [plt.Rectangle((0, 0), 1, 1, color=COLORS[p], label=TITLES[p]) for p in providers]
    if any(r["yardstick"] != "same mask" for r in rows):
        handles.append(plt.Line2D([], [], color="black", ls=":", lw=1, label="cuDNN, dense, same length"))
    columns = min(len(handles), int(width / 1.7))
    figure.legend(handles=handles, loc="outside upper center", ncols=columns, frameon=False, fontsize=9)
    shown = [source[name] for name in ("device", "software", "commit", "date") if name in source]
    text = f"{which} TFLOP/s of visible pairs; {OVER_BARS}"
    lines = [*textwrap.wrap(text, int(width * 15)), *textwrap.wrap(" · ".join(shown), int(width * 15))]
    figure.supxlabel("\n".join(lines), fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)


SUMMARY_MASKS = ("full", "causal", "varlen_causal", "window", "block_causal", "prefix_tree", "short_causal")


def draw_summary(path: str | Path, rows: Sequence[Row], length: int, source: Mapping[str, str]) -> None:
    """One figure of some masks at one length, forward and backward side by side; arguments as of `draw`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rows = [r for r in rows if int(r["length"]) == length]
    figure, panels = plt.subplots(1, 2, figsize=(14, 3.8), sharey=True, layout="constrained")
    providers = [p for p in TITLES if any(r["provider"] == p for r in rows)]
    for panel, which in zip(panels, ("forward", "backward"), strict=True):
        masks = [m for m in SUMMARY_MASKS if any(r["mask"] == m for r in rows)]
        _draw_panel(panel, [r for r in rows if r["mask"] in masks and r[f"{which}_tflops"]], which, masks, providers)
        panel.set_title(f"{which}, {length:,} tokens", loc="left", fontsize=10)
    panels[1].set_ylabel("")
    panels[0].set_ylim(0, 1.22 * max(float(r[f"{w}_tflops"] or 0) for r in rows for w in ("forward", "backward")))
    handles = [plt.Rectangle((0, 0), 1, 1, color=COLORS[p], label=TITLES[p]) for p in providers]
    handles.append(plt.Line2D([], [], color="black", ls=":", lw=1, label="cuDNN, dense, same length"))
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles), frameon=False, fontsize=9)
    shown = " · ".join(source[name] for name in ("device", "software", "commit", "date") if name in source)
    figure.supxlabel(f"TFLOP/s of visible pairs; {OVER_BARS} · {shown}", fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _draw_panel(panel, rows: Sequence[Row], which: str, masks: Sequence[str], providers: Sequence[str]) -> None:
    found = {(r["mask"], r["provider"]): r for r in rows}
    step = 0.84 / max(1, len(providers))
    top = max((float(r[f"{which}_tflops"]) for r in rows), default=1.0)
    for x, mask in enumerate(masks):
        ratio = times_fastest([r for r in rows if r["mask"] == mask], which)
        for i, provider in enumerate(providers):
            left = x + (i - (len(providers) - 1) / 2) * step
            if (mask, provider) not in found:
                panel.annotate(missing(provider, mask), (left, 0), (0, 2), textcoords="offset points", ha="center",
                               va="bottom", fontsize=6, rotation=90, color="#555555")  # fmt: skip
                continue
            rate = float(found[mask, provider][f"{which}_tflops"])
            panel.bar(left, rate, step * 0.92, color=COLORS[provider])
            if provider == "ffa" and ratio is not None:
                panel.annotate(f"{ratio:.2f}", (left, rate), (0, 2), textcoords="offset points", ha="center",
                               va="bottom", fontsize=8, weight="bold", zorder=4,
                               bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6})  # fmt: skip
        dense = next((r for r in rows if r["mask"] == mask and r["yardstick"] != "same mask"), None)
        if dense and dense[f"{which}_yardstick"]:
            base = float(dense[f"{which}_yardstick"])
            panel.plot([x - 0.45, x + 0.45], [base, base], color="black", ls=":", lw=1, zorder=2.5)
            top = max(top, base)
    panel.set_xticks(range(len(masks)), [MASK_TITLES[m] for m in masks], fontsize=8)
    panel.set_ylabel("TFLOP/s", fontsize=8)
    panel.tick_params(axis="y", labelsize=8)
    panel.set_ylim(0, top * 1.22)
    panel.set_xlim(-0.55, len(masks) - 0.45)
    panel.grid(axis="y", alpha=0.3)
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)
