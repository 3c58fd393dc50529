"""The fields of the proposed TreePackedSeqParams: attention over segments is that of each path by itself."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("megatron.core", reason="megatron-core is not installed: pip install megatron_magi[megatron]")

from megatron_magi.api import calc_attn
from megatron_magi.mcore.tree_segments import key_of_segments
from megatron_magi.testing.spawn import run_ranks

STARTS, LENGTHS, PARENTS = (0, 11, 18, 24, 29), (11, 7, 4, 5, 3), (-1, 0, 1, 0, -1)
DEPTHS = (0, 11, 18, 11, 0)
TOTAL = 36  # two tokens after the third segment are in none, and four at the end


def path(segment):
    above = path(PARENTS[segment]) if PARENTS[segment] >= 0 else []
    return above + list(range(STARTS[segment], STARTS[segment] + LENGTHS[segment]))


def zigzag(rank, size):
    pieces = torch.arange(TOTAL).chunk(2 * size)
    return torch.cat([pieces[rank], pieces[2 * size - 1 - rank]]) if size > 1 else torch.arange(TOTAL)


def fields(rank, size, **others):
    positions = torch.zeros(TOTAL, dtype=torch.int64)
    for start, length, depth in zip(STARTS, LENGTHS, DEPTHS, strict=True):
        positions[start : start + length] = torch.arange(depth, depth + length)
    own = zigzag(rank, size)
    made = {
        "tree_segment_starts": STARTS,
        "tree_segment_lengths": LENGTHS,
        "tree_segment_parents": PARENTS,
        "tree_segment_depths": DEPTHS,
        "tree_local_position_ids": positions[own],
        "tree_cp_gather_inverse": torch.argsort(torch.cat([zigzag(r, size) for r in range(size)])),
        "tree_cp_local_token_count": len(own),
    }
    return SimpleNamespace(**{**made, **others})


def by_paths(q, k, v):
    """Each segment's queries in its path, as a sequence of its own."""
    out = torch.zeros_like(q)
    for segment, length in enumerate(LENGTHS):
        rows = path(segment)
        one = [x[rows].repeat_interleave(q.shape[1] // x.shape[1], 1).transpose(0, 1) for x in (q, k, v)]
        whole = torch.nn.functional.scaled_dot_product_attention(*one, is_causal=True).transpose(0, 1)
        out = out.index_copy(0, torch.tensor(rows[-length:]), whole[-length:])
    return out


def on_ranks(rank, num_ranks):
    torch.manual_seed(0)
    q, k, v, weight = (torch.randn(TOTAL, heads, 8, dtype=torch.float64) for heads in (4, 2, 2, 4))
    expected_inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    expected = by_paths(*expected_inputs)
    (expected * weight).sum().backward()
    own = zigzag(rank, num_ranks)
    inputs = [x[own].clone().requires_grad_() for x in (q, k, v)]
    key = key_of_segments(fields(rank, num_ranks), 4, 2, 8, dist.group.WORLD)
    out, _ = calc_attn(*inputs, key)
    (out * weight[own]).sum().backward()
    pairs = [(out, expected[own]), *((x.grad, y.grad[own]) for x, y in zip(inputs, expected_inputs, strict=True))]
    return max((x - y).abs().max().item() for x, y in pairs)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_rows_where_they_lie_attend_as_their_paths(num_ranks):
    assert max(run_ranks(on_ranks, num_ranks)) < 1e-12


@pytest.mark.parametrize(
    "wrong",
    [
        {"tree_segment_starts": None},
        {"tree_segment_starts": (0, 10, 18, 24, 29)},
        {"tree_segment_parents": (-1, 0, 1, 4, -1)},
        {"tree_segment_depths": (0, 11, 18, 18, 0)},
        {"tree_segment_lengths": (11, 7)},
        {"tree_local_position_ids": torch.arange(TOTAL)},
        {"tree_cp_gather_inverse": torch.zeros(TOTAL, dtype=torch.int64)},
        {"tree_cp_local_token_count": 7},
    ],
)
def test_fields_that_do_not_fit_are_refused_by_name(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        key_of_segments(fields(0, 1, **wrong))
