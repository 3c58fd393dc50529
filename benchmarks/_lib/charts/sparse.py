"""Charts of what `bench_sparse` measured."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

from benchmarks._lib.results import Row, read_results

PASSES = ("forward", "backward")
SOURCE = ("device", "software", "commit", "date")
PEER_STYLES = {
    "ffa": ("FFA", "#c8372d"),
    "flex": ("FlexAttention", "#b8a13c"),
    "flashinfer": ("FlashInfer", "#3b6fb6"),
}
LINES = {
    ("blocks", "128"): ("blocks of 128 keys, an eighth", "#c8372d"),
    ("blocks", "64"): ("blocks of 64 keys, an eighth", "#e08a5a"),
    ("index", "1"): ("single keys, an eighth", "#3b6fb6"),
    ("index top 2048", "1"): ("single keys, 2,048", "#5aa3a0"),
    ("index top 512", "1"): ("single keys, 512", "#8c8c8c"),
}
# MagiAttention's own figures on an H100, forward.
PUBLISHED_KEYS = (32768, 65536, 131072, 262144, 524288)
PUBLISHED = {("blocks", "128"): (432, 598, 607, 624, 624), ("index", "1"): (482, 523, 509, 500, 471)}


def draw(paths: Sequence[str]) -> None:
    """``sparse_lists.png`` and ``sparse_masks.png``, of those cases that the files have, in the folder of the first.

    Of a case that is in several the last is drawn.
    """
    read = [read_results(path) for path in paths]
    names = "case", "k_block", "queries", "keys", "provider"
    rows = list({tuple(row[name] for name in names): row for _, table in read for row in table}.values())
    said = {
        name: dict.fromkeys(", ".join(notes[name] for notes, _ in read if name in notes).split(", ")) for name in SOURCE
    }
    source = textwrap.fill(" · ".join(", ".join(values) for values in said.values()), 150)
    folder = Path(paths[0]).parent
    lists = [row for row in rows if (row["case"], row["k_block"]) in LINES]
    masks = [row for row in rows if row["case"].startswith(("uniform", "variable", "video"))]
    if lists:
        _draw_lists(folder / "sparse_lists.png", lists, source)
    if masks:
        dense = {int(row["keys"]): row for row in rows if row["case"] == "dense"}
        _draw_masks(folder / "sparse_masks.png", masks, dense, source)


def _figure(rows: int, columns: int, size: tuple[float, float]):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    return plt.subplots(rows, columns, figsize=size, squeeze=False, sharey="row", layout="constrained")


def _tidy(panel, title: str, top: float) -> None:
    panel.set_title(title, loc="left", fontsize=10)
    panel.set_ylim(0, 1.1 * top)
    panel.tick_params(labelsize=8)
    panel.grid(axis="y", alpha=0.3)
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)


def _rate(row: Row, which: str) -> float:
    return float(row[f"{which}_tflops"] or "nan")


def _draw_lists(path: Path, rows: Sequence[Row], source: str) -> None:
    figure, panels = _figure(1, 2, (11, 4.4))
    top = max(_rate(row, "forward") for row in rows)
    for panel, which in zip(panels[0], PASSES, strict=True):
        for name, (label, color) in LINES.items():
            found = sorted((int(r["keys"]), _rate(r, which)) for r in rows if (r["case"], r["k_block"]) == name)
            if found:
                panel.plot(*zip(*found, strict=True), "o-", color=color, label=label, ms=4)
            if which == "forward" and name in PUBLISHED:
                shown = f"MagiAttention, published: {'blocks of 128' if name[0] == 'blocks' else 'single keys'}"
                panel.plot(PUBLISHED_KEYS, PUBLISHED[name], "x:", color=color, label=shown, ms=6, lw=1)
        panel.set_xscale("log", base=2)
        panel.set_xticks(PUBLISHED_KEYS, [f"{keys // 1024}k" for keys in PUBLISHED_KEYS])
        panel.minorticks_off()
        panel.set_xlabel("keys", fontsize=8)
        _tidy(panel, which, top)
    panels[0, 0].set_ylabel("TFLOP/s", fontsize=8)
    handles, labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=4, frameon=False, fontsize=8)
    figure.supxlabel(f"one query of 128 heads and one key head for each 64 keys; TFLOP/s of visible pairs\n{source}",
                     fontsize=8)  # fmt: skip
    figure.savefig(path, dpi=110)


def _draw_masks(path: Path, rows: Sequence[Row], dense: dict[int, Row], source: str) -> None:
    lengths = sorted({int(row["keys"]) for row in rows})
    providers = [p for p in PEER_STYLES if any(row["provider"] == p for row in rows)]
    figure, panels = _figure(len(lengths), 2, (16, 1 + 2.6 * len(lengths)))
    top = max(_rate(row, "forward") for row in [*rows, *dense.values()] if row["forward_tflops"])
    for line, length in zip(panels, lengths, strict=True):
        names = sorted({(row["case"], row["k_block"]) for row in rows if int(row["keys"]) == length}, key=_place)
        for panel, which in zip(line, PASSES, strict=True):
            for x, name in enumerate(names):
                of_case = [r for r in rows if (r["case"], r["k_block"]) == name and int(r["keys"]) == length]
                present = [r for p in providers for r in of_case if r["provider"] == p and r[f"{which}_tflops"]]
                for i, row in enumerate(present):
                    left = x + (i - (len(present) - 1) / 2) * 0.27
                    panel.bar(left, _rate(row, which), 0.25, color=PEER_STYLES[row["provider"]][1])
                    panel.annotate(row[f"{which}_tflops"], (left, _rate(row, which)), (0, 1),
                                   textcoords="offset points", ha="center", fontsize=6,
                                   bbox={"fc": "white", "ec": "none", "pad": 0.5})  # fmt: skip
            if length in dense:
                panel.axhline(_rate(dense[length], which), color="black", ls=":", lw=1)
            panel.set_xticks(range(len(names)), [_title(*name) for name in names], fontsize=7, rotation=40, ha="right")
            _tidy(panel, f"{which}, {length:,} tokens", top)
        line[0].set_ylabel("TFLOP/s", fontsize=8)
    from matplotlib import pyplot as plt

    handles = [plt.Rectangle((0, 0), 1, 1, color=PEER_STYLES[p][1], label=PEER_STYLES[p][0]) for p in providers]
    handles.append(plt.Line2D([], [], color="black", ls=":", lw=1, label="FFA, dense"))
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles), frameon=False, fontsize=9)
    figure.supxlabel(f"TFLOP/s of visible pairs\n{source}", fontsize=8)
    figure.savefig(path, dpi=110)


def _title(case: str, k_block: str) -> str:
    return f"{case}, {k_block}" if case.startswith("uniform") else case


def _place(name: tuple[str, str]) -> tuple[bool, str, int, int]:
    """Uniform masks first, by size of block and share; then the others."""
    kind, share = name[0].split()
    return kind != "uniform", kind, -int(name[1]), int(share[:-1]) if share.endswith("%") else 0
