"""Predicted gain if queries travelled by groups of heads, not with all of them; needs no GPU.

    python -m benchmarks.planning.bench_head_groups [--csv FILE] [--gpus N ...] [--tokens N ...] [--masks NAME ...]
        [--groups N ...]

A group is some key heads with their query heads. Attention of each is a sequence of its own, so the planner is asked
for where the queries of ``groups`` copies of the mask are computed, over copies of the layout, with as many times fewer
heads: any (row, group) may travel, and hosts fetch the keys of the groups that they compute. ``rows_ms`` is the
predicted step of the planner's choice for whole rows (`megatron_magi.plan.travel`), ``groups_ms`` that by groups,
``copies_ms`` what it takes to bring tensors of ``[rows, heads, dim]`` into the order of groups and results back, and
``gain`` how much the step shortens, copies included; 64:8 heads, rates of an H100.
"""

from __future__ import annotations

import argparse
import itertools
from dataclasses import replace

import numpy as np

from benchmarks._lib.batches import DISTRIBUTED
from benchmarks._lib.dispatches import contiguous, zigzag
from benchmarks._lib.prediction import OVERLAP
from benchmarks._lib.provenance import write_csv
from megatron_magi.backends.sm90.cost import H100
from megatron_magi.config import CostModel, DispatchConfig, MagiConfig
from megatron_magi.cost_model import Rates
from megatron_magi.mask import AttnMask
from megatron_magi.plan import Dispatch, dispatch_from_chunks
from megatron_magi.plan.travel import Choice, choose_hosts

HEADER = ["mask", "tokens_a_gpu", "gpus", "layout", "groups", "home_ms", "rows_ms", "groups_ms", "copies_ms", "gain"]
LAYOUTS = {"zigzag": zigzag, "contiguous": contiguous}


def copies_of_mask(mask: AttnMask, groups: int) -> AttnMask:
    """The mask of each group of heads, one after the other."""
    total, table = mask.total_seqlen_q, np.asarray(mask.table)
    offset = np.array([total, total, total, total, 0])
    return AttnMask(np.concatenate([table + g * offset for g in range(groups)]), groups * total)


def copies_of_layout(dispatch: Dispatch, groups: int) -> Dispatch:
    """The layout of each group of heads: a token is held by the same rank in all."""
    total, starts = dispatch.padded_seqlen, dispatch.chunk_bounds[:-1]
    bounds = np.append(np.concatenate([starts + g * total for g in range(groups)]), groups * total)
    return dispatch_from_chunks(groups * total, bounds, np.tile(dispatch.chunk_rank, groups), dispatch.cp_size)


def choice(mask: AttnMask, dispatch: Dispatch, groups: int, cost: CostModel) -> Choice:
    """Where queries are computed if they travel by so many groups."""
    heads = replace(cost, num_heads_q=cost.num_heads_q // groups, num_heads_kv=cost.num_heads_kv // groups)
    config = MagiConfig(dispatch=DispatchConfig(rates=H100), overlap=replace(OVERLAP, cost=heads))
    return choose_hosts(copies_of_mask(mask, groups), copies_of_layout(dispatch, groups), config)


def copies_us(tokens: int, cost: CostModel, rates: Rates) -> float:
    """Microseconds to copy q, k, v, out and their gradients once, read and written."""
    dk, dv = cost.head_dims
    elements = 2 * (cost.num_heads_q + cost.num_heads_kv) * (dk + dv)
    return 2 * tokens * elements * cost.element_bytes / (rates.memory_gbytes_per_s * 1e3)


def rows(name: str, tokens: int, gpus: int, groups: list[int]) -> list[list]:
    """Lines of the table, of layouts whose queries travel."""
    mask, cost, lines = DISTRIBUTED[name](tokens * gpus).mask, OVERLAP.cost, []
    for layout, make in LAYOUTS.items():
        dispatch = make(tokens * gpus, gpus)
        whole = choice(mask, dispatch, 1, cost)
        if whole.home is None or whole.predicted is None:
            continue
        for count in groups:
            found = choice(mask, dispatch, count, cost)
            by_groups, copying = found.predicted.step_us, 0.0
            if found.hosts is not None:
                copying = copies_us(tokens, cost, H100)
            best = min(whole.predicted.step_us, by_groups + copying)
            figures = (whole.home.step_us, whole.predicted.step_us, by_groups, copying)
            head = [name, tokens, gpus, layout, count, *(f"{us / 1e3:.3f}" for us in figures)]
            lines.append([*head, f"{1 - best / whole.predicted.step_us:.3f}"])
    return lines


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", help="also write the rows to this file")
    parser.add_argument("--gpus", type=int, nargs="*", default=[2, 8, 64])
    parser.add_argument("--tokens", type=int, nargs="*", default=[8192, 32768], help="tokens a GPU")
    parser.add_argument("--masks", nargs="*", default=list(DISTRIBUTED), choices=DISTRIBUTED)
    parser.add_argument("--groups", type=int, nargs="*", default=[2, 8])
    options = parser.parse_args()
    lines = []
    for tokens, name, gpus in itertools.product(options.tokens, options.masks, options.gpus):
        for line in rows(name, tokens, gpus, options.groups):
            print("  ".join(f"{h}={c}" for h, c in zip(HEADER, line, strict=True)), flush=True)
            lines.append(line)
    if options.csv:
        write_csv(options.csv, HEADER, lines)


if __name__ == "__main__":
    main()
