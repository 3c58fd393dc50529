"""Attention over lists without a GPU: kernels interpreted in a process of its own, against the definition."""

from __future__ import annotations

import pytest

from tests.backends.triton.interpreting import num_compared

pytest.importorskip("triton", reason="triton is not installed")

PROGRAM = """
import tests.backends.triton.interpreted
import torch
from megatron_magi.backends.reference import sparse as reference
from megatron_magi.backends.triton import sparse as kernels
from megatron_magi.operands.passes import BackwardInputs, ForwardInputs
from megatron_magi.operands.sparse_pattern import SparsePattern
from tests.backends.sm90.sparse_cases import csr_of_mask, lists_with_gaps, random_mask

draw = torch.Generator().manual_seed(0)


def pattern_of(form, lists, num_rows, num_keys, q_block, k_block, causal):
    if form == "keys":  # some named twice, some that are none
        return SparsePattern((torch.randint(-3, num_keys + 3, (lists, num_rows, 21), generator=draw),), 1, 1, False)
    mask = random_mask(draw, lists, num_rows, num_keys, q_block, k_block)
    if form == "strided mask":
        tensors = (mask.transpose(1, 2).contiguous().transpose(1, 2),)
    elif form == "csr":
        offsets, entries = csr_of_mask(mask)
        tensors = (offsets, entries.long())
    elif form == "shared csr":  # lists of the key heads share their entries
        offsets, entries = csr_of_mask(mask[:1])
        tensors = (torch.cat([offsets, offsets // 2]), entries)
    elif form == "late csr":  # entries before the first list of a head, and behind its last, belong to none
        offsets, entries = csr_of_mask(mask)
        none = torch.zeros(5, dtype=torch.int32)
        tensors = (offsets + 5, torch.cat([none, entries, none]))
    elif form == "wild csr":  # as nobody checks them on a GPU: offsets that end behind the entries, or begin before
        offsets, entries = csr_of_mask(mask)
        offsets[0, 0], offsets[:, -1] = -(2**31), 2**31 - 1
        tensors = (offsets, entries)
    else:
        entries = lists_with_gaps(mask, draw)
        none = torch.tensor([2**31 - 1, -(2**31), mask.shape[2]], dtype=torch.int32).expand(*mask.shape[:2], 3)
        tensors = (torch.cat([none[..., :2], entries, entries[..., :1], none[..., 2:]], 2),)
    return SparsePattern(tensors, q_block, k_block, causal)


def results(module, tensors, pattern, sink):
    q, k, v, dout = tensors
    out, lse, top = module.forward(ForwardInputs(q, k, v, sink), pattern, 0.2, return_max_logits=True)
    delta = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    return out, lse, top, *module.backward(BackwardInputs(*tensors, lse, delta), pattern, 0.2, False)


CASES = [
    # form, lists, queries, keys, queries and keys of a block, causal, heads, head dims, dtype, sinks
    ("strided mask", 2, 40, 150, 5, 64, True, (6, 2), (32, 32), torch.float32, 1),
    ("csr", 1, 33, 300, 16, 128, False, (2, 1), (16, 40), torch.float32, 0),
    ("shared csr", 2, 20, 200, 7, 64, False, (2, 2), (16, 16), torch.float32, 0),
    ("late csr", 2, 21, 200, 3, 64, True, (4, 2), (16, 16), torch.float32, 0),
    ("wild csr", 2, 10, 200, 3, 64, False, (4, 2), (16, 16), torch.float32, 0),
    ("lists", 2, 130, 200, 100, 64, True, (4, 2), (64, 64), torch.float16, 2),
    ("lists", 1, 9, 70, 1, 64, False, (3, 3), (24, 24), torch.float32, 0),
    ("keys", 2, 17, 60, 1, 1, False, (6, 2), (48, 32), torch.float32, 2),
    ("keys", 1, 30, 40, 1, 1, False, (2, 1), (16, 16), torch.float16, 0),
]
names = ("out", "lse", "largest", "dq", "dk", "dv")
for case in CASES:
    form, lists, num_rows, num_keys, *sizes, heads, dims, dtype, sinks = case
    pattern = pattern_of(form, lists, num_rows, num_keys, *sizes)
    shapes = (num_rows, heads[0], dims[0]), (num_keys, heads[1], dims[0]), (num_keys, heads[1], dims[1])
    tensors = [torch.randn(s, generator=draw).to(dtype) for s in (*shapes, (num_rows, heads[0], dims[1]))]
    of_heads, of_rows = (torch.randn(s, generator=draw) for s in (heads[:1], (num_rows, heads[0])))
    sink = (None, of_heads, of_rows)[sinks]
    if sinks == 1:
        sink[:2] = torch.tensor([torch.inf, -torch.inf])
    got = results(kernels, tensors, pattern, sink)
    exact = results(reference, [x.double() for x in tensors], pattern, sink)
    for name, a, b in zip(names, got, exact, strict=True):
        if name in ("lse", "largest"):
            torch.testing.assert_close(a.double(), b, atol=2e-5, rtol=2e-5, msg=f"{case} {name}")
            continue
        assert a.isfinite().all(), f"{case} {name}"
        error = float((a.double() - b).norm() / b.norm().clamp(min=1e-3))
        # Products of fp16 round probabilities to it, as all kernels do.
        assert error < (1e-6 if dtype == torch.float32 else 1e-3), f"{case} {name}: {error:.1e}"

# The programs of a block write none but its rows, which others write at the same time on a GPU: only those of the first
# block run, and memory that is not written holds NaN.
torch.use_deterministic_algorithms(True)
shape_of = kernels._shape
kernels._shape = lambda *call: ((shape_of(*call)[1]["PARTS"] * 2,), shape_of(*call)[1])
pattern = pattern_of("strided mask", 2, 40, 150, 5, 64, False)
tensors = [torch.randn(n, h, 16, generator=draw) for n, h in ((40, 6), (150, 2), (150, 2), (40, 6))]
out, lse, top = kernels.forward(ForwardInputs(*tensors[:3], None), pattern, 0.2, return_max_logits=True)
dq, dk, dv = kernels.backward(BackwardInputs(*tensors, *torch.zeros(2, 40, 6)), pattern, 0.2, False)
for name, x, num_rows in (("out", out, 5), ("lse", lse, 5), ("dq", dq, 5), ("dk", dk, 64), ("dv", dv, 64)):
    assert not x[:num_rows].isnan().any() and x[num_rows:].isnan().all(), name
print("compared", len(CASES))
"""


def test_interpreted_kernels_over_lists_compute_the_definition():
    assert num_compared(PROGRAM) == 9
