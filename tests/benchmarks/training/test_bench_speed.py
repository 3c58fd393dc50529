"""Figures of the training benchmarks, without a GPU."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest

from benchmarks._lib.trainer import Training
from benchmarks.training import bench_speed as bench
from megatron_magi.testing.megatron_launch import launch


def run(mask: str, provider: str, step_ms: float, tokens: int = 4096) -> bench.Run:
    steps = [9 * step_ms] * bench.WARM_UP + [step_ms] * 4
    squares = [float((2 * tokens) ** 2 / 4)] * len(steps)
    return bench.Run(mask, tokens, provider, training=Training({8: 2.5}, {}, steps, squares, 1.0, 2.0, 0, 1.0))


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


def test_what_ran_another_mask_is_not_compared() -> None:
    runs = [run("window_sink", "te_p2p", 10.0), run("window_sink", "te_a2a", 30.0), run("window_sink", "magi", 20.0)]
    table = {row[2]: row for row in bench.figures(runs)}
    assert table["magi"][-1] == "1.500"
    assert bench.figures([runs[0], runs[2]])[0][-1] == ""


def test_captured_steps_are_compared_with_te_too_and_no_way_of_te() -> None:
    runs = [run("causal", "te_p2p", 30.0), run("causal", "magi", 20.0), run("causal", "magi_graph", 15.0)]
    table = {row[2]: row for row in bench.figures(runs)}
    assert (table["magi"][-1], table["magi_graph"][-1]) == ("1.500", "2.000")
    arguments = bench.run_args(runs[-1])
    assert "full_iteration" in arguments
    assert "--cp-comm-type" not in arguments


def test_steps_that_warm_up_are_not_timed_and_the_spread_is_shown() -> None:
    timed = run("causal", "magi", 20.0)
    row = bench.figures([timed])[0]
    assert row[4:10] == ["20.0", "20.0", "20.0", "20.0", "4", f"{1e3 * 4096 / 20:.0f}"]
    timed.training.step_ms[-4:] = [10.0, 20.0, 30.0, 40.0]
    assert bench.figures([timed])[0][4:9] == ["25.0", "10.0", "17.5", "32.5", "4"]
    timed.warm_up = 6
    assert bench.figures([timed])[0][4:9] == ["35.0", "30.0", "32.5", "37.5", "2"]


def test_every_step_is_in_a_table_of_its_own() -> None:
    header, rows = bench.step_times([run("causal", "magi", 20.0), bench.Run("causal", 4096, "te_a2a", error="x")])
    assert (len(header), header[-1]) == (11, "step_8_ms")
    assert rows == [["causal", 4096, "magi", *["180.0"] * 4, *["20.0"] * 4]]


def test_failed_run_has_as_many_cells_as_others() -> None:
    failed = bench.Run("documents", 4096, "te_p2p", error="ValueError: no backend\n")
    assert len(bench.figures([failed])[0]) == len(bench.HEADER) == len(bench.figures([run("causal", "magi", 1.0)])[0])


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


def test_slices_have_the_layers_of_the_models_that_they_are_of() -> None:
    """Qwen3-30B-A3B: 48 layers, 30.5 billion parameters, 3.3 billion of them active; two embeddings of 151,936."""
    head = bench.VOCABULARY
    large, two = bench.MODELS["llama_8b"], bench.MODELS["llama_8b_2_layers"]
    assert (large.parameters - 4096 * head) / 32 == (two.parameters - 4096 * head) / 2
    moe = bench.MODELS["qwen3_30b_a3b_2_layers"]
    active = (moe.parameters - 2048 * head) / 2
    idle = 3 * moe.hidden * moe.ffn * (moe.experts - moe.experts_a_token)
    embeddings = 2 * 151936 * 2048
    assert 48 * active + embeddings == pytest.approx(3.3e9, rel=0.02)
    assert 48 * (active + idle) + embeddings == pytest.approx(30.5e9, rel=0.005)


def test_slices_train(tmp_path, monkeypatch) -> None:
    """Over two ranks on CPUs, with narrow layers: a dense model, and one whose experts are spread over the ranks."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    bench.write_documents(tmp_path, 2000)
    run = launch([str(tmp_path / "text")], 2, script=str(Path(__file__).with_name("train_slices.py")))
    found = re.findall(r"^slice (\w+) 1 steps, losses (\d+\.\d+)$", run.stdout, re.MULTILINE)
    assert {name for name, _ in found} == {name for name in bench.MODELS if "_2_layers" in name}
    assert all(float(loss) == pytest.approx(10.37, abs=0.1) for _, loss in found)  # ln(32000)


def test_last_run_that_repeats_another_is_in_the_table(monkeypatch, tmp_path) -> None:
    done = run("causal", "te_p2p", 20.0).training
    monkeypatch.setattr(bench.TrainingSession, "run", lambda self, argv, around_step: done)
    monkeypatch.setattr(bench, "_gather", lambda made: None)
    asked = [bench._run(text) for text in ("causal:te_p2p:4096", "window_sink:te_p2p:4096")]
    bench.bench(
        argparse.Namespace(
            runs=asked, providers=[], model="llama_1b", steps=4, warm_up=4, further=[], profile=None, out=tmp_path
        )
    )
    rows = (tmp_path / "training.csv").read_text().splitlines()
    assert "full attention, no sink" in rows[-1]


def test_idle_time_is_what_no_kernel_covers() -> None:
    assert bench.idle([]) == 0.0
    assert bench.idle([(5.0, 7.0), (0.0, 4.0), (1.0, 2.0), (10.0, 11.0)]) == 4.0
