"""The shift of multi-token prediction in a prefix tree is that of each sample by itself, over any number of ranks."""

import numpy as np
import pytest
import torch
import torch.distributed as dist

pytest.importorskip("megatron.core", reason="megatron-core is not installed: pip install megatron_magi[megatron]")

from megatron_magi.mask.microbatch import Microbatch, sequence_bounds
from megatron_magi.mcore.tree_roll import TreeRoll, tree_arrays
from megatron_magi.packing import make_prefix_tree
from megatron_magi.plan import given_dispatch
from megatron_magi.testing.spawn import run_ranks

PROMPT = [5, 6, 7, 8]
SAMPLES = [
    [[*PROMPT, 1, 2, 3], [*PROMPT, 1, 2, 4, 9], [*PROMPT, 1], [*PROMPT, 1], [3], [7, 7, 7]],
    [[*PROMPT, *range(n)] for n in (0, 3, 8)],
]
SEQLEN, DEPTHS = 40, 2


def microbatch(num_ahead=DEPTHS):
    trees = [make_prefix_tree(samples, num_ahead) for samples in SAMPLES]
    weights = [[np.arange(1, len(s)) * (i + 1) for i, s in enumerate(samples)] for samples in SAMPLES]
    items = [tree.item(SEQLEN, 12, own) for tree, own in zip(trees, weights, strict=True)]
    fields = {name: torch.from_numpy(np.stack([item[name] for item in items])) for name in items[0]}
    return trees, weights, Microbatch(fields["tokens"], sequence_bounds(2, SEQLEN), fields)


def expected(trees, weights, depth):
    """Tokens, labels and weights after so many shifts, ``[2 * SEQLEN]`` each, from the samples one by one."""
    out = np.zeros((3, 2 * SEQLEN), dtype=np.int64)
    for i, (tree, own, samples) in enumerate(zip(trees, weights, SAMPLES, strict=True)):
        for rows, weight, sample in zip(tree.gather(np.arange(tree.num_rows)), own, samples, strict=True):
            rows = rows[: max(len(rows) - depth, 0)] + i * SEQLEN
            out[0, rows], out[1, rows] = sample[depth : len(rows) + depth], sample[depth + 1 : len(rows) + depth + 1]
            out[2, rows] += weight[depth:]
    return out


def on_ranks(rank, num_ranks):
    trees, weights, batch = microbatch()
    dispatch = given_dispatch("zigzag", 2 * SEQLEN, num_ranks)
    arrays = tree_arrays(batch, dispatch, rank, DEPTHS)
    tree = TreeRoll(*(torch.from_numpy(arrays[name]) for name in TreeRoll._fields))
    own = dispatch.global_indices()[rank]
    rows = [batch.fields[name].reshape(-1)[own] for name in ("tokens", "labels", "loss_mask")]
    for depth in range(DEPTHS + 1):
        got = torch.stack([x.long() for x in rows]).numpy()
        np.testing.assert_array_equal(got, expected(trees, weights, depth)[:, own])
        rows = [tree(x, dist.group.WORLD) for x in rows]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_shifts_are_those_of_the_samples(num_ranks):
    run_ranks(on_ranks, num_ranks)


def test_a_tree_whose_rows_do_not_say_what_follows_is_refused():
    _, _, batch = microbatch(num_ahead=1)
    tree_arrays(batch, given_dispatch("zigzag", 2 * SEQLEN, 1), 0, 1)
    with pytest.raises(ValueError, match=r"make_prefix_tree\(samples, num_ahead=2\)"):
        tree_arrays(batch, given_dispatch("zigzag", 2 * SEQLEN, 1), 0, 2)
