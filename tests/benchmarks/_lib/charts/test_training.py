"""Charts of training."""

from __future__ import annotations

from benchmarks._lib.charts import training as charts
from benchmarks._lib.results import RESULTS


def test_rates_follow_from_times() -> None:
    row = {"tokens_per_gpu": "8192", "quarter_ms": "200.0"}
    assert charts.by_time(row, "quarter_ms") == 40.96


def test_measured_table_is_drawn(tmp_path) -> None:
    charts.draw(RESULTS / "current/training_speed_h200_2gpu.csv", tmp_path / "chart.png")
    assert (tmp_path / "chart.png").stat().st_size > 20_000
