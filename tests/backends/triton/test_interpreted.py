"""The kernels' arithmetic without a GPU: interpreted on the CPU, in a process of its own, against the definition."""

from __future__ import annotations

import pytest

from tests.backends.triton.interpreting import num_compared

pytest.importorskip("triton", reason="triton is not installed")

PROGRAM = """
import tests.backends.triton.interpreted
import torch
from megatron_magi.backends.triton import attention
from megatron_magi.mask import AttnMask, builders
from megatron_magi.ops.slice_passes import row_delta, slice_attention_backward, slice_attention_forward


def results(impl, mask, heads, dims, dtype, sinks, softcap, shift=0):
    draw = torch.Generator().manual_seed(1)
    n, (hq, hkv), (dk, dv) = mask.total_seqlen_q, heads, dims
    q, k, v, dout = (
        torch.randn(n, h, d + shift, generator=draw).to(dtype)[..., shift:]
        for h, d in ((hq, dk), (hkv, dk), (hkv, dv), (hq, dv))
    )
    sink = {0: None, 1: torch.randn(2, hq, generator=draw), 2: torch.randn(n, 1, hq, generator=draw)}[sinks]
    if sinks == 1:
        sink[:, 0] = torch.inf
    common = {"impl": impl, "softcap": softcap}
    if impl == "reference":
        q, k, v, dout = (x.double() for x in (q, k, v, dout))
    out, lse, largest = slice_attention_forward(
        q, k, v, mask.bands, sink=sink, return_max_logits=True, **common
    )
    # A second result over the same keys is merged into the first.
    merged, merged_lse = out.to(lse.dtype, copy=True), lse.clone()
    slice_attention_forward(q, k, v, mask.bands, out=merged, lse=merged_lse, **common)
    grads = slice_attention_backward(
        dout, q, k, v, lse, row_delta(dout, out, impl), mask.bands, grad_dtype=lse.dtype, **common
    )
    before = [torch.full_like(g, 0.5) for g in grads]
    added = slice_attention_backward(
        dout, q, k, v, lse, row_delta(dout, out, impl), mask.bands, dq=before[0], dk=before[1], dv=before[2], **common
    )
    names = ("out", "lse", "largest", "merged", "merged_lse", "dq", "dk", "dv", "dq+", "dk+", "dv+")
    return dict(zip(names, (out, lse, largest, merged, merged_lse, *grads, *added)))


documents = builders.varlen(doc_lengths=[30, 1, 50, 40], causal=True)
gaps = AttnMask([(0, 40, 10, 60, 1), (40, 70, 0, 25, 0), (40, 70, 30, 64, 2), (90, 110, 100, 121, 3)], 121)
CASES = [
    (documents, (2, 1), (32, 32), torch.float32, 0, 0.0),
    (builders.varlen(doc_lengths=[100], causal=False), (2, 2), (24, 40), torch.float32, 2, 0.0),
    (builders.sliding_window(130, 20, 0), (2, 1), (64, 64), torch.float16, 1, 5.0),
    (gaps, (3, 1), (16, 16), torch.float32, 1, 0.0),
    (documents, (1, 1), (16, 16), torch.float32, 0, 1e5),  # so small a part of the cap that tanh must not round it
    (builders.varlen(doc_lengths=[70, 3], causal=True), (2, 1), (192, 128), torch.float16, 0, 0.0),
]
DESCRIBED = [
    (gaps, (2, 1), (64, 64), torch.bfloat16, 1, 0.0),
    (documents, (2, 1), (96, 128), torch.float16, 0, 0.0),
    (documents, (2, 1), (128, 72), torch.float16, 0, 3.0, 1),  # neither rows nor heads of q and dout are aligned
    (builders.sliding_window(130, 20, 0), (2, 1), (40, 40), torch.float16, 0, 0.0),
]
descriptors = []
make = attention.descriptors()
attention.descriptors = lambda: lambda *args: descriptors.append(args) or make(*args)
if WHICH is DESCRIBED:
    attention.kind_of = lambda device: "hopper"
for case in WHICH:
    got, exact = (results(impl, *case) for impl in ("triton", "reference"))
    for name in ("lse", "largest", "merged_lse"):
        torch.testing.assert_close(got[name].double(), exact[name], atol=2e-5, rtol=2e-5, msg=f"{case[1:]} {name}")
    for name in got.keys() - {"lse", "largest", "merged_lse"}:
        assert got[name].isfinite().all(), f"{case[1:]} {name}"
        error = float((got[name].double() - exact[name]).norm() / exact[name].norm().clamp(min=1e-3))
        # Products of fp16 and bf16 round probabilities to it, as all kernels do.
        most = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[case[3]]
        assert error < most, f"{case[1:]} {name}: {error:.1e}"
# Of two backwards each, 4 for gradients of keys and 2 for those of queries; of two forwards, of dims above 64, 2.
assert len(descriptors) == (4 * 2 * 6 + 2 * 2 * 2 if WHICH is DESCRIBED else 0)
# An output of 0 counts as 0 whatever its gradient is; rows and heads are no multiples of what programs take.
out, dout = torch.ones(70, 3, 40), torch.full((70, 3, 40), torch.nan)
out[:, 1], dout[:, ::2] = 0, 0.5
for given in (dout, dout.half(), dout.transpose(0, 2).contiguous().transpose(0, 2)):
    got = row_delta(given, out.to(given.dtype), "triton")
    torch.testing.assert_close(got, torch.tensor([20.0, 0.0, 20.0]).expand(70, 3))
lse = torch.tensor([[0.0, 1.0, -torch.inf], [2.0, -3.0, 4.0]])
for given in (lse, lse.t().contiguous().t()):
    by_head = torch.tensor([[0.0, 2.0], [1.0, -3.0], [0.0, 4.0]]) * attention.LOG2_E, lse.exp().t()
    torch.testing.assert_close(attention._by_head(given, lse.exp()), by_head)
print("compared", len(WHICH))
"""


def test_interpreted_kernels_compute_the_definition():
    assert num_compared(PROGRAM.replace("WHICH", "CASES")) == 6


def test_interpreted_kernels_that_load_by_descriptors_compute_the_definition():
    assert num_compared(PROGRAM.replace("WHICH", "DESCRIBED")) == 4
