"""Plans for several nodes: ranks that need each other's keys are neighbours, and transfers are told in two levels."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_magi.config import CommConfig, DispatchConfig, MagiConfig, OverlapConfig
from megatron_magi.mask.builders import causal, varlen
from megatron_magi.plan import dispatch_from_chunks, make_plan
from megatron_magi.plan.chunks import ChunkedMask, chunk_bounds
from megatron_magi.plan.dispatch import assign_chunks
from megatron_magi.plan.nodes import gather_in_nodes, nodes_in_use


def config(ranks_per_node: int | None, **dispatch) -> MagiConfig:
    return MagiConfig(dispatch=DispatchConfig(**dispatch), comm=CommConfig(ranks_per_node=ranks_per_node))


def rows_between_nodes(plan, per_node: int) -> int:
    """Distinct rows that each node fetches of the others."""
    rows = 0
    for rank in range(plan.cp_size):
        for transfer in plan.for_rank(rank).transfers:
            edges = np.concatenate([[0], np.cumsum(transfer.send_splits)])
            for first in range(0, plan.cp_size, per_node):
                if first != rank - rank % per_node:
                    needed = transfer.send_index[edges[first] : edges[first + per_node]]
                    rows += len(np.unique(needed))
    return rows


@pytest.mark.parametrize("cp_size", [4, 8])
def test_documents_stay_inside_a_node_where_that_costs_nothing(cp_size):
    # Long and short documents in turn: the same ranks share documents whatever their numbers are.
    lengths = [4096, 300, 3000, 500, 6000, 200, 2000, 700, 5000, 400] * 2
    mask = varlen(doc_lengths=lengths, causal=True)
    plain = make_plan(mask, config(None, algorithm="affinity"), cp_size)
    gathered = make_plan(mask, config(2, algorithm="affinity"), cp_size)
    assert sorted(plain.stats().areas) == sorted(gathered.stats().areas)
    assert sorted(plain.stats().received_rows) == sorted(gathered.stats().received_rows)
    assert rows_between_nodes(gathered, 2) < rows_between_nodes(plain, 2)
    sizes = {len(chunks) for chunks in map(np.flatnonzero, gathered.dispatch.chunk_rank == np.arange(cp_size)[:, None])}
    assert len(sizes) == 1


def test_neighbours_are_the_best_of_all_pairings_of_four_ranks():
    mask, cp_size = varlen(doc_lengths=[900, 200, 1100, 400, 700, 796], causal=True), 4
    dispatch = DispatchConfig(algorithm="min_heap", chunk_size=64)
    bounds = chunk_bounds(mask.total_seqlen_q, cp_size, dispatch)
    rank = assign_chunks(ChunkedMask(mask, bounds, cp_size), dispatch, MagiConfig().overlap)

    def crossing(numbers: np.ndarray) -> int:
        dispatched = dispatch_from_chunks(mask.total_seqlen_q, bounds, numbers, cp_size)
        return rows_between_nodes(make_plan(mask, MagiConfig(), cp_size, dispatched), 2)

    pairings = ([0, 1, 2, 3], [0, 2, 1, 3], [0, 3, 1, 2])
    number_of = [np.argsort(np.array(order)) for order in pairings]
    least = min(crossing(number[rank]) for number in number_of)
    assert crossing(gather_in_nodes(mask, bounds, rank, cp_size, 2)) == least


def test_ranks_keep_their_numbers_where_no_others_are_better():
    mask, rank = varlen(doc_lengths=[512, 512], causal=False), np.array([2, 3, 2, 3, 0, 1, 0, 1])
    np.testing.assert_array_equal(gather_in_nodes(mask, np.arange(9) * 128, rank, 4, 2), rank)


def test_a_dispatch_that_was_asked_for_by_name_keeps_its_numbers():
    for algorithm in ("zigzag", "sequential", "min_heap"):
        plans = [make_plan(causal(4096), config(n, algorithm=algorithm), 4) for n in (None, 2)]
        assert np.array_equal(plans[0].dispatch.chunk_rank, plans[1].dispatch.chunk_rank)


@pytest.mark.parametrize(("per_node", "cp_size", "nodes"), [(None, 4, None), (1, 4, None), (4, 4, None), (2, 4, 2)])
def test_levels_are_made_where_there_are_several_nodes_of_several_ranks(per_node, cp_size, nodes):
    assert nodes_in_use(per_node, cp_size) == nodes
    transfers = make_plan(causal(1024), config(per_node), cp_size).for_rank(0).transfers
    assert transfers and all((t.levels is not None) == (nodes is not None) for t in transfers)


def test_ranks_that_are_no_whole_number_of_nodes_are_refused():
    with pytest.raises(ValueError, match="ranks_per_node: 6 ranks are no whole number of nodes of 4"):
        make_plan(causal(1024), config(4), 6)


def test_plans_with_and_without_nodes_do_not_pass_for_the_same():
    assert make_plan(causal(1024), config(2), 4).plan_hash != make_plan(causal(1024), config(None), 4).plan_hash


def test_stages_are_not_joined_where_nodes_are_told_apart():
    for nodes in (None, 2):
        plan = make_plan(
            causal(512), MagiConfig(overlap=OverlapConfig(degree=2), comm=CommConfig(ranks_per_node=nodes)), 4
        )
        assert (plan.for_rank(0).joined is None) == (nodes is not None)
