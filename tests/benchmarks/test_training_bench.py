"""Figures of the training benchmarks, without a GPU."""

from __future__ import annotations

import argparse
from pathlib import Path

import bench_training as bench
import pytest
import run_gpu_te as te
import run_gpu_training as parity
import torch
import training_charts
import training_session
from no_attention import no_attention
from training_session import Training


def run(mask: str, provider: str, step_ms: float, tokens: int = 4096) -> bench.Run:
    steps = [9 * step_ms, step_ms, step_ms, step_ms]
    squares = [float((2 * tokens) ** 2 / 4)] * 4
    return bench.Run(mask, tokens, provider, training=Training({4: 2.5}, {}, steps, squares, 1.0, 2.0, 0, 1.0))


@pytest.mark.parametrize(("mask", "share"), [("causal", 1.0), ("documents", 0.25)])
def test_operations_count_parameters_once_and_visible_pairs(mask: str, share: float, monkeypatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    training = run(mask, "magi", 1.0)
    tokens = 8192
    linear = 6 * tokens * (16 * (2048 * (16 + 8) * 128 + 2048 * 2048 + 3 * 2048 * 8192) + 2048 * 32000)
    pairs = 12 * 16 * 128 * 16 * (share * tokens**2 + tokens) / 2
    assert bench.operations(training, training.training, slice(2, 4)) == pytest.approx(linear + pairs)


def test_pairs_of_a_window_are_counted_one_by_one(monkeypatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    windowed = run("window_sink", "magi", 1.0, tokens=1000)
    full, narrow = (sum(min(i + 1, limit) for i in range(2000)) for limit in (2000, bench.WINDOW))
    assert bench.visible_pairs(windowed, windowed.training, slice(0, 4)) == 8 * (full + narrow)


def test_magi_is_compared_with_the_best_of_tes_ways_for_the_same_mask_and_length() -> None:
    runs = [run("causal", "te_p2p", 30.0), run("causal", "te_a2a", 24.0), run("causal", "magi", 20.0),
            run("documents", "te_a2a", 1.0), run("causal", "te_a2a", 1.0, tokens=8192)]  # fmt: skip
    table = {tuple(row[:3]): row for row in bench.figures(runs)}
    assert table["causal", 4096, "magi"][-1] == "1.200"
    assert table["causal", 4096, "te_a2a"][-1] == ""


def test_captured_steps_are_compared_with_te_too_and_no_way_of_te() -> None:
    runs = [run("causal", "te_p2p", 30.0), run("causal", "magi", 20.0), run("causal", "magi_graph", 15.0)]
    table = {row[2]: row for row in bench.figures(runs)}
    assert (table["magi"][-1], table["magi_graph"][-1]) == ("1.500", "2.000")
    arguments = bench.run_args(runs[-1])
    assert "full_iteration" in arguments
    assert "--cp-comm-type" not in arguments


def test_first_half_of_the_steps_is_not_timed() -> None:
    row = bench.figures([run("causal", "magi", 20.0)])[0]
    assert row[4:7] == ["20.0", "20.0", f"{1e3 * 4096 / 20:.0f}"]


def test_runs_may_name_their_own_number_of_steps() -> None:
    assert bench._run("documents:te_a2a:32768:8") == ("documents", "te_a2a", 32768, 8)
    assert bench._run("causal:magi:8192")[3] is None
    with pytest.raises(argparse.ArgumentTypeError, match="expected one of"):
        bench._run("causal:magi:8192:8:1")


def test_failed_run_is_a_row_with_its_reason() -> None:
    failed = bench.Run("documents", 4096, "te_p2p", error="Traceback\n  ...\nAssertionError: no backend\n")
    assert bench.figures([failed])[0][:5] == ["documents", 4096, "te_p2p", "documents", "AssertionError: no backend"]


def test_what_te_cannot_do_is_named() -> None:
    assert bench.Run("window_sink", 1, "te_p2p").ran == ("causal", "full attention, no sink")
    assert bench.Run("window_sink", 1, "te_a2a").ran == ("window_sink", "window_sink")
    arguments = bench.run_args(bench.Run("window_sink", 1, "te_all_gather"))
    assert "--window-size" in arguments
    assert "--softmax-type" not in arguments


@pytest.mark.parametrize(
    ("kernel", "group"),
    [("ffa_backward", "attention"), ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop", "attention"),
     ("nvjet_sm90_tss_256x128", "matrix products"), ("ncclDevKernel_SendRecv(x)", "communication"),
     ("magi_put_rows", "communication"), ("triton_poi_fused_add", "other")],
)  # fmt: skip
def test_kernels_are_sorted_by_name(kernel: str, group: str) -> None:
    assert bench.group_of(kernel) == group


def judge(losses: dict[str, float], sinks: dict[str, float] | None = None, model: str = "dense") -> dict[str, list]:
    results = {
        f"{model}/{name}": te.Result({1: 5.0, 2: loss}, {"a": [1.0, sinks[name]]} if sinks else {})
        for name, loss in losses.items()
    }
    jobs = [job for job in te.JOBS if f"{job.model}/{job.name}" in results]
    return {row[1]: row for row in te.judge(jobs, results)}


def test_run_is_inside_if_it_is_not_twice_as_far_as_stock_is_from_stock() -> None:
    rows = judge({"stock": 4.0, "stock_unfused": 4.004, "magi_cp2": 4.0079, "magi_pp2": 4.0081})
    assert [rows[name][-1] for name in ("magi_cp2", "magi_pp2")] == ["inside", "FAILED"]


def test_gradients_of_sinks_are_judged_and_tes_a2a_does_not_widen_their_band() -> None:
    losses = dict.fromkeys(("stock", "stock_unfused", "stock_cp2_a2a", "magi_cp2", "magi_tp2_sp"), 4.0)
    sinks = {"stock": 0.5, "stock_unfused": 0.51, "stock_cp2_a2a": 1.0, "magi_cp2": 0.519, "magi_tp2_sp": 0.6}
    rows = judge(losses, sinks, "sink")
    assert [rows[name][-1] for name in ("magi_cp2", "magi_tp2_sp")] == ["inside", "FAILED"]


def test_run_that_stopped_early_is_no_success() -> None:
    results = {"dense/stock": te.Result({1: 5.0, 2: 4.0}), "dense/magi_cp2": te.Result({1: 5.0})}
    jobs = [job for job in te.JOBS if f"{job.model}/{job.name}" in results]
    assert te.judge(jobs, results)[-1][-1] == "FAILED"


def test_larger_model_counts_its_own_layers_and_heads(monkeypatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    one, large = run("causal", "magi", 1.0), run("causal", "magi", 1.0)
    large.model = bench.MODELS["llama_8b"]
    tokens = 8192
    linear = 32 * (4096 * (32 + 2 * 8) * 128 + 32 * 128 * 4096 + 3 * 4096 * 14336) + 4096 * 32000
    pairs = 12 * 32 * 128 * 32 * tokens * (tokens + 1) / 2
    assert bench.operations(large, large.training, slice(2, 4)) == pytest.approx(6 * tokens * linear + pairs)
    assert bench.visible_pairs(large, large.training, slice(2, 4)) == 2 * bench.visible_pairs(
        one, one.training, slice(2, 4)
    )


def test_groups_serve_runs_of_the_same_parallelism_and_attention_alone() -> None:
    asked = [
        "--seed 1 --context-parallel-size 2", "--context-parallel-size 2 --lr 2",
        "--context-parallel-size 2 --attention-backend magi",
        "--context-parallel-size 4 --hierarchical-context-parallel-sizes 2 2",
        "--context-parallel-size 4 --hierarchical-context-parallel-sizes 4 1",
    ]  # fmt: skip
    first, same, *others = [training_session._parallelism(line.split()) for line in asked]
    assert first == same
    assert all(other not in (first, *others[:n]) for n, other in enumerate(others))


def test_last_run_that_repeats_another_is_in_the_table(monkeypatch, tmp_path) -> None:
    done = run("causal", "te_p2p", 20.0).training
    monkeypatch.setattr(bench.TrainingSession, "run", lambda self, argv, around_step: done)
    monkeypatch.setattr(bench, "_gather", lambda made: None)
    asked = [bench._run(text) for text in ("causal:te_p2p:4096", "window_sink:te_p2p:4096")]
    bench.bench(
        argparse.Namespace(runs=asked, providers=[], model="llama_1b", steps=4, further=[], profile=None, out=tmp_path)
    )
    rows = (tmp_path / "training.csv").read_text().splitlines()
    assert "full attention, no sink" in rows[-1]


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


def test_idle_time_is_what_no_kernel_covers() -> None:
    assert bench.idle([]) == 0.0
    assert bench.idle([(5.0, 7.0), (0.0, 4.0), (1.0, 2.0), (10.0, 11.0)]) == 4.0


def test_steps_without_attention_call_none_and_give_every_input_a_gradient() -> None:
    core_attention = pytest.importorskip("megatron_magi.mcore.core_attention", exc_type=ImportError)
    stock = core_attention.distributed_attention
    q, k, v = (torch.ones(5, heads, 8, requires_grad=True) for heads in (4, 2, 2))
    sink = torch.zeros(1, 4, requires_grad=True)
    with no_attention():
        out, _ = core_attention.distributed_attention(q, k, v, "plan", "group", config=None, sink=sink)
    assert core_attention.distributed_attention is stock
    out.backward(torch.full_like(q, 3.0))
    assert [x.grad.unique().tolist() for x in (q, k, v, sink)] == [[3.0], [0.0], [0.0], [0.0]]


def test_few_steps_are_compared_with_the_same_steps_of_magi() -> None:
    ratios = training_charts.steps_like_magi(Path(bench.__file__).parent / "results/training_speed_documents_2gpu.csv")
    assert ratios["documents", "32768", "te_all_gather"] == pytest.approx((1111 + 639) / (870 + 557))
    assert ratios["documents", "32768", "magi"] == 1
