"""Backward of attention with other constants of the order of its work (`megatron_magi.backends.sm90.tuning`).

    python -m benchmarks.kernels.bench_backward_order --cells HEAD_DIM:HEADS_Q:HEADS_KV:MASK:LENGTH ...
        --changes NAME=VALUE[,NAME=VALUE] ... [--seconds S] [--csv FILE]

The present constants and each of the changes take turns in one process; a turn prepares the call anew, which its first
half, that does not count, takes. ``rate_over_present`` is the rate over that with the present constants; ``difference``
the largest of dq, dk, dv from theirs, relative to the norm.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from benchmarks._lib.cases import MASKS, Cell
from benchmarks._lib.provenance import write_csv
from benchmarks._lib.providers import FFA, Problem, make_problem
from benchmarks._lib.timing import time_together
from megatron_magi.backends.sm90 import tuning
from megatron_magi.runtime.lru import LruCache

HEADER = ["head_dim", "heads", "mask", "length", "change", "backward_ms", "tflops", "rate_over_present", "difference"]
PRESENT = "present"


def parse_change(text: str) -> tuple[str, dict[str, int | float]]:
    """A change as it was written, and its values by the names of constants.

    Raises:
        ArgumentTypeError: there is no such constant, or it is no number.
    """
    found: dict[str, int | float] = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        if not isinstance(getattr(tuning, name, None), int | float):
            raise argparse.ArgumentTypeError(f"{part}: {name!r} is no constant of {tuning.__name__} that is a number")
        found[name] = type(getattr(tuning, name))(value)
    return text, found


@contextmanager
def constants(change: dict[str, int | float]) -> Iterator[None]:
    """A context in which constants have other values."""
    before = {name: getattr(tuning, name) for name in change}
    try:
        for name, value in change.items():
            setattr(tuning, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(tuning, name, value)


class Variant:
    """The backward with a change, prepared anew whenever another variant ran before it."""

    last: Variant | None = None

    def __init__(self, problem: Problem, change: dict[str, int | float]) -> None:
        self._problem, self._change = problem, change
        self._provider: FFA | None = None

    def __call__(self) -> tuple[torch.Tensor, ...]:
        with constants(self._change):
            if Variant.last is not self:
                forget_plans()
                Variant.last, self._provider = self, FFA(self._problem)
            assert self._provider is not None
            return self._provider.backward()


def forget_plans() -> None:
    """Empties all caches of what was planned and prepared."""
    for cache in gc.get_objects():
        if issubclass(type(cache), LruCache):  # isinstance asks objects for their class, which some of torch warn of
            cache.drop(lambda key: True)


def difference(found: tuple[torch.Tensor, ...], right: tuple[torch.Tensor, ...]) -> float:
    """The largest of all gradients, relative to the norm."""
    return max(float((a.float() - b.float()).norm() / b.float().norm()) for a, b in zip(found, right, strict=True))


def measure(cell: Cell, changes: dict[str, dict], seconds: float) -> list[list]:
    """Rows of the table for one cell."""
    problem = make_problem(MASKS[cell.mask](cell.length), cell.shape, torch.bfloat16)
    variants = {name: Variant(problem, change) for name, change in ({PRESENT: {}} | changes).items()}
    right = variants[PRESENT]()
    off = {name: difference(variant(), right) for name, variant in variants.items()}
    times, _ = time_together(variants, seconds)
    failed = {name: ms for name, ms in times.items() if isinstance(ms, str)}
    assert not failed, failed
    flops = cell.shape.flops(problem.case.mask.area)[1]
    return [
        [*cell.columns.values(), cell.mask, cell.length, name, f"{ms:.4f}", f"{flops / ms / 1e9:.0f}",
         f"{times[PRESENT] / ms:.3f}", f"{off[name]:.1e}"]
        for name, ms in times.items()
    ]  # fmt: skip


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", nargs="+", type=Cell.parse, metavar="HEAD_DIM:HEADS_Q:HEADS_KV:MASK:LENGTH",
                        default=[Cell.parse("128:64:8:prefix_tree:8192")])  # fmt: skip
    parser.add_argument(
        "--changes",
        nargs="+",
        required=True,
        type=parse_change,
        metavar="NAME=VALUE[,...]",
        help="other values of constants",
    )
    parser.add_argument("--seconds", type=float, default=0.7, help="to time one cell, about")
    parser.add_argument("--csv", help="also write the rows to this file")
    args = parser.parse_args()
    rows: list[list] = []
    for cell in args.cells:
        for row in measure(cell, dict(args.changes), args.seconds):
            rows.append(row)
            print(*row, sep=",", flush=True)
        torch.cuda.empty_cache()
        write_csv(args.csv, HEADER, rows)


if __name__ == "__main__":
    main()
