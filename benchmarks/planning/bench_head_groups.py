"""Predicted gain where queries travel by groups of heads, not with all of them; needs no GPU.

    python -m benchmarks.planning.bench_head_groups [--csv FILE] [--gpus N ...] [--tokens N ...] [--masks NAME ...]
        [--groups N ...]

``rows_ms`` is the predicted step of the planner's choice for whole rows (`megatron_magi.plan.travel`), ``groups_ms``
that by groups (`megatron_magi.plan.head_groups`), ``copies_ms`` what it takes to bring tensors into the order of groups
and results back, and ``gain`` how much the step shortens by the better of both, copies included; 64:8 heads, rates of
an H100. ``plan_ms`` is the CPU time of the choice by groups.
"""

from __future__ import annotations

import itertools
import time

from benchmarks._lib.batches import DISTRIBUTED
from benchmarks._lib.dispatches import contiguous, zigzag
from benchmarks._lib.prediction import OVERLAP
from benchmarks._lib.provenance import print_row, table_parser, write_csv
from megatron_magi.backends.sm90.cost import H100
from megatron_magi.config import DispatchConfig, MagiConfig
from megatron_magi.plan.head_groups import copies_us
from megatron_magi.plan.plan import hosts_of_groups
from megatron_magi.plan.travel import choose_hosts

HEADER = ["mask", "tokens_a_gpu", "gpus", "layout", "groups", "home_ms", "rows_ms", "groups_ms", "copies_ms", "gain",
          "plan_ms"]  # fmt: skip
LAYOUTS = {"zigzag": zigzag, "contiguous": contiguous}


def rows(name: str, tokens: int, gpus: int, groups: list[int]) -> list[list]:
    """Lines of the table, of layouts whose queries travel."""
    mask, cost, lines = DISTRIBUTED[name](tokens * gpus).mask, OVERLAP.cost, []
    config = MagiConfig(dispatch=DispatchConfig(rates=H100), overlap=OVERLAP)
    for layout, make in LAYOUTS.items():
        dispatch = make(tokens * gpus, gpus)
        whole = choose_hosts(mask, dispatch, config)
        if whole.home is None or whole.predicted is None:
            continue
        for count in groups:
            begin = time.process_time()
            found, _ = hosts_of_groups(mask, dispatch, config, count)
            plan_ms = 1e3 * (time.process_time() - begin)
            by_groups, copying = found.predicted.step_us, 0.0
            if found.hosts is not None:
                copying = copies_us(tokens, cost, H100)
            best = min(whole.predicted.step_us, by_groups + copying)
            figures = (whole.home.step_us, whole.predicted.step_us, by_groups, copying)
            head = [name, tokens, gpus, layout, count, *(f"{us / 1e3:.3f}" for us in figures)]
            lines.append([*head, f"{1 - best / whole.predicted.step_us:.3f}", f"{plan_ms:.1f}"])
    return lines


def main() -> None:
    """Prints the table."""
    parser = table_parser(__doc__)
    parser.add_argument("--gpus", type=int, nargs="*", default=[2, 8, 64])
    parser.add_argument("--tokens", type=int, nargs="*", default=[8192, 32768], help="tokens a GPU")
    parser.add_argument("--masks", nargs="*", default=list(DISTRIBUTED), choices=DISTRIBUTED)
    parser.add_argument("--groups", type=int, nargs="*", default=[2, 8])
    options = parser.parse_args()
    lines = []
    for tokens, name, gpus in itertools.product(options.tokens, options.masks, options.gpus):
        for line in rows(name, tokens, gpus, options.groups):
            print_row(HEADER, line)
            lines.append(line)
    write_csv(options.csv, HEADER, lines)


if __name__ == "__main__":
    main()
