import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_magi.mask.builders import causal, prefix_tree
from megatron_magi.mask.dense import dense_mask


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


def test_one_chain_is_one_causal_slice():
    mask, token_ranges = prefix_tree([3, 0, 4, 2], [[0, 1, 2, 3]])
    assert mask == causal(9)
    assert token_ranges[0].to_naive_ranges() == [(0, 3), (3, 3), (3, 7), (7, 9)]


def test_a_prefix_with_many_answers_costs_one_full_slice_and_one_causal_slice_an_answer():
    mask, _ = prefix_tree([100] + [10] * 8, [[0, i] for i in range(1, 9)])
    assert len(mask.table) == 9  # the first answer goes on where the prefix ends


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
