"""Charts of group collectives: rates of each way over bytes, a line each, and latency where calls are small."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks._lib.results import Row

COLORS = {"native": "#c8372d", "native_beside": "#e39a94", "all_to_all": "#3b6fb6", "nccl_all_to_all": "#8c8c8c",
          "nccl_all_gather": "#b8a13c"}  # fmt: skip
TITLES = {"native": "native", "native_beside": "native, overlapped", "all_to_all": "packed, NCCL all-to-all",
          "nccl_all_to_all": "NCCL all-to-all alone", "nccl_all_gather": "NCCL all-gather alone"}  # fmt: skip


def draw(path: str | Path, source: str, rows: Sequence[Row]) -> None:
    """A row of panels for each operation: microseconds of calls up to 4 MB, and GB/s of larger ones."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(9, 6.4), layout="constrained")
    for (operation, small), axis in zip([(o, s) for o in ("cast", "reduce") for s in (True, False)], axes.flat,
                                        strict=True):  # fmt: skip
        for way, color in COLORS.items():
            here = [r for r in rows if (r["operation"], r["way"]) == (operation, way)]
            here = [r for r in here if (int(r["bytes"]) <= 4 << 20) == small]
            mb = [int(r["bytes"]) / 2**20 for r in here]
            rates = [float(r["device_us" if small else "gb_a_s"]) for r in here]
            axis.plot(mb, rates, "o-", color=color, label=TITLES[way])
        axis.set_xscale("log", base=2)
        ticks = sorted({mb for line in axis.lines for mb in line.get_xdata()})
        axis.set_xticks(ticks, [f"{mb:g} MB" if mb >= 1 else f"{1024 * mb:g} KB" for mb in ticks])
        axis.set_ylim(bottom=0)
        axis.set_xlabel("bytes that a rank receives", fontsize=8)
        unit = "microseconds on the device" if small else "GB/s that a rank receives"
        axis.set_title(f"{'cast' if operation == 'cast' else 'sum'}, {unit}", loc="left", fontsize=9)
        axis.grid(lw=0.3)
    axes[0, 0].legend(fontsize=7, frameon=False)
    figure.supxlabel(f"{rows[0]['ranks']} GPUs; {source}", fontsize=6.5)
    figure.savefig(path, dpi=120)
    plt.close(figure)
