"""Sparse attention on a Hopper GPU where lists, lengths and layouts are unusual."""

from __future__ import annotations

import pytest
import torch

from megatron_magi.backends.sm90 import sparse as sparse_hopper
from megatron_magi.operands.sparse_pattern import SparsePattern, num_blocks
from megatron_magi.ops.sparse_attention import block_sparse_attention, index_sparse_attention
from tests.backends.sm90.sparse_cases import check_backward, check_forward, csr_of_mask, make_case, random_mask, to_cuda
from tests.gpu_memory import needs_gigabytes

pytestmark = [pytest.mark.gpu, pytest.mark.sm90]

KEY_BLOCKS = (1, 64, 128)


def check_both(x) -> None:
    check_forward(x)
    check_backward(x)
    check_backward(x, deterministic=True)


def lists_pattern(entries: torch.Tensor, q_block: int, k_block: int, causal: bool = False) -> SparsePattern:
    return SparsePattern((entries.int().cuda(),), 1 if k_block == 1 else q_block, k_block, causal)


@pytest.mark.parametrize("k_block", KEY_BLOCKS)
def test_entries_that_repeat_count_as_often(k_block):
    generator = torch.Generator().manual_seed(0)
    for q_block, rows in ((1, 70), (16, 5)) if k_block > 1 else ((1, 70),):
        entries = torch.randint(-1, num_blocks(900, k_block), (2, rows, 40), generator=generator)
        check_both(make_case(lists_pattern(entries, q_block, k_block), 70, 900, (16, 2)))


@pytest.mark.parametrize("k_block", KEY_BLOCKS)
def test_nothing_is_seen_by_anyone(k_block):
    empty = [torch.full((1, 50, 8), -1), torch.zeros(1, 50, 0)]
    for pattern in (lists_pattern(entries, 1, k_block) for entries in empty):
        x = make_case(pattern, 50, 700, (64, 1))
        check_forward(x)
        for deterministic in (False, True):
            grads = gradients(x, deterministic)
            assert not any(bool(grad.any()) for grad in grads)
    if k_block > 1:
        nothing = torch.zeros(2, 4, num_blocks(700, k_block), dtype=torch.bool)
        for tensors in ((nothing,), csr_of_mask(nothing)):
            x = make_case(to_cuda(SparsePattern(tensors, 16, k_block, False)), 50, 700, (16, 2))
            assert not any(bool(grad.any()) for grad in gradients(x, False))


def gradients(x, deterministic):
    out, lse, _ = x.forward(sparse_hopper)
    return x.backward(sparse_hopper, out, lse, deterministic)


@pytest.mark.parametrize("k_block", KEY_BLOCKS)
def test_numbers_that_are_no_keys_are_passed_over(k_block):
    """On a GPU nobody looks at lists before the kernels do, which must touch no other memory."""
    generator = torch.Generator().manual_seed(0)
    columns = num_blocks(900, k_block)
    entries = torch.stack([torch.randperm(columns, generator=generator)[:5] for _ in range(140)]).view(2, 70, 5)
    wrong = torch.tensor([columns, columns + 1, 2**31 - 1, -(2**31), -2, 2**24])
    dirty = torch.cat([entries, wrong.expand(2, 70, 6)], 2)
    dirty = dirty.gather(2, torch.rand(dirty.shape, generator=generator).argsort(-1))
    x = make_case(lists_pattern(dirty, 1, k_block), 70, 900, (16, 2))
    check_both(x)
    clean = make_case(lists_pattern(entries, 1, k_block), 70, 900, (16, 2))
    assert float((gradients(x, True)[0] - gradients(clean, True)[0]).float().abs().max()) < 2e-2


@pytest.mark.parametrize("k_block", [64, 128])
def test_offsets_that_are_none_touch_no_other_memory(k_block):
    generator = torch.Generator(device="cuda").manual_seed(0)
    q, k, v = (
        torch.randn(n, h, 128, device="cuda").bfloat16().requires_grad_() for n, h in ((70, 16), *[(900, 2)] * 2)
    )
    for low, high in ((-(2**31), 2**31 - 1), (-50, 150), (0, 101)):
        offsets = torch.randint(low, high, (2, 71), generator=generator, device="cuda", dtype=torch.int32)
        entries = torch.randint(0, num_blocks(900, k_block), (100,), generator=generator, device="cuda")
        for deterministic in (False, True):
            out, _ = block_sparse_attention(
                q,
                k,
                v,
                (offsets, entries),
                q_block_size=1,
                k_block_size=k_block,
                deterministic=deterministic,
                impl="ffa",
            )
            out.sum().backward()
    torch.cuda.synchronize()
    assert bool(out.isfinite().all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_lists_longer_than_2_to_the_15(dtype):
    num_keys = 40_000
    generator = torch.Generator().manual_seed(0)
    entries = torch.stack([torch.randperm(num_keys, generator=generator) for _ in range(3)])[None]
    entries[0, 0, 1000:39_000] = -1
    check_both(make_case(lists_pattern(entries, 1, 1), 3, num_keys, (16, 1), dtype=dtype))
    spread = torch.full((1, 2, 34_000), -1)  # with a block here and there, and some at the end
    spread[..., ::1000] = torch.randint(0, 16, (1, 2, 34), generator=generator)
    spread[..., -5:] = torch.randint(0, 16, (1, 2, 5), generator=generator)
    check_both(make_case(lists_pattern(spread, 4, 64), 8, 1000, (16, 1), dtype=dtype))


@pytest.mark.parametrize("k_block", [64, 128])
def test_more_queries_than_keys_and_causal(k_block):
    generator = torch.Generator().manual_seed(0)
    for num_rows, num_keys, q_block, heads in ((700, 300, 16, (8, 2)), (900, 65, 128, (4, 4)), (400, 130, 1, (128, 1))):
        mask = random_mask(generator, heads[1], num_rows, num_keys, q_block, k_block, density=0.8)
        for tensors in ((mask,), csr_of_mask(mask)):
            check_both(make_case(to_cuda(SparsePattern(tensors, q_block, k_block, True)), num_rows, num_keys, heads))


@pytest.mark.parametrize("dim", [64, 128])
def test_fp16_and_deterministic(dim):
    generator = torch.Generator().manual_seed(0)
    for k_block in KEY_BLOCKS:
        entries = torch.randint(-1, num_blocks(900, k_block), (2, 13, 7), generator=generator)
        rows = 13 if k_block == 1 else 200
        x = make_case(lists_pattern(entries, 16, k_block), rows, 900, (32, 2), dim, torch.float16)
        check_backward(x, deterministic=True)


@pytest.mark.parametrize("k_block", KEY_BLOCKS)
def test_tensors_and_lists_that_are_not_contiguous(k_block):
    """A gradient that is one value, keys and values in one tensor, queries with heads first, lists by steps."""
    columns = num_blocks(500, k_block)
    q = torch.randn(16, 96, 128, device="cuda", dtype=torch.bfloat16).transpose(0, 1)
    kv = torch.randn(500, 2, 2, 128, device="cuda", dtype=torch.bfloat16)
    wide = torch.randint(-1, columns, (96 if k_block == 1 else 6, 2, 16), device="cuda")
    lists = wide[..., ::2]
    found = []
    for impl in ("ffa", "reference"):
        leaves = [t.detach().requires_grad_() for t in (q, kv)]
        k, v = leaves[1].unbind(1)
        if k_block == 1:
            out, meta = index_sparse_attention(leaves[0], k, v, lists, return_max_logits=True, impl=impl)
        else:
            out, meta = block_sparse_attention(
                leaves[0], k, v, lists.transpose(0, 1), q_block_size=16, k_block_size=k_block, return_max_logits=True,
                impl=impl,
            )  # fmt: skip
        found.append([out, meta.max_logits, *torch.autograd.grad(out.sum(), leaves)])
    for got, want in zip(*found, strict=True):
        assert float((got - want).float().norm()) <= 2e-2 * float(want.float().norm())


@pytest.mark.parametrize("k_block", KEY_BLOCKS)
@pytest.mark.parametrize("deterministic", [False, True])
def test_captured_calls_follow_lists_that_change(k_block, deterministic):
    num_rows, num_keys = 96, 700
    q, k, v = (
        torch.randn(n, h, 128, device="cuda").bfloat16().requires_grad_()
        for n, h in ((num_rows, 16), *[(num_keys, 2)] * 2)
    )
    rows = num_rows if k_block == 1 else num_rows // 16
    forms = {"lists": torch.full((rows, 2, 8), -1, device="cuda")}
    if k_block > 1:
        forms["mask"] = torch.zeros(2, rows, num_blocks(num_keys, k_block), dtype=torch.bool, device="cuda")
    for form, pattern in forms.items():

        def step(pattern=pattern, form=form):
            if k_block == 1:
                out, meta = index_sparse_attention(q, k, v, pattern, deterministic=deterministic, impl="ffa")
            else:
                blocks = pattern.transpose(0, 1) if form == "lists" else pattern
                out, meta = block_sparse_attention(
                    q, k, v, blocks, q_block_size=16, k_block_size=k_block, deterministic=deterministic, impl="ffa"
                )
            return out, meta.lse, *torch.autograd.grad(out.float().square().sum(), (q, k, v))

        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            step()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            captured = step()
        for seed in range(3):
            torch.manual_seed(seed)
            if form == "mask":
                pattern.copy_(torch.rand(pattern.shape, device="cuda") < 0.4)
            else:
                pattern.copy_(torch.randint(-1, num_blocks(num_keys, k_block), pattern.shape, device="cuda"))
            graph.replay()
            torch.cuda.synchronize()
            for got, want in zip(captured, step(), strict=True):
                if deterministic:
                    assert torch.equal(got, want)
                else:
                    torch.testing.assert_close(got, want, atol=1e-2, rtol=2e-2)


@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_functions_run_the_kernels():
    q, k, v = (
        torch.randn(n, h, 128, device="cuda").bfloat16().requires_grad_() for n, h in ((96, 16), *[(700, 2)] * 2)
    )

    def step(q, k, v, mask, indices):
        out, meta = block_sparse_attention(q, k, v, mask, q_block_size=16, k_block_size=64, causal=True)
        other, _ = index_sparse_attention(out, k, v, indices)
        return other, meta.lse

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        mask = torch.rand(6, 11, device="cuda") < 0.6
        indices = torch.randint(-1, 700, (96, 2, 50), device="cuda")
        want, got = step(q, k, v, mask, indices), compiled(q, k, v, mask, indices)
        for a, b in zip(want, got, strict=True):
            torch.testing.assert_close(a, b, atol=1e-2, rtol=1e-2)
        for a, b in zip(*(torch.autograd.grad(x[0].float().sum(), (q, k, v)) for x in (want, got)), strict=True):
            torch.testing.assert_close(a, b, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("k_block", KEY_BLOCKS)
def test_queries_past_2_to_the_31_reach_their_place(k_block):
    """The last queries of so many that their tensor has more than 2^31 elements see keys, all others none."""
    needs_gigabytes(36)
    before, last, heads = 1 << 17, 256, 128
    torch.manual_seed(0)
    near = torch.randn(last, heads, 128, device="cuda").bfloat16()
    k, v = (torch.randn(600, 1, 128, device="cuda").bfloat16() for _ in range(2))
    lists = torch.rand(last, 1, num_blocks(600, k_block), device="cuda").argsort(-1)[..., : 300 // k_block]
    found = []
    for first, impl in ((before, "ffa"), (0, "reference")):
        query = torch.cat([near.new_zeros(first, heads, 128), near]).requires_grad_()
        keys = [t.clone().requires_grad_() for t in (k, v)]
        entries = torch.cat([lists.new_full((first, *lists.shape[1:]), -1), lists])
        if k_block == 1:
            out, meta = index_sparse_attention(query, *keys, entries, impl=impl)
        else:
            out, meta = block_sparse_attention(
                query, *keys, entries.transpose(0, 1), q_block_size=1, k_block_size=k_block, impl=impl
            )
        dout = torch.cat([near.new_zeros(first, heads, 128), out[first:].detach()])
        dq, dk, dv = torch.autograd.grad(out, (query, *keys), dout)
        assert not bool(out[:first].any()) and not bool(dq[:first].any())
        found.append([out[first:].detach(), meta.lse[first:].detach(), dq[first:], dk, dv])
        del out, meta, dq, query, dout
    torch.cuda.empty_cache()  # other processes may use the device
    for got, want in zip(*found, strict=True):
        assert float((got - want).float().norm()) <= 2e-2 * float(want.float().norm())


@pytest.mark.parametrize("impl", ["ffa", "triton"])
@pytest.mark.parametrize("k_block", KEY_BLOCKS)
def test_keys_that_no_query_lists_do_not_matter_where_lists_have_gaps(k_block, impl):
    """The keys of the first block have no finite element; lists are short, odd, empty, or have gaps."""
    generator = torch.Generator().manual_seed(0)
    columns = num_blocks(900, k_block)
    entries = torch.randint(1, columns, (70, 2, 3), generator=generator)
    entries = entries.where(torch.rand(entries.shape, generator=generator) < 0.7, -1).cuda()
    found = []
    for value in (0.0, torch.nan):
        x = make_case(lists_pattern(entries, 1, k_block), 70, 900, (16, 2))
        x.k[:k_block], x.v[:k_block] = value, value
        leaves = [t.requires_grad_() for t in (x.q, x.k, x.v)]
        options = {"deterministic": True, "impl": impl}
        if k_block == 1:
            out, _ = index_sparse_attention(*leaves, entries, **options)
        else:
            blocks = {"q_block_size": 1, "k_block_size": k_block}
            out, _ = block_sparse_attention(*leaves, entries.transpose(0, 1), **blocks, **options)
        found.append([out.detach(), *torch.autograd.grad(out, leaves, x.dout)])
    for without, with_nan in zip(*found, strict=True):
        torch.testing.assert_close(with_nan, without, rtol=0, atol=0)
