"""The kernels in Triton as users call them, on random masks with random options, against fp64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_magi.backends.triton import tables
from megatron_magi.mask import builders
from megatron_magi.ops.slice_attention import slice_attention
from megatron_magi.ops.slice_passes import row_delta, slice_attention_backward, slice_attention_forward
from tests.backends.sm90.test_masks import HEADS, check
from tests.ops.naive import Case, masks, packed_causal

pytestmark = pytest.mark.gpu


@pytest.mark.timeout(600)  # kernels are compiled for each number of heads and each option
@pytest.mark.parametrize(
    "dims, dtype",
    [
        *(((dim, dim), dtype) for dim in (64, 128) for dtype in (torch.bfloat16, torch.float16, torch.float32)),
        ((192, 128), torch.bfloat16),
        ((256, 256), torch.bfloat16),
        ((96, 40), torch.float16),
    ],
    ids=str,
)
@pytest.mark.parametrize("softcap, sink", [(0.0, None), (1.5, "sh"), (0.0, "ssh")])
@settings(max_examples=8)
@given(mask=masks(longest=400), heads=st.sampled_from(HEADS[2:4]), seed=st.integers(0, 99))
def test_random_masks_and_options_match_fp64(dims, dtype, softcap, sink, mask, heads, seed):
    check(Case(mask, *heads, *dims, softcap=softcap, sink=sink, dtype=dtype, device="cuda", seed=seed), "triton")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dims", [(128, 128), (64, 64)], ids=str)
def test_sizes_for_masks_in_which_queries_see_many_keys_match_fp64(monkeypatch, dims, dtype):
    monkeypatch.setattr(tables, "NARROW", 0)
    check(Case(packed_causal([300, 7, 450, 63]), 2, 4, *dims, sink="sh", dtype=dtype, device="cuda"), "triton")


@pytest.mark.parametrize("dims", [(128, 128), (64, 64), (96, 72), (192, 128)], ids=str)
def test_results_are_bitwise_repeatable(dims):
    case = Case(packed_causal([300, 7, 450, 63]), 2, 4, *dims, sink="sh", dtype=torch.bfloat16, device="cuda")

    def attend(q, k, v, sink):
        out, meta = slice_attention(q, k, v, case.mask, sink=sink, return_max_logits=True, impl="triton")
        return out, meta.lse, meta.max_logits

    first, second = case.run(attend), case.run(attend)
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("dims", [(128, 128), (64, 64), (96, 72)], ids=str)
@pytest.mark.parametrize("shift", [(0, 1, 0), (0, 0, 4), (1, 0, 0), (0, 0, 8)], ids=str)
def test_tensors_that_begin_anywhere_give_the_same_bits(dims, shift):
    """Views whose rows, heads or first elements are aligned as descriptors have to be, or are not."""
    mask, generator = packed_causal([301, 7, 450, 63]), torch.Generator("cuda").manual_seed(0)
    rows, heads, behind = shift
    views = [
        torch.randn(821 + rows, h + heads, d + behind, device="cuda", dtype=torch.bfloat16, generator=generator)[
            rows:, heads:, behind:
        ]
        for h, d in ((4, dims[0]), (2, dims[0]), (2, dims[1]), (4, dims[1]))
    ]
    copies = [view.clone(memory_format=torch.contiguous_format) for view in views]
    out, lse, _ = slice_attention_forward(*copies[:3], mask.bands, impl="triton")
    delta = row_delta(copies[3], out, "triton")  # one for both: the order of its sums depends on strides
    got = slice_attention_forward(*views[:3], mask.bands, impl="triton")
    assert torch.equal(got[0], out) and torch.equal(got[1], lse)
    gradients = [
        slice_attention_backward(dout, q, k, v, lse, delta, mask.bands, impl="triton")
        for q, k, v, dout in (views, copies)
    ]
    assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True))


def test_a_new_mask_compiles_nothing():
    from megatron_magi.backends.triton import kernels, row_kernels

    compiled = (
        kernels.forward_kernel, kernels.query_gradient_kernel, kernels.key_gradient_kernel,
        row_kernels.row_delta_kernel, row_kernels.by_head_kernel,
    )  # fmt: skip
    counts = []
    for lengths in ([100, 28], [1, 300, 16], [128], [4096, 512, 3], *([n, 64] for n in range(1, 996))):
        q, k, v = (
            torch.randn(sum(lengths), heads, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            for heads in (4, 2, 2)
        )
        slice_attention(q, k, v, builders.varlen(doc_lengths=lengths, causal=True), impl="triton")[0].sum().backward()
        counts.append(sum(len(cache[0]) for kernel in compiled for cache in kernel.device_caches.values()))
    assert counts[0] == counts[-1], "kernels were compiled for a mask"


@pytest.mark.parametrize("num_rows, num_keys", [(0, 5), (5, 0), (0, 0)])
def test_nothing_to_attend_to(num_rows, num_keys):
    q = torch.randn(num_rows, 2, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    k = torch.randn(num_keys, 1, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    from megatron_magi.ops.flex_flash_attn import flex_flash_attn_func

    none = torch.zeros(0, 2, dtype=torch.int32)
    out, meta = flex_flash_attn_func(q, k, k, none, none, none[:, 0], impl="triton")
    out.sum().backward()
    assert not out.any() and meta.lse.isneginf().all() and not q.grad.any() and not k.grad.any()
