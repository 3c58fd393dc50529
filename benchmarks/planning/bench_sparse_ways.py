"""Bytes that lists of keys move between ranks, counted, and predicted times to move them; needs no GPU.

    python -m benchmarks.planning.bench_sparse_ways [--csv FILE] [--ranks 2 8 16] [--keys N ...] [--densities P ...]

Lists of `benchmarks._lib.sparse_ways`, a zigzag layout, bf16, head_dim 128, 8 key heads (``keys``: 1). ``share``: the
largest share of a rank's keys that lists of another name, counted. ``all_mb``: rows of keys and values that a rank
receives in the forward if it gathers all; ``selected_mb``: if it fetches those that are selected, with a ``capacity``
of ``share``; gradients go the same way back. ``all_us`` and ``selected_us`` are predictions, not measured: of what both
passes take besides attention, by the rates of H100s with 8 ranks of a node (`megatron_magi.cost_model`), of which those
between nodes and the time of the host are assumed.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from benchmarks._lib.provenance import print_row, table_parser, write_csv
from benchmarks._lib.sparse_ways import BLOCK, DENSITIES, KEYS, PATTERNS, Case, lists_of, shape_of
from megatron_magi.backends.costs import DEFAULT
from megatron_magi.plan.sparse_ways import ways_us

HEADER = (
    "pattern", "keys", "ranks", "density", "share", "all_mb", "selected_mb", "all_us", "selected_us", "faster",
)  # fmt: skip
ROW_BYTES = 2 * 128 * 2  # of k and v of a key head
QUERIES = 2048  # whose lists of single keys are counted: together they name as many as those of all


def positions_of(num_tokens: int, rank: int, num_ranks: int) -> Tensor:
    """Tokens of a rank in the zigzag layout: of twice as many pieces as ranks one from each end."""
    pieces = torch.arange(num_tokens).chunk(2 * num_ranks)
    return torch.cat((pieces[rank], pieces[-1 - rank]))


def largest_share(case: Case, num_ranks: int, heads_kv: int) -> tuple[float, Tensor]:
    """The largest share of a rank's keys that lists of another rank name, for any key head; and lists of a rank."""
    places = [positions_of(case.num_keys, rank, num_ranks) for rank in range(num_ranks)]
    most, lists = 0, torch.empty(0)
    for rank, positions in enumerate(places):
        if rank == 0 or case.pattern in ("near", "keys"):  # of others positions do not matter
            lists = lists_of(case, positions[:QUERIES] if case.is_single else positions, heads_kv)
        if case.is_single:
            named = torch.zeros((1, case.num_keys), dtype=torch.bool)
            named[0, lists.flatten().long()] = True
        else:
            named = torch.zeros((len(lists), case.num_keys // BLOCK), dtype=torch.bool)
            named = named.scatter_(1, lists.flatten(1).long(), True).repeat_interleave(BLOCK, 1)
        most = max([most, *(int(named[:, at].sum(1).max()) for other, at in enumerate(places) if other != rank)])
    return most * num_ranks / case.num_keys, lists


def row(case: Case, num_ranks: int) -> list:
    """A line of the table."""
    heads_kv, own = 1 if case.is_single else 8, case.num_keys // num_ranks
    share, lists = largest_share(case, num_ranks, heads_kv)
    if case.is_single:
        lists = lists[:1].expand(own, -1, -1)
    row_bytes, capacity = heads_kv * ROW_BYTES, max(1, math.ceil(share * own))
    found = ways_us(shape_of(case, num_ranks, capacity, row_bytes, lists), DEFAULT)
    moved = [f"{(num_ranks - 1) * rows * row_bytes / 1e6:.2f}" for rows in (own, capacity)]
    head = [case.pattern, case.num_keys, num_ranks, f"{case.density:g}", f"{share:.4f}", *moved]
    return [*head, *(f"{x:.0f}" for x in found), "selected" if found.selected < found.all_keys else "all"]


def main() -> None:
    """Prints the table."""
    parser = table_parser(__doc__)
    parser.add_argument("--ranks", nargs="*", type=int, default=[2, 8, 16])
    parser.add_argument("--keys", nargs="*", type=int, default=KEYS, help="of the sequence")
    parser.add_argument("--densities", nargs="*", type=float, default=DENSITIES, help="percent")
    options = parser.parse_args()
    rows = []
    for num_keys in options.keys:
        for pattern in PATTERNS:
            for num_ranks in options.ranks:
                for density in options.densities:
                    rows.append(row(Case(pattern, num_keys, density), num_ranks))
                    print_row(HEADER, rows[-1])
        write_csv(options.csv, HEADER, rows)


if __name__ == "__main__":
    main()
