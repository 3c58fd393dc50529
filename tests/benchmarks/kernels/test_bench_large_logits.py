"""Errors of large logits, on a CPU."""

from __future__ import annotations

import torch

from benchmarks.kernels import bench_large_logits as bench


def test_torch_is_right_for_all_logits():
    for exponent in (0, 36):
        ((std, impl, error, *finite),) = bench.measure(exponent, torch.bfloat16, ["torch"], "cpu", tokens=64)
        assert (std, impl, finite) == (f"1e{exponent}", "torch", [True] * 4)
        assert float(error) < 0.02
