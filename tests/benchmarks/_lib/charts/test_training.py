"""Charts of training."""

from __future__ import annotations

import pytest

from benchmarks._lib.charts import training as charts
from benchmarks._lib.results import RESULTS


def test_few_steps_are_compared_with_the_same_steps_of_magi() -> None:
    ratios = charts.steps_like_magi(RESULTS / "current/training_speed_documents_2gpu.csv")
    assert ratios["documents", "32768", "te_all_gather"] == pytest.approx((1111 + 639) / (870 + 557))
    assert ratios["documents", "32768", "magi"] == 1
