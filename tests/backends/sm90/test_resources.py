"""What calls of the Hopper kernels cost besides time on the GPU: memory, time on the host; and that they repeat."""

from __future__ import annotations

import pytest
import torch

from megatron_magi.mask import builders
from megatron_magi.ops.flex_flash_attn import flex_flash_attn_func
from megatron_magi.ops.slice_attention import slice_attention
from megatron_magi.testing.device_costs import host_us, peak_of

pytestmark = [pytest.mark.gpu, pytest.mark.sm90]

SLACK_BYTES = 2 << 20
"""For tile plans, row statistics of the backward and the like: far below one tensor of the sizes used here."""
HOST_LIMIT_US, HOST_LIMIT_OPERATIONS = 60, 10
"""Twice what is aimed at, or so many of torch's smallest operations on a slow host: hosts differ by a factor of two."""


def tensors(num_rows, num_heads=16, num_heads_kv=8, dim=128):
    gen = torch.Generator("cuda").manual_seed(0)
    return [
        torch.randn(num_rows, heads, dim, generator=gen, device="cuda", dtype=torch.bfloat16).requires_grad_()
        for heads in (num_heads, num_heads_kv, num_heads_kv)
    ]


def bytes_of(*given: torch.Tensor) -> int:
    return sum(t.numel() * t.element_size() for t in given)


@pytest.mark.parametrize("mask", [builders.causal(16384), builders.varlen(doc_lengths=[4000, 384, 12000], causal=True)])
def test_the_forward_allocates_out_and_lse_and_nothing_of_their_size_beside(mask):
    inputs = [t.detach() for t in tensors(16384)]
    (out, meta), peak = peak_of(lambda: slice_attention(*inputs, mask, impl="ffa"))
    assert peak <= bytes_of(out, meta.lse) + SLACK_BYTES


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    ("mask", "heads"),
    [
        (builders.causal(16384), (16, 8)),  # room in dq for the sums of dk and dv of half the tiles
        (builders.full(8192), (32, 8)),
        (builders.full(9000), (32, 8)),  # for those of all but one
    ],
)
def test_the_backward_allocates_one_fp32_dq_beside_the_gradients(mask, heads, deterministic):
    q, k, v = tensors(mask.total_seqlen_q, *heads)
    out, meta = slice_attention(q, k, v, mask, impl="ffa", deterministic=deterministic)
    dout = torch.randn_like(out)
    grads, peak = peak_of(lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True))
    # Row statistics: delta, and lse and delta as the kernel wants them, 1 / 128 of an fp32 dq each.
    assert peak <= bytes_of(*grads) + 2 * bytes_of(q) + 4 * bytes_of(meta.lse) + SLACK_BYTES


def test_a_call_with_a_known_mask_takes_little_of_the_host(capsys):
    q, k, v = tensors(256)
    frozen = [t.detach() for t in (q, k, v)]
    mask = builders.causal(256)
    ranges = torch.tensor([[0, 256]], dtype=torch.int32, device="cuda")
    types = torch.tensor([1], dtype=torch.int32, device="cuda")
    found = {
        "slice_attention": host_us(lambda: slice_attention(*frozen, mask, impl="ffa")),
        "slice_attention, recorded": host_us(lambda: slice_attention(q, k, v, mask, impl="ffa")),
        "flex_flash_attn_func": host_us(lambda: flex_flash_attn_func(*frozen, ranges, ranges, types)),
    }
    operation = host_us(lambda: frozen[0].add(1))
    with capsys.disabled():
        print("\n" + "\n".join(f"host time of {name}: {value:.1f} us" for name, value in found.items()))
        print(f"host time of an addition: {operation:.1f} us")
    assert max(found.values()) < max(HOST_LIMIT_US, HOST_LIMIT_OPERATIONS * operation), found


@pytest.mark.parametrize("mask", [builders.causal(1500), builders.varlen(doc_lengths=[13] * 100 + [200], causal=False)])
def test_deterministic_passes_repeat_bit_by_bit_100_times(mask):
    q, k, v = tensors(1500, num_heads=8, num_heads_kv=2)
    dout = torch.randn(1500, 8, 128, device="cuda", dtype=torch.bfloat16)

    def run():
        out, meta = slice_attention(q, k, v, mask, impl="ffa", deterministic=True)
        return [out, meta.lse, *torch.autograd.grad(out, (q, k, v), dout)]

    first = run()
    for _ in range(99):
        assert all(torch.equal(a, b) for a, b in zip(first, run(), strict=True))


def test_the_forward_repeats_bit_by_bit_without_being_asked_to():
    inputs = [t.detach() for t in tensors(3000)]
    first = slice_attention(*inputs, builders.causal(3000), impl="ffa")[0]
    for _ in range(99):
        assert torch.equal(first, slice_attention(*inputs, builders.causal(3000), impl="ffa")[0])
