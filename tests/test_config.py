"""Configuration refuses what no plan could be made with, by name."""

from __future__ import annotations

import pytest

from megatron_magi.config import AttendConfig, CommConfig, CostModel, DispatchConfig, OverlapConfig


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: DispatchConfig(algorithm="best"), "algorithm"),
        (lambda: DispatchConfig(chunk_size=0), "chunk_size"),
        (lambda: DispatchConfig(chunk_size=128.5), "chunk_size"),
        (lambda: DispatchConfig(alignment=0), "alignment"),
        (lambda: DispatchConfig(balance_tolerance=0.5), "balance_tolerance"),
        (lambda: DispatchConfig(balance_tolerance=float("nan")), "balance_tolerance"),
        (lambda: CostModel(gbytes_per_s=0), "gbytes_per_s"),
        (lambda: CostModel(tflops=float("nan")), "tflops"),
        (lambda: CostModel(stage_latency_us=-1), "stage_latency_us"),
        (lambda: CostModel(head_dim_v=0), "head_dim_v"),
        (lambda: OverlapConfig(degree=-1), "degree"),
        (lambda: OverlapConfig(max_degree=0), "max_degree"),
        (lambda: AttendConfig(impl="fast"), "impl"),
        (lambda: AttendConfig(forward_sm_margin=-4), "forward_sm_margin"),
        (lambda: CommConfig(impl="nccl"), "impl"),
        (lambda: CommConfig(dsink_all_reduce="max"), "dsink_all_reduce"),
    ],
)
def test_values_out_of_range_are_refused_by_name(make, name) -> None:
    with pytest.raises(ValueError, match=rf"^{name}:"):
        make()
