"""The chart of `bench_training`."""

from __future__ import annotations

import textwrap
from pathlib import Path

from attention_charts import read_results

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
    ratios = {} if steps is None else steps_like_magi(steps)
    magi = {(r["mask"], r["tokens_per_gpu"]): r for r in rows if r["provider"] == "magi"}
    groups = list(dict.fromkeys((row["mask"], row["tokens_per_gpu"]) for row in rows))
    figure, axes = pyplot.subplots(figsize=(10, 4.4), layout="constrained")
    providers = list(dict.fromkeys(row["provider"] for row in rows))
    width = 0.8 / len(providers)
    for number, provider in enumerate(providers):
        found = {(r["mask"], r["tokens_per_gpu"]): r for r in rows if r["provider"] == provider}
        places = [i + (number - (len(providers) - 1) / 2) * width for i in range(len(groups))]
        heights = [float(found[g]["tokens_per_s_per_gpu"] or 0) / 1e3 if g in found else 0 for g in groups]
        bars = axes.bar(places, heights, width, label=TITLES.get(provider, provider), color=COLORS.get(provider))
        for bar, group in zip(bars, groups, strict=True):
            if group in found and found[group]["ran"] != group[0]:
                axes.annotate("*", (bar.get_x() + width / 2, bar.get_height()), ha="center")
            elif group not in found and (*group, provider) in ratios:
                rate = float(magi[group]["tokens_per_s_per_gpu"]) / ratios[*group, provider]
                bar.set(height=rate / 1e3, hatch="///", edgecolor="white")
    axes.set_xticks(
        range(len(groups)), [f"{mask.replace('_', ' with ')}\n{int(n) // 1024}k a GPU" for mask, n in groups]
    )
    axes.set_ylabel("thousand tokens/s/GPU")
    marks = "* nearest mask that TE supports"
    if ratios:
        marks += "; hatched: of two steps, by the ratio to magi's times of the same steps"
    axes.set_title("Training steps of Llama 1B with TE layers, bf16", loc="left", fontsize=12, pad=18)
    axes.text(0, 1.02, marks, transform=axes.transAxes, fontsize=9)
    axes.legend(frameon=False, loc="upper right", ncols=len(providers))
    axes.set_ylim(top=1.12 * axes.dataLim.y1)
    axes.spines[["top", "right"]].set_visible(False)
    shown = " · ".join(notes[name] for name in ("device", "software", "commit", "date") if name in notes)
    figure.supxlabel("\n".join(textwrap.wrap(shown, 170)), fontsize=7)
    figure.savefig(picture, dpi=120)
