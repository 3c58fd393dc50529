import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_magi.mask.builders import causal, prefix_tree
from megatron_magi.mask.dense import dense_mask
from megatron_magi.mask.microbatch import Microbatch
from megatron_magi.mask.named import prefix_tree as mask_of_fields
from megatron_magi.mask.prefix_tree import mask_of_parents


@st.composite
def trees(draw):
    """Node lengths in a random layout, and the paths of some nodes from their root."""
    num_nodes = draw(st.integers(1, 7))
    layout = draw(st.permutations(range(num_nodes)))
    parents = [-1] + [draw(st.integers(-1, i - 1)) for i in range(1, num_nodes)]
    lengths = [draw(st.integers(0, 4)) for _ in range(num_nodes)]
    paths = []
    for leaf in draw(st.lists(st.integers(0, num_nodes - 1), min_size=1, max_size=5)):
        path = []
        while leaf >= 0:
            path.append(layout[leaf])
            leaf = parents[leaf]
        paths.append(path[::-1])
    return lengths, paths


@given(trees())
def test_every_sample_is_causal_and_nothing_else_is_visible(tree):
    lengths, paths = tree
    mask, token_ranges = prefix_tree(lengths, paths)
    dense = dense_mask(mask)
    expected = np.zeros_like(dense)
    for path, ranges in zip(paths, token_ranges, strict=True):
        tokens = [t for r in ranges for t in range(r.start, r.end)]
        assert len(tokens) == sum(lengths[n] for n in path)
        for i, q in enumerate(tokens):
            expected[q, tokens[: i + 1]] = True
    np.testing.assert_array_equal(dense, expected)
    assert mask.area == expected.sum()
    parents = {child: parent for path in paths for parent, child in zip([-1, *path], path, strict=False)}
    assert mask_of_parents(lengths, parents) == mask


def test_one_chain_is_one_causal_slice():
    mask, token_ranges = prefix_tree([3, 0, 4, 2], [[0, 1, 2, 3]])
    assert mask == causal(9)
    assert token_ranges[0].to_naive_ranges() == [(0, 3), (3, 3), (3, 7), (7, 9)]


def test_a_prefix_with_many_answers_costs_one_full_slice_and_one_causal_slice_an_answer():
    mask, _ = prefix_tree([100] + [10] * 8, [[0, i] for i in range(1, 9)])
    assert len(mask.table) == 9  # the first answer goes on where the prefix ends


def conversation(num_turns):
    """Parents of nodes, depth first: each turn has an answer that ends there and one that goes on."""
    parents = {0: -1}
    for turn in range(num_turns):
        parents |= {2 * turn + 1: 2 * turn, 2 * turn + 2: 2 * turn}
    return parents


def test_rows_that_see_the_same_span_are_one_slice_over_all_turns():
    mask = mask_of_parents([3, 2, 3, 2, 3, 2, 3], conversation(3))
    full = [[5, 18, 0, 3], [10, 18, 5, 8], [15, 18, 10, 13]]
    assert [row[:4] for row in mask.table.tolist() if row[4] == 0] == full
    assert [row[:4] for row in mask.table.tolist() if row[4] == 1] == [[n, n + 5, n, n + 5] for n in (0, 5, 10)] + [
        [15, 18, 15, 18]
    ]


def of_fields(num_nodes, parents):
    nodes = {"node_lengths": np.ones((1, num_nodes), np.int64), "node_parents": np.array([list(parents.values())])}
    return mask_of_fields(Microbatch(np.zeros((1, num_nodes), np.int64), np.array([0, num_nodes]), nodes))


@pytest.mark.parametrize("make", [lambda n, parents: mask_of_parents([1] * n, parents), of_fields])
@pytest.mark.parametrize("tree", [conversation, lambda n: {node: node - 1 for node in range(2 * n + 1)}])
def test_the_work_grows_with_the_number_of_nodes_and_not_with_their_depth(make, tree):
    def lines(num_turns):
        count, parents = 0, tree(num_turns)

        def trace(_frame, event, _arg):
            nonlocal count
            count += event == "line"
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            make(len(parents), parents)
        finally:
            sys.settrace(before)
        return count

    assert lines(400) < 2.2 * lines(200)


@pytest.mark.parametrize("parents", [{0: -1, 1: 2, 2: 1}, {0: 0}, {0: 1}, {0: -2}])
def test_parents_that_are_no_forest_are_refused(parents):
    with pytest.raises(ValueError, match=r"^node_parents: a parent is no node"):
        mask_of_parents([1] * len(parents), parents)


@pytest.mark.parametrize(
    "paths, message",
    [
        ([[0, 3]], "sample 0 names node 3, there are 3 nodes"),
        ([[0, -1]], "sample 0 names node -1"),
        ([[0, 0]], "sample 0 reaches node 0"),
        ([[0, 2], [1, 2]], "sample 1 reaches node 2 from node 1, an earlier step from node 0"),
        ([[0, 2], [2]], "sample 1 reaches node 2 from no parent"),
    ],
)
def test_paths_that_are_no_tree_are_refused(paths, message):
    with pytest.raises(ValueError, match=message):
        prefix_tree([2, 2, 2], paths)
