"""Configuration refuses what no plan could be made with, by name."""

from __future__ import annotations

import pytest

from megatron_magi.config import AttendConfig, CommConfig, CostModel, DispatchConfig, MagiConfig, OverlapConfig


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: DispatchConfig(algorithm="best"), "algorithm"),
        (lambda: DispatchConfig(algorithm="zig_zag"), "algorithm"),
        (lambda: DispatchConfig(rates="H100"), "rates"),
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
        (lambda: DispatchConfig(algorithm=["affinity"]), "algorithm"),
        (lambda: DispatchConfig(chunk_size=True), "chunk_size"),
        (lambda: DispatchConfig(chunk_size=2**63), "chunk_size"),
        (lambda: DispatchConfig(pad_size=-1), "pad_size"),
        (lambda: DispatchConfig(uneven_shard="no"), "uneven_shard"),
        (lambda: DispatchConfig(balance_tolerance="1.01"), "balance_tolerance"),
        (lambda: DispatchConfig(balance_tolerance=True), "balance_tolerance"),
        (lambda: CostModel(tflops="fast"), "tflops"),
        (lambda: CostModel(stage_latency_us="fast"), "stage_latency_us"),
        (lambda: CostModel(num_heads_q=10**400), "num_heads_q"),
        (lambda: OverlapConfig(hide_tail_reduce=1), "hide_tail_reduce"),
        (lambda: OverlapConfig(cost=None), "cost"),
        (lambda: AttendConfig(impl=None), "impl"),
        (lambda: AttendConfig(deterministic="yes"), "deterministic"),
        (lambda: AttendConfig(sanity_check="yes"), "sanity_check"),
        (lambda: CommConfig(verify=None), "verify"),
        (lambda: MagiConfig(None), "dispatch"),
        (lambda: MagiConfig(dispatch=OverlapConfig(), overlap=DispatchConfig()), "dispatch"),
        (lambda: MagiConfig(overlap={}), "overlap"),
        (lambda: MagiConfig(attend=CommConfig()), "attend"),
        (lambda: MagiConfig(comm=AttendConfig), "comm"),
    ],
)
def test_values_out_of_range_are_refused_by_name(make, name) -> None:
    with pytest.raises(ValueError, match=rf"^{name}:"):
        make()
