"""Charts of training."""

from __future__ import annotations

import pytest

from benchmarks._lib.charts import training as charts
from benchmarks._lib.results import RESULTS


def test_rates_follow_from_times() -> None:
    row = {"tokens_per_gpu": "8192", "quarter_ms": "200.0"}
    assert charts.by_time(row, "quarter_ms") == 40.96


@pytest.mark.parametrize("name", ["training_speed_h200_2gpu", "training_speed_4gpu"])
def test_measured_table_is_drawn(name: str, tmp_path) -> None:
    """The second has no quartiles."""
    charts.draw(RESULTS / f"current/{name}.csv", tmp_path / "chart.png")
    assert (tmp_path / "chart.png").stat().st_size > 20_000
