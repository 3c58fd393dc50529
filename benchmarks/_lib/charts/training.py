"""The chart of `bench_speed`."""

from __future__ import annotations

import textwrap
from pathlib import Path

from benchmarks._lib.results import read_results

COLORS = {"magi": "#c8372d", "te_p2p": "#3b6fb6", "te_a2a": "#5aa3a0", "te_all_gather": "#8c8c8c"}
TITLES = {"magi": "magi", "te_p2p": "TE p2p", "te_a2a": "TE a2a", "te_all_gather": "TE all-gather"}


def by_time(row: dict[str, str], column: str) -> float:
    """Thousand tokens/s/GPU at the milliseconds of a column."""
    return float(row["tokens_per_gpu"]) / float(row[column])


def draw(table: Path, picture: Path) -> None:
    """A chart of a table of `bench_speed`, with the quartiles of the timed steps.

    Args:
        table: the rates.
        picture: the PNG.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    notes, rows = read_results(table)
    rows = [row for row in rows if row["tokens_per_s_per_gpu"]]
    groups = list(dict.fromkeys((row["mask"], row["tokens_per_gpu"]) for row in rows))
    figure, axes = pyplot.subplots(figsize=(10, 4.4), layout="constrained")
    providers = list(dict.fromkeys(row["provider"] for row in rows))
    width = 0.8 / len(providers)
    for place, group in enumerate(groups):
        here = [row for row in rows if (row["mask"], row["tokens_per_gpu"]) == group]
        others = [float(row["step_ms"]) for row in here if row["provider"] != "magi" and row["ran"] == group[0]]
        for number, row in enumerate(sorted(here, key=lambda row: providers.index(row["provider"]))):
            left, height = place + (number - (len(here) - 1) / 2) * width, float(row["tokens_per_s_per_gpu"]) / 1e3
            names = ("three_quarters_ms", "quarter_ms")
            low, high = (by_time(row, name) if row.get(name) else height for name in names)
            spread = [[height - low], [high - height]]
            axes.bar(left, height, width, color=COLORS.get(row["provider"]), yerr=spread, error_kw={"lw": 0.8})
            note = "" if row["ran"] == group[0] else "*"
            if row["provider"] == "magi" and others:
                note = f"{min(others) / float(row['step_ms']):.2f}"
            axes.annotate(note, (left, high), ha="center", va="bottom", fontsize=8, fontweight="bold")
    axes.set_xticks(
        range(len(groups)), [f"{mask.replace('_', ' with ')}\n{int(n) // 1024}k a GPU" for mask, n in groups]
    )
    axes.set_ylabel("thousand tokens/s/GPU")
    marks = "over magi's bar times faster than TE's best with this mask; medians, lines are quartiles; * another mask"
    axes.set_title("Training steps of Llama 1B with TE layers, bf16", loc="left", fontsize=12, pad=18)
    axes.text(0, 1.02, marks, transform=axes.transAxes, fontsize=9)
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=COLORS.get(p), label=TITLES.get(p, p)) for p in providers]
    axes.legend(handles=handles, frameon=False, loc="upper right", ncols=len(providers))
    axes.set_ylim(top=1.25 * axes.dataLim.y1)
    axes.spines[["top", "right"]].set_visible(False)
    shown = " · ".join(notes[name] for name in ("device", "software", "commit", "date") if name in notes)
    figure.supxlabel("\n".join(textwrap.wrap(shown, 170)), fontsize=7)
    figure.savefig(picture, dpi=120)
