import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_magi.backends.blocked import block_plan as plans
from megatron_magi.backends.blocked.block_plan import LIMITS, BlockLimits, block_plan, make_block_plan
from megatron_magi.mask import AttnMask, builders
from megatron_magi.mask.dense import dense_mask
from megatron_magi.ops.slice_attention import slice_attention
from megatron_magi.runtime.lru import LruCache
from megatron_magi.runtime.upload import PackedArrays
from tests.ops.naive import masks, packed_causal

CPU = torch.device("cpu")


def tokens(selection):
    return range(selection.start, selection.stop) if isinstance(selection, slice) else selection.tolist()


def num_logits(plan):
    """Pairs that are computed, hidden ones included."""
    return sum(block.num_rows * chunk.num_keys for block in plan.blocks for chunk in block.chunks)


def visible_by_plan(plan, num_rows, num_keys):
    """How often the plan shows each pair, and how often it computes it."""
    shown, computed = (np.zeros((num_rows, num_keys), dtype=int) for _ in range(2))
    for block in plan.blocks:
        for chunk in block.chunks:
            hidden = torch.zeros(block.num_rows, chunk.num_keys, dtype=torch.bool)
            if chunk.mask is not None:
                hidden[:, chunk.mask.first : chunk.mask.last] = chunk.mask.hidden(plan.columns, block.num_rows)
            at = np.ix_(tokens(block.rows), tokens(chunk.keys))
            shown[at] += ~hidden.numpy()
            computed[at] += 1
    return shown, computed


@given(
    mask=masks(),
    call_cost=st.sampled_from([0, 20, 200]),
    max_rows=st.integers(1, 12),
    max_logits=st.sampled_from([50, 5000]),
)
def test_every_visible_pair_is_in_the_plan_once_and_no_other(mask, call_cost, max_rows, max_logits):
    limits = BlockLimits(call_cost, 1, max_rows, max_logits)
    plan = make_block_plan(mask.bands, 1, CPU, limits)
    visible = dense_mask(mask)
    shown, computed = visible_by_plan(plan, *visible.shape)
    np.testing.assert_array_equal(shown, visible)
    # Tokens of no pair are not touched, whatever they hold.
    assert not computed[~visible.any(axis=1)].any() and not computed[:, ~visible.any(axis=0)].any()
    assert computed.max(initial=0) <= 1 and num_logits(plan) == computed.sum()
    assert all(block.num_rows <= max_rows for block in plan.blocks)


def test_short_documents_share_blocks_and_long_ones_waste_little():
    many = packed_causal([20] * 100)
    plan = block_plan(many.bands, 4, CPU)
    assert len(plan.blocks) <= 25 and num_logits(plan) < 2000 * 2000 / 10
    long = packed_causal([4096])
    assert num_logits(block_plan(long.bands, 4, CPU)) < 1.1 * long.area


def test_a_plan_is_made_once_for_equal_bands():
    bands = packed_causal([5, 6]).bands
    assert block_plan(bands, 4, CPU) is block_plan(bands.copy(), 4, CPU)


def test_the_cache_of_plans_stays_within_its_bytes_over_many_masks(monkeypatch):
    cache = LruCache(max_bytes=200_000)
    monkeypatch.setattr(plans, "_plans", cache)
    first = block_plan(packed_causal([300]).bands, 1, CPU)
    for length in range(2, 400):
        block_plan(packed_causal([length, 5]).bands, 1, CPU)
        assert cache.num_bytes <= cache.max_bytes
    assert 1 < len(cache) < 400
    assert block_plan(packed_causal([300]).bands, 1, CPU) is not first
    kept = block_plan(packed_causal([399, 5]).bands, 1, CPU)
    assert block_plan(packed_causal([399, 5]).bands, 1, CPU) is kept


def test_a_plan_is_uploaded_in_one_copy(monkeypatch):
    # Scattered keys, rows with one interval and rows with several: all kinds of index tensors.
    bands = AttnMask([(0, 40, 0, 20, 0), (0, 40, 60, 100, 1), (40, 90, 30, 80, 3), (90, 100, 0, 100, 1)], 100).bands
    uploads, to = [], PackedArrays.to
    monkeypatch.setattr(PackedArrays, "to", lambda arrays, device: uploads.append(arrays) or to(arrays, device))
    plan = make_block_plan(bands, 1, CPU, BlockLimits(call_cost=40, min_rows=3, max_rows=7, max_logits=60))
    assert len(plan.blocks) > 10
    (arrays,) = uploads
    assert {place.dtype for place in arrays.places} == {torch.int32, torch.int64}


class LargestTensor(TorchDispatchMode):
    """Notes the size of the largest tensor that any operation returns."""

    num_elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.num_elements = max(self.num_elements, leaf.untyped_storage().nbytes() // leaf.element_size())
        return result


@pytest.mark.parametrize("name", ["sliding_window", "documents", "full"])
def test_no_tensor_grows_with_the_square_of_the_length(name):
    seqlen = {"sliding_window": 16384, "documents": 8192, "full": 2048}[name]
    mask = {
        "sliding_window": lambda: builders.sliding_window(seqlen, 64, 0),
        "documents": lambda: packed_causal([64] * (seqlen // 64)),
        "full": lambda: builders.full(seqlen),
    }[name]()
    q, k, v = (torch.randn(seqlen, 2, 4, requires_grad=True) for _ in range(3))
    with LargestTensor() as largest:
        out, _ = slice_attention(q, k, v, mask)
        torch.autograd.grad(out.sum(), [q, k, v])
    assert largest.num_elements <= max(LIMITS["cpu"].max_logits, 2 * q.numel()) < seqlen * seqlen
