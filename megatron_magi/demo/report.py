"""The table at the end of the demo, and whether the two runs agree."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron_magi.demo.training import Run

FP32_TOLERANCE = 1e-4
"""Largest relative difference of two losses in fp32. Rounding alone stays well below it."""

BF16_TOLERANCE = 1e-2
"""Largest relative difference of two losses in bf16, whose numbers have eight bits."""


@dataclass(frozen=True)
class Traffic:
    """What attention over all ranks moved in the whole run.

    Attributes:
        balance: largest area of a rank over the mean, worst microbatch of the run.
        mean_balance: the same, of areas summed over each step, mean of the steps.
        moved_bytes: keys and values fetched in all forward passes.
        lower_bound_bytes: those that were needed and not there.
    """

    balance: float
    mean_balance: float
    moved_bytes: int
    lower_bound_bytes: int


@dataclass(frozen=True)
class Comparison:
    """Two runs over the same data.

    Attributes:
        stock, magi: the runs.
        names: what to call them.
        tolerance: largest relative difference that counts as equal.
        traffic: of the second run; None when it had one rank.
    """

    stock: Run
    magi: Run
    names: tuple[str, str]
    tolerance: float
    traffic: Traffic | None

    @property
    def differences(self) -> list[float]:
        """Relative difference of the losses of each step; infinite where one is no number."""
        return [_difference(a, b) for a, b in zip(self.stock.losses, self.magi.losses, strict=True)]

    @property
    def largest_difference(self) -> float:
        """The largest of `differences`."""
        return max(self.differences)

    @property
    def agrees(self) -> bool:
        """Whether no step differs by more than the tolerance."""
        return self.largest_difference <= self.tolerance


def _difference(a: float, b: float) -> float:
    difference = abs(a - b) / abs(a) if a != 0 else abs(b)
    return difference if difference == difference else float("inf")


def traffic_of(run: Run, *, row_bytes: int, num_layers: int) -> Traffic | None:
    """Figures of a run from its records.

    Args:
        run: trained with plans.
        row_bytes: bytes of one row of keys and values in one layer.
        num_layers: layers with attention.
    """
    planned = [r for r in run.records if "areas" in r and len(r["areas"]) > 1]
    if not planned:
        return None
    sides = [max(r["areas"]) * len(r["areas"]) / sum(r["areas"]) for r in planned]
    return Traffic(
        balance=max(r["balance"] for r in planned),
        mean_balance=sum(sides) / len(sides),
        moved_bytes=sum(r["received_rows"] for r in planned) * row_bytes * num_layers,
        lower_bound_bytes=sum(r["lower_bound_rows"] for r in planned) * row_bytes * num_layers,
    )


def shown_steps(num_steps: int) -> list[int]:
    """1, 10, 20 and so on, and the last."""
    return sorted({1, *range(10, num_steps + 1, 10), num_steps})


def table(comparison: Comparison) -> str:
    """The comparison as lines of text."""
    c = comparison
    width = max(12, *(len(name) for name in c.names))
    head = f"{'step':>6}  {c.names[0]:>{width}}  {c.names[1]:>{width}}  {'difference':>10}"
    lines = [head, "-" * len(head)]
    for step in shown_steps(len(c.stock.losses)):
        a, b, difference = (values[step - 1] for values in (c.stock.losses, c.magi.losses, c.differences))
        lines.append(f"{step:>6}  {a:>{width}.6f}  {b:>{width}.6f}  {difference:>10.1e}")
    lines += ["-" * len(head)]
    verdict = "equal" if c.agrees else "NOT EQUAL"
    lines.append(f"largest relative difference  {c.largest_difference:.1e}  (allowed {c.tolerance:.0e}): {verdict}")
    lines.append(f"tokens a second              {c.stock.tokens_per_s:,.0f}  and  {c.magi.tokens_per_s:,.0f}")
    if c.traffic is not None:
        t = c.traffic
        moved, bound = t.moved_bytes / 1e6, t.lower_bound_bytes / 1e6
        lines.append(
            f"largest area over mean area  {t.mean_balance:.4f} a step, {t.balance:.4f} in the worst microbatch"
        )
        lines.append(f"keys and values fetched      {moved:,.2f} MB in all forward passes; lower bound {bound:,.2f} MB")
    return "\n".join(lines)


def write_json(path: Path, comparison: Comparison) -> None:
    """All figures of the comparison, for other programs."""
    found = asdict(comparison)
    found |= {"largest_difference": comparison.largest_difference, "agrees": comparison.agrees}
    path.write_text(json.dumps(found, indent=1))
