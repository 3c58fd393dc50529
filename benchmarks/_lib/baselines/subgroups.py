"""Documents over groups of ranks of their own: short ones whole on one rank, long ones in a ring of two or more."""

from __future__ import annotations

import heapq

import numpy as np
import torch
from torch import Tensor

from benchmarks._lib.baselines.base import Baseline, Cluster, Unsupported, document_bounds, num_tokens, zigzag_of
from benchmarks._lib.baselines.ring import Grid, Walk
from benchmarks._lib.cases import Case


class Subgroups(Baseline):
    """Full and causal documents. Ranks hold different numbers of tokens: only work is balanced."""

    def __init__(self, case: Case, cluster: Cluster, num_heads_kv: int, impl: str = "auto") -> None:
        del num_heads_kv
        if not case.plain or case.window is not None or case.doc_lengths is None:
            raise Unsupported("subgroups are for full and causal documents")
        documents = document_bounds(case)
        placed = sorted(place(documents, cluster.num_ranks).items(), reverse=True)
        if not all(any(len(groups[rank // size]) for size, groups in placed) for rank in range(cluster.num_ranks)):
            raise Unsupported("there are too few documents: a rank gets none")
        self._walks: list[Walk] = []
        rows = rows_of(documents, dict(placed), cluster.num_ranks)
        self.note = f"a rank holds up to {rows.max() / rows.mean():.2f} times the mean of the tokens"
        for size, groups in placed:  # rings of many ranks first, on all ranks
            grid, mine = Grid.of(cluster, cluster.table(size)), groups[cluster.rank // size]
            if len(mine):
                self._walks.append(Walk(case, grid, zigzag_of(documents[mine], size), impl))
        self.runs = np.concatenate([walk.runs for walk in self._walks])

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows = [num_tokens(walk.runs) for walk in self._walks]
        parts = zip(self._walks, *(x.split(rows) for x in (q, k, v)), strict=True)
        return torch.cat([walk.attend(*part) for walk, *part in parts])


def rows_of(documents: np.ndarray, placed: dict[int, list[np.ndarray]], num_ranks: int) -> np.ndarray:
    """Tokens of each rank, but for remainders, float64 ``[num_ranks]``; ``placed``: as `place` returns it."""
    rows, length = np.zeros(num_ranks), documents[:, 1] - documents[:, 0]
    for size, groups in placed.items():
        for number, mine in enumerate(groups):
            rows[number * size : (number + 1) * size] += length[mine].sum() / size
    return rows


def place(documents: np.ndarray, num_ranks: int) -> dict[int, list[np.ndarray]]:
    """Which documents the groups of each size compute; a group of ``size`` neighbours begins at a multiple of it.

    A document gets the fewest ranks, a power of two, with which its work on one of them is no more than the mean of all
    ranks; the largest come first, each to the group whose busiest rank has least to do.

    Returns:
        For each size numbers of documents in ascending order, for each group.
    """
    work = (documents[:, 1] - documents[:, 0]).astype(np.float64) ** 2
    sizes = [1 << i for i in range(num_ranks.bit_length()) if num_ranks % (1 << i) == 0]
    if num_ranks not in sizes:
        sizes.append(num_ranks)
    fair, load = work.sum() / num_ranks, np.zeros(num_ranks)
    found: dict[int, list[list[int]]] = {size: [[] for _ in range(num_ranks // size)] for size in sizes}
    for document in heapq.nlargest(len(work), range(len(work)), key=lambda i: (work[i], -i)):
        size = next((size for size in sizes if work[document] <= size * fair * (1 + 1e-9)), num_ranks)
        group = int(load.reshape(-1, size).max(axis=1).argmin())
        load[group * size : (group + 1) * size] += work[document] / size
        found[size][group].append(document)
    return {size: [np.sort(np.array(group, dtype=np.int64)) for group in groups] for size, groups in found.items()}
