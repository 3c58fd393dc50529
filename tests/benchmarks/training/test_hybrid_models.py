"""How losses of hybrid models are judged, and what trains."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from benchmarks.training import hybrid_models as bench
from benchmarks.training.hybrid_models import Kind, Run


def judge(losses: dict[Run, float]) -> list[str]:
    return bench.judge({run: {1: 5.0, 2: loss} for run, loss in losses.items()})[1]


FP32, BF16 = Kind("*-", "local", "fp32"), Kind("*-", "te", "bf16")
REFERENCE = Run(FP32, hybrid=False)


def test_losses_are_judged_by_stock_in_fp32_and_by_what_the_kind_costs_stock() -> None:
    stock = {REFERENCE: 4.0, Run(FP32): 4.0, Run(BF16): 4.004}
    assert judge({**stock, Run(FP32, "magi", 2): 4.00003, Run(BF16, "magi", 2): 3.9921}) == []
    found = judge({**stock, Run(FP32, "magi", 2): 4.00005, Run(BF16, "magi", 2, False): 3.9919})
    assert [text.partition(":")[0] for text in found] == ["*-", "*-"]
    assert "local:fp32 hybrid magi CP 2" in found[0] and "te:bf16 gpt magi CP 2" in found[1]


def test_transformer_engines_layers_are_judged_by_what_its_unfused_attention_differs_by() -> None:
    stock = {REFERENCE: 4.0, Run(BF16): 4.004, Run(BF16, "unfused"): 4.0036}
    assert judge({**stock, Run(BF16, "magi"): 4.0047, Run(BF16, "magi", 2): 4.0033}) == []
    found = judge({**stock, Run(BF16, "magi"): 4.0047, Run(BF16, "magi", 2): 4.0049})
    assert len(found) == 1 and "magi CP 2" in found[0] and "2.25e-04" in found[0]


def test_run_that_stopped_early_is_no_success() -> None:
    found = {REFERENCE: {1: 5.0, 2: 4.0}, Run(FP32, "magi"): {1: 5.0}}
    rows, exceeded = bench.judge(found)
    assert len(rows) == 2 and len(exceeded) == 1
    assert all(len(row) == len(bench.LOSSES_HEADER) for row in rows)


def test_each_kind_is_trained_by_stock_and_with_magi_as_either_model_over_all_ranks() -> None:
    kind = Kind("*E", "te", "bf16")
    runs = bench.runs_of(kind, 2)
    assert runs[0] == bench.reference_of(kind) == Run(Kind("*E", "te", "fp32"), "unfused", hybrid=False)
    assert bench.reference_of(Kind("*E", "local", "bf16")) == Run(Kind("*E", "local", "fp32"), hybrid=False)
    assert bench.reference_of(BF16) == REFERENCE
    assert Run(kind) in runs and Run(kind, "unfused") in runs
    assert {(run.cp_size, run.hybrid) for run in runs if run.attention == "magi"} == {(1, True), (2, True), (2, False)}
    assert len(bench.runs_of(FP32, 1)) == 4  # CP 1 is all ranks


def test_a_kind_is_read_from_the_command_line_and_names_its_layers() -> None:
    kind = bench.parse_kind("*E:te:fp8")
    assert str(kind) == "*E:te:fp8"
    assert kind.args("losses", True)[-2:] == ["--hybrid-layer-pattern", "*E*E*E*E"]
    assert "--hybrid-layer-pattern" not in kind.args("times", False)
    for text in ("*M:te:fp8", "*-:te", "*-:te:bf16:1"):
        with pytest.raises(argparse.ArgumentTypeError, match="PATTERN"):
            bench.parse_kind(text)


def test_figures_are_of_steps_after_the_first_ones_and_compare_losses_with_the_gpt() -> None:
    kind = Kind("*-", "local", "bf16")
    warm_up = [900.0] * bench.WARM_UP
    turns = [bench.Training({1: 5.0, 2: 4.0}, step_ms=[*warm_up, 10.0, 11.0, 12.0])] * 2
    gpt = bench.Times(kind, False, turns)
    hybrid = bench.Times(kind, True, [bench.Training({1: 5.0, 2: 4.04}, step_ms=[*warm_up, 12.0, 13.0, 14.0])])
    made = bench.Bench(Path(), argparse.Namespace(tokens=64))
    row = dict(zip(bench.TIMES_HEADER, made.times_row(hybrid, [gpt, hybrid]), strict=True))
    got = [row[name] for name in ("model", "median_ms", "steps", "difference_of_losses")]
    assert got == ["hybrid", "13.00", 3, "1.0e-02"]
    assert made.times_row(gpt, [gpt, hybrid])[7] == "11.00 11.00"
    assert made.times_row(bench.Times(kind, True), [gpt]) is None
