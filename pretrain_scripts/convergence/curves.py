"""Loss curves of several runs: read, compared with the band that two seeds draw, printed and plotted.

python pretrain_scripts/convergence/curves.py FOLDER
"""

from __future__ import annotations

import csv
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np

REFERENCE, OTHER_SEED = "stock", "stock_other_seed"
"""Runs with Megatron's own attention that differ in their seed alone: in weights and in the order of the data."""

_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
_GREY = "#666666"


@dataclass(frozen=True)
class Comparison:
    """Runs against the reference.

    Attributes:
        window: iterations over which losses are averaged before they are compared, so that what is compared is where
            training has come to and not which text a batch happened to have.
        curves: losses by run, float64 ``[num_iterations]``.
    """

    window: int
    curves: dict[str, np.ndarray]

    @property
    def band(self) -> np.ndarray:
        """What another seed makes of stock, as `distance` has it."""
        return self.distance(OTHER_SEED)

    @property
    def tested(self) -> list[str]:
        """Names of the runs that are compared with the band."""
        return [name for name in self.curves if name not in (REFERENCE, OTHER_SEED)]

    def smooth(self, name: str) -> np.ndarray:
        """Means over `window` iterations, ``[num_iterations - window + 1]``."""
        return np.convolve(self.curves[name], np.full(self.window, 1 / self.window), mode="valid")

    def distance(self, name: str) -> np.ndarray:
        """Mean absolute difference to the reference in the first and in the second half of training.

        Nats a token, float64 ``[2]``; infinite where a loss is no number.
        """
        difference = np.abs(self.smooth(name) - self.smooth(REFERENCE))
        found = np.array([half.mean() for half in np.array_split(difference, 2)])
        return np.where(np.isfinite(found), found, np.inf)

    @property
    def failures(self) -> list[str]:
        """One sentence for each run that leaves the band in a half of training."""
        return [
            f"{name} differs by {_numbers(self.distance(name))}, another seed by {_numbers(self.band)}"
            for name in self.tested
            if not np.all(self.distance(name) <= self.band)
        ]


def _numbers(distance: np.ndarray) -> str:
    return " and ".join(f"{value:.4f}" for value in distance)


def read(folder: Path) -> Comparison:
    """The runs of a folder, one NAME.jsonl each.

    Raises:
        ValueError: a run is missing or has not the iterations of the others.
    """
    curves = {path.stem: read_losses(path) for path in sorted(folder.glob("*.jsonl"))}
    for name in (REFERENCE, OTHER_SEED):
        if name not in curves:
            raise ValueError(f"folder: {folder} has no {name}.jsonl")
    lengths = {name: len(curve) for name, curve in curves.items()}
    if len(set(lengths.values())) != 1 or not lengths[REFERENCE]:
        raise ValueError(f"folder: the runs of {folder} have different numbers of iterations: {lengths}")
    return Comparison(window=max(1, lengths[REFERENCE] // 15), curves=curves)


def read_losses(path: Path) -> np.ndarray:
    """Losses of iterations 1, 2, ... as far as none is missing; of one that was trained twice the later."""
    records = [json.loads(line) for line in path.read_text().splitlines()]
    found = {record["iteration"]: record["lm loss"] for record in records}
    count = next(n for n in range(len(found) + 1) if n + 1 not in found)
    return np.array([found[n + 1] for n in range(count)], dtype=np.float64)


def table(comparison: Comparison) -> str:
    """Losses now and then, and the verdict."""
    c = comparison
    names = list(c.curves)
    num = len(c.curves[REFERENCE])
    shown = sorted({1, *np.linspace(1, num, 7).round().astype(int).tolist()})
    width = max(10, *(len(name) for name in names))
    lines = ["iteration  " + "  ".join(f"{name:>{width}}" for name in names)]
    for iteration in shown:
        values = "  ".join(f"{c.curves[name][iteration - 1]:>{width}.4f}" for name in names)
        lines.append(f"{iteration:>9}  {values}")
    lines.append(f"difference to {REFERENCE} of means over {c.window} iterations, first and second half of training:")
    lines += [f"  {name:<{width}}  {_numbers(c.distance(name))}" for name in names if name != REFERENCE]
    lines.append("; ".join(c.failures) if c.failures else "no run differs by more than another seed does")
    return "\n".join(lines)


def plot(comparison: Comparison, title: str, path: Path) -> None:
    """The curves with the band of two seeds, and below their differences to the reference."""
    c = comparison
    iterations = np.arange(c.window, len(c.curves[REFERENCE]) + 1)
    stock, other = c.smooth(REFERENCE), c.smooth(OTHER_SEED)
    figure, (above, below) = plt.subplots(
        2, 1, figsize=(8, 6.5), sharex=True, height_ratios=(2.2, 1), layout="constrained", dpi=150
    )
    low, high = np.minimum(stock, other), np.maximum(stock, other)
    above.fill_between(iterations, low, high, color="#BBBBBB", linewidth=0, label="between two seeds of stock")
    above.plot(iterations, stock, color="black", linewidth=4, alpha=0.35, label=REFERENCE)
    below.fill_between(iterations, -np.abs(other - stock), np.abs(other - stock), color="#BBBBBB", linewidth=0)
    below.axhline(0, color=_GREY, linewidth=0.8)
    for number, name in enumerate(c.tested):
        colour = _COLOURS[number % len(_COLOURS)]
        above.plot(iterations, c.smooth(name), color=colour, linewidth=1.3, label=name.replace("_", " "))
        below.plot(iterations, c.smooth(name) - stock, color=colour, linewidth=1.3)
    above.set_ylabel("loss (nats a token)")
    above.set_title(title)
    above.legend(frameon=False)
    below.set_ylabel(f"minus {REFERENCE}")
    below.set_xlabel(f"iteration (means over {c.window})")
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)
    plt.close(figure)


def write_csv(comparison: Comparison, path: Path) -> None:
    """All losses, one line an iteration."""
    names = list(comparison.curves)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["iteration", *names])
        for number, row in enumerate(zip(*comparison.curves.values(), strict=True), start=1):
            writer.writerow([number, *(f"{value:.6f}" for value in row)])


def report(folder: Path, title: str) -> int:
    """Table, plot and CSV of a folder of runs; 1 if a run leaves the band, else 0."""
    comparison = read(folder)
    print(table(comparison))
    plot(comparison, title, folder / "loss_curves.png")
    write_csv(comparison, folder / "losses.csv")
    print(f"see {folder / 'loss_curves.png'} and losses.csv")
    return 1 if comparison.failures else 0


if __name__ == "__main__":
    sys.exit(report(Path(sys.argv[1]), "Convergence"))
