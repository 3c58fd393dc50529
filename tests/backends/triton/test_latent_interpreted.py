"""Attention over lists of latent keys without a GPU: kernels interpreted in a process of its own, as it is defined."""

from __future__ import annotations

import pytest

from tests.backends.triton.interpreting import num_compared

pytest.importorskip("triton", reason="triton is not installed")

PROGRAM = """
import tests.backends.triton.interpreted
import torch
from megatron_magi import latent_sparse_attention
from megatron_magi.backends.reference import latent as reference
from megatron_magi.backends.triton import latent as kernels
from megatron_magi.operands.passes import BackwardInputs, ForwardInputs
from megatron_magi.operands.sparse_pattern import SparsePattern

draw = torch.Generator().manual_seed(0)
names = ("out", "lse", "largest", "dq", "dkv")


def results(module, tensors, dim_v, entries, sink, deterministic):
    q, kv, dout = tensors
    pattern = SparsePattern((entries,), 1, 1, False)
    out, lse, top = module.forward(ForwardInputs(q, kv, kv[..., :dim_v], sink), pattern, 0.1, return_max_logits=True)
    inputs = BackwardInputs(q, kv, kv[..., :dim_v], dout, lse, module.row_delta(dout, out))
    return out, lse, top, *module.backward(inputs, pattern, 0.1, deterministic)


def random_entries(lists, num_rows, num_keys, topk):
    # some named twice, some that are none, also in the middle; ends that are empty, and a query that sees nothing
    entries = torch.randint(-3, num_keys + 3, (num_rows, lists, topk), generator=draw)
    ends = torch.randint(0, topk + 1, (num_rows, lists, 1), generator=draw)
    entries = torch.where(torch.arange(topk) < ends, entries, -1)
    entries[:1] = torch.tensor([-1, num_keys, 2**31 - 1]).repeat(-(-topk // 3))[:topk]
    return entries


def compare(case):
    lists, num_rows, num_keys, topk, heads, dims, dtype, index_dtype, sinks, deterministic = case
    entries = random_entries(lists, num_rows, num_keys, topk).to(index_dtype).transpose(0, 1)
    shapes = (num_rows, heads[0], dims[0]), (num_keys, heads[1], dims[0]), (num_rows, heads[0], dims[1])
    tensors = [torch.randn(s, generator=draw).to(dtype) for s in shapes]
    of_heads, of_rows = (torch.randn(s, generator=draw) for s in (heads[:1], (num_rows, heads[0])))
    sink = (None, of_heads, of_rows)[sinks]
    if sinks == 1:
        sink[:2] = torch.tensor([torch.inf, -torch.inf])
    got = results(kernels, tensors, dims[1], entries, sink, deterministic)
    exact = results(reference, [x.double() for x in tensors], dims[1], entries, sink, False)
    for name, a, b in zip(names, got, exact, strict=True):
        assert a.dtype == (dtype if name in ("out", "dq", "dkv") else torch.float32)
        if name in ("lse", "largest"):
            torch.testing.assert_close(a.double(), b, atol=2e-5, rtol=2e-5, msg=f"{case} {name}")
            continue
        assert a.isfinite().all(), f"{case} {name}"
        error = float((a.double() - b).norm() / b.norm().clamp(min=1e-3))
        # Products of 16 bits round probabilities to them, as all kernels do.
        assert error < (1e-6 if dtype == torch.float32 else 1e-3), f"{case} {name}: {error:.1e}"


MLA = (576, 512)
CASES = [
    # lists, queries, keys, topk, heads, head dims, dtype, dtype of indices, sinks, deterministic
    (1, 9, 70, 50, (20, 1), (48, 32), torch.float32, torch.int32, 1, False),
    (2, 7, 40, 37, (6, 2), (40, 24), torch.float32, torch.int64, 2, False),
    (1, 7, 40, 33, (4, 2), (20, 20), torch.float32, torch.int64, 0, True),
    (2, 12, 30, 21, (6, 2), (48, 32), torch.float32, torch.int32, 0, True),
    (1, 1, 90, 45, (128, 1), MLA, torch.float16, torch.int32, 0, False),
    (1, 2, 40, 24, (64, 1), MLA, torch.float16, torch.int32, 1, True),
    (1, 3, 40, 1100, (2, 1), (24, 16), torch.float32, torch.int32, 0, False),
]
kernels.CHUNK_BYTES = 200_000  # several chunks
for case in CASES:
    compare(case)

# No queries, no keys, and lists that name nothing, as users call it; gradients of a strided kv.
for num_rows, num_keys, topk in ((0, 5, 3), (5, 0, 3), (5, 7, 0), (5, 7, 3)):
    for deterministic in (False, True):
        q, kv = (torch.randn(n, h, 24, requires_grad=True) for n, h in ((num_rows, 4), (num_keys, 2)))
        out, meta = latent_sparse_attention(
            q, kv, torch.full((num_rows, 1, topk), -1), softmax_scale=1.0, dim_v=16, impl="triton",
            deterministic=deterministic, return_max_logits=True,
        )
        out.sum().backward()
        assert not out.any() and meta.lse.isneginf().all() and not q.grad.any() and not kv.grad.any()
        assert meta.max_logits.isneginf().all()

# Parts of the gradient that are not written are not read: memory that is not written holds NaN.
torch.use_deterministic_algorithms(True)
compare((1, 9, 70, 50, (20, 1), (48, 32), torch.float32, torch.int32, 1, True))

refused = {
    "dim_v: impl 'triton' takes up to 512, got 520": (torch.bfloat16, (576, 520)),
    "kv: impl 'triton' takes up to 64 elements behind the values, got 72 of": (torch.bfloat16, (584, 512)),
    "q: impl 'triton' takes fp16, bf16 and fp32, got torch.float64": (torch.float64, (48, 32)),
}
for message, (dtype, dims) in refused.items():
    x = torch.zeros(3, 1, dims[0], dtype=dtype)
    try:
        latent_sparse_attention(x, x, torch.zeros(3, 1, 1).int(), softmax_scale=1.0, dim_v=dims[1], impl="triton")
    except ValueError as error:
        assert str(error).startswith(message), error
    else:
        raise AssertionError(message)
print("compared", len(CASES))
"""


def test_interpreted_kernels_over_lists_of_latent_keys_compute_the_definition():
    assert num_compared(PROGRAM) == 7


def test_kernels_that_are_asked_for_by_name_say_that_they_need_a_gpu():
    import torch

    from megatron_magi import latent_sparse_attention

    x = torch.zeros(3, 1, 48, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"^q: impl 'triton' computes on GPUs, got a tensor on cpu"):
        latent_sparse_attention(x, x, torch.zeros(3, 1, 1).int(), softmax_scale=1.0, dim_v=32, impl="triton")
