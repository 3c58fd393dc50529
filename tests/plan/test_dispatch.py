"""The default dispatch: what it moves, and how evenly it spreads, at each tolerance."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_magi.config import DispatchConfig
from megatron_magi.mask import AttnMask, builders
from megatron_magi.plan import Dispatch, make_dispatch
from megatron_magi.plan.partition import areas_by_place, partition

from .test_plan import uneven_lengths

TOLERANCES = (1.0, 1.002, 1.005, 1.01, 1.02, 1.05, 1.1, 1.2, 1.5)
CASES = {  # tokens, documents, ranks, chunk size
    "fine": (65536, 20, 4, None),
    "coarse": (65536, 30, 8, 1024),
    "few documents": (131072, 8, 16, 1024),
}


def make_mask(kind: str, lengths: np.ndarray) -> AttnMask:
    if kind == "window":
        return builders.sliding_window(left=1024, right=0, doc_lengths=lengths)
    return builders.varlen(doc_lengths=lengths, causal=kind == "causal")


def fetched_rows(mask: AttnMask, dispatch: Dispatch) -> int:
    return int(partition(mask, dispatch).remote_rows.sum())


def balance(mask: AttnMask, dispatch: Dispatch) -> float:
    areas = sum(areas_by_place(partition(mask, dispatch)))
    return areas.max() / areas.mean()


@pytest.mark.parametrize("kind", ["full", "causal", "window"])
@pytest.mark.parametrize("case", CASES)
def test_a_wider_tolerance_fetches_at_most_5_percent_more_and_balance_stays_within_it(case, kind) -> None:
    tokens, documents, cp_size, chunk_size = CASES[case]
    for seed in range(3):
        mask = make_mask(kind, uneven_lengths(tokens, documents, seed))
        even = make_dispatch(mask, DispatchConfig(algorithm="min_heap", chunk_size=chunk_size), cp_size)
        reachable = max(1.001, balance(mask, even))
        fewest = float("inf")
        for tolerance in TOLERANCES:
            config = DispatchConfig(algorithm="affinity", balance_tolerance=tolerance, chunk_size=chunk_size)
            dispatch = make_dispatch(mask, config, cp_size)
            rows = fetched_rows(mask, dispatch)
            assert rows <= 1.05 * fewest, (seed, tolerance)
            assert balance(mask, dispatch) <= max(tolerance, reachable) + 1e-9, (seed, tolerance)
            fewest = min(fewest, rows)


def even_and_near(mask):
    """The dispatches of min_heap and of affinity without a tolerance, on 16 ranks."""
    even = make_dispatch(mask, DispatchConfig(algorithm="min_heap"), 16)
    return even, make_dispatch(mask, DispatchConfig(algorithm="affinity", balance_tolerance=1.0), 16)


def test_perfect_balance_in_the_default_dispatch_does_not_cost_the_rows_of_min_heap() -> None:
    for seed in range(2):
        mask = make_mask("full", uneven_lengths(1 << 18, 125, seed))
        even, near = even_and_near(mask)
        assert fetched_rows(mask, near) < 0.3 * fetched_rows(mask, even)
        assert balance(mask, near) <= 1.001


def test_a_balance_that_no_repair_reaches_is_approached_from_the_even_dispatch() -> None:
    """Eight window documents in 16 chunks a rank: pair swaps end just above what min-heap reaches."""
    for seed in range(2):
        mask = make_mask("window", uneven_lengths(1 << 18, 8, seed))
        even, near = even_and_near(mask)
        assert fetched_rows(mask, near) < 0.85 * fetched_rows(mask, even)
        assert balance(mask, near) <= max(1.001, balance(mask, even)) + 1e-9


def test_blocks_of_many_chunks_count_what_a_rank_lacks_of_them() -> None:
    """With blocks that every rank has a part of, chunks dealt to and fro would look as if nothing had to move."""
    mask = builders.varlen(doc_lengths=[1 << 22], causal=True)
    rows = {
        algorithm: fetched_rows(mask, make_dispatch(mask, DispatchConfig(algorithm=algorithm, chunk_size=1024), 8))
        for algorithm in ("affinity", "min_heap")
    }
    assert rows["affinity"] < 0.9 * rows["min_heap"]


def test_a_tolerance_without_end_is_allowed() -> None:
    for mask in (builders.varlen(doc_lengths=[300, 100], causal=True), AttnMask([], 400)):
        for tolerance in (float("inf"), 1e30):
            dispatch = make_dispatch(mask, DispatchConfig(algorithm="affinity", balance_tolerance=tolerance), 4)
            assert sorted(dispatch.shard_lengths) == [100] * 4
