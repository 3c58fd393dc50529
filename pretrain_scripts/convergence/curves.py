"""Loss curves of several runs: read, compared with what another seed makes of stock, printed and plotted.

python pretrain_scripts/convergence/curves.py FOLDER
"""

from __future__ import annotations

import csv
import itertools
import json
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np

STOCK = "stock"
"""Megatron's own attention."""

_CONTROL = f"{STOCK}_ranks_"

_NAME = re.compile(r"(?P<attention>\w+)_seed_(?P<seed>\d+)")
_VALIDATION = re.compile(r"validation loss at iteration \d+ on validation set \| lm loss value: (\S+)")
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
_GREY = "#666666"


def run_name(attention: str, seed: int) -> str:
    """Of a run's files; weights and the order of the data follow the seed."""
    return f"{attention}_seed_{seed}"


def control_name(ranks: int) -> str:
    """Of stock over another number of ranks: what the order of sums alone makes of the losses of a seed."""
    return f"{_CONTROL}{ranks}"


@dataclass(frozen=True)
class Comparison:
    """Runs against stock's of the same seed.

    Attributes:
        window: iterations over which losses are averaged before they are compared, so that what is compared is where
            training has come to and not which text a batch happened to have.
        curves: losses by run, float64 ``[num_iterations]``.
        validation: loss of the validation text after training, by run, of those that were validated.
    """

    window: int
    curves: dict[str, np.ndarray]
    validation: dict[str, float] = field(default_factory=dict)

    @property
    def attentions(self) -> list[str]:
        """Stock, and what is compared with it."""
        return list(dict.fromkeys([STOCK, *(_parts(name)[0] for name in self.curves)]))

    def runs(self, attention: str) -> list[str]:
        """Names of its runs."""
        return [name for name in self.curves if _parts(name)[0] == attention]

    @property
    def controls(self) -> list[str]:
        """Names of the runs of stock over another number of ranks."""
        return [name for name in self.curves if _parts(name)[0].startswith(_CONTROL)]

    @property
    def tested(self) -> list[str]:
        """Names of the runs of other attentions, which are compared with stock."""
        return [name for name in self.curves if name not in {*self.runs(STOCK), *self.controls}]

    @property
    def band(self) -> np.ndarray:
        """The least that another seed makes of stock, as `distance` has it, float64 ``[2]``."""
        return np.min([self.distance(*pair) for pair in itertools.combinations(self.runs(STOCK), 2)], axis=0)

    def smooth(self, name: str) -> np.ndarray:
        """Means over `window` iterations, ``[num_iterations - window + 1]``."""
        return np.convolve(self.curves[name], np.full(self.window, 1 / self.window), mode="valid")

    def reference(self, name: str) -> str:
        """Stock's run of the same seed."""
        return run_name(STOCK, _parts(name)[1])

    def distance(self, name: str, reference: str | None = None) -> np.ndarray:
        """Mean absolute difference to another run, by default its `reference`, in each half of training.

        Nats a token, float64 ``[2]``; infinite where a loss is no number.
        """
        difference = np.abs(self.smooth(name) - self.smooth(reference or self.reference(name)))
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


def _parts(name: str) -> tuple[str, int]:
    found = _NAME.fullmatch(name)
    if found is None:
        raise ValueError(f"folder: {name}.jsonl is not named ATTENTION_seed_NUMBER")
    return found["attention"], int(found["seed"])


def _numbers(distance: np.ndarray) -> str:
    return " and ".join(f"{value:.4f}" for value in distance)


def read(folder: Path) -> Comparison:
    """The runs of a folder, one NAME.jsonl each.

    Raises:
        ValueError: a run is missing or has not the iterations of the others.
    """
    curves = {path.stem: read_losses(path) for path in sorted(folder.glob("*.jsonl"))}
    stock = [name for name in curves if _parts(name)[0] == STOCK]
    if len(stock) < 2:
        raise ValueError(f"folder: {folder} has {len(stock)} runs of {STOCK}, of the 2 or more that make a band")
    for name in curves:
        if run_name(STOCK, _parts(name)[1]) not in stock:
            raise ValueError(f"folder: {folder} has no run of {STOCK} with the seed of {name}.jsonl")
    lengths = {name: len(curve) for name, curve in curves.items()}
    if len(set(lengths.values())) != 1 or not lengths[stock[0]]:
        raise ValueError(f"folder: the runs of {folder} have different numbers of iterations: {lengths}")
    validation = {name: read_validation(folder / f"{name}.log") for name in curves}
    known = {name: loss for name, loss in validation.items() if loss is not None}
    return Comparison(window=max(1, lengths[stock[0]] // 15), curves=curves, validation=known)


def read_validation(log: Path) -> float | None:
    """Loss of the validation text after the last iteration, from what Megatron prints; None if it printed none."""
    found = _VALIDATION.findall(log.read_text(errors="replace")) if log.exists() else []
    return float(found[-1]) if found else None


def read_losses(path: Path) -> np.ndarray:
    """Losses of iterations 1, 2, ... as far as none is missing; of one that was trained twice the later."""
    records = [json.loads(line) for line in path.read_text().splitlines()]
    found = {record["iteration"]: record["lm loss"] for record in records}
    count = next(n for n in range(len(found) + 1) if n + 1 not in found)
    return np.array([found[n + 1] for n in range(count)], dtype=np.float64)


def table(comparison: Comparison) -> str:
    """Losses now and then, of validation, and the verdict."""
    c = comparison
    names = list(c.curves)
    num = len(c.curves[names[0]])
    shown = sorted({1, *np.linspace(1, num, 7).round().astype(int).tolist()})
    width = max(10, *(len(name) for name in names))
    lines = ["iteration  " + "  ".join(f"{name:>{width}}" for name in names)]
    for iteration in shown:
        values = "  ".join(f"{c.curves[name][iteration - 1]:>{width}.4f}" for name in names)
        lines.append(f"{iteration:>9}  {values}")
    if c.validation:
        lines.append("validation after training, lowest to highest of the seeds, mean:")
        lines += [f"  {attention:<{width}}  {_range(c, attention)}" for attention in c.attentions]
    lines.append(
        f"difference to {STOCK} with the same seed of means over {c.window} iterations, each half of training:"
    )
    lines += [f"  {name:<{width}}  {_numbers(c.distance(name))}" for name in [*c.tested, *c.controls]]
    lines.append(f"  {STOCK + ', another seed':<{width}}  {_numbers(c.band)} at least")
    lines.append("; ".join(c.failures) if c.failures else "no run differs by more than another seed does")
    return "\n".join(lines)


def _range(comparison: Comparison, attention: str) -> str:
    losses = [comparison.validation[name] for name in comparison.runs(attention) if name in comparison.validation]
    return f"{min(losses):.4f} to {max(losses):.4f}, {np.mean(losses):.4f}" if losses else "not validated"


def plot(comparison: Comparison, title: str, path: Path) -> None:
    """Stock's band over its seeds with the curves of the others, and below their differences to stock's same seed."""
    c = comparison
    stock = np.stack([c.smooth(name) for name in c.runs(STOCK)])
    iterations = np.arange(c.window, c.window + stock.shape[1])
    figure, (above, below) = plt.subplots(
        2, 1, figsize=(8, 6.5), sharex=True, height_ratios=(2.2, 1), layout="constrained", dpi=150
    )
    label = f"{STOCK}, from the lowest to the highest of {len(stock)} seeds"
    above.fill_between(iterations, stock.min(0), stock.max(0), color="#BBBBBB", linewidth=0, label=label)
    spread = np.abs(stock[:, None] - stock[None]).max((0, 1))
    below.fill_between(iterations, -spread, spread, color="#BBBBBB", linewidth=0)
    below.axhline(0, color=_GREY, linewidth=0.8)
    for number, attention in enumerate(c.attentions[1:]):
        colour = _COLOURS[number % len(_COLOURS)]
        for name in c.runs(attention):
            shown = attention.replace("_", " ") if name == c.runs(attention)[0] else None
            above.plot(iterations, c.smooth(name), color=colour, linewidth=1.0, label=shown)
            below.plot(iterations, c.smooth(name) - c.smooth(c.reference(name)), color=colour, linewidth=1.0)
    above.set_ylabel("loss (nats a token)")
    above.set_title(title)
    above.legend(frameon=False)
    below.set_ylabel(f"minus {STOCK} of the seed")
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


def write_validation(comparison: Comparison, path: Path) -> None:
    """Losses of the validation text after training, one line a run."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["run", "loss"])
        writer.writerows((name, f"{loss:.6f}") for name, loss in comparison.validation.items())


def report(folder: Path, title: str) -> int:
    """Table, plot and CSV of a folder of runs; 1 if a run leaves the band, else 0."""
    comparison = read(folder)
    print(table(comparison))
    plot(comparison, title, folder / "loss_curves.png")
    write_csv(comparison, folder / "losses.csv")
    write_validation(comparison, folder / "validation.csv")
    print(f"see {folder / 'loss_curves.png'}, losses.csv and validation.csv")
    return 1 if comparison.failures else 0


if __name__ == "__main__":
    sys.exit(report(Path(sys.argv[1]), "Convergence"))
