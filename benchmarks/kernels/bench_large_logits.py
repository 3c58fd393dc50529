"""Up to which logits attention is right: error of the output, and whether results are finite.

    python -m benchmarks.kernels.bench_large_logits [--impls NAME ...] [--dtypes NAME ...] [--csv FILE]

2,048 causal tokens, 8 query and 2 key heads of 128; q and k are normal times a factor each, so that logits have the
standard deviation of the row. The loss is the sum of squares of the output. Errors are the largest of any element,
against ``torch`` in fp64.
"""

from __future__ import annotations

import argparse

import torch

from benchmarks._lib.provenance import write_csv
from megatron_magi.mask.builders import causal
from megatron_magi.ops.slice_attention import slice_attention

TOKENS, HEADS_Q, HEADS_KV, HEAD_DIM = 2048, 8, 2, 128
EXPONENTS = (0, 2, 4, 5, 6, 7, 8, 9, 10, 12, 16, 20, 30, 36)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
HEADER = ["dtype", "logit_std", "impl", "largest_error_of_out", "lse_finite", "dq_finite", "dk_finite", "dv_finite"]


def measure(exponent: int, dtype: torch.dtype, impls: list[str], device: str, tokens: int = TOKENS) -> list[list]:
    """Rows of logits with a standard deviation of ten to the power of ``exponent``."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(tokens, n, HEAD_DIM, generator=generator, dtype=torch.float64)
        for n in (HEADS_Q, HEADS_KV, HEADS_KV)
    )
    q, k = (t * 10.0 ** (exponent / 2) for t in (q, k))
    given = [t.to(device, dtype) for t in (q, k, v)]
    bands = causal(tokens).bands
    exact = slice_attention(*(t.double() for t in given), bands, impl="torch")[0]
    rows = []
    for impl in impls:
        leaves = [t.clone().requires_grad_() for t in given]
        out, meta = slice_attention(*leaves, bands, impl=impl)
        gradients = torch.autograd.grad((out.double() ** 2).sum(), leaves)
        error = float((out.detach().double() - exact).abs().max())
        rows.append(
            [f"1e{exponent}", impl, f"{error:.3g}", *(bool(t.isfinite().all()) for t in (meta.lse, *gradients))]
        )
    return rows


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--impls", nargs="+", default=["torch", "ffa"])
    parser.add_argument("--dtypes", nargs="+", choices=list(DTYPES), default=["bf16"])
    parser.add_argument("--csv", help="also write the rows to this file")
    args = parser.parse_args()
    device, rows = "cuda" if torch.cuda.is_available() else "cpu", []
    for name in args.dtypes:
        for exponent in EXPONENTS:
            rows += [[name, *row] for row in measure(exponent, DTYPES[name], args.impls, device)]
            print(*(",".join(map(str, row)) for row in rows[-len(args.impls) :]), sep="\n", flush=True)
    write_csv(args.csv, HEADER, rows)


if __name__ == "__main__":
    main()
