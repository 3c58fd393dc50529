"""How far rounding the output to 16 bits moves the gradient of a sink, on a CPU.

    python -m benchmarks.kernels.sink_gradient_error [--seeds N]

A sink's gradient is a sum over rows of ``rowsum(dout * out)``. Compared with fp64 attention of the same rounded inputs:
from the output in fp32, rounded; from the output in fp32; and dense attention in the 16-bit dtype by autograd. Errors
are in percent of the largest gradient of a head: median and maximum over seeds. Causal, head dimension 128.
"""

from __future__ import annotations

import argparse

import torch

from megatron_magi.operands.merge import sink_gradient

CASES = [(150, 1), (150, 8), (1024, 8)]


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sink: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and lse of dense causal attention with a sink, its products in ``dtype``."""
    q, k, v, sink = (x.to(dtype) for x in (q, k, v, sink))
    n, heads, dim = q.shape
    logits = torch.einsum("qhd,khd->hqk", q, k) * dim**-0.5
    logits = logits.masked_fill(~torch.ones(n, n, dtype=torch.bool).tril(), -torch.inf)
    every = torch.cat([logits, sink.T[:, None].expand(heads, n, 1)], -1)
    every = every if dtype == torch.float64 else every.float()
    return torch.einsum("hqk,khd->qhd", torch.softmax(every, -1).to(dtype)[..., :-1], v), every.logsumexp(-1).T


def errors(num_rows: int, heads: int, dtype: torch.dtype, seed: int) -> list[float]:
    """Errors of the three ways, in percent."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v, dout = (torch.randn(num_rows, heads, 128, generator=generator).to(dtype) for _ in range(4))
    sink = torch.randn(1, heads, generator=generator)
    exact = sink.double().requires_grad_()
    (expected,) = torch.autograd.grad(attend(q, k, v, exact, torch.float64)[0], exact, dout.double())
    narrow = sink.to(dtype).float().requires_grad_()
    (dense,) = torch.autograd.grad(attend(q, k, v, narrow, dtype)[0], narrow, dout)
    out, lse = attend(q, k, v, sink, torch.float32)
    found = [sink_gradient(sink, lse, (dout.float() * o).sum(-1)) for o in (out.to(dtype).float(), out)]
    return [100 * float((x.double() - expected).abs().max() / expected.abs().max()) for x in (*found, dense)]


def main() -> None:
    """Prints a line for each dtype and shape."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=12, help="how many")
    seeds = range(parser.parse_args().seeds)
    for dtype in (torch.bfloat16, torch.float16):
        for num_rows, heads in CASES:
            found = torch.tensor([errors(num_rows, heads, dtype, seed) for seed in seeds])
            texts = (
                f"{name} {median:.2g} ({most:.2g})"
                for name, median, most in zip(
                    ("rounded", "fp32", "dense"), found.median(0).values.tolist(), found.amax(0).tolist(), strict=True
                )
            )
            print(f"{dtype}, {num_rows} rows, {heads} heads: {', '.join(texts)}", flush=True)


if __name__ == "__main__":
    main()
