"""The chart of `bench_training`."""

from __future__ import annotations

import textwrap
from pathlib import Path

from benchmarks._lib.results import read_results

COLORS = {"magi": "#c8372d", "te_p2p": "#3b6fb6", "te_a2a": "#5aa3a0", "te_all_gather": "#8c8c8c"}
TITLES = {"magi": "magi", "te_p2p": "TE p2p", "te_a2a": "TE a2a", "te_all_gather": "TE all-gather"}


def steps_like_magi(table: Path) -> dict[tuple[str, str, str], float]:
    """Times over magi's in the same steps of the same masks, by mask, tokens a GPU and provider.

    For runs of which few steps were taken, where steps differ.

    Args:
        table: a file with each step's time in columns ``step_1_ms`` and on; the first two steps, which warm up, do not
            count.
    """
    rows = {(r["mask"], r["tokens_per_gpu"], r["provider"]): r for r in read_results(table)[1]}
    ratios = {}
    for (mask, tokens, provider), row in rows.items():
        names = [n for n, ms in row.items() if n.startswith("step_") and ms and n not in ("step_1_ms", "step_2_ms")]
        magi = rows[mask, tokens, "magi"]
        ratios[mask, tokens, provider] = sum(float(row[n]) for n in names) / sum(float(magi[n]) for n in names)
    return ratios


def draw(table: Path, picture: Path, steps: Path | None = None) -> None:
    """A chart of a table of `bench_training`.

    Args:
        table: the rates.
        picture: the PNG.
        steps: for `steps_like_magi`: providers that the table lacks are drawn hatched, by magi's rate over their ratio.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    notes, rows = read_results(table)
    rows = [row for row in rows if row["tokens_per_s_per_gpu"]]
    if steps is not None:
        rows += _rows_by_ratio(rows, steps_like_magi(steps))
    groups = list(dict.fromkeys((row["mask"], row["tokens_per_gpu"]) for row in rows))
    figure, axes = pyplot.subplots(figsize=(10, 4.4), layout="constrained")
    providers = list(dict.fromkeys(row["provider"] for row in rows))
    width = 0.8 / len(providers)
    for place, group in enumerate(groups):
        here = [row for row in rows if (row["mask"], row["tokens_per_gpu"]) == group]
        for number, row in enumerate(sorted(here, key=lambda row: providers.index(row["provider"]))):
            left, height = place + (number - (len(here) - 1) / 2) * width, float(row["tokens_per_s_per_gpu"]) / 1e3
            looks = {"hatch": "///", "edgecolor": "white"} if "by_ratio" in row else {}
            axes.bar(left, height, width, color=COLORS.get(row["provider"]), **looks)
            note = "" if row["ran"] == group[0] else "*\n"
            axes.annotate(f"{note}{float(row['step_ms']):,.0f}", (left, height), ha="center", va="bottom", fontsize=6.5)
    axes.set_xticks(
        range(len(groups)), [f"{mask.replace('_', ' with ')}\n{int(n) // 1024}k a GPU" for mask, n in groups]
    )
    axes.set_ylabel("thousand tokens/s/GPU")
    marks = "over bars ms a step; * nearest mask that TE supports"
    if any("by_ratio" in row for row in rows):
        marks += "; hatched: of two steps, by the ratio to magi's times of the same steps"
    axes.set_title("Training steps of Llama 1B with TE layers, bf16", loc="left", fontsize=12, pad=18)
    axes.text(0, 1.02, marks, transform=axes.transAxes, fontsize=9)
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=COLORS.get(p), label=TITLES.get(p, p)) for p in providers]
    axes.legend(handles=handles, frameon=False, loc="upper right", ncols=len(providers))
    axes.set_ylim(top=1.25 * axes.dataLim.y1)
    axes.spines[["top", "right"]].set_visible(False)
    shown = " · ".join(notes[name] for name in ("device", "software", "commit", "date") if name in notes)
    figure.supxlabel("\n".join(textwrap.wrap(shown, 170)), fontsize=7)
    figure.savefig(picture, dpi=120)


def _rows_by_ratio(rows: list[dict[str, str]], ratios: dict[tuple[str, str, str], float]) -> list[dict[str, str]]:
    """Rows that a table lacks, from magi's row of the same mask and the ratio of times to it."""
    there = {(row["mask"], row["tokens_per_gpu"], row["provider"]): row for row in rows}
    found = []
    for (mask, tokens, provider), ratio in ratios.items():
        if (mask, tokens, provider) not in there:
            magi = there[mask, tokens, "magi"]
            rate, step = float(magi["tokens_per_s_per_gpu"]) / ratio, float(magi["step_ms"]) * ratio
            same = {"provider": provider, "by_ratio": "yes"}
            found.append({**magi, **same, "tokens_per_s_per_gpu": str(rate), "step_ms": str(step)})
    return found
