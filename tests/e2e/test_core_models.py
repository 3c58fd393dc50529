"""Megatron's GPTModel without its command line, on microbatches of any length."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_magi.testing.megatron_launch import launch

SCRIPT = str(Path(__file__).with_name("core_loop.py"))


def losses(num_ranks: int, *args: str) -> list[float]:
    return json.loads((launch(args, num_ranks, script=SCRIPT).workdir / "losses.json").read_text())


@pytest.mark.parametrize("model", ["dense", "experts", "predicting", "averaged"])
def test_dispatched_microbatches_of_any_length_train_as_stock_on_one_rank(model: str) -> None:
    expected = losses(1, "stock", model)
    assert len(set(expected)) == 4
    for num_ranks in (1, 2):
        assert losses(num_ranks, "magi", model) == pytest.approx(expected, rel=1e-5)
