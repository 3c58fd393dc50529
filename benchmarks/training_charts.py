"""The chart of `bench_training`."""

from __future__ import annotations

import csv
from pathlib import Path


def draw(table: Path, picture: Path) -> None:
    """A chart of a table of `bench_training`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with table.open() as file:
        rows = list(csv.DictReader(line for line in file if not line.startswith("#")))
    groups = list(dict.fromkeys((row["mask"], row["tokens_per_gpu"]) for row in rows))
    figure, axes = pyplot.subplots(figsize=(10, 4.2))
    providers = list(dict.fromkeys(row["provider"] for row in rows))
    width = 0.8 / len(providers)
    for number, provider in enumerate(providers):
        found = {(r["mask"], r["tokens_per_gpu"]): r for r in rows if r["provider"] == provider}
        places = [i + (number - (len(providers) - 1) / 2) * width for i in range(len(groups))]
        heights = [float(found[g]["tokens_per_s_per_gpu"] or 0) / 1e3 if g in found else 0 for g in groups]
        bars = axes.bar(places, heights, width, label=provider.replace("_", " "))
        for bar, group in zip(bars, groups, strict=True):
            if group in found and found[group]["ran"] != group[0]:
                axes.annotate("*", (bar.get_x() + width / 2, bar.get_height()), ha="center")
    axes.set_xticks(
        range(len(groups)), [f"{mask.replace('_', ' with ')}\n{int(n) // 1024}k a GPU" for mask, n in groups]
    )
    axes.set_ylabel("thousand tokens/s/GPU")
    axes.set_title("Llama with TE layers, bf16, context parallelism alone (* nearest mask that TE can do)")
    axes.legend()
    figure.tight_layout()
    figure.savefig(picture, dpi=120)
