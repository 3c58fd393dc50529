"""Predicted steps where each document is computed by a group of 1, 2, 4 ... ranks (`baselines.subgroups`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from benchmarks._lib.baselines.base import zigzag_of
from benchmarks._lib.baselines.subgroups import place
from benchmarks._lib.dispatches import count_dispatch
from megatron_magi.config import OverlapConfig
from megatron_magi.cost_model import Rates
from megatron_magi.mask import builders
from megatron_magi.plan import Dispatch, dispatch_from_chunks
from megatron_magi.plan.predict import predict


class SubgroupStep(NamedTuple):
    """A step of one layer, forward and backward.

    Attributes:
        step_us: microseconds until the last rank has finished.
        area: visible pairs of each rank, int64 ``[num_ranks]``.
        rows: tokens that each rank holds, likewise.
        received: rows of k and v that each rank fetches in a forward pass, likewise.
    """

    step_us: float
    area: np.ndarray
    rows: np.ndarray
    received: np.ndarray


def predict_subgroups(
    lengths: Sequence[int], num_ranks: int, is_causal: bool, rates: Rates, overlap: OverlapConfig
) -> SubgroupStep:
    """The step of packed documents over groups of ranks.

    Groups compute their documents like this project does it for a zigzag layout of each document, and fetch no keys
    that they do not need, which a ring does. A rank computes those of its larger groups first; ranks of a group begin
    together.
    """
    ends = np.cumsum(np.asarray(lengths, dtype=np.int64))
    documents = np.stack([ends - np.asarray(lengths), ends], axis=1)
    done, area, rows, received = np.zeros(num_ranks), *(np.zeros(num_ranks, dtype=np.int64) for _ in range(3))
    for size, groups in sorted(place(documents, num_ranks).items(), reverse=True):
        for number, mine in enumerate(groups):
            if not len(mine):
                continue
            ranks, of_group = slice(number * size, (number + 1) * size), np.asarray(lengths)[mine]
            dispatch = zigzag_documents(of_group, size)
            mask = builders.varlen(doc_lengths=of_group.tolist(), causal=is_causal)
            counts = count_dispatch(mask, dispatch, rates.ranks_per_node)
            done[ranks] = done[ranks].max() + predict(counts, max(dispatch.shard_lengths), rates, overlap).step_us
            area[ranks] += counts.work.area.sum(axis=0)
            rows[ranks] += np.array(dispatch.shard_lengths)
            received[ranks] += counts.received.sum(axis=0)
    return SubgroupStep(float(done.max()), area, rows, received)


def zigzag_documents(lengths: np.ndarray, num_ranks: int) -> Dispatch:
    """Zigzag in each document; pieces may differ by a token, so that documents need no padding."""
    ends = np.cumsum(lengths)
    parts = zigzag_of(np.stack([ends - lengths, ends], axis=1), num_ranks)
    runs = np.concatenate(parts)
    rank = np.repeat(np.arange(num_ranks), [len(part) for part in parts])
    order = np.argsort(runs[:, 0])
    runs, rank = runs[order], rank[order]
    return dispatch_from_chunks(int(ends[-1]), np.append(runs[:, 0], runs[-1, 1]), rank, num_ranks)
