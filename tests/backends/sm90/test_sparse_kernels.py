"""The sparse Hopper kernels against fp64."""

from __future__ import annotations

import pytest
import torch

from megatron_magi.backends.sm90 import sparse as sparse_hopper
from megatron_magi.backends.sm90 import tuning
from megatron_magi.backends.sm90.sparse_lists import lists_of, lists_of_mask, lists_of_queries
from megatron_magi.operands.sparse_pattern import SparsePattern, num_blocks
from megatron_magi.ops.sparse_attention import block_sparse_attention, index_sparse_attention
from tests.backends.sm90.sparse_cases import (
    check_backward,
    check_forward,
    csr_of_mask,
    lists_with_gaps,
    make_case,
    random_mask,
    to_cuda,
)
from tests.gpu_memory import needs_gigabytes

pytestmark = [pytest.mark.gpu, pytest.mark.sm90]

# queries, keys, heads, queries of a block
SHAPES = [
    (8, 1000, (128, 1), 1),
    (300, 517, (16, 2), 128),
    (333, 700, (7, 7), 64),
    (100, 130, (12, 2), 5),
    (70, 3000, (64, 1), 2),
    (5, 64, (256, 1), 1),
    (257, 1024, (32, 4), 16),
]


def block_pattern(form, lists, num_rows, num_keys, q_block, k_block, causal, seed=0) -> SparsePattern:
    generator = torch.Generator().manual_seed(seed)
    mask = random_mask(generator, lists, num_rows, num_keys, q_block, k_block)
    tensors = {
        "mask": lambda: (mask,),
        "csr": lambda: csr_of_mask(mask),
        "lists": lambda: (lists_with_gaps(mask, generator),),
    }
    return to_cuda(SparsePattern(tensors[form](), q_block, k_block, causal))


def index_pattern(lists, num_rows, num_keys, topk, seed=0) -> SparsePattern:
    """Keys in random order, some lists cut short, some empty, -1 among them."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand((lists, num_rows, num_keys), generator=generator).argsort(-1)[..., :topk]
    kept = torch.randint(-topk // 4, 2 * topk, (lists, num_rows, 1), generator=generator)
    order = order.where(
        (torch.arange(order.shape[-1]) < kept) & (torch.rand(order.shape, generator=generator) < 0.9), -1
    )
    return to_cuda(SparsePattern((order.to(torch.int32),), 1, 1, False))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("form", ["mask", "csr", "lists"])
@pytest.mark.parametrize("k_block", [64, 128])
@pytest.mark.parametrize("shape", SHAPES)
def test_block_sparse_forward_matches_fp64(shape, k_block, form, causal):
    num_rows, num_keys, heads, q_block = shape
    for lists in (1, heads[1]):
        pattern = block_pattern(form, lists, num_rows, num_keys, q_block, k_block, causal)
        check_forward(make_case(pattern, num_rows, num_keys, heads))


@pytest.mark.parametrize("topk", [1, 100, 128, 300, 517])
@pytest.mark.parametrize("shape", SHAPES)
def test_index_sparse_forward_matches_fp64(shape, topk):
    num_rows, num_keys, heads, _ = shape
    for lists in (1, heads[1]):
        check_forward(make_case(index_pattern(lists, num_rows, num_keys, topk, topk), num_rows, num_keys, heads))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", [64, 128])
def test_every_compiled_forward_matches_fp64(dim, dtype):
    for pattern in (block_pattern("mask", 2, 200, 900, 16, 64, True), index_pattern(2, 200, 900, 200)):
        x = make_case(pattern, 200, 900, (32, 2), dim, dtype)
        check_forward(x)
        check_forward(x, torch.randn(32, device="cuda"))
        check_forward(x, torch.randn(200, 32, device="cuda"))


def test_logits_that_overflow_exponentials_are_computed_anew():
    for pattern in (block_pattern("mask", 1, 64, 2000, 8, 64, False), index_pattern(1, 64, 2000, 700)):
        x = make_case(pattern, 64, 2000, (16, 1))
        x.k[1000:] *= 300.0
        check_forward(x)


def test_a_mask_becomes_lists_of_its_columns():
    mask = torch.rand((3, 77, 1030), device="cuda") < 0.1
    for given in (mask, mask.transpose(1, 2)):
        lists = lists_of_mask(given)
        assert torch.equal(lists.counts, given.sum(-1, dtype=torch.int32))
        for head, row in ((0, 0), (1, 50), (2, 76)):
            n = int(lists.counts[head, row])
            assert torch.equal(lists.entries[head, row, :n].long(), given[head, row].nonzero()[:, 0])


@pytest.mark.parametrize(("lists", "num_rows", "num_keys"), [(1, 1000, 1000), (3, 100, 5000), (2, 777, 64 * 8500)])
@pytest.mark.parametrize("form", ["csr", "lists"])
def test_lists_turned_around_name_the_queries_that_see_a_block(form, lists, num_rows, num_keys):
    gen = torch.Generator().manual_seed(lists)
    mask = random_mask(gen, lists, num_rows, num_keys, 10, 64, density=0.1)
    tensors = csr_of_mask(mask) if form == "csr" else (lists_with_gaps(mask, gen),)
    tensors[-1][tensors[-1] == 3] = mask.shape[2]  # behind the last block
    mask[..., 3] = False
    pattern = to_cuda(SparsePattern(tensors, 10, 64, False))
    turned = lists_of_queries(pattern, lists_of(pattern), num_rows, num_keys)
    found = turned.entries[: int(turned.offsets[-1])].cpu().split(turned.offsets.diff().tolist())
    for got, rows in zip(found, mask.transpose(1, 2).flatten(0, 1), strict=True):
        assert torch.equal(got.long(), rows.nonzero()[:, 0])


def test_lists_turned_around_name_a_query_as_often_as_it_lists_a_block():
    entries = torch.tensor([[[1, 0, 1], [1, 1, 1], [-1, 0, 2]]], dtype=torch.int32)
    pattern = to_cuda(SparsePattern((entries,), 1, 64, False))
    turned = lists_of_queries(pattern, lists_of(pattern), 3, 129)
    assert turned.offsets.tolist() == [0, 2, 7, 8] and turned.entries[:8].tolist() == [0, 2, 0, 0, 1, 1, 1, 2]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("k_block", [64, 128])
@pytest.mark.parametrize("shape", SHAPES)
def test_block_sparse_gradients_match_fp64(shape, k_block, causal):
    num_rows, num_keys, heads, q_block = shape
    for form, lists in (("mask", heads[1]), ("csr", heads[1]), ("lists", 1)):
        pattern = block_pattern(form, lists, num_rows, num_keys, q_block, k_block, causal)
        x = make_case(pattern, num_rows, num_keys, heads)
        check_backward(x)
        check_backward(x, deterministic=True)


def check_single_keys(shape: tuple, topk: int) -> None:
    num_rows, num_keys, heads, _ = shape
    for lists in (1, heads[1]):
        x = make_case(index_pattern(lists, num_rows, num_keys, topk, topk), num_rows, num_keys, heads)
        check_backward(x)
        check_backward(x, deterministic=True)


@pytest.mark.parametrize("topk", [1, 100, 300, 517])
@pytest.mark.parametrize("shape", SHAPES)
def test_index_sparse_gradients_match_fp64(shape, topk):
    check_single_keys(shape, topk)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", [64, 128])
def test_every_compiled_backward_matches_fp64(dim, dtype):
    blocks = [block_pattern("mask", 2, 200, 900, 16, k_block, True) for k_block in (64, 128)]
    for pattern in (*blocks, index_pattern(2, 200, 900, 200)):
        check_backward(make_case(pattern, 200, 900, (32, 2), dim, dtype))


@pytest.mark.parametrize("most_bytes", [1 << 30, 1 << 20])
@pytest.mark.parametrize("k_block", [1, 64, 128])
def test_deterministic_gradients_repeat_bit_by_bit(monkeypatch, k_block, most_bytes):
    monkeypatch.setattr(tuning, "GIVEN_BYTES", most_bytes)
    monkeypatch.setattr(tuning, "GIVEN_OVER_SUMS", 0)
    single = k_block == 1
    pattern = index_pattern(2, 300, 2000, 700) if single else block_pattern("lists", 2, 300, 2000, 16, k_block, True)
    x = make_case(pattern, 300, 2000, (32, 2))
    out, lse, _ = x.forward(sparse_hopper)
    runs = [x.backward(sparse_hopper, out, lse, deterministic=True) for _ in range(20)]
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(runs[0], run, strict=True))


def test_keys_behind_the_last_add_nothing_to_dq_where_logits_are_far_below_zero():
    x = make_case(block_pattern("mask", 1, 64, 130, 8, 128, False), 64, 130, (16, 1))
    x.q[..., 0], x.k[..., 0] = 60.0, -60.0
    check_backward(x)


def store_always(monkeypatch) -> None:
    """What queries give to single keys is stored, never added at once."""
    monkeypatch.setattr(tuning, "LEAST_STORED_SUM_BYTES", 0)
    monkeypatch.setattr(tuning, "MOST_STORED_ADDITIONS", 1 << 30)


@pytest.mark.parametrize("most_bytes", [1 << 30, 100_000])
@pytest.mark.parametrize("topk", [1, 100, 517])
@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_of_single_keys_that_are_stored_match_fp64(monkeypatch, shape, topk, most_bytes):
    """In one part, and in many."""
    store_always(monkeypatch)
    monkeypatch.setattr(tuning, "GIVEN_BYTES", most_bytes)
    monkeypatch.setattr(tuning, "GIVEN_OVER_SUMS", 0)
    check_single_keys(shape, topk)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("stored", [False, True])
def test_keys_that_all_lists_name_often_get_the_gradients_of_fp64(monkeypatch, stored, dim, dtype):
    if stored:
        store_always(monkeypatch)
    generator = torch.Generator().manual_seed(0)
    entries = torch.randint(0, 700, (1, 600, 200), dtype=torch.int32, generator=generator)
    entries[..., :20] = torch.arange(20, dtype=torch.int32)
    entries[..., 150:] = 5  # 50 times a list
    entries[..., 100:110] = 700  # behind the last key
    x = make_case(to_cuda(SparsePattern((entries,), 1, 1, False)), 600, 700, (32, 1), dim, dtype)
    check_backward(x)
    check_backward(x, deterministic=True)


def test_what_heads_give_together_may_exceed_fp16_before_it_is_scaled():
    """dk is 7,240 and softmax scales are 128^-0.5: the sum of 16 heads is 81,920 before."""
    q = torch.full((1, 16, 128), 10.0, device="cuda", dtype=torch.float16)
    k = torch.zeros((2, 1, 128), device="cuda", dtype=torch.float16).requires_grad_()
    v = torch.ones((2, 1, 128), device="cuda", dtype=torch.float16)
    v[1] = -1
    indices = torch.tensor([[[0, 1]]], device="cuda", dtype=torch.int32)
    out, _ = index_sparse_attention(q, k, v, indices, deterministic=True)
    (dk,) = torch.autograd.grad(out, k, torch.full_like(out, 8.0))
    expected = torch.tensor([7240.0, -7240.0], device="cuda").expand(128, 2).T[:, None]
    torch.testing.assert_close(dk.float(), expected, rtol=2e-3, atol=0)


def test_deterministic_gradients_of_what_is_not_finite_are_not_finite():
    """Those of the query, and of the keys that it or a query in whose tile its rows are loaded lists."""
    x = make_case(index_pattern(1, 20, 50, 10), 20, 50, (16, 1))
    indices = x.pattern.tensors[0].transpose(0, 1)
    listed = indices[3, 0][indices[3, 0] >= 0].long()
    assert len(listed)
    # A tile of a query loads 128 rows of dout, here those of the 7 queries behind it too, whose weights are 0.
    near = indices[:4, 0][indices[:4, 0] >= 0].long()
    others = torch.ones(50, dtype=torch.bool, device="cuda").index_fill_(0, near, False)
    assert others.any()
    found = []
    for wrong in (0.0, torch.inf, torch.nan):
        leaves = [t.detach().requires_grad_() for t in (x.q, x.k, x.v)]
        out, _ = index_sparse_attention(*leaves, indices, deterministic=True)
        dout = x.dout.clone()
        dout[3, 2, 1] = wrong
        out.backward(dout)
        found.append([t.grad for t in leaves])
        if wrong:
            assert not bool(found[-1][1][listed].isfinite().all(-1).any())
            assert not bool(found[-1][2][listed, :, 1].isfinite().any())
            for got, finite in zip(found[-1][1:], found[0][1:], strict=True):
                assert torch.equal(got[others], finite[others])


@pytest.mark.parametrize("form", ["blocks", "keys"])
def test_functions_take_views_and_give_gradients_of_a_sink(form):
    packed = torch.randn(192, 20, 128, device="cuda", dtype=torch.bfloat16)
    sink = torch.randn(1, 16, device="cuda")
    found = []
    for impl in ("ffa", "reference"):
        leaves = [packed.clone().requires_grad_(), sink.clone().requires_grad_()]
        q, k, v = leaves[0].split([16, 2, 2], 1)
        if form == "blocks":
            mask = block_pattern("mask", 2, 192, 192, 32, 64, True).tensors[0]
            out, _ = block_sparse_attention(
                q, k, v, mask, q_block_size=32, k_block_size=64, causal=True, sink=leaves[1], impl=impl
            )
        else:
            indices = index_pattern(2, 192, 192, 60).tensors[0].transpose(0, 1)
            out, _ = index_sparse_attention(q, k, v, indices, sink=leaves[1], impl=impl)
        found.append([out, *torch.autograd.grad(out.float().square().sum(), leaves)])
    for got, want in zip(*found, strict=True):
        assert float((got - want).float().norm()) <= 2e-2 * float(want.float().norm())


@pytest.mark.parametrize("k_block", [1, 64, 128])
def test_offsets_past_2_to_the_31_reach_their_place(k_block):
    needs_gigabytes(40)
    before, seen = 1 << 24, 1024  # keys, each of 128 elements
    torch.manual_seed(0)
    q, k, v = (torch.randn(n, h, 128, device="cuda").bfloat16() for n, h in ((40, 64), (seen, 1), (seen, 1)))
    far = [torch.cat([t.new_zeros(before, 1, 128), t]).requires_grad_() for t in (k, v)]
    near = [t.clone().requires_grad_() for t in (k, v)]
    lists = torch.rand(1, 40, seen // k_block, device="cuda").argsort(-1)[..., : seen // k_block // 2]
    found = []
    for keys, first, impl in ((far, before, "ffa"), (near, 0, "reference")):
        query = q.clone().requires_grad_()
        if k_block == 1:
            out, _ = index_sparse_attention(query, *keys, (lists + first).transpose(0, 1), impl=impl)
        else:
            out, _ = block_sparse_attention(
                query, *keys, lists + first // k_block, q_block_size=1, k_block_size=k_block, impl=impl
            )
        found.append([out, *torch.autograd.grad(out.float().square().sum(), (query, *keys))])
    assert not any(bool(grad[:before].any()) for grad in found[0][2:])
    for got, want in zip(*found, strict=True):
        assert float((got[-len(want) :] - want).float().norm()) <= 2e-2 * float(want.float().norm())
    del far, found, got, keys, out
    torch.cuda.empty_cache()  # other processes may use the device


@pytest.mark.parametrize("form", ["mask", "lists"])
@pytest.mark.parametrize("k_block", [1, 64, 128])
def test_long_lists_that_sms_begin_together_mean_the_same(monkeypatch, k_block, form):
    monkeypatch.setattr(tuning, "L2_BYTES", 0)
    single = k_block == 1
    pattern = index_pattern(1, 500, 3205, 900) if single else block_pattern(form, 1, 500, 3205, 1, k_block, False)
    x = make_case(pattern, 500, 3205, (64, 1))
    for _ in range(3):
        check_forward(x)
        check_backward(x)


@pytest.mark.parametrize("parts", [2, 7, 90])
@pytest.mark.parametrize(("k_block", "deterministic"), [(64, False), (128, True)])
@pytest.mark.parametrize("form", ["mask", "csr", "lists"])
@pytest.mark.parametrize(("num_keys", "heads"), [(1605, (12, 2)), (805, (24, 6))])  # sums of two key heads have places
def test_lists_of_queries_that_are_cut_into_parts_mean_the_same(
    monkeypatch, num_keys, heads, form, k_block, deterministic, parts
):
    num_rows, q_block = 3000, 20  # lists of up to 450 steps, some of none
    monkeypatch.setattr(tuning, "SPARSE_PART_BYTES", num_blocks(num_rows * heads[0] // heads[1] * 128 * 4, parts))
    pattern = block_pattern(form, heads[1], num_rows, num_keys, q_block, k_block, causal=False)
    x = make_case(pattern, num_rows, num_keys, heads)
    check_backward(x, deterministic)
    out, lse, _ = x.forward(sparse_hopper)
    runs = [x.backward(sparse_hopper, out, lse, deterministic) for _ in range(5)]
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(runs[0], run, strict=True))


@pytest.mark.parametrize(("k_block", "heads"), [(64, (16, 1)), (64, (48, 3)), (128, (16, 1))])
def test_parts_of_lists_that_are_empty_add_nothing(monkeypatch, k_block, heads):
    num_rows, num_keys, q_block, parts = 3200, 700, 20, 8  # 20 blocks of queries a part, 5 steps each
    monkeypatch.setattr(tuning, "SPARSE_PART_BYTES", num_rows * heads[0] // heads[1] * 128 * 4 // parts)
    mask = torch.ones(1, num_blocks(num_rows, q_block), num_blocks(num_keys, k_block), dtype=torch.bool, device="cuda")
    hidden = ((0, 160), (40, 60), (0, 20), (140, 160), (60, 160))  # of the first lists; the third part, and so on
    for column, (first, past) in enumerate(hidden):
        mask[:, first:past, column] = False
    x = make_case(SparsePattern((mask,), q_block, k_block, False), num_rows, num_keys, heads)
    for _ in range(3):
        check_backward(x, deterministic=True)
