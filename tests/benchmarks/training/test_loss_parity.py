"""How losses are judged."""

from __future__ import annotations

from pathlib import Path

from benchmarks.training import loss_parity as parity


def parity_run(name: str, dtype: str, ranks: int, loss: float, error: str = "") -> parity.Run:
    losses = {} if error else {1: 5.0, 2: loss}
    return parity.Run(
        name, dtype, ranks, losses, {"balance": 1.0, "received_rows": 0, "lower_bound_rows": 0}, error=error
    )


def test_parity_is_judged_by_stock_in_fp32_and_by_what_bf16_costs_stock() -> None:
    losses = [
        ("stock", "fp32", 1, 4.0), ("stock", "bf16", 1, 4.04), ("magi", "fp32", 2, 4.00003),
        ("magi", "fp32", 8, 4.00005), ("magi", "bf16", 2, 4.079), ("magi", "bf16", 8, 4.081), ("long", "bf16", 8, 9.0),
    ]  # fmt: skip
    runs = [parity_run(*found) for found in losses]
    rows, failures = parity.judge(runs)
    assert len(rows) == len(runs)
    assert [failure[:21] for failure in failures] == ["magi fp32 on 8 GPUs d", "magi bf16 on 8 GPUs d"]


def test_parity_run_that_failed_or_stopped_early_is_no_success() -> None:
    early = parity_run("magi", "fp32", 2, 4.0)
    del early.losses[2]
    runs = [parity_run("stock", "fp32", 1, 4.0), parity_run("stock", "bf16", 1, 4.0), early]
    assert len(parity.judge(runs)[1]) == 1
    assert parity.judge([*runs[:2], parity_run("magi", "fp32", 2, 0.0, "no")])[1] == ["magi fp32 on 2 GPUs: no"]


def test_largest_number_of_gpus_runs_the_long_batch_and_one_gpu_the_references() -> None:
    assert {run.name for run in parity.runs_of(1, False)} == {"stock", "magi_dense", "magi"}
    assert [run.name for run in parity.runs_of(8, True)] == ["magi", "magi", "long"]


def test_schedules_are_compared_on_several_gpus_two_levels_where_a_node_has_several() -> None:
    assert [run.name for run in parity.runs_of(1, False, schedules=True)] == ["stock", "stock"]
    assert {run.name for run in parity.runs_of(2, True, True)} == {"magi", *parity.SCHEDULES} - {"magi_two_levels"}
    (two_levels, _) = (run for run in parity.runs_of(4, True, True) if run.name == "magi_two_levels")
    assert " ".join(two_levels.args(Path("data"))).count("--hierarchical-context-parallel-sizes 2 2") == 1
    found = [("stock", "fp32", 1, 4.0), ("stock", "bf16", 1, 4.04), ("magi_1_stage", "fp32", 2, 4.1)]
    assert len(parity.judge([parity_run(*run) for run in found])[1]) == 1


def test_backends_are_compared_on_one_gpu_in_the_dtypes_that_they_take() -> None:
    runs = parity.runs_of(1, True, backends=True)
    assert [run.name for run in runs if run.dtype == "fp32"] == ["stock", "magi_triton"]
    assert [run.name for run in runs if run.dtype == "bf16"] == ["stock", *parity.BACKENDS]
    found = [("stock", "fp32", 1, 4.0), ("stock", "bf16", 1, 4.04), ("magi_cudnn", "bf16", 1, 4.09)]
    assert len(parity.judge([parity_run(*run) for run in found])[1]) == 1
