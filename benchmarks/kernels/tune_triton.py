"""Times sizes of tiles, warps and stages of the kernels in Triton on this GPU, for `backends/triton/tuning.py`.

    python -m benchmarks.kernels.tune_triton [--csv FILE] [--head-dims 64 128] [--kernels forward ...] [--length N]

Of each kernel and head dim all candidates are compiled, and timed on causal and full masks in turns; those that do not
fit the GPU say so. A backward is timed whole, with the sizes of one of its kernels changed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import get_args

import torch

from benchmarks._lib.provenance import table_parser, write_csv
from megatron_magi.backends.triton import attention, tuning
from megatron_magi.backends.triton.tuning import Kernel, Sizes
from megatron_magi.mask import builders
from megatron_magi.ops.slice_passes import row_delta, slice_attention_backward, slice_attention_forward

HEADS_Q, HEADS_KV = 32, 8
HEADER = ["kernel", "head_dim", "mask", "rows", "columns", "warps", "stages", "described", "ms", "tflops"]
CANDIDATES: dict[Kernel, list[tuple[int, ...]]] = {
    "forward": [
        (128, 128, 8, 3), (128, 64, 8, 4), (128, 64, 8, 3), (64, 64, 4, 3), (64, 64, 4, 2), (128, 64, 4, 3),
        (128, 64, 8, 2), (128, 128, 4, 2), (64, 64, 4, 3, True),
    ],
    "query_gradient": [
        (128, 64, 8, 3), (64, 64, 4, 2), (128, 32, 4, 3), (128, 64, 8, 4), (64, 32, 4, 3), (64, 64, 4, 3),
        (128, 32, 8, 4), (64, 32, 4, 4), (64, 128, 8, 2), (64, 64, 4, 2, True), (64, 64, 4, 3, True),
    ],
    "key_gradient": [
        (128, 64, 8, 3), (64, 32, 4, 3), (128, 32, 8, 3), (64, 32, 4, 2), (64, 64, 4, 3), (64, 32, 4, 4),
        (128, 32, 8, 4), (128, 64, 4, 3), (64, 64, 4, 2), (64, 64, 4, 2, True), (64, 64, 4, 3, True),
    ],
}  # fmt: skip


def time_ms(run: Callable[[], object], repeats: int = 5) -> float:
    """Median of a call on the device."""
    run()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times)[len(times) // 2]


def chosen(kernel: Kernel, found: Sizes, asked: Kernel, *rest: object, **options: object) -> Sizes:
    """`tuning.sizes`, but for one kernel."""
    return found if asked == kernel else tuning.sizes(asked, *rest, **options)


def measure(kernel: Kernel, dim: int, length: int) -> list[list]:
    """Rows of the table for one kernel and head dim, the fastest first."""
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v, dout = (
        torch.randn(length, heads, dim, device="cuda", dtype=torch.bfloat16, generator=generator)
        for heads in (HEADS_Q, HEADS_KV, HEADS_KV, HEADS_Q)
    )
    rows = []
    for name, mask in (("causal", builders.causal(length)), ("full", builders.full(length))):
        flops = 4.0 * mask.area * HEADS_Q * dim
        attention.sizes = tuning.sizes
        out, lse, _ = slice_attention_forward(q, k, v, mask.bands, impl="triton")
        delta = row_delta(dout, out, "torch")
        for candidate in (Sizes(*numbers) for numbers in CANDIDATES[kernel]):
            attention.sizes = partial(chosen, kernel, candidate)
            try:
                if kernel == "forward":
                    ms = time_ms(lambda m=mask: slice_attention_forward(q, k, v, m.bands, impl="triton"))
                else:
                    ms = time_ms(
                        lambda m=mask, s=lse, d=delta: slice_attention_backward(
                            dout, q, k, v, s, d, m.bands, impl="triton"
                        )
                    )
            except Exception as error:  # noqa: BLE001  (whatever is wrong with it, it is no candidate)
                print(kernel, dim, name, candidate, type(error).__name__, str(error)[:80], flush=True)
                continue
            rate = flops * (1 if kernel == "forward" else 2.5) / ms / 1e9
            rows.append([kernel, dim, name, *map(int, candidate), f"{ms:.3f}", f"{rate:.0f}"])
            print(*rows[-1], flush=True)
    attention.sizes = tuning.sizes
    return sorted(rows, key=lambda row: (row[2], float(row[-2])))


def main() -> None:
    """Measures."""
    parser = table_parser(__doc__)
    parser.add_argument("--head-dims", type=int, nargs="+", default=[128, 64])
    parser.add_argument("--kernels", nargs="+", choices=get_args(Kernel), default=list(get_args(Kernel)))
    parser.add_argument("--length", type=int, default=16384)
    args = parser.parse_args()
    rows = []
    for dim, kernel in itertools.product(args.head_dims, args.kernels):
        rows += measure(kernel, dim, args.length)
        write_csv(args.csv, HEADER, rows)


if __name__ == "__main__":
    main()
