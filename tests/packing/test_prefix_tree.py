"""A tree of rollouts trains as the rollouts one by one do, on one rank and on several."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_magi.api import calc_attn, dispatch, get_position_ids, magi_attn_flex_key, undispatch
from megatron_magi.mask import builders
from megatron_magi.mask.dense import dense_mask
from megatron_magi.mask.microbatch import Microbatch
from megatron_magi.mask.named import prefix_tree as mask_of_fields
from megatron_magi.packing import make_prefix_tree
from tests.packing.tiny_decoder import VOCABULARY, TinyDecoder

SAMPLE = st.lists(st.integers(0, 2), min_size=1, max_size=9)
SAMPLES = st.lists(SAMPLE, min_size=1, max_size=6)
DRAW = np.random.default_rng(0)
ROLLOUTS = [
    [*prompt, *turn, *DRAW.integers(0, VOCABULARY, n)]
    for prompt in DRAW.integers(0, VOCABULARY, (2, 12)).tolist()
    for turn in ([], DRAW.integers(0, VOCABULARY, 5).tolist())
    for n in (1, 4, 7)
]


def prefixes(samples):
    return {tuple(sample[:n]) for sample in samples for n in range(2, len(sample) + 1)}


@given(SAMPLES)
def test_there_is_one_row_for_each_prefix(samples):
    tree = make_prefix_tree(samples)
    assert tree.num_rows == len(prefixes(samples))
    assert tree.num_predicted == sum(len(sample) - 1 for sample in samples)
    assert tree.node_lengths.min(initial=1) > 0
    assert (tree.node_parents < np.arange(len(tree.node_parents))).all()
    for sample, inputs, labels, positions in zip(
        samples, tree.gather(tree.tokens), tree.gather(tree.labels), tree.gather(tree.position_ids), strict=True
    ):
        assert inputs.tolist() == sample[:-1]
        assert labels.tolist() == sample[1:]
        assert positions.tolist() == list(range(len(sample) - 1))


@given(SAMPLES, st.integers(0, 3))
def test_with_tokens_ahead_a_row_is_shared_by_samples_that_agree_in_them(samples, num_ahead):
    tree = make_prefix_tree(samples, num_ahead)
    known, end = set(), [None] * num_ahead  # at a sample's end there is what no token is
    for sample, rows in zip(samples, tree.gather(np.arange(tree.num_rows)), strict=True):
        known |= {(row, tuple([*sample, *end][: n + num_ahead])) for n, row in enumerate(rows.tolist(), 2)}
        assert tree.tokens[rows].tolist() == sample[:-1]
        assert tree.labels[rows].tolist() == sample[1:]
    assert len(known) == len({row for row, _ in known}) == len({tokens for _, tokens in known}) == tree.num_rows


@given(SAMPLES)
def test_a_row_sees_what_is_before_it_in_its_samples(samples):
    tree = make_prefix_tree(samples)
    expected = np.zeros((tree.num_rows, tree.num_rows), dtype=bool)
    for rows in tree.gather(np.arange(tree.num_rows)):
        expected[rows[:, None], rows] |= np.tri(len(rows), dtype=bool)
    assert (dense_mask(tree.mask) == expected).all()


@given(SAMPLES)
def test_nodes_are_as_few_as_branches_allow(samples):
    tree = make_prefix_tree(samples)
    ends = {sample[-1] for sample in tree.gather(np.arange(tree.num_rows)) if len(sample)}
    children = np.bincount(tree.node_parents[tree.node_parents >= 0], minlength=len(tree.node_lengths))
    last = np.cumsum(tree.node_lengths) - 1
    assert all(children[node] != 1 or last[node] in ends for node in range(len(last)))


def one_by_one(model, samples, weights):
    """The loss over samples, each computed by itself."""
    loss = torch.zeros((), dtype=torch.float64)
    for sample, weight in zip(samples, weights, strict=True):
        if len(sample) > 1:
            x = torch.tensor(sample)
            mask = builders.causal(len(sample) - 1)
            log_probs = model.of_mask(x[:-1], torch.arange(len(x) - 1), x[1:], mask)
            loss = loss - (weight * log_probs.exp()).sum()  # no linear function of log-probabilities
    return loss


def gradients(model, loss):
    return torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)


def assert_equal(ours, expected):
    for a, b in zip(ours, expected, strict=True):
        a, b = (torch.zeros(1, dtype=torch.float64) if x is None else x for x in (a, b))
        assert (a - b).abs().max() < 1e-12


@settings(max_examples=25)
@given(SAMPLES, st.data())
def test_losses_over_samples_have_the_gradients_of_separate_forwards(samples, data):
    weights = data.draw(st.lists(st.floats(-2, 2), min_size=len(samples), max_size=len(samples)))
    torch.manual_seed(0)
    model, tree = TinyDecoder(), make_prefix_tree(samples)
    expected = one_by_one(model, samples, weights)
    if not tree.num_rows:
        return
    tokens, positions, labels = map(torch.from_numpy, (tree.tokens, tree.position_ids, tree.labels))
    rows = model.of_mask(tokens, positions, labels, tree.mask)
    loss = -sum((w * own.exp()).sum() for w, own in zip(weights, tree.gather(rows), strict=True))
    assert abs(loss - expected) < 1e-12
    assert_equal(gradients(model, loss), gradients(model, expected))
    by_rows = -(torch.from_numpy(tree.weights(weights)) * rows.exp()).sum()
    assert abs(by_rows - expected) < 1e-12


def on_ranks(_rank, _num_ranks):
    """The largest difference of the loss and its gradients from samples one by one."""
    torch.manual_seed(0)
    model, tree = TinyDecoder(), make_prefix_tree(ROLLOUTS)
    weights = np.linspace(-1, 2, len(ROLLOUTS)).tolist()
    table = tree.mask.table
    types = [("full", "causal")[kind] for kind in table[:, 4]]
    total = tree.num_rows
    key = magi_attn_flex_key(table[:, :2], table[:, 2:4], types, total, total, cp_group_or_mesh=dist.group.WORLD)
    tokens, positions, labels = (
        dispatch(torch.from_numpy(x), key) for x in (tree.tokens, tree.position_ids, tree.labels)
    )
    assert len(tokens) == len(get_position_ids(key)) < total
    local = model(tokens, positions, labels, lambda q, k, v: calc_attn(q, k, v, key)[0])
    rows = undispatch(local, key)
    loss = -sum((w * own.exp()).sum() for w, own in zip(weights, tree.gather(rows), strict=True))
    ours = [torch.zeros(1) if x is None else x for x in gradients(model, loss)]
    for gradient in ours:
        dist.all_reduce(gradient)
    expected = one_by_one(model, ROLLOUTS, weights)
    assert_equal(ours, gradients(model, expected))
    return abs(loss - expected).item()


@pytest.mark.ranks(3)
def test_ranks_compute_what_one_does(ranks):
    assert max(ranks(3, on_ranks)) < 1e-12


def test_shared_prompts_are_computed_once():
    prompt = list(range(100))
    tree = make_prefix_tree([[*prompt, 200 + i] for i in range(16)])
    assert tree.num_predicted == 16 * 100
    assert tree.num_rows == 99 + 16  # the last token of the prompt has sixteen labels
    assert tree.node_lengths.tolist() == [99] + [1] * 16
    assert tree.node_parents.tolist() == [-1] + [0] * 16


def test_the_fields_for_megatron_make_the_same_mask():
    tree = make_prefix_tree(ROLLOUTS)
    item = tree.item(seqlen=100, num_nodes=40)
    mask = mask_of_fields(Microbatch(item["tokens"][None], np.array([0, 100]), {k: v[None] for k, v in item.items()}))
    n = tree.num_rows
    assert (dense_mask(mask)[:n, :n] == dense_mask(tree.mask)).all()
    assert not dense_mask(mask)[n:].any()
    assert item["loss_mask"].sum() == tree.num_predicted
    assert item["loss_mask"].dtype == np.float32
    # All items have the same shapes, so that a data loader can stack them.
    assert {name: x.shape for name, x in item.items()} == {name: (40 if "node" in name else 100,) for name in item}
    for name in ("tokens", "labels", "position_ids"):
        assert (item[name][:n] == getattr(tree, name)).all() and not item[name][n:].any()
    assert (item["node_parents"][len(tree.node_parents) :] == -1).all(), "no node"
    with pytest.raises(ValueError, match=f"seqlen: the tree needs {n}, got {n - 1}"):
        tree.item(n - 1, 40)
    with pytest.raises(ValueError, match="num_nodes: the tree needs"):
        tree.item(n, 1)


def test_a_tree_without_rows_gets_one_of_no_sample():
    tree = make_prefix_tree([[1], [2]])
    assert tree.num_rows == 0
    made = tree.with_a_row()
    assert (made.num_rows, made.num_predicted, made.mask.area) == (1, 0, 1)
    assert [own.shape for own in made.gather(np.zeros((1, 3)))] == [(0, 3), (0, 3)]
    assert made.weights([2, 3]).tolist() == [0]
    assert made.item(1, 1)["node_parents"].tolist() == [-1] and not made.item(4, 2)["loss_mask"].any()
    whole = make_prefix_tree([[1, 2]])
    assert whole.with_a_row() is whole
    assert make_prefix_tree([]).with_a_row().gather(np.zeros(1)) == []


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: make_prefix_tree([[1, 2, 3]]).weights(["1"]), r"samples\[0\]: expected a number"),
        (lambda: make_prefix_tree([[1, 2, 3]]).weights([None]), r"samples\[0\]: expected a number"),
        (
            lambda: make_prefix_tree([[1, 2, 3]]).weights([torch.ones(2, requires_grad=True)]),
            r"samples\[0\]: expected a",
        ),
        (lambda: make_prefix_tree([[1, 2, 3]]).weights([[1, float("nan")]]), r"samples\[0\]: expected finite weights"),
        (lambda: make_prefix_tree([[1, 2, 3]]).item(2.0, 1), "seqlen: expected an integer"),
        (lambda: make_prefix_tree([[1], []]), r"samples\[1\]: expected token ids"),
        (lambda: make_prefix_tree([[1, -1]]), r"samples\[0\]: expected token ids"),
        (lambda: make_prefix_tree([[1.5]]), r"samples\[0\]"),
        (lambda: make_prefix_tree([[1, 2, 3]]).weights([1, 2]), "samples: expected weights of 1 samples"),
        (lambda: make_prefix_tree([[1, 2, 3]]).weights([[1, 2, 3]]), r"samples\[0\]: expected a number or \[2\]"),
        (lambda: make_prefix_tree([[1, 2, 3]]).item(9, 9, [-1]), "samples: Megatron divides by the sum of weights"),
        (
            lambda: make_prefix_tree([[1, 2, 3]]).gather(np.zeros(3)),
            r"values: expected an array or a tensor \[2, ...\], got \[3\]",
        ),
        (lambda: make_prefix_tree([[1, 2, 3]]).gather([0.0, 0.0]), "values: expected an array .* got list"),
        (lambda: make_prefix_tree([[1, 2, 3]]).weights(["all"]), r"samples\[0\]: expected a number"),
        (lambda: make_prefix_tree([[1, 2, 3]]).weights(1), "samples: expected weights of 1 samples, got 1"),
        (lambda: make_prefix_tree([[1, 2, 3]]).item("9", 9), "seqlen: expected an integer, got '9'"),
        (lambda: make_prefix_tree([[1, 2]], -1), "num_ahead: "),
        (lambda: make_prefix_tree(None), "samples: expected token ids of each rollout, got None"),
    ],
)
def test_arguments_are_checked(make, message):
    with pytest.raises(ValueError, match=message):
        make()
