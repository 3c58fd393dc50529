"""A small case of each Hopper kernel, to be run under compute-sanitizer.

Usage: compute-sanitizer --tool memcheck python benchmarks/sanitize_attention.py   (and --tool racecheck)
"""

from __future__ import annotations

import torch

from megatron_magi.mask import builders
from megatron_magi.ops.slice_attention import slice_attention

DIMS = ((64, 64), (128, 128), (192, 128), (256, 256))
LENGTHS = (100, 13, 77)


def main() -> None:
    torch.manual_seed(0)
    mask = builders.varlen(doc_lengths=list(LENGTHS), causal=True)
    for dim, dim_v in DIMS:
        for options in ({}, {"softcap": 20.0}, {"deterministic": True}):
            q, k, v = (
                torch.randn(sum(LENGTHS), heads, d, device="cuda").bfloat16().requires_grad_()
                for heads, d in ((4, dim), (2, dim), (2, dim_v))
            )
            out, _ = slice_attention(q, k, v, mask, impl="ffa", return_max_logits=True, **options)
            out.backward(torch.randn_like(out))
            assert all(bool(t.grad.isfinite().all()) for t in (q, k, v))
    torch.cuda.synchronize()
    print("computed")


if __name__ == "__main__":
    main()
